"""Spark jobs as messages: what `@post.spark_job(queue)` makes of a function.

    @post.spark_job("reports", timeout=timedelta(minutes=30))
    def summarize(day: str, spark: SparkSession) -> None: ...

For a worker it is a coroutine: it runs the function in a thread, with a Spark session, and all jobs that the function
starts are in one job group. When the coroutine is cancelled, because the lease is lost, the message is cancelled, the
time is up or the worker stops, the job group is cancelled until the function has ended. Until then the message keeps
its lease, because the function may still write.

PySpark is imported when the first message is handled. This module itself is light: programs that only publish
import it too.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Protocol

from waypost.checks import check_function, show
from waypost.errors import ConfigurationError, MissingExtra
from waypost.message import Message, set_error_text
from waypost.policy import CONCURRENCY_MAX
from waypost.spark.session import (
    PYSPARK_MISSING,
    check_connect_packages,
    find_java,
    forget_session,
    is_closed_by_server,
    is_session_usable,
    session,
)
from waypost.spark.spark_errors import describe_spark_error, is_spark_error
from waypost.urls import redact_url
from waypost.worker.handler import current_slot
from waypost.worker.handler_calls import Threads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("waypost")

DEFAULT_MASTER: Final = "local[*]"
#: How often a job group is cancelled again while its function runs on. On Spark Connect a cancel reaches only the
#: operations that run at that moment.
CANCEL_AGAIN_SECONDS: Final = 0.2
#: Python tasks of a cancelled job go on for this time, two seconds by default.
CANCEL_SETTINGS: Final = {"spark.python.task.killTimeout": "500ms"}
#: The parameter that is given the session, by its name or by its annotation.
SESSION_PARAMETER, SESSION_CLASS = "spark", "SparkSession"


class JobStopped(Exception):
    """Raised in the thread of a job that was stopped before its function began."""


def check_can_start(master: str | None) -> None:
    """Raise `MissingExtra` if there is no PySpark, or what it needs for this master; None: only PySpark is needed."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingExtra(PYSPARK_MISSING)
    if master is not None and master.startswith("sc://"):
        check_connect_packages()
    elif master is not None:
        find_java()


class SharedSession:
    """The Spark session of all jobs of a client: opened for the first of them, and again if it has ended."""

    def __init__(self) -> None:
        self.master: str | None = None
        self.config: dict[str, str] | None = None
        self._make: Callable[[], SparkSession] | None = None
        self._lock = threading.Lock()
        self._session: SparkSession | None = None

    def choose(
        self,
        name: str,
        master: str | None,
        config: Mapping[str, str] | None,
        make: Callable[[], SparkSession] | None,
    ) -> None:
        """Set what a job says about the session. Raises `ConfigurationError` if another job says otherwise."""
        check_function("session", make, ConfigurationError)
        if make is not None and (master is not None or config is not None):
            raise ConfigurationError(
                f"spark job {name}: session= makes the session, so master= and config= have no use"
            )
        if master is not None and not (isinstance(master, str) and master):
            raise ConfigurationError(f"master is the URL of a Spark master, such as local[2], not {show(master)}")
        if config is not None and not (
            isinstance(config, Mapping)
            and all(isinstance(key, str) and isinstance(value, str) for key, value in config.items())
        ):
            raise ConfigurationError(f"config has settings of Spark, as text by name, not {_describe_config(config)}")
        settings = None if config is None else dict(config)
        given = {"master": master, "config": settings, "session": make}
        known = {"master": self.master, "config": self.config, "session": self._make}
        for option, value in given.items():
            if value is not None and known[option] not in (None, value):
                raise ConfigurationError(
                    f"spark job {name}: the jobs of a client share one session, and another job has "
                    f"{_describe_difference(option, known[option], value)}: give both the same, or another client"
                )
        master, settings, make = master or self.master, settings or self.config, make or self._make
        if make is not None and (master is not None or settings is not None):
            raise ConfigurationError(
                f"spark job {name}: the jobs of a client share one session; session= of one of them makes it, and "
                "another has master= or config=: leave these out"
            )
        self.master, self.config, self._make = master, settings, make

    def check_can_start(self) -> None:
        """Raise `MissingExtra` if Spark cannot start here, before a message is claimed."""
        check_can_start(None if self._make is not None else self.master or DEFAULT_MASTER)

    def open(self) -> SparkSession:
        """Return the session, made by the first call. One that has ended is made anew."""
        with self._lock:
            spark = self._session
            if spark is not None and not is_session_usable(spark):
                log.warning("the Spark session has ended; starting another", extra={"event": "spark_session_ended"})
                forget_session(spark)
                spark = None
            if spark is None:
                if self._make is not None:
                    spark = self._make()
                else:
                    master = self.master or DEFAULT_MASTER
                    ours = {} if master.startswith("sc://") else CANCEL_SETTINGS
                    spark = session(master, {**ours, **(self.config or {})}, progress=False)
                self._session = spark
            return spark

    def forget(self, spark: SparkSession) -> None:
        """Let the next call of `open` make another session, unless one has been made already."""
        with self._lock:
            if self._session is spark:
                log.warning(
                    "the Spark Connect server has closed the session; starting another with the next message",
                    extra={"event": "spark_session_ended"},
                )
                forget_session(spark)
                self._session = None


