"""Publishing: one message, or a batch in chunks that are encoded while earlier ones are being sent."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from itertools import islice
from typing import Any, Final, TypeAlias, get_args

from msgspec import structs

from waypost import codec
from waypost.checks import (
    check_chain,
    check_choice,
    check_flag,
    check_items,
    check_message_timeout,
    check_options,
    check_seconds,
    check_text,
    check_texts,
    due_ms,
    expiry_ms,
    show,
)
from waypost.errors import (
    InvalidInput,
    InvalidName,
    KeyInUse,
    OutcomeUnknown,
    PartialPublish,
    QueueFull,
    StoreUnavailable,
    WaypostError,
)
from waypost.identity import Operation
from waypost.message import error_text, error_type
from waypost.operations.flow import REFUSALS, AfterCommit, ClientContext, Flow, Sending, Sleep, Together
from waypost.operations.gathering import Lines, send_in_line, shares_calls
from waypost.operations.outgoing import deliver_outgoing
from waypost.policy import (
    BATCH_MAX,
    BLOCK_TIMEOUT_SECONDS,
    BLOCKERS_MAX,
    CHUNK_BYTES_MAX,
    CHUNK_MESSAGES_MAX,
    GROUP_CHARACTERS_MAX,
    KEY_CHARACTERS_MAX,
    PRIORITY_DEFAULT,
    OnConflict,
    RetryPolicy,
    Unique,
    check_message_retry,
    check_priority,
)
from waypost.redaction import journal_copy
from waypost.store.port import Call, Draft, Woken
from waypost.times import Duration
from waypost.values import ObservedOutcome, Published, chain_id, split_chain_id
from waypost.wake.port import ALL_SLEEPERS

log = logging.getLogger("waypost")


class Content:
    """The type of `CONTENT`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "CONTENT"


#: As a key: use the content of the body, so that equal bodies have the same key.
CONTENT: Final = Content()

KeyFunction = Callable[[Any], str]
Key = str | KeyFunction | Content | None
ManyKey = KeyFunction | Content | None
Group = str | Callable[[Any], str] | None

#: How many chunks are sent before replies are read. The store remembers the results of all of them (`REPLAY_MAX`), so
#: that each can be repeated after a lost connection.
WAVE_CHUNKS = 64
#: How many bodies are measured first, so that a chunk of very large ones is not encoded as a whole.
FIRST_PIECE = 16
#: How many chains are queried in one flush.
CHAINS_TOGETHER = 64
#: How often a blocked publisher checks for room.
BLOCK_FIRST_SECONDS, BLOCK_MAX_SECONDS = 0.01, 0.1
ON_CONFLICT = ("keep", "replace", "extend", "error")
UNIQUE = get_args(Unique)


