"""What the HTTP API answers and takes: one type for each document, from which the OpenAPI document is made.

Times are RFC 3339 in UTC, durations are seconds, tokens are text (they can be larger than a JSON number is exact).
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

Level = Literal["calm", "note", "warning", "alarm"]
State = Literal["ready", "delayed", "waiting", "leased", "dead", "done"]
BulkState = Literal["ready", "delayed", "waiting", "dead"]
BodyForm = Literal["json", "text", "base64", "hidden", "unreadable"]
#: What a message can be searched by.
SearchField = Literal["id", "key", "chain", "group", "type", "header", "correlation_id"]
SEARCH_FIELDS: tuple[SearchField, ...] = get_args(SearchField)
ChainRole = Literal["blocker", "first", "this", "last", "failed", "open", "waiting"]
SpanKind = Literal["delayed", "ready", "running"]

#: The most entries of one page.
PAGE_LIMIT_MAX = 200
PAGE_LIMIT = 50
#: The most dead letters that one redrive takes, so that a request ends in time.
REDRIVE_MAX = 10_000

Limit = Annotated[int, Meta(ge=1, le=PAGE_LIMIT_MAX, description="At most so many entries.")]
Cursor = Annotated[str, Meta(max_length=1_024, description="`next` of the page before; without it, the first page.")]
MessageId = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]
ErrorText = Annotated[str, Meta(max_length=512, description="Empty: letters that have none.")]


class Answer(Struct, frozen=True, kw_only=True):
    """The base of what is answered."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of what is taken: a field that is not known is refused."""


class FilterReference(Request, frozen=True, kw_only=True):
    """A saved view, by its name."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]


class SavedFilter(Request, frozen=True, kw_only=True):
    """A view: the path of a page of this store with its filters, under a name."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    path: Annotated[str, Meta(min_length=1, max_length=1_000)]


# ---- the store as a whole ------------------------------------------------------------------------------------


class StoreSummary(Answer, frozen=True, kw_only=True):
    """A store that this server shows."""

    name: str
    #: memory, sqlite, valkey or postgres.
    kind: str
    namespace: str


class Stores(Answer, frozen=True, kw_only=True):
    """The stores that this server shows."""

    stores: list[StoreSummary]


class Session(Answer, frozen=True, kw_only=True):
    """Who makes the request, and what it may do."""

    user: str
    scopes: list[str]
    read_only: bool
    #: Send it as the header `X-CSRF-Token` with each write, unless you send a bearer token.
    csrf_token: str


class Alert(Answer, frozen=True, kw_only=True):
    """One thing that is wrong, or worth to know, and what to do about it."""

    level: Level
    #: What it is: unserved, old, dead, expired, paused, damaged, unbalanced, worker, late_schedule, unread.
    kind: str
    text: str
    next_step: str


class Health(Answer, frozen=True, kw_only=True):
    """Whether anything is wrong, in one sentence."""

    level: Level
    sentence: str
    queues: int
    #: Queues that were not read yet since the server started to watch the store.
    unread: int
    ready: int
    running: int
    dead: int
    workers: int
    #: What concerns no single queue: the store itself, workers, schedules.
    alerts: list[Alert]


# ---- queues --------------------------------------------------------------------------------------------------


class Queue(Answer, frozen=True, kw_only=True):
    """A queue in a list. Counts are as of `read_at`."""

    name: str
    level: Level
    alerts: list[Alert]
    paused: bool
    ready: int
    delayed: int
    waiting: int
    leased: int
    dead: int
    oldest_ready_seconds: float | None
    #: Per second, over the last minutes.
    published_rate: float
    done_rate: float
    workers: int
    read_at: datetime


class Queues(Answer, frozen=True, kw_only=True):
    """A page of queues, those with alerts first."""

    queues: list[Queue]
    total: int
    next: str | None


class Minute(Answer, frozen=True, kw_only=True):
    """Counters of one minute, and how long messages waited until they were claimed and how long handlers ran."""

    at: datetime
    counts: dict[str, int]
    wait_mean_seconds: float | None = None
    wait_max_seconds: float | None = None
    run_mean_seconds: float | None = None
    run_max_seconds: float | None = None


