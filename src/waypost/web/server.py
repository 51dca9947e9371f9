"""`waypost web` as a server: where it binds, what it refuses to bind, and uvicorn with the settings that matter."""

from __future__ import annotations

import os
import socket
import tomllib
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from waypost.errors import ConfigurationError
from waypost.web.access import SCOPES, Token, check_scopes, is_loopback

PORT = 8480
SECRET_VARIABLE = "WAYPOST_WEB_SECRET"
#: Connections at the same time; further ones are refused with 503.
CONNECTIONS_MAX = 512
#: The longest head of a request.
HEAD_BYTES_MAX = 32 * 1024
#: How long open pages have to end when the server stops.
STOP_SECONDS = 3


def read_secret(path: str | None) -> str | None:
    """Return the secret from a file or the environment, None if there is none. Arguments are seen by every user."""
    if path is None:
        return os.environ.get(SECRET_VARIABLE) or None
    try:
        secret = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the secret cannot be read from {path}: {error}") from None
    if not secret:
        raise ConfigurationError(f"{path} is empty: write a secret to it, as with `openssl rand -hex 32`")
    return secret


def read_tokens(path: str | None) -> list[Token]:
    """Return the tokens of a TOML file: a table for each name, with `secret` and `scopes`."""
    if path is None:
        return []
    form = f'[name]\nsecret = "…"\nscopes = ["{SCOPES[0]}"]'
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"the tokens cannot be read from {path}: {error}") from None
    tokens = []
    for name, table in tables.items():
        known = isinstance(table, dict) and set(table) <= {"secret", "scopes"} and isinstance(table.get("secret"), str)
        if not known or not isinstance(table.get("scopes"), list):
            raise ConfigurationError(f"token {name} of {path} must look like {form!r}")
        tokens.append(Token(name, table["secret"], check_scopes(str(scope) for scope in table["scopes"])))
    return tokens


def is_local_bind(host: str) -> bool:
    """Whether only clients of this machine reach a server that binds to this address."""
    return host == "localhost" or is_loopback(host)


def check_bind(host: str, *, has_access_control: bool) -> None:
    """Refuse to bind where other machines reach it without a secret."""
    if not is_local_bind(host) and not has_access_control:
        raise ConfigurationError(
            f"{host} can be reached from other machines, so this needs a secret: set {SECRET_VARIABLE}, or give "
            "--secret-file, --tokens or --auth-header; without one it binds to 127.0.0.1 only"
        )


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket, or raise `ConfigurationError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error}") from None


def url_of(listening: socket.socket, *, tls: bool) -> str:
    """The URL of a server on this socket."""
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}/"


def serve(app: ASGIApp, listening: socket.socket, *, certificate: str | None = None, key: str | None = None) -> None:
    """Serve until a signal asks for the end."""
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        # The app itself decides which proxies it trusts.
        proxy_headers=False,
        server_header=False,
        ws="none",
        limit_concurrency=CONNECTIONS_MAX,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        http="h11",
        timeout_graceful_shutdown=STOP_SECONDS,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    uvicorn.Server(config).run(sockets=[listening])
