"""The states of a waiting consumer: each transition of the diagram, without a store, a loop or a clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypost.worker import wait_machine
from waypost.worker.wait_machine import ASLEEP, IN_WAIT, Action, WaitMachine, WaitState

ACTIVE, SLEEPING = WaitState.ACTIVE, WaitState.SLEEPING
FOR_ROOM, UNTIL_IDLE = WaitState.SLEEPING_FOR_ROOM, WaitState.SLEEPING_UNTIL_IDLE
STARTING, INTERRUPTED = WaitState.STARTING, WaitState.INTERRUPTED
WAITING, UNBLOCKING, CLAIMING = WaitState.WAITING, WaitState.UNBLOCKING, WaitState.CLAIMING
END_SLEEP, UNBLOCK = Action.END_SLEEP, Action.UNBLOCK

#: How to reach each state from the first one, without a notification.
WAYS: dict[WaitState, tuple[str, ...]] = {
    ACTIVE: (),
    SLEEPING: ("sleep",),
    FOR_ROOM: ("sleep_for_room",),
    UNTIL_IDLE: ("sleep_until_idle",),
    STARTING: ("start_wait",),
    INTERRUPTED: ("start_wait", "interrupt"),
    WAITING: ("start_wait", "wait_started"),
    UNBLOCKING: ("start_wait", "wait_started", "interrupt"),
    CLAIMING: ("start_wait", "wait_started", "read_published"),
}


def send(machine: WaitMachine, event: str) -> object:
    events: dict[str, Callable[[], object]] = {
        "sleep": lambda: machine.sleep(SLEEPING),
        "sleep_for_room": lambda: machine.sleep(FOR_ROOM),
        "sleep_until_idle": lambda: machine.sleep(UNTIL_IDLE),
        "read_published": lambda: machine.read_returned(""),
        "read_unblocked": lambda: machine.read_returned(machine.unblock_value),
        "read_unblocked_late": lambda: machine.read_returned(str(int(machine.unblock_value) - 1)),
    }
    return events[event]() if event in events else getattr(machine, event)()


def machine_in(state: WaitState) -> WaitMachine:
    machine = WaitMachine()
    for event in WAYS[state]:
        send(machine, event)
    assert machine.state is state
    assert not machine.needs_poll
    return machine


TRANSITIONS: list[tuple[WaitState, str, WaitState, Action | None]] = [
    (ACTIVE, "begin_claim", ACTIVE, None),
    (ACTIVE, "notify", ACTIVE, None),
    (ACTIVE, "interrupt", ACTIVE, None),
    (ACTIVE, "sleep", SLEEPING, None),
    (ACTIVE, "sleep_for_room", FOR_ROOM, None),
    (ACTIVE, "sleep_until_idle", UNTIL_IDLE, None),
    (SLEEPING, "await_idle", UNTIL_IDLE, None),
    *((state, event, ACTIVE, END_SLEEP) for state, event in product(sorted(ASLEEP, key=str), ("notify", "interrupt"))),
    (ACTIVE, "start_wait", STARTING, None),
    (STARTING, "notify", INTERRUPTED, None),
    (STARTING, "interrupt", INTERRUPTED, None),
    (STARTING, "wait_started", WAITING, None),
    (INTERRUPTED, "wait_started", UNBLOCKING, UNBLOCK),
    (STARTING, "already_notified", CLAIMING, None),
    (INTERRUPTED, "already_notified", CLAIMING, None),
    (WAITING, "notify", UNBLOCKING, UNBLOCK),
    (WAITING, "interrupt", UNBLOCKING, UNBLOCK),
    (WAITING, "read_published", CLAIMING, None),
    (UNBLOCKING, "read_published", CLAIMING, None),
    (UNBLOCKING, "read_unblocked", CLAIMING, None),
    *((state, "notify", state, None) for state in (INTERRUPTED, UNBLOCKING, CLAIMING)),
    *((state, "interrupt", state, None) for state in (INTERRUPTED, UNBLOCKING, CLAIMING)),
    # The pause before a wait may end when the sleep has ended already.
    *((state, "await_idle", state, None) for state in (ACTIVE, FOR_ROOM, UNTIL_IDLE)),
    # After `already_notified`, and where the server refuses blocking reads.
    *((state, "read_published", CLAIMING, None) for state in (STARTING, CLAIMING)),
    *((state, "end_wait", ACTIVE, None) for state in sorted(IN_WAIT, key=str)),
]


@pytest.mark.promise("WAKE-1", "WAKE-2")
@pytest.mark.parametrize(("state", "event", "following", "action"), TRANSITIONS)
def test_each_transition(state: WaitState, event: str, following: WaitState, action: Action | None) -> None:
    machine = machine_in(state)
    assert send(machine, event) is action
    assert machine.state is following


@pytest.mark.parametrize("state", sorted(ASLEEP, key=str))
@pytest.mark.parametrize("notified", [True, False])
def test_a_sleep_ends_awake_and_knows_whether_it_was_notified(state: WaitState, notified: bool) -> None:
    machine = machine_in(state)
    if notified:
        machine.notify()
    assert machine.end_sleep() is notified
    assert machine.state is ACTIVE
    assert not machine.needs_poll


def test_a_wait_that_starts_after_a_notification_is_interrupted_and_its_claim_answers_it() -> None:
    machine = machine_in(ACTIVE)
    machine.notify()
    assert machine.needs_poll
    machine.start_wait()
    assert machine.state is INTERRUPTED
    machine.end_wait()
    assert not machine.needs_poll


@pytest.mark.promise("WAKE-1")
@pytest.mark.parametrize(
    ("events", "needs_poll"),
    [
        # An unblock of our own releases a claim that begins after what was notified before it.
        (("start_wait", "wait_started", "notify", "read_unblocked"), False),
        (("start_wait", "notify", "notify", "wait_started", "read_unblocked"), False),
        # What is notified after the unblock was sent may have come after the claim began.
        (("start_wait", "wait_started", "notify", "notify", "read_unblocked"), True),
        (("start_wait", "wait_started", "interrupt", "notify", "read_unblocked"), True),
        (("start_wait", "wait_started", "notify", "read_unblocked", "notify"), True),
        # A publish or the time limit ended the wait: its claim may have begun before the notification.
        (("start_wait", "wait_started", "notify", "read_published"), True),
        (("start_wait", "wait_started", "read_published", "notify"), True),
        (("start_wait", "notify"), True),
        # The unblock of an earlier wait, which came too late for that one, does not count for this one.
        (("start_wait", "wait_started", "notify", "read_unblocked_late"), True),
        # An interrupt needs no claim but the one behind the wait.
        (("start_wait", "wait_started", "interrupt", "read_unblocked"), False),
        (("start_wait", "wait_started", "interrupt", "read_published"), False),
        # Chosen by a publish on the way to the server: its notification is answered by the claim, a second one is not.
        (("start_wait", "already_notified", "read_published"), False),
        (("start_wait", "already_notified", "read_published", "notify"), False),
        (("start_wait", "notify", "already_notified", "read_published"), False),
        (("start_wait", "notify", "already_notified", "notify", "read_published"), True),
        (("start_wait", "already_notified", "notify", "read_published", "notify"), True),
    ],
)
def test_a_notification_that_no_claim_has_answered_needs_a_poll(events: tuple[str, ...], needs_poll: bool) -> None:
    machine = WaitMachine()
    for event in events:
        send(machine, event)
    machine.end_wait()
    assert machine.needs_poll is needs_poll
    machine.begin_claim()
    assert not machine.needs_poll


def test_a_notification_that_comes_after_the_wait_it_belongs_to_still_needs_a_poll() -> None:
    """The registration may have been lost without a notification: then this one is of something else."""
    machine = WaitMachine()
    for event in ("start_wait", "already_notified", "read_published", "end_wait", "notify"):
        send(machine, event)
    assert machine.needs_poll


def test_each_wait_has_an_unblock_value_of_its_own() -> None:
    machine = WaitMachine()
    values = set()
    for _ in range(3):
        machine.start_wait()
        values.add(machine.unblock_value)
        machine.end_wait()
    assert len(values) == 3


def test_the_diagram_names_each_state_and_each_event() -> None:
    drawing = wait_machine.__doc__ or ""
    events = {name for name in vars(WaitMachine) if not name.startswith("_")} - {"state", "needs_poll", "unblock_value"}
    names = set(drawing.replace(",", " ").replace("…", " ").split())
    assert {state.name for state in WaitState} <= names
    assert events <= names
    assert {action.name for action in Action} <= names


class ModelServer:
    """A server and the network to it: requests and replies are under way until a step delivers the next one."""

    def __init__(self) -> None:
        self.requests: list[str | None] = [None]  # None: the commands of the wait; else the value of an unblock
        self.replies: list[str | None] = []
        self.registered = False
        self.unblocks: list[str] = []
        #: The step in which the claim began.
        self.claim_began: int | None = None

    def receive(self, step: int) -> None:
        request = self.requests.pop(0)
        if request is None:
            self.registered = True
            self.replies.append(None)
        else:
            self.unblocks.append(request)
        self._read(step)

    def publish(self, step: int) -> None:
        if self.registered:
            self.unblocks.append("")
            self._read(step)

    def _read(self, step: int) -> None:
        if self.unblocks and self.claim_began is None:
            self.claim_began = step
            self.replies.append(self.unblocks.pop(0))


@pytest.mark.promise("WAKE-1")
@given(st.lists(st.sampled_from(["notify", "interrupt", "publish", "to server", "to client"]), max_size=14))
def test_no_notification_is_lost_and_every_wait_can_be_ended(steps: list[str]) -> None:
    machine, server = WaitMachine(), ModelServer()
    machine.start_wait()
    notified_at: list[int] = []
    for step, event in enumerate([*steps, *["to server", "to client"] * 4]):
        action = None
        if event == "notify":
            notified_at.append(step)
            action = machine.notify()
        elif event == "interrupt":
            action = machine.interrupt()
        elif event == "publish":
            server.publish(step)
        elif event == "to server" and server.requests:
            server.receive(step)
        elif event == "to client" and server.replies:
            reply = server.replies.pop(0)
            if reply is None:
                action = machine.wait_started()
            else:
                machine.read_returned(reply)
        if action is UNBLOCK:
            server.requests.append(machine.unblock_value)
    assert not server.requests
    if "notify" in steps or "interrupt" in steps:
        assert server.claim_began is not None
    machine.end_wait()
    if server.claim_began is None or any(step > server.claim_began for step in notified_at):
        assert machine.needs_poll is bool(notified_at)
    if not notified_at:
        assert not machine.needs_poll