class BacklogPoint(Answer, frozen=True, kw_only=True):
    """How many unfinished messages a queue had at a time: ready, delayed, waiting and leased."""

    at: datetime
    messages: int


class SettingsEvent(Answer, frozen=True, kw_only=True):
    """A change of a queue's settings, in words: configured, paused or resumed."""

    at: datetime
    event: str
    text: str


class Spread(Answer, frozen=True, kw_only=True):
    """Percentiles of some durations."""

    count: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float


class Percentiles(Answer, frozen=True, kw_only=True):
    """How long messages waited until they were claimed and handlers ran, in `minutes` from `at` on, from the lake."""

    at: datetime
    minutes: int
    wait: Spread | None
    run: Spread | None


class LakeFinding(Answer, frozen=True, kw_only=True):
    """A message that an audit could not explain."""

    queue: str
    id: str
    fault: str


class LakeAudit(Answer, frozen=True, kw_only=True):
    """The result of the last audit of a lake."""

    at: datetime
    clean: bool
    text: str
    undecided: int
    not_seen: int
    findings: list[LakeFinding]


class LakeAdvice(Answer, frozen=True, kw_only=True):
    """Advice of `waypost pipeline advise`, and what became of it."""

    at: datetime
    queue: str
    title: str
    effect: str
    #: What to call, and what takes it back.
    call: str
    undo: str
    applied: bool
    #: As `came true` or `solved`; none as long as it is open.
    verdict: str | None


class Lake(Answer, frozen=True, kw_only=True):
    """What the lake of a store has besides its tables."""

    #: Whether the server was given the lake of this store.
    configured: bool
    audit: LakeAudit | None = None
    #: Open advice first, then what was judged, newest first.
    advice: list[LakeAdvice] = []
    has_report: bool = False
    #: Why nothing is known of it now: it cannot be read, or does not answer.
    problem: str | None = None


class QueueHistory(Answer, frozen=True, kw_only=True):
    """The last minutes of a queue. Minutes in which nothing happened are left out, of `backlog` too."""

    queue: str
    at: datetime
    minutes: list[Minute]
    backlog: list[BacklogPoint]
    #: Before this the backlog is not known; none if all of it is.
    backlog_known_from: datetime | None
    changes: list[SettingsEvent]
    #: Where there is a lake.
    percentiles: list[Percentiles] = []
    #: Why there are no percentiles although there is a lake.
    lake_problem: str | None = None


class Charts(Answer, frozen=True, kw_only=True):
    """The last minutes of some queues, side by side."""

    queues: list[QueueHistory]
    minutes: int


class Settings(Answer, frozen=True, kw_only=True):
    """The settings of a queue, by the names that `configure` has."""

    lease: float | None
    max_deliveries: int | None
    max_pending: int | None
    overload: str
    max_running: int | None
    rate: str | None
    journal: str
    journal_max: int
    dead_max: int | None
    dead_keep: float | None
    completed: int
    hide_bodies: bool
    #: Whether the traceback of a message's last error is kept with it.
    tracebacks: bool
    #: Whether claims take turns between groups, and what holds for each group.
    fair: bool
    order: str | None
    on_failure: str
    group_max_running: int | None
    group_rate: str | None
    group_max_pending: int | None


class LedgerSums(Answer, frozen=True, kw_only=True):
    """Where every message of a queue went. `balance` and `unexplained` are 0 unless something is broken."""

    published: int
    redriven: int
    ready: int
    delayed: int
    waiting: int
    leased: int
    done: int
    dead: int
    dropped: int
    cancelled: int
    replaced: int
    balance: int
    unexplained: int
    claims: int
    expired: int
    retried: int
    snoozed: int
    released: int
    duplicates: int


class QueueDetail(Answer, frozen=True, kw_only=True):
    """A queue with its settings, its ledger, what limits it now, and its last minutes."""

    queue: Queue
    settings: Settings
    ledger: LedgerSums
    #: What keeps messages from being handed out faster, in words.
    limits: list[str]
    next_due_seconds: float | None
    next_lease_end_seconds: float | None
    sleeping_workers: int
    journal_readers: dict[str, int]
    journal_last: int
    minutes: list[Minute]
    #: The same minutes with the backlog and changes of settings; empty unless minutes were requested.
    history: QueueHistory


