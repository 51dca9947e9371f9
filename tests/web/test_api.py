"""The HTTP API on every store: what it reads, what it changes, and what it refuses."""

from __future__ import annotations

import json
import shlex
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tests.web.conftest import Site
from waypost.cli.main import make_parser
from waypost.identity import Operation
from waypost.web import create_app, documents
from waypost.web.actions import ACTIONS
from waypost.web.api import READS
from waypost.web.openapi import openapi_document
from waypost.web.service import REQUEST_BYTES_MAX

# ---- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-3")
def test_an_empty_store_is_well(site: Site) -> None:
    client = site.client()
    assert client.api("/health")["sentence"] == "All is well: the store is empty."
    assert client.api("/queues") == {"queues": [], "total": 0, "next": None}
    assert client.api("/workers") == {"workers": [], "releases": {}}
    assert client.api("/schedules") == {"schedules": []}
    assert client.api("/timers") == {"queues": [], "total": 0}
    assert client.get("/api/v1/stores").json()["stores"][0]["name"] == "main"


@pytest.mark.promise("FACE-3")
def test_queues_with_alerts_come_first_with_the_reason_and_the_next_step(site: Site) -> None:
    site.post.publish("calm", 1, delay=3600)
    site.post.publish("served", 1)
    with site.post.receive("served"):
        pass
    site.bury("failing", *range(12), reason="rejected", error="no such customer")
    site.post.publish("waiting", 1)
    client = site.client()
    listed = client.api("/queues")
    assert [queue["name"] for queue in listed["queues"]] == ["failing", "waiting", "calm", "served"]
    by_name = {queue["name"]: queue for queue in listed["queues"]}
    assert by_name["failing"]["level"] == "alarm"
    assert by_name["failing"]["alerts"][0]["text"] == "12 messages died in the last 15 minutes"
    assert by_name["waiting"]["alerts"][0]["kind"] == "unserved"
    assert by_name["served"]["level"] == "calm"
    assert all(alerts["next_step"] for queue in listed["queues"] for alerts in queue["alerts"])
    assert client.api("/health")["sentence"] == (
        "Queue failing needs attention: 12 messages died in the last 15 minutes."
    )
    assert [queue["name"] for queue in client.api("/queues", order="name", name_contains="a")["queues"]] == [
        "calm", "failing", "waiting",
    ]  # fmt: skip


