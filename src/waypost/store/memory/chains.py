"""Chains, and waiters for the end of a message: functions of a queue model.

A chain is a first message and all continuations from it. Its first queue
counts its unfinished messages. Each message that ends sends a notice there, with the ids of its continuations:
a message is unfinished from the notice of its predecessor until its own, in whatever order the two arrive.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import structs

from waypost.identity import Operation, continuation_id
from waypost.policy import ENDED_TTL_MS, LINKS_MAX, NO_END_MS, WAITER_TTL_MS
from waypost.store.memory.records import ChainRecord, Record
from waypost.values import ChainState, EventName, Links, Notice, Watched, chain_id, split_chain_id

if TYPE_CHECKING:
    from waypost.store.memory.queue import QueueModel


# ---- a message of a chain ----------------------------------------------------------------------------


def begin(model: QueueModel, now: int, record: Record) -> None:
    """Handle a stored message: it may be the first of a chain, and it may have to wait for others."""
    if record.chain == chain_id(model.name, record.id):
        model.chains = {id: chain for id, chain in model.chains.items() if chain.until_ms > now}
        model.chains[record.id] = ChainRecord(NO_END_MS, Counter({record.chain: 1}))
    for index, chain in enumerate(record.blockers):
        first_queue, member = split_chain_id(chain)[0], chain_id(model.name, record.id)
        model.notices.append(Notice(continuation_id(record.id, index, -1), "watch", first_queue, chain, member))


def ended(model: QueueModel, now: int, record: Record, how: EventName, begun: tuple[str, ...]) -> None:
    """Note the end of a message for its chain and its waiters."""
    if record.chain is not None:
        failed = None if how == "done" else (record.reason or how)
        notify_chain(model, record.chain, record.id, record.token, begun, failed)
    waiters = model.awaited.pop(record.id, None)
    if waiters:
        model.waiters_to_wake += [name for name, until in waiters.items() if until > now]
        model.ends = {id: kept for id, kept in model.ends.items() if kept[1] > now}
        model.ends[record.id] = (Watched(None, how), now + ENDED_TTL_MS)


def notify_chain(
    model: QueueModel, chain: str, id: str, token: int, begun: tuple[str, ...], failed: str | None
) -> None:
    """Send the end of a message to the first queue of its chain."""
    first_queue, member = split_chain_id(chain)[0], chain_id(model.name, id)
    model.notices.append(Notice(continuation_id(id, token, -2), "ended", first_queue, chain, member, begun, failed))


# ---- what arrives ------------------------------------------------------------------------------------


def arrive(model: QueueModel, now: int, notice: Notice, operation: Operation | None = None) -> None:
    """Apply a notice."""
    if notice.kind == "completed":
        _unblock(model, now, notice, operation)
        return
    chain = _chain(model, now, split_chain_id(notice.chain)[1])
    if notice.kind == "watch":
        _add_watcher(model, notice, chain)
    elif chain is not None and not chain.state().is_finished:
        _count_end(model, now, notice, chain)


def _chain(model: QueueModel, now: int, first: str) -> ChainRecord | None:
    chain = model.chains.get(first)
    return chain if chain is not None and chain.until_ms > now else None


def _add_watcher(model: QueueModel, notice: Notice, chain: ChainRecord | None) -> None:
    if chain is None:
        _complete(model, notice.chain, notice.member, "unknown chain")
    elif chain.state().is_finished:
        _complete(model, notice.chain, notice.member, None if chain.failed is None else chain.failed[1])
    else:
        chain.watchers[notice.member] = None


def _count_end(model: QueueModel, now: int, notice: Notice, chain: ChainRecord) -> None:
    chain.open[notice.member] -= 1
    for begun in notice.begun:
        chain.open[begun] += 1
    chain.open = Counter({member: count for member, count in chain.open.items() if count})
    chain.last = notice.member
    if notice.failed is not None:
        chain.failed = (notice.member, notice.failed)
    if chain.state().is_finished:
        chain.until_ms = now + ENDED_TTL_MS
        for watcher in chain.watchers:
            _complete(model, notice.chain, watcher, notice.failed)
        model.waiters_to_wake += [name for name, until in chain.waiters.items() if until > now]
        chain.watchers, chain.waiters = {}, {}


def _complete(model: QueueModel, chain: str, watcher: str, failed: str | None) -> None:
    queue, id = split_chain_id(watcher)
    notice_id = continuation_id(id, 0, -3) + split_chain_id(chain)[1]
    model.notices.append(Notice(notice_id, "completed", queue, chain, watcher, failed=failed))


def _unblock(model: QueueModel, now: int, notice: Notice, operation: Operation | None) -> None:
    record = model.messages.get(split_chain_id(notice.member)[1])
    if record is None or record.state != "waiting" or notice.chain not in record.blockers:
        return
    if notice.failed is not None:
        record.blockers = ()
        record.error_type, record.error = "ChainFailed", f"chain {notice.chain}: {notice.failed}"
        model.bury(now, record, "blocker_failed", operation)
        return
    record.blockers = tuple(chain for chain in record.blockers if chain != notice.chain)
    if not record.blockers:
        model.make_claimable(now, record, record.ready_after_wait(now))
        model.note(now, "promoted", operation, record, cause="unblocked")


def links(model: QueueModel, now: int, message_id: str) -> Links:
    """What a message has to do with chains."""
    record, chain = model.messages.get(message_id), _chain(model, now, message_id)
    found = Links() if record is None else Links(record.chain, tuple(sorted(record.blockers)[:LINKS_MAX]))
    if chain is None:
        return found
    members = sorted(member for member, count in chain.open.items() if count > 0)[:LINKS_MAX]
    return structs.replace(
        found, begun=chain.state(), members=tuple(members), watchers=tuple(sorted(chain.watchers)[:LINKS_MAX])
    )


# ---- waiting -----------------------------------------------------------------------------------------


def watch(model: QueueModel, now: int, message_id: str, waiter: str | None) -> Watched:
    """Return the state of a message, and register `waiter` to be woken when it ends."""
    record = model.messages.get(message_id)
    if record is not None and record.state == "dead":
        return Watched("dead", "dead", record.reason, record.error_type, record.error)
    if record is not None:
        if waiter is not None:
            waiters = {name: until for name, until in model.awaited.get(message_id, {}).items() if until > now}
            model.awaited[message_id] = waiters | {waiter: now + WAITER_TTL_MS}
        return Watched(record.state)
    result, until = model.results.get(message_id, (None, 0))
    if result is not None and until > now:
        return Watched(None, "done", result=result)
    known, until = model.ends.get(message_id, (Watched(None), 0))
    return known if until > now else Watched(None)


def watch_chain(model: QueueModel, now: int, message_id: str, waiter: str | None) -> ChainState:
    """Return the state of a chain, and register `waiter` to be woken when it ends."""
    chain = _chain(model, now, message_id)
    if chain is None:
        return ChainState(False)
    if waiter is not None and not chain.state().is_finished:
        chain.waiters[waiter] = now + WAITER_TTL_MS
    return chain.state()
