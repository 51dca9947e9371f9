"""Redriving dead letters in the store; or publishing copies to another queue, while the letters stay dead.

A letter is meant as it was when it was chosen: by its id and its token, which grows with every claim. One that was
redriven meanwhile and died again is left alone, so a chunk that is sent twice redrives nothing twice. After a kill the
journal tells which letters of the chunk this plan has redriven, by the sessions that were recorded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from waypost import codec
from waypost.client.internals import context_of, run_flow
from waypost.errors import InvalidInput, Undecodable
from waypost.operations import manage
from waypost.operations.flow import Flow, Together
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.redaction import find_redact, journal_copy
from waypost.spark.republish.ids import HEADER
from waypost.spark.republish.known import LOCATED_TOGETHER, NOTHING_EARLIER, Earlier, find_redriven
from waypost.spark.republish.pace import Pace
from waypost.spark.republish.run import Sent
from waypost.spark.republish.sending import Link, Sender
from waypost.spark.republish.state import Intent
from waypost.store.port import Draft
from waypost.values import Stored

#: What a plan keeps of a letter.
CHOSEN: Final = ("queue", "id", "token")
Letter = tuple[str, str, int]


def letter_key(letter: Letter) -> str:
    """Return the key of a letter's copy: one for each death."""
    return ":".join(map(str, letter))


def read_letters(link: Link, letters: Sequence[Letter]) -> list[Stored]:
    """Return those letters of one queue that are dead as they were when they were chosen."""

    def read(part: Sequence[Letter]) -> Flow[list[Stored]]:
        context, tokens = context_of(link.post), {id: token for _, id, token in part}
        calls = [context.store.peek(queue, "dead", 1, id=id) for queue, id, _ in part]
        answers: list[Any] = yield Together(calls)
        found: list[Stored] = []
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, Exception):
                # The first attempt has failed; this one repeats it within the budget, or raises.
                answer = yield from context.attempt(call)
            found += [one for one in answer.messages if one.token == tokens[one.id]]
        return found

    parts = (letters[start : start + LOCATED_TOGETHER] for start in range(0, len(letters), LOCATED_TOGETHER))
    return [one for part in parts for one in run_flow(link.post, read(part))]


