"""What happens if I change this: charts, schedules, timers, workers."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.waiting import until
from tests.web.conftest import Site
from waypost.store.port import Heartbeat
from waypost.views import Change, Minute, Stats
from waypost.web.chart_views import draw_charts, hourly
from waypost.web.charts import make_backlog_chart, make_times_chart
from waypost.web.documents import BacklogPoint, QueueHistory
from waypost.web.documents import Minute as MinuteDocument
from waypost.web.figures import describe_change, history_document

pytestmark = pytest.mark.promise("FACE-3")
AT = datetime(2026, 3, 6, 9, 30, 12, tzinfo=UTC)


def ago(minutes: int) -> datetime:
    return AT.replace(second=0) - timedelta(minutes=minutes)


# ---- charts ----------------------------------------------------------------------------------------------------


def test_a_backlog_chart_goes_back_from_now_and_ends_where_nothing_was_counted() -> None:
    backlog = [
        BacklogPoint(at=ago(50), messages=5),
        BacklogPoint(at=ago(10), messages=9),
        BacklogPoint(at=AT, messages=2),
    ]
    (line,) = make_backlog_chart(backlog, AT, 60).series
    # Five before the minute 50 ago, nine from then to the minute 10 ago, two since.
    assert line.values[:9] == [5] * 9
    assert line.values[9:49] == [9] * 40
    assert line.values[49:] == [2] * 11
    assert line.text == "2"
    (late,) = make_backlog_chart(backlog, AT, 60, known_from=ago(20)).series
    assert late.values[:39] == [None] * 39
    assert late.values[39:41] == [9, 9]


def test_mean_waits_are_weighted_and_minutes_without_any_are_gaps() -> None:
    def minute(minutes: int, claims: int, mean: float, longest: float) -> MinuteDocument:
        return MinuteDocument(
            at=ago(minutes), counts={"claims": claims}, wait_mean_seconds=mean, wait_max_seconds=longest
        )

    minutes = [minute(59, 1, 1.0, 1.0), minute(1, 1, 4.0, 4.0), minute(0, 3, 8.0, 20.0)]
    mean, longest = make_times_chart(minutes, "wait", AT, 60).series
    assert (mean.text, longest.text) == ("5.8 s", "20 s")
    assert [value for value in mean.values if value is not None] == [1_000, 4_000, 8_000]


def test_compared_queues_have_one_scale() -> None:
    def history(name: str, published: int) -> QueueHistory:
        minutes = [MinuteDocument(at=ago(1), counts={"published": published})]
        return QueueHistory(queue=name, at=AT, minutes=minutes, backlog=[], backlog_known_from=None, changes=[])

    small, large = draw_charts([history("a", 10), history("b", 1000)], 60)[0]
    assert (small.most, large.most) == (10, 1000)
    assert small.axis() == large.axis()


def test_changes_of_settings_are_described_with_units() -> None:
    texts = {
        "lease_ms=30000 max_deliveries=3": "lease 30.0 s, max_deliveries 3",
        "rate_count=100 rate_per_ms=60000": "rate 100/m",
        "rate_count=None rate_per_ms=None": "rate none",
        "max_pending=None overload=raise": "max_pending none, overload raise",
        "": "configured",
    }
    assert {text: describe_change(Change(AT, "configured", text)) for text in texts} == texts
    assert describe_change(Change(AT, "paused", "")) == "paused"


def test_the_backlog_is_not_known_before_the_first_minute_that_has_all_counters(memory: Site) -> None:
    memory.post.publish("orders", 1)
    stats = memory.post.stats("orders", 5)
    old = Minute(stats.minutes[0].at - timedelta(minutes=2), {"published": 7, "done": 7})
    fields = {name: getattr(stats, name) for name in Stats.__struct_fields__}
    history = history_document(Stats(**(fields | {"minutes": [old, *stats.minutes]})))
    assert history.backlog_known_from == old.at + timedelta(minutes=1)
    assert [point.messages for point in history.backlog] == [0, 1]
    assert hourly(history, 60)[-1].published >= 1


@pytest.mark.promise("SEE-5")
def test_charts_of_queues_are_read_and_drawn_side_by_side(site: Site) -> None:
    site.post.publish_many("orders", range(5))
    site.post.publish_many("mails", range(2))
    with site.post.receive("orders"):
        pass
    site.post.configure("orders", lease=30)
    site.post.pause("orders")
    client = site.client()
    answer = client.api("/charts", queues="orders,mails", minutes=60)
    orders, mails = answer["queues"]
    assert [orders["backlog"][-1]["messages"], mails["backlog"][-1]["messages"]] == [4, 2]
    assert orders["backlog"][0]["messages"] == 0
    assert [change["text"] for change in orders["changes"]] == ["lease 30.0 s", "paused"]
    minute = orders["minutes"][-1]
    assert (minute["counts"]["runs"], minute["run_mean_seconds"] >= 0, minute["wait_max_seconds"] >= 0) == (
        1,
        True,
        True,
    )
    assert client.get("/api/v1/stores/main/charts", queues="none").problem == "unknown-queue"
    assert client.get("/api/v1/stores/main/charts", queues="a,b,c,d,e").problem == "invalid-input"
    page = client.get("/s/main/charts?queue=orders&queue=mails&minutes=60")
    assert page.status == 200
    assert page.text.count("<figure") == 10
    assert page.text.count('class="mark"') == 10, "both changes on each chart of the queue"
    assert "lease 30.0 s" in page.text
    assert "<title>Backlog of orders: backlog 4</title>" in page.text
    assert client.get("/s/main/queues/orders").text.count("<figure") == 4


# ---- schedules -------------------------------------------------------------------------------------------------


def test_a_rule_is_previewed_before_it_is_saved(memory: Site) -> None:
    client = memory.client()
    answer = client.api(
        "/schedules/preview", cron="30 2 * * *", tz="Europe/Madrid", start="2030-10-25T00:00:00Z", count=5
    )
    assert answer["valid"]
    assert [fire["local"] for fire in answer["fires"]][1:4] == [
        "2030-10-26 02:30:00+02:00", "2030-10-27 02:30:00+02:00", "2030-10-28 02:30:00+01:00",
    ]  # fmt: skip
    assert [fire["offset_changes"] for fire in answer["fires"]] == [False, False, False, True, False]
    wrong = client.api("/schedules/preview", cron="61 2 * * *")
    assert (wrong["valid"], wrong["fires"], "61" in wrong["error"]) == (False, [], True)
    assert "zone" in client.api("/schedules/preview", cron="0 2 * * *", tz="Europe/Nowhere")["error"]
    assert not client.api("/schedules/preview")["valid"]


def token_of(text: str) -> str:
    found = re.search(r'name="csrf_token" value="([^"]+)"', text)
    assert found is not None
    return found[1]


def test_the_form_of_a_schedule_shows_its_fires_and_saves_only_then(site: Site) -> None:
    client = site.client()
    token = token_of(client.get("/s/main/do/save_schedule").text)
    sent = {"csrf_token": token, "name": "rollup", "queue": "reports", "cron": "0 9 * * *", "tz": "Europe/Madrid",
            "missed": "5", "grace": "30", "expires": "40", "body": '{"day": 1}'}  # fmt: skip
    preview = client.form("/s/main/do/save_schedule", sent | {"step": "preview"})
    assert preview.status == 200
    assert preview.text.count(" 09:00:00+0") == 10
    assert "waypost schedules save rollup --queue reports --cron &#39;0 9 * * *&#39;" in preview.text
    assert site.post.schedules() == []
    bad = client.form("/s/main/do/save_schedule", sent | {"step": "preview", "cron": "99 9 * * *"})
    assert "99" in bad.text
    assert 'role="alert"' in bad.text
    assert client.form("/s/main/do/save_schedule", sent).status == 303
    (saved,) = site.post.schedules()
    assert (saved.cron, saved.body, saved.grace) == ("0 9 * * *", {"day": 1}, timedelta(seconds=30))
    assert saved.expires == timedelta(seconds=40)
    # Edited with the same key, it stays one schedule, and its body stays where the form does not have it.
    form = client.get("/s/main/do/save_schedule", queue="reports", key=saved.key)
    assert 'value="0 9 * * *"' in form.text
    edited = sent | {"key": saved.key, "cron": "0 10 * * *", "keep_body": "true"}
    del edited["body"]
    assert client.form("/s/main/do/save_schedule", edited).status == 303
    (changed,) = site.post.schedules()
    assert (changed.key, changed.cron, changed.body) == (saved.key, "0 10 * * *", {"day": 1})
    assert client.get("/s/main/do/save_schedule", queue="reports", key="none").status == 404
    assert "Edit" in client.get("/s/main/schedules").text


def test_what_the_form_of_a_schedule_does_not_have_stays_as_it_is(site: Site) -> None:
    client = site.client()
    saved = site.post.save_schedule("rollup", queue="reports", cron="0 9 * * *", timeout=7, reply_to="answers", body=1)
    form = client.get("/s/main/do/save_schedule", queue="reports", key=saved.key)
    sent = {"csrf_token": token_of(form.text), "name": "rollup", "queue": "reports", "key": saved.key,
            "cron": "0 10 * * *", "body": "2"}  # fmt: skip
    assert client.form("/s/main/do/save_schedule", sent).status == 303
    assert [one.cron for one in site.post.schedules()] == ["0 10 * * *"]
    site.post.trigger_schedule("rollup")
    with site.post.receive("reports", wait=5) as message:
        assert message is not None
        assert (message.body, message.timeout, message.reply_to) == (2, timedelta(seconds=7), "answers")


# ---- timers ----------------------------------------------------------------------------------------------------


def test_timers_of_all_queues_are_listed_by_due_time_moved_and_run(site: Site) -> None:
    late = site.post.publish("mails", 1, delay=7200).id
    soon = site.post.publish("orders", 2, delay=60, key="k").id
    client = site.client()
    listed = client.api("/timers/next")
    assert [one["id"] for one in listed["timers"]] == [soon, late]
    assert listed["complete"]
    assert [one["id"] for one in client.api("/timers/next", queue="mails")["timers"]] == [late]
    page = client.get("/s/main/timers")
    assert page.text.index(soon) < page.text.index(late)
    moved = client.write("/queues/mails/reschedule", {"id": late, "delay": 30})
    assert (moved.status, moved.json()["status"]) == (200, "moved")
    assert [one["id"] for one in client.api("/timers/next")["timers"]] == [late, soon]
    now = client.form(
        "/s/main/queues/orders/do/reschedule", {"csrf_token": token_of(page.text), "id": soon, "delay": "0"}
    )
    assert now.status == 303
    assert site.post.ledger("orders").ready == 1
    assert client.write("/queues/orders/reschedule", {"id": soon, "delay": 5}).problem == "timer-due"
    assert client.write("/queues/orders/reschedule", {"key": "none", "delay": 5}).problem == "unknown-timer"
    assert client.write("/queues/orders/reschedule", {"id": soon, "key": "k", "delay": 5}).problem == "no-choice"
    assert f"timers reschedule mails --id {late}" in client.get(f"/s/main/queues/mails/do/reschedule?id={late}").text


# ---- workers ---------------------------------------------------------------------------------------------------


def test_a_worker_is_drawn_with_what_it_holds_and_requested_to_stop(site: Site) -> None:
    site.post.publish("orders", 1, key="k")
    store = site.post.store
    with site.post.receive("orders") as message:
        assert message is not None
        held = site.post.page("orders", "leased").messages[0]
        name = held.worker
        assert name is not None
        executor = store.connect(start_timeout=5)
        try:
            queue = [("orders", 10, 1, 5, 0)]
            executor.run(store.heartbeat(Heartbeat(name, "shop-1", 7, "0.9.9", queues=tuple(queue)), 60_000))  # type: ignore[arg-type]
            executor.run(store.heartbeat(Heartbeat("other", "shop-2", 8, "0.9.8"), 60_000))
        finally:
            executor.close()
        client = site.client()
        detail = client.api(f"/workers/{name}")
        assert [(one["id"], one["key"]) for one in detail["running"]] == [(held.id, "k")]
        assert detail["running"][0]["lease_left_seconds"] > 0
        assert held.id in client.get(f"/s/main/workers/{name}").text
        assert client.api("/workers")["releases"] == {"0.9.9": 1, "0.9.8": 1}
        assert "different releases" in client.get("/s/main/workers").text
        assert client.write("/workers/stop", {"name": name}).json()["changed"]
        assert client.api(f"/workers/{name}")["worker"]["requested"] == "stop"
        assert "requested to stop" in client.get("/s/main/workers").text
        assert client.write("/workers/quiet", {"name": "absent"}).problem == "unknown-worker"
        assert client.get("/api/v1/stores/main/workers/absent").problem == "unknown-worker"
        page = client.get("/s/main/do/stop_worker", name="other")
        assert "waypost workers stop other" in page.text
        done = client.form("/s/main/do/stop_worker", {"csrf_token": token_of(page.text), "name": "other"})
        assert (done.status, done.header("location")) == (303, "/s/main/workers")
    until(lambda: site.post.ledger("orders").done == 1)


def test_a_reader_may_request_nothing_of_a_worker(memory: Site) -> None:
    client = memory.client(read_only=True)
    assert client.write("/workers/stop", {"name": "w"}).problem == "read-only"
    assert client.get("/s/main/do/stop_worker", name="w").status == 403