class PublishOptions:
    """The validated options of a publish, as stores take them."""

    __slots__ = (
        "after", "at_ms", "block_timeout", "chain", "delay_ms", "expires_ms", "group", "headers", "heads",
        "key", "on_conflict", "priority", "unique", "window_ms",
    )  # fmt: skip

    def __init__(
        self,
        *,
        key: Key = None,
        window: Duration | None = None,
        unique: Unique = "live",
        on_conflict: OnConflict = "keep",
        delay: Duration | None = None,
        at: datetime | None = None,
        expires: Duration | datetime | None = None,
        priority: int = PRIORITY_DEFAULT,
        group: Group = None,
        headers: Mapping[str, str] | None = None,
        trace: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: Duration | None = None,
        block_timeout: Duration | None = None,
        chain: bool = False,
        after: str | Published | Iterable[str | Published] = (),
    ) -> None:
        check_choice("on_conflict", on_conflict, ON_CONFLICT)
        check_choice("unique", unique, UNIQUE)
        if key is None and (window is not None or on_conflict != "keep" or unique != "live"):
            raise InvalidInput("window, unique and on_conflict belong to a key: give key= too")
        if unique == "until_claimed" and window is not None:
            raise InvalidInput(
                'window and unique="until_claimed" exclude each other: a window keeps the key in use after the claim'
            )
        if not (key is None or isinstance(key, str | Content) or callable(key)):
            raise InvalidName(f"key must be text, a function of the body or CONTENT, not {show(key)}")
        if not (group is None or isinstance(group, str) or callable(group)):
            raise InvalidName(f"group must be text or a function of the body, not {show(group)}")
        self.key: Key = check_text("key", key, KEY_CHARACTERS_MAX) if isinstance(key, str) else key
        self.window_ms = 0 if window is None else _window_ms(window)
        self.unique: Unique = unique
        self.on_conflict: OnConflict = on_conflict
        self.delay_ms, self.at_ms = due_ms(delay, at)
        self.expires_ms = expiry_ms(expires, self.delay_ms, self.at_ms)
        self.priority = check_priority(priority)
        self.group: Group = check_text("group", group, GROUP_CHARACTERS_MAX) if isinstance(group, str) else group
        self.headers = check_texts("headers", headers)
        self.heads = codec.Heads(
            correlation_id=correlation_id,
            reply_to=reply_to,
            trace=check_texts("trace", trace),
            headers=self.headers,
            retry=None if retry is None else check_message_retry(retry),
            timeout=None if timeout is None else check_message_timeout(timeout),
        )
        self.block_timeout = (
            BLOCK_TIMEOUT_SECONDS if block_timeout is None else check_seconds("block_timeout", block_timeout)
        )
        self.chain = check_flag("chain", chain)
        self.after = _blockers(after)
        if self.after and key is not None:
            raise InvalidInput("a message that waits for chains cannot have a key: leave out key= or after=")

    def key_of(self, body: object, encoded: codec.Encoded | None = None, as_type: Any = None) -> str | None:
        """Return the key of a body."""
        key = self.key
        if key is None or isinstance(key, str):
            return key
        if isinstance(key, Content):
            if encoded is None:
                # Only decoding it shows whether a model is encoded with aliases or with field names.
                is_typed = as_type is not None or codec.type_name_of(body) is not None
                encoded = codec.encode_body(body, as_type, faithful=is_typed)
            return codec.content_key(encoded, codec.read_as(body, as_type))
        return check_text("key", key(body), KEY_CHARACTERS_MAX)

    def group_of(self, body: object) -> str | None:
        """Return the group of a body."""
        group = self.group
        return check_text("group", group(body), GROUP_CHARACTERS_MAX) if callable(group) else group


def _blockers(after: str | Published | Iterable[str | Published]) -> tuple[str, ...]:
    given = [after] if isinstance(after, str | Published) else check_items("after", after)
    chains = tuple(dict.fromkeys(map(check_chain, given)))
    if len(chains) > BLOCKERS_MAX:
        raise InvalidInput(f"a message can wait for at most {BLOCKERS_MAX:,} chains, not {len(chains):,}")
    return chains


NO_OPTIONS = PublishOptions()
#: The keywords of `publish`.
OPTIONS = frozenset((*(PublishOptions.__init__.__kwdefaults__ or ()), "transaction"))


def validate_options(keywords: Mapping[str, Any]) -> PublishOptions:
    """Return the validated keywords of a publish, cached for a call without any."""
    if not keywords:
        return NO_OPTIONS
    check_options("publish", keywords, OPTIONS)
    return PublishOptions(**keywords)


def split_transaction(keywords: Mapping[str, Any]) -> tuple[object | None, dict[str, Any]]:
    """Return the caller's transaction, or None, and the other keywords of a publish."""
    others = dict(keywords)
    return others.pop("transaction", None), others


def _window_ms(window: Duration) -> int:
    return round(check_seconds("window", window, least=0.001, hint=", or None for `live`") * 1000)


def _check_chains_exist(context: ClientContext, chains: Sequence[str], *, within: bool = False) -> Flow[None]:
    """Raise `InvalidInput` if a chain that a message is to wait for does not exist, or no longer.

    A chain that exists is kept during the publish, so it is enough to check before.
    """
    for at in range(0, len(chains), CHAINS_TOGETHER):
        part = chains[at : at + CHAINS_TOGETHER]
        calls = [context.store.watch_chain(*split_chain_id(chain), None) for chain in part]
        states: list[Any] = []
        if within:
            for call in calls:
                states.append((yield call))
        else:
            states = yield Together(calls)
        for chain, call, state in zip(part, calls, states, strict=True):
            if isinstance(state, Exception):
                # The first attempt has failed; this one repeats it within the budget, or raises.
                state = yield from context.attempt(call)
            if not state.known:
                queue, message_id = split_chain_id(chain)
                raise InvalidInput(
                    f"after: message {message_id} of queue {queue} has no chain: publish it with chain=True first "
                    "(a chain is deleted an hour after its end: then leave it out)"
                )


# ---- one message ---------------------------------------------------------------------------------------------