def _describe_difference(option: str, known: Any, given: Any) -> str:
    """Return how an option of two jobs differs, without its secrets."""
    if option == "config":
        names = sorted(name for name in {*known, *given} if known.get(name) != given.get(name))
        return f"another config, which differs in {', '.join(names)}"
    if option == "master":
        known, given = (one if "://" not in one else redact_url(one) for one in (known, given))
        return f"master={known!r}, not {given!r}" if known != given else f"master={known!r} with other parameters"
    return f"{option}={known!r}, not {given!r}"


def _describe_config(config: object) -> str:
    """Return what is wrong with settings, without their values: they may be secrets."""
    if not isinstance(config, Mapping):
        return f"a {type(config).__name__}"
    wrong = [(name, value) for name, value in config.items() if not (isinstance(name, str) and isinstance(value, str))]
    return ", ".join(f"a {type(value).__name__} for {show(name)}" for name, value in wrong)


class JobGroup(Protocol):
    """The jobs of one message. `begin` and `end` are called in the thread that starts them, `cancel` in another."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def cancel(self) -> None: ...


class ClassicJobGroup:
    """All jobs of a thread in a session that has its own driver."""

    def __init__(self, spark: SparkSession, name: str, description: str) -> None:
        self._context = spark.sparkContext
        self._name, self._description = name, description

    def begin(self) -> None:
        """Let the jobs that this thread starts belong to the group."""
        self._context.setJobGroup(self._name, self._description, interruptOnCancel=True)

    def end(self) -> None:
        """Let them belong to none: the thread continues with another message."""
        for key in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            self._context.setLocalProperty(key, None)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """Cancel what runs, and what the function starts from now on."""
        # The method of PySpark cancels only what runs: a function with many short jobs would go on.
        self._context._jsc.sc().cancelJobGroupAndFutureJobs(self._name)


class ConnectJobGroup:
    """All operations of a thread in a session of Spark Connect."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._session, self._name = spark, name

    def begin(self) -> None:
        """Let the operations that this thread starts have the tag."""
        self._session.addTag(self._name)

    def end(self) -> None:
        """Let them have it no longer."""
        self._session.removeTag(self._name)

    def cancel(self) -> None:
        """Cancel what runs."""
        self._session.interruptTag(self._name)


def make_job_group(spark: SparkSession, message: Message[Any] | None) -> JobGroup:
    """Return a group for the jobs of one delivery of a message; without a message for one call."""
    if message is None:
        name, description = f"waypost-{uuid.uuid4()}", "called without a worker"
    else:
        name = f"waypost-{message.queue}-{message.id}-{message.token}"
        description = f"message {message.id} of queue {message.queue}, token {message.token}"
    if getattr(spark, "sparkContext", None) is None:
        return ConnectJobGroup(spark, name)
    return ClassicJobGroup(spark, name, description)