class Redriver:
    """Redrives the letters of a plan."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._redact = None if link.options.redact is None else find_redact(link.options.redact)
        target = link.plan.input.to_queue
        self._sender = None if target is None else Sender(link, target)
        self._paces: dict[str, Pace] = {}

    def intend(self, rows: pa.Table, first: int, at_ms: int) -> Intent:
        """Return the newest events of the journals that copies go to, or that letters are redriven in."""
        if self._sender is not None:
            return Intent(first, rows.num_rows, at_ms, self._sender.journal_newest())
        newest = {queue: self._link.bulk.bounds(queue)[1] for queue in pc.unique(rows.column("queue")).to_pylist()}
        return Intent(first, rows.num_rows, at_ms, 0, newest, (self._session,))

    def resume(self, intent: Intent) -> Intent:
        """Return a chunk in doubt with this session too: it may redrive letters of it, and be killed."""
        if self._sender is not None or self._session in intent.sessions:
            return intent
        return replace(intent, sessions=(*intent.sessions, self._session))

    @property
    def _session(self) -> str:
        return context_of(self._link.post).session.id.hex()

    def settle(self, rows: pa.Table, intent: Intent, is_in_doubt: bool) -> Sent:
        """Redrive or copy the letters of a chunk; part of them if a stop is asked for."""
        letters = list(zip(*(rows.column(name).to_pylist() for name in CHOSEN), strict=True))
        was_sent: set[str] = set()
        if is_in_doubt and self._sender is not None:
            was_sent = self._sender.find_sent([letter_key(one) for one in letters], intent)
        sent, published, earlier = Sent(), list[str](), dict[str, Earlier]()
        while sent.rows < len(letters) and not self._link.stop.is_set():
            queue = letters[sent.rows][0]
            pace = self._pace(queue)
            pace.wait()
            size = min(pace.slice_rows, CHUNK_MESSAGES_MAX)
            part = [one for one in letters[sent.rows : sent.rows + size] if one[0] == queue]
            if self._sender is None:
                if is_in_doubt and queue not in earlier:
                    earlier[queue] = self._find_earlier(queue, [one[1] for one in letters if one[0] == queue], intent)
                self._redrive(queue, part, sent, earlier.get(queue, NOTHING_EARLIER))
            elif not self._copy(self._sender, part, was_sent, sent, published):
                break
            sent.rows += len(part)
            pace.sent(len(part))
        if self._sender is not None:
            self._sender.add_keys(published, intent.first + intent.rows - len(letters) + sent.rows)
        return sent

    def _pace(self, queue: str) -> Pace:
        """Return the pace of the queue that letters of a queue are sent to."""
        target = queue if self._sender is None else self._sender.queue
        if target not in self._paces:
            self._paces[target] = self._link.pace(target)
        return self._paces[target]

    def _find_earlier(self, queue: str, ids: Sequence[str], intent: Intent) -> Earlier:
        """Return which letters of a queue a process has redriven that was killed in this chunk."""
        return find_redriven(self._link.lake, self._link.bulk, queue, ids, intent.queues.get(queue, 0), intent.sessions)

    def _redrive(self, queue: str, part: Sequence[Letter], sent: Sent, earlier: Earlier) -> None:
        left = [one for one in part if one[1] not in earlier.redriven]
        dead = [one.id for one in read_letters(self._link, left)]
        moved = duplicates = 0
        if dead:
            flow = manage.redrive(context_of(self._link.post), queue, ids=dead, reason=None, limit=None, rate=None)
            found = run_flow(self._link.post, flow)
            moved, duplicates = len(found.moved), len(found.duplicates)
        gone = len(left) - moved - duplicates
        sent.counts.update(
            redriven=moved + len(part) - len(left), duplicate=duplicates, gone=0 if earlier.may_miss else gone,
            unsure=gone if earlier.may_miss else 0,
        )  # fmt: skip

    def _copy(
        self, sender: Sender, part: Sequence[Letter], was_sent: set[str], sent: Sent, published: list[str]
    ) -> bool:
        """Publish copies of letters; False if a stop was asked for before the queue had room for all of them."""
        keys = {id: letter_key((queue, id, token)) for queue, id, token in part}
        found = {id for id, key in keys.items() if sender.ids.of_key(key) in was_sent}
        left = [one for one in part if one[1] not in found]
        drafts, refused = list[Draft](), 0
        letters = read_letters(self._link, left)
        for letter in letters:
            key = keys[letter.id]
            try:
                drafts.append(self._draft(letter, sender.ids.of_key(key), key))
            except (Undecodable, InvalidInput) as error:
                refused += 1
                sent.reasons.append(f"message {letter.id}: {error}")
        counts, is_whole = sender.send(drafts)
        if not is_whole:
            sent.is_in_doubt = bool(counts)
            return False
        counts.update(queued=len(found), gone=len(left) - len(letters), refused=refused)
        sent.counts.update(counts)
        # A process that was killed may have sent a copy without adding its key.
        published += [keys[id] for id in found] + [draft.key for draft in drafts if draft.key is not None]
        return True

    def _draft(self, letter: Stored, id: str, key: str) -> Draft:
        old = codec.open_envelope(letter.envelope)
        head = codec.head_of(old, headers={**old.headers, HEADER: self._link.name})
        encoded = codec.Encoded(codec.CONTENT_TYPES.index(old.content_type), old.data, old.type_name)
        envelope = codec.make_envelope(id, encoded, head)
        return Draft(
            id, envelope, key, priority=self._link.plan.priority, group=letter.group,
            journal_copy=journal_copy(self._redact, self._link.plan.input.to_queue or "", id, envelope),
            forwarded=True, capped=True,
        )  # fmt: skip
