"""Checks of `waypost doctor` on Valkey and Redis: durability, eviction, memory, rights, and bytes in use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from waypost.errors import WaypostError
from waypost.formatting import format_bytes, format_count
from waypost.store.checkup import Checkup, Finding, Findings, note, ok, wrong
from waypost.store.valkey.command import ValkeyCall, command
from waypost.store.valkey.executor import read_info
from waypost.store.valkey.scripts import APART, SCRIPTS, script
from waypost.views import Stats

if TYPE_CHECKING:
    from waypost.store.valkey.store import ValkeyStore

#: A server that is this full is soon full.
MEMORY_SHARE_MAX = 0.8
#: Queues whose keys are measured, the largest first; and elements of a key that the server samples.
QUEUES_MEASURED, ELEMENTS_MEASURED = 10, 50
#: Limits of the scan for keys with a TTL: steps, keys per step, and keys to find.
SCAN_STEPS, SCAN_KEYS, SAMPLES = 20, 500, 50
#: The keys that messages lie in, by their place in `keys_of`, and that of the journal.
MESSAGE_KEYS, JOURNAL_KEY = (1, 2, 3, 4, 5, 6, 7, 8, 9), 10
COMMAND_CALL = re.compile(r"call\('([A-Z]+)'")
#: Scripts that begin like all others, with functions that write, and use none of these.
READ_ONLY = ("stats", "peek", "workers", "schedules", "groups")
WRITE_COMMANDS = frozenset(
    (
        "DEL", "HDEL", "HINCRBY", "HSET", "HSETNX", "LPOP", "LPUSH", "LTRIM", "PEXPIRE", "RPUSH", "SADD", "SET", "SPOP",
        "SREM", "UNLINK", "XADD", "XTRIM", "ZADD", "ZPOPMIN", "ZREM", "ZREMRANGEBYSCORE",
    )
)  # fmt: skip
#: How scripts check the type of a key before they write: each begins with `must_be` of base.lua.
TYPE_CHECKS = frozenset(("HLEN", "LLEN", "SCARD", "XLEN", "ZCARD"))
#: Commands that no script names: those that send scripts, and those sent outside of scripts.
OTHER_COMMANDS = ("EVALSHA", "SCRIPT", "INFO", "PUBLISH", "SUBSCRIBE")


def run_command(server: Any, *arguments: bytes | str, decode: Any = None) -> Any:
    """One command of the server's own."""
    parts = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    return server.run(ValkeyCall("doctor", "", command(*parts), decode or (lambda reply: reply)))


class ValkeyCheckup(Checkup):
    """A Valkey store."""

    def __init__(self, store: ValkeyStore, executor: Any) -> None:
        self._store = store
        self._executor = executor

    def check_list(self, listed: Sequence[str], *, mend: bool) -> tuple[list[str], list[Finding]]:
        """The list of queues lies beside them, on a Cluster on another node: it can miss some."""
        missing = unlisted(self._store, self._executor, listed)
        return sorted({*listed, *missing}), list(check_unlisted(self._store, self._executor, missing, mend=mend))

    def check_server(self, found: Sequence[Stats]) -> Findings:
        """Each server that holds a part of the store."""
        servers = self._executor.servers()
        for server in servers:
            where = f" ({server.display_name})" if len(servers) > 1 else ""
            info = run_command(server, "INFO", decode=read_info)
            yield from check_server(server, info, where)
            yield from check_memory(info, where)
            yield from check_rights(self._store, server, where)
        yield from check_bytes(self._store, self._executor, found)


def unlisted(store: Any, executor: Any, listed: Sequence[str]) -> list[str]:
    """Queues that have keys and are missing from the list of queues: found by a scan of all keys, in bounded steps."""
    known, found = set(listed), set[str]()
    begins, ends = f"{{{store.namespace}:".encode(), b"}:queue"
    for server in executor.servers():
        cursor = b"0"
        while True:
            try:
                cursor, keys = run_command(
                    server, "SCAN", cursor, "MATCH", f"{{{store.namespace}:*}}:queue", "COUNT", "1000"
                )
            except WaypostError:
                break  # this user may not scan
            found |= {
                key[len(begins) : -len(ends)].decode(errors="replace")
                for key in keys
                if key.startswith(begins) and key.endswith(ends)
            }
            if cursor == b"0":
                break
    return sorted(found - known)


def check_unlisted(store: Any, executor: Any, names: Sequence[str], *, mend: bool) -> Findings:
    """Queues that listings, metrics and pipelines miss."""
    if not names:
        yield ok("list of queues", "no queue is missing from the list of queues")
        return
    if mend:
        listed = f"{store.namespace}:queues".encode()
        arguments = [name.encode() for name in names]
        executor.run(ValkeyCall("doctor", "", command(b"SADD", listed, *arguments), lambda reply: None, place=listed))
        yield note("list of queues", f"added to the list of queues: {', '.join(names)}", queues=list(names))
        return
    yield wrong("list of queues", f"missing from the list of queues: {', '.join(names)}", "a publish or a claim that "
                "gets messages adds a queue within a minute; `waypost doctor --mend` adds it now",
                queues=list(names))  # fmt: skip