# ---- messages ------------------------------------------------------------------------------------------------


class Body(Answer, frozen=True, kw_only=True):
    """A body as far as it is shown."""

    form: BodyForm
    content_type: str
    size: int
    text: str | None
    truncated: bool


class Message(Answer, frozen=True, kw_only=True):
    """A message as it is in the store. Headers, body and traceback need the scope `bodies`."""

    queue: str
    id: str
    state: State
    key: str | None
    group: str | None
    priority: int
    token: str
    deliveries: int
    attempts: int
    published_at: datetime
    ready_at: datetime
    #: When it lapses unless it is claimed before.
    expires_at: datetime | None
    claimed_at: datetime | None
    lease_ends_at: datetime | None
    worker: str | None
    cancel_requested: bool
    ended_at: datetime | None
    reason: str | None
    error_type: str | None
    error: str | None
    #: The end of the traceback of its last error.
    traceback: str | None
    #: What the reason leaves open.
    note: str | None
    type_name: str | None
    correlation_id: str | None
    #: Its own retry policy, as `exponential:attempts=5`, and time limit in seconds, which win over the handler's.
    retry: str | None
    timeout: float | None
    headers: dict[str, str] | None
    body: Body


class Messages(Answer, frozen=True, kw_only=True):
    """A page of messages. It may be short or empty and have a `next`: a filter is searched for in bounded steps."""

    messages: list[Message]
    next: str | None


class Step(Answer, frozen=True, kw_only=True):
    """One event of a message's history, in words."""

    at: datetime
    event: str
    text: str
    #: Why it was handed out again, if it was: expired, released, retried, snoozed, redriven.
    cause: str | None
    worker: str | None
    token: str | None
    reason: str | None
    error_type: str | None
    #: The beginning of the error's text, of retried and dead.
    error: str | None


class Span(Answer, frozen=True, kw_only=True):
    """How long a message was in one condition. `end` is none while it still is."""

    kind: SpanKind
    text: str
    start: datetime
    end: datetime | None
    seconds: float
    #: How the span ended: the event after it.
    ended_by: str | None


class Timeline(Answer, frozen=True, kw_only=True):
    """What happened to a message, as far as the journal has it."""

    steps: list[Step]
    spans: list[Span]
    #: Whether the history begins with the publish: otherwise its beginning was trimmed or is not journalled.
    whole: bool


class ChainNode(Answer, frozen=True, kw_only=True):
    """A message that has to do with a chain."""

    queue: str
    id: str
    role: ChainRole
    text: str
    #: Whether it is the message that was asked for.
    is_this: bool


class ChainEdge(Answer, frozen=True, kw_only=True):
    """What came before what, each as `queue/id`. `direct`: nothing was between them, the one sent on the other."""

    source: str
    target: str
    direct: bool


class Chain(Answer, frozen=True, kw_only=True):
    """The chain of a message, as far as it is known. Of its ended messages the first and the last are."""

    #: `queue/id` of its first message; none if the message only waits for others.
    id: str | None
    sentence: str
    nodes: list[ChainNode]
    edges: list[ChainEdge]
    #: Unfinished messages that are not listed.
    more: int


class MessageDetail(Answer, frozen=True, kw_only=True):
    """A message and its history. `message` is none when it has left the queue."""

    queue: str
    id: str
    message: Message | None
    #: ready, delayed, waiting, leased, dead, done; or how it ended; or unknown.
    condition: str
    max_deliveries: int | None
    result: Body | None
    #: Why there is a result that cannot be shown.
    result_error: str | None
    timeline: Timeline
    chain: Chain | None
    #: Whether only the lake knows it.
    from_lake: bool


class Found(Answer, frozen=True, kw_only=True):
    """Where a search found a message."""

    queue: str
    id: str
    #: Its state, or how it ended; of a chain, what it is to the chain.
    condition: str
    key: str | None = None
    group: str | None = None
    published_at: datetime | None = None


class SearchAnswer(Answer, frozen=True, kw_only=True):
    """What a search found, and how far it went: `searched` of `total` messages of the queue, if it went one by one."""

    query: str
    by: SearchField
    queue: str | None = None
    found: list[Found]
    queues_searched: int
    #: Whether a lake was searched too, because no queue and no journal has the id; and why it could not be.
    lake_searched: bool = False
    lake_problem: str | None = None
    searched: int = 0
    total: int = 0
    #: Give it as `cursor` to go on; none at the end.
    next: str | None = None


