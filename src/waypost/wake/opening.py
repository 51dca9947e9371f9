"""Opens the wake-up channel of a client, from its store and the option `wake`. Drivers are imported when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from waypost.errors import ConfigurationError, InvalidUrl
from waypost.store.opening import POSTGRES_SCHEMES, VALKEY_FORMS, VALKEY_SCHEMES, postgres_store, valkey_store
from waypost.urls import check_url, redact_url
from waypost.wake.hub import Hub, ThreadHub, shared_hub
from waypost.wake.wakeups import NO_WAKEUPS, Wakeups

if TYPE_CHECKING:
    from waypost.store.port import Store
    from waypost.wake.port import Channel

NATS_SCHEMES = ("nats", "tls", "ws", "wss")
WAKE_FORMS = (
    '"local", "poll", a URL (valkey://, postgresql://, nats://), or a channel with send, listen, flush and state; '
    "without it the channel that belongs to the store"
)


def open_wakeups(store: Store, wake: str | Channel | None, timeout: float) -> Wakeups:
    """Return the wake-ups of a client. Nothing is connected yet."""
    if wake is None:
        return _store_channel(store, timeout)
    if not isinstance(wake, str):
        if not all(hasattr(wake, name) for name in ("send", "listen", "flush", "state")):
            raise ConfigurationError(f"wake= is {WAKE_FORMS}, not {type(wake).__name__}")
        return _other_channel(wake, store)
    if wake == "poll":
        return Wakeups(None, store.namespace)
    if wake == "local":
        return _other_channel(_local(store), store)
    hub = _from_url(wake, timeout)
    natural = _store_channel(store, timeout)
    # A URL of the store's own server: the store notifies its sleepers there itself.
    return natural if natural.channel is hub else _other_channel(hub, store)


def _other_channel(channel: Channel, store: Store) -> Wakeups:
    """A channel that the store does not use: clients notify the sleepers that it named."""
    return Wakeups(channel, store.namespace, late_commits=store.capabilities.commits_out_of_order)


def _store_channel(store: Store, timeout: float) -> Wakeups:
    """The channel that belongs to a store."""
    own = store.channel
    if not own.by_server:
        return Wakeups(_local(store), store.namespace)
    hub = (_valkey if own.transport == "valkey" else _postgres)(own.address, timeout)
    return Wakeups(hub, store.namespace, by_store=True, repeats_polls=store.capabilities.repeats_polls)


def _local(store: Store) -> Hub:
    """Within this process; for a file between all processes of this machine."""
    own = store.channel
    if own.transport == "files":
        import os

        from waypost.wake.sqlite import FileHub

        place = os.path.realpath(own.address)
        return shared_hub("files", place, lambda: FileHub(place))
    if own.transport == "process":
        # Kept with the store, so that it exists as long.
        return shared_hub("memory", id(own.address), lambda: _MemoryHub(own.address))
    return shared_hub("local", "", Hub)


class _MemoryHub(Hub):
    """Keeps its store alive, so that no other one can have the same id."""

    def __init__(self, store: object) -> None:
        super().__init__()
        self.store = store


def _from_url(url: str, timeout: float) -> Hub:
    scheme, separator, _ = url.partition("://")
    base, _, form = scheme.partition("+")
    if separator and base in VALKEY_SCHEMES and form in ("", *VALKEY_FORMS):
        valkey_store()
        from waypost.store.valkey.sources import source_of

        return _valkey(source_of(url), timeout)
    if separator and base in POSTGRES_SCHEMES and not form:
        postgres_store()
        from waypost.store.postgres.sources import UrlSource

        return _postgres(UrlSource(url), timeout)
    if separator and base in NATS_SCHEMES and not form:
        return _nats(url, timeout)
    raise InvalidUrl(f"wake= is {WAKE_FORMS}")


def _valkey(source: Any, timeout: float) -> Hub:
    def make() -> Hub:
        from waypost.wake.valkey import ValkeyTransport

        return ThreadHub("valkey", lambda: ValkeyTransport(source, timeout), source.display_name, url=source.place)

    return shared_hub("valkey", source.place, make)


def _postgres(source: Any, timeout: float) -> Hub:
    def make() -> Hub:
        from waypost.wake.postgres import PostgresTransport

        return ThreadHub("postgres", lambda: PostgresTransport(source, timeout), source.display_name, url=source.place)

    return shared_hub("postgres", source.place, make)


def _nats(url: str, timeout: float) -> Hub:
    from waypost.wake.nats import NatsTransport

    parts, display_name = check_url(url), redact_url(url)
    if len(parts.hosts) != 1:
        raise InvalidUrl("a nats:// URL names one host, as in nats://127.0.0.1:4222")
    return shared_hub(
        "nats", url, lambda: ThreadHub("nats", lambda: NatsTransport(url, timeout), display_name, url=url)
    )


__all__ = ["NO_WAKEUPS", "open_wakeups"]
