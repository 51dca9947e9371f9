"""A backend for Django's task framework: `task.enqueue()` publishes a message, in the caller's transaction.

    TASKS = {"default": {"BACKEND": "waypost.django.tasks.WaypostBackend", "QUEUES": ["default", "mails"]}}

The queue "mails" of tasks is the queue "tasks.mails" of waypost. Priorities of tasks are mapped to those of messages
in ten bands, of which the higher are claimed first:

    −100…−81   −80…−61   −60…−41   −40…−21   −20…−1   0…19   20…39   40…59   60…79   80…100
        0         1         2         3         4       5       6       7       8       9

A result is made of what the store has: the message while it waits, runs or is a dead letter, and the result that a
worker keeps of a task that succeeded, for `result_ttl`. Then `TaskResultDoesNotExist` is raised.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from django.conf import settings
from django.core.checks import CheckMessage, Warning
from django.utils import timezone
from django.utils.module_loading import import_string

from waypost.checks import check_count, check_options, check_queue, check_seconds
from waypost.client import Waypost
from waypost.django.clients import use_client
from waypost.django.publishing import publish
from waypost.django.task_api import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    signals,
    task_backends,
)
from waypost.errors import ConfigurationError
from waypost.identity import ID_CHARACTERS
from waypost.message import StoredMessage
from waypost.policy import CONCURRENCY_MAX, RECORD_BYTES_MAX, RESULT_TTL_SECONDS, Exponential, RetryPolicy, check_retry
from waypost.values import MessageState
from waypost.worker.handler import CONCURRENCY

OPTIONS = ("queue_prefix", "retry", "result_ttl", "concurrency")
#: The kind of the records that hold the errors of failed attempts.
ATTEMPTS_KIND = "waypost-task-attempts"
#: Attempts that a result lists at the most, and characters of each traceback.
ATTEMPTS_MAX, TRACEBACK_CHARACTERS_MAX = 10, 5_000
#: The bytes of each in the record of all: characters can be several bytes.
ATTEMPT_BYTES_MAX = RECORD_BYTES_MAX // ATTEMPTS_MAX - 1
ERROR_CLASS_CHARACTERS_MAX = 500
#: A message may go from one state to the next while a result is read.
READS_MAX = 5
#: The states of a message as those of a task.
STATUSES: dict[MessageState, str] = {
    "ready": "READY", "delayed": "READY", "waiting": "READY", "leased": "RUNNING", "dead": "FAILED",
}  # fmt: skip


class TaskCall(msgspec.Struct):
    """The body of a task's message."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    backend: str
    queue_name: str
    priority: int
    run_after: datetime | None = None


class Attempt(msgspec.Struct):
    """One run of a task: which worker began it and when, and the error that ended it."""

    token: int
    worker: str
    started_at: datetime
    error_class: str | None = None
    traceback: str = ""
    #: Whether it is known from the record that its worker made, which has the traceback.
    recorded: bool = False


class Finished(msgspec.Struct):
    """What is kept of a task that succeeded."""

    call: TaskCall
    enqueued_at: datetime
    finished_at: datetime
    attempts: list[Attempt]
    return_value: Any


