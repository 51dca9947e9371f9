"""A registered handler: its options, its parameters, and the arguments of a call.

The value of a parameter is decided once, when the handler is registered, by its annotation, or by its name if it has
none:

    body       the first other parameter
    message    annotated as `Message`, or named `message`
    headers    named `headers`, unless it is annotated as something else than a mapping
    state      annotated with the class of the client's state (or a base class), or named `state`
    session    annotated as a session or connection of SQLAlchemy, psycopg or sqlite3 (see outbox.handler_sessions)
"""

from __future__ import annotations

import importlib
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from waypost import codec
from waypost.checks import check_count, check_flag, check_function, check_items, check_seconds, show
from waypost.errors import ConfigurationError, Undecodable
from waypost.message import Message, Queue, after_ms, queue_name, queue_type
from waypost.middleware import Middleware, check_handling, handled_through
from waypost.outbox.transaction_adapters import is_session_annotation
from waypost.policy import CHUNK_MESSAGES_MAX, CONCURRENCY_MAX, RetryPolicy, check_retry
from waypost.times import Duration
from waypost.values import Lease

if TYPE_CHECKING:
    import inspect

    from waypost.store.port import Store
    from waypost.worker.handler_calls import Slot

ParameterKind = Literal["body", "message", "headers", "state", "session"]


class Signature:
    """The parameters of one handler: the value of each, and the type of the body."""

    __slots__ = ("_batch", "_function", "_name", "_state", "as_type", "parameter_kinds", "session")

    def __init__(
        self, name: str, function: Callable[..., Any], *, is_batch: bool, state: object, as_type: Any = None
    ) -> None:
        self._name = name
        self._function = function
        self._batch = is_batch
        self._state = state
        #: What the body must be; None for what it was published as.
        self.as_type: Any = as_type
        #: The class of the session parameter, or None.
        self.session: type | None = None
        #: In the order of the parameters.
        self.parameter_kinds: tuple[ParameterKind, ...] = ()
        self._read()

    def _read(self) -> None:
        import inspect  # here and below when it is used: it is a tenth of the time of importing waypost

        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError):
            raise ConfigurationError(f"handler {self._name} has no readable signature; wrap it in a function") from None
        parameter_kinds: list[ParameterKind] = []
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.kind is inspect.Parameter.VAR_KEYWORD:
                continue
            annotation = self._annotation(parameter)
            kind = self._kind_of(parameter.name, annotation, parameter_kinds)
            positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            if kind is not None and positional and kind not in parameter_kinds:
                parameter_kinds.append(kind)
                if kind in ("body", "message"):
                    self._set_body_type(kind, annotation)
                elif kind == "session":
                    self.session = typing.get_origin(annotation) or annotation
            elif parameter.default is inspect.Parameter.empty:
                raise self._cannot_fill(parameter.name)
            else:
                break
        self.parameter_kinds = tuple(parameter_kinds)

    def _kind_of(self, name: str, annotation: Any, parameter_kinds: list[ParameterKind]) -> ParameterKind | None:
        if self._is_message(name, annotation):
            return "message"
        if self._is_headers(name, annotation):
            return "headers"
        if self._is_state(name, annotation):
            return "state"
        if is_session_annotation(typing.get_origin(annotation) or annotation):
            return "session"
        return "body" if "body" not in parameter_kinds else None

    def _cannot_fill(self, parameter: str) -> ConfigurationError:
        state = "" if self._state is not None else "; this client has no state: give it one with state="
        return ConfigurationError(
            f"handler {self._name}: there is no value for the parameter {parameter!r}; a handler takes the body "
            "and, by the annotation or the name, the message, the headers, the client's state and a session, as "
            f"positional parameters{state}"
        )

    def _annotation(self, parameter: inspect.Parameter) -> Any:
        import inspect

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
        holder = SimpleNamespace(__annotations__={"annotation": annotation})
        try:
            return typing.get_type_hints(holder, getattr(function, "__globals__", {}), local)["annotation"]
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
        # A built-in class is ambiguous: a state that is a dict must not replace a body that is one.
        return (
            isinstance(origin, type)
            and isinstance(self._state, origin)
            and (origin.__module__ != "builtins" or name == "state")
        )

    def _set_body_type(self, kind: ParameterKind, annotation: Any) -> None:
        """Set the type of the body: the annotation of the body, or `T` of `Message[T]`."""
        if self._batch and annotation is not None:
            if typing.get_origin(annotation) not in (list, typing.get_origin(typing.Sequence[int])):
                if annotation in (Any, list):
                    return
                raise ConfigurationError(
                    f"handler {self._name} takes batches: annotate its parameter as list[…], not {annotation}"
                )
            (annotation,) = typing.get_args(annotation)
        if kind == "message":
            arguments = typing.get_args(annotation)
            annotation = arguments[0] if arguments else None
        if annotation is not None and annotation is not Any and not isinstance(annotation, typing.TypeVar):
            self.as_type = annotation


