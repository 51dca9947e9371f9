"""What failed in the last minutes, on the first page and in the API."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.web.conftest import Site
from waypost.errors import StoreUnavailable

pytestmark = pytest.mark.promise("FACE-3")


def test_the_first_page_has_the_newest_failures_by_error_with_links(site: Site) -> None:
    site.bury("orders", 1, 2, error="no such customer\nin detail")
    (newest,) = site.bury("mails", 3, error="<b>timeout</b>")
    site.post.publish("reports", 1)
    with site.post.receive("reports") as message:
        assert message is not None
        message.retry(after=600, reason="busy")
    client = site.client()
    found = client.api("/failures")
    groups = {one["queue"]: one for one in found["groups"]}
    assert (groups["orders"]["error"], groups["orders"]["count"]) == ("no such customer", 2)
    assert (groups["mails"]["count"], groups["mails"]["id"]) == (1, newest)
    times = [one["last_at"] for one in found["groups"]]
    assert times == sorted(times, reverse=True)
    assert {one["queue"]: (one["died"], one["retried"]) for one in found["queues"]} == {
        "orders": (2, 0), "mails": (1, 0), "reports": (0, 1),
    }  # fmt: skip
    page = client.get("/s/main").text
    assert "&lt;b&gt;timeout&lt;/b&gt;" in page
    assert f"/s/main/queues/mails/messages/{newest}" in page
    assert re.search(
        r"/queues/orders/do/bulk_redrive\?reason=rejected&amp;error_type=[^&]*&amp;error=no\+such\+customer", page
    )
    assert "/s/main/queues/reports?state=delayed" in page


def test_there_is_nothing_of_failures_on_a_healthy_day(memory: Site) -> None:
    memory.post.publish("orders", 1)
    with memory.post.receive("orders"):
        pass
    client = memory.client()
    assert client.api("/failures") == {"minutes": 15, "groups": [], "queues": []}
    page = client.get("/s/main").text
    assert "Failures" not in page
    assert 'id="failures"' in page, "an open page has no place for failures to come"


def test_dead_letters_are_read_again_only_when_there_are_others(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.bury("orders", 1, error="first")
    client, reads = memory.client(), list[str]()
    page = memory.served.page

    async def note(queue: str, *given: Any, **options: Any) -> Any:
        reads.append(queue)
        return await page(queue, *given, **options)

    monkeypatch.setattr(memory.served, "page", note)
    # Once more in another minute, if one begins meanwhile.
    for _ in range(5):
        assert [one["error"] for one in client.api("/failures")["groups"]] == ["first"]
    assert 1 <= len(reads) <= 2
    memory.bury("orders", 2, error="second")
    client.app.state.service.places["main"].watch._refreshed_at = float("-inf")
    for reading in client.app.state.service.places["main"].watch.readings.values():
        reading.read_at = 0.0
    assert {one["error"] for one in client.api("/failures")["groups"]} == {"first", "second"}


def test_of_very_many_failures_the_newest_are_read(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypost.web.failures.LETTERS_MAX", 3)
    memory.bury("orders", *range(5), error="many")
    client = memory.client()
    (group,) = client.api("/failures")["groups"]
    assert group["count"] == 3
    assert client.api("/failures")["queues"][0]["died"] == 5


def test_the_first_page_is_there_when_the_failures_cannot_be_read(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.bury("orders", 1, error="first")
    client = memory.client()

    async def refuse(*given: Any, **options: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(memory.served, "page", refuse)
    page = client.get("/s/main")
    assert (page.status, "orders" in page.text) == (200, True)
    assert client.get("/api/v1/stores/main/failures").status == 503
