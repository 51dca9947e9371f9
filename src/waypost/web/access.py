"""Who makes a request and what it may do: tokens, sessions, CSRF tokens, and a throttle for wrong secrets.

A request is made by the first of these that fits:

    bearer    `Authorization: Bearer …` with the secret of a token; for scripts
    session   a cookie that the sign-in page gave for the secret of a token
    auth      the function that the application gave (`auth=`)
    local     without tokens and `auth=`: a client on this machine

A browser sends the last three by itself, also when another site makes it. So each write that is not sent with a bearer
token must carry a CSRF token, which another site cannot read.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from hashlib import sha256
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request

from waypost.errors import ConfigurationError
from waypost.web.problems import Problem
from waypost.web.sharing import Sharing

Scope = Literal["read", "operate", "admin", "bodies"]
SCOPES: tuple[Scope, ...] = ("read", "operate", "admin", "bodies")
ALL_SCOPES: frozenset[str] = frozenset(SCOPES)
#: What each scope includes. Bodies are apart: an operator need not see customers' data.
INCLUDED: dict[str, frozenset[str]] = {
    "read": frozenset(("read",)),
    "operate": frozenset(("read", "operate")),
    "admin": frozenset(("read", "operate", "admin")),
    "bodies": frozenset(("bodies",)),
}
#: Shorter secrets can be guessed.
SECRET_CHARACTERS_MIN = 16
SESSION_SECONDS = 12 * 3600
SESSION_COOKIE, VISIT_COOKIE = "waypost_session", "waypost_visit"
CSRF_HEADER, CSRF_FIELD = "x-csrf-token", "csrf_token"
#: So many wrong secrets of one address in so many seconds; further ones are refused unread.
FAILURES_MAX, FAILURES_SECONDS = 5, 60.0
#: What is remembered of addresses is bounded: the oldest is forgotten.
REMEMBERED_MAX = 10_000


class User(Struct, frozen=True):
    """Who makes a request, and its scopes: `read`, `operate` (includes read), `admin` (includes both), `bodies`."""

    name: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        """Whether a scope of this user includes this one."""
        return any(scope in INCLUDED.get(one, ()) for one in self.scopes)


Auth = Callable[[Request], Awaitable[User | None]]
V = TypeVar("V")


class Token(Struct, frozen=True):
    """A secret with a name and scopes: for scripts as a bearer token, for people on the sign-in page."""

    name: str
    secret: str
    scopes: frozenset[str] = ALL_SCOPES

    def __post_init__(self) -> None:
        check_scopes(self.scopes)
        if not self.name or "|" in self.name:
            raise ConfigurationError(f"the name of a token is text without |, not {self.name!r}")
        if len(self.secret) < SECRET_CHARACTERS_MIN:
            raise ConfigurationError(
                f"the secret of {self.name} has {len(self.secret)} characters: use at least {SECRET_CHARACTERS_MIN}, "
                "as from `openssl rand -hex 32`"
            )

    def __repr__(self) -> str:
        return f"Token(name={self.name!r}, scopes={sorted(self.scopes)})"


def check_scopes(scopes: Iterable[str]) -> frozenset[str]:
    """Return scopes as a set, or raise `ConfigurationError`."""
    given = frozenset(scopes)
    if not given or not given <= ALL_SCOPES:
        raise ConfigurationError(f"scopes are some of {', '.join(SCOPES)}, not {', '.join(sorted(given)) or 'none'}")
    return given


class Caller(Struct, frozen=True):
    """The user of one request, and how it was recognised."""

    user: User
    via: Literal["bearer", "session", "auth", "local"]
    #: What the CSRF token of this browser is made from.
    nonce: str
    #: The visit cookie is new and must be set.
    is_new_visit: bool = False


class Session(Struct, frozen=True):
    """What the cookie of a session says, once its signature was checked."""

    user: User
    nonce: str
    until: int


class Access:
    """Decides about requests. It keeps nothing but failed attempts; what servers share is in the store."""

    def __init__(
        self,
        tokens: Sequence[Token],
        auth: Auth | None,
        clock: Callable[[], float] = time.time,
        sharing: Sharing | None = None,
    ) -> None:
        self._tokens = {token.name: token for token in tokens}
        if len(self._tokens) != len(tokens):
            raise ConfigurationError("two tokens have the same name")
        self._auth = auth
        self._clock = clock
        self._throttle = Throttle(clock)
        self._sharing = sharing or Sharing(())
        # The same secrets give the same key, so that several processes and restarts accept each other's sessions.
        secrets = sorted(token.secret for token in tokens)
        self._key = sha256(msgspec.json.encode(secrets)).digest() if secrets else b""

    @property
    def has_sign_in(self) -> bool:
        """Whether there is a secret to sign in with."""
        return bool(self._tokens)

    @property
    def is_local_only(self) -> bool:
        """Whether only clients of this machine are served, all of them with every scope."""
        return not self._tokens and self._auth is None

    # ---- who ---------------------------------------------------------------------------------------------------

    async def caller_of(self, request: Request) -> Caller | None:
        """Return who makes a request; None if it must sign in. Raises `Problem` for a wrong bearer token."""
        given = request.headers.get("authorization", "")
        if given[:7].lower() == "bearer " and self._tokens:
            return Caller(self._by_secret(given[7:].strip(), address_of(request)), "bearer", "")
        session = self._read_session(request.cookies.get(SESSION_COOKIE, ""))
        if session is not None and not await self._sharing.is_ended(session.nonce):
            return Caller(session.user, "session", session.nonce)
        if not self._tokens:
            self._key = await self._sharing.key()
        visit = request.cookies.get(VISIT_COOKIE, "")
        is_new = len(visit) != 32 or not visit.isalnum()
        nonce = os.urandom(16).hex() if is_new else visit
        if self._auth is not None:
            found = await self._auth(request)
            return None if found is None else Caller(found, "auth", nonce, is_new)
        if self.is_local_only and is_loopback(address_of(request)):
            refuse_proxied(request)
            return Caller(User("local", ALL_SCOPES), "local", nonce, is_new)
        return None

    def _by_secret(self, secret: str, address: str) -> User:
        """Return the user of a secret, or raise `Problem`."""
        self._throttle.check(address)
        given, found = sha256(secret.encode()).digest(), None
        for token in self._tokens.values():  # all of them, so that the time says nothing
            if hmac.compare_digest(given, sha256(token.secret.encode()).digest()):
                found = token
        if found is None:
            self._throttle.failed(address)
            raise Problem(401, "wrong-secret", "this secret is not known", headers={"WWW-Authenticate": "Bearer"})
        return User(found.name, found.scopes)

    # ---- sessions ----------------------------------------------------------------------------------------------

    def sign_in(self, secret: str, address: str) -> tuple[User, str]:
        """Return the user of a secret and the value of its session cookie, or raise `Problem`."""
        user = self._by_secret(secret, address)
        content = f"{user.name}|{int(self._clock()) + SESSION_SECONDS}|{os.urandom(16).hex()}".encode()
        return user, f"{_encode(content)}.{_encode(self._sign(b'session', content))}"

    async def sign_out(self, cookie: str) -> None:
        """End a session: its cookie is not accepted any more, by any server of the same stores."""
        session = self._read_session(cookie)
        if session is not None:
            await self._sharing.end(session.nonce, session.until - self._clock())

    def _read_session(self, cookie: str) -> Session | None:
        content, _, signature = cookie.partition(".")
        try:
            data, signed = _decode(content), _decode(signature)
        except ValueError:
            return None
        if not hmac.compare_digest(signed, self._sign(b"session", data)):
            return None
        name, until, nonce = data.decode().split("|")
        token = self._tokens.get(name)
        if token is None or int(until) < self._clock():
            return None
        return Session(User(token.name, token.scopes), nonce, int(until))

    # ---- CSRF --------------------------------------------------------------------------------------------------

    def csrf_token(self, caller: Caller) -> str:
        """The token that this browser must send with each write; empty for bearer tokens, which need none."""
        if caller.via == "bearer":
            return ""
        return _encode(self._sign(b"csrf", f"{caller.nonce}|{caller.user.name}".encode()))

    def check_csrf(self, caller: Caller, given: str) -> None:
        """Refuse a write that this browser's own pages did not make."""
        if caller.via == "bearer":
            return
        if caller.is_new_visit or not hmac.compare_digest(given.encode(), self.csrf_token(caller).encode()):
            raise Problem(
                403, "csrf", "this write has no valid CSRF token: load the page again; scripts get one from "
                "GET /api/v1/session and send it as X-CSRF-Token, or send a bearer token",
            )  # fmt: skip

    def _sign(self, purpose: bytes, content: bytes) -> bytes:
        return hmac.digest(self._key, purpose + b"\0" + content, "sha256")


