"""Handlers in processes: what is passed to them and back, how they end, and that no process is left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from tests.worker import process_handlers
from tests.worker.harness import Harness
from waypost import ByException, Constant, Message, Middleware, NoRetry, Queue, Waypost
from waypost.errors import ConfigurationError, ProcessFailed, ResultNotKept
from waypost.worker.handler import find_object
from waypost.worker.process_protocol import LENGTH_BYTES, Answer, decode, decode_error, encode_error, frame

ROOT = Path(__file__).parents[2]
AT_ONCE = Constant(pause=0, jitter=0, attempts=3)


def is_there(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def noted(path: Path) -> list[list[int]]:
    return [[int(number) for number in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


# ---- arguments and results ------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-1", "LEASE-3")
def test_a_handler_computes_in_processes_of_its_own(harness: Harness) -> None:
    harness.handler("numbers", process=True, concurrency=2)(process_handlers.square)
    ids = [published.id for published in harness.publish_many("numbers", range(20))]
    assert harness.run().handled == 20
    results = [harness.result("numbers", id) for id in ids]
    assert [result["square"] for result in results] == [number * number for number in range(20)]
    processes = {result["process"] for result in results}
    assert 1 <= len(processes) <= 2
    assert os.getpid() not in processes
    assert not any(map(is_there, processes))


@pytest.mark.promise("FACE-1")
def test_body_headers_and_message_arrive_and_the_outcome_comes_back(harness: Harness) -> None:
    harness.handler("orders", process=True)(process_handlers.order)
    published = harness.publish("orders", process_handlers.Order(7, "chair"), key="order:7", headers={"from": "shop"})
    harness.publish("orders", {"id": "seven"})
    harness.run()
    assert harness.result("orders", published.id) == [7, "chair", "shop", 1, 1, "order:7"]
    assert [stored.body for stored in harness.peek("next")] == [{"id": 7}]
    (letter,) = harness.dead_letters("orders")
    assert (letter.reason, letter.error_type) == ("undecodable", "waypost.errors.Undecodable")
    assert "Expected `int`, got `str`" in letter.error


@pytest.mark.promise("CHAIN-1")
def test_the_return_value_of_a_handler_in_a_process_can_be_its_result() -> None:
    with Waypost("memory://") as post:
        post.handler("cubes", process=True, result_ttl=60)(process_handlers.cube)
        with post.worker():
            assert post.wait_result(post.publish("cubes", 12), timeout=20) == 1728


@pytest.mark.promise("CHAIN-1")
def test_a_result_that_a_process_cannot_send_does_not_run_the_handler_again(caplog: pytest.LogCaptureFixture) -> None:
    with Waypost("memory://") as post:
        post.handler("cubes", process=True, result_ttl=60)(process_handlers.unkeepable)
        with post.worker():
            published = post.publish("cubes", 12)
            with pytest.raises(ResultNotKept, match="InvalidBody"):
                post.wait_result(published, timeout=20)
        assert post.ledger("cubes").done == 1
    logged = [vars(record)["message_id"] for record in caplog.records if vars(record).get("event") == "result_not_kept"]
    assert logged == [published.id]


@pytest.mark.promise("LEASE-8")
def test_outcomes_come_back_returned_raised_or_by_hand() -> None:
    with Harness("sync", "memory://processes-outcomes") as harness:
        harness.handler("orders", process=True, concurrency=1)(process_handlers.end)
        names = [f"{how} {end}" for how in ("return", "raise", "hand") for end in ("retry", "snooze", "dead", "drop")]
        harness.publish_many("orders", [*names, "return done", "hand done"])
        harness.run()
        ledger = harness.ledger("orders")
        assert (ledger.done, ledger.dropped, ledger.dead) == (2, 3, 3)
        assert (ledger.retried, ledger.snoozed, ledger.delayed) == (3, 3, 6)
        assert {(letter.reason, letter.error) for letter in harness.dead_letters("orders")} == {
            ("bad address", "no such street")
        }
        assert {(timer.body, timer.error) for timer in harness.timers("orders") if timer.attempts} == {
            ("return retry", "later"),
            ("raise retry", "later"),
            ("hand retry", None),
        }


@pytest.mark.promise("LEASE-9", "DEAD-1")
def test_errors_keep_their_class_and_text_so_that_a_policy_by_class_works(caplog: pytest.LogCaptureFixture) -> None:
    policy = ByException(
        (LookupError, NoRetry()),
        ((OSError, process_handlers.Jammed), AT_ONCE),
        (ProcessFailed, NoRetry()),
        otherwise=NoRetry(),
    )
    with Harness("sync", "memory://processes-errors") as harness:
        harness.handler("orders", process=True, concurrency=1, retry=policy)(process_handlers.fail)
        harness.publish_many("orders", ["key", "file", "jammed", "local", "unicode"])
        with harness.working():
            until(lambda: harness.ledger("orders").dead == 5)
        dead = {
            letter.body: (letter.error_type, letter.error, letter.deliveries)
            for letter in harness.dead_letters("orders")
        }
        tracebacks = {letter.body: letter.traceback or "" for letter in harness.dead_letters("orders")}
    assert 'raise KeyError("no such order")' in tracebacks["key"]
    assert "waypost/worker" not in "".join(tracebacks.values())
    assert dead == {
        "key": ("KeyError", "'no such order'", 1),
        "file": ("FileNotFoundError", "[Errno 2] No such file or directory: 'order.txt'", 3),
        "jammed": ("tests.worker.process_handlers.Jammed", "wheel 7 is jammed", 3),
        "local": ("waypost.errors.ProcessFailed", "tests.worker.process_handlers.fail.<locals>.Local: only here", 1),
        "unicode": ("ValueError", f"('lone \\ud800 surrogate', {2**80})", 1),
    }
    failures = [record for record in caplog.records if vars(record).get("event") == "handler_failed"]
    assert len(failures) == 9
    formatted = logging.Formatter().formatException(failures[0].exc_info)  # type: ignore[arg-type]
    assert "In the handler's process:" in formatted
    assert 'raise KeyError("no such order")' in formatted


@pytest.mark.parametrize("error", [KeyError("a", 1), OSError("plain"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")])
def test_an_error_from_a_process_keeps_its_text(error: Exception) -> None:
    arrived = decode_error(encode_error(error), find_object)
    assert isinstance(arrived, type(error))
    assert str(arrived) == str(error)
    assert type(arrived).__qualname__ == type(error).__qualname__


class Number(float):
    """As numpy has them."""


class Whole(int):
    """The same without a fraction."""


class Text(str):
    """As frameworks have them for text that is safe in HTML."""

    __slots__ = ()


#: Its class has no module.
HOMELESS = type("Homeless", (Exception,), {"__module__": None})


class Secretive(Exception):
    """Its arguments cannot be read."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")

    def __str__(self) -> str:
        return "secret"


