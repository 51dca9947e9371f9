"""Shared calls: single publishes, or single settles, that are made at the same time are sent in one call.

While a publish to a queue is in progress, further ones of the same client wait in line. When its reply has come, the
first in line sends all of them as one call, and each gets its own result. A publish that finds no call in progress is
sent at once: it never waits for others. Tasks of one event loop share a line, and so do threads of one client.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from waypost.errors import QueueFull, StoreUnavailable, WaypostError
from waypost.identity import Operation
from waypost.operations.flow import ClientContext, Flow, Sending, Turn
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX
from waypost.store.port import Call, Woken

if TYPE_CHECKING:
    import asyncio

Item = TypeVar("Item")
Result = TypeVar("Result")

#: A call without a reply within this time, as on a broken connection, no longer delays the line.
OVERTAKE_SECONDS = 0.25

#: How many places in line are considered for one call: a very long line is not read completely for each call.
PLACES_READ_MAX = 2 * CHUNK_MESSAGES_MAX


class Shared(Protocol[Item, Result]):
    """A call that takes one item or many, and returns their results in order."""

    #: Whether to run it twice is harmless, because a lease guards it.
    fenced: bool

    def call(
        self, context: ClientContext, queue: str, items: Sequence[Item], operation: Operation
    ) -> Call[Woken[list[Result]]]:
        """Return the call for these items."""
        ...

    def with_new_ids(self, context: ClientContext, queue: str, items: Sequence[Item]) -> Sequence[Item]:
        """Return the same items with other ids: another process may have used theirs."""
        ...

    def key(self, item: Item) -> Hashable:
        """Return the key that only one item of a call may have, or None."""
        ...

    def size(self, item: Item) -> int:
        """Return its size in bytes."""
        ...


class _Lead:
    """The right to send, passed on once: when the first attempt has ended, or by a caller that gives up earlier."""

    __slots__ = ("_line", "_passed")

    def __init__(self, line: Line[Any, Any]) -> None:
        self._line = line
        self._passed = False

    def pass_on(self) -> None:
        if not self._passed:
            self._passed = True
            self._line.next(self)


class _Place(Turn, Generic[Item, Result]):
    """An item in line. Its wait ends with a result, an error, or the duty to send the next call."""

    __slots__ = ("alone", "batch", "error", "gone", "item", "lead", "result")

    def __init__(self, item: Item, future: asyncio.Future[None] | None) -> None:
        super().__init__(future)
        self.item = item
        self.result: Result | None = None
        self.error: Exception | None = None
        #: Set if it is the first in line and sends the next call.
        self.lead: _Lead | None = None
        #: A call that it must send, begun by itself or by a caller that was cancelled.
        self.batch: _Batch[Item, Result] | None = None
        #: Whether it is sent in a separate call: the store refused the call with all items.
        self.alone = False
        #: Whether its caller was cancelled.
        self.gone = False

    @property
    def leads(self) -> bool:
        """Whether it sends the next call."""
        return self.lead is not None

    @property
    def is_answered(self) -> bool:
        """Whether it has a result or an error, or must be sent alone."""
        return self.alone or self.error is not None or self.result is not None

    @property
    def is_decided(self) -> bool:
        """Whether its wait has ended."""
        return self.is_answered or self.batch is not None


class _Batch(Generic[Item, Result]):
    """Items that are sent in one call, and the operation that sends them."""

    __slots__ = ("items", "places", "sending")

    def __init__(
        self, shared: Shared[Item, Result], context: ClientContext, queue: str, places: list[_Place[Item, Result]]
    ) -> None:
        self.places = places
        self.items: Sequence[Item] = [place.item for place in places]

        def identify() -> None:
            self.items = shared.with_new_ids(context, queue, self.items)

        self.sending: Sending[Woken[list[Result]]] = Sending(
            context,
            queue,
            lambda operation: shared.call(context, queue, self.items, operation),
            fenced=shared.fenced,
            identify=identify,
        )


class Line(Generic[Item, Result]):
    """The items for one queue that wait for the call in progress."""

    __slots__ = ("_lead", "_lock", "_on_loop", "_owner", "_since", "_timer", "_waiting", "shared")

    def __init__(self, shared: Shared[Item, Result], *, on_loop: bool) -> None:
        self.shared = shared
        self._on_loop = on_loop
        self._lock = threading.Lock()
        #: The right to send of the call for which the line waits: the newest one. An older call that is slow, or whose
        #: thread was interrupted before it was sent, is not waited for any longer.
        self._lead: _Lead | None = None
        #: When that call began.
        self._since = 0.0
        #: The thread that sends: a publish that it makes meanwhile, as in a log handler, must not wait for itself.
        self._owner = 0
        self._waiting: list[_Place[Item, Result]] = []
        self._timer: asyncio.TimerHandle | None = None

    def join(self, item: Item) -> _Place[Item, Result] | _Lead:
        """Return a place in line, or the right to send if the caller can send its own call now."""
        with self._lock:
            if self._lead is None:
                self._lead = lead = _Lead(self)
                self._begin()
                return lead
            place: _Place[Item, Result] = _Place(item, self._future() if self._on_loop else None)
            # On an event loop nothing else of this thread runs until the first step of a call begins to wait.
            place.alone = not self._on_loop and self._owner == threading.get_ident()
            if not place.alone:
                self._waiting.append(place)
            return place

    def next(self, lead: _Lead) -> None:
        """Let the first in line send the next call, because the call in progress has ended."""
        with self._lock:
            self._next(lead)

    def take(self, places: list[_Place[Item, Result]]) -> None:
        """Add to the first place those whose items fit into one call with it. Equal keys stay in line."""
        key_of, size_of, first = self.shared.key, self.shared.size, places[0]
        keys, room = {key_of(first.item)}, CHUNK_BYTES_MAX - size_of(first.item)
        with self._lock:
            self._begin()
            left: list[_Place[Item, Result]] = []
            for place in self._waiting[:PLACES_READ_MAX]:
                if place.gone:
                    continue
                key, size = key_of(place.item), size_of(place.item)
                if size > room or len(places) == CHUNK_MESSAGES_MAX or (key is not None and key in keys):
                    left.append(place)
                else:
                    places.append(place)
                    if key is not None:
                        keys.add(key)
                    room -= size
            self._waiting[:PLACES_READ_MAX] = left

    def withdraw(self, place: _Place[Item, Result]) -> None:
        """Withdraw the item of a cancelled caller: it is not sent, or its call continues without it."""
        with self._lock:
            # A place in line is skipped later: to search the line for each of thousands of them would take seconds.
            place.gone = True
            if place.batch is not None:
                self._hand_on(place.batch)
            elif place.lead is not None:
                self._next(place.lead)

    def give_up(self, sender: _Place[Item, Result], places: Sequence[_Place[Item, Result]]) -> None:
        """Let another caller of the call continue, because the sender was cancelled.

        Without a call yet, each of the places is sent alone.
        """
        with self._lock:
            sender.gone = True
            if sender.batch is not None:
                self._hand_on(sender.batch)
                return
            for place in places:
                if place is not sender:
                    place.alone = True
                    if place in self._waiting:
                        self._waiting.remove(place)
                    place.end()

    def overtake(self, place: _Place[Item, Result]) -> bool:
        """Return whether this place, which has waited in a thread, no longer waits for the call under way."""
        with self._lock:
            if time.monotonic() - self._since >= OVERTAKE_SECONDS and place in self._waiting:
                self._waiting.remove(place)
                self._let_lead(place)
        return place.leads

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._owner = threading.get_ident()

    def _next(self, lead: _Lead) -> None:
        if lead is not self._lead:
            return  # the line no longer waits for this call
        self._owner, self._lead = 0, None
        if self._waiting:
            self._let_first_lead()

    def _let_first_lead(self) -> None:
        for index, place in enumerate(self._waiting):
            if not place.gone:
                del self._waiting[: index + 1]
                self._let_lead(place)
                return
        self._waiting.clear()

    def _let_lead(self, place: _Place[Item, Result]) -> None:
        place.lead = self._lead = _Lead(self)
        self._since = time.monotonic()
        place.end()

    def _hand_on(self, batch: _Batch[Item, Result]) -> None:
        # The store answers a repeat of an operation without doing it twice.
        batch.sending.may_have_run = True
        for place in batch.places:
            if place.is_answered:
                place.end()
        for place in batch.places:
            if not place.gone and not place.is_decided:
                place.batch = batch
                place.end()
                return
        batch.sending.end()

    def _future(self) -> asyncio.Future[None]:
        import asyncio

        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(OVERTAKE_SECONDS, self._on_timer, loop)
        return loop.create_future()

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the first in line go if the call in progress takes long. Runs at most once per `OVERTAKE_SECONDS`."""
        with self._lock:
            self._timer = None
            if not self._waiting:
                return
            left = OVERTAKE_SECONDS - (time.monotonic() - self._since)
            if left <= 0:
                self._let_first_lead()
            self._timer = loop.call_later(max(left, 0.01), self._on_timer, loop)


