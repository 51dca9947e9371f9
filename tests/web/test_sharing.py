"""Several servers on one store: sessions, CSRF tokens and idempotency keys hold for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from tests.web.asgi import Client
from tests.web.conftest import Site
from waypost.errors import StoreUnavailable
from waypost.web import User, create_app, documents, sharing
from waypost.web.idempotency import KEY_CHARACTERS_MAX, KIND, run_once
from waypost.web.problems import Problem

SECRET = "correct horse battery"


async def find_user(request: Request) -> User:
    return User("mara", frozenset(("admin",)))


def pair(site: Site, **options: Any) -> tuple[Client, Client]:
    """Two servers on the store, and one browser: what a server sets, the other gets."""
    first, second = site.client(**options), site.client(**options)
    second.cookies = first.cookies
    return first, second


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "it did not happen within 30 seconds"
        time.sleep(0.05)


def csrf_of(client: Client) -> str:
    return str(client.get("/api/v1/session").json()["csrf_token"])


@pytest.mark.promise("FACE-3")
def test_a_session_of_one_server_is_accepted_by_another_until_it_is_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "CHECK_SECONDS", 0.3)
    first, second = pair(site, secret=SECRET)
    assert first.form("/sign-in", {"secret": SECRET}).status == 303
    assert second.get("/api/v1/session").status == 200
    assert csrf_of(first) == csrf_of(second)
    cookies = dict(first.cookies)
    assert first.form("/sign-out", {"csrf_token": csrf_of(first)}).status == 303
    first.cookies.clear()
    first.cookies.update(cookies)
    assert first.get("/api/v1/session").status == 401
    # The other server asks the store now and then.
    wait_for(lambda: second.get("/api/v1/session").status == 401)
    # One that has just started asks at once.
    third = site.client(secret=SECRET)
    third.cookies = cookies
    assert third.get("/api/v1/session").status == 401


@pytest.mark.promise("FACE-3")
@pytest.mark.parametrize("options", [{}, {"auth": find_user}], ids=["local", "auth"])
def test_a_csrf_token_of_one_server_is_accepted_by_another(site: Site, options: dict[str, Any]) -> None:
    site.post.publish("orders", 1)
    first, second = pair(site, **options)
    token = csrf_of(first)
    path = "/api/v1/stores/main/queues/orders/pause"
    assert second.send("POST", path, headers={"x-csrf-token": token[::-1] + "x"}).problem == "csrf"
    assert second.send("POST", path, headers={"x-csrf-token": token}).json()["changed"] is True


@pytest.mark.promise("FACE-3")
def test_a_write_sent_again_to_another_server_gets_the_first_answer(site: Site) -> None:
    site.bury("orders", 1, 2)
    first, second = pair(site)
    body, key = {"all": True, "limit": 1}, {"idempotency-key": "a"}
    answer = first.write("/queues/orders/redrive", body, headers=key)
    assert second.write("/queues/orders/redrive", body, headers=key).json() == answer.json()
    assert answer.json()["moved"] == 1
    assert site.post.ledger("orders").dead_kept == 1
    assert second.write("/queues/orders/redrive", {"all": True}, headers=key).problem == "key-reused"


@pytest.mark.promise("FACE-3")
def test_a_form_sent_twice_runs_once(site: Site) -> None:
    site.bury("orders", 1, 2)
    first, second = pair(site)
    fields = {"csrf_token": csrf_of(first), "once": "0123", "all": "true", "limit": "1"}
    for client in (first, second, first):
        assert client.form("/s/main/queues/orders/do/redrive", fields).status == 303
    assert site.post.ledger("orders").dead_kept == 1


@pytest.mark.promise("FACE-3")
def test_a_key_whose_write_never_answered_is_refused(site: Site) -> None:
    """The server ended in the middle of the write: nothing says whether it ran."""

    async def end() -> documents.Done:
        raise KeyboardInterrupt

    async def run() -> documents.Done:
        raise AssertionError("it ran again")

    async def use(action: Callable[[], Any]) -> None:
        await run_once(site.served, "k", ("user", "pause", "orders"), b"{}", documents.Done, action)

    with pytest.raises(KeyboardInterrupt):
        site.runner.run(use(end))
    with pytest.raises(Problem, match="its server ended"):
        site.runner.run(use(run))


def test_what_was_refused_may_run_later_and_what_failed_is_answered_again(memory: Site) -> None:
    runs: list[int] = []

    async def use(status: int) -> documents.Done:
        async def run() -> documents.Done:
            runs.append(status)
            if status:
                outcome = "not done" if status in (422, 503) else "unknown"
                raise Problem(status, "some", "text", outcome=outcome)
            return documents.Done(changed=True, text="done")

        return await run_once(memory.served, f"k{status in (409, 504) and status}", ("u",), b"{}", documents.Done, run)

    for status in (422, 503):
        with pytest.raises(Problem):
            memory.runner.run(use(status))
    assert memory.runner.run(use(0)).text == memory.runner.run(use(0)).text == "done"
    for status in (504, 409):
        for _ in range(2):
            with pytest.raises(Problem) as raised:
                memory.runner.run(use(status))
            assert (raised.value.status, raised.value.more) == (status, {"outcome": "unknown"})
    assert runs == [422, 503, 0, 504, 409]


def test_a_timer_that_was_moved_is_a_success_although_it_cannot_be_read_then(
    memory: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.post.publish("orders", 1, delay=60, key="k")
    client = memory.client()

    async def page(*given: Any, **options: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(memory.served, "page", page)
    answer = client.write("/queues/orders/reschedule", {"key": "k", "delay": 600})
    assert (answer.status, answer.json()["text"]) == (200, "k is moved")


def test_an_idempotency_key_is_bounded_and_its_answer_has_an_end(memory: Site) -> None:
    async def run() -> documents.Done:
        return documents.Done(changed=True, text="done")

    async def use(key: str) -> None:
        await run_once(memory.served, key, ("u",), b"{}", documents.Done, run)

    for key in ("", "k" * (KEY_CHARACTERS_MAX + 1), "a\nb"):
        with pytest.raises(Problem, match="1 to 128"):
            memory.runner.run(use(key))
    memory.runner.run(use("a"))
    (record,) = memory.post.records(KIND).records
    assert record.expires_at is not None
    assert "done" in msgspec.json.decode(record.data)["answer"]["text"]


def test_the_store_keeps_no_session_and_no_secret(memory: Site) -> None:
    client = memory.client(secret=SECRET)
    client.form("/sign-in", {"secret": SECRET})
    cookie = client.cookies["waypost_session"]
    client.form("/sign-out", {"csrf_token": csrf_of(client)})
    kept = repr([memory.post.records(kind) for kind in (sharing.ENDED_KIND, sharing.KEY_KIND)])
    assert memory.post.records(sharing.ENDED_KIND).records
    assert SECRET not in kept
    assert cookie not in kept


def test_a_read_only_server_writes_nothing(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client(read_only=True)
    assert client.get("/s/main").status == 200
    assert client.get("/api/v1/session").status == 200
    assert memory.post.records(sharing.KEY_KIND).records == []


def test_a_store_that_is_away_keeps_no_one_from_signing_in_and_out(memory: Site) -> None:
    from tests.unit.clients import ShakyStore
    from waypost import AsyncWaypost

    store = ShakyStore()
    post = AsyncWaypost(store=store, retry_budget=0)
    client = Client(create_app(post, secret=SECRET), memory.runner)
    store.faults = ["refuse"] * 1_000
    assert client.form("/sign-in", {"secret": SECRET}).status == 303
    token = csrf_of(client)
    cookies = dict(client.cookies)
    assert client.form("/sign-out", {"csrf_token": token}).status == 303
    client.cookies = cookies
    assert client.get("/api/v1/session").status == 401
    assert json.loads(client.get("/api/v1/session").body)["title"] == "Not signed in"
