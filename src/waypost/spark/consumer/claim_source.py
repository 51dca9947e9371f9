"""Claiming on executors: each task claims its share of a batch through one connection, as Arrow rows.

Spark may run a task twice. So the operations of a task are derived from the batch and the number of the task: a second
attempt repeats the claims of the first, and gets the same messages without a second delivery.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from waypost import codec
from waypost.client import Waypost
from waypost.client.internals import context_of, run_flow
from waypost.errors import EnvelopeTooNew, InvalidInput, Undecodable
from waypost.identity import MARK_BYTES, NONCE_BYTES, SESSION_BYTES, Operation
from waypost.message import Message, error_text, error_type
from waypost.operations import receive
from waypost.operations.outgoing import deliver_outgoing
from waypost.policy import CHUNK_BYTES_MAX, CHUNK_MESSAGES_MAX, REPLAY_MAX
from waypost.spark.source.bulk import RETRY_SECONDS, without_warnings
from waypost.spark.source.credentials import Place
from waypost.spark.source.partitions import check_machine
from waypost.store.bulk.columns import batch_of, constant, envelope_columns
from waypost.store.bulk.reader import PageSize
from waypost.store.bulk.tables import ENVELOPE_COLUMNS, MESSAGES, Table
from waypost.values import Claimed, Lease, Settlement

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: How many operations of a session a store remembers; a task that claims more often uses another session.
CLAIMS_A_SESSION = REPLAY_MAX // 2
FIRST_CLAIM = 64
#: A task stops claiming at this size: executors keep the rows until the batch is done.
BYTES_A_TASK = 256 * 1024 * 1024
#: Or after this part of a lease: the driver renews only after all tasks have claimed.
LEASE_PART = 1 / 3

#: The columns of a message for the user's function.
CONSUMED: Final = Table(
    "consumed",
    {
        name: MESSAGES.columns[name]
        for name in (
            "queue", "id", "key", "group", "priority", "token", "deliveries", "attempts", "published_ms", "ready_ms",
            "claimed_ms", "size", *ENVELOPE_COLUMNS,
        )
    },
)  # fmt: skip
#: The same with the rest of the fence, for internal use.
CLAIMED: Final = Table("claimed", {**CONSUMED.columns, "nonce": "BINARY", "lease_end_ms": "BIGINT", "chain": "STRING"})
#: What the driver needs to renew and to settle.
FENCE: Final = tuple(name for name in CLAIMED.columns if name not in (*ENVELOPE_COLUMNS, "queue", "size"))


@dataclass(frozen=True, slots=True)
class Claim:
    """What a task needs to claim its share."""

    place: Place
    queue: str
    #: The name of the batch, from which all its operations are derived.
    name: str
    #: The maximum number of messages of one task.
    share: int
    tasks: int
    machine: str | None

    def take(self, task: int) -> Iterator[Any]:
        """The rows of one task. Undecodable messages are put aside here, as a worker does."""
        check_machine(self.machine)
        left, room = self.share, BYTES_A_TASK
        page = PageSize(FIRST_CLAIM, CHUNK_MESSAGES_MAX, CHUNK_BYTES_MAX)
        post = Waypost(store=self.place.open(), retry_budget=RETRY_SECONDS)
        with without_warnings():
            post.open()
        with post:
            number, began = 0, time.monotonic()
            while left > 0 and room > 0:
                limit = min(left, page.rows)
                claimed = self._claim(post, task, number, limit)
                number += 1
                if claimed.outgoing:
                    run_flow(post, deliver_outgoing(context_of(post), self.queue))
                size = sum(len(lease.envelope) for lease in claimed.leases)
                page.learn(len(claimed.leases), size)
                leases = settle_unreadable(post, self.queue, claimed.leases)
                if leases:
                    yield rows_of(self.queue, leases)
                left, room = left - len(claimed.leases), room - size
                lease_seconds = None if claimed.lease_ms is None else claimed.lease_ms / 1000
                late = lease_seconds is not None and time.monotonic() - began > lease_seconds * LEASE_PART
                if late or (len(claimed.leases) < limit and not claimed.more):
                    return

    def _claim(self, post: Waypost, task: int, number: int, limit: int) -> Claimed:
        context = context_of(post)
        run_flow(post, context.know_time())
        operation = make_operation(self.name, task, number, context.session.time.now_ms())
        call = context.store.claim(
            self.queue, limit, operation, worker=f"spark:{self.name}:{task}", nonce=_digest(f"{operation}", NONCE_BYTES)
        )
        claimed = run_flow(post, context.attempt(call))
        receive.report_side_effects(context, self.queue, claimed)
        if any(lease.lease_end_ms is None for lease in claimed.leases):
            raise at_most_once(self.queue)
        return claimed


class ClaimSource(DataSource):
    """A claim as a data source: it returns Arrow rows on executors with no package but pyarrow."""

    @classmethod
    def name(cls) -> str:
        """Internal: reading it claims messages."""
        return "waypost-claim"

    def schema(self) -> str:
        """Messages and their fences."""
        return CLAIMED.ddl

    def reader(self, schema: StructType) -> DataSourceReader:
        """One part for each task."""
        return _ClaimReader(msgspec.json.decode(self.options["claim"], type=Claim))


class _ClaimReader(DataSourceReader):
    def __init__(self, claim: Claim) -> None:
        self.claim = claim

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in range(self.claim.tasks)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self.claim.take(partition.value)


def claimed_rows(spark: SparkSession, claim: Claim) -> DataFrame:
    """Claim now. The rows stay on the executors, and a lost row is never replaced by another claim."""
    rows = spark.read.format(ClaimSource.name()).option("claim", msgspec.json.encode(claim).decode()).load()
    return rows.localCheckpoint(eager=True)


def at_most_once(queue: str) -> InvalidInput:
    """Return the error for a queue with lease=None: a batch that fails would lose its messages."""
    return InvalidInput(
        f"queue {queue} hands messages out at most once (lease=None), so a batch that fails would lose them: "
        "configure a lease to consume it from Spark"
    )


def make_operation(name: str, task: int, number: int, stamp: int) -> Operation:
    """The operation of a claim: the same for every attempt of a task, another for everything else.

    Each attempt has its own stamp. If the store has forgotten the first attempt, the second one claims again, which
    is harmless: the leases of the first will end. The nonce is the same too, because Spark may use the
    rows of either attempt.
    """
    session = _digest(f"{name}:{task}:{number // CLAIMS_A_SESSION}", SESSION_BYTES)
    return Operation(session, number % CLAIMS_A_SESSION + 1, stamp, _digest(f"{name}:{task}:{number}", MARK_BYTES))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def settle_unreadable(post: Waypost, queue: str, leases: Sequence[Lease]) -> list[Lease]:
    """Return the leases of decodable messages; the others are settled as dead, or left for a newer release."""
    readable, messages, settlements = [], [], []
    for lease in leases:
        message: Message[Any] = Message(queue, lease)
        try:
            envelope = message.open()
            codec.decode_body(envelope.content_type, envelope.data)
        except Undecodable as error:
            aside = receive.too_new(lease) if isinstance(error, EnvelopeTooNew) else _dead(lease, error)
            receive.log_unreadable(message, aside, error)
            messages.append(message)
            settlements.append(aside)
        else:
            readable.append(lease)
    if messages:
        run_flow(post, receive.settle(context_of(post), queue, messages, settlements))
    return readable


def _dead(lease: Lease, error: Undecodable) -> Settlement:
    return Settlement(
        lease.id, lease.token, lease.nonce, "dead",
        reason="undecodable", error_type=error_type(error), error=error_text(error),
    )  # fmt: skip


def rows_of(queue: str, leases: Sequence[Lease]) -> Any:
    """Leases as a record batch."""
    columns = list(CLAIMED.columns)
    arrays = {name: pa.array([getattr(lease, name) for lease in leases], CLAIMED.arrow_type(name)) for name in FENCE}
    arrays["queue"] = constant(queue, len(leases))
    arrays["size"] = pa.array([len(lease.envelope) for lease in leases], pa.int64())
    arrays |= envelope_columns([lease.envelope for lease in leases], columns)
    return batch_of(CLAIMED, columns, arrays, len(leases))


def leases_of(fences: Any) -> list[Lease]:
    """The fences of claimed rows as leases without their envelopes."""
    return [Lease(**row, envelope=b"") for row in fences.select(list(FENCE)).to_pylist()]