def publish(
    context: ClientContext,
    queue: str,
    body: object,
    options: PublishOptions,
    as_type: Any = None,
    lines: PublishLines | None = None,
) -> Flow[Published]:
    """Publish one message; `as_type` is the declared type of the queue's bodies.

    With `lines` it may share a call with others that are published at the same time.
    """
    encoded = codec.encode_body(body, as_type)
    if options.after:
        yield from _check_chains_exist(context, options.after)
    message_id = context.session.message_id()
    envelope = codec.make_envelope(message_id, encoded, options.heads.of(encoded.type_name))
    draft = Draft(
        message_id,
        envelope,
        None if options.key is None else options.key_of(body, encoded, as_type),
        options.window_ms,
        options.on_conflict,
        options.delay_ms,
        options.at_ms,
        options.priority,
        None if options.group is None else options.group_of(body),
        None if context.redact is None else journal_copy(context.redact, queue, message_id, envelope),
        False,
        chain_id(queue, message_id) if options.chain else None,
        options.after,
        False,
        options.expires_ms,
        options.unique,
    )
    try:
        try:
            if lines is None or options.after or not shares_calls(context, draft.key):
                results = yield from _publish_once(context, queue, (draft,))
            else:
                results = [(yield from send_in_line(context, queue, draft, lines.of(queue)))]
        except QueueFull as full:
            results, refused = yield from _publish_when_there_is_room(
                context, queue, (draft,), options.block_timeout, full
            )
            if refused is not None:
                raise refused from None
    except WaypostError as error:
        _emit_failed(context, queue, error)
        raise
    published = results[0]
    if context.on_event is not None:
        _emit_published(context, queue, results, (draft,))
    if options.after:
        yield from deliver_outgoing(context, queue)
    if published.status == "conflict":
        raise _key_in_use(draft.key, published.id)
    return published


def _publish_once(context: ClientContext, queue: str, drafts: Sequence[Draft]) -> Flow[list[Published]]:
    def identify() -> None:
        nonlocal drafts
        drafts = with_new_ids(context, queue, drafts)

    return (
        yield from context.operate_and_wake(
            queue, lambda operation: context.store.publish(queue, drafts, operation), identify=identify
        )
    )


class SharedPublish:
    """Single publishes may share a call."""

    fenced = False

    def call(
        self, context: ClientContext, queue: str, items: Sequence[Draft], operation: Operation
    ) -> Call[Woken[list[Published]]]:
        return context.store.publish(queue, items, operation)

    def with_new_ids(self, context: ClientContext, queue: str, items: Sequence[Draft]) -> Sequence[Draft]:
        return with_new_ids(context, queue, items)

    def key(self, item: Draft) -> str | None:
        return item.key

    def size(self, item: Draft) -> int:
        return len(item.envelope)


PublishLines: TypeAlias = Lines[Draft, Published]


#: The event for each status: its name, outcome and cause.
_EVENTS: dict[str, tuple[str, ObservedOutcome, str | None]] = {
    "queued": ("published", "success", None),
    "delayed": ("published", "success", "delayed"),
    "replaced": ("published", "success", "replaced"),
    "extended": ("postponed", "success", None),
    "duplicate": ("duplicate", "skipped", None),
    "conflict": ("duplicate", "skipped", "conflict"),
}


def _emit_published(
    context: ClientContext, queue: str, results: Iterable[Published | None], drafts: Sequence[Draft]
) -> None:
    for published, draft in zip(results, drafts, strict=False):
        if published is not None:
            event, outcome, reason = _EVENTS[published.status]
            context.emit(
                event, queue, outcome, message_id=published.id, key=draft.key, group=draft.group,
                priority=draft.priority, reason=reason,
            )  # fmt: skip


def _emit_failed(context: ClientContext, queue: str, error: Exception, count: int = 1) -> None:
    outcome: ObservedOutcome = "unknown" if getattr(error, "outcome", "unknown") == "unknown" else "failure"
    context.emit("published", queue, outcome, count=count, error_type=error_type(error), error=error_text(error))


def _key_in_use(key: str | None, holder: str) -> KeyInUse:
    return KeyInUse(
        f"key {key!r} belongs to message {holder}; nothing was published. "
        'Use on_conflict="keep", "replace" or "extend" to accept that',
        id=holder,
    )


