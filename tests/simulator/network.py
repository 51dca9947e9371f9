"""The link between a process and the store: how long requests and answers take, and what goes wrong with them.

It stands where executors and wake-up transports of a real store have their connections. A request that is lost, or
whose answer is, ends as a connection does on which nothing comes: after a time of silence, with `OutcomeUnknown`. A
link may know that sooner, as a connection that is reset does. A connection that is refused is `StoreUnavailable`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, cast

from waypost.errors import OutcomeUnknown, StoreUnavailable
from waypost.store.port import BlockingWaiter, Call
from waypost.wake.port import Topic

if TYPE_CHECKING:
    from tests.simulator.loop import VirtualTimeLoop
    from tests.simulator.process import SimulatedProcess
    from tests.simulator.store_node import RemoteCall, StoreNode
    from tests.simulator.threads import Threads

T = TypeVar("T")

#: How long a connection waits for an answer while nothing comes: as the drivers of the two servers do.
SILENCE_SECONDS = (2.0, 30.0)
#: A part of the lost answers is noticed at once, as a connection that is reset.
RESET_SHARE = 0.5
#: The bytes of a request or an answer besides the bodies.
OVERHEAD_BYTES = 200


@dataclass
class LinkState:
    """What is wrong with a link now. Shares are between 0 and 1."""

    lose_requests: float = 0.0
    lose_replies: float = 0.0
    double_requests: float = 0.0
    lose_notifications: float = 0.0
    late_replies: float = 0.0
    late_seconds: float = 0.0
    reorder: float = 0.0
    reorder_seconds: float = 0.0
    cut_to_store: bool = False
    cut_from_store: bool = False
    refused: bool = False
    delay: float = 0.0
    bytes_per_second: float | None = None

    def add(self, fault: str, arguments: dict[str, Any]) -> None:
        """One more fault."""
        share = arguments.get("share", 1.0)
        match fault:
            case "lose_requests" | "lose_replies" | "double_requests" | "lose_notifications":
                setattr(self, fault, max(getattr(self, fault), share))
            case "late_replies":
                self.late_replies = max(self.late_replies, share)
                self.late_seconds = max(self.late_seconds, arguments["delay"])
            case "reorder":
                self.reorder = max(self.reorder, share)
                self.reorder_seconds = max(self.reorder_seconds, arguments["delay"])
            case "slow_link":
                self.delay = max(self.delay, arguments.get("delay", 0.0))
                speed = arguments.get("bytes_per_second")
                if speed is not None:
                    self.bytes_per_second = min(speed, self.bytes_per_second or speed)
            case "partition":
                way = arguments.get("way", "both")
                self.cut_to_store = self.cut_to_store or way in ("both", "to_store")
                self.cut_from_store = self.cut_from_store or way in ("both", "from_store")
                self.refused = self.refused or way == "refused"


Done = Callable[[Any], None]


class Reply:
    """The answer to a request, on its way."""

    __slots__ = ("_done", "_link", "_results", "_steps", "in_thread")

    def __init__(self, link: Link, results: list[Any], steps: list[int], done: Done) -> None:
        self._link = link
        self._results = results
        self._steps = steps
        self._done = done
        self.in_thread = getattr(done, "in_thread", False)

    def __call__(self) -> None:
        link = self._link
        for step in self._steps:
            link.on_reply(link.process.name, step)
        if link.before_reply is not None:
            link.before_reply()
            if link.process.dead:
                return
        self._done(self._results)


class Link:
    """One process and one store. Answers come back as steps of the process."""

    def __init__(
        self,
        loop: VirtualTimeLoop,
        process: SimulatedProcess,
        node: StoreNode,
        random: Random,
        delay_range: tuple[float, float],
        on_reply: Callable[[str, int], None],
    ) -> None:
        self.loop = loop
        self.process = process
        self.node = node
        self.state = LinkState()
        self.has_faults = False
        self.silence_seconds = random.choice(SILENCE_SECONDS)
        #: Called as a request is about to leave, when it has left, and as an answer comes.
        self.before_request: Callable[[], None] | None = None
        self.after_request: Callable[[], None] | None = None
        self.before_reply: Callable[[], None] | None = None
        self._random = random
        self._low, self._high = delay_range[0] / 2, delay_range[1] / 2
        self.on_reply = on_reply
        self._faults: dict[int, tuple[str, dict[str, Any]]] = {}
        #: Until when the link is busy with what was sent before, both ways.
        self._busy_out = self._busy_in = 0.0

    def begin_fault(self, number: int, fault: str, arguments: dict[str, Any]) -> None:
        self._faults[number] = (fault, arguments)
        self._update()

    def end_fault(self, number: int) -> None:
        self._faults.pop(number, None)
        self._update()

    def _update(self) -> None:
        self.state = LinkState()
        for fault, arguments in self._faults.values():
            self.state.add(fault, arguments)
        self.has_faults = bool(self._faults)

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self._random.random() < share

    def _delay(self, size: int, *, out: bool) -> float:
        """How long so many bytes take one way."""
        seconds = self._random.uniform(self._low, self._high)
        state = self.state
        if not self.has_faults:
            return seconds
        seconds += state.delay / 2
        if self._happens(state.reorder):
            seconds += self._random.uniform(0.0, state.reorder_seconds)
        if state.bytes_per_second is not None:
            now = self.loop.now
            begin = max(now, self._busy_out if out else self._busy_in)
            end = begin + (size + OVERHEAD_BYTES) / state.bytes_per_second
            if out:
                self._busy_out = end
            else:
                self._busy_in = end
            seconds += end - now
        return seconds

    # ---- requests ----------------------------------------------------------------------------------------

    def request(self, calls: Sequence[RemoteCall], done: Done) -> None:
        """Send calls as one flush. `done` gets a list of results and errors, or the error of them all."""
        if self.before_request is not None:
            self.before_request()
            if self.process.dead:
                return
        self._send(calls, done)
        if self.after_request is not None:
            self.after_request()

    def _send(self, calls: Sequence[RemoteCall], done: Done) -> None:
        loop, state = self.loop, self.state
        if state.refused or (self.node.is_down and not state.cut_to_store):
            error = StoreUnavailable("the connection was refused")
            loop.at(loop.now + self._delay(0, out=True), done, error, process=self.process)
            return
        seconds = self._delay(sum(call.size for call in calls), out=True)
        if state.cut_to_store or self._happens(state.lose_requests):
            self._lose(done)
            return
        loop.at(loop.now + seconds, self._arrive, calls, done)
        if self._happens(state.double_requests):
            # The driver sends it again below us; whichever answer comes first counts.
            again = seconds + self._random.uniform(0.0, 2.0)
            loop.at(loop.now + again, self._arrive, calls, done)

    def _lose(self, done: Done) -> None:
        """No answer will come: the process notices a reset, or after a while that nothing comes."""
        seconds = self.silence_seconds
        if not (self.state.cut_to_store or self.state.cut_from_store) and self._happens(RESET_SHARE):
            seconds = self._random.uniform(self._low, self._high)
        self.loop.at(self.loop.now + seconds, done, OutcomeUnknown("no answer came"), process=self.process)

    def _arrive(self, calls: Sequence[RemoteCall], done: Done) -> None:
        if self.node.is_down:
            self._lose(done)
            return
        state, loop = self.state, self.loop
        count = arriving = len(calls)
        if count > 1 and self._happens(max(state.lose_requests, state.lose_replies)):
            # The connection breaks in the middle of a flush: the first calls arrive, and fewer answers come back.
            arriving = self._random.randint(0, count)
        results, steps = self.node.run(calls[:arriving], self.process.name)
        if arriving < count:
            answered = self._random.randint(0, arriving)
            results = results[:answered] + [OutcomeUnknown("the connection broke")] * (count - answered)
            loop.at(
                loop.now + self._delay(0, out=False), Reply(self, results, steps[:answered], done), process=self.process
            )
            return
        if state.cut_from_store or self._happens(state.lose_replies):
            self._lose(done)
            return
        # How fast a slow link is does not matter for the silence: bytes keep coming.
        seconds = self._delay(sum(map(reply_size, results)), out=False)
        late = self.lateness()
        if late > self.silence_seconds:
            self._lose(done)
            return
        loop.at(loop.now + seconds + late, Reply(self, results, steps, done), process=self.process)

    def connect(self, done: Done) -> None:
        """Make a connection. `done` gets None, or the error."""

        def ended(answer: Any) -> None:
            done(StoreUnavailable("the store cannot be reached") if isinstance(answer, Exception) else None)

        ended.in_thread = getattr(done, "in_thread", False)  # type: ignore[attr-defined]
        self.exchange(lambda: None, ended)

    # ---- a claim behind a blocking wait --------------------------------------------------------------------

    def request_after_wait(self, call: RemoteCall, wait: BlockingWait, done: Done) -> BlockedClaim:
        """Send a claim that begins when its sleeper is woken, on a connection of its own."""
        claim = BlockedClaim(self, call, wait, done)
        if self.before_request is not None:
            self.before_request()
            if self.process.dead:
                return claim
        state = self.state
        if state.refused or (self.node.is_down and not state.cut_to_store):
            self.loop.at(self.loop.now + self._delay(0, out=True), claim.fail_unsent, process=self.process)
        elif state.cut_to_store or self._happens(state.lose_requests):
            claim.break_off()
        else:
            self.loop.at(self.loop.now + self._delay(0, out=True), claim.arrive)
        if self.after_request is not None:
            self.after_request()
        return claim

    def lateness(self) -> float:
        """By how much an answer that leaves the store now is late."""
        if not self._happens(self.state.late_replies):
            return 0.0
        # Half of them by nearly the whole time: what is late by more than a lease must happen.
        least = 0.9 if self._random.random() < 0.5 else 0.0
        return self.state.late_seconds * self._random.uniform(least, 1.0)

    def loses_reply(self) -> bool:
        """Whether an answer that leaves the store now is lost."""
        return self.state.cut_from_store or self._happens(self.state.lose_replies)

    # ---- notifications -------------------------------------------------------------------------------------

    def exchange(self, action: Callable[[], Any], done: Done) -> None:
        """Do something at the store's notification server, and answer with what it returns or an error."""

        def arrive() -> None:
            if self.node.is_down or self.state.cut_to_store or self.state.refused:
                return fail()
            value = action()
            if self.state.cut_from_store:
                return fail()
            self.loop.at(self.loop.now + self._delay(0, out=False), done, value, process=self.process)
            return None

        def fail() -> None:
            seconds = 0.01 if self.node.is_down or self.state.refused else NOTIFICATION_TIMEOUT_SECONDS
            error = ConnectionError("the notification server does not answer")
            self.loop.at(self.loop.now + seconds, done, error, process=self.process)

        self.loop.at(self.loop.now + self._delay(0, out=True), arrive)

    def send_notification(self, topic: Topic, notifications: Sequence[str]) -> None:
        """Send notifications to the store's server, which passes them on; nothing says whether they arrive."""
        if self.state.cut_to_store or self._happens(self.state.lose_notifications):
            return
        self.loop.at(self.loop.now + self._delay(0, out=True), self.node.notify, topic, list(notifications))

    def deliver_notification(self, transport: SimulatedTransport, topic: Topic, notifications: list[str]) -> None:
        """Bring notifications to the process."""
        if self.state.cut_from_store or self._happens(self.state.lose_notifications):
            return
        seconds = self._delay(0, out=False)
        self.loop.at(self.loop.now + seconds, transport.receive, topic, notifications, process=self.process)


