"""The text of the Lua scripts: names are defined, commands are old enough, batches bounded, all files documented."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import msgspec
import pytest
import redis

from waypost.errors import InvalidInput, MissingExtra
from waypost.identity import Session
from waypost.policy import REPLAY_MAX
from waypost.store.port import Hold
from waypost.store.valkey import ValkeyStore, scripts
from waypost.store.valkey import store as valkey_store
from waypost.store.valkey.scripts import APART, COUNTERS, KEY_NAMES, SCRIPTS, script
from waypost.testing.bench import QUEUE, Bench, StoreMaker
from waypost.testing.clock import ClockTime
from waypost.testing.servers import RedisServer

pytestmark = pytest.mark.promise("STORE-1")

FOLDER = resources.files("waypost.store.valkey") / "lua"
FILES = {path.name.removesuffix(".lua"): path.read_text() for path in FOLDER.iterdir() if path.name.endswith(".lua")}

#: What a script may use without having made it. No loaders, no way to other globals.
BUILTINS = {
    "redis", "KEYS", "ARGV", "string", "table", "math", "struct", "cmsgpack", "tonumber", "type", "pairs", "unpack",
    "error", "pcall",
}  # fmt: skip
KEYWORDS = {
    "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil", "not", "or",
    "repeat", "return", "then", "true", "until", "while",
}  # fmt: skip
#: Commands that Redis 6.2 has, with the arguments we use. `LPOP key count`, `XTRIM MINID` and `ZADD` of many are in it.
COMMANDS = {
    "DEL", "EXISTS", "GET", "HDEL", "HEXISTS", "HGET", "HGETALL", "HINCRBY", "HLEN", "HMGET", "HSCAN", "HSET", "HSETNX",
    "HSTRLEN", "HVALS", "LINDEX", "LLEN", "LPOP", "LPUSH", "LRANGE", "LTRIM", "PERSIST", "PEXPIRE", "PTTL",
    "PUBLISH", "RPUSH", "SADD", "SCARD", "SET", "SMEMBERS", "SPOP", "SRANDMEMBER", "SREM", "TIME", "UNLINK",
    "XADD", "XLEN", "XRANGE",
    "XREVRANGE", "XTRIM",
    "ZADD", "ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE", "ZPOPMIN", "ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZRANK",
    "ZREM", "ZREMRANGEBYSCORE", "ZREVRANGE", "ZSCAN", "ZSCORE",
}  # fmt: skip
#: Every place that turns a list into arguments, and why the list is short: a call of Lua takes some 8,000 at most.
UNPACKED = {
    "old": "at most 32 old results",
    "names": "wake names at most a chunk of sleepers; groups of one call, a few chunks",
    "list, i, min(i + 999, length)": "a thousand at a time",
    "values, 1, min(1000, length)": "a thousand at a time",
    "values, 1001, length": "what is left of a chunk, two for each message",
    "scores, 1, min(1000, length)": "a thousand at a time",
    "scores, 1001, length": "what is left of a chunk, two for each message",
    "wanted": "a claim's limit, at most a chunk",
    "ids": "messages, settlements or leases of one call, at most a chunk",
    "held": "the first thousand leases",
    "gone": "workers that one heartbeat removes, at most a hundred",
    "who, i, min(i + 999, #who)": "a thousand at a time",
    "missing, first, last": "a thousand at a time",
    "ids, first, last": "a thousand at a time",
    "all": "groups of one claim, at most a chunk",
    "joins, i, min(i + 999, #joins)": "a thousand at a time",
    "wake(freshly_ready)": "wake names at most a chunk of sleepers",
}
#: The names that scripts give to the keys of a queue.
CONSTANTS = {
    "QUEUE": "queue", "MESSAGES": "messages", "STATE": "state", "READY": "ready", "DUE": "due", "LEASES": "leases",
    "HOLDERS": "keys", "WAITING": "waiting", "DEAD": "dead", "ERRORS": "errors", "JOURNAL": "journal",
    "READERS": "readers", "SLEEPERS": "sleepers", "RATE": "rate", "COMPLETED": "completed", "OUTGOING": "outgoing",
    "ARRIVALS": "arrivals", "OPERATIONS": "operations", "REGISTER": "workers", "RECORDS": "records",
    "SCHEDULES": "schedules", "REQUESTS": "requests", "SHARED": "shared", "SHARED_DATA": "shared data",
}  # fmt: skip

#: Parts that scripts include.
PARTS = {
    "base", "one", "wake", "shared", "moves", "accept", "chains", "drafts", "once", "register", "leader",
    "known_answer", "cursor", "grouping", "grouping_turns", "grouping_overload", "grouping_building", "grouping_leases",
    "grouping_listing", "grouping_check",
}  # fmt: skip
#: Keys that depend on an argument, and the line in the opening of a script that can touch those of chains.
DERIVED = {"window:<key>", "result:<id>", "end:<id>", "leader:<role>", "expires"}
OF_CHAINS = "the keys of chains"
#: The same for those of groups.
OF_GROUPS = "the keys of groups"

TOKEN = re.compile(
    r"(?P<text>'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")|(?P<comment>--[^\n]*)|(?P<number>\d[\w.]*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>\.\.\.?|[=~<>]=|\S)"
)


def tokens(text: str) -> list[tuple[str, str]]:
    """Return the kind and text of each token, without comments."""
    found = [(str(match.lastgroup), match[0]) for match in TOKEN.finditer(text)]
    return [token for token in found if token[0] != "comment"]


def names(text: str) -> Iterator[tuple[str, bool]]:
    """Return each use of a name that is not a field, and whether it is defined there: local, for or a parameter."""
    found = tokens(text)
    brackets: list[str] = []
    making = ""
    for at, (kind, token) in enumerate(found):
        before = found[at - 1][1] if at else ""
        after = found[at + 1][1] if at + 1 < len(found) else ""
        if token in ("{", "(", "["):
            brackets.append(token)
        elif token in ("}", ")", "]"):
            brackets.pop()
            making = "" if making == "parameters" else making
        elif token in ("local", "for"):
            making = token
        elif token == "function":
            making = "name" if making == "local" else "parameters"
        elif kind == "name" and token not in KEYWORDS:
            if before in (".", ":") or (after == "=" and brackets[-1:] == ["{"]):
                continue
            yield token, bool(making)
            if making == "name":
                making = "parameters"
        if making in ("local", "for") and token not in ("local", "for", ",") and after != "," and kind == "name":
            making = ""


def code(name: str) -> str:
    return script(name).text.decode()


def test_there_is_a_file_for_each_script() -> None:
    assert set(FILES) == {*SCRIPTS, *APART, *PARTS}


@pytest.mark.parametrize("name", [*SCRIPTS, *APART])
def test_every_name_is_defined_before_it_is_used(name: str) -> None:
    """A missing constant, a function used before its definition, a value without `local`: each fails only when run."""
    known = set(BUILTINS)
    unknown = []
    for token, made in names(code(name)):
        if made:
            known.add(token)
        elif token not in known:
            unknown.append(token)
    assert unknown == []


def test_the_check_of_names_finds_errors() -> None:
    broken = "local a, b = 1, {c = 2, D = 3}\nlocal function f(x, y) return x + y + a.c + later() + b end\nreturn f(G)"
    known, unknown = set[str](), []
    for token, made in names(broken):
        if made:
            known.add(token)
        elif token not in known:
            unknown.append(token)
    assert (known, unknown) == ({"a", "b", "f", "x", "y"}, ["later", "G"])


def commands(text: str) -> set[str]:
    called = re.findall(r"\b(?:call|pcall|bulk)\('(\w+)'", text)
    probes = re.findall(r"local probe = (.*)", text)
    return {*called, *re.findall(r"'([A-Z]+)'", " ".join(probes))}


@pytest.mark.parametrize("name", [*SCRIPTS, *APART])
def test_no_command_is_newer_than_redis_6_2(name: str) -> None:
    assert commands(code(name)) - COMMANDS == set()
    # No command is called by a name made at run time, but for the two that take it from a list above. Lua's own `pcall`
    # calls functions.
    computed = re.findall(r"\b(?:call|pcall|bulk)\((?!')([^,)]*)[,)]", code(name))
    assert set(computed) <= {
        "command", "probe", "cmsgpack.unpack", "cmsgpack.unpack_limit", "read_entry", "open_queue", "read",
    }  # fmt: skip


def test_the_list_of_commands_is_of_those_in_use() -> None:
    used = set[str]().union(*(commands(code(name)) for name in SCRIPTS))
    assert COMMANDS - used == set()


@pytest.mark.parametrize("name", [*SCRIPTS, *APART])
def test_the_server_loads_every_script_under_the_name_we_call_it_by(name: str, raw: Any) -> None:
    assert raw.script_load(script(name).text) == script(name).sha.decode()


def test_the_oldest_server_knows_every_script_and_command() -> None:
    try:
        server = RedisServer()
    except MissingExtra:
        pytest.skip(f"needs the wheel {RedisServer.wheel}")
    with server, redis.Redis(port=server.port, password=server.password) as client:
        untyped: Any = client
        for name in SCRIPTS:
            assert untyped.script_load(script(name).text) == script(name).sha.decode()
        known = {command.upper() for command in untyped.command()}
        assert COMMANDS - known == set()


def head(text: str) -> str:
    """Return the comment that a file opens with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_opens_with_what_it_touches_and_what_it_keeps(name: str) -> None:
    head_text = head(FILES[name])
    assert head_text.startswith(f"{name}: ")
    assert "Invariant" in head_text or "Writes nothing" in head_text
    assert "Touches: " in head_text or name in PARTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_key_that_a_script_names_is_in_its_opening(name: str) -> None:
    [touched] = re.findall(r"Touches: (.*?)\.(?: |$)", head(FILES[name]))
    body = re.sub(r"^--.*$", "", FILES[name], flags=re.MULTILINE)
    named = {key for constant, key in CONSTANTS.items() if re.search(rf"(?<![.\w']){constant}\b", body)}
    listed = {one.strip() for one in touched.split(",")}
    assert named - listed == set()
    assert listed - DERIVED - {OF_CHAINS, OF_GROUPS} <= set(CONSTANTS.values())
    of_chains = re.search(r"-- include chains\n|OWN \.\. '(?:chain|watchers|blockers|waiters|end):", FILES[name])
    assert bool(of_chains) == (OF_CHAINS in listed)
    of_groups = re.search(r"-- include grouping\b|(?:BASE|base) \.\. '(?:groups|group_|positions)", FILES[name])
    assert bool(of_groups) == (OF_GROUPS in listed)


