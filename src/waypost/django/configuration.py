"""The setting WAYPOST of a Django project.

URL         the store; without it the database of DATABASE is the store, which must be PostgreSQL or SQLite
DATABASE    the alias of DATABASES whose open transaction a publish joins ("default", with a URL None: it joins none)
NAMESPACE   what the names of waypost's tables begin with ("wp")
QUEUES      queues with their settings, {"orders": {"lease": 30}}, which a worker applies when it starts
HANDLERS    the module of each application that has its handlers ("waypost_handlers")
OPTIONS     further options of `waypost.Waypost`, as {"retry_budget": 10}
WEB_URL     where the web page of waypost is, for a link in the admin
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from waypost.checks import check_options, show
from waypost.errors import ConfigurationError

#: Stores that are tables in a database of the project.
DATABASE_SCHEMES = ("postgresql", "postgres", "sqlite")
KEYS = ("URL", "DATABASE", "NAMESPACE", "QUEUES", "HANDLERS", "OPTIONS", "WEB_URL")
#: What Django or the driver takes beside the parameters of a connection, which libpq does not know.
DRIVER_OPTIONS = frozenset(("client_encoding", "prepare_threshold", "isolation_level", "autocommit", "connect_timeout"))


@dataclass(frozen=True)
class Configuration:
    """The setting WAYPOST, checked."""

    #: None: the database of `database` is the store.
    url: str | None
    database: str | None
    namespace: str = "wp"
    queues: dict[str, dict[str, Any]] = field(default_factory=dict)
    handlers: str = "waypost_handlers"
    options: dict[str, Any] = field(default_factory=dict)
    web_url: str | None = None

    @property
    def store_url(self) -> str:
        """The URL of the store."""
        return self.url if self.url is not None else database_url(self.database or DEFAULT_DB_ALIAS)


def read_configuration() -> Configuration:
    """Return the setting WAYPOST; raise `ConfigurationError` if it makes no sense."""
    given = getattr(settings, "WAYPOST", None) or {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"WAYPOST is a dict, as in WAYPOST = {{'DATABASE': 'default'}}, not {show(given)}")
    check_options("WAYPOST", given, KEYS)
    url = given.get("URL")
    in_database = url is None or str(url).partition("://")[0] in DATABASE_SCHEMES
    database = given.get("DATABASE", DEFAULT_DB_ALIAS if url is None else None)
    if database is not None and database not in connections.settings:
        raise ConfigurationError(f"WAYPOST['DATABASE'] is an alias of DATABASES, not {show(database)}")
    if database is None and url is None:
        raise ConfigurationError("WAYPOST needs a URL or a DATABASE: there is no store")
    if database is not None and not in_database:
        raise ConfigurationError(
            "WAYPOST['URL'] is a store outside of your databases, so a transaction of WAYPOST['DATABASE'] cannot "
            "publish to it; remove one of them"
        )
    return Configuration(
        url, database, given.get("NAMESPACE", "wp"), _queues(given.get("QUEUES", {})),
        given.get("HANDLERS", "waypost_handlers"), dict(given.get("OPTIONS", {})), given.get("WEB_URL"),
    )  # fmt: skip


def _queues(given: Any) -> dict[str, dict[str, Any]]:
    if isinstance(given, dict) and all(isinstance(one, dict) for one in given.values()):
        return dict(given)
    raise ConfigurationError(
        f"WAYPOST['QUEUES'] is a dict of dicts, as {{'orders': {{'lease': 30}}}}, not {show(given)}"
    )


def database_url(alias: str) -> str:
    """Return the URL of the store in a database of the project, as it is now: tests have another one."""
    connection = connections[alias]
    if connection.vendor == "sqlite":
        if connection.is_in_memory_db():
            raise ConfigurationError(
                f"the database {alias!r} is in memory, where other processes cannot find a message; name a file, in "
                f"tests DATABASES[{alias!r}]['TEST']['NAME'], or set WAYPOST = {{'URL': 'memory://tests'}}"
            )
        return "sqlite:///" + quote(os.path.abspath(connection.settings_dict["NAME"]))
    if connection.vendor == "postgresql":
        return _postgres_url(connection)
    raise ConfigurationError(
        f"the database {alias!r} is {connection.vendor}: messages are in PostgreSQL or SQLite, or in a store that "
        "WAYPOST['URL'] names"
    )


def _postgres_url(connection: Any) -> str:
    given = connection.get_connection_params()
    known = {
        name: str(value)
        for name, value in given.items()
        if isinstance(value, str | int) and not isinstance(value, bool) and name not in DRIVER_OPTIONS
    }
    # All of them as parameters: the folder of a socket is no host of a URL.
    return "postgresql:///?" + urlencode(known, quote_via=quote, safe="")


def database_name(alias: str | None) -> str | None:
    """Return the name of a database of the project as it is now."""
    return None if alias is None else str(connections[alias].settings_dict["NAME"])
