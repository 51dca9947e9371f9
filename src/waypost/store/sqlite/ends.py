"""What a message's beginning and end mean to chains and to those who wait: noted here, acted on by `chains`."""

from __future__ import annotations

from waypost.identity import continuation_id
from waypost.policy import ENDED_TTL_MS, NO_END_MS
from waypost.store.sqlite.book import QueueBook, Record
from waypost.store.sqlite.sweep import sweep
from waypost.values import EventName, Notice, chain_id, split_chain_id

_CHAIN_BEGIN = "INSERT INTO {chain} (queue, id, until_ms) VALUES (?, ?, ?)"
_MEMBER_BEGIN = "INSERT INTO {member} (queue, chain, name, count) VALUES (?, ?, ?, 1)"
_CHAINS_OLD = """
    SELECT c.queue, c.id, c.failed IS NULL AND EXISTS (
        SELECT 1 FROM {member} m WHERE m.queue = c.queue AND m.chain = c.id)
    FROM {chain} c INDEXED BY {chain:until} WHERE c.until_ms <= ? ORDER BY c.until_ms LIMIT 8"""
#: The release before gave unfinished chains an end.
_CHAIN_KEEP = f"UPDATE {{chain}} SET until_ms = {NO_END_MS} WHERE queue = ? AND id = ?"
_CHAIN_FORGET = (
    "DELETE FROM {chain} WHERE queue = ? AND id = ?",
    "DELETE FROM {member} WHERE queue = ? AND chain = ?",
    "DELETE FROM {watcher} WHERE queue = ? AND chain = ?",
)
_BLOCKER = "INSERT INTO {blocker} (seq, chain) VALUES (?, ?)"
_BLOCKERS_FORGET = "DELETE FROM {blocker} WHERE seq = ?"
_WAITERS_OUT = "DELETE FROM {waiter} WHERE queue = ? AND id = ? RETURNING name, until_ms"
_ENDING = """
    INSERT INTO {ending} (queue, id, how, until_ms) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET how = excluded.how, until_ms = excluded.until_ms"""


def begin(book: QueueBook, record: Record, after: tuple[str, ...]) -> None:
    """A message was stored that is the first of a chain, or has to wait for others."""
    step, now = book.step, book.now
    member = chain_id(book.name, record.id)
    if record.chain == member:
        old = step.execute(_CHAINS_OLD, (now,)).fetchall()
        for forget in _CHAIN_FORGET:
            step.execute_many(forget, [(queue, id) for queue, id, unfinished in old if not unfinished])
        step.execute_many(_CHAIN_KEEP, [(queue, id) for queue, id, unfinished in old if unfinished])
        step.execute(_CHAIN_BEGIN, (book.number, record.id, NO_END_MS))
        step.execute(_MEMBER_BEGIN, (book.number, record.id, member))
    for index, chain in enumerate(after):
        step.execute(_BLOCKER, (record.seq, chain))
        home = split_chain_id(chain)[0]
        step.notices.append(Notice(continuation_id(record.id, index, -1), "watch", home, chain, member))


def ended(book: QueueBook, record: Record, how: EventName, begun: tuple[str, ...]) -> None:
    """A message ended: its chain and those who wait for it are to be told."""
    if record.chain is not None:
        failed = None if how == "done" else (record.reason or how)
        tell_home(book, record.chain, record.id, record.token, begun, failed)
    book.step.execute(_BLOCKERS_FORGET, (record.seq,))
    if book.is_awaited:
        names = wake_waiters(book, record.id)
        if names:
            sweep(book, "ending", 1)
            book.step.execute(_ENDING, (book.number, record.id, how, book.now + ENDED_TTL_MS))


def wake_waiters(book: QueueBook, id: str) -> list[tuple[str, int]]:
    """Take out who waits for this end, and wake those of them who have asked lately."""
    names = book.step.execute(_WAITERS_OUT, (book.number, id)).fetchall()
    if names:
        expectant = book.step.expectant.setdefault(book.name, [])
        expectant += [name for name, until in names if until > book.now]
    return names


def tell_home(book: QueueBook, chain: str, id: str, token: int, begun: tuple[str, ...], failed: str | None) -> None:
    """The end of a message, for the home of its chain."""
    home, member = split_chain_id(chain)[0], chain_id(book.name, id)
    notice = Notice(continuation_id(id, token, -2), "ended", home, chain, member, begun, failed)
    book.step.notices.append(notice)
