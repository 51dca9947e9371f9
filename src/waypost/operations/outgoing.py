"""Delivery to other queues, for stores whose steps cannot span queues: continuations and notices of chains."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from waypost.errors import WaypostError
from waypost.operations.flow import ClientContext, Flow
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.store.port import Draft, forwarded_draft
from waypost.values import Continuation, Notice

log = logging.getLogger("waypost")

#: One call delivers no more than this to other queues; later claims deliver the rest.
DELIVERED_MAX = 16 * CHUNK_MESSAGES_MAX


def deliver_outgoing(context: ClientContext, queue: str) -> Flow[int]:
    """Deliver continuations and notices of chains to their queues, if the store cannot do it in the same step.

    The target remembers each, so it counts once however often it is sent. There are no long retries here:
    the step is committed, and a later claim sends what did not arrive. A notice may make its target send other
    notices, which are delivered from here too.
    """
    delivered = 0
    sources = deque([queue])
    while sources:
        source = sources.popleft()
        try:
            waiting: list[Continuation | Notice] = yield context.store.outgoing(source, CHUNK_MESSAGES_MAX)
        except WaypostError as error:
            _log_outgoing_delayed(source, error)
            continue
        before = delivered
        notices: dict[str, list[Notice]] = {}
        for one in waiting:
            if isinstance(one, Notice):
                notices.setdefault(one.queue, []).append(one)
        delivered += yield from _deliver_messages(context, source, [w for w in waiting if isinstance(w, Continuation)])
        for target, news in notices.items():
            if (yield from _deliver_notices(context, source, target, news)):
                delivered += len(news)
                sources.append(target)
        if len(waiting) == CHUNK_MESSAGES_MAX and delivered > before:
            sources.append(source)
        if delivered >= DELIVERED_MAX:
            break
    return delivered


def deliver_ends(context: ClientContext, queue: str) -> Flow[None]:
    """After a call that ended messages without a claim: a queue without workers has no later claim that would do it."""
    if not context.store.capabilities.spans_queues:
        yield from deliver_outgoing(context, queue)


def _deliver_messages(context: ClientContext, source: str, continuations: Sequence[Continuation]) -> Flow[int]:
    delivered = 0
    for target, drafts in _by_target(continuations):
        try:
            yield from _forward(context, target, drafts)
            yield context.store.forwarded(source, [draft.id for draft in drafts])
            delivered += len(drafts)
        except WaypostError as error:
            # One queue that cannot be reached must not delay the others.
            _log_outgoing_delayed(source, error)
    return delivered


def _forward(context: ClientContext, target: str, drafts: Sequence[Draft]) -> Flow[None]:
    yield from context.operate_and_wake(
        target, lambda operation: context.store.publish(target, drafts, operation), budget=0, fenced=True
    )


def _deliver_notices(context: ClientContext, source: str, target: str, notices: Sequence[Notice]) -> Flow[bool]:
    try:
        context.wake_and_report((yield context.store.arrive(target, notices)))
        yield context.store.forwarded(source, [notice.id for notice in notices])
    except WaypostError as error:
        _log_outgoing_delayed(source, error)
        return False
    return True


def _log_outgoing_delayed(queue: str, error: WaypostError) -> None:
    log.warning(
        "continuations from queue %s have not all arrived yet (%s): a later claim sends them again",
        queue,
        error,
        extra={"event": "outgoing_delayed", "queue": queue},
    )


def _by_target(continuations: Sequence[Continuation]) -> list[tuple[str, list[Draft]]]:
    """Return drafts for each target queue, in order, with no key twice in one part."""
    parts: list[tuple[str, list[Draft]]] = []
    current: dict[str, tuple[list[Draft], set[str]]] = {}
    for next_one in continuations:
        drafts, keys = current.get(next_one.queue, (None, set()))
        if drafts is None or next_one.key in keys:
            drafts, keys = [], set()
            current[next_one.queue] = (drafts, keys)
            parts.append((next_one.queue, drafts))
        if next_one.key is not None:
            keys.add(next_one.key)
        drafts.append(forwarded_draft(next_one))
    return parts
