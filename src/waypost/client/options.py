"""The keyword options of the clients' methods, as types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, TypedDict

from waypost.message import Queue
from waypost.operations.publish import Group, Key, ManyKey
from waypost.policy import JournalLevel, Missed, OnConflict, OnFailure, Order, Overlap, Overload, RetryPolicy, Unique
from waypost.times import Duration
from waypost.values import Published
from waypost.worker.handler import OnLeaseLost, TypeNames

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QueueName = str | Queue[Any]


class _PublishOptions(TypedDict, total=False):
    window: Duration | None
    unique: Unique
    on_conflict: OnConflict
    delay: Duration | None
    at: datetime | None
    expires: Duration | datetime | None
    priority: int
    group: Group
    headers: Mapping[str, str] | None
    trace: Mapping[str, str] | None
    correlation_id: str | None
    reply_to: str | None
    retry: RetryPolicy | None
    timeout: Duration | None
    block_timeout: Duration | None
    chain: bool
    after: str | Published | Iterable[str | Published]
    transaction: object


class PublishKeywords(_PublishOptions, total=False):
    """The options of `publish`."""

    key: Key


class PublishManyKeywords(_PublishOptions, total=False):
    """The options of `publish_many`: the same, but a key must not be a constant."""

    key: ManyKey


class RuleKeywords(TypedDict, total=False):
    """The common options of decorators and `save_schedule`."""

    exclude: Collection[date]
    missed: Missed
    overlap: Overlap | None
    grace: Duration
    start: datetime | None
    end: datetime | None
    max_fires: int | None
    jitter: Duration
    body: object
    priority: int
    group: str | None
    headers: Mapping[str, str] | None
    #: How long after its fire a message lapses.
    expires: Duration | None


class ScheduleKeywords(RuleKeywords, total=False):
    """The options of `save_schedule`."""

    cron: str | Sequence[str] | None
    every: Duration | None
    tz: str
    correlation_id: str | None
    reply_to: str | None
    retry: RetryPolicy | None
    timeout: Duration | None


class HandlerOptions(TypedDict, total=False):
    """The options of `handler` except `batch`, which its overloads have separately."""

    concurrency: int
    retry: RetryPolicy
    timeout: Duration | None
    manual: bool
    process: bool
    max_run: Duration
    on_lease_lost: OnLeaseLost | None
    result_ttl: Duration | None
    engine: object
    types: TypeNames


class SparkJobOptions(TypedDict, total=False):
    """The options of `spark_job`."""

    concurrency: int
    retry: RetryPolicy
    timeout: Duration | None
    manual: bool
    max_run: Duration
    on_lease_lost: OnLeaseLost | None
    result_ttl: Duration | None
    types: TypeNames
    master: str | None
    config: Mapping[str, str] | None
    session: Callable[[], SparkSession] | None


class HandlerKeywords(HandlerOptions, total=False):
    """All options of `handler`, as the function of a schedule may have them."""

    batch: int | None


class QueueSettings(TypedDict, total=False):
    """The settings of `configure`; None turns one off."""

    lease: Duration | None
    max_deliveries: int | None
    max_pending: int | None
    overload: Overload
    max_running: int | None
    rate: str | None
    journal: JournalLevel
    journal_max: int
    dead_max: int | None
    dead_keep: Duration | None
    completed: bool | int | None
    hide_bodies: bool
    tracebacks: bool
    fair: bool
    order: Order | None
    on_failure: OnFailure
    group_max_running: int | None
    group_rate: str | None
    group_max_pending: int | None


class GroupOptions(TypedDict, total=False):
    """The settings of `configure_group`; None restores the setting of the queue."""

    weight: int
    max_running: int | None
    rate: str | None
    max_pending: int | None


class PageFilters(TypedDict, total=False):
    """The filters of a page of a listing: it has the messages that match all of them."""

    id: str | None
    key: str | None
    group: str | None
    reason: str | None
    #: For timers: those due before this moment, with a time zone.
    before: datetime | None
    #: For dead letters: those that died at this moment or later, with a time zone.
    died_after: datetime | None


class ListingFilters(PageFilters, total=False):
    """The same for a whole listing."""

    #: The maximum number of messages.
    limit: int | None
    #: As in `purge`: these are compared in the client, so all messages of the state are read until there are enough.
    error_type: str | None
    error: str | None
    key_prefix: str | None
    type_name: str | None
    header: str | None
    died_before: datetime | None
    published_before: datetime | None
    published_after: datetime | None


#: The options of a schedule's rule, as decorators and `save_schedule` take them.
RULE_OPTIONS = frozenset(ScheduleKeywords.__annotations__)


class DeadFilters(TypedDict, total=False):
    """Filters of messages, all of which must match. Only dead letters have a reason and a time of death."""

    #: Why they are dead.
    reason: str | None
    #: The class of the error; empty text: letters without an error.
    error_type: str | None
    #: The most informative line of the error: the last of a traceback, otherwise the first; empty text: no error.
    error: str | None
    group: str | None
    #: The beginning of their keys.
    key_prefix: str | None
    #: The name of the type of their bodies.
    type_name: str | None
    #: Died before this moment; died at this moment or later.
    died_before: datetime | None
    died_after: datetime | None
    #: A header: NAME=VALUE, or NAME for any value.
    header: str | None
    #: Published before this moment; published at this moment or later.
    published_before: datetime | None
    published_after: datetime | None
