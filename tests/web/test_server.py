"""`waypost web` as a program: what it binds to, what it refuses, and that it serves; and the app below a prefix."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from scripts import http_reference
from tests.web.asgi import Client
from tests.web.conftest import Site
from waypost import Waypost
from waypost.cli.main import main
from waypost.errors import ConfigurationError
from waypost.web import create_app
from waypost.web.server import check_bind, read_secret, read_tokens

pytestmark = pytest.mark.promise("FACE-3")
SECRET = "correct-horse-battery"
SECONDS_MAX = 60


@contextmanager
def serve(*arguments: str, **environment: str) -> Iterator[tuple[dict[str, Any], int]]:
    """A server of its own process: what it printed, and its port."""
    command = [sys.executable, "-m", "waypost.cli.main", "web", "--port", "0", "--json", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr is not None else ""
            printed = json.loads(line)
            yield printed, int(printed["url"].rstrip("/").rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=SECONDS_MAX)


def send_request(port: int, path: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_it_serves_several_stores_on_loopback_and_wants_its_secret(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("one", "two")]
    for url in urls:
        with Waypost(url) as post:
            post.publish("orders", 1)
    stores = ["--store", f"one={urls[0]}", "--store", f"two={urls[1]}"]
    with serve(*stores, WAYPOST_WEB_SECRET=SECRET) as (printed, port):
        assert printed["stores"] == ["one", "two"]
        assert printed["url"].startswith("http://127.0.0.1:")
        assert send_request(port, "/api/v1/stores")[0] == 401
        status, stored = send_request(port, "/api/v1/stores", Authorization=f"Bearer {SECRET}")
        assert (status, [one["name"] for one in stored["stores"]]) == (200, ["one", "two"])
        status, queues = send_request(port, "/api/v1/stores/two/queues", Authorization=f"Bearer {SECRET}")
        assert (status, queues["queues"][0]["name"]) == (200, "orders")
        assert send_request(port, "/api/v1/stores", Host="evil.example", Authorization=f"Bearer {SECRET}")[0] == 421


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "ops.example.com"])
def test_another_address_than_loopback_wants_a_secret(host: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a secret"):
        check_bind(host, has_access_control=False)
    check_bind(host, has_access_control=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_wants_none(host: str) -> None:
    assert check_bind(host, has_access_control=False) is None  # type: ignore[func-returns-value]


def test_the_command_refuses_what_would_be_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WAYPOST_WEB_SECRET", raising=False)
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    with Waypost(url) as post:
        post.publish("orders", 1)
    short = tmp_path / "short"
    short.write_text("hunter2\n")
    for arguments, sentence in (
        (["--host", "0.0.0.0"], "needs a secret"),
        (["--secret-file", str(short)], "at least 16"),
        (["--secret-file", str(tmp_path / "none")], "cannot be read"),
        (["--auth-header", "X-User"], "--trusted-proxy"),
        (["--tls-cert", "cert.pem"], "belong together"),
        (["--host-name", "ops.example.com"], "secret"),
        (["--store", f"main={url}"], "two stores"),
    ):
        assert main(["web", url, "--port", "0", *arguments]) == 2
        printed = capsys.readouterr().err
        assert sentence in printed
        assert "hunter2" not in printed


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    monkeypatch.setenv("WAYPOST_WEB_SECRET", "from-the-environment")
    assert read_secret(str(path)) == SECRET
    assert read_secret(None) == "from-the-environment"
    monkeypatch.delenv("WAYPOST_WEB_SECRET")
    assert read_secret(None) is None
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="empty"):
        read_secret(str(path))


def test_tokens_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(f'[grafana]\nsecret = "{SECRET}"\nscopes = ["read"]\n')
    (token,) = read_tokens(str(path))
    assert (token.name, token.scopes) == ("grafana", frozenset(("read",)))
    for wrong in ("x", "[a]\n", f'[a]\nsecret = "{SECRET}"\n', f'[a]\nsecret = "{SECRET}"\nscopes = ["root"]\n'):
        path.write_text(wrong)
        with pytest.raises(ConfigurationError):
            read_tokens(str(path))


def test_the_app_is_mounted_below_a_prefix_of_another_app(memory: Site) -> None:
    memory.post.publish("orders", 1)
    outer = Starlette(routes=[Mount("/tools/queues", create_app(memory.served))])
    client = Client(outer, memory.runner)
    session = client.get("/tools/queues/api/v1/session")
    assert "path=/tools/queues" in session.header("set-cookie").lower()
    sent = {"x-csrf-token": session.json()["csrf_token"]}
    paused = client.send("POST", "/tools/queues/api/v1/stores/main/queues/orders/pause", headers=sent)
    assert paused.json()["changed"] is True
    assert client.get("/api/v1/stores").status == 404


def test_the_reference_page_matches_the_code() -> None:
    assert http_reference.PAGE.read_text() == http_reference.write_page(), "run make docs"