#: How long a transport waits for an answer of the notification server.
NOTIFICATION_TIMEOUT_SECONDS = 3.0


def reply_size(result: Any) -> int:
    """About how many bytes an answer has."""
    leases = getattr(result, "leases", None)
    return sum(len(lease.envelope) for lease in leases) if leases else 0


@dataclass(frozen=True)
class BlockingWait:
    """A wait in the store before a claim: of which sleeper of a queue, for how long, and who follows it."""

    queue: str
    sleeper: str
    seconds: float
    waiter: BlockingWaiter


class BlockedClaim:
    """A claim behind a blocking wait, as its connection and the store know it."""

    def __init__(self, link: Link, call: RemoteCall, wait: BlockingWait, done: Done) -> None:
        self.link = link
        self.wait = wait
        self._call = call
        self._done = done
        self._broken = False
        self._closed = False
        self._last_reply = 0.0

    def arrive(self) -> None:
        """At the store: the wait begins."""
        if self.link.node.is_down:
            self.break_off()
        elif not self.link.process.dead:
            self.link.node.start_wait(self)

    def started(self, *, waits: bool) -> None:
        """At the store: the first answer."""
        self._reply(self.wait.waiter.started, waits=waits)

    def release(self, value: str) -> None:
        """At the store: the wait ends, and the claim runs."""
        link = self.link
        results, steps = link.node.run([self._call], link.process.name)
        self._reply(self.wait.waiter.ended, value)
        self._reply(Reply(link, results, steps, self._done))

    def _reply(self, callback: Callable[..., object], *given: Any, **named: Any) -> None:
        """Answers come in order; after one that is lost none comes."""
        link = self.link
        if self._broken:
            return
        if link.loses_reply():
            self.break_off()
            return
        now = link.loop.now
        self._last_reply = max(self._last_reply, now + link._delay(0, out=False) + link.lateness())

        def arrive() -> None:
            if not self._closed:
                callback(*given, **named)

        link.loop.at(self._last_reply, arrive, process=link.process)

    def break_off(self) -> None:
        """No answer comes any more. The process notices that by a reset, or when the wait should long be over."""
        self._broken = True
        link = self.link
        reset = not (link.state.cut_to_store or link.state.cut_from_store) and link._happens(RESET_SHARE)
        if reset:
            link.node.forget_wait(self)
        seconds = 0.0 if reset else self.wait.seconds + link.silence_seconds
        link.loop.at(link.loop.now + seconds, self.give_up, process=link.process)

    def fail_unsent(self) -> None:
        self._closed = True
        self._done(StoreUnavailable("the connection was refused"))

    def give_up(self) -> None:
        """Close the connection. The store learns of it unless it is cut off; what it has begun it finishes."""
        if self._closed:
            return
        self._closed = True
        link = self.link
        if not link.state.cut_to_store:
            link.loop.at(link.loop.now + link._delay(0, out=True), link.node.forget_wait, self)
        self._done(OutcomeUnknown("the connection of a blocking wait was given up"))