#: How many calls of a handler run at the same time in one worker, by default.
CONCURRENCY = 10
#: After this time a lease is no longer renewed, because a handler that hangs would hold its message forever.
MAX_RUN_SECONDS = 3600.0

#: The slot in which the current handler call runs.
current_slot: ContextVar[Slot | None] = ContextVar("waypost_handling", default=None)

BODY_ONLY: tuple[ParameterKind, ...] = ("body",)
MESSAGE_ONLY: tuple[ParameterKind, ...] = ("message",)
OnLeaseLost = Callable[[Message[Any]], object]
#: Several queues of a handler; as a mapping, each with its weight. A str is a sequence too, so sequences are not
#: accepted.
SeveralQueues = (
    list[str]
    | list[Queue[Any]]
    | tuple[str, ...]
    | tuple[Queue[Any], ...]
    | Mapping[str, int]
    | Mapping[Queue[Any], int]
)
HandledQueues = str | Queue[Any] | SeveralQueues
#: A class or the name of one, or several.
TypeNames = type | str | Iterable[type | str]
#: Sufficient for any ratio, and small enough as a number of messages for which another queue must wait.
WEIGHT_MAX = 1000


class Handler:
    """How the messages of one queue are handled in this process."""

    __slots__ = (
        "_check_start", "_where", "as_type", "batch", "blocking", "concurrency", "function", "is_async", "manual",
        "max_run", "middleware", "name", "on_lease_lost", "parameter_kinds", "pool", "process", "queue", "result_ttl",
        "retry", "session", "state", "timeout", "types", "weight",
    )  # fmt: skip

    def __init__(
        self,
        queue: str | Queue[Any],
        function: Callable[..., Any],
        *,
        concurrency: int = CONCURRENCY,
        retry: RetryPolicy,
        timeout: Duration | None = None,
        batch: int | None = None,
        manual: bool = False,
        process: bool = False,
        max_run: Duration = MAX_RUN_SECONDS,
        on_lease_lost: OnLeaseLost | None = None,
        result_ttl: Duration | None = None,
        state: object = None,
        middleware: Sequence[Middleware] = (),
        store: Store | None = None,
        engine: object = None,
        blocking: bool = False,
        name: str | None = None,
        where: str | None = None,
        check_start: Callable[[], None] | None = None,
        types: TypeNames = (),
        pool: object = None,
        weight: int = 1,
    ) -> None:
        self.queue = queue_name(queue)
        self.function = _check_function(function)
        self.name: str = name or getattr(function, "__qualname__", None) or type(function).__qualname__
        self.is_async = is_coroutine_function(function)
        #: The names of the types of messages that it handles; empty: the types that no other handler of the queue
        #: handles.
        self.types = check_types(self.name, types)
        #: The same object for all queues of one function, which share its concurrency by their weights; None if it has
        #: one queue.
        self.pool = pool
        self.weight = check_count("the weight of a queue", weight, 1, WEIGHT_MAX, ConfigurationError)
        #: Whether an async function waits for a thread, which continues when the function is cancelled.
        self.blocking = blocking
        self._where = where
        #: Raises an error if what it needs is missing on this machine.
        self._check_start = check_start
        #: Whether it runs in a process rather than in a thread.
        self.process = check_flag("process", process, ConfigurationError)
        self.concurrency = _check_count("concurrency", concurrency, CONCURRENCY_MAX)
        self.batch = None if batch is None else _check_count("batch", batch, CHUNK_MESSAGES_MAX)
        self.retry = check_retry(retry)
        self.timeout = None if timeout is None else _check_seconds("timeout", timeout)
        if timeout is not None and not self.can_be_stopped:
            raise ConfigurationError(
                f"handler {self.name}: nothing can stop a thread, so timeout= is for async handlers and for "
                "process=True; for a blocking handler, max_run= limits how long its lease is renewed"
            )
        self.max_run = _check_seconds("max_run", max_run)
        self.manual = check_flag("manual", manual, ConfigurationError)
        self.on_lease_lost = check_function("on_lease_lost", on_lease_lost, ConfigurationError)
        if on_lease_lost is not None and is_coroutine_function(on_lease_lost):
            raise ConfigurationError(f"handler {self.name}: on_lease_lost is a plain function; it is not awaited")
        #: How long the return value is kept as the result of its message; None: it is not kept.
        self.result_ttl = None if result_ttl is None else _check_result_ttl(self.name, result_ttl, self.batch)
        #: The client's state, for parameters that receive it.
        self.state = state
        body_type = types if isinstance(types, type) else queue_type(queue)
        signature = Signature(self.name, function, is_batch=batch is not None, state=state, as_type=body_type)
        self.parameter_kinds: tuple[ParameterKind, ...] = signature.parameter_kinds
        #: What the body must be; None for what it was published as.
        self.as_type: Any = codec.check_type(f"the body of handler {self.name}", signature.as_type, ConfigurationError)
        #: The class of the session parameter; with it the function is called in a transaction that settles the message.
        self.session = signature.session
        self._open_sessions(store, engine)
        #: The middleware around the function, outermost first.
        self.middleware = check_handling(middleware, self.name, awaited=self.is_awaited)
        if process:
            self._check_process()

    def __repr__(self) -> str:
        return f"Handler({self.queue!r}, {self.name})"

    @property
    def is_awaited(self) -> bool:
        """Whether a call is awaited on the event loop: a coroutine, or a call in a process."""
        return self.is_async or self.process

    @property
    def can_be_stopped(self) -> bool:
        """Whether a call can be stopped: a coroutine is cancelled, a process is killed, a thread cannot be stopped."""
        return self.is_awaited and not self.blocking

    @property
    def where(self) -> str:
        """Where calls run, in words."""
        if self._where is not None:
            return self._where
        return "on the event loop" if self.is_async else "in processes" if self.process else "in threads"

    def time_limit(self, messages: Sequence[Message[Any]]) -> float:
        """Return the seconds after which a call for these messages is stopped, if it can be.

        The time limit of a message wins over those of the handler; of a batch the shortest counts.
        """
        own = self.max_run if self.timeout is None else min(self.timeout, self.max_run)
        return _shortest(messages, own)

    def renewal_limit(self, messages: Sequence[Message[Any]]) -> float:
        """Return the seconds after which the leases of a call for these messages are not renewed any more."""
        return _shortest(messages, self.max_run)

    def arguments(self, messages: Sequence[Message[Any]]) -> tuple[Any, ...]:
        """Return the arguments of a call. Raises `Undecodable` if a body does not have the handler's type."""
        if self.batch is None:
            # Most handlers have one parameter.
            if self.parameter_kinds == BODY_ONLY:
                return (messages[0].body,)
            if self.parameter_kinds == MESSAGE_ONLY:
                return (messages[0],)
        return self._arguments(messages, None) if self.session is None else (messages,)

    def _arguments(self, messages: Sequence[Message[Any]], session: Any) -> tuple[Any, ...]:
        arguments = self._arguments_of_one(messages[0]) if self.batch is None else self._arguments_of_batch(messages)
        if self.session is not None:
            arguments.insert(self.parameter_kinds.index("session"), session)
        return tuple(arguments)

    def _arguments_of_one(self, message: Message[Any]) -> list[Any]:
        arguments: list[Any] = []
        for kind in self.parameter_kinds:
            match kind:
                case "body":
                    arguments.append(message.body)
                case "message":
                    arguments.append(message)
                case "headers":
                    arguments.append(message.headers)
                case "state":
                    arguments.append(self.state)
        return arguments

    def _arguments_of_batch(self, messages: Sequence[Message[Any]]) -> list[Any]:
        arguments: list[Any] = []
        for kind in self.parameter_kinds:
            match kind:
                case "body":
                    arguments.append([message.body for message in messages])
                case "message":
                    arguments.append(list(messages))
                case "headers":
                    arguments.append([message.headers for message in messages])
                case "state":
                    arguments.append(self.state)
        return arguments

    def keep_result(self, message: Message[Any], returned: object) -> str | None:
        """Keep the return value as the result if that is configured; return why it cannot be kept, or None.

        The work is done, so a result that cannot be kept is not a failure.
        """
        if self.result_ttl is None or returned is None or message.outcome is not None:
            return None
        try:
            message.keep_result(returned, self.result_ttl)
        except Exception as error:
            return message.refuse_result(error, self.result_ttl)
        return None

    def _open_sessions(self, store: Store | None, engine: object) -> None:
        if self.session is None:
            if engine is not None:
                raise ConfigurationError(
                    f"handler {self.name} is given an engine and has no parameter for a session: annotate one as "
                    "Session or AsyncSession"
                )
            return
        if self.process or self.manual or store is None:
            why = "settles by hand (manual=True)" if self.manual else f"runs {self.where}"
            raise ConfigurationError(
                f"handler {self.name} {why}, so it cannot be given a session whose commit settles its messages"
            )
        from waypost.outbox.handler_sessions import in_transaction, session_source

        sessions = session_source(self.name, self.session, is_async=self.is_async, store=store, engine=engine)
        self.function = in_transaction(
            self.function, sessions, self._arguments, self._keep_returned, is_async=self.is_async
        )

    def _keep_returned(self, messages: Sequence[Message[Any]], returned: object) -> None:
        self.keep_result(messages[0], returned)

    def through_middleware(self, call: Callable[[Sequence[Message[Any]]], Any]) -> Callable[..., Any]:
        """Return a call of the handler with the middleware around it."""
        return handled_through(self.middleware, call, awaited=self.is_awaited)

    # ---- processes ---------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Check a process handler when it is registered, before its name is bound in its module."""
        if os.name != "posix":
            raise ConfigurationError(f"handler {self.name}: process=True needs a POSIX system")
        if self.is_async:
            raise ConfigurationError(
                f"handler {self.name} is async and runs on the event loop; process=True is for functions that compute"
            )
        if not isinstance(self.function, FunctionType) or "<" in self.name:
            raise ConfigurationError(
                f"handler {self.name}: with process=True a handler is found by its name in another process, so it must "
                "be a function at the top of its module, not a lambda, a method or a function inside another"
            )
        if "state" in self.parameter_kinds:
            raise ConfigurationError(
                f"handler {self.name}: the client's state stays in the worker's own process; with process=True create "
                "what the handler needs at the top of its module"
            )

    def check_can_start(self) -> None:
        """Raise `ConfigurationError` if its type is not completely defined, or a handler process could not find it."""
        codec.check_type_is_complete(f"the body of handler {self.name}", self.as_type)
        if self._check_start is not None:
            self._check_start()
        if not self.process:
            return
        module = self.function.__module__
        if module == "__main__":
            raise ConfigurationError(
                f"handler {self.name} is in the main program (__main__), where no other process can find "
                "it; put it into a module and import that, or start it with: waypost worker module:post"
            )
        if find_object(module, self.name) is not self.function:
            raise ConfigurationError(
                f"handler {self.name}: {module}.{self.name} is not the function that was registered; put "
                "@post.handler above all other decorators"
            )
        if self.body_type_name is not None and find_object(*self.body_type_name.split(":")) is not self.as_type:
            raise ConfigurationError(
                f"handler {self.name}: the type of its queue's bodies cannot be found by its name in another process; "
                "annotate the parameter of the handler instead"
            )

    @property
    def body_type_name(self) -> str | None:
        """Where the type of the bodies is defined, if the function has no annotation for it."""
        own = Signature(self.name, self.function, is_batch=self.batch is not None, state=self.state).as_type
        if self.as_type is None or own == self.as_type:
            return None
        return f"{getattr(self.as_type, '__module__', '')}:{getattr(self.as_type, '__qualname__', '')}"