def _publish_when_there_is_room(
    context: ClientContext, queue: str, drafts: Sequence[Draft], timeout: float, full: QueueFull
) -> Flow[tuple[list[Published], QueueFull | None]]:
    """Publish drafts that were refused, in smaller parts if necessary, if the queue's policy is `block`.

    Returns the results of the published ones, in order, and the refusal of the rest. The timeout restarts with
    each part that finds room, because a batch may be larger than the cap of the queue.
    """
    policy = yield from context.policy(queue)
    if policy.overload != "block":
        return [], full
    results: list[Published] = []
    size, pause, refused = len(drafts), BLOCK_FIRST_SECONDS, True
    deadline = context.monotonic() + timeout
    while len(results) < len(drafts):
        if refused and size > 1:
            size //= 2
        elif refused:
            remaining = deadline - context.monotonic()
            if remaining <= 0:
                return results, full
            yield Sleep(min(pause, remaining))
            pause = min(pause * 2, BLOCK_MAX_SECONDS)
        try:
            # Each attempt is a new operation: a repeat of the refused one would get the first answer.
            results += yield from _publish_once(context, queue, drafts[len(results) : len(results) + size])
        except QueueFull as error:
            full, refused = error, True
        else:
            size, pause, refused = size * 2, BLOCK_FIRST_SECONDS, False
            deadline = context.monotonic() + timeout
    return results, None


# ---- many messages -------------------------------------------------------------------------------------------


class _Chunk:
    """Drafts that are published in one step, and their results."""

    __slots__ = ("conflict", "drafts", "error", "results", "sending")

    def __init__(self, context: ClientContext, queue: str, drafts: Sequence[Draft]) -> None:
        self.drafts = list(drafts)
        self.sending: Sending[Any] = Sending(
            context,
            queue,
            lambda operation: context.store.publish(queue, self.drafts, operation),
            identify=lambda: self.identify(context, queue),
        )
        self.results: list[Published | None] = []
        self.error: Exception | None = None
        self.conflict: KeyInUse | None = None

    def identify(self, context: ClientContext, queue: str) -> None:
        """Give the messages new ids."""
        self.drafts = with_new_ids(context, queue, self.drafts)


def _check_batch(count: int) -> None:
    if count > BATCH_MAX:
        raise InvalidInput(f"a batch holds at most {BATCH_MAX:,} messages; call publish_many for each part")