class WaypostBackend(BaseTaskBackend):
    """Runs tasks by workers of waypost (`manage.py waypost_worker`). OPTIONS has:

    - `queue_prefix` ("tasks."): what the names of its queues begin with in waypost.
    - `retry` (`waypost.Exponential()`): when a task that failed runs again; `waypost.NoRetry()`: never.
    - `result_ttl` (an hour): how long the result of a task that succeeded is kept.
    - `concurrency` (10): how many tasks of each queue a worker runs at once, in threads.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        given = self.options
        check_options(f"TASKS[{alias!r}]['OPTIONS']", given, OPTIONS)
        self.queue_prefix: str = given.get("queue_prefix", "tasks.")
        self.retry: RetryPolicy = check_retry(given.get("retry", Exponential()))
        self.result_ttl = check_seconds(
            "result_ttl", given.get("result_ttl", RESULT_TTL_SECONDS), least=0.001, error=ConfigurationError
        )
        self.concurrency: int = check_count(
            "concurrency", given.get("concurrency", CONCURRENCY), 1, CONCURRENCY_MAX, ConfigurationError
        )
        for queue in self.queues:
            self.message_queue(queue)

    def message_queue(self, queue_name: str) -> str:
        """Return the queue of waypost for a queue of tasks."""
        return check_queue(f"{self.queue_prefix}{queue_name}")

    # ---- enqueuing -----------------------------------------------------------------------------------------

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Publish a task, as a part of the open transaction of WAYPOST['DATABASE'] or at once; return its result."""
        self.validate_task(task)
        call = TaskCall(
            task.module_path, normalize_json(args), normalize_json(kwargs), self.alias, task.queue_name, task.priority,
            _aware(task.run_after),
        )  # fmt: skip
        queue = self.message_queue(task.queue_name)
        published = publish(queue, call, priority=message_priority(task.priority), at=call.run_after)
        result = TaskResult(
            task=task, id=result_id(queue, published.id), status=TaskResultStatus.READY, enqueued_at=timezone.now(),
            started_at=None, finished_at=None, last_attempted_at=None, args=call.args, kwargs=call.kwargs,
            backend=self.alias, errors=[], worker_ids=[],
        )  # fmt: skip
        signals.task_enqueued.send(type(self), task_result=result)
        return result

    # ---- results -------------------------------------------------------------------------------------------

    def get_result(self, result_id: str) -> Any:
        """Return the result of a task as the store has it now, or raise `TaskResultDoesNotExist`."""
        message_id, _, digest = str(result_id).partition(".")
        with use_client() as post:
            names = [self.message_queue(name) for name in self.queues] if self.queues else post.queues()
            queue = next((name for name in names if queue_digest(name) == digest), None)
            if queue is None or len(message_id) != ID_CHARACTERS:
                raise TaskResultDoesNotExist(result_id)
            for _ in range(READS_MAX):
                kept = post.result(queue, message_id, as_type=Finished)
                if kept is not None:
                    return finished_result(result_id, kept)
                stored = _find(post, queue, message_id)
                if stored is not None:
                    return self._unfinished_result(post, result_id, stored)
        raise TaskResultDoesNotExist(result_id)

    def _unfinished_result(self, post: Waypost, result_id: str, stored: StoredMessage[TaskCall]) -> Any:
        attempts = read_attempts(post, stored.queue, stored.id)
        status = STATUSES[stored.state]
        errors = [one for one in attempts if one.error_class is not None]
        if errors and stored.traceback is not None and not errors[-1].recorded:
            errors[-1].traceback = stored.traceback
        if status == "FAILED" and not errors:
            # No handler failed: its worker died too often, or the body could not be read.
            text = f"the message is dead: {stored.reason}{f' ({stored.error})' if stored.error else ''}"
            attempts = [
                *attempts,
                Attempt(0, "", stored.ended_at or timezone.now(), "waypost.errors.MessageDead", text),
            ]
        return make_result(
            result_id, stored.body, status, stored.published_at, attempts,
            finished_at=stored.ended_at if status == "FAILED" else None,
        )  # fmt: skip

    def check(self, **kwargs: Any) -> Iterable[CheckMessage]:
        """Warn of a project in which nothing would run the tasks."""
        from django.apps import apps

        yield from super().check(**kwargs)
        if not apps.is_installed("waypost.django"):
            yield Warning(
                "TASKS uses waypost, and there is no command to run them.",
                hint="Add 'waypost.django' to INSTALLED_APPS.", id="waypost.W001",
            )  # fmt: skip


def task_queues() -> dict[str, WaypostBackend]:
    """Return the queues of waypost that have tasks, each with its backend."""
    found: dict[str, WaypostBackend] = {}
    for alias in task_backends.settings:
        backend = task_backends[alias]
        if isinstance(backend, WaypostBackend):
            for name in backend.queues:
                found[backend.message_queue(name)] = backend
    return found


# ---- ids and priorities ----------------------------------------------------------------------------------------------