def find_object(module: str, qualname: str) -> Any:
    """Return the object with this name in a module, or None."""
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, ValueError):
        return None
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object that is called as one, has to be awaited."""
    import inspect

    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def is_generator_function(function: Callable[..., Any]) -> bool:
    """Return whether a call of a function, or of an object called as one, makes a generator and runs nothing."""
    import inspect

    called = (function, getattr(function, "__call__", None))  # noqa: B004
    return any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in called)


def _shortest(messages: Sequence[Message[Any]], otherwise: float) -> float:
    """Return the shortest time limit of some messages; a message without its own has the handler's."""
    if len(messages) == 1:
        own = messages[0].own_timeout()
        return otherwise if own is None else own
    limits = [message.own_timeout() for message in messages]
    return min((otherwise if limit is None else limit for limit in limits), default=otherwise)


def choose_handler(handlers: Iterable[Handler], lease: Lease) -> Handler | None:
    """Return the handler of a queue for a message: by its type, or the one for all other types."""
    default: Handler | None = None
    try:
        type_name = codec.open_envelope(lease.envelope).type_name
    except Undecodable:
        # Any of them: its call fails, and the message is put aside as in any queue.
        return next(iter(handlers), None)
    for handler in handlers:
        if type_name in handler.types:
            return handler
        default = default if handler.types else handler
    return default