def test_every_derived_key_is_in_an_opening() -> None:
    made = {kind for text in FILES.values() for kind in re.findall(r"(?:BASE|OWN) \.\. '([a-z:]+):'", text)}
    head_text = head(FILES["base"]) + head(FILES["chains"])
    assert made == {"window", "result", "chain", "watchers", "blockers", "waiters", "waiters:chain", "end", "unblock"}
    assert [kind for kind in made if f"{kind}:<" not in head_text] == []


def test_the_keys_have_the_order_in_which_the_scripts_take_them() -> None:
    declared = re.findall(r"^local ([A-Z, ]+) = (KEYS.*)$", FILES["base"], re.MULTILINE)
    order = {}
    for constants, places in declared:
        for constant, place in zip(constants.split(", "), re.findall(r"KEYS\[(\d+)\]", places), strict=True):
            order[int(place)] = CONSTANTS[constant]
    assert [order[place] for place in sorted(order)] == [*KEY_NAMES, "operations"]


def test_every_list_that_becomes_arguments_has_a_bound() -> None:
    used = set()
    for text in FILES.values():
        for match in re.finditer(r"(?<![\w.])unpack\(", text):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            used.add(text[match.end() : end - 1])
    assert used == set(UNPACKED)


def test_nothing_that_changes_a_script_comes_from_outside() -> None:
    """Values reach a script only as arguments: the text is the same for every queue, session and namespace."""
    for name in SCRIPTS:
        assert script(name) is script(name)
        assert not re.search(r"\bloadstring\b|\bload\(|\bdofile\b|\brequire\b", code(name))