class Lines(Generic[Item, Result]):
    """The lines of a client's queues: one object for its threads, one for each of its event loops."""

    __slots__ = ("_by_queue", "_on_loop", "_shared")

    def __init__(self, shared: Shared[Item, Result], *, on_loop: bool) -> None:
        self._shared = shared
        self._on_loop = on_loop
        self._by_queue: dict[str, Line[Item, Result]] = {}

    def of(self, queue: str) -> Line[Item, Result]:
        """Return the line of a queue."""
        line = self._by_queue.get(queue)
        if line is None:
            line = self._by_queue.setdefault(queue, Line(self._shared, on_loop=self._on_loop))
        return line


def shares_calls(context: ClientContext, key: str | None) -> bool:
    """Return whether a message with this key, or without one, may share a call.

    In the user's own database an open transaction of a caller may lock a key, or the whole file: others in the same
    call would wait for it too, and the caller itself may be one of them.
    """
    transactions = context.store.transactions
    return transactions is None or (key is None and transactions.on_busy is None)


def send_in_line(context: ClientContext, queue: str, item: Item, line: Line[Item, Result]) -> Flow[Result]:
    """Send one item, with others if a call is under way, and return its own result."""
    place = line.join(item)
    if isinstance(place, _Lead):
        lead = place
        try:
            return (yield from _send_alone(context, queue, item, line.shared, lead.pass_on))
        finally:
            lead.pass_on()
    if not place.alone:
        try:
            while not (yield place):
                if line.overtake(place) or place.is_decided:
                    break
        except BaseException:
            line.withdraw(place)
            raise
    if place.lead is not None or place.batch is not None:
        places = [place]
        try:
            if place.batch is None:
                line.take(places)
                if len(places) > 1:
                    place.batch = _Batch(line.shared, context, queue, places)
            pass_on = None if place.lead is None else place.lead.pass_on
            if place.batch is None:
                return (yield from _send_alone(context, queue, item, line.shared, pass_on))
            yield from _send(context, place, place.batch, pass_on)
        except BaseException:
            # A thread can be interrupted anywhere: no other caller may wait for it forever.
            line.give_up(place, places)
            raise
        finally:
            if place.lead is not None:
                place.lead.pass_on()
    if place.alone:
        return (yield from _send_alone(context, queue, item, line.shared))
    if place.error is not None:
        raise place.error
    return place.result  # type: ignore[return-value]