def message_priority(priority: int) -> int:
    """Return the priority of the message for that of a task, −100 to 100."""
    return min(9, (int(priority) + 100) // 20)


def queue_digest(queue: str) -> str:
    """Return a short text for the name of a queue: results have ids of at most 64 characters."""
    return f"{zlib.crc32(queue.encode()):08x}"


def result_id(queue: str, message_id: str) -> str:
    """Return the id of the result of a message."""
    return f"{message_id}.{queue_digest(queue)}"


def _local(moment: datetime | None) -> datetime | None:
    """Return a time as the project has them: without a zone if USE_TZ is False."""
    if moment is None or settings.USE_TZ:
        return _aware(moment)
    return moment if timezone.is_naive(moment) else timezone.make_naive(moment)


def _aware(moment: datetime | None) -> datetime | None:
    return timezone.make_aware(moment) if moment is not None and timezone.is_naive(moment) else moment


# ---- reading ---------------------------------------------------------------------------------------------------------


def _find(post: Waypost, queue: str, message_id: str) -> StoredMessage[TaskCall] | None:
    """Return a message that has not ended, or is dead; None if there is none or it went on meanwhile."""
    for call in post.store.locate([queue], message_id):
        for found in post._call(call):
            if found.state in STATUSES:
                for stored in post.messages(queue, found.state, id=message_id, limit=1):
                    stored._as_type = TaskCall
                    return stored
    return None


def read_attempts(post: Waypost, queue: str, message_id: str) -> list[Attempt]:
    """Return the runs of a task so far: failed ones as recorded, the others by the journal."""
    attempts: dict[int, Attempt] = {}
    for event in post.history(queue, message_id):
        if event.event == "claimed" and event.token is not None:
            attempts[event.token] = Attempt(event.token, event.worker or "", event.at)
        elif event.event in ("retried", "dead") and event.token in attempts and event.error_type:
            one = attempts[event.token]
            # The journal has the beginning of the text only. It is all there is once the record is forgotten.
            one.error_class, one.traceback = _class_path(event.error_type), event.error or ""
        elif event.event in ("snoozed", "released"):
            attempts.pop(event.token or 0, None)
    for one in recorded_attempts(post, queue, message_id):
        one.recorded = True
        attempts[one.token] = one
    return sorted(attempts.values(), key=lambda one: one.token)


def recorded_attempts(post: Waypost, queue: str, message_id: str) -> list[Attempt]:
    """Return the failed attempts of a task that its workers recorded."""
    found = post.records(ATTEMPTS_KIND, names=[result_id(queue, message_id)]).records
    return [] if not found or found[0].data is None else msgspec.json.decode(found[0].data, type=list[Attempt])


def record_attempt(post: Waypost, queue: str, message_id: str, failed: Attempt, ttl: float) -> None:
    """Record a failed attempt with its traceback, for which the journal has no room."""
    earlier = [one for one in recorded_attempts(post, queue, message_id) if one.token != failed.token]
    data = msgspec.json.encode([fit_attempt(one) for one in [*earlier, failed][-ATTEMPTS_MAX:]])
    post.save_record(ATTEMPTS_KIND, result_id(queue, message_id), data, ttl=ttl)


def fit_attempt(attempt: Attempt) -> Attempt:
    """Return an attempt that is at most `ATTEMPT_BYTES_MAX` in a record: of its traceback the end is kept."""
    error_class = attempt.error_class and attempt.error_class[:ERROR_CLASS_CHARACTERS_MAX]
    fitting = msgspec.structs.replace(attempt, error_class=error_class)
    while len(msgspec.json.encode(fitting)) > ATTEMPT_BYTES_MAX and len(fitting.traceback) > 1:
        text = fitting.traceback
        fitting.traceback = "…" + text[len(text) // 8 + 2 :]
    return fitting


def _class_path(error_type: str) -> str:
    return error_type if "." in error_type else f"builtins.{error_type}"


# ---- results as Django has them --------------------------------------------------------------------------------------


def find_task(call: TaskCall) -> Any:
    """Return the task of a message, with the queue and priority that it was enqueued with."""
    try:
        found = import_string(call.task)
    except ImportError as error:
        raise InvalidTask(f"there is no task {call.task}: {error}") from error
    if not isinstance(found, Task):
        raise InvalidTask(f"{call.task} is no task: decorate it with @task")
    return found.using(
        priority=call.priority, queue_name=call.queue_name, run_after=_local(call.run_after), backend=call.backend
    )


def make_result(
    id: str,
    call: TaskCall,
    status: str,
    enqueued_at: datetime,
    attempts: Sequence[Attempt],
    *,
    finished_at: datetime | None = None,
) -> Any:
    """Return a result as Django has it."""
    runs = [one for one in attempts if one.worker]
    return TaskResult(
        task=find_task(call), id=id, status=TaskResultStatus[status], enqueued_at=_local(enqueued_at),
        started_at=_local(runs[0].started_at) if runs else None,
        last_attempted_at=_local(runs[-1].started_at) if runs else None, finished_at=_local(finished_at),
        args=call.args, kwargs=call.kwargs, backend=call.backend,
        errors=[
            TaskError(exception_class_path=one.error_class, traceback=one.traceback)
            for one in attempts
            if one.error_class is not None
        ],
        worker_ids=[one.worker for one in runs],
    )  # fmt: skip


def finished_result(id: str, kept: Finished) -> Any:
    """Return the result of a task that succeeded."""
    result = make_result(id, kept.call, "SUCCESSFUL", kept.enqueued_at, kept.attempts, finished_at=kept.finished_at)
    object.__setattr__(result, "_return_value", kept.return_value)
    return result