@pytest.mark.promise("STORE-1", "PUB-8")
def test_a_call_with_too_many_entries_is_refused_before_it_is_sent() -> None:
    store = ValkeyStore.from_url("valkey://127.0.0.1:1")
    operation = Session(ClockTime()).operation("orders")
    hold = Hold("0" * 24, 1, bytes(12))
    with pytest.raises(InvalidInput, match="the limit is 512"):
        store.extend("orders", [hold] * 513, operation)
    assert store.extend("orders", [hold] * 512, operation).name == "extend"


def commands_of(raw: Any, run: Callable[[], object]) -> dict[str, int]:
    """Return the commands that a step runs in the server, and how often each."""
    raw.config_resetstat()
    run()
    found = raw.info("commandstats")
    return {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items() if "config" not in name}


def test_a_lone_publish_runs_few_commands(plain_bench: Bench, raw: Any) -> None:
    plain_bench.publish_count(3)
    once = dict.fromkeys(("evalsha", "hget", "hmget", "hsetnx", "zadd", "xadd", "zrevrange"), 1)
    assert commands_of(raw, plain_bench.publish) == {**once, "hset": 2}


@pytest.mark.promise("PUB-2", "SEE-3", "SEE-5")
@pytest.mark.parametrize("settings", [{}, {"journal": "failures"}, {"journal": "off", "lease": 5}])
def test_a_lone_publish_stores_the_same_as_one_by_the_longer_way(
    make_store: StoreMaker, raw: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    def history() -> tuple[Any, ...]:
        with Bench(make_store, "sync") as bench:
            bench.publish()
            if settings:
                bench.configure(**settings)
            for priority in (9, 5, 0):
                bench.publish(priority=priority)
            bench.claim(1, sleeper="w")
            bench.publish()
            events = [(one.event, one.priority, one.number, one.size) for one in bench.events()]
            claims = [(one.priority, one.deliveries) for one in bench.claim(10)]
            return bench.ledger(), bench.stats(), events, claims

    short = history()
    monkeypatch.setattr(scripts, "BEFORE_BASE", {})
    monkeypatch.setattr(valkey_store, "GIVEN_KEYS", {})
    script.cache_clear()
    try:
        long = history()
    finally:
        monkeypatch.undo()
        script.cache_clear()
    assert short == long


@pytest.mark.promise("SEE-3")
@pytest.mark.parametrize("size", [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 2, 2**32 - 1, 2**32, 2**40])
def test_a_lone_publish_counts_up_from_numbers_of_every_size(plain_bench: Bench, raw: Any, size: int) -> None:
    plain_bench.publish()
    key = f"{{{plain_bench.namespace}:{QUEUE}}}:queue"
    counts = msgspec.msgpack.decode(raw.hget(key, "counts"))
    for name in ("published", "sequence", "journal_last", "minute_published"):
        counts[COUNTERS.index(name)] += size
    counts[COUNTERS.index("journal_first")] += size
    counts[COUNTERS.index("dead")] = size
    raw.hset(key, "counts", msgspec.msgpack.encode(counts))
    for _ in range(2):
        assert commands_of(raw, plain_bench.publish)["hsetnx"] == 1
        for name in ("published", "sequence", "journal_last", "minute_published"):
            counts[COUNTERS.index(name)] += 1
        assert msgspec.msgpack.decode(raw.hget(key, "counts")) == counts


@pytest.mark.promise("PUB-4")
def test_results_of_a_long_session_are_kept_and_removed(plain_bench: Bench, raw: Any) -> None:
    for _ in range(1_100):
        plain_bench.publish()
    (key,) = raw.keys(f"{{{plain_bench.namespace}:{QUEUE}}}:operations:*")
    assert raw.object("encoding", key) == b"hashtable"
    # The last ones are there, and few others.
    assert REPLAY_MAX <= raw.hlen(key) - 1 <= REPLAY_MAX + 32
