"""The log of an output: which batch wrote which messages, so that each message is in it once.

    output/_waypost/log/000000000012.json      commit 12: a batch, its tables, and the fence of each of its messages
    output/_waypost/log/000000000012.settled   what of it is still unsettled; nothing, as a rule
    output/_waypost/staging/BATCH/             what a batch wrote before it was committed
    output[/TABLE]/waypost_batch=BATCH/        what was committed

A commit is one file that appears at once under the next number, or not at all because another driver has that number.
A driver reads all commits before its own, and commits no message that is in one of them. So a message is in the output
once whatever happens to leases: a driver that was frozen for an hour finds at its commit what others committed.
What is committed is moved to where readers see it, and settled, by its own driver or by the next one that opens the
output.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from waypost.errors import ConfigurationError, StoreError
from waypost.identity import id_time_ms, is_message_id
from waypost.spark.files import OutputFiles

FOLDER = "_waypost"
#: The column that readers of the output see: which batch a row came with.
COLUMN = "waypost_batch"
LOG, STAGING = f"{FOLDER}/log", f"{FOLDER}/staging"
FORMAT = 1
#: Settled commits that are kept for drivers that have not read them yet. A driver that missed more starts again.
COMMITS_KEPT = 64
#: How long files of a batch that was not committed are kept.
STAGING_KEPT_MS = 7 * 86_400_000


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """A message of a batch, as a settle needs it."""

    id: str
    token: int
    nonce: bytes
    chain: str | None = None


class Commit(msgspec.Struct, frozen=True):
    """What one batch wrote."""

    format: int
    batch: str
    queue: str
    namespace: str
    #: Tables of the output; "" is the output itself.
    tables: tuple[str, ...]
    messages: tuple[Fence, ...]


class Settled(msgspec.Struct, frozen=True):
    """What is known of the messages of a commit: those that may still come again."""

    open: tuple[str, ...] = ()


@dataclass(slots=True)
class Pending:
    """A commit that is not known to be settled, and which of its messages may come again."""

    commit: Commit
    open: set[str] = field(default_factory=set)


class AlreadyCommitted(Exception):
    """Messages of a batch were committed by another one meanwhile."""

    def __init__(self, ids: Collection[str]) -> None:
        super().__init__(f"{len(ids)} messages were committed by another batch")
        self.ids = frozenset(ids)


_COMMIT = re.compile(r"\d{12}\.json")
_decoder_commits = msgspec.json.Decoder(Commit)
_decoder_settled = msgspec.json.Decoder(Settled)


class CommitLog:
    """The commits of one output, as far as they have been read."""

    def __init__(self, files: OutputFiles, queue: str, namespace: str) -> None:
        self.files = files
        self._queue = queue
        self._namespace = namespace
        #: The newest commit that was read.
        self.seen = 0
        #: Commits whose messages may come again, by number.
        self.pending: dict[int, Pending] = {}
        self.read_before_claim()

    # ---- reading ---------------------------------------------------------------------------------------------

    def read_before_claim(self) -> set[str]:
        """Read new commits before a claim; return the messages in the output that may be claimed again.

        Settled messages cannot be claimed again, so removed commits are not missed.
        """
        self._read(before_claim=True)
        return self.committed()

    def refresh(self) -> set[str]:
        """Read new commits since the claim; return the ids of all of their messages."""
        return {fence.id for commit in self._read() for fence in commit.messages}

    def _read(self, *, before_claim: bool = False) -> list[Commit]:
        names = set(self.files.names(LOG))
        for number in [number for number in self.pending if _settled_file(number).rpartition("/")[2] in names]:
            self._update_open(number)
        found = []
        newest = self._newest(names)
        for number in self._new_numbers(names, before_claim=before_claim):
            is_settled = f"{number:012}.settled" in names
            if before_claim and is_settled and number != newest and not self._open(number):
                continue  # what is settled cannot be claimed from now on
            commit = _decoder_commits.decode(self._content(_commit_file(number)))
            if commit.format != FORMAT:
                raise ConfigurationError(
                    f"commit {number} of this output was written by a newer release of waypost: read it with that one"
                )
            if (commit.queue, commit.namespace) != (self._queue, self._namespace):
                raise ConfigurationError(
                    f"this output belongs to queue {commit.queue} of namespace {commit.namespace}: one output takes "
                    f"the messages of one queue, so give {self._queue} an output of its own"
                )
            self.pending[number] = Pending(commit, {fence.id for fence in commit.messages})
            if is_settled:
                self._update_open(number)
            found.append(commit)
        self.seen = max(self.seen, newest)
        return found

    @staticmethod
    def _newest(names: Collection[str]) -> int:
        return max((int(name[:-5]) for name in names if _COMMIT.fullmatch(name)), default=0)

    def _new_numbers(self, names: Collection[str], *, before_claim: bool) -> list[int]:
        """Return the numbers of new commits, in order. None may be missing while messages are held."""
        newest = self._newest(names)
        listed = {int(name[:-5]) for name in names if _COMMIT.fullmatch(name)}
        after = max(self.seen, newest - 2 * COMMITS_KEPT) if before_claim else self.seen
        # A listing made while others write may leave a file out: those are checked by name.
        gaps = {number for number in range(after + 1, newest) if number not in listed}
        listed |= {number for number in gaps if self.files.exists(_commit_file(number))}
        missed = sorted(gaps - listed)
        if missed and not before_claim:
            raise StoreError(
                f"commits {missed[0]} to {missed[-1]} of this output were made and removed since this consumer last "
                "read the log, and it cannot know what is in them. Nothing of this batch was committed; start it again"
            )
        return sorted(number for number in listed if number > self.seen)

    def _update_open(self, number: int) -> None:
        """Remove the messages that another driver has settled from a pending commit."""
        pending = self.pending[number]
        pending.open &= self._open(number)
        if not pending.open:
            del self.pending[number]

    def _open(self, number: int) -> set[str]:
        return set(_decoder_settled.decode(self._content(_settled_file(number))).open)

    def _content(self, name: str) -> bytes:
        content = self.files.read(name)
        if content is None:
            raise FileNotFoundError(self.files.uri(name))
        return content

    def committed(self) -> set[str]:
        """Return the messages that are in the output already and may be claimed again."""
        return {message_id for pending in self.pending.values() for message_id in pending.open}

    # ---- writing ---------------------------------------------------------------------------------------------

    def staging(self, batch: str, table: str = "") -> str:
        """Return the folder to which a batch writes a table before it is committed."""
        return f"{STAGING}/{batch}/{table or FOLDER}"

    def commit(self, batch: str, tables: Iterable[str], messages: Iterable[Fence]) -> int:
        """Commit a batch: from here on its messages are in the output. `AlreadyCommitted` if one of them was before.

        The log must have been read before the messages were claimed.
        """
        fences = tuple(messages)
        commit = Commit(FORMAT, batch, self._queue, self._namespace, tuple(tables), fences)
        content = msgspec.json.encode(commit)
        ids = {fence.id for fence in fences}
        while True:
            twice = (self.refresh() | self.committed()) & ids
            if twice:
                raise AlreadyCommitted(twice)
            number = self.seen + 1
            if self.files.create(_commit_file(number), content):
                self.seen = number
                self.pending[number] = Pending(commit, ids)
                return number

    def publish(self, commit: Commit) -> None:
        """Move the files of a commit to where readers see them. Repeating it changes nothing."""
        for table in commit.tables:
            source = self.staging(commit.batch, table)
            target = f"{table}/{COLUMN}={commit.batch}".lstrip("/")
            try:
                if not self.files.exists(target):
                    if self.files.exists(source):
                        self.files.move(source, target)
                elif self.files.exists(source):
                    self._finish_move(source, target)
            except FileNotFoundError:
                # Another driver that opened the output moved it at the same moment.
                if not self.files.exists(target):
                    raise
        self.files.remove(f"{STAGING}/{commit.batch}")

    def _finish_move(self, source: str, target: str) -> None:
        """An object store moves folders file by file, and may have been interrupted."""
        there = self.files.walk(target)
        for name, size in self.files.walk(source).items():
            if there.get(name) != size:
                self.files.remove(f"{target}/{name}")
                self.files.move(f"{source}/{name}", f"{target}/{name}")

    def mark_settled(self, ids: Collection[str]) -> None:
        """Record that these messages cannot be claimed again. Commits without open messages are removed later."""
        gone = set(ids)
        for number, pending in list(self.pending.items()):
            if pending.open & gone:
                pending.open -= gone
                self.files.replace(_settled_file(number), msgspec.json.encode(Settled(tuple(sorted(pending.open)))))
                if not pending.open:
                    del self.pending[number]

    def remove_old(self, now_ms: int) -> None:
        """Remove all settled commits except the newest, and old staged files of batches that were never committed."""
        names = set(self.files.names(LOG))
        for name in sorted(names):
            number, _, kind = name.partition(".")
            is_old = kind == "settled" and number.isdigit() and int(number) <= self.seen - COMMITS_KEPT
            if is_old and int(number) not in self.pending and f"{number}.json" in names:
                # Oldest first, so that a driver that missed one notices the gap at its end.
                self.files.remove(_commit_file(int(number)))
                self.files.remove(_settled_file(int(number)))
        for batch in self.files.names(STAGING):
            if is_message_id(batch) and id_time_ms(batch) < now_ms - STAGING_KEPT_MS:
                self.files.remove(f"{STAGING}/{batch}")


def _commit_file(number: int) -> str:
    return f"{LOG}/{number:012}.json"


def _settled_file(number: int) -> str:
    return f"{LOG}/{number:012}.settled"
