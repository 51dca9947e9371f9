"""The promoter: one leader makes timers ready when they are due, and wakes sleepers for them.

Claims promote too, so nothing depends on it. It serves sleeping workers that get no wake-up for a timer, and delivers
continuations whose sender died before it could.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from msgspec import Struct

from waypost.errors import OutcomeUnknown, StoreUnavailable
from waypost.operations.flow import ClientContext, Flow, Together
from waypost.operations.outgoing import deliver_outgoing
from waypost.policy import LEADER_TTL_MS, PROMOTE_MAX
from waypost.schedule.election import Candidate, Election, log
from waypost.times import to_ms, to_timedelta
from waypost.values import Promoted

#: How late a timer published after the last poll is promoted at most, if no worker is awake to claim it.
POLL_SECONDS = 1.0
#: How often it lists the queues, and delivers continuations that were left behind.
QUEUES_SECONDS = 5.0
QUEUES_PER_FLUSH = 64


class PromoterTick(Struct, frozen=True):
    """The result of a tick: timers made ready, timers left, and how late the oldest was."""

    election: Election
    promoted: int = 0
    depth: int = 0
    oldest_lag: timedelta = timedelta(0)
    # Exact: rounded to microseconds it could be 0 before there is something to do.
    _sleep_seconds: float = 0.0

    @property
    def sleep(self) -> timedelta:
        """How long until the next tick has something to do."""
        return timedelta(seconds=self._sleep_seconds)


class Promoter:
    """The state of the loop."""

    role = "promoter"

    def __init__(
        self,
        context: ClientContext,
        *,
        ttl_ms: int = LEADER_TTL_MS,
        on_tick: Callable[[PromoterTick], object] | None = None,
    ) -> None:
        self.context = context
        self.candidate = Candidate(context, self.role, name=context.worker, ttl_ms=ttl_ms)
        self._on_tick = on_tick
        self._queues: list[str] = []
        self._queues_at = 0.0

    def listen(self, wake: Callable[[], None]) -> None:
        """No notification is about what it does."""

    def refresh(self) -> None:
        """List the queues in the next tick."""
        self._queues_at = 0.0

    def hand_over(self) -> Flow[None]:
        """Give up the lead, so that another promoter leads at once."""
        yield from self.candidate.resign()

    def tick(self) -> Flow[PromoterTick]:
        """Stand for election; as the leader, promote what is due in every queue."""
        election = yield from self.candidate.elect()
        if election == "following":
            sleep = max(0.0, self.candidate.elect_at - self.context.monotonic())
            return self._report(PromoterTick(election, _sleep_seconds=sleep))
        if self.context.monotonic() >= self._queues_at:
            self._queues_at = self.context.monotonic() + QUEUES_SECONDS
            self._queues = yield from self.context.attempt(self.context.store.queues())
            if not self.context.store.capabilities.spans_queues:
                for queue in self._queues:
                    yield from deliver_outgoing(self.context, queue)
        promoted = depth = lag = 0
        sleep = POLL_SECONDS
        for at in range(0, len(self._queues), QUEUES_PER_FLUSH):
            part = self._queues[at : at + QUEUES_PER_FLUSH]
            results = yield Together([self.context.store.promote(queue) for queue in part])
            for queue, result in zip(part, results, strict=True):
                if isinstance(result, StoreUnavailable | OutcomeUnknown):
                    raise result
                if isinstance(result, Exception):
                    # One queue that cannot be served must not stop the timers of all others.
                    log.warning("timers of queue %s: %s", queue, result, extra={"event": "promotion_failed"})
                    continue
                timers = self.context.wake_and_report(result)
                promoted, depth, lag = promoted + timers.promoted, depth + timers.depth, max(lag, timers.oldest_lag_ms)
                sleep = min(sleep, _sleep_seconds(timers, POLL_SECONDS))
        return self._report(PromoterTick(election, promoted, depth, to_timedelta(lag), sleep))

    def _report(self, tick: PromoterTick) -> PromoterTick:
        self.context.emit(
            "promoter_tick", "", "success" if tick.promoted else "skipped", count=tick.promoted, depth=tick.depth,
            _wait_ms=to_ms(tick.oldest_lag), reason=tick.election,
        )  # fmt: skip
        if self._on_tick is not None:
            self._on_tick(tick)
        return tick


def _sleep_seconds(result: Promoted, most: float) -> float:
    if result.promoted == PROMOTE_MAX:
        return 0.0
    if result.next_due_ms is None or (result.next_due_ms == 0 and result.promoted == 0):
        return most  # no timer, or a paused queue, which promotes none
    return min(most, (result.next_due_ms + 1) / 1000)