def check_server(server: Any, info: dict[str, str], where: str) -> Findings:
    """Its release, and what it loses in a crash."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "?")
    yield ok("server", f"{name} {version}{where}", version=version)
    if info.get("aof_enabled") != "1":
        yield wrong("durability", f"no append-only file{where}: a restart loses messages that were acknowledged",
                    "set appendonly yes", appendonly=False)  # fmt: skip
    else:
        yield check_fsync(server, info, where)
    eviction, limit = info.get("maxmemory_policy", "noeviction"), int(info.get("maxmemory", "0"))
    if eviction == "noeviction":
        yield ok("eviction", f"nothing is evicted{where} ({eviction})", policy=eviction)
    elif limit:
        yield wrong("eviction", f"the server may remove messages when it is full{where} ({eviction})",
                    "set maxmemory-policy noeviction", policy=eviction)  # fmt: skip
    else:
        yield note("eviction", f"with a limit of memory the server would remove messages{where} ({eviction})",
                   "set maxmemory-policy noeviction before you set maxmemory", policy=eviction)  # fmt: skip


def check_fsync(server: Any, info: dict[str, str], where: str) -> Any:
    """How soon what is written is on the disk."""
    if info.get("aof_last_write_status", "ok") != "ok":
        return wrong("durability", f"the server cannot write its append-only file{where}", "make room on its disk")
    try:
        reply = run_command(server, "CONFIG", "GET", "appendfsync")
        fsync = reply[1].decode() if len(reply) > 1 else "unknown"
    except WaypostError:
        return note("durability", f"an append-only file{where}; this user may not read how often it is synced",
                    "check appendfsync yourself", appendonly=True)  # fmt: skip
    if fsync == "always":
        return ok("durability", f"every write is on the disk{where} (appendfsync always)", appendfsync=fsync)
    if fsync == "no":
        return wrong("durability", f"a crash of the machine can lose many seconds{where} (appendfsync no)",
                     "set appendfsync everysec or always", appendfsync=fsync)  # fmt: skip
    return note("durability", f"a crash of the machine can lose up to a second{where} (appendfsync {fsync})",
                'set appendfsync always, or give clients durability="fsync", if no second may be lost',
                appendfsync=fsync)  # fmt: skip


def check_memory(info: dict[str, str], where: str) -> Findings:
    """How full it is."""
    used, limit = int(info.get("used_memory", "0")), int(info.get("maxmemory", "0"))
    text = f"{format_bytes(used)} in use{where}"
    if not limit:
        yield note("memory", f"{text}, without a limit", "set maxmemory, so that a full server refuses publishes "
                   "before the machine ends it", used=used)  # fmt: skip
    elif used > MEMORY_SHARE_MAX * limit:
        yield wrong("memory", f"{text} of {format_bytes(limit)}", "add workers, purge what is not needed, set "
                    "max_pending on large queues, or raise maxmemory", used=used, limit=limit)  # fmt: skip
    else:
        yield ok("memory", f"{text} of {format_bytes(limit)}", used=used, limit=limit)


# ---- rights ----------------------------------------------------------------------------------------------------------


def arguments_of(name: str, key: str, channel: str) -> list[str]:
    """Arguments with which a command could be meant, so that the server judges rights and not grammar."""
    key_and = {
        1: ("GET", "HGETALL", "HVALS", "LPOP", "PTTL", "SCARD", "SMEMBERS", "ZCARD", "SPOP", "ZPOPMIN", "DEL", "HLEN",
            "LLEN", "XLEN", "PERSIST", "EXISTS", "UNLINK"),
        2: ("HDEL", "HEXISTS", "HGET", "HMGET", "HSCAN", "LINDEX", "LPUSH", "RPUSH", "PEXPIRE", "SADD", "SET", "SREM",
            "ZMSCORE", "ZRANK", "ZSCAN", "ZREM", "ZSCORE"),
        3: ("HINCRBY", "HSET", "HSETNX", "LRANGE", "LTRIM", "XRANGE", "XREVRANGE", "XTRIM", "ZADD", "ZCOUNT", "ZRANGE",
            "ZLEXCOUNT", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZREMRANGEBYSCORE", "ZREVRANGE"),
    }  # fmt: skip
    special = {
        "TIME": [], "INFO": [], "EVALSHA": ["0" * 40, "1", key], "SCRIPT": ["LOAD", "return 1"],
        "PUBLISH": [channel, "x"], "SUBSCRIBE": [channel], "XADD": [key, "1-1", "e", "x"], "XTRIM": [key, "MINID", "1"],
    }  # fmt: skip
    if name in special:
        return special[name]
    more = next((number for number, names in key_and.items() if name in names), 2)
    return [key, *["1"] * (more - 1)]


def verbs() -> dict[str, set[str]]:
    """The commands that each verb needs."""
    # A script that may not publish a wake-up does its work all the same: that is a verb of its own.
    found = {name: set(COMMAND_CALL.findall(script(name).text.decode())) - {"PUBLISH"} for name in (*SCRIPTS, *APART)}
    for name in found:
        if b"must_be(" in script(name).text:
            found[name] |= TYPE_CHECKS
    found["start_wait"].add("BLPOP")
    for name in READ_ONLY:
        found[name] -= WRITE_COMMANDS
    return found | {"wake": {"PUBLISH", "SUBSCRIBE"}}


def check_rights(store: Any, server: Any, where: str) -> Findings:
    """Whether this user may do all that clients do, as the server itself judges it."""
    space = store.namespace
    key, channel = f"{{{space}:waypost-doctor}}:queue", f"{{{space}:waypost-doctor}}:ready"
    needed = verbs()
    denied: set[str] = set()
    keys: list[str] = []
    try:
        user = run_command(server, "ACL", "WHOAMI").decode()

        def may(name: str, *arguments: str) -> bool:
            answer: bytes = run_command(server, "ACL", "DRYRUN", user, name, *arguments)
            return answer == b"OK" or b"permission" not in answer

        for name in sorted({*OTHER_COMMANDS, *(one for names in needed.values() for one in names)}):
            if not may(name, *arguments_of(name, key, channel)):
                denied.add(name)
        # Queues, workers, and the lists of them have keys of three forms.
        for pattern, one in ((f"{{{space}:*", key), (f"{{{space}}}:*", f"{{{space}}}:x"), (f"{space}:*", f"{space}:x")):
            keys += [] if may("HSET", one, "a", "1") else [pattern]
    except WaypostError:
        yield note("permissions", f"reading works{where}; the server does not report other rights",
                   "Valkey, and Redis from 7 on, report them if ACL WHOAMI and ACL DRYRUN are allowed")  # fmt: skip
        return
    lost = sorted(verb for verb, names in needed.items() if names & denied or "EVALSHA" in denied)
    advice = (
        f"allow the keys ~{{{space}:*, ~{{{space}}}:* and ~{space}:*, the channels &{{{space}:*, and these commands"
    )
    if denied:
        yield wrong(
            "permissions", f"user {user} may not use {', '.join(sorted(denied))}{where}, which {', '.join(lost)} need",
            advice, denied=sorted(denied), verbs=lost,
        )  # fmt: skip
    elif keys:
        yield wrong("permissions", f"user {user} may not write the keys {', '.join(keys)}{where}", advice, keys=keys)
    else:
        yield ok("permissions", f"user {user} may do all that clients do{where}", user=user)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def check_bytes(store: Any, executor: Any, found: Sequence[Stats]) -> Findings:
    """What messages, events, keys of a window and results take, measured by the server on samples."""
    largest = sorted(found, key=lambda stats: -waiting(stats))[:QUEUES_MEASURED]
    messages = events = in_messages = in_events = 0
    try:
        for stats in largest:
            keys = store.keys_of(stats.queue)
            messages += waiting(stats)
            in_messages += sum(usage(executor, keys[place]) for place in MESSAGE_KEYS)
            events += max(0, stats.journal_last - stats.journal_first + 1)
            in_events += usage(executor, keys[JOURNAL_KEY])
    except WaypostError:
        yield note("bytes", "this user may not measure keys", "allow the command MEMORY to see it")
        return
    yield size_finding("message", in_messages, messages)
    yield size_finding("event", in_events, events)
    for kind, title in (("window", "dedup key"), ("result", "result")):
        sizes = [usage(server, key) for server in executor.servers() for key in scan(store, server, kind)]
        yield size_finding(title, sum(sizes), len(sizes))


def waiting(stats: Stats) -> int:
    """How many messages of a queue lie in the store."""
    ledger = stats.ledger
    return ledger.ready + ledger.delayed + ledger.waiting + ledger.leased + ledger.dead_kept


def usage(server: Any, key: bytes) -> int:
    """The bytes of a key, 0 if it is not there."""
    arguments = (b"MEMORY", b"USAGE", key, b"SAMPLES", b"%d" % ELEMENTS_MEASURED)
    return int(server.run(ValkeyCall("doctor", "", command(*arguments), lambda reply: reply or 0, place=key)))


def scan(store: Any, server: Any, kind: str) -> list[bytes]:
    """Some keys of a kind that have a TTL."""
    pattern = f"{{{store.namespace}:*}}:{kind}:*"
    cursor, keys = b"0", []
    for _ in range(SCAN_STEPS):
        cursor, part = run_command(server, "SCAN", cursor, "MATCH", pattern, "COUNT", str(SCAN_KEYS))
        keys += part
        if cursor == b"0" or len(keys) >= SAMPLES:
            break
    return keys[:SAMPLES]


def size_finding(what: str, size: int, number: int) -> Any:
    """A size as a finding."""
    if not number:
        return ok("bytes", f"no {what}s to measure")
    return ok("bytes", f"{round(size / number):,} bytes for each {what} ({format_count(number, what)} measured)",
              what=what, bytes_each=round(size / number), measured=number)  # fmt: skip