@pytest.mark.promise("FACE-3")
def test_lists_are_paged_by_cursor(site: Site) -> None:
    for number in range(5):
        site.post.publish(f"q{number}", 1)
    ids = [published.id for published in site.post.publish_many("orders", range(5))]
    client = site.client()
    names, cursor = [], None
    while True:
        page = client.api("/queues", order="name", limit=2, **({"cursor": cursor} if cursor else {}))
        names += [queue["name"] for queue in page["queues"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert names == ["orders", *(f"q{number}" for number in range(5))]
    found, cursor = [], None
    while True:
        page = client.api("/queues/orders/messages", limit=2, **({"cursor": cursor} if cursor else {}))
        assert len(page["messages"]) <= 2
        found += [message["id"] for message in page["messages"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert found == ids


def test_a_cursor_of_another_listing_is_refused(site: Site) -> None:
    site.post.publish_many("orders", range(5))
    client = site.client()
    cursor = client.api("/queues/orders/messages", limit=2)["next"]
    path = "/api/v1/stores/main/queues/orders/messages"
    for query in ({"state": "dead", "cursor": cursor}, {"cursor": "x" + cursor}, {"cursor": "'; --"}, {"cursor": "A"}):
        answer = client.get(path, **query)
        assert (answer.status, answer.problem) == (422, "invalid-input")
    assert client.get("/api/v1/stores/main/queues", cursor="-1").status == 422


@pytest.mark.promise("FACE-3")
def test_messages_are_filtered_and_returned_whole(site: Site) -> None:
    published = site.post.publish(
        "orders", {"id": 7}, key="k", group="acme", priority=8, headers={"a": "b"}, correlation_id="c"
    )
    site.post.publish("orders", b"\0\xff")
    client = site.client()
    (found,) = client.api("/queues/orders/messages", key="k")["messages"]
    assert found["id"] == published.id
    assert (found["group"], found["priority"], found["headers"], found["correlation_id"]) == (
        "acme",
        8,
        {"a": "b"},
        "c",
    )
    assert found["body"] == {
        "form": "json", "content_type": "application/json", "size": 8, "text": '{"id":7}', "truncated": False,
    }  # fmt: skip
    (other,) = client.api("/queues/orders/messages", state="ready", limit=1, group="none")["messages"] or [None]
    assert other is None
    bodies = [message["body"]["form"] for message in client.api("/queues/orders/messages")["messages"]]
    assert bodies == ["json", "base64"]


@pytest.mark.promise("FACE-3", "SEE-5")
def test_a_message_has_its_timeline_also_after_it_is_done(site: Site) -> None:
    published = site.post.publish("orders", 1)
    with site.post.receive("orders") as message:
        assert message is not None
        message.retry(after=0)
    with site.post.receive("orders", wait=5) as message:
        assert message is not None
    detail = site.client().api(f"/queues/orders/messages/{published.id}")
    assert (detail["condition"], detail["message"]) == ("done", None)
    timeline = detail["timeline"]
    assert timeline["whole"]
    events = [step["event"] for step in timeline["steps"] if step["event"] != "promoted"]
    assert events == ["published", "claimed", "retried", "claimed", "done"]
    again = [step for step in timeline["steps"] if step["event"] == "claimed"][1]
    assert again["cause"] == "retried"
    assert "because its handler failed" in again["text"]
    assert [span["kind"] for span in timeline["spans"] if span["kind"] != "delayed"][:2] == ["ready", "running"]
    assert all(span["end"] for span in timeline["spans"])


@pytest.mark.promise("FACE-3")
def test_a_message_is_found_by_its_id_in_any_queue_and_after_its_end(site: Site) -> None:
    for queue in ("a", "b", "c"):
        site.post.publish(queue, 1)
    waiting = site.post.publish("b", 2)
    done = site.post.publish("d", 3)
    with site.post.receive("d"):
        pass
    client = site.client()
    (found,) = client.api("/search", id=waiting.id)["found"]
    assert (found["queue"], found["id"], found["condition"]) == ("b", waiting.id, "ready")
    (found,) = client.api("/search", id=done.id)["found"]
    assert (found["queue"], found["condition"]) == ("d", "done")
    assert client.api("/search", id=waiting.id)["queues_searched"] == 4
    unknown = client.api("/search", id="0" * 24)
    assert unknown["found"] == []
    assert client.get("/api/v1/stores/main/search", id="<script>").problem == "invalid-id"


@pytest.mark.promise("FACE-3", "DEAD-2")
def test_dead_letters_are_grouped_by_reason_and_error(site: Site) -> None:
    first = site.bury("orders", 1, 2, 3, reason="rejected", error="no such customer")
    site.bury("orders", 4, reason="undecodable")
    groups = site.client().api("/queues/orders/dead")
    assert (groups["searched"], groups["total"]) == (4, 4)
    assert [(group["reason"], group["error"], group["count"]) for group in groups["groups"]] == [
        ("rejected", "no such customer", 3), ("undecodable", None, 1),
    ]  # fmt: skip
    assert groups["groups"][0]["samples"] == first


@pytest.mark.promise("FACE-3")
def test_a_queue_shows_its_settings_ledger_and_limits(site: Site) -> None:
    site.post.configure("orders", max_running=1, rate="100/m", lease=30)
    site.post.publish_many("orders", [1, 2])
    site.post.pause("orders")
    detail = site.client().api("/queues/orders", minutes=5)
    assert detail["settings"]["lease"] == 30.0
    assert detail["settings"]["rate"] == "100/m"
    assert (detail["ledger"]["published"], detail["ledger"]["balance"]) == (2, 0)
    assert detail["queue"]["alerts"][0]["text"] == "paused, 2 messages ready"
    assert any("max_running" in limit for limit in detail["limits"])
    assert sum(minute["counts"].get("published", 0) for minute in detail["minutes"]) == 2


@pytest.mark.promise("FACE-3", "PUB-7")
def test_a_queue_is_full_by_what_waits_and_not_by_what_runs(site: Site) -> None:
    site.post.configure("orders", max_pending=2)
    site.post.publish_many("orders", [1, 2])
    with site.post.receive("orders"):
        assert site.client().api("/queues/orders")["limits"] == []
        site.post.publish("orders", 3)
        (limit,) = site.client().api("/queues/orders")["limits"]
        assert limit.startswith("It is full (max_pending 2)")


@pytest.mark.promise("FACE-3", "QUEUE-5", "QUEUE-7")
def test_a_queue_shows_what_limits_its_groups(site: Site) -> None:
    site.post.configure("orders", order="group", group_max_running=3, group_rate="5/m", group_max_pending=9)
    site.post.publish_many("orders", [1, 2], group="acme")
    limits = site.client().api("/queues/orders")["limits"]
    names = ("(order)", "(group_max_running)", "(group_rate)", "(group_max_pending)")
    assert [name in limit for name, limit in zip(names, limits, strict=True)] == [True] * 4
    site.post.pause_group("orders", "acme")
    site.post.configure("orders", order=None, group_max_running=None, group_rate=None, group_max_pending=None)
    site.post.configure("orders", fair=True)
    operation = Operation(b"a worker", 1, time.time_ns() // 1_000_000, b"its mark")
    site.post._call(site.post.store.claim("orders", 5, operation, worker="w", sleeper="w"))
    assert ["groups list" in limit for limit in site.client().api("/queues/orders")["limits"]] == [True]


@pytest.mark.promise("FACE-3")
def test_schedules_timers_and_workers_are_listed(site: Site) -> None:
    site.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", tz="Europe/Madrid", body={})
    site.post.publish("mails", 1, delay=600, key="welcome")
    client = site.client()
    (schedule,) = client.api("/schedules", fires=3)["schedules"]
    assert (schedule["name"], schedule["tz"], len(schedule["next_fires"])) == ("rollup", "Europe/Madrid", 3)
    (timer,) = client.api("/timers")["queues"]
    assert (timer["queue"], timer["timers"]) == ("mails", 1)
    assert 0 < timer["next_due_seconds"] <= 600

    @site.post.handler("mails")
    def send(body: object) -> None: ...

    with site.post.worker():
        deadline = datetime.now(UTC) + timedelta(seconds=20)
        while not (workers := client.api("/workers")["workers"]):
            assert datetime.now(UTC) < deadline, "the worker did not register"
        assert workers[0]["queues"][0]["name"] == "mails"


def test_what_is_not_there_is_a_problem_document(site: Site) -> None:
    client = site.client()
    assert client.get("/api/v1/stores/other/queues").problem == "unknown-store"
    assert client.get("/api/v1/stores/main/queues/none").problem == "unknown-queue"
    assert client.get("/api/v1/stores/main/queues/..%2f/messages").status in (404, 422)
    site.post.publish("orders", 1)
    answer = client.get(f"/api/v1/stores/main/queues/orders/messages/{'0' * 24}")
    assert (answer.status, answer.problem) == (404, "unknown-message")
    assert set(answer.json()) == {"type", "title", "status", "detail"}
    assert client.get("/api/v1/nothing").problem == "no-such-operation"
    assert client.send("DELETE", "/api/v1/stores").status == 405
    for query in ({"limit": 0}, {"limit": 201}, {"limit": "many"}, {"state": "lost"}, {"colour": "red"}):
        assert client.get("/api/v1/stores/main/queues/orders/messages", **query).status == 422
    assert client.get("/api/v1/stores/main/queues/orders/messages?limit=1&limit=2").status == 422


# ---- writing ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-3", "QUEUE-1")
def test_a_queue_is_paused_and_resumed(site: Site) -> None:
    site.post.publish("orders", 1)
    client = site.client()
    assert client.write("/queues/orders/pause").json() == {"changed": True, "text": "orders is paused"}
    assert site.post.stats("orders").paused
    assert client.write("/queues/orders/pause").json()["changed"] is False
    assert client.write("/queues/orders/resume").json()["changed"] is True
    assert not site.post.stats("orders").paused


@pytest.mark.promise("FACE-3", "QUEUE-2")
def test_settings_are_changed_after_a_preview_of_the_difference(site: Site) -> None:
    site.post.publish("orders", 1)
    client = site.client()
    planned = client.write("/queues/orders/settings", {"lease": 30, "rate": "5/s", "dry_run": True}, method="PATCH")
    assert planned.json()["changes"] == [
        {"name": "lease", "before": 60.0, "after": 30.0}, {"name": "rate", "before": None, "after": "5/s"},
    ]  # fmt: skip
    assert site.client().api("/queues/orders")["settings"]["lease"] == 60.0
    done = client.write("/queues/orders/settings", {"lease": 30, "max_pending": None}, method="PATCH").json()
    assert (done["changed"], done["text"]) == (True, "changed lease of orders")
    assert client.api("/queues/orders")["settings"]["lease"] == 30.0
    wrongs: tuple[Any, ...] = (
        {"lease": -1}, {"no_such": 1}, {}, {"rate": "often"}, {"overload": "explode"}, [], {"lease": "x"},
    )  # fmt: skip
    for wrong in wrongs:
        assert client.write("/queues/orders/settings", wrong, method="PATCH").status == 422


@pytest.mark.promise("FACE-3", "DEAD-2")
def test_dead_letters_are_redriven_by_id_by_reason_and_all(site: Site) -> None:
    ids = site.bury("orders", 1, 2, 3)
    site.bury("orders", 4, reason="undecodable")
    client = site.client()
    assert client.write("/queues/orders/redrive", {}).problem == "no-choice"
    assert client.write("/queues/orders/redrive", {"all": True, "reason": "rejected"}).problem == "no-choice"
    one = client.write("/queues/orders/redrive", {"ids": ids[:1]}).json()
    assert (one["moved"], one["more"]) == (1, False)
    assert client.write("/queues/orders/redrive", {"reason": "undecodable", "rate": "1000/s"}).json()["moved"] == 1
    rest = client.write("/queues/orders/redrive", {"all": True, "limit": 1}).json()
    assert (rest["moved"], rest["more"]) == (1, True)
    assert client.write("/queues/orders/redrive", {"all": True}).json()["moved"] == 1
    assert site.post.ledger("orders").dead_kept == 0
    assert client.write("/queues/orders/redrive", {"all": True, "rate": "1/h"}).problem == "too-slow"


@pytest.mark.promise("FACE-3")
def test_what_cannot_be_undone_wants_the_name_of_the_queue(site: Site) -> None:
    site.post.publish_many("orders", range(3))
    client = site.client()
    assert client.write("/queues/orders/purge", {"state": "ready", "confirm": "order"}).problem == "not-confirmed"
    assert client.write("/queues/orders/remove", {"confirm": "orders"}).problem == "queue-not-empty"
    assert client.write("/queues/orders/purge", {"state": "leased", "confirm": "orders"}).status == 422
    assert client.write("/queues/orders/purge", {"state": "ready", "confirm": "orders"}).json()["removed"] == 3
    assert client.write("/queues/orders/remove", {"confirm": "orders"}).json()["changed"] is True
    assert site.post.queues() == []


@pytest.mark.promise("FACE-3", "LEASE-12")
def test_a_message_is_cancelled_by_id_or_key(site: Site) -> None:
    published = site.post.publish("orders", 1)
    site.post.publish("orders", 2, key="k")
    client = site.client()
    assert client.write("/queues/orders/cancel", {"id": published.id}).json()["status"] == "cancelled"
    assert client.write("/queues/orders/cancel", {"key": "k"}).json()["status"] == "cancelled"
    assert client.write("/queues/orders/cancel", {"id": published.id}).json()["changed"] is False
    assert client.write("/queues/orders/cancel", {}).problem == "no-choice"


@pytest.mark.promise("FACE-3", "TIMER-1")
def test_a_timer_is_moved_by_its_key(site: Site) -> None:
    published = site.post.publish("mails", "hello", delay=600, key="welcome")
    client = site.client()
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2)
    moved = client.write("/queues/mails/reschedule", {"key": "welcome", "at": at.isoformat()}).json()
    assert (moved["status"], datetime.fromisoformat(moved["due_at"])) == ("moved", at)
    (timer,) = site.post.timers("mails")
    assert (timer.id, timer.body) == (published.id, "hello")
    assert client.write("/queues/mails/reschedule", {"key": "none", "delay": 5}).problem == "unknown-timer"
    assert client.write("/queues/mails/reschedule", {"key": "welcome"}).problem == "no-choice"
    assert client.write("/queues/mails/reschedule", {"key": "welcome", "at": "2026-03-06T00:00:00"}).status == 422


@pytest.mark.promise("FACE-3", "CRON-7")
def test_schedules_are_saved_paused_triggered_and_removed(site: Site) -> None:
    client = site.client()
    saved = client.write(
        "/schedules", {"name": "rollup", "queue": "reports", "cron": "0 9 * * *", "body": {"a": 1}}, method="PUT"
    ).json()
    reference = {"queue": "reports", "key": saved["schedule"]["key"]}
    assert client.write("/schedules/pause", reference).json()["changed"] is True
    assert site.post.schedules()[0].paused
    assert client.write("/schedules/resume", reference).json()["changed"] is True
    triggered = client.write("/schedules/trigger", reference).json()
    assert [stored.id for stored in site.post.peek("reports")] == [triggered["id"]]
    assert client.write("/schedules/remove", reference).json()["changed"] is True
    assert client.write("/schedules/pause", reference).problem == "unknown-schedule"
    wrong = {"name": "x", "queue": "reports", "cron": "61 * * * *"}
    assert client.write("/schedules", wrong, method="PUT").problem == "invalid-schedule"
    assert client.write("/schedules", {"name": "x", "queue": "a b", "every": 5}, method="PUT").status == 422


@pytest.mark.promise("FACE-3")
def test_a_write_with_an_idempotency_key_runs_once(site: Site) -> None:
    site.bury("orders", 1, 2)
    client = site.client()
    first = client.write("/queues/orders/redrive", {"all": True, "limit": 1}, headers={"idempotency-key": "a"})
    again = client.write("/queues/orders/redrive", {"all": True, "limit": 1}, headers={"idempotency-key": "a"})
    assert first.json() == again.json()
    assert site.post.ledger("orders").dead_kept == 1
    other = client.write("/queues/orders/redrive", {"all": True}, headers={"idempotency-key": "a"})
    assert (other.status, other.problem) == (422, "key-reused")
    assert client.write("/queues/orders/redrive", {"all": True}, headers={"idempotency-key": "b"}).json()["moved"] == 1


def test_a_request_that_is_too_large_is_refused(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client()
    large = {"ids": [], "reason": "x" * (REQUEST_BYTES_MAX + 1)}
    assert client.write("/queues/orders/redrive", large).problem == "too-large"
    announced = client.write("/queues/orders/pause", headers={"content-length": "9" * 30})
    assert announced.problem == "too-large"


def test_what_is_no_json_is_refused(memory: Site) -> None:
    memory.post.publish("orders", 1)
    client = memory.client()
    token = client.get("/api/v1/session").json()["csrf_token"]
    sent = {"x-csrf-token": token, "content-type": "application/json"}
    path = "/api/v1/stores/main/queues/orders/cancel"
    for body in (b"{", b"\xff", b"[" * 5_000, b"nul"):
        answer = client.send("POST", path, body, headers=sent)
        assert (answer.status, answer.problem) == (400, "invalid-json")
    form = client.send("POST", path, b"id=1", headers=sent | {"content-type": "application/x-www-form-urlencoded"})
    assert form.problem == "wrong-content-type"


def test_a_store_that_is_away_is_a_problem_and_heals(tmp_path: Any, memory: Site) -> None:
    from tests.unit.clients import ShakyStore
    from tests.web.asgi import Client
    from waypost import AsyncWaypost

    store = ShakyStore()
    post = AsyncWaypost(store=store, retry_budget=0)
    client = Client(create_app(post), memory.runner)
    assert client.api("/health")["level"] == "calm"
    store.faults = ["refuse"] * 20
    answer = client.get("/api/v1/stores/main/queues/orders")
    assert (answer.status, answer.problem) == (503, "store-unavailable")
    assert answer.header("retry-after") == "5"
    store.faults = []
    assert client.get("/api/v1/stores/main/queues/orders").problem == "unknown-queue"


# ---- the description -------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-3")
def test_the_openapi_document_describes_every_operation_and_resolves(memory: Site) -> None:
    answer = memory.client().get("/api/v1/openapi.json")
    document = answer.json()
    assert document == json.loads(msgspec.json.encode(openapi_document()))
    described = {one["operationId"] for path in document["paths"].values() for one in path.values()}
    others = {"export", "save_filter", "remove_filter"}
    assert described == {read.name for read in READS} | set(ACTIONS) | others

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(one) for one in node.values()))
        return set().union(*(references(one) for one in node)) if isinstance(node, list) else set()

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known
    assert all("description" in schema for schema in document["components"]["schemas"].values() if "enum" not in schema)


REQUESTS: dict[str, Any] = {
    "configure": documents.SettingsChange(lease=30.0, rate=None),
    "redrive": documents.RedriveRequest(reason="it's", rate="5/s"),
    "purge": documents.PurgeRequest(state="ready", confirm="orders"),
    "cancel": documents.CancelRequest(key="a b"),
    "reschedule": documents.RescheduleRequest(key="k", delay=5.0),
    "remove": documents.RemoveRequest(confirm="orders"),
    "stop_worker": documents.WorkerReference(name="a b"),
    "quiet_worker": documents.WorkerReference(name="a b"),
    "bulk_redrive": documents.BulkRedrive(error="no such customer", type_name="shop.Order", rate="50/s"),
    "bulk_purge": documents.BulkPurge(confirm="orders", died_before=datetime(2026, 1, 1, tzinfo=UTC)),
    "bulk_cancel": documents.BulkCancel(state="delayed", header="tenant=a b", rate="5/s", confirm="orders"),
    "bulk_prioritize": documents.BulkPrioritize(state="ready", type_name="shop.Order", priority=9),
    "bulk_reschedule": documents.BulkReschedule(group="acme", at=datetime(2026, 1, 1, tzinfo=UTC)),
    "change_bulk": documents.BulkChange(id="1m7fra5gs06ap4cfk9b5jsq9", change="pause"),
    "edit_dead": documents.EditRequest(id="1m7fra5gs06ap4cfk9b5jsq9", body={"a": 1}),
    "save_schedule": documents.ScheduleSave(name="rollup", queue="reports", cron="0 9 * * *"),
    "backfill_schedule": documents.BackfillRequest(
        queue="reports", key="rollup", start=datetime(2026, 1, 1, tzinfo=UTC), end=datetime(2026, 1, 2, tzinfo=UTC)
    ),
}


@pytest.mark.promise("FACE-3")
@pytest.mark.parametrize("name", ACTIONS)
def test_every_write_has_a_form_as_a_command_and_as_python(name: str) -> None:
    reference = documents.ScheduleReference(queue="reports", key="rollup::cron:0 9 * * *:UTC")
    request = REQUESTS.get(name, reference if name.endswith("_schedule") else documents.Nothing())
    forms = ACTIONS[name].forms("orders", request)
    arguments = shlex.split(forms.command)
    assert arguments[0] == "waypost"
    assert make_parser().parse_args(arguments[1:]).command == arguments[1]
    compile(forms.python, "form", "eval")


@pytest.mark.promise("FACE-3")
@pytest.mark.parametrize(
    ("name", "request_document", "found"),
    [
        ("cancel", documents.CancelRequest(key="--id=other"), {"key": "--id=other", "id": None}),
        ("redrive", documents.RedriveRequest(reason="-r"), {"reason": "-r"}),
        ("bulk_redrive", documents.BulkRedrive(error="--yes", group="-g"), {"error": "--yes", "group": "-g"}),
        ("save_schedule", documents.ScheduleSave(name="n", queue="q", every=5, key="-k"), {"key": "-k"}),
    ],
)
def test_a_value_that_begins_with_a_dash_is_no_option_of_the_command(
    name: str, request_document: Any, found: dict[str, object]
) -> None:
    forms = ACTIONS[name].forms("orders", request_document)
    parsed = vars(make_parser().parse_args(shlex.split(forms.command)[1:]))
    assert {field: parsed[field] for field in found} == found


def test_a_queue_that_is_removed_while_it_is_read_is_no_error(memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.post.publish("orders", 1, delay=60)
    client = memory.client()
    watch = client.app.state.service.places["main"].watch
    forgotten: list[str] = []

    def forget(name: str) -> None:
        method = getattr(memory.served, name)

        async def run(*given: Any, **options: Any) -> Any:
            del watch.readings["orders"]
            forgotten.append(name)
            return await method(*given, **options)

        monkeypatch.setattr(memory.served, name, run)

    forget("policy")
    assert client.api("/queues/orders")["queue"]["name"] == "orders"
    forget("page")
    assert [one["queue"] for one in client.api("/timers/next")["timers"]] == ["orders"]
    assert forgotten == ["policy", "page"]
