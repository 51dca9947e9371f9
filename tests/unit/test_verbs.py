"""A verb of the contract has one name: in Python, in Lua and in SQL."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from waypost.identity import Session, new_nonce
from waypost.store import port
from waypost.store.memory.store import MemoryStore
from waypost.store.port import Call, Draft, FireStep, Heartbeat, Hold, Idle, Store, Target
from waypost.store.postgres.schema import FUNCTIONS, MADE, VERSION, function_text
from waypost.store.postgres.statement import PostgresCall
from waypost.store.postgres.store import PostgresStore
from waypost.store.sqlite.store import SqliteStore
from waypost.store.valkey.command import ValkeyCall, part
from waypost.store.valkey.scripts import APART, SCRIPTS, script
from waypost.store.valkey.store import ValkeyStore
from waypost.values import Notice, Settlement, StoredSchedule

#: Scripts that serve several verbs: the verb is an argument.
SHARED_SCRIPTS = {
    "configure": ["configure", "pause", "resume"],
    "elect": ["elect", "resign"],
    "journal": ["journal", "journal_forget", "journal_reader", "journal_trim", "trace"],
    "outgoing": ["forwarded", "outgoing"],
    "watch": ["links", "result", "watch", "watch_chain"],
}
#: Scripts of the blocking wait, which is no verb of its own: it goes before a claim.
WAIT_SCRIPTS = ["start_wait", "unblock"]
#: A function that serves two verbs; and `clock`, which every function calls.
SHARED_FUNCTIONS = {"resume": "pause", "time": "clock", "stats_many": "stats"}
#: A verb for many queues that runs the script of the verb for one.
REPEATED_SCRIPTS = {"stats_many": "stats"}


def verbs() -> dict[str, inspect.Signature]:
    """The verbs of the contract: the methods of `Store` that return calls."""
    found = inspect.getmembers(Store, inspect.isfunction)
    signatures = {name: inspect.signature(function) for name, function in found}
    return {
        name: signature
        for name, signature in signatures.items()
        if str(signature.return_annotation).startswith(("Call[", "list[Call["))
    }


VERBS = verbs()


def arguments(verb: str) -> dict[str, Any]:
    """An argument for each parameter of a verb that has no default."""
    draft = Draft("0" * 24, b"envelope")
    samples: dict[str, Any] = {
        "queue": "orders", "limit": 1, "operation": Session().operation("orders"), "worker": "w", "drafts": [draft],
        "draft": draft, "settlements": [Settlement("0" * 24, 1, new_nonce(), "done")], "message_id": "0" * 24,
        "holds": [Hold("0" * 24, 1, new_nonce())], "targets": [Target(id="0" * 24)], "ids": ["0" * 24], "waiter": "w",
        "notices": [Notice("0" * 24, "ended", "orders", "orders/1", "orders/2")], "state": "ready", "cursor": None,
        "changes": {"lease": 5}, "idle": [Idle("orders")], "heartbeat": Heartbeat("w"), "ttl_ms": 1000, "name": "w",
        "role": "scheduler", "after": 0, "read_to": None, "up_to": 0, "version": None, "next_ms": None,
        "schedule": StoredSchedule("k", "v", b"spec", False, None, None), "key": "k", "queues": ["orders"],
        "kind": "view", "data": b"", "step": FireStep("k", "v", 0, 0, 0, None, 0, None, None), "request": "stop",
        "group": "g", "priority": 5,
    }  # fmt: skip
    parameters = list(VERBS[verb].parameters.values())[1:]
    return {one.name: samples[one.name] for one in parameters if one.default is inspect.Parameter.empty}


def calls_of(store: Store, verb: str) -> list[Call[Any]]:
    made = getattr(store, verb)(**arguments(verb))
    return list(made) if isinstance(made, list) else [made]


@pytest.fixture(params=["memory", "sqlite", "valkey", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store that is not connected: verbs need no server."""
    stores: dict[str, Any] = {
        "memory": MemoryStore,
        "sqlite": lambda: SqliteStore(tmp_path / "verbs.db"),
        "valkey": lambda: ValkeyStore.from_url("valkey://127.0.0.1:1"),
        "postgres": lambda: PostgresStore.from_url("postgresql://127.0.0.1:1/none"),
    }
    made: Store = stores[request.param]()
    return made


def test_the_table_of_the_contract_lists_every_verb_once() -> None:
    table = (port.__doc__ or "").split("\n\n")[1]
    lines = [re.sub(r"^    (?:\w+ ?)* {2,}", "", line) for line in table.splitlines()]
    listed = " ".join(lines).split()
    assert sorted(listed) == sorted(VERBS)


def test_every_store_has_the_verbs_with_the_same_arguments(store: Store) -> None:
    for verb, signature in VERBS.items():
        assert list(inspect.signature(getattr(store, verb)).parameters) == list(signature.parameters)[1:], verb


def test_a_call_bears_the_name_of_its_verb(store: Store) -> None:
    for verb in VERBS:
        assert {call.name for call in calls_of(store, verb)} <= {verb}


def test_the_script_of_a_verb_bears_its_name() -> None:
    store = ValkeyStore.from_url("valkey://127.0.0.1:1")
    for verb in VERBS:
        for call in calls_of(store, verb):
            assert isinstance(call, ValkeyCall)
            if call.script is None:
                continue  # a command of the server itself
            sharing = SHARED_SCRIPTS.get(call.script.name)
            if sharing is None:
                assert call.script.name == REPEATED_SCRIPTS.get(verb, verb)
            else:
                assert verb in sharing
                assert part(verb.encode()) in call.packed


def test_every_script_is_a_verb() -> None:
    assert sorted({*SCRIPTS, *APART} - set(VERBS)) == WAIT_SCRIPTS


@pytest.mark.parametrize("shared", SHARED_SCRIPTS)
def test_a_shared_script_distinguishes_its_verbs_by_their_names(shared: str) -> None:
    text = script(shared).text.decode()
    missing = [verb for verb in SHARED_SCRIPTS[shared] if f"'{verb}'" not in text]
    assert len(missing) <= 1, "only the last branch need not name its verb"


def test_the_function_of_a_verb_bears_its_name() -> None:
    functions = {name for file in FUNCTIONS for kind, name in MADE.findall(function_text(file)) if kind == "FUNCTION"}
    store = PostgresStore.from_url("postgresql://127.0.0.1:1/none")
    for verb in VERBS:
        for call in calls_of(store, verb):
            assert isinstance(call, PostgresCall)
            called = set(re.findall(rf'"wp_(\w+)_{VERSION}"\(', call.command.decode()))
            # A plain statement may read the clock.
            assert called - {"clock"} <= {SHARED_FUNCTIONS.get(verb, verb)}
            assert called <= functions
            assert verb not in functions or called == {verb}