def _send_alone(
    context: ClientContext,
    queue: str,
    item: Item,
    shared: Shared[Item, Result],
    attempted: Callable[[], None] | None = None,
) -> Flow[Result]:
    items: Sequence[Item] = (item,)

    def identify() -> None:
        nonlocal items
        items = shared.with_new_ids(context, queue, items)

    woken = yield from context.operate(
        queue,
        lambda operation: shared.call(context, queue, items, operation),
        fenced=shared.fenced,
        identify=identify,
        attempted=attempted,
    )
    return context.wake_and_report(woken)[0]


def _send(
    context: ClientContext,
    sender: _Place[Item, Result],
    batch: _Batch[Item, Result],
    attempted: Callable[[], None] | None,
) -> Flow[None]:
    """Send a batch and give each of its places its result or its error."""
    woken: Woken[list[Result]] | None = None
    try:
        yield from context.know_time()
        woken = yield from batch.sending.run(attempted)
        for place, result in zip(batch.places, woken.result, strict=True):
            place.result = result
    except WaypostError as error:
        refused = error.outcome == "not done" and not isinstance(error, StoreUnavailable)
        if isinstance(error, QueueFull) or (refused and not batch.sending.may_have_run):
            # Each is sent alone to find which of them can be stored: the others are refused one by one.
            for place in batch.places:
                place.alone = True
        else:
            for place in batch.places:
                place.error = error if place is sender else _copy_of(error)
    batch.sending.end()
    for place in batch.places:
        place.end()
    if woken is not None:
        context.wake_and_report(woken)


def _copy_of(error: WaypostError) -> WaypostError:
    """Return a copy of an error for another caller: each caller adds its own frames to the traceback."""
    try:
        return copy.copy(error)
    except Exception:
        return error  # an error of this class cannot be copied
