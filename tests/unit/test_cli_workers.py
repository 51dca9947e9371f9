"""`waypost workers`: the workers listed, the queues without a worker, and the output for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from waypost import Waypost
from waypost.cli.main import main
from waypost.store.port import Heartbeat, ServedQueue

pytestmark = pytest.mark.promise("SEE-4")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


def register(url: str, *heartbeats: Heartbeat, namespace: str = "wp") -> None:
    with Waypost(url, namespace=namespace) as post:
        post.publish("orders", 1)
        post.publish("mails", 1)
        for heartbeat in heartbeats:
            post._call(post.store.heartbeat(heartbeat, 30_000))


def test_a_store_without_workers_is_reported_with_its_queues(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    register(url)
    assert main(["workers", url]) == 0
    assert capsys.readouterr().out == "no workers\nserved by no worker: mails, orders\n"


def test_workers_are_listed_with_what_they_serve(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    register(url, Heartbeat("web1:7:ab", "web1", 7, "0.1.0", queues=(ServedQueue("orders", 10, 3, 99, 1_500),)))
    assert main(["workers", url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "web1:7:ab  running, green",
        "    pid 7 on web1, waypost 0.1.0, up 0 s",
        "    orders         3 of 10 in flight, 99 handled, claimed 1.5 s before",
        "1 worker",
        "served by no worker: mails",
    ]


@pytest.mark.promise("STORE-7")
def test_workers_of_several_releases_are_counted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    register(
        url, *(Heartbeat(name, version=version) for name, version in (("a", "0.2.0"), ("b", "0.3.0"), ("c", "0.2.0")))
    )
    assert main(["workers", url]) == 0
    assert "\n3 workers\nof several releases: 2 workers of 0.2.0, 1 worker of 0.3.0\n" in capsys.readouterr().out


def test_an_unhealthy_worker_gives_an_exit_code_of_its_own_and_its_reason(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queues = (ServedQueue("orders"), ServedQueue("mails"))
    register(url, Heartbeat("a", status="red", reasons=("queue orders: stuck",), queues=queues, unlisted=2))
    assert main(["workers", url]) == 1
    printed = capsys.readouterr().out
    assert "\n    queue orders: stuck\n" in printed
    assert "0 handled, no claim yet\n" in printed
    assert "\n    and 2 more queues\n" in printed
    assert "served by no worker" not in printed


def test_json_output_has_every_field(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    register(url, Heartbeat("a", "host", 7, queues=(ServedQueue("orders", 10),)), namespace="shop")
    assert main(["workers", url, "--namespace", "shop", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["unserved"] == ["mails"]
    (worker,) = printed["workers"]
    assert (worker["name"], worker["status"], worker["queues"][0]["concurrency"]) == ("a", "green", 10)


def test_an_invalid_url_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workers", "nowhere://"]) == 2
    assert capsys.readouterr().err.startswith("waypost: the scheme nowhere:// is not known")
