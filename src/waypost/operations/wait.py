"""Waiting for the end of a message or of a chain.

Whoever waits tells the store, and is woken like a sleeping worker. A wake-up that is lost costs one safety poll; a
message that died, was cancelled or removed ends the wait with an error that says so.
"""

from __future__ import annotations

from waypost import codec
from waypost.errors import ChainFailed, EndUnknown, InvalidTime, MessageDead, MessageRemoved, Unfinished, WaitTimeout
from waypost.message import Published, Watched, split_chain_id
from waypost.operations.flow import Flow, Link, Sleep
from waypost.operations.publish import check_chain
from waypost.operations.run import check_id, history
from waypost.policy import SAFETY_POLL_SECONDS

#: Between the first looks at a message: where no wake-up can reach us, a fast handler is still seen soon.
LOOK_FIRST_SECONDS = 0.02


def check_timeout(timeout: float) -> float:
    """Return a timeout unchanged, or raise `InvalidTime`."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < 1e9:
        raise InvalidTime(f"timeout is a number of seconds; a wait always has one, not {timeout!r}")
    return float(timeout)


class _Patience:
    """How long a wait goes on, and how long it sleeps between two looks."""

    __slots__ = ("_deadline", "_link", "_next", "_timeout", "waiter")

    def __init__(self, link: Link, timeout: float) -> None:
        self._link = link
        self._timeout = timeout
        self._deadline = link.monotonic() + timeout
        self._next = LOOK_FIRST_SECONDS
        self.waiter = link.new_waiter()

    def sleep(self, what: str) -> Sleep:
        """The next sleep; raises `WaitTimeout` when the time is up."""
        remaining = self._deadline - self._link.monotonic()
        if remaining <= 0:
            raise WaitTimeout(f"{what} did not end within {self._timeout:g} s; it goes on, and can be waited for again")
        seconds, self._next = self._next, min(self._next * 2, SAFETY_POLL_SECONDS)
        return Sleep(min(seconds, remaining))


def wait_result(link: Link, published: Published, timeout: float, as_type: type[object] | None = None) -> Flow[object]:
    """The result of a message once it is done; None if its handler kept none, or kept it for a shorter time."""
    queue, message_id = published.queue, check_id(published.id)
    patience = _Patience(link, check_timeout(timeout))
    while True:
        watched = yield from link.attempt(link.store.watch(queue, message_id, patience.waiter))
        if watched.result is not None:
            return codec.decode_result(watched.result, as_type)
        if watched.state is None and watched.ended is None:
            watched = yield from _from_history(link, queue, message_id)
        if watched.ended == "done":
            return None
        if watched.ended is not None:
            raise _unfinished(f"message {message_id} of queue {queue}", watched)
        if watched.state is None:
            raise EndUnknown(
                f"queue {queue} has no trace of message {message_id}: it ended, kept no result, and the journal does "
                "not tell of it any more"
            )
        yield patience.sleep(f"message {message_id} of queue {queue}")


def _from_history(link: Link, queue: str, message_id: str) -> Flow[Watched]:
    """How a message that the store has no more ended, as far as the journal tells."""
    for event in reversed((yield from history(link, queue, message_id))):
        if event.event in ("done", "cancelled", "dropped", "replaced", "dead"):
            return Watched(None, event.event, event.reason, event.error_type)
    return Watched(None)


def _unfinished(what: str, watched: Watched) -> Unfinished:
    if watched.ended == "dead":
        error = f": {watched.error_type}: {watched.error}" if watched.error else ""
        return MessageDead(f"{what} is dead, {watched.reason}{error}", reason=watched.reason)
    return MessageRemoved(f"{what} was {watched.ended}", reason=watched.ended)


def wait_chain(link: Link, chain: str | Published, timeout: float, as_type: type[object] | None = None) -> Flow[object]:
    """The result of the message that ended a chain; None if its handler kept none."""
    chain = check_chain(chain)
    queue, message_id = split_chain_id(chain)
    patience = _Patience(link, check_timeout(timeout))
    while True:
        state = yield from link.attempt(link.store.watch_chain(queue, message_id, patience.waiter))
        if not state.known:
            raise EndUnknown(
                f"queue {queue} knows of no chain {chain}: its first message was not published with chain=True, or it "
                "ended too long ago"
            )
        if state.failed is not None:
            member, reason = state.failed
            raise ChainFailed(f"chain {chain} ended with message {member}: {reason}", reason=reason, member=member)
        if state.open == 0:
            break
        yield patience.sleep(f"chain {chain}")
    last_queue, last_id = split_chain_id(state.last or chain)
    data = yield from link.attempt(link.store.result(last_queue, last_id))
    return None if data is None else codec.decode_result(data, as_type)