class SimulatedAsyncExecutor:
    """The connection of an event loop."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def run(self, call: Call[T]) -> T:
        ours = cast("RemoteCall", call)
        if ours.wait is not None:
            (result,) = await self._send_after_wait(ours, ours.wait)
        else:
            (result,) = await self._send([ours])
        if isinstance(result, Exception):
            raise result
        return cast(T, result)

    async def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        return await self._send([cast("RemoteCall", call) for call in calls])

    async def _send(self, calls: list[RemoteCall]) -> list[Any]:
        if not calls:
            return []
        future: asyncio.Future[Any] = self._link.loop.create_future()

        def done(answer: Any) -> None:
            if not future.done():
                future.set_result(answer)

        self._link.request(calls, done)
        answer = await future
        return [answer] * len(calls) if isinstance(answer, Exception) else answer

    async def _send_after_wait(self, call: RemoteCall, wait: BlockingWait) -> list[Any]:
        future: asyncio.Future[Any] = self._link.loop.create_future()

        def done(answer: Any) -> None:
            if not future.done():
                future.set_result(answer)

        claim = self._link.request_after_wait(call, wait, done)
        wait.waiter.sent(claim.give_up)
        try:
            answer = await future
        except BaseException:
            claim.give_up()
            raise
        return [answer] if isinstance(answer, Exception) else cast("list[Any]", answer)

    async def close(self) -> None:
        """Nothing to close."""


class SimulatedExecutor:
    """The same for threads."""

    def __init__(self, link: Link, threads: Threads) -> None:
        self._link = link
        self._threads = threads

    def run(self, call: Call[T]) -> T:
        (result,) = self.run_many([call])
        if isinstance(result, Exception):
            raise result
        return result

    def run_many(self, calls: Iterable[Call[T]]) -> list[T | Exception]:
        chosen = [cast("RemoteCall", call) for call in calls]
        if not chosen:
            return []
        thread = self._threads.blocking("the store")
        answer = thread.block(None, lambda done: self._link.request(chosen, done))
        return [answer] * len(chosen) if isinstance(answer, Exception) else cast("list[T | Exception]", answer)

    def close(self) -> None:
        """Nothing to close."""


class SimulatedTransport:
    """The connection of a `ThreadHub` to the notification server beside the store."""

    def __init__(self, link: Link, threads: Threads) -> None:
        self._link = link
        self._threads = threads
        self._received: deque[tuple[Topic, list[str]]] = deque()
        self._wake: Callable[[Any], None] | None = None
        self._interrupted = False
        self._broken = False

    def _call(self, action: Callable[[], Any]) -> None:
        answer = self._threads.blocking("the notification server").block(
            None, lambda done: self._link.exchange(action, done)
        )
        if isinstance(answer, Exception):
            raise answer

    def open(self) -> None:
        self._call(lambda: self._link.node.connect(self, self._link))

    def listen(self, topics: Sequence[Topic]) -> None:
        self._call(lambda: self._link.node.subscribe(self, topics))

    def unlisten(self, topics: Sequence[Topic]) -> None:
        self._call(lambda: self._link.node.unsubscribe(self, topics))

    def send(self, topic: Topic, notifications: Sequence[str]) -> None:
        self._link.send_notification(topic, notifications)

    def wait(self, seconds: float) -> list[tuple[Topic, list[str]]]:
        if not (self._received or self._interrupted or self._broken):

            def begin(done: Callable[[Any], None]) -> None:
                self._wake = done

            self._threads.blocking("notifications").block(seconds, begin)
            self._wake = None
        self._interrupted = False
        if self._broken:
            raise ConnectionError("the connection to the notification server was closed")
        received = list(self._received)
        self._received.clear()
        return received

    def probe(self) -> None:
        self._call(lambda: self._link.node.check_connected(self))

    def interrupt(self) -> None:
        self._interrupted = True
        self._end_wait()

    def receive(self, topic: Topic, notifications: list[str]) -> None:
        self._received.append((topic, notifications))
        self._end_wait()

    def break_off(self) -> None:
        """The server has closed the connection."""
        self._broken = True
        self._end_wait()

    def close(self) -> None:
        self._link.node.disconnect(self)

    def _end_wait(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            # The thread goes on in a step of its own, not in the middle of the one that ends its wait.
            self._link.loop.soon(self._link.process, wake, True)