class Cutter:
    """Cuts bodies into chunks, lazily. An error of a body, of the caller's iterator or key function ends it."""

    def __init__(
        self, context: ClientContext, queue: str, bodies: Iterable[object], options: PublishOptions, as_type: Any = None
    ) -> None:
        self._context = context
        self._as_type = as_type
        self._queue = queue
        self._options = options
        if isinstance(bodies, str | bytes | bytearray | memoryview | Mapping) or not isinstance(bodies, Iterable):
            raise InvalidInput(f"bodies must be a list or a generator of bodies, not {show(bodies)}")
        if isinstance(bodies, Sized):
            _check_batch(len(bodies))  # the length of a generator is known at its end
        self._bodies = iter(bodies)
        self._largest = 1
        self._piece = FIRST_PIECE
        #: A message that waits for chains sends a notice to each of them: limit the notices of one step.
        self._most = CHUNK_MESSAGES_MAX // max(1, len(options.after) // 4) or 1
        #: Drafts that did not fit into the chunk before.
        self._left: list[Draft] = []
        self._plain = (
            options.key is None and not callable(options.group) and context.redact is None
            and not options.chain and not options.after and not options.expires_ms
        )  # fmt: skip
        self.read = 0
        self.error: Exception | None = None

    def chunks(self) -> Iterator[list[Draft]]:
        try:
            while chunk := self._chunk():
                yield chunk
        except Exception as error:
            self.error = error

    def _chunk(self) -> list[Draft]:
        drafts, self._left = self._left, []
        size = sum(len(draft.envelope) for draft in drafts)
        while len(drafts) < self._most and size < CHUNK_BYTES_MAX:
            room = CHUNK_BYTES_MAX - size
            count = max(1, min(self._most - len(drafts), self._piece, room // self._largest))
            bodies = list(islice(self._bodies, count))
            if not bodies:
                break
            self.read += len(bodies)
            _check_batch(self.read)
            self._piece = CHUNK_MESSAGES_MAX
            piece = self._drafts(bodies)
            sizes = [len(draft.envelope) for draft in piece]
            self._largest = max(sizes)
            drafts += piece
            size += sum(sizes)
        return self._cut(drafts, size)

    def _cut(self, drafts: list[Draft], size: int) -> list[Draft]:
        """Move drafts to the next chunk that would make this one too large, or have a key twice."""
        if size <= CHUNK_BYTES_MAX and (self._plain or self._options.key is None):
            return drafts
        keys: set[str] = set()
        room = CHUNK_BYTES_MAX
        for index, draft in enumerate(drafts):
            room -= len(draft.envelope)
            if (room < 0 and index > 0) or draft.key in keys:
                self._left = drafts[index:]
                return drafts[:index]
            if draft.key is not None:
                keys.add(draft.key)
        return drafts

    def _drafts(self, bodies: list[object]) -> list[Draft]:
        options = self._options
        ids = self._context.session.message_ids(len(bodies))
        envelopes = codec.seal_many(ids, bodies, options.heads, self._as_type)
        if self._plain:
            delay_ms, at_ms, priority, group = options.delay_ms, options.at_ms, options.priority, options.group
            if delay_ms == 0 and at_ms is None and priority == PRIORITY_DEFAULT and group is None:
                return list(map(Draft, ids, envelopes))
            return [
                Draft(id, envelope, None, 0, "keep", delay_ms, at_ms, priority, group)  # type: ignore[arg-type]
                for id, envelope in zip(ids, envelopes, strict=True)
            ]
        return [
            Draft(
                id,
                envelope,
                options.key_of(body, None, self._as_type),
                options.window_ms,
                options.on_conflict,
                options.delay_ms,
                options.at_ms,
                options.priority,
                options.group_of(body),
                journal_copy(self._context.redact, self._queue, id, envelope),
                False,
                chain_id(self._queue, id) if options.chain else None,
                options.after,
                False,
                options.expires_ms,
                options.unique,
            )
            for id, envelope, body in zip(ids, envelopes, bodies, strict=True)
        ]


def publish_many(
    context: ClientContext, queue: str, bodies: Iterable[object], options: PublishOptions, as_type: Any = None
) -> Flow[list[Published]]:
    """Publish a batch, in order, chunk by chunk; raise `PartialPublish` with what is known if a part fails."""
    cutter = Cutter(context, queue, bodies, options, as_type)
    if options.after:
        yield from _check_chains_exist(context, options.after)
    chunks = cutter.chunks()
    results: list[Published | None] = []
    error: Exception | None = None
    conflict: Exception | None = None
    chunks_max = WAVE_CHUNKS
    if options.group is not None:
        first = list(islice(chunks, 2))
        chunks = itertools.chain(first, chunks)
        if len(first) > 1 and (yield from context.policy(queue)).order:
            # Each chunk is sent after the reply to the one before: a repeated one must not arrive after a later one.
            chunks_max = 1
    while error is None:
        try:
            wave = yield from _send_wave(context, queue, chunks, options, chunks_max)
        except WaypostError as failure:
            # The results of these chunks are unknown; those of earlier ones are known.
            error = failure
            break
        if not wave:
            break
        for chunk in wave:
            if context.on_event is not None:
                _emit_published(context, queue, chunk.results, chunk.drafts)
                if chunk.error is not None:
                    _emit_failed(context, queue, chunk.error, len(chunk.drafts) - len(chunk.results))
            if options.on_conflict == "error":
                _take_out_conflicts(chunk)
            results += chunk.results
            results += [None] * (len(chunk.drafts) - len(chunk.results))
            error = error or chunk.error
            conflict = conflict or chunk.conflict
    if options.after and any(results):
        yield from deliver_outgoing(context, queue)
    return _batch_result(results, error or cutter.error or conflict, cutter, bodies)


def _batch_result(
    results: list[Published | None], error: Exception | None, cutter: Cutter, bodies: Iterable[object]
) -> list[Published]:
    """Return the results of a batch, or raise `PartialPublish` with the known ones if a part failed."""
    if error is None:
        return results  # type: ignore[return-value]
    if not any(results):
        raise error
    total = max(cutter.read, len(bodies) if isinstance(bodies, Sequence) else 0)
    results += [None] * (total - len(results))
    known = sum(published is not None for published in results)
    raise PartialPublish(
        f"{known} of {total} messages were published, then: {error} "
        "(`results` has them; publish the others again, with a key if they may have arrived)",
        results=results,
        cause=error,
    ) from error


def _take_out_conflicts(chunk: _Chunk) -> None:
    """With `on_conflict="error"` a key in use leaves a gap in the results, and the rest is published."""
    for index, published in enumerate(chunk.results):
        if published is not None and published.status == "conflict":
            chunk.results[index] = None
            chunk.conflict = chunk.conflict or _key_in_use(chunk.drafts[index].key, published.id)


def _send_wave(
    context: ClientContext, queue: str, chunks: Iterator[list[Draft]], options: PublishOptions, chunks_max: int
) -> Flow[list[_Chunk]]:
    """Send the next chunks in one flush, and repeat those whose connection failed."""
    wave: list[_Chunk] = []

    def calls() -> Iterator[Call[Any]]:
        for drafts in islice(chunks, chunks_max):
            wave.append(_Chunk(context, queue, drafts))
            yield wave[-1].sending.call()

    yield from context.know_time()
    try:
        yield from _settle_replies(context, wave, Together(calls()))
        for chunk in wave:
            if isinstance(chunk.error, QueueFull):
                published, chunk.error = yield from _publish_when_there_is_room(
                    context, queue, chunk.drafts, options.block_timeout, chunk.error
                )
                chunk.results = list(published)
                if chunk.error is not None:
                    break
    finally:
        for chunk in wave:
            chunk.sending.end()
    return wave


def _settle_replies(context: ClientContext, wave: list[_Chunk], first: Together) -> Flow[None]:
    step, waiting = first, wave
    while True:
        try:
            replies = yield step
        except WaypostError as failure:
            if not waiting:
                raise
            replies = [failure] * len(waiting)
        again: list[_Chunk] = []
        pause: Sleep | None = None
        for chunk, reply in zip(waiting, replies, strict=True):
            if isinstance(reply, (StoreUnavailable, OutcomeUnknown, *REFUSALS)):
                try:
                    pause = chunk.sending.failed("publish", reply) or pause
                    again.append(chunk)
                except WaypostError as error:
                    chunk.error = error
            elif isinstance(reply, Exception):
                chunk.error = reply
            else:
                chunk.results, chunk.error = list(context.wake_and_report(reply)), None
        if not again:
            return
        if pause is not None:
            yield pause
        waiting = again
        step = Together([chunk.sending.call() for chunk in again])


def with_new_ids(context: ClientContext, queue: str, drafts: Sequence[Draft]) -> list[Draft]:
    """Return the same messages with new ids: another process may have used theirs."""
    return [
        structs.replace(
            draft,
            id=id,
            envelope=codec.with_id(draft.envelope, id),
            journal_copy=None if draft.journal_copy is None else codec.with_id(draft.journal_copy, id),
            chain=chain_id(queue, id) if draft.chain == chain_id(queue, draft.id) else draft.chain,
        )
        for draft, id in zip(drafts, context.session.message_ids(len(drafts)), strict=True)
    ]


# ---- in the caller's own transaction -------------------------------------------------------------------------


def wake_after_commit(
    context: ClientContext, queue: str, chosen: dict[str, list[str]], after_commit: AfterCommit
) -> None:
    """Notify the sleepers that a step of the caller's transaction named, once the transaction is committed.

    A store that does not notice the commit chose them too early: workers that were about to poll may be asleep by then.
    For such a store all sleepers are notified.
    """
    support = context.store.transactions
    names = chosen if support is None or support.notifies else {queue: [ALL_SLEEPERS]}
    if names:
        after_commit(names)


def publish_within(
    context: ClientContext,
    queue: str,
    bodies: Iterable[object],
    options: PublishOptions,
    as_type: Any,
    after_commit: AfterCommit,
) -> Flow[list[Published]]:
    """Publish one message or many in the caller's transaction: each step runs once, without retries and waits.

    No event is reported: the caller's commit decides whether the messages exist. After it, sleepers that the store does
    not notify itself are notified, if `after_commit` can register for the commit.
    """
    cutter = Cutter(context, queue, bodies, options, as_type)
    if options.after:
        yield from _check_chains_exist(context, options.after, within=True)
    results: list[Published | None] = []
    error: Exception | None = None
    conflict: KeyInUse | None = None
    for drafts in cutter.chunks():
        operation = context.replay_windows.begin(queue)
        try:
            woken = yield context.store.publish(queue, drafts, operation)
        except WaypostError as failure:
            error = failure
            results += [None] * len(drafts)
            break
        finally:
            context.replay_windows.end(queue, operation)
        wake_after_commit(context, queue, woken.wake, after_commit)
        for draft, published in zip(drafts, woken.result, strict=True):
            if published.status == "conflict":
                conflict = conflict or _key_in_use(draft.key, published.id)
            results.append(None if published.status == "conflict" else published)
    return _batch_result(results, error or cutter.error or conflict, cutter, bodies)
