"""What a handler's parameters ask for, read once when it is registered.

The annotation decides, and the name where there is none:

    body       the first parameter that is nothing else
    message    annotated as `Message`, or named `message`
    headers    named `headers`, unless it is annotated as something that is no mapping
    state      annotated with the class of the client's state (or a class above it), or named `state`
    session    annotated as a session or connection of SQLAlchemy, psycopg or sqlite3 (see outbox.handler_sessions)
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

from waypost.errors import ConfigurationError
from waypost.message import Message
from waypost.outbox.transaction_adapters import is_session

Wanted = Literal["body", "message", "headers", "state", "session"]


class Signature:
    """The parameters of one handler: what each is given, and what the body must be."""

    __slots__ = ("_batch", "_function", "_name", "_state", "as_type", "session", "wanted")

    def __init__(
        self, name: str, function: Callable[..., Any], *, is_batch: bool, state: object, as_type: Any = None
    ) -> None:
        self._name = name
        self._function = function
        self._batch = is_batch
        self._state = state
        #: What the body must be; None for what it was published as.
        self.as_type: Any = as_type
        #: The class of the session that is wanted, None if none is.
        self.session: type | None = None
        #: In the order of the parameters.
        self.wanted: tuple[Wanted, ...] = ()
        self._read()

    def _read(self) -> None:
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError):
            raise ConfigurationError(f"handler {self._name} has no signature that can be read; wrap it") from None
        wanted: list[Wanted] = []
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.kind is inspect.Parameter.VAR_KEYWORD:
                continue
            annotation = self._annotation(parameter)
            what = self._what(parameter.name, annotation, wanted)
            positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            if what is not None and positional and what not in wanted:
                wanted.append(what)
                if what in ("body", "message"):
                    self._take_type(what, annotation)
                elif what == "session":
                    self.session = typing.get_origin(annotation) or annotation
            elif parameter.default is inspect.Parameter.empty:
                raise self._cannot_fill(parameter.name)
            else:
                break
        self.wanted = tuple(wanted)

    def _what(self, name: str, annotation: Any, wanted: list[Wanted]) -> Wanted | None:
        if self._is_message(name, annotation):
            return "message"
        if self._is_headers(name, annotation):
            return "headers"
        if self._is_state(name, annotation):
            return "state"
        if is_session(typing.get_origin(annotation) or annotation):
            return "session"
        return "body" if "body" not in wanted else None

    def _cannot_fill(self, parameter: str) -> ConfigurationError:
        state = "" if self._state is not None else "; this client has no state: give it one with state="
        return ConfigurationError(
            f"handler {self._name}: nothing is known to give to the parameter {parameter!r}; a handler takes the body "
            "and, by the annotation or the name, the message, the headers, the client's state and a session, as "
            f"positional parameters{state}"
        )

    def _annotation(self, parameter: inspect.Parameter) -> Any:
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty:
            return None
        function = inspect.unwrap(self._function)
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
                f"handler {self._name}: the annotation of {parameter.name!r} cannot be resolved ({error}); define the "
                "type at the top of its module"
            ) from None

    def _is_message(self, name: str, annotation: Any) -> bool:
        if self._batch and typing.get_origin(annotation) is list:
            (annotation,) = typing.get_args(annotation)
        origin = typing.get_origin(annotation) or annotation
        if isinstance(origin, type) and issubclass(origin, Message):
            return True
        return annotation in (None, Any) and name in ("message", "messages")

    def _is_headers(self, name: str, annotation: Any) -> bool:
        if name != "headers":
            return False
        if self._batch and typing.get_origin(annotation) is list:
            (annotation,) = typing.get_args(annotation)
        origin = typing.get_origin(annotation) or annotation
        return annotation in (None, Any) or (isinstance(origin, type) and issubclass(origin, Mapping))

    def _is_state(self, name: str, annotation: Any) -> bool:
        if self._state is None:
            return False
        if annotation in (None, Any):
            return name == "state"
        origin = typing.get_origin(annotation) or annotation
        # A built-in class says too little: a state that is a dict must not take the place of a body that is one.
        return (
            isinstance(origin, type)
            and isinstance(self._state, origin)
            and (origin.__module__ != "builtins" or name == "state")
        )

    def _take_type(self, what: Wanted, annotation: Any) -> None:
        """The annotated type of the body, or of `Message[T]`, says what the body must be."""
        if self._batch and annotation is not None:
            if typing.get_origin(annotation) not in (list, typing.get_origin(typing.Sequence[int])):
                if annotation in (Any, list):
                    return
                raise ConfigurationError(
                    f"handler {self._name} takes batches: annotate its parameter as list[…], not {annotation}"
                )
            (annotation,) = typing.get_args(annotation)
        if what == "message":
            given = typing.get_args(annotation)
            annotation = given[0] if given else None
        if annotation is not None and annotation is not Any and not isinstance(annotation, typing.TypeVar):
            self.as_type = annotation