class Run:
    """One call of a job: in a thread, and stopped from another."""

    def __init__(
        self, call: Callable[[SparkSession], Any], opened: SharedSession, message: Message[Any] | None
    ) -> None:
        self._call = call
        self._opened = opened
        self._message = message
        self._where = "a call" if message is None else f"message {message.id} of queue {message.queue}"
        self._group: JobGroup | None = None
        self._stopped = threading.Event()
        self._ended = threading.Event()

    def run(self) -> Any:
        """Call the function with a session; its jobs belong to a group."""
        try:
            spark = self._opened.open()
            group = make_job_group(spark, self._message)
            try:
                group.begin()
                self._group = group
                if self._stopped.is_set():
                    # While Spark started, and the group was not known to the thread that cancels it.
                    raise JobStopped
                return self._call(spark)
            except Exception as error:
                if is_closed_by_server(spark, error):
                    self._opened.forget(spark)
                raise
            finally:
                self._ended.set()
                end_group(group)
        except Exception as error:
            if is_spark_error(error):
                set_error_text(error, describe_spark_error(error))
            raise
        finally:
            self._ended.set()

    def stop(self, reason: str) -> None:
        """Cancel the group until the function has ended. Does not wait for it."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        log.info("cancelling the Spark jobs of %s: %s", self._where, reason, extra={"event": "spark_job_cancelled"})
        threading.Thread(target=self._cancel, name="waypost-spark-cancel", daemon=True).start()

    def _cancel(self) -> None:
        reported = False
        while not self._ended.is_set():
            if self._group is not None:
                try:
                    self._group.cancel()
                except Exception as error:
                    # Java has died, or the server is away: the function notices it too.
                    if not reported:
                        log.warning(
                            "the Spark jobs of %s cannot be cancelled: %s", self._where,
                            describe_spark_error(error), extra={"event": "spark_cancel_failed"},
                        )  # fmt: skip
                    reported = True
            self._ended.wait(CANCEL_AGAIN_SECONDS)


def end_group(group: JobGroup) -> None:
    """End a group. The function has ended, and its result counts more than an error of this."""
    try:
        group.end()
    except Exception as error:
        log.debug("a group of Spark jobs was not ended: %s", error, extra={"event": "spark_group_not_ended"})


class SparkJob:
    """A handler around a function that takes a Spark session. Its own parameters are all but that one."""

    def __init__(self, function: Callable[..., Any], opened: SharedSession) -> None:
        if not callable(function):
            raise ConfigurationError(f"a spark job is a function, not {type(function).__name__}")
        functools.update_wrapper(self, function)
        self.name: str = getattr(function, "__qualname__", type(function).__qualname__)
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"spark job {self.name} is async, and calls of Spark block: write it as def; it runs in a thread"
            )
        self._function = function
        self._opened = opened
        self._threads = Threads("waypost-spark", CONCURRENCY_MAX)
        parameters = list(inspect.signature(function).parameters.values())
        found = [index for index, one in enumerate(parameters) if _takes_session(one)]
        if not found:
            raise ConfigurationError(
                f"spark job {self.name} has no parameter for the session: name one spark, or annotate it SparkSession"
            )
        self._index, self._parameter = found[0], parameters.pop(found[0])
        self.__signature__ = inspect.Signature(parameters)

    def check_can_start(self) -> None:
        """Raise an error if Spark cannot start here."""
        self._opened.check_can_start()

    async def __call__(self, *arguments: Any) -> Any:
        """Run the function in a thread; cancel its jobs when this is cancelled."""
        # A test may run handlers without a worker.
        slot = current_slot.get()
        message = slot.messages[0] if slot is not None and slot.messages else None
        run = Run(functools.partial(self._call, arguments), self._opened, message)
        future = self._threads.run(functools.partial(copy_context().run, run.run))
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            ending = "cancelled" if slot is None else slot.ending
            run.stop(ending or "the worker ends")
            if ending is not None:
                # The function may still write, so its message is not given back before it has ended.
                await asyncio.wait([future])
            if not future.done():
                future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                raise
            if future.exception() is not None:
                raise
        return future.result()

    def _call(self, arguments: tuple[Any, ...], spark: SparkSession) -> Any:
        if self._parameter.kind is inspect.Parameter.KEYWORD_ONLY or len(arguments) < self._index:
            return self._function(*arguments, **{self._parameter.name: spark})
        return self._function(*arguments[: self._index], spark, *arguments[self._index :])


def _takes_session(parameter: inspect.Parameter) -> bool:
    """Whether it is the parameter for the session. Its annotation is not resolved: that would import PySpark."""
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return parameter.name == SESSION_PARAMETER or text.rpartition(".")[2].strip("\"' ") == SESSION_CLASS
