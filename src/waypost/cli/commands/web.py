"""`waypost web`: the web page and the HTTP API."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from typing import TYPE_CHECKING, Any

from waypost.checks import check_namespace
from waypost.cli.exit_codes import USAGE, CommandError
from waypost.cli.options import (
    add_command,
    add_log_options,
    check_sqlite_file,
    get_namespace,
    get_url,
    integer_between,
    load_redact_hook,
)
from waypost.cli.output import write, write_json, write_stderr

if TYPE_CHECKING:
    from waypost.client import AsyncWaypost

#: `NAME=URL`; a URL itself has no `=` before its `://`.
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.\-]*)=(.+)")
#: How long a client retries a store that is away: a page says so instead of waiting.
RETRY_SECONDS = 2.0
PORT = 8480


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "web", run, "serve the web page and the HTTP API", positional_url=True,
        json_text="one JSON document with the address, instead of a line",
        more="It binds to 127.0.0.1, and to another address only with a secret: WAYPOST_WEB_SECRET, --secret-file, "
        "--tokens or --auth-header.",
        examples=("waypost web sqlite:///orders.db",
                  "waypost web --store shop=valkey://127.0.0.1:6379 --store bills=postgresql://127.0.0.1/bills",
                  "waypost web --host 0.0.0.0 --host-name ops.example.com --secret-file secret.txt"),
    )  # fmt: skip
    parser.add_argument("--store", action="append", default=[], metavar="[NAME=]URL",
                        help="a store to show; may be repeated, each with a name")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="the address to bind to (127.0.0.1)")
    parser.add_argument("--port", type=integer_between(0, 65_535), default=PORT, metavar="N",
                        help=f"the port, 0 for a free one ({PORT})")  # fmt: skip
    parser.add_argument("--host-name", action="append", default=[], metavar="NAME",
                        help="a name by which it is reached; others are refused; may be repeated")  # fmt: skip
    parser.add_argument("--secret-file", metavar="PATH", help="the secret for all scopes; else WAYPOST_WEB_SECRET")
    parser.add_argument("--tokens", metavar="PATH", help="a TOML file of further secrets with names and scopes")
    parser.add_argument("--auth-header", metavar="NAME",
                        help="the header in which a trusted proxy names the user")  # fmt: skip
    parser.add_argument("--auth-scopes", default="read", metavar="SCOPES",
                        help="the scopes of those users: read,operate,admin,bodies (read)")  # fmt: skip
    parser.add_argument("--trusted-proxy", action="append", default=[], metavar="ADDRESS",
                        help="a proxy whose X-Forwarded headers count, or a network; may be repeated")  # fmt: skip
    parser.add_argument("--read-only", action="store_true", help="refuse every write")
    parser.add_argument("--hide-bodies", action="append", default=[], metavar="PATTERN",
                        help="show no bodies and headers of these queues; may be repeated")  # fmt: skip
    parser.add_argument("--lake", action="append", default=[], metavar="[NAME=]DIR",
                        help="the lake of a store: percentiles, audit, report, messages it has forgotten")  # fmt: skip
    parser.add_argument("--tls-cert", metavar="PATH", help="serve TLS with this certificate")
    parser.add_argument("--tls-key", metavar="PATH", help="and this key")
    add_log_options(parser, "info")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal, and return the exit code."""
    from waypost.web import create_app, header_auth
    from waypost.web.server import bind, check_bind, is_local_bind, read_secret, read_tokens, serve, url_of

    secret, tokens = read_secret(options.secret_file), read_tokens(options.tokens)
    auth = None
    if options.auth_header is not None:
        if not options.trusted_proxy:
            raise CommandError("--auth-header needs --trusted-proxy: otherwise any client could name its user", USAGE)
        auth = header_auth(options.auth_header, options.auth_scopes.split(","))
    check_bind(options.host, has_access_control=bool(secret or tokens or auth))
    if (options.tls_cert is None) != (options.tls_key is None):
        raise CommandError("--tls-cert and --tls-key belong together", USAGE)
    stores = open_stores(options)
    own_name = [] if options.host in ("0.0.0.0", "::") or is_local_bind(options.host) else [options.host]
    app = create_app(
        stores, secret=secret, tokens=tokens, auth=auth, hosts=[*own_name, *options.host_name],
        trusted_proxies=options.trusted_proxy, read_only=options.read_only, hide_bodies=options.hide_bodies,
        lake=parse_lakes(options.lake, list(stores)),
    )  # fmt: skip
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tls = options.tls_cert is not None
    with bind(options.host, options.port) as listening:
        url = url_of(listening, tls=tls)
        if options.json:
            write_json({"url": url, "stores": sorted(stores), "read_only": options.read_only})
        else:
            write(f"waypost web: {url} (Ctrl-C ends it)")
        sys.stdout.flush()
        if not is_local_bind(options.host) and not tls and not options.trusted_proxy:
            write_stderr("waypost: secrets and messages travel unencrypted: use --tls-cert, or a proxy with TLS")
        serve(app, listening, certificate=options.tls_cert, key=options.tls_key)
    return 0


def open_stores(options: argparse.Namespace) -> dict[str, AsyncWaypost]:
    """Return the clients of all stores by name, not connected yet."""
    given = list(options.store)
    if options.url or options.url_option or not given:
        given.insert(0, get_url(options))
    stores: dict[str, AsyncWaypost] = {}
    for text in given:
        named = NAMED.fullmatch(text)
        name, url = (named[1], named[2]) if named is not None and "://" not in named[1] else ("main", text)
        if name in stores:
            raise CommandError(f"two stores are named {name}: give each a name, as in --store shop=URL", USAGE)
        stores[name] = open_async_client(options, url)
    return stores


def parse_lakes(given: list[str], stores: list[str]) -> dict[str, str]:
    """Return the lakes by the names of their stores; without a name it is that of the first store."""
    lakes: dict[str, str] = {}
    for text in given:
        named = NAMED.fullmatch(text)
        name, place = (named[1], named[2]) if named is not None and named[1] in stores else (stores[0], text)
        if name in lakes:
            raise CommandError(f"store {name} has two lakes: give each with its store, as in --lake shop=DIR", USAGE)
        lakes[name] = place
    return lakes


def open_async_client(options: argparse.Namespace, url: str) -> AsyncWaypost:
    """Return the client of one store. A SQLite file that does not exist is an error: the path is probably mistyped."""
    from waypost.client import AsyncWaypost

    namespace = get_namespace(options)
    check_sqlite_file(url, namespace)
    redact = load_redact_hook()
    if options.schema is None or not url.startswith(("postgresql://", "postgres://")):
        return AsyncWaypost(url, namespace=namespace, retry_budget=RETRY_SECONDS, redact=redact)
    from waypost.store.opening import postgres_store

    replay_ttl_ms = int((2 * RETRY_SECONDS + 60) * 1000)
    store = postgres_store().from_url(
        url, schema=options.schema, namespace=check_namespace(namespace), replay_ttl_ms=replay_ttl_ms
    )
    return AsyncWaypost(store=store, retry_budget=RETRY_SECONDS, redact=redact)
