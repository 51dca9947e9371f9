"""Spark as a worker: claim a batch on executors, give it to a function, commit what it wrote, settle.

    def load(orders: DataFrame, batch: Batch) -> None:
        batch.write(orders.select("id", from_json("text", "total DOUBLE").alias("order")))

    consume(spark, "valkey://127.0.0.1:6379", "orders", load, output="/lake/orders")

The order is: claim, run, commit, settle. After a crash before the commit only leases remain, which end. After a crash
after it the messages are delivered again, found in the output (see `output`), and only settled. So each message is in
the output once. Without an output the effects of the function happen at least once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from waypost import lease_clock
from waypost.checks import check_seconds
from waypost.client import Waypost
from waypost.client.base import DEFAULT_RETRY, is_stop
from waypost.client.internals import context_of, run_flow
from waypost.errors import ConfigurationError, InvalidInput
from waypost.identity import Session
from waypost.message import Message, Outcome, Queue, error_text, error_type, queue_name
from waypost.operations import receive
from waypost.operations.flow import ClientContext, Flow, Together
from waypost.operations.outgoing import deliver_outgoing
from waypost.policy import CHUNK_MESSAGES_MAX, START_TIMEOUT_SECONDS, RetryPolicy, check_retry
from waypost.redaction import Redact
from waypost.spark.consumer.claim_source import (
    CONSUMED,
    FENCE,
    Claim,
    ClaimSource,
    at_most_once,
    claimed_rows,
    leases_of,
)
from waypost.spark.consumer.output import AlreadyCommitted, Fence, Output, RowsDeleted
from waypost.spark.delta.parquet import DataFile
from waypost.spark.source.credentials import Place
from waypost.spark.source.partitions import machine_of
from waypost.times import Duration, to_ms
from waypost.values import Lease, Settlement, SettleStatus, Watched
from waypost.worker.renewer import Renewer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger("waypost")

BATCH_DEFAULT = 10_000
#: The driver renews and settles each message of a batch: more would take it longer than a lease.
BATCH_MAX = 100_000
#: What is written of messages of this size together is likely to fit into the driver's memory, if the rows are at most
#: so many times the messages, or so few at all.
SMALL_BYTES = 32 * 1024 * 1024
DRIVER_ROWS_FACTOR = 4
DRIVER_ROWS_MIN = 1000
PARTITIONS_DEFAULT = 2
PARTITIONS_MAX = 256
#: How often a consumer that follows an empty queue polls it: a claim is a Spark job.
POLL_SECONDS = 1.0
TABLE_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)*", re.ASCII)
#: Statuses after which a message cannot be delivered again.
ENDED: frozenset[SettleStatus] = frozenset(("done", "dead", "dropped", "cancelled", "replaced"))

Function: TypeAlias = "Callable[[DataFrame, Batch], object]"
OnError: TypeAlias = Literal["raise", "continue"]


@dataclass(slots=True)
class Consumed:
    """What a consumer did: numbers of messages, and of batches."""

    batches: int = 0
    #: In the output (or handled, where there is none) and settled as done.
    done: int = 0
    #: Claimed again after an earlier batch had committed them: settled, not written again.
    repeated: int = 0
    #: Retried, dead or ended in another way, by an error of the function or by `Batch.end`.
    retried: int = 0
    dead: int = 0
    other: int = 0
    #: Their lease was lost before the settle: if they were committed, they are settled at the next delivery.
    lost: int = 0


class Batch:
    """The second argument of the function: the name of the batch, and its output."""

    def __init__(
        self,
        name: str,
        queue: str,
        messages: dict[str, Message[Any]],
        output: Output | None = None,
        *,
        driver_rows_max: int = 0,
    ) -> None:
        #: Names this claim: the same whenever the function runs for it, and never used again.
        self.name = name
        self.queue = queue
        self._messages = messages
        self._output = output
        #: How many rows of a write the driver collects and writes itself.
        self._driver_rows_max = driver_rows_max
        self._tables: dict[str, list[DataFile]] = {}
        self._ends: dict[str, Outcome] = {}

    @property
    def size(self) -> int:
        """The number of messages in the batch."""
        return len(self._messages)

    @property
    def lost(self) -> frozenset[str]:
        """Messages whose lease is known to be lost: they are or will be claimed again, here or elsewhere."""
        return frozenset(message.id for message in self._messages.values() if message.lease_lost)

    def write(
        self,
        frame: DataFrame,
        table: str = "",
        *,
        format: str | None = None,
        partition_by: str | Sequence[str] = (),
    ) -> None:
        """Add rows to the output, or to a table in it: a Delta table. They count when the function has returned.

        A table keeps its columns; new ones are added to it. It may be partitioned by dates and whole numbers.
        """
        if format not in (None, "delta", "parquet"):
            raise InvalidInput(
                f"tables of an output are Delta tables with Parquet files; {format!r} is not supported: leave format "
                "out"
            )
        if self._output is None:
            raise ConfigurationError("consume was given no output, so a batch has no place to write to: pass output=…")
        if table and TABLE_NAME.fullmatch(table) is None:
            raise InvalidInput(f"a table is a name such as orders or eu/orders, not {table!r}")
        self._output.check_table_name(table, self._tables)
        columns = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        made = self._output.write(frame, table, self.name, columns, driver_rows_max=self._driver_rows_max)
        self._tables.setdefault(table, []).extend(made)

    def end(self, ids: Iterable[str] | DataFrame, outcome: Outcome) -> None:
        """Settle some messages with another outcome: `batch.end(ids, Dead("no total"))`, or Retry, Snooze, Drop.

        Do not write their rows to the output.
        """
        if not isinstance(outcome, Outcome):
            raise InvalidInput(f"an outcome is Retry, Snooze, Dead or Drop, not {type(outcome).__name__}")
        found = [row["id"] for row in ids.select("id").collect()] if hasattr(ids, "select") else ids
        for message_id in cast("Iterable[str]", found):
            if message_id not in self._messages:
                raise InvalidInput(f"message {message_id!r} is not of batch {self.name}")
            self._ends[message_id] = outcome

    def __repr__(self) -> str:
        return f"Batch({self.name!r}, queue={self.queue!r}, size={self.size})"


class _Held:
    """The leases of the batch that is in progress, for the thread that renews them."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.lease_seconds: float | None = None
        self.messages: dict[str, Message[Any]] = {}

    def to_renew(self) -> list[Message[Any]]:
        return [message for message in self.messages.values() if not message.fenced and message.settled is None]

    def held(self) -> list[Message[Any]]:
        return [message for message in self.messages.values() if message.settled is None]

    def runs(self, message: Message[Any]) -> bool:
        return self.still_concerns(message)

    def still_concerns(self, message: Message[Any]) -> bool:
        return self.messages.get(message.id) is message and message.settled is None

    def on_lost(self, message: Message[Any]) -> None:
        """Nothing to do: the renewer has marked and logged it."""

    def on_cancel(self, message: Message[Any]) -> None:
        message.cancel_requested = True


