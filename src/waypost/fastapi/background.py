"""Background tasks that survive a restart: a call of a function, published as a message."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from waypost.client import AsyncWaypost, Waypost
from waypost.client.options import HandlerOptions
from waypost.errors import ConfigurationError, InvalidBody
from waypost.message import Dead

F = TypeVar("F", bound=Callable[..., object])

#: The queue of a task is this and the name of its function.
QUEUE_PREFIX = "background."
#: Where a function keeps what it is as a task.
ATTRIBUTE = "__waypost_task__"


class BackgroundTask:
    """A function whose calls are messages: each argument is checked and encoded by its annotation."""

    def __init__(self, function: Callable[..., Any], queue: str) -> None:
        self.queue = queue
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = inspect.signature(function)
        for parameter in self._signature.parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigurationError(
                    f"background task {self._name}: parameter {parameter.name} has no name that a message could carry; "
                    "use parameters without *, ** and /"
                )
        self._adapters = self._read_annotations(function)

    def _read_annotations(self, function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
        try:
            hints = typing.get_type_hints(function, include_extras=True)
            return {name: TypeAdapter(hints.get(name, Any)) for name in self._signature.parameters}
        except (NameError, PydanticUserError) as error:
            raise ConfigurationError(
                f"background task {self._name}: an annotation of its parameters cannot be used ({error})"
            ) from None

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a call: its arguments by name. Raises `InvalidBody` for wrong ones."""
        try:
            bound = self._signature.bind(*args, **kwargs)
            return {name: self._encode_argument(name, value) for name, value in bound.arguments.items()}
        except (TypeError, ValidationError, PydanticSerializationError) as error:
            raise InvalidBody(f"background task {self._name} cannot be called so: {error}") from None

    def _encode_argument(self, name: str, value: Any) -> Any:
        """Return an argument as JSON; decoded at once, so that what a worker could not read is refused here."""
        adapter = self._adapters[name]
        given = adapter.validate_python(value)
        refusal = ""
        for by_alias in (True, False):  # by names for a model with aliases that it only writes
            encoded = adapter.dump_python(given, mode="json", by_alias=by_alias, round_trip=True)
            try:
                restored = self._decode_argument(name, encoded)
            except ValidationError as error:
                refusal = refusal or f"cannot be read again from its JSON: {_describe(error)}"
                continue
            if _is_same(*(adapter.dump_python(one, round_trip=True) for one in (given, restored))):
                return encoded
            refusal = refusal or (
                "would arrive as a different value: JSON does not carry what its annotation allows "
                "(a SecretStr arrives masked); use an annotation that is restored from JSON"
            )
        raise InvalidBody(f"background task {self._name}: {name} {refusal}")

    def _decode_argument(self, name: str, encoded: Any) -> Any:
        # As JSON: a strict model takes a text for a date only there.
        return self._adapters[name].validate_json(to_json(encoded))

    def decode(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call. Raises `ValueError` or `TypeError` for a body of another function."""
        self._signature.bind(**body)
        return {name: self._decode_argument(name, value) for name, value in body.items()}


def _describe(error: ValidationError) -> str:
    """Return where a value is wrong and why, without the value: it may be secret."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'the value'}: {one['msg']}"
        for one in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _is_same(given: Any, restored: Any) -> bool:
    """Whether a value has come back. A list is accepted for a tuple: the annotation may be a Sequence."""
    if isinstance(given, Iterator):
        return True  # read already, to encode it
    if isinstance(given, list | tuple) and isinstance(restored, list | tuple):
        return len(given) == len(restored) and all(map(_is_same, given, restored))
    if isinstance(given, dict) and isinstance(restored, dict):
        return given.keys() == restored.keys() and all(_is_same(value, restored[key]) for key, value in given.items())
    return bool(given == restored)


def background_task(
    post: AsyncWaypost | Waypost, *, queue: str | None = None, **options: Unpack[HandlerOptions]
) -> Callable[[F], F]:
    """Decorate a function so that `publish.add_task(function, …)` runs it in a worker, after a restart too.

    A call is a message of a queue, `background.` and the name of the function unless `queue` is given. Its arguments
    are checked by their annotations and travel as JSON. The options are those of `post.handler`: `retry`, `timeout`,
    `concurrency` and others. Called directly, the function is what it was.

        @background_task(post, retry=Exponential(attempts=5))
        async def send_receipt(order: int, address: str) -> None: ...
    """

    def register(function: F) -> F:
        name = getattr(function, "__name__", type(function).__name__)
        task = BackgroundTask(function, queue or QUEUE_PREFIX + name)
        handler: Any = _make_handler(function, task)
        handler.__name__, handler.__qualname__ = name, getattr(function, "__qualname__", name)
        handler.__module__ = function.__module__
        post.handler(task.queue, **options)(handler)
        setattr(function, ATTRIBUTE, task)
        return function

    return register


def task_of(function: Callable[..., object]) -> BackgroundTask:
    """Return what a decorated function is as a task."""
    task = getattr(function, ATTRIBUTE, None)
    if not isinstance(task, BackgroundTask):
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(f"{name} is no background task: decorate it with @background_task(post)")
    return task


def _make_handler(function: Callable[..., Any], task: BackgroundTask) -> Callable[..., Any]:
    def decode(body: dict[str, Any]) -> dict[str, Any]:
        try:
            return task.decode(body)
        except (TypeError, ValueError) as error:
            raise Dead("undecodable", f"{type(error).__name__}: {error}") from None

    if inspect.iscoroutinefunction(function):

        async def call_async(body: dict[str, Any]) -> Any:
            return await function(**decode(body))

        return call_async

    def call(body: dict[str, Any]) -> Any:
        return function(**decode(body))

    return call