def check_types(name: str, types: TypeNames) -> frozenset[str]:
    """Return the type names of the `types=` of a handler: a class or a name, or several."""
    given = [types] if isinstance(types, str | type) else check_items("types", types, ConfigurationError)
    names = []
    for one in given:
        type_name = codec.name_of_class(one) if isinstance(one, type) else one
        if not isinstance(type_name, str) or not type_name:
            raise ConfigurationError(
                f"handler {name}: types= takes dataclasses, msgspec Structs and pydantic models, or their names as in "
                f"'shop.orders.Placed', not {show(one)}; other bodies have no type name: they go to a handler without "
                "types="
            )
        names.append(type_name)
    if types != () and not names:
        raise ConfigurationError(f"handler {name}: types= is empty; leave it out to take the messages of all types")
    return frozenset(names)


def _check_count(name: str, number: int, most: int) -> int:
    return check_count(name, number, 1, most, ConfigurationError)


def _check_function(function: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(function):
        raise ConfigurationError(f"a handler is a function, not {type(function).__name__}")
    if is_generator_function(function):
        raise ConfigurationError(
            f"a handler is called once for each message, and {show(function)} would only make a generator: none of its "
            "code would run; use return instead of yield"
        )
    return function


def _check_seconds(name: str, seconds: Duration) -> float:
    return check_seconds(name, seconds, least=0.001, error=ConfigurationError)


def _check_result_ttl(name: str, ttl: Duration, batch: int | None) -> Duration:
    if batch is not None:
        raise ConfigurationError(
            f"handler {name}: a batch has no single result; use message.keep_result for each message"
        )
    after_ms(ttl)
    return ttl
