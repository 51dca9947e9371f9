"""Waiting for the end of a message or of a chain.

A waiting call registers with the store, and is woken like a sleeping worker. A lost wake-up costs at most one safety
poll; a message that is dead, cancelled or removed ends the wait with an error.
"""

from __future__ import annotations

from waypost import codec
from waypost.checks import check_chain, check_seconds
from waypost.errors import ChainFailed, EndUnknown, MessageDead, MessageRemoved, Unfinished, WaitTimeout
from waypost.operations.flow import ClientContext, Flow, Sleep
from waypost.operations.manage import history
from waypost.policy import SAFETY_POLL_SECONDS, UNWOKEN_POLL_SECONDS
from waypost.times import Duration
from waypost.values import Published, Watched, split_chain_id, split_error

#: The pause between the first polls: so the end of a fast handler is noticed soon, even without wake-ups.
POLL_FIRST_SECONDS = 0.02


class _EndWait:
    """A wait for an end: its deadline, its wake event, and its pauses between polls."""

    __slots__ = ("_context", "_deadline", "_next", "_queue", "_timeout", "_wake_event")

    def __init__(self, context: ClientContext, queue: str, timeout: float) -> None:
        self._context = context
        self._queue = queue
        self._timeout = timeout
        self._deadline = context.monotonic() + timeout
        self._next = POLL_FIRST_SECONDS
        self._wake_event = context.wakeups.acquire_wake_event(context.worker, queue, for_an_end=True)

    def listen(self) -> str | None:
        """Call before a poll: clear the wake event and return its name, None if there is no wake channel."""
        if self._wake_event is None:
            return None
        self._wake_event.clear()
        return self._wake_event.name

    def sleep(self, what: str) -> Sleep:
        """Return the sleep until the next poll; raises `WaitTimeout` when the time is up."""
        remaining = self._deadline - self._context.monotonic()
        if remaining <= 0:
            raise WaitTimeout(f"{what} did not end within {self._timeout:g} s; it continues, and you can wait again")
        if self._wake_event is not None and self._wake_event.working:
            return Sleep(min(SAFETY_POLL_SECONDS, remaining), wake_event=self._wake_event)
        seconds, self._next = self._next, min(self._next * 2, UNWOKEN_POLL_SECONDS)
        return Sleep(min(seconds, remaining), wake_event=self._wake_event)

    def end(self) -> None:
        """End the wait."""
        if self._wake_event is not None:
            self._context.wakeups.release_wake_event(self._queue, self._wake_event, for_an_end=True)


def wait_result(
    context: ClientContext, queue: str, message_id: str, timeout: Duration, as_type: type[object] | None = None
) -> Flow[object]:
    """Return the result of a message once it is done; None if there is none (any more)."""
    codec.check_type("as_type", as_type)
    end_wait = _EndWait(context, queue, check_seconds("timeout", timeout))
    try:
        return (yield from _wait_result(context, queue, message_id, end_wait, as_type))
    finally:
        end_wait.end()


def _wait_result(
    context: ClientContext, queue: str, message_id: str, end_wait: _EndWait, as_type: type[object] | None
) -> Flow[object]:
    while True:
        watched = yield from context.attempt(context.store.watch(queue, message_id, end_wait.listen()))
        if watched.result is not None:
            return codec.decode_result(watched.result, as_type)
        if watched.state is None and watched.ended is None:
            watched = yield from _from_history(context, queue, message_id)
        if watched.ended == "done":
            return None
        if watched.ended is not None:
            raise _unfinished(f"message {message_id} of queue {queue}", watched)
        if watched.state is None:
            raise EndUnknown(
                f"queue {queue} has no record of message {message_id}: it ended without a result, and the journal has "
                "no event of it any more"
            )
        yield end_wait.sleep(f"message {message_id} of queue {queue}")


def _from_history(context: ClientContext, queue: str, message_id: str) -> Flow[Watched]:
    """Return how a message ended that is no longer in the store, from the journal."""
    for event in reversed((yield from history(context, queue, message_id))):
        if event.event in ("done", "cancelled", "dropped", "replaced", "dead"):
            return Watched(None, event.event, event.reason, event.error_type)
    return Watched(None)


def _unfinished(what: str, watched: Watched) -> Unfinished:
    if watched.ended == "dead":
        text, _ = split_error(watched.error)
        error = f": {watched.error_type}: {text}" if text else ""
        return MessageDead(f"{what} is dead, {watched.reason}{error}", reason=watched.reason)
    return MessageRemoved(f"{what} was {watched.ended}", reason=watched.ended)


def wait_chain(
    context: ClientContext, chain: str | Published, timeout: Duration, as_type: type[object] | None = None
) -> Flow[object]:
    """Return the result of the message that ended a chain; None if there is none."""
    chain = check_chain(chain)
    codec.check_type("as_type", as_type)
    queue, message_id = split_chain_id(chain)
    end_wait = _EndWait(context, queue, check_seconds("timeout", timeout))
    try:
        last = yield from _wait_chain(context, chain, queue, message_id, end_wait)
    finally:
        end_wait.end()
    data = yield from context.attempt(context.store.result(*split_chain_id(last)))
    return None if data is None else codec.decode_result(data, as_type)


def _wait_chain(context: ClientContext, chain: str, queue: str, message_id: str, end_wait: _EndWait) -> Flow[str]:
    while True:
        state = yield from context.attempt(context.store.watch_chain(queue, message_id, end_wait.listen()))
        if not state.known:
            raise EndUnknown(
                f"queue {queue} has no chain {chain}: its first message was not published with chain=True, or it "
                "ended too long ago"
            )
        if state.failed is not None:
            member, reason = state.failed
            raise ChainFailed(f"chain {chain} ended with message {member}: {reason}", reason=reason, member=member)
        if state.open == 0:
            return state.last or chain
        yield end_wait.sleep(f"chain {chain}")