class Throttle:
    """Counts wrong secrets by address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Refuse an address that sent too many wrong secrets lately."""
        now = self._clock()
        recent = [at for at in self._failures.get(network_of(address), ()) if now - at < FAILURES_SECONDS]
        if len(recent) >= FAILURES_MAX:
            wait = max(1, round(FAILURES_SECONDS - (now - recent[0])))
            raise Problem(
                429, "throttled", f"too many wrong secrets from this address: wait {wait} seconds",
                headers={"Retry-After": str(wait)},
            )  # fmt: skip

    def failed(self, address: str) -> None:
        """Count a wrong secret."""
        network, now = network_of(address), self._clock()
        recent = [at for at in self._failures.pop(network, ()) if now - at < FAILURES_SECONDS]
        _remember(self._failures, network, [*recent, now])


def header_auth(header: str, scopes: Iterable[str]) -> Auth:
    """Return an `auth` that takes the user's name from a header that a trusted proxy sets.

    The app must be created with `trusted_proxies`: a request that does not come from one of them has no user, whatever
    it sends. The proxy must remove the header from what its clients send.
    """
    given = check_scopes(scopes)
    name_of = header.lower()

    async def auth(request: Request) -> User | None:
        # A second header came from a client whose proxy only adds its own.
        names = [name.strip() for name in request.headers.getlist(name_of)]
        if len(names) != 1 or not names[0] or not request.scope.get("waypost.by_trusted_proxy", False):
            return None
        return User(names[0][:128], given)

    return auth


#: Headers by which a proxy says for whom it asks.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


def refuse_proxied(request: Request) -> None:
    """Refuse what comes through a proxy on this machine where every client of this machine has every right."""
    found = next((name for name in PROXY_HEADERS if name in request.headers), None)
    if found is not None:
        raise Problem(
            403, "proxied", f"this request came through a proxy (it has the header {found}): without a secret every "
            "client of that proxy would have all rights: set WAYPOST_WEB_SECRET, and name the proxy with "
            "--trusted-proxy; or connect without it",
        )  # fmt: skip


def address_of(request: Request) -> str:
    """The address of the client: of the last hop that is no trusted proxy."""
    return request.client.host if request.client is not None else ""


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def network_of(address: str) -> str:
    """What is throttled together: an IPv4 address, or the /64 of an IPv6 address, all of which one client can have."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def _remember(known: OrderedDict[str, V], key: str, value: V) -> None:
    known[key] = value
    while len(known) > REMEMBERED_MAX:
        known.popitem(last=False)


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