class Failure(Answer, frozen=True, kw_only=True):
    """Messages of a queue that died lately with the same reason and error, as far as they were read."""

    queue: str
    reason: str
    error_type: str | None
    error: str | None
    count: int
    last_at: datetime
    #: The newest of them.
    id: str


class FailingQueue(Answer, frozen=True, kw_only=True):
    """How many messages of a queue died, and how many failures are retried."""

    queue: str
    died: int
    retried: int


class Failures(Answer, frozen=True, kw_only=True):
    """What failed in the last minutes: the newest first, of the queues with the most; and these queues."""

    minutes: int
    groups: list[Failure]
    queues: list[FailingQueue]


class DeadGroup(Answer, frozen=True, kw_only=True):
    """Dead letters with the same reason, error type and first line of the error."""

    reason: str
    error_type: str | None
    error: str | None
    count: int
    first_at: datetime | None
    last_at: datetime | None
    samples: list[str]
    #: How many died in each twenty-fourth of the time from `first_at` to `last_at` of all groups.
    over_time: list[int]


class DeadCount(Answer, frozen=True, kw_only=True):
    """How many messages a filter means: `count` of the `searched` that were read, of `total`."""

    count: int
    searched: int
    total: int


class DeadGroups(Answer, frozen=True, kw_only=True):
    """The dead letters of a queue by reason and error. `searched` of `total` were read, oldest first."""

    queue: str
    groups: list[DeadGroup]
    searched: int
    total: int


class TimerQueue(Answer, frozen=True, kw_only=True):
    """A queue that has timers."""

    queue: str
    timers: int
    next_due_seconds: float | None


class Timer(Answer, frozen=True, kw_only=True):
    """A message that is not due yet: a timer, or one that waits for its next attempt."""

    queue: str
    id: str
    key: str | None
    group: str | None
    due_at: datetime
    due_in_seconds: float
    attempts: int
    type_name: str | None


class NextTimers(Answer, frozen=True, kw_only=True):
    """The timers of a store or a queue, the soonest first. `next` continues the list of a queue.

    Of a store with timers in very many queues, the list ends where an unread queue may have a sooner one.
    """

    timers: list[Timer]
    next: str | None
    complete: bool


class Timers(Answer, frozen=True, kw_only=True):
    """The queues that have timers, the soonest first; `messages?state=delayed` of a queue lists them."""

    queues: list[TimerQueue]
    total: int


# ---- workers and schedules -------------------------------------------------------------------------------------


class WorkerQueue(Answer, frozen=True, kw_only=True):
    """A queue as one worker serves it."""

    name: str
    concurrency: int
    in_flight: int
    handled: int
    last_claim_at: datetime | None


class Worker(Answer, frozen=True, kw_only=True):
    """A worker as it last reported."""

    name: str
    host: str
    pid: int
    version: str
    state: str
    status: str
    reasons: list[str]
    processes: int
    started_at: datetime
    seen_at: datetime
    queues: list[WorkerQueue]
    #: What was requested of it and it has not done yet: stop or quiet.
    requested: str | None


class Workers(Answer, frozen=True, kw_only=True):
    """The registered workers, those with alerts first, and how many run each release."""

    workers: list[Worker]
    releases: dict[str, int]


class RunningMessage(Answer, frozen=True, kw_only=True):
    """A message that a worker holds: since when, and how long its lease still lasts."""

    queue: str
    id: str
    key: str | None
    group: str | None
    deliveries: int
    claimed_at: datetime | None
    running_seconds: float | None
    lease_left_seconds: float | None
    cancel_requested: bool


class WorkerDetail(Answer, frozen=True, kw_only=True):
    """A worker and the messages that it holds. `complete`: all leases of its queues were read."""

    worker: Worker
    at: datetime
    running: list[RunningMessage]
    complete: bool


class Fire(Answer, frozen=True, kw_only=True):
    """An instant at which a rule fires: in UTC, and in its zone with the offset."""

    at: datetime
    local: str
    #: Whether the offset of the zone is another than at the fire before.
    offset_changes: bool