class _Consumer:
    """One run of `consume`."""

    def __init__(
        self,
        spark: SparkSession,
        place: Place,
        queue: str,
        function: Function,
        post: Waypost,
        output: Output | None,
        retry: RetryPolicy,
        size: int,
        partitions: int,
        on_error: OnError,
        lease_ms: int,
    ) -> None:
        self.spark = spark
        self.place = place
        self.queue = queue
        self.function = function
        self.post = post
        self.context = context_of(post)
        self.output = output
        self.retry = retry
        self.size = size
        self.partitions = partitions
        self.on_error = on_error
        #: How long leases of the queue were when it began.
        self.lease_ms = lease_ms
        self.machine = machine_of(post.store)
        self.names = Session()
        self.result = Consumed()
        self.held = _Held(queue)
        #: The size of the messages of the batch that is in progress.
        self.bytes = 0
        # On a separate connection, so that no settle can delay a renewal.
        self.renewer = Renewer(self.context, lambda: post.store.connect(start_timeout=START_TIMEOUT_SECONDS))

    # ---- one batch -------------------------------------------------------------------------------------------

    def run_once(self) -> bool:
        """Process one batch; return False if there was nothing to claim. Raises what the function raises."""
        known: set[str] = set()
        if self.output is not None:
            known = self.output.read_before_claim()
        name = self.names.message_ids(1)[0]
        frame, messages = self.claim(name)
        if not messages:
            return False
        self.held.messages = messages
        self.renewer.reschedule(self.held)
        first = next(iter(messages.values()))
        if first._lease_until <= lease_clock.now():
            # Claiming took longer than the lease: only messages with a valid lease may be handled.
            self._extend(list(messages.values()))
            messages = {message_id: message for message_id, message in messages.items() if not message.fenced}
            self.held.messages = messages
        self.renewer.expect_end(self.held, first._lease_until, first._lease_seconds)
        self.renewer.renew_now(self.held)
        try:
            if not messages:
                return True
            self.result.batches += 1
            repeated = known & messages.keys()
            if repeated:
                self.settle_repeated(repeated)
            self.handle(name, frame, messages, repeated)
        finally:
            self.held.messages = {}
        if self.output is not None:
            self.output.maintain()
        return True

    def _extend(self, messages: Sequence[Message[Any]]) -> None:
        for start in range(0, len(messages), CHUNK_MESSAGES_MAX):
            part = messages[start : start + CHUNK_MESSAGES_MAX]
            run_flow(self.post, receive.extend(self.context, self.queue, part))

    def claim(self, name: str) -> tuple[DataFrame, dict[str, Message[Any]]]:
        """Claim on executors: the rows, and what is needed to renew and to settle them."""
        share = -(-self.size // self.partitions)
        # Before any task claims: whatever machine it runs on, its leases begin later.
        sent = lease_clock.now()
        frame = claimed_rows(self.spark, Claim(self.place, self.queue, name, share, self.partitions, self.machine))
        fences = frame.select(*FENCE, "size").toArrow()
        self.bytes = sum(fences.column("size").to_pylist())
        leases = leases_of(fences)
        ends = [lease.lease_end_ms - lease.claimed_ms for lease in leases if lease.lease_end_ms is not None]
        seconds = min([*ends, self.lease_ms]) / 1000
        self.held.lease_seconds = seconds
        until = lease_clock.local_end(sent, seconds)
        messages = {lease.id: Message[Any](self.queue, lease, None, None, seconds, until) for lease in leases}
        return frame.select(*CONSUMED.columns), messages

    def handle(self, name: str, frame: DataFrame, messages: dict[str, Message[Any]], without: Collection[str]) -> None:
        """Run the function for what is left, as often as others commit messages of this batch before it does."""
        left_out = set(without)
        while True:
            left = {message_id: message for message_id, message in messages.items() if message_id not in left_out}
            if not left:
                return
            limit = max(DRIVER_ROWS_MIN, DRIVER_ROWS_FACTOR * len(left)) if self.bytes <= SMALL_BYTES else 0
            batch = Batch(name, self.queue, left, self.output, driver_rows_max=limit)
            try:
                self.function(self._rows(frame, left_out), batch)
            except BaseException as error:
                if not self._fail(batch, left, error):
                    raise
                return
            try:
                # If this fails, it may be committed or not: nothing is discarded or settled, and the next consumer
                # of the messages finds them in the output or not.
                self._commit(batch)
            except InvalidInput as error:
                # Its rows do not fit a table that another driver changed meanwhile: nothing is committed.
                if not self._fail(batch, left, error):
                    raise
                return
            except RowsDeleted:
                log.warning(
                    "batch %s: its rows were deleted before they were committed, since a clock was set; it runs again",
                    name, extra={"event": "batch_repeated", "queue": self.queue},
                )  # fmt: skip
                self._discard(batch)
            except AlreadyCommitted as error:
                log.warning(
                    "batch %s: %d messages were committed by another consumer of this output; it runs again without",
                    name, len(error.ids), extra={"event": "batch_repeated", "queue": self.queue},
                )  # fmt: skip
                self._discard(batch)
                self.settle_repeated(error.ids)
                left_out |= error.ids
            else:
                settlements = [message.settlement(batch._ends.get(key), self.retry) for key, message in left.items()]
                self._settle_batch(left, settlements)
                return

    def _rows(self, frame: DataFrame, without: Collection[str]) -> DataFrame:
        if not without:
            return frame
        from pyspark.sql import functions as f

        known = self.spark.createDataFrame([(message_id,) for message_id in sorted(without)], "id STRING")
        return frame.join(f.broadcast(known), "id", "left_anti").select(*CONSUMED.columns)

    def _commit(self, batch: Batch) -> None:
        if self.output is None:
            return
        done = [message for message_id, message in batch._messages.items() if message_id not in batch._ends]
        if not done:
            self._discard(batch)
            return
        fences = [Fence(message.id, message.token, message._lease.nonce, message._lease.chain) for message in done]
        self.output.commit(batch.name, batch._tables, fences)

    def _discard(self, batch: Batch) -> None:
        if self.output is not None:
            self.output.discard(batch._tables)

    def _fail(self, batch: Batch, messages: dict[str, Message[Any]], error: BaseException) -> bool:
        """Discard a batch and settle its messages by the retry policy; return whether the next one is claimed."""
        self._discard(batch)
        self._failed(messages, error)
        return isinstance(error, Outcome) or (self.on_error == "continue" and not is_stop(error))

    # ---- settling --------------------------------------------------------------------------------------------

    def _failed(self, messages: dict[str, Message[Any]], error: BaseException) -> None:
        """Settle the messages by the retry policy; a stop request releases them unchanged."""
        stopped = is_stop(error)
        settlements = [message.settlement(error, self.retry, stopped=stopped) for message in messages.values()]
        if not isinstance(error, Outcome):
            log.warning(
                "a batch of %d messages of queue %s failed: each is tried again according to the retry policy",
                len(messages), self.queue, exc_info=error if self.on_error == "continue" else None,
                extra={"event": "batch_failed", "queue": self.queue, "error_type": error_type(error),
                       "error": error_text(error)},
            )  # fmt: skip
        self._settle_batch(messages, settlements)

    def _settle_batch(self, messages: dict[str, Message[Any]], settlements: Sequence[Settlement]) -> None:
        statuses = self.settle(list(messages.values()), settlements)
        result = self.result
        for status in statuses.values():
            match status:
                case "done" | "retried" | "dead" | "lost":
                    setattr(result, status, getattr(result, status) + 1)
                case _:
                    result.other += 1
        self._close(statuses)

    def settle_repeated(self, ids: Collection[str]) -> None:
        """Settle messages that are already in the output."""
        messages = [self.held.messages[message_id] for message_id in ids]
        statuses = self.settle(messages, [Settlement(m.id, m.token, m._lease.nonce) for m in messages])
        self.result.repeated += len(messages)
        self._close(statuses)

    def settle(self, messages: Sequence[Message[Any]], settlements: Sequence[Settlement]) -> dict[str, SettleStatus]:
        """Settle deliveries, in as many steps as they need."""
        statuses: dict[str, SettleStatus] = {}
        for start in range(0, len(messages), CHUNK_MESSAGES_MAX):
            part = settlements[start : start + CHUNK_MESSAGES_MAX]
            answers = run_flow(self.post, _settle(self.context, self.queue, part))
            for message, status in zip(messages[start : start + CHUNK_MESSAGES_MAX], answers, strict=True):
                message.settled = statuses[message.id] = status
        if any(one.then for one in settlements) or any(message._lease.chain is not None for message in messages):
            run_flow(self.post, deliver_outgoing(self.context, self.queue))
        lost = sum(status == "lost" for status in statuses.values())
        if lost:
            log.warning(
                "the leases of %d messages of queue %s were lost before they were settled: %s", lost, self.queue,
                "give the queue a longer lease" if self.output is None
                else "those in the output are settled when they come again",
                extra={"event": "lease_lost", "queue": self.queue, "count": lost},
            )  # fmt: skip
        return statuses

    def _close(self, statuses: dict[str, SettleStatus]) -> None:
        """Note for the output which messages cannot be claimed again."""
        if self.output is not None and self.output.pending:
            gone = {message_id for message_id, status in statuses.items() if status in ENDED}
            gone |= self._finished([message_id for message_id, status in statuses.items() if status == "lost"])
            self.output.mark_settled(gone)

    def _finished(self, ids: Sequence[str]) -> set[str]:
        """Return the messages that have ended in the store. A dead letter may be redriven, so it is not among them."""
        finished = set()
        for start in range(0, len(ids), CHUNK_MESSAGES_MAX):
            part = ids[start : start + CHUNK_MESSAGES_MAX]
            for message_id, watched in zip(
                part, run_flow(self.post, _watch(self.context, self.queue, part)), strict=True
            ):
                if isinstance(watched, Watched) and watched.state in (None, "done"):
                    finished.add(message_id)
        return finished

    # ---- what an earlier run left ----------------------------------------------------------------------------

    def recover(self) -> None:
        """Settle what was committed, while its leases last."""
        if self.output is None:
            return
        for pending in list(self.output.pending.values()):
            fences = [fence for fence in pending.messages if fence.id in pending.open]
            messages = [Message[Any](self.queue, _lease(fence)) for fence in fences]
            statuses = self.settle(messages, [Settlement(fence.id, fence.token, fence.nonce) for fence in fences])
            self.result.repeated += sum(status in ENDED for status in statuses.values())
            self._close(statuses)

    def rest(self) -> None:
        """Called when nothing can be claimed: record what is settled."""
        if self.output is not None:
            self.output.record_settled()


def _lease(fence: Fence) -> Lease:
    return Lease(fence.id, fence.token, fence.nonce, 0, 0, 0, None, None, 0, 0, 0, None, b"", fence.chain)


def _settle(context: ClientContext, queue: str, settlements: Sequence[Settlement]) -> Flow[list[SettleStatus]]:
    return (yield from context.operate_and_wake(queue, receive.settling(context, queue, settlements), fenced=True))


def _watch(context: ClientContext, queue: str, ids: Sequence[str]) -> Flow[list[Any]]:
    answers: list[Any] = yield Together([context.store.watch(queue, message_id, None) for message_id in ids])
    return answers


def consume(
    spark: SparkSession,
    url: str | Place,
    queue: str | Queue[Any],
    fn: Function,
    *,
    output: str | None = None,
    batch: int = BATCH_DEFAULT,
    partitions: int = PARTITIONS_DEFAULT,
    retry: RetryPolicy = DEFAULT_RETRY,
    follow: bool = False,
    timeout: Duration | None = None,
    on_error: OnError = "raise",
    namespace: str = "wp",
    password_env: str | None = None,
    password_file: str | None = None,
    redact: Redact | None = None,
) -> Consumed:
    """Give the messages of a queue to `fn(df, batch)`, batch by batch, until none can be claimed; return the counts.

    `batch` messages at most are claimed by `partitions` tasks, each through one connection. Their leases are renewed
    while `fn` runs on the driver with a DataFrame of them (columns: `claim_source.CONSUMED`). What it writes by
    `batch.write` into `output`, Delta tables in a folder that belongs to this queue, is committed when it returns, then
    the messages are settled: each is in the output once, also if the driver is killed in between. If `fn` raises, its
    writes are discarded, and `retry` decides for each message when it is tried again or that it is dead; then the error
    is raised, or with `on_error="continue"` the next batch is claimed. `follow` waits for more instead of ending; after
    `timeout` seconds nothing more is claimed. `redact` is the hook for journals of level `full`, for what settles send
    on.
    """
    if not 1 <= batch <= BATCH_MAX:
        raise InvalidInput(f"batch is a number of messages from 1 to {BATCH_MAX:,}, not {batch!r}")
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidInput(f"partitions is a number of tasks from 1 to {PARTITIONS_MAX}, not {partitions!r}")
    if on_error not in ("raise", "continue"):
        raise InvalidInput(f"on_error is raise or continue, not {on_error!r}")
    check_retry(retry)
    name = queue_name(queue)
    place = url if isinstance(url, Place) else _place(url, namespace, password_env, password_file)
    store = place.open()
    opened = None if output is None else Output(output)
    deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
    with Waypost(store=store, redact=redact) as post:
        lease = post.policy(name).lease
        if lease is None:
            raise at_most_once(name)
        if opened is not None:
            opened.open_for(name, place.namespace)
        consumer = _Consumer(
            spark, place, name, fn, post, opened, retry, batch, min(partitions, batch), on_error, to_ms(lease)
        )
        spark.dataSource.register(ClaimSource)
        consumer.renewer.start([consumer.held])
        try:
            consumer.recover()
            _loop(consumer, follow=follow, deadline=deadline)
        finally:
            consumer.renewer.stop(5)
        return consumer.result


def _place(url: str, namespace: str, password_env: str | None, password_file: str | None) -> Place:
    options = {"url": url, "namespace": namespace, "passwordEnv": password_env, "passwordFile": password_file}
    return Place.of({name: value for name, value in options.items() if value is not None})


def _loop(consumer: _Consumer, *, follow: bool, deadline: float | None) -> None:
    def over() -> bool:
        return deadline is not None and time.monotonic() >= deadline

    while not over():
        if consumer.run_once():
            continue
        consumer.rest()
        if not follow:
            return
        # Pause at least once: a queue with limits has ready messages that no claim gets.
        while not over():
            time.sleep(POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
            if _claimable(consumer.post, consumer.queue):
                break
    consumer.rest()


def _claimable(post: Waypost, queue: str) -> bool:
    """Return whether a claim may find a message, without a Spark job."""
    stats = post.stats(queue)
    return not stats.paused and (stats.ledger.ready > 0 or timedelta(0) in (stats.next_due_in, stats.next_lease_end_in))
