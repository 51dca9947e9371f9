"""The arguments of a queue, checked, and what they are as settings of waypost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from waypost.checks import check_queue
from waypost.errors import InvalidName
from waypost.policy import KEY_CHARACTERS_MAX, RETRY_BUDGET_SECONDS
from waypost.redis_message_queue.errors import ConfigurationError, GatewayContractError
from waypost.redis_message_queue.interrupts import BaseGracefulInterruptHandler

Payload = str | dict[str, Any]
OverloadPolicy = Literal["raise", "drop_oldest", "block"]
VISIBILITY_SECONDS = 300
WAIT_SECONDS = 5
#: A wait is cut into parts of this length if there is an `interrupt`, which can only be polled.
INTERRUPT_POLL_SECONDS = 0.25
DEDUPLICATION_SECONDS = 3600
TRACKED = 1_000
#: What stands for no limit where a queue always has one.
UNBOUNDED = 2**40


class Unset:
    """The type of `UNSET`: an argument that was not given."""


UNSET = Unset()


@dataclass(frozen=True, kw_only=True)
class RedisGateway:
    """The settings of a gateway. Connections, retries and claims are those of waypost.

    Settings of the queue that are not given stay as another program left them.
    """

    redis_client: object
    retry_budget_seconds: float = RETRY_BUDGET_SECONDS
    message_deduplication_log_ttl_seconds: float = DEDUPLICATION_SECONDS
    message_wait_interval_seconds: float = WAIT_SECONDS
    message_visibility_timeout_seconds: float | Unset | None = UNSET
    max_delivery_count: int | Unset | None = UNSET
    dead_letter_queue: str | None = None
    max_pending_length: int | Unset | None = UNSET
    pending_overload_policy: OverloadPolicy | Unset = UNSET
    pending_overload_block_timeout_seconds: float = 1.0
    interrupt: BaseGracefulInterruptHandler | None = None


class QueueArguments(TypedDict, total=False):
    """The keyword arguments of a queue."""

    gateway: RedisGateway | None
    client: object
    namespace: str
    deduplication: bool
    enable_completed_queue: bool
    enable_failed_queue: bool
    visibility_timeout_seconds: float | None
    heartbeat_interval_seconds: float | None
    max_completed_length: int | None
    max_failed_length: int | None
    max_delivery_count: int | None
    max_pending_length: int | None
    pending_overload_policy: OverloadPolicy
    pending_overload_block_timeout_seconds: float
    get_deduplication_key: Callable[[Any], Any] | None
    interrupt: BaseGracefulInterruptHandler | None
    on_heartbeat_failure: Callable[[], Any] | None
    on_event: Callable[[Any], Any] | None


#: Arguments that a gateway has instead.
OF_GATEWAYS = (
    "visibility_timeout_seconds", "max_delivery_count", "max_pending_length", "pending_overload_policy",
    "pending_overload_block_timeout_seconds",
)  # fmt: skip


class QueueOptions:
    """The arguments of a queue, checked."""

    def __init__(self, name: str, given: QueueArguments) -> None:
        arguments: dict[str, Any] = dict(given)
        unknown = sorted(set(arguments) - set(QueueArguments.__annotations__))
        if unknown:
            raise TypeError(f"RedisMessageQueue has no argument {unknown[0]!r}")
        gateway = arguments.get("gateway")
        if (gateway is None) == (arguments.get("client") is None):
            raise ConfigurationError("give either client= or gateway=")
        self.wait: float = WAIT_SECONDS
        self.window: float = DEDUPLICATION_SECONDS
        self.retry_budget: float = RETRY_BUDGET_SECONDS
        self.dead_letter_queue = f"{name}::dlq"
        if gateway is not None:
            self._take_gateway(gateway, arguments)
        self.name = queue_of(name)
        self.client: Any = arguments["client"]
        self.namespace: str = arguments.get("namespace", "wp")
        self.deduplication: bool = _flag(arguments, "deduplication", default=True)
        self.get_key = arguments.get("get_deduplication_key", UNSET)
        self.tracks_completed = _flag(arguments, "enable_completed_queue", default=False)
        self.tracks_failed = _flag(arguments, "enable_failed_queue", default=False)
        self.interrupt: BaseGracefulInterruptHandler | None = arguments.get("interrupt")
        self.on_event = arguments.get("on_event")
        self.on_heartbeat_failure = arguments.get("on_heartbeat_failure")
        self.block_timeout: float = arguments.get("pending_overload_block_timeout_seconds", 1.0)
        #: Settings of the queue that were given; the others stay as another program left them.
        self.settings = self._settings(arguments)
        self.renews = self._renews(arguments)

    def _take_gateway(self, gateway: Any, arguments: dict[str, Any]) -> None:
        if not isinstance(gateway, RedisGateway):
            raise GatewayContractError(
                "gateway= is a RedisGateway of waypost.redis_message_queue; one of your own has no place here"
            )
        both = [name for name in OF_GATEWAYS if name in arguments]
        if both:
            raise ConfigurationError(f"{both[0]} is set on the gateway, not on the queue as well")
        self.wait = gateway.message_wait_interval_seconds
        self.window = gateway.message_deduplication_log_ttl_seconds
        self.retry_budget = gateway.retry_budget_seconds
        self.dead_letter_queue = gateway.dead_letter_queue or self.dead_letter_queue
        arguments["client"] = gateway.redis_client
        arguments.setdefault("interrupt", gateway.interrupt)
        for name in OF_GATEWAYS:
            held = "message_visibility_timeout_seconds" if name == "visibility_timeout_seconds" else name
            value = getattr(gateway, held)
            if value is not UNSET:
                arguments[name] = value

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if "visibility_timeout_seconds" in given:
            lease = settings["lease"] = given["visibility_timeout_seconds"]
            if lease is None and given.get("max_delivery_count") is not None:
                raise ConfigurationError("max_delivery_count needs a visibility_timeout_seconds")
            if lease is None and self.tracks_failed:
                raise ConfigurationError(
                    "enable_failed_queue needs a visibility_timeout_seconds: without one a message is gone when it is "
                    "claimed, and cannot be buried"
                )
        if "max_delivery_count" in given:
            settings["max_deliveries"] = given["max_delivery_count"]
        if "max_pending_length" in given:
            settings["max_pending"] = given["max_pending_length"]
        if "pending_overload_policy" in given:
            if given["pending_overload_policy"] != "raise" and given.get("max_pending_length") is None:
                raise ConfigurationError("pending_overload_policy needs a max_pending_length")
            settings["overload"] = given["pending_overload_policy"]
        for length, switch, setting in (
            ("max_completed_length", "enable_completed_queue", "completed"),
            ("max_failed_length", "enable_failed_queue", "dead_max"),
        ):
            if length in given and not given.get(switch):
                raise ConfigurationError(f"{length} needs {switch}=True")
            if given.get(switch):
                most = given.get(length, TRACKED)
                settings[setting] = UNBOUNDED if most is None and setting == "completed" else most
        return settings

    def _renews(self, given: dict[str, Any]) -> bool:
        interval = given.get("heartbeat_interval_seconds")
        if interval is None:
            return False
        timeout = given.get("visibility_timeout_seconds", VISIBILITY_SECONDS)
        if timeout is None:
            raise ConfigurationError("heartbeat_interval_seconds needs a visibility_timeout_seconds")
        if not 0 < interval < timeout / 2:
            raise ConfigurationError(
                f"heartbeat_interval_seconds must be less than half of visibility_timeout_seconds ({timeout}), not "
                f"{interval}"
            )
        return True

    def changes(self, *, is_new: bool) -> dict[str, Any]:
        """Return the settings to apply; of a queue that exists, other programs have chosen the lease."""
        return {"lease": VISIBILITY_SECONDS, **self.settings} if is_new else self.settings

    @property
    def parts(self) -> list[float]:
        """How long the claims of one `process_message` wait, one after the other."""
        if self.interrupt is None:
            return [self.wait]
        count = max(1, round(self.wait / INTERRUPT_POLL_SECONDS))
        return [self.wait / count] * count

    @property
    def decodes(self) -> bool:
        """Whether messages are text: not of a redis-py client that returns bytes."""
        encoder = getattr(self.client, "get_encoder", None)
        return True if encoder is None else bool(encoder().decode_responses)


def queue_of(name: str) -> str:
    """Return the name of the queue: waypost needs no hash tags, so their braces are left out."""
    try:
        return check_queue(name.replace("{", "").replace("}", "") if isinstance(name, str) else name)
    except InvalidName as error:
        raise ConfigurationError(str(error)) from error


def _flag(given: dict[str, Any], name: str, *, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise TypeError(f"{name!r} must be a bool, got {type(value).__name__}")
    return value


def serialize(message: Payload) -> str:
    """Return a message as the text that is stored."""
    if isinstance(message, str):
        return message
    if not isinstance(message, dict):
        raise TypeError(f"'message' must be a str or dict, got {type(message).__name__}")
    wrong = [key for key in message if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"the keys of a message must be text, not {wrong[0]!r}")
    return json.dumps(message, sort_keys=True, allow_nan=False)


def content_key(text: str) -> str:
    """Return the key of a message by its content."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def check_key(key: Any) -> str:
    """Return a key that a function of the caller made; a long one is replaced by its hash."""
    if not isinstance(key, str):
        raise TypeError(f"'get_deduplication_key' must return text, got {type(key).__name__}")
    if not key:
        raise ConfigurationError("'get_deduplication_key' must return text that is not empty")
    return key if len(key) <= KEY_CHARACTERS_MAX else content_key(key)
