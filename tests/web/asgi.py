"""Requests to an ASGI app without a server or a socket: what a client sends, and what it gets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import unescape
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    @property
    def problem(self) -> str:
        """The kind of problem that this is."""
        assert self.header("content-type").startswith("application/problem+json"), self.text
        return str(self.json()["type"]).removeprefix("urn:waypost:problem:")


@dataclass(slots=True)
class Client:
    """Sends requests to an app on one event loop, and keeps cookies as a browser does."""

    app: Any
    runner: asyncio.Runner
    host: str = "localhost"
    address: str = "127.0.0.1"
    headers: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)
    root_path: str = ""
    scheme: str = "http"
    #: Whether it goes away as soon as it has sent its request: streams that have no end are left so.
    goes_away: bool = True

    def run(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self.runner.run(wait())

    def get(self, path: str, headers: Mapping[str, str] | None = None, **query: object) -> Answer:
        if query:
            path = f"{path}?{urlencode({name: str(value) for name, value in query.items()})}"
        return self.send("GET", path, headers=headers)

    def api(self, path: str, **query: object) -> Any:
        """Read a document of the API about the store `main`."""
        answer = self.get(f"/api/v1/stores/main{path}", None, **query)
        assert answer.status == 200, answer.text
        return answer.json()

    def write(
        self, path: str, body: object = None, *, method: str = "POST", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a write of the API about the store `main`, with a CSRF token as pages do."""
        token = self.get("/api/v1/session").json().get("csrf_token", "")
        sent = {"content-type": "application/json", "x-csrf-token": token} | dict(headers or {})
        content = b"" if body is None else json.dumps(body).encode()
        return self.send(method, f"/api/v1/stores/main{path}", content, headers=sent)

    def press(self, path: str, page: str, **changes: str) -> Answer:
        """Send the form of a page that has a field `once`, as its last button does, after changes to its fields."""
        form = next(one for one in re.findall(r"<form.*?</form>", page, re.DOTALL) if 'name="once"' in one)
        fields = {
            name: unescape(value) for name, value in re.findall(r'<input[^>]* name="(\w+)" value="([^"]*)"', form)
        }
        for name, choices in re.findall(r'<select[^>]* name="(\w+)".*?>(.*?)</select>', form, re.DOTALL):
            fields[name] = re.findall(r"<option selected>([^<]*)<", choices)[0]
        return self.form(path, fields | changes)

    def form(self, path: str, fields: Mapping[str, str], headers: Mapping[str, str] | None = None) -> Answer:
        sent = {"content-type": "application/x-www-form-urlencoded"} | dict(headers or {})
        return self.send("POST", path, urlencode(fields).encode(), headers=sent)

    def send(self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] | None = None) -> Answer:
        return self.run(self._send(method, path, body, dict(headers or {})))  # type: ignore[no-any-return]

    async def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        place, _, query = path.partition("?")
        given = {"host": self.host} | self.headers | headers
        if self.cookies:
            given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": self.scheme,
            "path": self.root_path + place, "raw_path": (self.root_path + place).encode(),
            "query_string": query.encode(), "root_path": self.root_path, "client": (self.address, 40_000),
            "server": ("127.0.0.1", 80), "headers": [
                # A value of several lines is sent as several headers.
                (name.encode(), line.encode("latin-1")) for name, value in given.items() for line in value.split("\n")
            ],
        }  # fmt: skip
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not parts and not self.goes_away:
                await asyncio.Event().wait()
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        got = [(name.decode().lower(), value.decode("latin-1")) for name, value in sent[0]["headers"]]
        for name, value in got:
            if name == "set-cookie":
                for cookie in SimpleCookie(value).values():
                    self.cookies[cookie.key] = cookie.value
        return Answer(sent[0]["status"], got, b"".join(message.get("body", b"") for message in sent[1:]))