class SavedFilters(Answer, frozen=True, kw_only=True):
    """The views that you have saved, by name."""

    filters: list[SavedFilter]


class SchedulePreview(Answer, frozen=True, kw_only=True):
    """When a rule fires, or why it cannot be saved."""

    valid: bool
    error: str | None
    fires: list[Fire]


class Schedule(Answer, frozen=True, kw_only=True):
    """A schedule: its rule and its state."""

    queue: str
    key: str
    name: str
    cron: str | None
    every: float | None
    tz: str
    exclude: list[date]
    missed: str
    overlap: str
    grace: float
    start: datetime | None
    end: datetime | None
    max_fires: int | None
    jitter: float
    paused: bool
    next_fires: list[datetime]
    fires: int
    missed_fires: int
    skipped_fires: int
    backfilled: int
    last_fire: datetime | None
    waiting_fire: datetime | None
    declared: bool
    priority: int
    group: str | None
    #: How many seconds after its fire a message lapses.
    expires: float | None
    #: The retry policy of its messages, as `exponential:attempts=5`, and their time limit in seconds; both win over the
    #: handler's.
    retry: str | None
    timeout: float | None


class Schedules(Answer, frozen=True, kw_only=True):
    """The schedules of a store, by queue and key."""

    schedules: list[Schedule]


# ---- actions ---------------------------------------------------------------------------------------------------


class ActionUndo(Answer, frozen=True, kw_only=True):
    """How an action is undone, in words; and if another action does it, the name and options of that."""

    text: str
    action: str | None
    options: dict[str, Any]


class Action(Answer, frozen=True, kw_only=True):
    """An entry of the log of actions: who did what, and what became of it."""

    id: str
    at: datetime
    user: str
    #: What it was done through, such as web.
    via: str
    origin: str
    action: str
    queue: str | None
    ok: bool
    text: str
    command: str
    python: str
    undo: ActionUndo | None


class Actions(Answer, frozen=True, kw_only=True):
    """A page of the log of actions, the newest first."""

    actions: list[Action]
    next: str | None


class BulkAction(Answer, frozen=True, kw_only=True):
    """A redrive or purge of many dead letters, which goes on when the page or the server ends."""

    id: str
    #: redrive or purge.
    verb: str
    queue: str
    filters: dict[str, Any]
    rate: str | None
    user: str
    via: str
    #: running, pausing, paused, cancelling, cancelled, done or failed.
    state: str
    #: Dead letters of the queue when it began; those moved or removed; those left because their key is in use.
    total: int
    done: int
    left: int
    #: Letters of which a server that ended has left no count.
    unknown: int
    started_at: datetime
    ended_at: datetime | None
    error: str | None
    #: Whether a server works on it now.
    carried: bool
    #: The state whose messages are meant, and how many were read so far.
    source: str
    searched: int
    text: str


class BulkActions(Answer, frozen=True, kw_only=True):
    """A page of bulk actions, the newest first."""

    bulk_actions: list[BulkAction]
    next: str | None


# ---- queries ---------------------------------------------------------------------------------------------------


class QueuesQuery(Request, frozen=True, kw_only=True):
    """Which queues."""

    name_contains: Annotated[str, Meta(max_length=128, description="A part of the name.")] = ""
    order: Annotated[Literal["alerts", "name"], Meta(description="Those with alerts first, or by name.")] = "alerts"
    limit: Limit = PAGE_LIMIT
    cursor: Cursor | None = None


class QueueQuery(Request, frozen=True, kw_only=True):
    """How much of a queue."""

    minutes: Annotated[int, Meta(ge=0, le=1_440, description="Counters of so many last minutes.")] = 0


class ChartsQuery(Request, frozen=True, kw_only=True):
    """Which queues, and how much of them."""

    queues: Annotated[str, Meta(min_length=1, max_length=600, description="One to four names, separated by commas.")]
    minutes: Annotated[int, Meta(ge=1, le=1_440, description="So many last minutes.")] = 1_440


