"""How a worker runs a task: signals, the context, and what is kept of its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.utils import timezone

from waypost.client import Waypost
from waypost.django.task_api import TaskContext, TaskError, TaskResultStatus, normalize_json, signals
from waypost.django.tasks import (
    TRACEBACK_CHARACTERS_MAX,
    Attempt,
    Finished,
    TaskCall,
    WaypostBackend,
    make_result,
    read_attempts,
    record_attempt,
    result_id,
)
from waypost.errors import WaypostError
from waypost.message import Message, Outcome, error_text, traceback_text
from waypost.policy import RetryPolicy
from waypost.times import Duration

#: The errors of a task that waits for its next attempt are kept for so long, at the least.
ATTEMPTS_KEPT_SECONDS = 24 * 3600.0
#: The attribute of an error that has what was decided. It ends with the error, also if no worker settles it.
DECIDED = "_waypost_task_pause"

log = logging.getLogger("waypost")


class TaskRetry:
    """The retry policy of a backend, called once for each failure: by the run of the task, before the worker."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy

    def decide(self, attempt: int, error: BaseException) -> Duration | None:
        """Return the pause before the next attempt, None if there is none, and remember it for the worker."""
        pause = self._policy.delay(attempt, error)
        vars(error)[DECIDED] = (self, pause)
        return pause

    def delay(self, attempt: int, error: BaseException | None = None) -> Duration | None:
        """Return what was decided; for other errors than those of tasks the policy decides."""
        decided = None if error is None else vars(error).pop(DECIDED, None)
        return decided[1] if decided is not None and decided[0] is self else self._policy.delay(attempt, error)


def task_handler(
    post: Waypost, backend: WaypostBackend, retry: TaskRetry
) -> Callable[[TaskCall, Message[TaskCall]], None]:
    """Return the handler of the tasks of a backend."""

    def run_task(call: TaskCall, message: Message[TaskCall]) -> None:
        TaskRun(post, backend, retry, call, message).run()

    run_task.__qualname__ = f"tasks of {backend.alias!r}"
    return run_task


class TaskRun:
    """One run of a task."""

    def __init__(
        self, post: Waypost, backend: WaypostBackend, retry: TaskRetry, call: TaskCall, message: Message[TaskCall]
    ) -> None:
        self._post = post
        self._backend = backend
        self._retry = retry
        self._call = call
        self._message = message
        worker: str = message.settle_target.context.worker
        self._attempt = Attempt(message.token, worker, message.claimed_at)
        first = message.deliveries == 1 and message.attempts == 0
        earlier = [] if first else read_attempts(post, message.queue, message.id)
        self._attempts = [*(one for one in earlier if one.token != message.token), self._attempt]

    def run(self) -> None:
        """Run the task and keep its return value as the result of the message; a failure is raised."""
        message = self._message
        result: Any = None
        try:
            result = make_result(
                result_id(message.queue, message.id), self._call, "RUNNING", message.published_at, self._attempts
            )
            self._send(signals.task_started, result)
            context = (TaskContext(task_result=result),) if result.task.takes_context else ()
            returned = normalize_json(result.task.call(*context, *self._call.args, **self._call.kwargs))
        except (Outcome, KeyboardInterrupt):
            raise  # the task itself decided, or the process is to end
        except BaseException as error:
            self._fail(error, result)
            raise
        finished_at = timezone.now()
        kept = Finished(self._call, message.published_at, finished_at, self._attempts, returned)
        message.keep_result(kept, self._backend.result_ttl)
        self._end(result, "SUCCESSFUL", _return_value=returned)

    def _fail(self, error: BaseException, result: Any) -> None:
        """Record a failure; the worker settles it."""
        message, kind, failed = self._message, type(error), self._attempt
        pause = self._retry.decide(message.attempts + 1, error)
        failed.error_class = f"{kind.__module__}.{kind.__qualname__}"
        try:
            if self._post.policy(message.queue).tracebacks:
                failed.traceback = traceback_text(error, TRACEBACK_CHARACTERS_MAX) or error_text(error)
            kept_for = max(self._backend.result_ttl, ATTEMPTS_KEPT_SECONDS)
            record_attempt(self._post, message.queue, message.id, failed, kept_for)
        except WaypostError as failure:
            # The error of the task is what the worker settles, with or without a record of it.
            log.warning("the failure of task %s could not be recorded: %s", message.id, failure)
        if pause is None and result is not None:
            result.errors.append(TaskError(exception_class_path=failed.error_class, traceback=failed.traceback))
            self._end(result, "FAILED")

    def _end(self, result: Any, status: str, **more: Any) -> None:
        changes = {"status": TaskResultStatus[status], "finished_at": timezone.now(), **more}
        for name, value in changes.items():
            object.__setattr__(result, name, value)
        # With a lost lease this run does not decide how the task ends.
        if not self._message.lease_lost:
            self._send(signals.task_finished, result)

    def _send(self, signal: Any, result: Any) -> None:
        # A receiver that fails is logged by Django, and the task goes on.
        signal.send_robust(type(self._backend), task_result=result)