@pytest.mark.parametrize(
    "error",
    [ValueError(Number(1.5)), ValueError(Whole(3), Text("x")), Secretive(), HOMELESS("text")],
    ids=["float", "int-and-str", "no-arguments", "no-module"],
)
def test_an_error_with_unusual_arguments_arrives_from_a_process(error: Exception) -> None:
    sent = frame(Answer(failure=encode_error(error)))
    failure = decode(sent[LENGTH_BYTES:], Answer).failure
    assert failure is not None
    assert str(error) in str(decode_error(failure, find_object))


@pytest.mark.promise("LEASE-8", "LEASE-9")
@pytest.mark.parametrize(
    ("function", "body"),
    [
        (process_handlers.fail, "exit"),
        (process_handlers.fail, "interrupt"),
        (process_handlers.die, "kill"),
        (process_handlers.die, "exit"),
    ],
)
def test_a_handler_that_ends_its_process_fails_like_any_other_and_the_worker_goes_on(
    function: Callable[..., None], body: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Harness("sync", f"memory://processes-{function.__name__}-{body}") as harness:
        harness.handler("orders", process=True, concurrency=1, retry=Constant(pause=0.01, attempts=3))(function)
        published = harness.publish("orders", body)
        with harness.working() as worker:
            until(lambda: harness.ledger("orders").dead)
            harness.publish("orders", "fine")
            until(lambda: harness.ledger("orders").done)
            assert worker.is_running
        (letter,) = harness.dead_letters("orders")
        assert (letter.reason, letter.deliveries) == ("retries_exhausted", 3)
        failures = [vars(record) for record in caplog.records if vars(record).get("event") == "handler_failed"]
        assert [failure["message_id"] for failure in failures] == [published.id] * 3


@pytest.mark.promise("FACE-1", "LEASE-8")
def test_batches_are_read_and_settled_one_by_one() -> None:
    with Harness("sync", "memory://processes-batches") as harness:
        harness.handler("orders", process=True, batch=20, concurrency=2)(process_handlers.many)
        published = harness.publish_many("orders", [{"id": number} for number in range(50)])
        harness.publish("orders", {"id": "x"})
        harness.run()
        ledger = harness.ledger("orders")
        assert (ledger.done, ledger.dead) == (45, 6)
        assert Counter(letter.reason for letter in harness.dead_letters("orders")) == {"round": 5, "undecodable": 1}
        assert harness.result("orders", published[7].id) == 7


@pytest.mark.promise("LEASE-8")
@pytest.mark.parametrize("batch", [None, 3])
def test_a_body_whose_own_code_exits_is_the_failure_of_its_message_only(batch: int | None) -> None:
    with Waypost("memory://") as post:
        function: Any = process_handlers.exiting if batch is None else process_handlers.exiting_batch
        post.handler("orders", process=True, batch=batch, concurrency=1, retry=NoRetry())(function)
        post.publish_many("orders", [{"id": number} for number in (0, 1, 3)])
        post.worker().run(until_empty=True, signals=False)
        (letter,) = post.dead_letters("orders")
        assert post.ledger("orders").done == 2
    assert letter.body == {"id": 1}
    expected = ("retries_exhausted", "SystemExit") if batch is None else ("undecodable", "waypost.errors.Undecodable")
    assert (letter.reason, letter.error_type) == expected


@pytest.mark.promise("FACE-1", "LEASE-8")
@pytest.mark.parametrize("handler", ["many", "reads_all_themselves"])
def test_a_batch_of_which_no_message_can_be_read_does_not_end_the_worker(handler: str) -> None:
    with Harness("sync", f"memory://processes-unreadable-{handler}") as harness:
        harness.handler("orders", process=True, batch=20)(getattr(process_handlers, handler))
        harness.publish("orders", {"id": "x"})
        harness.run()
        harness.publish("orders", {"id": 1})
        harness.run()
        assert (harness.ledger("orders").done, harness.ledger("orders").dead) == (1, 1)
        assert [letter.reason for letter in harness.dead_letters("orders")] == ["undecodable"]


@pytest.mark.promise("DEAD-1")
def test_a_body_that_the_handler_itself_cannot_read_is_undecodable_too() -> None:
    with Harness("sync", "memory://processes-reads-itself") as harness:
        harness.handler("orders", process=True)(process_handlers.reads_itself)
        harness.publish_many("orders", [{"id": 1}, {"id": "x"}])
        harness.run()
        assert [letter.reason for letter in harness.dead_letters("orders")] == ["undecodable"]
        assert harness.ledger("orders").done == 1


def test_the_type_of_the_queue_applies_where_the_handler_has_none() -> None:
    with Harness("sync", "memory://processes-types") as harness:
        harness.handler(Queue("orders", process_handlers.Order), process=True)(process_handlers.untyped)
        published = harness.publish("orders", process_handlers.Order(7))
        harness.run()
        assert harness.result("orders", published.id) == "Order"


def test_middleware_wraps_the_call_of_a_handler_in_a_process() -> None:
    seen: list[Any] = []

    class Watching(Middleware):
        async def handle_async(self, messages: Any, call_next: Any) -> Any:
            try:
                return await call_next()
            except KeyError as error:
                seen.append((messages[0].body, str(error)))
                raise

    with Harness("sync", "memory://processes-middleware", middleware=[Watching()]) as harness:
        harness.handler("orders", process=True, retry=NoRetry())(process_handlers.fail)
        harness.publish("orders", "key")
        harness.run()
        assert seen == [("key", "'no such order'")]
        assert harness.ledger("orders").dead == 1


# ---- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-3", "LEASE-9")
@pytest.mark.parametrize(
    ("how", "expected"), [("kill", "was killed by SIGKILL"), ("exit", "exit code 3"), ("segfault", "killed by SIGSEGV")]
)
def test_a_process_that_dies_is_the_failure_of_its_message_only(how: str, expected: str) -> None:
    with Harness("sync", f"memory://processes-death-{how}") as harness:
        harness.handler("orders", process=True, concurrency=1, retry=AT_ONCE)(process_handlers.die)
        harness.publish_many("orders", ["a", how, "b"])
        with harness.working():
            until(lambda: harness.ended("orders") == 3)
        ledger = harness.ledger("orders")
        assert (ledger.done, ledger.dead, ledger.claims) == (2, 1, 5)
        (letter,) = harness.dead_letters("orders")
        assert (letter.reason, letter.deliveries) == ("retries_exhausted", 3)
        assert letter.error_type == "waypost.errors.ProcessFailed"
        assert expected in letter.error


@pytest.mark.promise("LEASE-3")
def test_a_process_that_dies_while_it_is_idle_costs_no_attempt() -> None:
    with Harness("sync", "memory://processes-idle") as harness:
        harness.handler("numbers", process=True, concurrency=1)(process_handlers.square)
        with harness.working():
            first = harness.publish("numbers", 1)
            killed = until(lambda: harness.result("numbers", first.id))["process"]
            os.kill(killed, signal.SIGKILL)
            until(lambda: not is_there(killed))
            second = harness.publish("numbers", 2)
            result = until(lambda: harness.result("numbers", second.id))
        assert (result["square"], result["process"] != killed) == (4, True)
        assert (harness.ledger("numbers").claims, harness.ledger("numbers").retried) == (2, 0)


@pytest.mark.promise("LEASE-9")
def test_a_process_that_cannot_be_started_is_the_failure_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "no-such-python")
    with Harness("sync", "memory://processes-no-python") as harness:
        harness.handler("orders", process=True, retry=NoRetry())(process_handlers.square)
        harness.publish("orders", 1)
        harness.run()
        (letter,) = harness.dead_letters("orders")
    assert letter.error.startswith("a process for the handler cannot be started")