class MessagesQuery(Request, frozen=True, kw_only=True):
    """Which messages of a queue."""

    state: Annotated[State, Meta(description="The state that is listed.")] = "ready"
    id: MessageId | None = None
    key: Text | None = None
    group: Text | None = None
    reason: Annotated[Text, Meta(description="Of dead letters.")] | None = None
    limit: Limit = PAGE_LIMIT
    cursor: Cursor | None = None


class DeadQuery(Request, frozen=True, kw_only=True):
    """Which dead letters to count; all that is given must fit."""

    reason: Text | None = None
    error_type: ErrorText | None = None
    error: ErrorText | None = None
    group: Text | None = None
    key_prefix: Text | None = None
    type_name: Text | None = None
    died_before: datetime | None = None
    died_after: datetime | None = None
    header: Annotated[Text, Meta(description="NAME=VALUE, or NAME. Needs the scope `bodies`.")] | None = None
    published_before: datetime | None = None
    published_after: datetime | None = None


class CountQuery(DeadQuery, frozen=True, kw_only=True):
    """Which messages to count. A reason and the time of a death only dead letters have."""

    state: Annotated[BulkState, Meta(description="The state of the messages.")] = "dead"


class SearchQuery(Request, frozen=True, kw_only=True):
    """What to search for: one of these, and the queue where there is no index of it."""

    id: Annotated[str, Meta(min_length=1, max_length=64, description="The id of a message, in all queues.")] | None = (
        None
    )
    key: Annotated[Text, Meta(description="Unfinished messages of all queues, or all of one queue.")] | None = None
    chain: Annotated[Text, Meta(description="The id of a chain: QUEUE/ID of its first message.")] | None = None
    group: Annotated[Text, Meta(description="Needs `queue`.")] | None = None
    type: Annotated[Text, Meta(description="A part of the name of the type. Needs `queue`.")] | None = None
    header: Annotated[Text, Meta(description="NAME=VALUE, or NAME. Needs `queue` and the scope `bodies`.")] | None = (
        None
    )
    correlation_id: Annotated[Text, Meta(description="Needs `queue` and the scope `bodies`.")] | None = None
    queue: Text | None = None
    cursor: Cursor | None = None


class ActionsQuery(Request, frozen=True, kw_only=True):
    """Which part of the log of actions."""

    limit: Limit = PAGE_LIMIT
    cursor: Cursor | None = None


class TimersQuery(Request, frozen=True, kw_only=True):
    """Which timers."""

    queue: Text | None = None
    limit: Limit = PAGE_LIMIT
    cursor: Cursor | None = None


class PreviewQuery(Request, frozen=True, kw_only=True):
    """A rule: a cron pattern or an interval in seconds, in a time zone."""

    cron: Annotated[str, Meta(max_length=4096)] | None = None
    every: float | None = None
    tz: Annotated[str, Meta(max_length=64)] = "UTC"
    exclude: Annotated[str, Meta(max_length=12_000, description="Days, as 2026-12-25, separated by commas.")] = ""
    start: datetime | None = None
    end: datetime | None = None
    count: Annotated[int, Meta(ge=1, le=100, description="So many fires.")] = 10


class SchedulesQuery(Request, frozen=True, kw_only=True):
    """Which schedules."""

    queue: Text | None = None
    fires: Annotated[int, Meta(ge=1, le=100, description="So many next fires of each.")] = 1


# ---- writes ----------------------------------------------------------------------------------------------------


class Nothing(Request, frozen=True, kw_only=True):
    """A write without options."""


class SettingsChange(Request, frozen=True, kw_only=True):
    """The settings to change, and only those; null turns one off. `dry_run` only shows what would change."""

    lease: float | UnsetType | None = UNSET
    max_deliveries: int | UnsetType | None = UNSET
    max_pending: int | UnsetType | None = UNSET
    overload: Literal["raise", "block", "drop_oldest"] | UnsetType = UNSET
    max_running: int | UnsetType | None = UNSET
    rate: Annotated[str, Meta(max_length=32)] | UnsetType | None = UNSET
    journal: Literal["off", "failures", "all", "full"] | UnsetType = UNSET
    journal_max: int | UnsetType = UNSET
    dead_max: int | UnsetType | None = UNSET
    dead_keep: float | UnsetType | None = UNSET
    completed: int | UnsetType | None = UNSET
    hide_bodies: bool | UnsetType = UNSET
    tracebacks: bool | UnsetType = UNSET
    fair: bool | UnsetType = UNSET
    order: Literal["group"] | UnsetType | None = UNSET
    on_failure: Literal["hold", "pass"] | UnsetType = UNSET
    group_max_running: int | UnsetType | None = UNSET
    group_rate: Annotated[str, Meta(max_length=32)] | UnsetType | None = UNSET
    group_max_pending: int | UnsetType | None = UNSET
    dry_run: bool = False


