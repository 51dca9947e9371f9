"""The task backend: enqueue, run, results."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings
from django.utils import timezone

from tests.django.inside.notes import tasks
from waypost import Drained, NoRetry, Waypost
from waypost.django import client, publish
from waypost.django.task_api import (
    PACKAGE,
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    signals,
)
from waypost.django.task_runs import TaskRetry
from waypost.django.tasks import (
    Attempt,
    WaypostBackend,
    message_priority,
    record_attempt,
    recorded_attempts,
    result_id,
)
from waypost.errors import ConfigurationError, InvalidInput, InvalidName

Work = Callable[..., Drained]
SECONDS_MAX = 60.0


@contextmanager
def received(signal: Any) -> Iterator[list[Any]]:
    found: list[Any] = []

    def receive(sender: Any, task_result: Any, **_: Any) -> None:
        found.append((sender, task_result.id, task_result.status))

    signal.connect(receive)
    try:
        yield found
    finally:
        signal.disconnect(receive)


def run_until(work: Work, result: Any, *statuses: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while result.status not in statuses:
        assert time.monotonic() < deadline, result
        work()
        result.refresh()


def exists(result: Any) -> bool:
    try:
        result.refresh()
    except TaskResultDoesNotExist:
        return False
    return True


def test_a_task_runs_and_has_a_result(work: Work) -> None:
    with received(signals.task_enqueued) as enqueued:
        result = tasks.add.enqueue(2, b=3)
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [2], {"b": 3})
    assert enqueued == [(WaypostBackend, result.id, TaskResultStatus.READY)]
    assert len(result.id) < 64
    assert tasks.add.get_result(result.id).status == TaskResultStatus.READY
    with received(signals.task_started) as started, received(signals.task_finished) as finished:
        work()
    assert started == [(WaypostBackend, result.id, TaskResultStatus.RUNNING)]
    assert finished == [(WaypostBackend, result.id, TaskResultStatus.SUCCESSFUL)]
    result.refresh()
    assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, 5, 1)
    assert (result.args, result.kwargs, result.errors) == ([2], {"b": 3}, [])
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.task.func is tasks.add.func


def test_a_task_is_enqueued_in_the_open_transaction(work: Work) -> None:
    with transaction.atomic():
        lost = tasks.add.enqueue(1)
        transaction.set_rollback(True)
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(lost.id)
    with transaction.atomic():
        kept = tasks.add.enqueue(4)
        with pytest.raises(TaskResultDoesNotExist):
            tasks.add.get_result(lost.id)
    assert work().handled == 1
    assert tasks.add.get_result(kept.id).return_value == 4


def test_async_tasks_and_async_calls(work: Work) -> None:
    result = asyncio.run(tasks.send.aenqueue("ann"))
    assert client().peek("tasks.mails")[0].priority == 0
    work()
    found = asyncio.run(tasks.send.aget_result(result.id))
    assert found.return_value == "sent to ann"
    assert found.task.priority == -100
    assert found.task.queue_name == "mails"


def test_a_task_that_fails_is_tried_again_and_lists_each_attempt(work: Work) -> None:
    result = tasks.third_time.enqueue("the server")
    with received(signals.task_finished) as finished, received(signals.task_started) as started:
        work(["tasks.default"])
        run_until(work, result, TaskResultStatus.SUCCESSFUL)
    assert result.return_value == {"attempt": 3, "id": result.id}
    assert result.attempts == len(result.worker_ids) == 3
    assert [error.exception_class for error in result.errors] == [ConnectionError, ConnectionError]
    for error in result.errors:
        assert error.traceback.startswith("Traceback (most recent call last)")
        assert 'raise ConnectionError(f"{name} is away")' in error.traceback
        assert error.traceback.endswith("ConnectionError: the server is away")
    # A task that waits for its next attempt has not finished.
    assert [status for _, _, status in finished] == [TaskResultStatus.SUCCESSFUL]
    assert len(started) == 3
    assert result.started_at < result.last_attempted_at < result.finished_at


def test_between_two_attempts_a_task_is_ready(work: Work) -> None:
    result = tasks.third_time.enqueue("the server")
    client().pause("tasks.default")
    try:
        (message,) = client().peek("tasks.default")
        assert result_id("tasks.default", message.id) == result.id
    finally:
        client().resume("tasks.default")
    with client().receive("tasks.default") as held:
        assert held is not None
        running = tasks.third_time.get_result(result.id)
        assert running.status == TaskResultStatus.RUNNING
        assert len(running.worker_ids) == 1
        held.snooze(0)
    waiting = tasks.third_time.get_result(result.id)
    # Given back: no attempt was made.
    assert (waiting.status, waiting.worker_ids) == (TaskResultStatus.READY, [])


def test_a_task_that_fails_for_good_has_its_traceback(work: Work) -> None:
    result = tasks.divide.enqueue(0)
    with received(signals.task_finished) as finished:
        work()
    assert finished == [(WaypostBackend, result.id, TaskResultStatus.FAILED)]
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    (error,) = result.errors
    assert error.exception_class is ZeroDivisionError
    assert "return 1 / by" in error.traceback
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    # The dead letter and the journal have the error as it was.
    (letter,) = client().dead_letters("tasks.once")
    assert (letter.error_type, letter.reason) == ("ZeroDivisionError", "retries_exhausted")
    assert letter.error == "division by zero"
    assert "return 1 / by" in (letter.traceback or "")
    # A redriven task is one task: the attempts go on.
    client().redrive("tasks.once")
    assert tasks.divide.get_result(result.id).status == TaskResultStatus.READY
    work()
    assert tasks.divide.get_result(result.id).attempts == 2


def test_a_queue_without_tracebacks_keeps_none(work: Work) -> None:
    client().configure("tasks.once", tracebacks=False)
    try:
        result = tasks.divide.enqueue(0)
        work()
        result.refresh()
    finally:
        client().configure("tasks.once", tracebacks=True)
    (error,) = result.errors
    assert (error.exception_class, error.traceback) == (ZeroDivisionError, "")


def test_without_the_journal_a_failed_attempt_is_known_all_the_same(work: Work) -> None:
    client().configure("tasks.once", journal="off")
    try:
        result = tasks.divide.enqueue(0)
        work()
        result.refresh()
    finally:
        client().configure("tasks.once", journal="all")
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    assert "return 1 / by" in result.errors[0].traceback


def test_long_tracebacks_of_many_attempts_fit_into_their_record() -> None:
    attempts = [Attempt(token, "worker", timezone.now(), "E" * 9_000, "\U0001f4ee\x01" * 2_500) for token in range(10)]
    for one in attempts:
        record_attempt(client(), "box", "long", one, 60)
    found = recorded_attempts(client(), "box", "long")
    assert [one.token for one in found] == list(range(10))
    for one in found:
        assert len(one.traceback) > 500
        assert one.traceback.startswith("…")
        assert one.traceback.endswith("\U0001f4ee\x01")


def test_a_failure_that_cannot_be_recorded_is_settled_as_it_is(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidInput("no record")

    monkeypatch.setattr(Waypost, "save_record", refuse)
    tasks.divide.enqueue(0)
    with received(signals.task_finished) as finished:
        work()
    (letter,) = client().dead_letters("tasks.once")
    assert letter.error_type == "ZeroDivisionError"
    assert [status for _, _, status in finished] == [TaskResultStatus.FAILED]


def test_what_was_decided_about_an_error_ends_with_it() -> None:
    class Frozen(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    retry = TaskRetry(NoRetry())
    error = Frozen("no worker settles it")
    retry.decide(1, error)
    there = weakref.ref(error)
    del error
    gc.collect()
    assert there() is None


def test_a_return_value_that_is_no_json_fails_the_task(work: Work) -> None:
    result = tasks.no_json.enqueue()
    work()
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class is TypeError


def test_a_task_may_end_by_an_outcome_of_waypost(work: Work) -> None:
    result = tasks.refuse.enqueue()
    work()
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert "refused by the task" in result.errors[0].traceback


def test_a_task_that_is_gone_fails(work: Work) -> None:
    result = tasks.divide.enqueue(1)
    (message,) = client().messages("tasks.once")
    body = message.body
    client().purge("tasks.once")
    published = publish("tasks.once", {**body, "task": "tests.django.inside.notes.tasks.gone"})
    work()
    (letter,) = client().dead_letters("tasks.once", id=published.id)
    assert "there is no task" in (letter.error or "")
    assert result.status == TaskResultStatus.READY


def test_a_result_is_forgotten_after_its_time(work: Work) -> None:
    result = tasks.brief.enqueue()
    work()
    deadline = time.monotonic() + SECONDS_MAX
    while exists(result) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()


@pytest.mark.parametrize("id", ["", "nonsense", "0123456789abcdefghjkmnpq.00000000"])
def test_an_unknown_result_does_not_exist(id: str) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(id)


def test_the_result_of_another_task_is_refused() -> None:
    result = tasks.add.enqueue(1)
    with pytest.raises(import_module(f"{PACKAGE}.exceptions").TaskResultMismatch):
        tasks.third_time.get_result(result.id)


def test_without_zones_all_times_of_a_result_have_none(work: Work) -> None:
    with override_settings(USE_TZ=False):
        result = tasks.add.using(run_after=timezone.now()).enqueue(1)
        run_until(work, result, TaskResultStatus.SUCCESSFUL)
        assert timezone.is_naive(result.task.run_after)
        assert result.enqueued_at <= result.started_at <= result.last_attempted_at <= result.finished_at
        assert timezone.is_naive(result.finished_at)
        failed = tasks.divide.enqueue(0)
        run_until(work, failed, TaskResultStatus.FAILED)
        assert failed.enqueued_at <= failed.started_at <= failed.finished_at


def test_a_task_runs_after_its_time(work: Work) -> None:
    moment = timezone.now() + timedelta(hours=1)
    result = tasks.add.using(run_after=moment).enqueue(1)
    assert work().handled == 0
    (timer,) = client().timers("tasks.default")
    assert abs(timer.ready_at - moment) < timedelta(seconds=1)
    found = tasks.add.get_result(result.id)
    assert (found.status, found.task.run_after) == (TaskResultStatus.READY, moment)
    client().reschedule("tasks.default", timer.id, delay=0)
    work()
    result.refresh()
    assert result.return_value == 1


def test_priorities_have_ten_bands() -> None:
    bands = {priority: message_priority(priority) for priority in range(-100, 101)}
    assert [bands[first] for first in range(-100, 100, 20)] == list(range(10))
    assert [bands[last] for last in (-81, -61, -41, -21, -1, 19, 39, 59, 79, 100)] == list(range(10))
    assert bands[0] == 5
    assert list(bands.values()) == sorted(bands.values())


def test_higher_priorities_run_first(work: Work) -> None:
    for priority in (-100, 100, 0):
        tasks.divide.using(priority=priority).enqueue(1 + priority)
    order: list[Any] = []

    def receive(task_result: Any, **_: Any) -> None:
        order.append(task_result.task.priority)

    signals.task_started.connect(receive)
    try:
        work()
    finally:
        signals.task_started.disconnect(receive)
    assert order == [100, 0, -100]


def test_a_backend_without_queues_takes_any(work: Work) -> None:
    result = tasks.anywhere.enqueue()
    work(["any.made-up"])
    result.refresh()
    assert result.return_value == 2


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(InvalidTask, match="not valid for backend"):
        tasks.add.using(queue_name="elsewhere")
    with pytest.raises(InvalidTask, match="priority"):
        tasks.add.using(priority=101)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"OPTIONS": {"retries": 3}}, "did you mean"),
        ({"OPTIONS": {"concurrency": 0}}, "concurrency"),
        ({"OPTIONS": {"result_ttl": -1}}, "result_ttl"),
        ({"QUEUES": ["with space"]}, "queue name"),
    ],
)
def test_a_wrong_option_of_a_backend_is_named(params: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigurationError, InvalidName, ValueError, TypeError), match=error):
        WaypostBackend("default", params)