@pytest.mark.promise("LEASE-7")
def test_at_most_once_is_handled_in_a_process_once() -> None:
    with Harness("sync", "memory://processes-at-most-once") as harness:
        harness.configure("orders", lease=None)
        harness.handler("orders", process=True, concurrency=1)(process_handlers.die)
        harness.publish_many("orders", ["a", "exit", "b"])
        harness.run()
        assert harness.ledger("orders").done == 3


@pytest.mark.promise("LEASE-3")
def test_a_lease_is_renewed_while_c_code_holds_the_lock_of_its_process(harness: Harness) -> None:
    harness.configure("numbers", lease=0.6)
    harness.handler("numbers", process=True)(process_handlers.hold)
    harness.publish("numbers", 1.8)
    with harness.working():
        until(lambda: harness.ledger("numbers").done)
    assert harness.ledger("numbers").expired == 0


@pytest.mark.promise("LEASE-8", "LEASE-3")
def test_a_process_past_its_time_is_killed_and_the_next_call_gets_another(harness: Harness, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    harness.handler("orders", process=True, concurrency=1, timeout=0.1, retry=AT_ONCE)(process_handlers.hang)
    harness.publish("orders", str(notes))
    with harness.working():
        until(lambda: harness.ledger("orders").done)
        (first, *_), (second, *_) = noted(notes)
        assert first != second
        assert not is_there(first)
    until(lambda: not is_there(second))
    assert harness.ledger("orders").retried == 1


@pytest.mark.promise("LEASE-12")
def test_a_cancel_kills_the_process_of_a_running_message(harness: Harness, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    harness.configure("orders", lease=0.6)
    harness.handler("orders", process=True)(process_handlers.hold_for_long)
    published = harness.publish("orders", str(notes))
    with harness.working():
        ((pid,),) = until(lambda: noted(notes))
        assert harness.cancel("orders", id=published.id) == "requested"
        until(lambda: harness.ledger("orders").cancelled)
        until(lambda: not is_there(pid))


@pytest.mark.promise("LEASE-3", "LEASE-2")
def test_a_lost_lease_kills_the_process_and_nothing_of_it_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waypost.worker.consumer import Consumer

    notes, lost = tmp_path / "notes", list[str]()
    with Harness("sync", "memory://processes-lost") as harness:
        harness.configure("orders", lease=0.6)

        def on_lease_lost(message: Message[Any]) -> None:
            lost.append(message.id)

        harness.handler("orders", process=True, on_lease_lost=on_lease_lost)(process_handlers.hang)
        published = harness.publish("orders", str(notes))
        with harness.working() as worker:
            ((pid, _, _),) = until(lambda: noted(notes))
            worker.quiet()
            with monkeypatch.context() as silenced:
                # As a frozen process would hold its renewals back.
                silenced.setattr(Consumer, "to_renew", lambda self: [])
                with harness.receive("orders", wait=20) as message:
                    assert message.id == published.id
            until(lambda: not is_there(pid))
        assert lost == [published.id]
        assert (harness.ledger("orders").done, harness.ledger("orders").expired) == (1, 1)


@pytest.mark.promise("LEASE-11")
def test_a_stop_kills_processes_past_the_deadline_and_releases_their_messages(harness: Harness, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    harness.handler("orders", process=True)(process_handlers.hang)
    harness.publish("orders", str(notes))
    worker = harness.post.worker()
    harness.done(worker.start())
    ((pid, _, _),) = until(lambda: noted(notes))
    report = harness.done(worker.stop(0.05))
    assert (report.cancelled, report.released, report.running) == (1, 1, 0)
    until(lambda: not is_there(pid))
    (stored,) = harness.peek("orders")
    assert stored.deliveries == 0


SHOP = """
from tests.worker import process_handlers
from waypost import Waypost
post = Waypost("sqlite:///shop.db")
post.handler("hangs", process=True)(process_handlers.hang)
post.handler("holds", process=True)(process_handlers.hold_for_long)
post.handler("talks", process=True)(process_handlers.talk)
"""


def start_shop(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "shop.py").write_text(SHOP)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "waypost.cli.main", "worker", "shop:post", *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.promise("LEASE-3", "LEASE-13")
@pytest.mark.parametrize("queue", ["hangs", "holds"])
def test_no_process_is_left_of_a_worker_that_was_killed(tmp_path: Path, queue: str) -> None:
    notes = tmp_path / "notes"
    with Waypost(f"sqlite:///{tmp_path / 'shop.db'}") as post:
        post.publish(queue, str(notes))
        worker = start_shop(tmp_path)
        (pid, *_) = until(lambda: noted(notes))[0]
        assert pid != worker.pid
        worker.kill()
        worker.communicate(timeout=30)
        until(lambda: not is_there(pid))


@pytest.mark.promise("LEASE-11")
def test_a_signal_to_all_processes_of_a_worker_stops_it_in_order(tmp_path: Path) -> None:
    with Waypost(f"sqlite:///{tmp_path / 'shop.db'}") as post:
        post.publish_many("talks", ["hello", "again"])
        worker = start_shop(tmp_path)
        until(lambda: post.ledger("talks").done == 2)
        os.killpg(worker.pid, signal.SIGINT)
        printed, log = worker.communicate(timeout=30)
        assert worker.returncode == 0, log
    assert "2 done" in log
    assert "talks      talk: 10 at once in processes" in log
    assert {line.split()[0] for line in printed.splitlines()} == {"hello", "again"}
    assert not any(is_there(int(line.split()[1])) for line in printed.splitlines())


# ---- refusals ------------------------------------------------------------------------------------------------


def test_a_handler_that_no_other_process_could_import_is_refused_with_the_reason() -> None:
    post = Waypost("memory://", state=process_handlers.Order(1))

    def inner(body: str) -> None: ...
    async def awaits(body: str) -> None: ...
    def wants_state(body: str, state: process_handlers.Order) -> None: ...

    wants_state.__qualname__ = "wants_state"
    cases: list[tuple[Any, str]] = [
        (lambda body: None, "not a lambda"),
        (inner, "function inside another"),
        (awaits, "is async and runs on the event loop"),
        (wants_state, "state stays in the worker's own process"),
        (process_handlers.Order(1).__eq__, "not a lambda, a method"),
    ]
    for function, match in cases:
        with pytest.raises(ConfigurationError, match=match):
            post.handler("orders", process=True)(function)


def test_a_handler_that_its_name_does_not_lead_to_is_refused_when_a_worker_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = Waypost("memory://")
    post.handler("orders", process=True)(process_handlers.die)
    monkeypatch.setattr(process_handlers, "die", lambda how: None)
    with pytest.raises(ConfigurationError, match="is not the function that was registered"):
        post.worker()
    monkeypatch.undo()
    assert post.worker().handlers[0].name == "die"
    monkeypatch.setattr(process_handlers.die, "__module__", "__main__")
    with pytest.raises(ConfigurationError, match="waypost worker module:post"):
        post.worker()


def test_a_module_that_cannot_be_imported_there_is_the_failure_of_the_message(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    (tmp_path / "fussy.py").write_text(
        "import os, sys\n"
        "if 'program' not in sys.argv[0]:\n"
        "    raise ImportError('not here')\n"
        "def work(body: str) -> None: ...\n"
    )
    program.write_text(
        "from waypost import NoRetry, Waypost\n"
        "import fussy\n"
        "post = Waypost('memory://')\n"
        "post.handler('orders', process=True, retry=NoRetry())(fussy.work)\n"
        "post.publish('orders', 'one')\n"
        "post.worker().run(until_empty=True)\n"
        "letter, = post.dead_letters('orders')\n"
        "print(letter.error_type, letter.error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(program)], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert ran.stdout == "ImportError not here\n", ran.stderr
