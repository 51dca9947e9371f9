"""A user's function as a worker sees it: what it is given, how many of it may run, and what its failures mean."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from waypost.delivery import Message, Queue, queue_name, queue_type
from waypost.errors import ConfigurationError
from waypost.policy import CHUNK_MESSAGES_MAX, RetryPolicy, check_retry

if TYPE_CHECKING:
    from waypost.worker.running import Slot

#: Handlers of one worker that run at once, if nobody says otherwise.
CONCURRENCY = 10
CONCURRENCY_MAX = 10_000
#: A handler that hangs would hold its message for ever; after so long its lease is not renewed any more.
MAX_RUN_SECONDS = 3600.0

#: The place in which a handler runs, for whoever is called by it.
handling: ContextVar[Slot | None] = ContextVar("waypost_handling", default=None)

BODY_ONLY = ("body",)
OnLeaseLost = Callable[[Message[Any]], object]


class Handler:
    """How the messages of one queue are handled in this process."""

    __slots__ = (
        "as_type", "batch", "concurrency", "function", "is_async", "manual", "max_run", "name", "on_lease_lost",
        "queue", "retry", "timeout", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        queue: str | Queue[Any],
        function: Callable[..., Any],
        *,
        concurrency: int = CONCURRENCY,
        retry: RetryPolicy,
        timeout: float | None = None,
        batch: int | None = None,
        manual: bool = False,
        max_run: float = MAX_RUN_SECONDS,
        on_lease_lost: OnLeaseLost | None = None,
    ) -> None:
        self.queue = queue_name(queue)
        if not callable(function):
            raise ConfigurationError(f"a handler is a function, not {type(function).__name__}")
        self.function = function
        self.name: str = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.is_async = _is_async(function)
        self.concurrency = _whole("concurrency", concurrency, CONCURRENCY_MAX)
        self.batch = None if batch is None else _whole("batch", batch, CHUNK_MESSAGES_MAX)
        self.retry = check_retry(retry)
        self.timeout = None if timeout is None else _seconds("timeout", timeout)
        if timeout is not None and not self.is_async:
            raise ConfigurationError(
                f"handler {self.name}: nothing can stop a thread, so timeout= is for async handlers; max_run= says "
                "when the lease of a handler that blocks is not renewed any more"
            )
        self.max_run = _seconds("max_run", max_run)
        self.manual = manual
        self.on_lease_lost = on_lease_lost
        #: In the order of the parameters: "body" or "message".
        self.wanted: tuple[str, ...] = ()
        #: What the body must be; None for what it was published as.
        self.as_type: Any = queue_type(queue)
        self._read_signature()

    def __repr__(self) -> str:
        return f"Handler({self.queue!r}, {self.name})"

    @property
    def time_limit(self) -> float:
        """After how many seconds an async handler is cancelled."""
        return self.max_run if self.timeout is None else min(self.timeout, self.max_run)

    def given(self, messages: list[Message[Any]]) -> tuple[Any, ...]:
        """The arguments of a call. Raises `Undecodable` if a body is not what the handler expects."""
        if self.batch is not None:
            lists: dict[str, Any] = {"message": messages}
            if "body" in self.wanted:
                lists["body"] = [message.body for message in messages]
            return tuple(lists[what] for what in self.wanted)
        message = messages[0]
        if self.wanted == BODY_ONLY:
            return (message.body,)
        return tuple(message.body if what == "body" else message for what in self.wanted)

    # ---- reading the signature ---------------------------------------------------------------------------

    def _read_signature(self) -> None:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):
            raise ConfigurationError(f"handler {self.name} has no signature that can be read; wrap it") from None
        wanted: list[str] = []
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.kind is inspect.Parameter.VAR_KEYWORD:
                continue
            annotation = self._annotation(parameter)
            if self._is_message(parameter.name, annotation):
                what = "message"
            elif not wanted or wanted == ["message"]:
                what = "body"
            else:
                what = ""
            positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            if what and positional and what not in wanted:
                wanted.append(what)
                self._take_type(what, annotation)
            elif parameter.default is inspect.Parameter.empty:
                raise ConfigurationError(
                    f"handler {self.name}: nothing is known to give to the parameter {parameter.name!r}; a handler "
                    "takes the body and, by the name or the annotation, the message"
                )
            else:
                break
        self.wanted = tuple(wanted)

    def _annotation(self, parameter: inspect.Parameter) -> Any:
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty:
            return None
        function = inspect.unwrap(self.function)
        function = getattr(function, "func", function)  # a partial
        function = getattr(function, "__func__", function)
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
        local: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars if code else (), cells, strict=False):
            try:
                local[name] = cell.cell_contents
            except ValueError:
                continue  # not bound yet
        asked = SimpleNamespace(__annotations__={"asked": annotation})
        try:
            return typing.get_type_hints(asked, getattr(function, "__globals__", {}), local)["asked"]
        except NameError as error:
            raise ConfigurationError(
                f"handler {self.name}: the annotation of {parameter.name!r} cannot be resolved ({error}); define the "
                "type at the top of its module"
            ) from None

    def _is_message(self, name: str, annotation: Any) -> bool:
        if self.batch is not None and typing.get_origin(annotation) is list:
            (annotation,) = typing.get_args(annotation)
        origin = typing.get_origin(annotation) or annotation
        if isinstance(origin, type) and issubclass(origin, Message):
            return True
        return annotation in (None, Any) and name in ("message", "messages")

    def _take_type(self, what: str, annotation: Any) -> None:
        """The annotated type of the body, or of `Message[T]`, says what the body must be."""
        if self.batch is not None and annotation is not None:
            if typing.get_origin(annotation) not in (list, typing.get_origin(typing.Sequence[int])):
                if annotation in (Any, list):
                    return
                raise ConfigurationError(
                    f"handler {self.name} takes batches: annotate its parameter as list[…], not {annotation}"
                )
            (annotation,) = typing.get_args(annotation)
        if what == "message":
            given = typing.get_args(annotation)
            annotation = given[0] if given else None
        if annotation is not None and annotation is not Any and not isinstance(annotation, typing.TypeVar):
            self.as_type = annotation


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _whole(what: str, number: int, most: int) -> int:
    if type(number) is not int or not 1 <= number <= most:
        raise ConfigurationError(f"{what} is a whole number from 1 to {most}, not {number!r}")
    return number


def _seconds(what: str, seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
        raise ConfigurationError(f"{what} is a positive number of seconds, not {seconds!r}")
    return float(seconds)
