"""The outermost part of the app: hosts, origins, proxies, and the headers of every answer.

A page of another site can make a browser send requests here, and with a name that it lets point to 127.0.0.1 (DNS
rebinding) it could even read the answers. So requests must name a host that this server was given, and writes must come
from a page of this server.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from waypost.errors import ConfigurationError
from waypost.web.problems import PROBLEM_TYPE, Problem

LOOPBACK_HOSTS = frozenset(("127.0.0.1", "localhost", "::1"))
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
#: Scripts, styles and data come from this server only; nothing inline, no frames, no plug-ins.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(addresses: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of trusted proxies, or raise `ConfigurationError`."""
    try:
        return tuple(ipaddress.ip_network(one, strict=False) for one in addresses)
    except ValueError as error:
        raise ConfigurationError(f"a trusted proxy is an address or a network, as 10.0.0.0/8: {error}") from None


class Guard:
    """Checks each request before the app sees it."""

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], trusted_proxies: Iterable[str]) -> None:
        self._app = app
        self._hosts = LOOPBACK_HOSTS | {host.lower().strip("[]") for host in hosts}
        self._proxies = parse_networks(trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._forwarded(scope)
        try:
            self._check_host(scope)
            self._check_origin(scope)
        except Problem as problem:
            response = Response(problem.encode(), problem.status, problem.headers, PROBLEM_TYPE)
            await response(scope, receive, with_headers(send))
            return
        await self._app(scope, receive, with_headers(send))

    def _is_trusted(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._proxies)

    def _forwarded(self, scope: Scope) -> Scope:
        """Take address, scheme and host from the headers of a trusted proxy; from no other client."""
        client = scope.get("client")
        by_proxy = client is not None and self._is_trusted(client[0])
        scope = {**scope, "waypost.by_trusted_proxy": by_proxy}
        if not by_proxy:
            return scope
        headers = Headers(scope=scope)
        # Each proxy appends the address it saw, some of them as a header of its own. The last one that is no proxy of
        # ours is the client.
        hops = [one.strip() for one in ",".join(headers.getlist("x-forwarded-for")).split(",") if one.strip()]
        while hops:
            address = without_port(hops.pop())
            scope["client"] = (address, 0)
            if not self._is_trusted(address):
                break
        if headers.get("x-forwarded-proto") in ("http", "https"):
            scope["scheme"] = headers["x-forwarded-proto"]
        host = headers.get("x-forwarded-host")
        if host:
            rest = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"] = [*rest, (b"host", host.encode("latin-1"))]
        return scope

    def _check_host(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        host = host_name(given[0].decode("latin-1")) if len(given) == 1 else ""
        if host not in self._hosts:
            raise Problem(
                421, "wrong-host", "this server does not serve the host of this request: give the name to `waypost web "
                "--host-name NAME`, or to create_app(hosts=[…])",
            )  # fmt: skip

    def _check_origin(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        site = headers.get("sec-fetch-site", "same-origin")
        is_write = scope["method"] not in SAFE_METHODS
        if is_write and site not in ("same-origin", "none"):
            raise Problem(403, "wrong-origin", "a page of another site made this request")
        origin = headers.get("origin")
        if not is_write or origin is None:
            return
        scheme, _, host = origin.partition("://")
        wanted = ("https",) if scope["scheme"] == "https" else ("http", "https")
        if scheme not in wanted or host.lower() != headers["host"].lower():
            raise Problem(403, "wrong-origin", "a page of another site made this request")


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def without_port(hop: str) -> str:
    """The address of a hop: some proxies write its port behind it, another one for each connection."""
    return host_name(hop) if hop.startswith("[") or hop.count(":") == 1 else hop


def with_headers(send: Send) -> Send:
    """Return a `send` that adds the security headers to each answer, and forbids to cache what says nothing of it."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_with_headers
