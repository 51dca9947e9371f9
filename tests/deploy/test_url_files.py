"""The URL of a store in a file: no password in arguments or variables, and none in an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from waypost import AsyncWaypost, Waypost
from waypost.cli.main import main
from waypost.errors import InvalidUrl

pytestmark = pytest.mark.promise("SEE-6")


def test_a_client_reads_its_url_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "waypost_url"
    path.write_text(f"\n sqlite:///{tmp_path / 'orders.db'} \n")
    with Waypost(f"file://{path}") as post:
        post.publish("orders", 1)
        assert post.store.kind == "sqlite"
    assert AsyncWaypost(f"file://{path}").store.kind == "sqlite"


@pytest.mark.parametrize("form", ["option", "argument", "variable"])
def test_a_command_reads_it_too(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "waypost url"
    path.write_text(f"sqlite:///{tmp_path / 'orders.db'}")
    given = f"file://{str(path).replace(' ', '%20')}"
    if form == "variable":
        monkeypatch.setenv("WAYPOST_URL", given)
    chosen = {"option": ["--url", given], "argument": [given], "variable": []}[form]
    assert main(["publish", "orders", '{"id": 1}', *chosen]) == 0
    capsys.readouterr()
    assert main(["queues", "--json", *chosen]) == 0
    assert "orders" in json.dumps(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (None, "No such file"),
        (b"", "one line"),
        (b"valkey://u:hunter2@a:1\nvalkey://u:hunter2@b:2", "one line"),
        (b"file:///another", "one line"),
        (b"hunter2" * 2_000, "one line"),
        (b"\xff\xfehunter2", "not text"),
    ],
)
def test_a_file_without_one_url_is_named_and_not_quoted(contents: bytes | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "waypost_url"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(InvalidUrl, match=text) as refused:
        Waypost(f"file://{path}")
    assert str(path) in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["file://waypost_url", "file://", "file:///a%00b"])
def test_the_path_is_absolute(url: str) -> None:
    with pytest.raises(InvalidUrl, match="three slashes"):
        Waypost(url)