class RedriveRequest(Request, frozen=True, kw_only=True):
    """Which dead letters to send again: some ids, those of a reason, or all, which must be said."""

    ids: Annotated[list[MessageId], Meta(max_length=1_000)] = []
    reason: Text | None = None
    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=REDRIVE_MAX)] = REDRIVE_MAX
    rate: Annotated[str, Meta(max_length=32, description='At most this fast: "100/s".')] | None = None


class PurgeRequest(Request, frozen=True, kw_only=True):
    """Which messages to remove for good. `confirm` is the name of the queue, to be sure."""

    state: Literal["ready", "delayed", "waiting", "dead", "done"]
    confirm: str


class DeadFilter(Request, frozen=True, kw_only=True):
    """Which dead letters; all that is given must fit. Letters that die after the start are not meant."""

    reason: Text | None = None
    error_type: ErrorText | None = None
    error: Annotated[ErrorText, Meta(description="The line of the error that says most; empty: none.")] | None = None
    group: Text | None = None
    key_prefix: Text | None = None
    type_name: Text | None = None
    died_before: datetime | None = None
    died_after: datetime | None = None
    header: Annotated[Text, Meta(description="NAME=VALUE, or NAME. Needs the scope `bodies`.")] | None = None
    published_before: datetime | None = None
    published_after: datetime | None = None
    by: Annotated[str, Meta(max_length=128, description="Set by the server.")] = ""


class BulkRedrive(DeadFilter, frozen=True, kw_only=True):
    """Which dead letters to send again in the background, and how fast."""

    rate: Annotated[str, Meta(max_length=32, description='At most this fast: "100/s".')] | None = None


class BulkPurge(DeadFilter, frozen=True, kw_only=True):
    """Which dead letters to remove for good. `confirm` is the name of the queue, to be sure."""

    confirm: str


class MessageFilter(Request, frozen=True, kw_only=True):
    """Which messages; all that is given must fit. Messages that are published after the start are not meant."""

    error_type: ErrorText | None = None
    error: ErrorText | None = None
    group: Text | None = None
    key_prefix: Text | None = None
    type_name: Text | None = None
    header: Annotated[Text, Meta(description="NAME=VALUE, or NAME. Needs the scope `bodies`.")] | None = None
    published_before: datetime | None = None
    published_after: datetime | None = None
    rate: Annotated[str, Meta(max_length=32, description='At most this fast: "100/s".')] | None = None
    by: Annotated[str, Meta(max_length=128, description="Set by the server.")] = ""


class BulkCancel(MessageFilter, frozen=True, kw_only=True):
    """Which messages to cancel in the background. `confirm` is the name of the queue, to be sure."""

    state: Literal["ready", "delayed", "waiting"]
    confirm: str


class BulkReschedule(MessageFilter, frozen=True, kw_only=True):
    """Which timers to move in the background, and to when: seconds from now (0: now), or a time."""

    delay: Annotated[float, Meta(ge=0)] | None = None
    at: datetime | None = None


class BulkPrioritize(MessageFilter, frozen=True, kw_only=True):
    """Which messages get another priority in the background."""

    state: Literal["ready", "delayed"]
    priority: Annotated[int, Meta(ge=0, le=9)]


class BulkChange(Request, frozen=True, kw_only=True):
    """A bulk action, and what to do with it. What is done stays done."""

    id: MessageId
    change: Literal["pause", "resume", "cancel"]


class EditRequest(Request, frozen=True, kw_only=True):
    """A dead letter, and the message that takes its place. Without `headers` those of the letter stay."""

    id: MessageId
    body: Any = None
    keep_body: bool = False
    headers: dict[str, str] | None = None


