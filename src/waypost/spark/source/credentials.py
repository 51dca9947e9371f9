"""Where a store is, described without secrets.

Options of a data source are part of Spark's plans, its logs and its pages, and travel to every executor. So a password
is named there, never written: by an environment variable or by a file, which each process reads for itself when it
connects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from waypost.errors import ConfigurationError
from waypost.urls import holds_secret

if TYPE_CHECKING:
    from waypost.store.port import Store

#: How much of a file is read for a secret: a path that is wrong must not fill the memory.
SECRET_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Place:
    """A store by its URL without secrets, or by where the URL and the password are written."""

    url: str | None = None
    url_env: str | None = None
    url_file: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    namespace: str = "wp"

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Place:
        """The place that options name: `url`, `urlEnv` or `urlFile`, and if need be `passwordEnv` or `passwordFile`."""
        place = cls(
            options.get("url"),
            options.get("urlEnv"),
            options.get("urlFile"),
            options.get("passwordEnv"),
            options.get("passwordFile"),
            options.get("namespace", "wp"),
        )
        if sum(given is not None for given in (place.url, place.url_env, place.url_file)) != 1:
            raise ConfigurationError(
                "give the store with one of the options url, urlEnv (the name of an environment variable that "
                "holds the URL) and urlFile (the path of a file that holds it)"
            )
        if place.password_env is not None and place.password_file is not None:
            raise ConfigurationError("give one of passwordEnv and passwordFile, not both")
        if place.url is not None and holds_secret(place.url):
            raise ConfigurationError(
                "the option url holds a password, and options are shown in Spark's plans and logs: leave it out and "
                "name it with passwordEnv or passwordFile, or give the whole URL with urlEnv or urlFile"
            )
        return place

    def resolve(self) -> str:
        """The whole URL, secrets included. Called where the connection is made, and kept nowhere."""
        if self.url is not None:
            url = self.url
        elif self.url_env is not None:
            url = _from_environment("urlEnv", self.url_env)
        else:
            url = _from_file("urlFile", self.url_file or "")
        if self.password_env is not None:
            return with_password(url, _from_environment("passwordEnv", self.password_env))
        if self.password_file is not None:
            return with_password(url, _from_file("passwordFile", self.password_file))
        return url

    def open(self) -> Store:
        """The store; nothing is connected yet. Refuses one that the tasks of Spark, other processes, cannot open."""
        from waypost.store.opening import open_store

        store = open_store(
            self.resolve(), namespace=self.namespace, clock=None, replay_ttl_ms=300_000, durability="server"
        )
        if store.capabilities.reach == "process":
            raise ConfigurationError(
                f"a {store.kind} store lives in one process, and Spark's tasks run in others: use SQLite, Valkey or "
                "PostgreSQL"
            )
        return store


def _split(url: str) -> tuple[str, str, str, str]:
    """Scheme with its slashes, user information, hosts, and the rest. Several hosts are more than urlsplit reads."""
    scheme, separator, rest = url.partition("://")
    ends = [at for at in (rest.find("/"), rest.find("?")) if at >= 0]
    end = min(ends, default=len(rest))
    user, _, hosts = rest[:end].rpartition("@")
    return scheme + separator, user, hosts, rest[end:]


def with_password(url: str, password: str) -> str:
    """The URL with a password for its user."""
    scheme, user, hosts, rest = _split(url)
    if user.partition(":")[2]:
        raise ConfigurationError("the URL has a password already, and passwordEnv or passwordFile names another")
    return f"{scheme}{user.partition(':')[0]}:{quote(password, safe='')}@{hosts}{rest}"


def _from_environment(option: str, name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigurationError(
            f"{option} names the environment variable {name}, which is not set here; set it for the driver and for "
            f"executors (spark.executorEnv.{name} shows it to every reader of the configuration: prefer a file)"
        )
    return value


def _from_file(option: str, path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            value = file.read(SECRET_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{option} names {path}, which cannot be read here ({type(error).__name__}); it must be on every machine "
            "that connects"
        ) from None
    if not value:
        raise ConfigurationError(f"{option} names {path}, which is empty")
    return value
