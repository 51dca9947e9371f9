"""Makes the target of a URL. A driver is imported only for a URL that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from waypost.errors import ConfigurationError, InvalidUrl
from waypost.outbox.relay.target import Target
from waypost.redaction import Redact
from waypost.store.opening import POSTGRES_SCHEMES, VALKEY_FORMS, VALKEY_SCHEMES
from waypost.urls import check_url

URL_FORMS = (
    "kafka://host:9092/topic, amqp://host:5672/vhost?exchange=…&routing_key=…, nats://host:4222/subject, "
    "valkey+stream://host:6379/stream, lake:///folder, or the URL of another waypost store, as in postgresql://host/database#queue"
)
STREAM_SCHEMES = tuple(f"{scheme}+stream" for scheme in VALKEY_SCHEMES if scheme != "unix")
STORE_SCHEMES = (
    "memory", "sqlite", *POSTGRES_SCHEMES, *VALKEY_SCHEMES,
    *(f"{scheme}+{form}" for scheme in VALKEY_SCHEMES for form in VALKEY_FORMS),
)  # fmt: skip


def open_target(to: str | Target, queue: str, redact: Redact | None = None) -> Target:
    """Return the target of a URL, or `to` itself if it is a target. Does not connect.

    Errors contain only the scheme, because URLs hold passwords. Another waypost store journals what `redact` returns.
    """
    if not isinstance(to, str):
        if not all(callable(getattr(to, name, None)) for name in ("open", "send", "close")):
            raise ConfigurationError(
                f"to= is a URL ({URL_FORMS}) or a target with open, send and close, not {type(to).__name__}"
            )
        return to
    scheme, separator, _ = to.partition("://")
    if not separator:
        raise InvalidUrl(f"the URL of a target starts with a scheme: {URL_FORMS}")
    if scheme == "lake":
        return _lake(to)
    make = _MAKERS.get(scheme)
    if make is not None:
        return make(_split(to), queue)
    if scheme in STORE_SCHEMES:
        from waypost.outbox.relay.waypost import WaypostTarget

        url, _, name = to.partition("#")
        return cast("Target", WaypostTarget(url, unquote(name) or queue, redact=redact))
    raise InvalidUrl(f"a relay cannot send to {scheme}://; use {URL_FORMS}")


def _split(url: str) -> SplitResult:
    if not check_url(url).hosts:
        raise InvalidUrl(f"this {url.partition('://')[0]}:// URL names no host; use {URL_FORMS}")
    return urlsplit(url)


def _options(parts: SplitResult) -> dict[str, str]:
    return dict(parse_qsl(parts.query, keep_blank_values=True))


def _parse_int(parts: SplitResult, name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidUrl(f"{name} in this {parts.scheme}:// URL is a whole number, not {text[:20]!r}")
    return int(text)


def _check_known(parts: SplitResult, left: dict[str, str], known: str) -> None:
    if left:
        raise InvalidUrl(f"{sorted(left)[0]!r} is not an option of a {parts.scheme}:// target, which has {known}")


def _kafka(parts: SplitResult, queue: str) -> Target:
    from waypost.outbox.relay.kafka import KafkaTarget

    if "@" in parts.netloc:
        raise InvalidUrl("a kafka:// URL has no password: use KafkaTarget(servers, topic, config={…}) for SASL and TLS")
    return KafkaTarget(parts.netloc, unquote(parts.path.strip("/")) or queue, config=_options(parts))


def _rabbitmq(parts: SplitResult, queue: str) -> Target:
    from waypost.outbox.relay.rabbitmq import RabbitTarget

    options = _options(parts)
    exchange, routing_key = options.pop("exchange", ""), options.pop("routing_key", None)
    left = "&".join(f"{name}={value}" for name, value in options.items())
    return RabbitTarget(
        parts._replace(query=left).geturl(),
        exchange=exchange,
        # On the default exchange the routing key is a queue name: by default the name of this queue.
        routing_key=routing_key if routing_key is not None else queue,
    )


def _nats(parts: SplitResult, queue: str) -> Target:
    from waypost.outbox.relay.nats import NatsTarget

    _check_known(parts, _options(parts), "none")
    return NatsTarget(parts._replace(path="", query="").geturl(), unquote(parts.path.strip("/")) or queue)


def _stream(parts: SplitResult, queue: str) -> Target:
    from waypost.outbox.relay.streams import StreamTarget

    options = _options(parts)
    maxlen, database = options.pop("maxlen", None), options.pop("db", "0")
    _check_known(parts, options, "maxlen and db")
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(
        parts.scheme.partition("+")[0], parts.scheme.partition("+")[0]
    )
    return StreamTarget(
        f"{scheme}://{parts.netloc}/{_parse_int(parts, 'db', database)}",
        unquote(parts.path.strip("/")) or queue,
        maxlen=None if maxlen is None else _parse_int(parts, "maxlen", maxlen),
    )


def _lake(url: str) -> Target:
    from waypost.outbox.relay.lake import LakeTarget

    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise InvalidUrl("a lake:// URL is the whole path of a folder, with three slashes: lake:///data/orders")
    options = _options(parts)
    compression = options.pop("compression", "zstd")
    _check_known(parts, options, "compression")
    return LakeTarget(unquote(parts.path), compression=compression)


_MAKERS: dict[str, Callable[[SplitResult, str], Target]] = {
    "kafka": _kafka,
    "amqp": _rabbitmq,
    "amqps": _rabbitmq,
    "nats": _nats,
    "tls": _nats,
    **dict.fromkeys(STREAM_SCHEMES, _stream),
}
