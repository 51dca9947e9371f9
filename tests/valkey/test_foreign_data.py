"""A foreign value in place of one of our keys: a verb works without it, or refuses and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.valkey.inspector import Inside
from waypost.errors import ForeignData, SchemaTooNew
from waypost.identity import continuation_id
from waypost.store.port import Call, FireStep
from waypost.store.valkey.scripts import KEY_NAMES
from waypost.testing.bench import QUEUE, Bench
from waypost.values import Continuation, Lease, Notice, NoticeKind, StoredSchedule, chain_id

pytestmark = pytest.mark.promise("STORE-1")

NEW_ID = "1" * 24
FOREIGN = b"not ours"


class Scene:
    """A queue with messages in every state; the leases are ready to be settled."""

    dead: str
    finished: str
    retried: Lease
    leased: Lease
    replaced: Lease
    cancelled: Lease
    awaited: Lease
    linked: Lease
    blocked: str

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        bench.configure(rate="1000/h", completed=5, dead_max=50, max_pending=60, overload="drop_oldest")
        self.dead = self._dead(b"dead", key="was dead", window=3600)
        self._dead(b"second")
        self.finished = self._claimed(b"finished", key="finished", window=3600).id
        bench.settle(self._last, result=b"a result")
        bench.settle(self._claimed(b"sends on"), then=[self.next_one("elsewhere")])
        self.retried = self._failed_once(b"retried", key="retried")
        self.leased = self._claimed(b"leased")
        self.replaced = self._claimed(b"replaced", key="replaced")
        bench.publish(b"parked", key="replaced", on_conflict="replace")
        self.cancelled = self._claimed(b"cancel requested", key="cancelled")
        bench.cancel(id=self.cancelled.id)
        self._chains()
        failed = self._failed_once(b"failed and waits", key="failed")
        bench.settle(failed, "retry", error_type="ValueError", error="no")
        bench.publish(b"waits", key="plain key", window=3600, group="a group")
        bench.publish(b"later", key="later", delay=600)
        bench.publish(b"arrived", id=continuation_id(self.dead, 1, 0), forwarded=True)
        bench.run(bench.store.journal_reader(QUEUE, "reader", 3))
        bench.publish_count(3)

    def _chains(self) -> None:
        bench = self.bench
        self.awaited = self._claimed(b"awaited")
        bench.watch(self.awaited.id, "anna")
        id = bench.session.message_ids(1)[0]
        self.linked = self._claimed(b"linked", id=id, chain=chain_id(QUEUE, id))
        bench.chain_state(self.chain, "bert")
        self.blocked = bench.publish(b"blocked", after_chains=[self.chain]).id
        bench.settle(self._claimed(b"of another chain", chain=chain_id("elsewhere", NEW_ID)))

    @property
    def chain(self) -> str:
        return self.linked.chain or ""

    def derived(self) -> list[str]:
        """Return the keys that chains and waits have created, or will."""
        first = self.linked.id
        return [
            f"chain:{first}", f"watchers:{first}", f"waiters:chain:{first}", f"blockers:{self.blocked}",
            f"waiters:{self.awaited.id}", f"end:{self.awaited.id}", f"chain:{NEW_ID}", f"blockers:{NEW_ID}",
        ]  # fmt: skip

    def arrive(self, kind: NoticeKind, member: str, failed: str | None = None) -> None:
        notice = Notice("a notice", kind, QUEUE, self.chain, member, (), failed)
        self.bench.carry(notice)

    def _claimed(self, body: bytes, **options: Any) -> Lease:
        id = self.bench.publish(body, priority=9, **options).id
        self._last = self.bench.claim_one()
        assert self._last.id == id
        return self._last

    def _failed_once(self, body: bytes, **options: Any) -> Lease:
        self.bench.settle(self._claimed(body, **options), "retry", error_type="ValueError", error="no")
        return self.bench.claim_one()

    def _dead(self, body: bytes, **options: Any) -> str:
        lease = self._claimed(body, **options)
        self.bench.settle(lease, "dead", error_type="ValueError", error="no")
        return lease.id

    def next_one(self, queue: str) -> Continuation:
        id = continuation_id("0" * 24, 1, 1)
        return Continuation(id, queue, self.bench.draft(b"next", id=id).envelope)

    # ---- verbs with a few arguments ----------------------------------------------------------------------

    def publish(self, count: int = 1, **options: Any) -> Any:
        ids = [NEW_ID[:-3] + f"{number:03}" for number in range(count)]
        return self.bench.publish_drafts([self.bench.draft(id=id, **options) for id in ids])

    def claim(self, limit: int = 500, **options: Any) -> Any:
        return self.bench.claimed(limit, nonce=b"n" * 12, **options)

    # ---- preparations of verbs -------------------------------------------

    def without_cap(self) -> None:
        self.bench.configure(max_pending=None)

    def full(self) -> None:
        self.bench.configure(max_pending=self.bench.ledger().ready + 3)

    def journal_before_its_cap(self) -> None:
        self.bench.run(self.bench.store.journal_forget(QUEUE, "reader"))
        self.bench.configure(max_pending=None, journal_max=40)
        self.bench.publish_count(500)

    def empty(self) -> None:
        self.bench.claim(500)

    def strict(self) -> None:
        self.bench.configure(max_deliveries=1)

    def at_most_once(self) -> None:
        self.bench.configure(lease=None)


Verb = Callable[[Scene], Any]

#: Every verb, in every way that touches other keys.
VERBS: dict[str, Verb] = {
    "publish": lambda at: at.publish(),
    "publish plain ones": lambda at: at.publish(20),
    "publish and drop the oldest": lambda at: at.publish(3),
    "publish and trim the journal": lambda at: at.publish(200),
    "publish a key": lambda at: at.publish(key="new", window=60),
    "publish a key in use": lambda at: at.publish(key="plain key"),
    "replace": lambda at: at.publish(key="failed", on_conflict="replace"),
    "replace a parked one": lambda at: at.publish(key="replaced", on_conflict="replace"),
    "park": lambda at: at.publish(key="cancelled", on_conflict="replace"),
    "postpone": lambda at: at.publish(key="later", on_conflict="extend", delay=5),
    "publish a timer": lambda at: at.publish(delay=5),
    "publish what was sent on": lambda at: at.publish(forwarded=True),
    "publish the first of a chain": lambda at: at.publish(chain=chain_id(QUEUE, NEW_ID)),
    "publish what waits for a chain": lambda at: at.publish(after_chains=[at.chain, chain_id("elsewhere", NEW_ID)]),
    "publish what waits for no chain": lambda at: at.publish(after_chains=[chain_id(QUEUE, NEW_ID)]),
    "claim": lambda at: at.claim(1),
    "claim everything": lambda at: at.claim(),
    "claim what is due and expired": lambda at: at.claim(),
    "claim and bury": lambda at: at.claim(),
    "claim at most once": lambda at: at.claim(),
    "claim while paused": lambda at: at.claim(1),
    "claim nothing": lambda at: at.claim(1, sleeper="asleep"),
    "claim again": lambda at: at.claim(1, replay=True),
    "settle": lambda at: at.bench.settle(at.leased),
    "settle a failed one": lambda at: at.bench.settle(at.retried),
    "settle with an heir": lambda at: at.bench.settle(at.replaced),
    "settle with a result": lambda at: at.bench.settle(at.leased, result=b"a result"),
    "settle and send on": lambda at: at.bench.settle(at.leased, then=[at.next_one("next")]),
    "settle many": lambda at: at.bench.settle_batch([at.bench.settlement(one) for one in (at.leased, at.retried)]),
    "settle an awaited one": lambda at: at.bench.settle(at.awaited),
    "settle the last of a chain": lambda at: at.bench.settle(at.linked),
    "settle and go on with a chain": lambda at: at.bench.settle(at.linked, then=[at.next_one("next")]),
    "break a chain": lambda at: at.bench.settle(at.linked, "dead"),
    "cancel what waits for a chain": lambda at: at.bench.cancel(id=at.blocked),
    "arrive: an end": lambda at: at.arrive("ended", at.chain),
    "arrive: a bad end": lambda at: at.arrive("ended", at.chain, "dropped"),
    "arrive: a client waits": lambda at: at.arrive("watch", chain_id("elsewhere", NEW_ID)),
    "arrive: a chain is complete": lambda at: at.arrive("completed", chain_id(QUEUE, at.blocked)),
    "arrive: a chain has failed": lambda at: at.arrive("completed", chain_id(QUEUE, at.blocked), "rejected"),
    "watch": lambda at: at.bench.watch(at.leased.id, "carl"),
    "watch a dead letter": lambda at: at.bench.watch(at.dead, "carl"),
    "watch a finished one": lambda at: at.bench.watch(at.finished, "carl"),
    "watch_chain": lambda at: at.bench.chain_state(at.chain, "carl"),
    "retry": lambda at: at.bench.settle(at.leased, "retry", after=1, error_type="ValueError", error="no"),
    "retry with an heir": lambda at: at.bench.settle(at.replaced, "retry"),
    "snooze": lambda at: at.bench.settle(at.leased, "snooze", after=1),
    "release": lambda at: at.bench.settle(at.retried, "release"),
    "release a cancelled one": lambda at: at.bench.settle(at.cancelled, "release"),
    "bury": lambda at: at.bench.settle(at.retried, "dead", reason="rejected"),
    "drop": lambda at: at.bench.settle(at.retried, "drop"),
    "extend": lambda at: at.bench.extend(at.leased),
    "cancel": lambda at: at.bench.cancel(key="failed"),
    "cancel a running one": lambda at: at.bench.cancel(id=at.retried.id),
    "cancel one with an heir": lambda at: at.bench.cancel(key="replaced"),
    "cancel a finished one": lambda at: at.bench.cancel(id=at.finished),
    "cancel a finished key": lambda at: at.bench.cancel(key="finished"),
    "redrive": lambda at: at.bench.redrive(),
    "redrive one": lambda at: at.bench.redrive(at.dead),
    "outgoing": lambda at: at.bench.run(at.bench.store.outgoing(QUEUE, 10)),
    "bury what cannot be sent on": lambda at: at.bench.run(at.bench.store.outgoing(QUEUE, 10)),
    "forwarded": lambda at: at.bench.run(at.bench.store.forwarded(QUEUE, [at.next_one("elsewhere").id])),
    "result": lambda at: at.bench.result(at.finished),
    "remove": lambda at: at.bench.run(at.bench.store.remove(QUEUE, at.bench.operation())),
    "stats": lambda at: at.bench.stats(minutes=3),
    "trace": lambda at: at.bench.trace(at.dead),
    "journal": lambda at: at.bench.run(at.bench.store.journal(QUEUE, 0, 10)),
    "journal_reader": lambda at: at.bench.run(at.bench.store.journal_reader(QUEUE, "second", None)),
    "journal_forget": lambda at: at.bench.run(at.bench.store.journal_forget(QUEUE, "reader")),
    "journal_trim": lambda at: at.bench.run(at.bench.store.journal_trim(QUEUE, 10)),
    "configure": lambda at: at.bench.configure(max_pending=50),
    "policy": lambda at: at.bench.run(at.bench.store.policy(QUEUE)),
    "pause": lambda at: at.bench.pause(),
    "resume": lambda at: at.bench.resume(),
    "peek ready": lambda at: at.bench.page("ready"),
    "peek delayed": lambda at: at.bench.page("delayed"),
    "peek waiting": lambda at: at.bench.page("waiting"),
    "peek leased": lambda at: at.bench.page("leased"),
    "peek dead": lambda at: at.bench.page("dead", reason="rejected"),
    "peek done": lambda at: at.bench.page("done"),
    "peek one": lambda at: at.bench.page("dead", id=at.dead),
    "purge ready": lambda at: at.bench.purge("ready"),
    "purge delayed": lambda at: at.bench.purge("delayed"),
    "purge waiting": lambda at: at.bench.purge("waiting"),
    "purge dead": lambda at: at.bench.purge("dead"),
    "purge done": lambda at: at.bench.purge("done"),
}

BEFORE: dict[str, Callable[[Scene], object]] = {
    "publish": Scene.without_cap,
    "publish plain ones": Scene.without_cap,
    "publish and drop the oldest": Scene.full,
    "publish and trim the journal": Scene.journal_before_its_cap,
    "claim what is due and expired": lambda at: at.bench.after(3600),
    "claim and bury": Scene.strict,
    "claim at most once": Scene.at_most_once,
    "claim while paused": lambda at: at.bench.pause(),
    "claim nothing": Scene.empty,
    "bury what cannot be sent on": lambda at: at.bench.after(86_400),
    "resume": lambda at: at.bench.pause(),
}


CASES = [pytest.param(name, name, id=name.replace(" ", "-")) for name in VERBS]


@pytest.fixture
def scene(request: pytest.FixtureRequest, plain_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene(plain_bench)
    if request.param in BEFORE:
        BEFORE[request.param](made)
    # The same operation every time: what a verb writes is then the same to the byte.
    fixed = plain_bench.operation()
    monkeypatch.setattr(plain_bench, "operation", lambda queue=QUEUE: fixed)
    return made


@pytest.mark.parametrize(
    ("scene", "verb"), [pytest.param(name, name, id=name.replace(" ", "-")) for name in VERBS], indirect=["scene"]
)
def test_a_verb_works_without_a_foreign_key_or_refuses_and_changes_nothing(
    scene: Scene, verb: str, inside: Inside
) -> None:
    act = VERBS[verb]
    intact = inside.dumps()
    expected = act(scene)
    worked = inside.snapshot()
    operations = f"operations:{scene.bench.session.id.hex()}"
    refused = set()
    for name in (*KEY_NAMES, operations):
        key = inside.key(name)
        inside.restore(intact)
        inside.client.set(key, FOREIGN)
        before = inside.snapshot()
        reported = ""
        result = None
        try:
            result = act(scene)
        except ForeignData as error:
            reported = str(error)
        if reported:
            refused.add(name)
            assert key in reported
            assert inside.snapshot() == before
        else:
            assert result == expected
            after = inside.snapshot()
            assert {**after, key: b""} == {**worked, key: b""}
        assert inside.client.get(key) == FOREIGN
    # All read the queue first.
    assert "queue" in refused


@pytest.mark.parametrize(("scene", "verb"), CASES, indirect=["scene"])
def test_a_foreign_key_in_place_of_a_chain_is_not_changed(scene: Scene, verb: str, inside: Inside) -> None:
    """They connect a message with others; without them the message itself goes on, or nothing is changed."""
    intact = inside.dumps()
    for name in scene.derived():
        key = inside.key(name)
        inside.restore(intact)
        inside.client.delete(key)
        inside.client.rpush(key, FOREIGN)
        before = inside.snapshot()
        reported = ""
        try:
            VERBS[verb](scene)
        except ForeignData as error:
            reported = str(error)
        if reported:
            assert key in reported
            assert inside.snapshot() == before
        assert inside.client.lrange(key, 0, -1) == [FOREIGN]
        assert scene.bench.ledger().balance == 0


@pytest.mark.parametrize(("scene", "verb"), CASES, indirect=["scene"])
def test_a_layout_that_is_newer_than_this_release_is_not_touched(scene: Scene, verb: str, inside: Inside) -> None:
    inside.client.hset(inside.key("queue"), "version", 99)
    before = inside.snapshot()
    with pytest.raises(SchemaTooNew, match="layout 99"):
        VERBS[verb](scene)
    assert inside.snapshot() == before


# ---- keys that are derived, and one that is missing -----------------------------------------------------------


def test_a_foreign_window_is_never_overwritten(plain_bench: Bench, inside: Inside) -> None:
    running = plain_bench.publish(key="order", window=60).id
    lease = plain_bench.claim_one()
    window = inside.key("window:order")
    inside.client.delete(window)
    inside.client.rpush(window, FOREIGN)
    before = inside.snapshot()
    with pytest.raises(ForeignData, match="window:order"):
        plain_bench.publish(key="order", window=60, on_conflict="replace")
    assert inside.snapshot() == before
    assert plain_bench.settle(lease, "dead") == "dead"
    assert plain_bench.cancel(key="order") == "unknown"
    with pytest.raises(ForeignData, match="window:order"):
        plain_bench.publish(key="order", window=60)
    assert plain_bench.redrive(running).moved == [running]
    assert inside.client.lrange(window, 0, -1) == [FOREIGN]
    inside.check()


@pytest.mark.parametrize("name", ["result", "queues"])
def test_a_foreign_value_read_by_a_single_command_is_named(plain_bench: Bench, inside: Inside, name: str) -> None:
    key = inside.key(f"result:{NEW_ID}") if name == "result" else f"{plain_bench.namespace}:queues"
    inside.client.zadd(key, {"not ours": 1})
    with pytest.raises(ForeignData, match=key.replace("{", r"\{")):
        plain_bench.result(NEW_ID) if name == "result" else plain_bench.run(plain_bench.store.queues())
    assert inside.client.zcard(key) == 1


def test_publishing_does_not_need_the_list_of_queues(plain_bench: Bench, inside: Inside) -> None:
    inside.client.zadd(f"{plain_bench.namespace}:queues", {"not ours": 1})
    assert plain_bench.publish().status == "queued"


def test_a_journal_without_its_counters_is_not_written(plain_bench: Bench, inside: Inside) -> None:
    plain_bench.publish_count(3)
    inside.client.delete(inside.key("queue"))
    before = inside.snapshot()
    for act in (plain_bench.publish, plain_bench.claim, plain_bench.stats, lambda: plain_bench.publish(key="order")):
        with pytest.raises(ForeignData, match=":journal"):
            act()
    assert inside.snapshot() == before
    # The way out of the error works: the messages are still there.
    inside.client.delete(inside.key("journal"))
    assert len(plain_bench.claim(10)) == 3


@pytest.mark.promise("CRON-6")
def test_foreign_schedules_are_named_and_nothing_is_fired_into_them(plain_bench: Bench, inside: Inside) -> None:
    plain_bench.publish()
    schedule = StoredSchedule("tick", "v1", b"spec", False, plain_bench.now_ms, plain_bench.now_ms)
    step = FireStep("tick", "v1", plain_bench.now_ms, plain_bench.now_ms, plain_bench.now_ms, None, 0, None, None)
    store = plain_bench.store
    calls: list[Callable[[], Call[Any]]] = [
        lambda: store.save_schedule(QUEUE, schedule, version=None, next_ms=None),
        lambda: store.fire_schedule(QUEUE, step, [plain_bench.draft()], plain_bench.operation()),
        lambda: store.trigger_schedule(QUEUE, "tick", plain_bench.draft(), plain_bench.operation()),
        lambda: store.schedules(QUEUE),
        lambda: store.remove_schedule(QUEUE, "tick"),
    ]
    inside.client.set(inside.key("schedules"), FOREIGN)
    before = inside.snapshot()
    for call in calls:
        with pytest.raises(ForeignData, match="schedules"):
            plain_bench.run(call())
    assert inside.snapshot() == before


@pytest.mark.promise("TIMER-4")
def test_a_foreign_leader_and_a_foreign_list_of_scheduled_queues_are_named(plain_bench: Bench, inside: Inside) -> None:
    inside.client.set(f"{plain_bench.namespace}:leader:scheduler", FOREIGN)
    inside.client.set(f"{plain_bench.namespace}:scheduled", FOREIGN)
    store = plain_bench.store
    elections: list[Call[Any]] = [store.elect("scheduler", "a", 10), store.resign("scheduler", "a")]
    for call in elections:
        with pytest.raises(ForeignData, match="leader:scheduler"):
            plain_bench.run(call)
    lists: list[Call[Any]] = [store.scheduled(), store.schedules_changed(QUEUE)]
    for other in lists:
        with pytest.raises(ForeignData, match=":scheduled"):
            plain_bench.run(other)
