"""Opens a store from a URL or the caller's own client. Drivers are imported only when a URL needs them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from waypost.errors import ConfigurationError, InvalidUrl, MissingExtra, UnusableClient
from waypost.urls import check_url, resolve_url, unescape

if TYPE_CHECKING:
    from waypost.policy import Durability
    from waypost.store.memory.store import MemoryStore
    from waypost.store.port import Store

Clock = Callable[[], int]

SCHEME = re.compile(r"[a-z][a-z0-9+.\-]*")
#: Plain, with TLS, over a Unix socket; then the same through Sentinel or to a Cluster.
VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
VALKEY_FORMS = ("sentinel", "cluster")
POSTGRES_SCHEMES = ("postgresql", "postgres")
URL_FORMS = (
    "memory://, sqlite:///file.db, valkey://host:6379 (or redis://, rediss://, unix://), "
    "valkey+sentinel://host:26379/service, valkey+cluster://host:6379, postgresql://host/database; or "
    "file:///path of a file that has one of them"
)
#: The packages whose clients may be passed in.
CLIENT_PACKAGES = frozenset(("redis", "valkey"))
POOL_PACKAGES = frozenset(("psycopg", "psycopg_pool", "sqlalchemy"))


class StoreOptions(TypedDict):
    """Options that apply to every kind of store."""

    namespace: str
    clock: Clock | None
    replay_ttl_ms: int
    durability: Durability


_shared: dict[tuple[str, str], MemoryStore] = {}
_shared_lock = threading.Lock()


def open_store(url: str, **options: Unpack[StoreOptions]) -> Store:
    """Return the store of a URL. Nothing is connected yet. Errors contain at most the scheme: URLs have passwords."""
    if not isinstance(url, str):
        raise InvalidUrl(f"a store URL is text, not {type(url).__name__}; pass a client with client=")
    url = resolve_url(url)
    scheme, separator, rest = url.partition("://")
    if not separator or SCHEME.fullmatch(scheme) is None:
        raise InvalidUrl(f"a store URL starts with a scheme: {URL_FORMS}")
    if scheme == "memory":
        return _memory(rest, options)
    if scheme == "sqlite":
        return _sqlite(rest, options)
    base, _, form = scheme.partition("+")
    if base in VALKEY_SCHEMES and form in ("", *VALKEY_FORMS):
        return _valkey(url, scheme, options)
    if base in POSTGRES_SCHEMES:
        if form:
            raise InvalidUrl(f"a PostgreSQL URL begins with postgresql://, without the +{form} that SQLAlchemy has")
        return cast("Store", postgres_store().from_url(url, **_without_durability(options)))
    raise InvalidUrl(f"the scheme {scheme}:// is not known; known are {URL_FORMS}")


def _without_durability(options: StoreOptions) -> dict[str, Any]:
    """Check the durability of a store whose commits always wait for the disk: both values are the same."""
    return {name: value for name, value in options.items() if name != "durability"}


def _memory(name: str, options: StoreOptions) -> Store:
    from waypost.store.memory.store import MemoryStore

    namespace, clock = options["namespace"], options["clock"]
    if options["durability"] == "fsync":
        raise ConfigurationError('a memory store has no disk to wait for: durability="fsync" needs another store')
    name = name.rstrip("/")
    if "/" in name or "?" in name or "@" in name:
        raise InvalidUrl("memory:// takes at most a name, as in memory://orders")
    if not name:
        return MemoryStore(namespace=namespace, clock=clock, replay_ttl_ms=options["replay_ttl_ms"])
    with _shared_lock:
        store = _shared.get((name, namespace))
        if store is None:
            store = _shared[name, namespace] = MemoryStore(
                namespace=namespace, clock=clock, replay_ttl_ms=options["replay_ttl_ms"]
            )
        elif clock is not None and store.clock is not clock:
            raise ConfigurationError("this named memory store already has another clock; use another name")
        return store


def _sqlite(rest: str, options: StoreOptions) -> Store:
    if not rest.startswith("/"):
        raise InvalidUrl(
            "a SQLite URL has three slashes before a relative path (sqlite:///orders.db) and four before an "
            "absolute one (sqlite:////var/lib/orders.db)"
        )
    path, question, _ = rest[1:].partition("?")
    path = unescape(path)
    if question:
        raise InvalidUrl("a SQLite URL takes no options after a question mark")
    if not path or path.endswith("/"):
        raise InvalidUrl("a SQLite URL must name a file, as in sqlite:///orders.db")
    if path.startswith(":memory:"):
        raise InvalidUrl("a SQLite store is a file that several connections share; use memory:// instead")
    if "\0" in path:
        raise InvalidUrl("the path of a SQLite URL contains a NUL character")
    from waypost.store.sqlite import SqliteStore

    return cast("Store", SqliteStore(path, **_without_durability(options)))


def _valkey(url: str, scheme: str, options: StoreOptions) -> Store:
    parts = check_url(url)
    if len(parts.hosts) > 1 and "+" not in scheme:
        raise InvalidUrl(f"a {scheme}:// URL names one host; several are for +sentinel and +cluster")
    if scheme == "unix" and not parts.path.strip("/"):
        raise InvalidUrl("a unix:// URL must name a socket, as in unix:///run/valkey.sock")
    if scheme != "unix" and not parts.hosts:
        raise InvalidUrl(f"this {scheme}:// URL names no host, as in {scheme}://127.0.0.1:6379")
    return cast("Store", valkey_store().from_url(url, **options))


def valkey_store() -> Any:
    """Return the class of the Valkey store; `MissingExtra` if its driver is not installed."""
    try:
        import redis  # noqa: F401
    except ImportError:
        raise MissingExtra(
            'the Valkey store needs its driver, which is not installed: pip install "waypost[valkey]"'
        ) from None
    from waypost.store.valkey import ValkeyStore

    return ValkeyStore


def postgres_store() -> Any:
    """Return the class of the PostgreSQL store; `MissingExtra` if its driver is not installed."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtra(
            'the PostgreSQL store needs its driver, which is not installed: pip install "waypost[postgres]"'
        ) from None
    from waypost.store.postgres import PostgresStore

    return PostgresStore


def store_from_client(client: object, **options: Unpack[StoreOptions]) -> Store:
    """Return a store that uses the caller's own client, which waypost never closes."""
    packages = {kind.__module__.partition(".")[0] for kind in type(client).__mro__}
    if packages & POOL_PACKAGES:
        return cast("Store", postgres_store().from_client(client, **_without_durability(options)))
    if not packages & CLIENT_PACKAGES:
        raise UnusableClient(
            "client= takes a client of redis-py or valkey-py, a pool of psycopg or a SQLAlchemy engine, not a "
            f"{type(client).__module__}.{type(client).__qualname__}; give a URL instead, or a store with store="
        )
    return cast("Store", valkey_store().from_client(client, **options))