class CancelRequest(Request, frozen=True, kw_only=True):
    """The message to cancel: its id, or its key."""

    id: MessageId | None = None
    key: Text | None = None


class RescheduleRequest(Request, frozen=True, kw_only=True):
    """A timer, by its id or its key, and its new due time: seconds from now, or a time."""

    id: MessageId | None = None
    key: Text | None = None
    delay: Annotated[float, Meta(ge=0)] | None = None
    at: datetime | None = None


class RemoveRequest(Request, frozen=True, kw_only=True):
    """Remove an empty queue. `confirm` is its name, to be sure."""

    confirm: str


class ScheduleReference(Request, frozen=True, kw_only=True):
    """A schedule, by its queue and key."""

    queue: Text
    key: Text


class BackfillRequest(ScheduleReference, frozen=True, kw_only=True):
    """A schedule, and the interval of the past whose fires to publish: from `start` on, before `end`."""

    start: datetime
    end: datetime
    dry_run: Annotated[bool, Meta(description="Only count them.")] = False


class WorkerReference(Request, frozen=True, kw_only=True):
    """A worker, by its name."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]


class ScheduleSave(Request, frozen=True, kw_only=True):
    """A schedule to save. Without `key` it is known by its name and rule."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    queue: Text
    key: Text | None = None
    #: A pattern, or several separated by semicolons.
    cron: Annotated[str, Meta(max_length=4096)] | None = None
    every: float | None = None
    tz: Annotated[str, Meta(max_length=64)] = "UTC"
    #: Days in its zone on which a cron pattern does not fire.
    exclude: Annotated[list[date], Meta(max_length=1000)] = []
    missed: Literal["skip", "once"] | int = "skip"
    #: At an instant while the last run has not ended: fire, skip it, or fire when the run ends.
    overlap: Literal["allow", "skip", "queue_one"] = "allow"
    grace: float = 60.0
    start: datetime | None = None
    end: datetime | None = None
    max_fires: int | None = None
    jitter: float = 0.0
    priority: int = 5
    group: Annotated[str, Meta(max_length=128)] | None = None
    #: How many seconds after its fire a message lapses.
    expires: float | None = None
    headers: dict[str, str] = {}
    body: Any = None
    #: The body and the headers stay as they are in the schedule with this key.
    keep_body: bool = False


# ---- what writes answer ----------------------------------------------------------------------------------------


class Done(Answer, frozen=True, kw_only=True):
    """What a write did, and a sentence about it."""

    changed: bool
    text: str


class SettingChange(Answer, frozen=True, kw_only=True):
    """One setting before and after."""

    name: str
    before: Any
    after: Any


class SettingsDone(Done, frozen=True, kw_only=True):
    """What changed."""

    changes: list[SettingChange]
    dry_run: bool


class RedriveDone(Done, frozen=True, kw_only=True):
    """What a redrive did."""

    moved: int
    #: Dead letters that stay, because their key is in use by now.
    duplicates: int
    #: More match: call again.
    more: bool


class BulkDone(Done, frozen=True, kw_only=True):
    """The bulk action."""

    bulk: str
    bulk_action: BulkAction


class EditDone(Done, frozen=True, kw_only=True):
    """The message that took the place of a dead letter."""

    id: str


class PurgeDone(Done, frozen=True, kw_only=True):
    """What a purge did."""

    removed: int


class CancelDone(Done, frozen=True, kw_only=True):
    """What a cancel did: cancelled, requested, finished or unknown."""

    status: str


class RescheduleDone(Done, frozen=True, kw_only=True):
    """What a move did, and the due time of the timer; none if it is ready now."""

    status: str
    due_at: datetime | None


class ScheduleDone(Done, frozen=True, kw_only=True):
    """The schedule as it is now."""

    schedule: Schedule


class TriggerDone(Done, frozen=True, kw_only=True):
    """The message that was published."""

    queue: str
    id: str


class BackfillDone(Done, frozen=True, kw_only=True):
    """What a backfill published, or with `dry_run` would publish."""

    published: int
    #: Instants that had fired before, in time or by a backfill.
    skipped: int
    #: Instants that the scheduler has yet to fire: it is behind.
    left: int
    #: The first and the last of those published.
    first: datetime | None
    last: datetime | None
    dry_run: bool
