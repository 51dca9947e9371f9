"""Every action of the pages, done by clicks in a real Chromium, with its effect in the store.

One server for each store, and one tab, serve the whole file: each test has a queue of its own.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.web.browser import PROGRAM, Shop, Tab, register_worker, wait_until
from waypost.store.port import Heartbeat, ServedQueue
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace
from waypost.web.actions import ACTIONS

pytestmark = [
    pytest.mark.promise("FACE-3"), pytest.mark.needs(PROGRAM), pytest.mark.xdist_group("browser"),
]  # fmt: skip
QUEUES = "/s/main/queues"

Clicks = Callable[[Tab, Shop, str], None]
CLICKS: dict[str, Clicks] = {}
#: The actions that each function does.
DONE: dict[str, tuple[str, ...]] = {}
#: Those that are done on every store: each changes messages in another way.
ON_EACH_STORE = ("redrive_a_group", "edit_and_redrive", "move_and_run_a_timer", "purge_messages_and_remove_the_queue")


def does(*actions: str) -> Callable[[Clicks], Clicks]:
    """Note a function that does these actions by clicks."""

    def note(clicks: Clicks) -> Clicks:
        CLICKS[clicks.__name__], DONE[clicks.__name__] = clicks, actions
        return clicks

    return note


def notice(page: Any, text: str) -> None:
    """Wait for what the page reports after an action."""
    page.locator(".notice.done", has_text=text).wait_for()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def follow(page: Any, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()


def undo(tab: Tab, queue: str, button: str) -> Any:
    """Undo the newest action of a queue."""
    page = tab.go("/s/main/actions")
    page.locator("ul.log li", has_text=queue).first.get_by_text("Undo", exact=True).click()
    press(page, button)
    return page


# ---- queues ----------------------------------------------------------------------------------------------------


@does("pause", "resume")
def pause_and_resume(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.publish(queue, 1)
    page = tab.go(f"{QUEUES}/{queue}")
    press(page, "Pause")
    notice(page, f"{queue.capitalize()} is paused.")
    assert shop.post.stats(queue).paused
    press(page, "Resume")
    notice(page, f"{queue.capitalize()} is resumed.")
    assert not shop.post.stats(queue).paused
    notice(undo(tab, queue, "Pause"), f"{queue.capitalize()} is paused.")
    assert shop.post.stats(queue).paused


@does("configure")
def change_settings_and_undo(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.configure(queue, lease=30)
    page = tab.go(f"{QUEUES}/{queue}")
    follow(page, "Settings")
    page.locator('[name="max_running"]').fill("5")
    press(page, "See what would change")
    assert page.locator("ins").inner_text() == "5"
    assert shop.post.policy(queue).max_running is None, "nothing is saved before the difference was seen"
    press(page, "Save")
    notice(page, f"Changed max_running of {queue}.")
    assert shop.post.policy(queue).max_running == 5
    notice(undo(tab, queue, "Save"), f"Changed max_running of {queue}.")
    assert shop.post.policy(queue).max_running is None


@does("purge", "remove")
def purge_messages_and_remove_the_queue(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.publish_many(queue, range(3))
    page = tab.go(f"{QUEUES}/{queue}")
    follow(page, "Purge all ready")
    page.get_by_label("Type the name of the queue").fill(queue)
    press(page, "Purge")
    notice(page, "Removed 3 messages")
    assert shop.post.ledger(queue).ready == 0
    follow(page, "Remove the queue")
    page.get_by_label("Type the name of the queue").fill(queue)
    press(page, "Remove the queue")
    notice(page, "is removed.")
    assert queue not in shop.post.queues()


# ---- messages and dead letters ---------------------------------------------------------------------------------


@does("cancel")
def cancel_a_message(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.publish(queue, 1, key="first")
    shop.post.publish(queue, 2, key="second")
    page = tab.go(f"{QUEUES}/{queue}")
    page.get_by_label("Key", exact=True).fill("first")
    press(page, "Filter")
    page.locator("#messages tbody a").click()
    follow(page, "Cancel")
    press(page, "Cancel the message")
    notice(page, "The message is cancelled.")
    assert [message.key for message in shop.post.peek(queue, 5)] == ["second"]


@does("redrive")
def redrive_one_at_a_rate(tab: Tab, shop: Shop, queue: str) -> None:
    first, second = shop.bury(queue, 1, 2, error="no such customer")
    page = tab.go(f"{QUEUES}/{queue}/messages/{first}")
    follow(page, "Redrive")
    page.get_by_label("Rate").fill("100/s")
    press(page, "Redrive")
    notice(page, "1 dead letter sent again.")
    assert [message.id for message in shop.post.peek(queue, 5)] == [first]
    assert [letter.id for letter in shop.post.dead_letters(queue)] == [second]


@does("bulk_redrive")
def redrive_a_group(tab: Tab, shop: Shop, queue: str) -> None:
    (kept,) = shop.bury(queue, 1, error="no such customer")
    moved = shop.bury(queue, 2, 3, error="out of stock")
    page = tab.go(f"{QUEUES}/{queue}/dead")
    page.locator("li", has_text="out of stock").get_by_role("link", name="Redrive these").click()
    page.locator("main p", has_text="2 dead letters").wait_for()
    assert f"waypost bulk start {queue} redrive" in page.locator(".forms").inner_text()
    press(page, "Redrive")
    notice(page, "Sending dead letters again has begun")
    # The page of actions shows its end without a reload.
    page.locator("tr", has_text=queue).get_by_text("2 sent again").wait_for()
    assert sorted(message.id for message in shop.post.peek(queue, 5)) == sorted(moved)
    assert [letter.id for letter in shop.post.dead_letters(queue)] == [kept]


@does("bulk_redrive", "change_bulk")
def redrive_all_slowly_and_stop(tab: Tab, shop: Shop, queue: str) -> None:
    shop.bury(queue, *range(4))
    page = tab.go(f"{QUEUES}/{queue}/dead")
    follow(page, "Redrive all")
    page.get_by_label("Rate").fill("1/h")
    press(page, "Redrive")
    notice(page, "Sending dead letters again has begun")
    (action,) = [one for one in shop.post.bulk_actions().actions if one.queue == queue]
    row = page.locator("tr", has_text=queue)
    row.locator("progress").wait_for()

    def reaches(state: str) -> bool:
        return shop.post.bulk_action(action.id).state == state

    row.get_by_role("button", name="Pause").click()
    wait_until(lambda: reaches("paused"), "it does not pause")
    row.get_by_role("button", name="Resume").click()
    wait_until(lambda: reaches("running"), "it does not go on")
    row.get_by_role("button", name="Cancel").click()
    wait_until(lambda: reaches("cancelled"), "it does not end")
    assert shop.post.ledger(queue).dead_kept >= 3


@does("bulk_purge")
def purge_a_group(tab: Tab, shop: Shop, queue: str) -> None:
    (kept,) = shop.bury(queue, 1, error="no such customer")
    shop.bury(queue, 2, 3, error="out of stock")
    page = tab.go(f"{QUEUES}/{queue}/dead")
    page.locator("li", has_text="out of stock").get_by_role("link", name="Purge these").click()
    page.get_by_label("Type the name of the queue").fill(queue)
    press(page, "Purge")
    page.locator("tr", has_text=queue).get_by_text("2 removed").wait_for()
    assert [letter.id for letter in shop.post.dead_letters(queue)] == [kept]


@does("bulk_cancel", "bulk_reschedule")
def move_and_cancel_a_group(tab: Tab, shop: Shop, queue: str) -> None:
    for number in range(3):
        shop.post.publish(queue, number, delay=600, group="acme")
    shop.post.publish(queue, 9, delay=600, group="other")
    page = tab.go(f"{QUEUES}/{queue}?state=delayed&group=acme")
    follow(page, "Move those of this group")
    page.get_by_label("Seconds from now").fill("0")
    press(page, "Move them")
    page.locator("tr", has_text=queue).get_by_text("3 moved").wait_for()
    page = tab.go(f"{QUEUES}/{queue}?state=ready&group=acme")
    follow(page, "Cancel those of this group")
    page.get_by_label("Type the name of the queue").fill(queue)
    press(page, "Cancel them")
    page.locator("tr", has_text=queue).get_by_text("3 cancelled").wait_for()
    ledger = shop.post.ledger(queue)
    assert (ledger.cancelled, ledger.delayed) == (3, 1)


@does("bulk_prioritize")
def prioritize_a_group(tab: Tab, shop: Shop, queue: str) -> None:
    for group in ("other", "acme"):
        shop.post.publish(queue, group, group=group)
    page = tab.go(f"{QUEUES}/{queue}?state=ready&group=acme")
    follow(page, "Prioritize those of this group")
    page.get_by_label("Priority").fill("8")
    press(page, "Change them")
    page.locator("tr", has_text=queue).get_by_text("1 with the new priority").wait_for()
    assert [(message.body, message.priority) for message in shop.post.peek(queue)] == [("acme", 8), ("other", 5)]


@does("edit_dead")
def edit_and_redrive(tab: Tab, shop: Shop, queue: str) -> None:
    old = shop.post.publish(queue, {"customer": "wrong"}, key="order:1", headers={"source": "shop"})
    with shop.post.receive(queue) as message:
        assert message is not None
        message.dead("rejected", "no such customer")
    page = tab.go(f"{QUEUES}/{queue}/messages/{old.id}")
    follow(page, "Edit and redrive")
    page.get_by_label("Body").fill('{"customer": "right"}')
    press(page, "Send the edited message")
    notice(page, "takes its place")
    (sent,) = shop.post.peek(queue, 5)
    assert (sent.body, sent.key) == ({"customer": "right"}, "order:1")
    assert dict(sent.open().headers) == {"source": "shop", "waypost-edited-from": old.id}
    assert shop.post.ledger(queue).dead_kept == 0


# ---- timers, schedules, workers --------------------------------------------------------------------------------


@does("reschedule")
def move_and_run_a_timer(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.publish(queue, "later", delay=3600, key="welcome")
    page = tab.go(f"/s/main/timers?queue={queue}")
    follow(page, "Move")
    page.get_by_label("Seconds from now").fill("600")
    press(page, "Move")
    notice(page, "is moved to")
    (timer,) = shop.post.peek(queue, 5, "delayed")
    assert timer.ready_at < datetime.now(UTC) + timedelta(seconds=700)
    page.goto(f"{shop.server.url}/s/main/timers?queue={queue}")
    press(page, "Run now")
    notice(page, "due now")
    with shop.post.receive(queue) as message:
        assert message is not None
        assert message.body == "later"


@does("backfill_schedule")
def count_and_backfill_a_schedule(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.save_schedule(f"daily {queue}", queue=queue, cron="0 3 * * *", body={})
    page = tab.go("/s/main/schedules")
    page.locator("#schedules tr", has_text=f"daily {queue}").get_by_role("link", name="Backfill", exact=True).click()
    page.get_by_label("From").fill("2026-03-01T00:00:00")
    page.get_by_label("To,").fill("2026-03-04T00:00:00")
    press(page, "Count these")
    press(page, "Publish 3")
    notice(page, "Published 3 messages")
    assert shop.post.ledger(queue).published == 3


@does("save_schedule", "pause_schedule", "resume_schedule", "trigger_schedule", "cancel", "remove_schedule")
def make_preview_and_change_a_schedule(tab: Tab, shop: Shop, queue: str) -> None:
    name = f"nightly {queue}"
    page = tab.go("/s/main/schedules")
    follow(page, "New schedule")
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Queue", exact=True).fill(queue)
    page.get_by_label("Cron pattern").fill("0 2 * * *")
    page.get_by_label("Time zone").fill("Europe/Madrid")
    press(page, "Preview")
    page.locator(".preview tbody tr").nth(9).wait_for()
    assert queue not in {one.queue for one in shop.post.schedules()}, "a preview saves nothing"
    press(page, "Save")
    notice(page, f"Schedule {name} is saved.")

    def row() -> Any:
        return page.locator("#schedules tr", has_text=name)

    def saved() -> Any:
        return next(one for one in shop.post.schedules() if one.queue == queue)

    assert (saved().cron, saved().tz) == ("0 2 * * *", "Europe/Madrid")
    row().get_by_role("button", name="Pause").click()
    row().get_by_role("button", name="Resume").wait_for()
    assert saved().paused
    row().get_by_role("button", name="Resume").click()
    row().get_by_role("button", name="Pause").wait_for()
    assert not saved().paused
    row().get_by_role("link", name="Edit").click()
    page.get_by_label("Cron pattern").fill("30 3 * * *")
    press(page, "Save")
    notice(page, f"Schedule {name} is saved.")
    assert saved().cron == "30 3 * * *"
    row().get_by_role("link", name="Trigger").click()
    press(page, "Trigger")
    notice(page, "Published message")
    assert shop.post.ledger(queue).published == 1
    notice(undo(tab, queue, "Cancel the message"), "The message is cancelled.")
    assert shop.post.ledger(queue).cancelled == 1
    tab.go("/s/main/schedules")
    row().get_by_role("link", name="Remove").click()
    press(page, "Remove")
    notice(page, "is removed.")
    assert queue not in {one.queue for one in shop.post.schedules()}


@does("quiet_worker", "stop_worker")
def quiet_and_stop_a_worker(tab: Tab, shop: Shop, queue: str) -> None:
    name = f"host:{queue}"
    register_worker(shop.post, Heartbeat(name, queues=(ServedQueue(queue, 1),)))

    def requested() -> str | None:
        return next(one.requested for one in shop.post.workers() if one.name == name)

    page = tab.go("/s/main/workers")
    page.locator("li.panel", has_text=name).get_by_role("link", name="Quiet", exact=True).click()
    press(page, "Quiet the worker")
    notice(page, "claims no more after its next heartbeat")
    assert requested() == "quiet"
    page.locator("li.panel", has_text=name).get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", name=name).wait_for()
    follow(page, "Stop")
    press(page, "Stop the worker")
    notice(page, "stops after its next heartbeat")
    assert requested() == "stop"


# ---- what is not logged as an action ---------------------------------------------------------------------------


@does()
def save_a_view_and_remove_it(tab: Tab, shop: Shop, queue: str) -> None:
    shop.post.publish(queue, 1, group="acme")
    page = tab.go(f"{QUEUES}/{queue}?state=ready&group=acme")
    views = page.locator("details.saved")
    views.locator("summary").click()
    page.get_by_label("This view as").fill(f"acme of {queue}")
    views.get_by_role("button", name="Save").click()
    notice(page, f"The view acme of {queue} is saved.")
    tab.go(f"{QUEUES}/{queue}")
    views.locator("summary").click()
    follow(page, f"acme of {queue}")
    page.wait_for_url("**group=acme*")
    assert page.get_by_label("Group", exact=True).input_value() == "acme"
    views.locator("summary").click()
    page.get_by_role("button", name=f"Remove the saved view acme of {queue}").click()
    notice(page, "is removed.")
    assert page.get_by_role("link", name=f"acme of {queue}").count() == 0


@does()
def download_a_list_as_a_file(tab: Tab, shop: Shop, queue: str) -> None:
    ids = [one.id for one in shop.post.publish_many(queue, [{"id": number} for number in range(3)])]
    page = tab.go(f"{QUEUES}/{queue}")

    def download(name: str) -> str:
        with page.expect_download() as begun:
            page.locator(".export").get_by_role("link", name=name).click()
        return Path(begun.value.path()).read_text()

    rows = list(csv.DictReader(io.StringIO(download("CSV"))))
    assert [row["id"] for row in rows] == ids
    assert [row["id"] for row in json.loads(download("JSON"))["rows"]] == ids


# ---- the tests -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_tab(
    chromium: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[Tab, Shop]]]:
    """A store of a kind with its server, and a tab of the browser: the same for all tests of this file."""
    made: dict[str, tuple[Tab, Shop]] = {}

    def open_one(kind: str) -> tuple[Tab, Shop]:
        if kind not in made:
            namespace = fresh_namespace()
            if kind == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('shop') / 'shop.db'}"
            else:
                url = request.getfixturevalue(f"{kind}_url")
            if kind == "postgres":
                migrate(url, namespace=namespace)
            shop = Shop(url, namespace)
            made[kind] = (Tab(chromium, shop.server, timezone_id="Asia/Tokyo"), shop)
        return made[kind]

    yield open_one
    for tab, shop in made.values():
        tab.close()
        shop.close()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sqlite", name) for name in CLICKS] + [(kind, name) for kind in ("valkey", "postgres") for name in ON_EACH_STORE],
)
def test_it_is_done_by_clicks_and_has_its_effect(
    open_tab: Callable[[str], tuple[Tab, Shop]], kind: str, name: str
) -> None:
    tab, shop = open_tab(kind)
    CLICKS[name](tab, shop, name.replace("_", "-"))
    assert tab.complaints == []


def test_no_action_is_without_clicks() -> None:
    assert set(ACTIONS) - {action for actions in DONE.values() for action in actions} == set()


def test_times_follow_the_zone_of_the_browser_and_stay_so(open_tab: Callable[[str], tuple[Tab, Shop]]) -> None:
    tab, shop = open_tab("sqlite")
    shop.post.publish("zones", 1, delay=86_400, key="tomorrow")
    due = shop.post.peek("zones", 1, "delayed")[0].ready_at
    page = tab.go("/s/main/timers?queue=zones")
    displayed = page.locator("#timers tbody time").first
    assert f"{due:%H:%M:%S}" in displayed.inner_text()
    page.locator("#time-zone").click()
    tokyo = due + timedelta(hours=9)
    assert f"{tokyo:%H:%M:%S}" in displayed.inner_text()
    page.reload()
    page.locator("#time-zone", has_text="Local time").wait_for()
    assert f"{tokyo:%H:%M:%S}" in displayed.inner_text()
    page.locator("#time-zone").click()
    assert f"{due:%H:%M:%S}" in displayed.inner_text()


def test_light_and_dark_are_chosen_by_a_click_and_stay_so(open_tab: Callable[[str], tuple[Tab, Shop]]) -> None:
    tab, _ = open_tab("sqlite")
    page = tab.go("/s/main/schedules")

    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    preferred = background()
    page.locator("#theme", has_text="auto").click()
    page.locator("#theme", has_text="light").click()
    page.locator("#theme", has_text="dark").wait_for()
    assert background() != preferred
    page = tab.go("/s/main/workers")
    page.locator("#theme", has_text="dark").wait_for()
    assert background() != preferred
    page.emulate_media(color_scheme="dark")
    dark = background()
    page.locator("#theme").click()
    page.locator("#theme", has_text="auto").wait_for()
    assert background() == dark
    page.emulate_media(color_scheme="light")
    assert background() == preferred


def test_an_id_is_copied_by_a_click(open_tab: Callable[[str], tuple[Tab, Shop]]) -> None:
    tab, shop = open_tab("sqlite")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    id = shop.post.publish("copied", 1).id
    page = tab.go(f"{QUEUES}/copied/messages/{id}")
    press(page, "Copy")
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == id
