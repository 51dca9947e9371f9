"""Take pictures of every screen of the web page, on a phone and a desk, light and dark, with four kinds of stores.

    python -m scripts.screenshots FOLDER [SCENE …] [--screens 'queue*' --sizes phone --schemes dark]

The scenes are `healthy`, `failing`, `empty` and `many` (200 queues). Look at the pictures after a change of the pages:
no test sees whether a page is pleasant to read. Some screens are there only after clicks, which the script makes. It
needs the Chromium of the machine (scripts/system_parts.py).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn

from scripts import system_parts
from waypost import Waypost
from waypost.store.sqlite import SqliteStore
from waypost.web import create_app
from waypost.web.server import bind

PROGRAM = "chromium-headless-shell"
SIZES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 780}}
SCHEMES = ("light", "dark")
HISTORY_MINUTES = 180
HEADERS = {"source": "web shop", "trace": "4bf92f3577b34da6"}
BANK_ERROR = """Traceback (most recent call last):
  File "shop/payments.py", line 41, in charge
    bank.pay(order)
TimeoutError: the bank did not answer within 30 s"""


class Past:
    """A store whose clock the script moves, so that charts and timelines have a history."""

    def __init__(self, path: str) -> None:
        self.now_ms = int(time.time() * 1000) - HISTORY_MINUTES * 60_000
        self.post = Waypost(store=SqliteStore(path, clock=lambda: self.now_ms))

    def wait(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)

    @property
    def minute(self) -> int:
        """How many minutes have passed."""
        return HISTORY_MINUTES - (int(time.time() * 1000) - self.now_ms) // 60_000


def finish(past: Past, queue: str, count: int) -> None:
    """Handle some messages."""
    for _ in range(count):
        with past.post.receive(queue, renew=False) as message:
            past.wait(0.05)
            if message is None:
                return


def bury(past: Past, queue: str, count: int, reason: str, error: str) -> None:
    """Make some dead letters."""
    for _ in range(count):
        with past.post.receive(queue, renew=False) as message:
            assert message is not None
            past.wait(0.3)
            message.dead(reason, error)


def live(past: Past, chance: random.Random) -> None:
    """Let three quiet hours of a shop pass: orders, mails, invoices."""
    past.post.configure("orders", journal="full")
    while past.minute < HISTORY_MINUTES - 2:
        busy = 4 + 3 * math.sin(past.minute / 25)
        for queue, share in (("orders", 1.0), ("mails", 0.7), ("invoices", 0.3)):
            count = max(0, round(chance.gauss(busy * share, 1)))
            past.post.publish_many(queue, ({"id": 1_000 + past.minute, "total": 12.5} for _ in range(count)))
            finish(past, queue, count)
        past.wait(60 - past.now_ms // 1000 % 60 + chance.random() * 20)


def fill_healthy(past: Past) -> None:
    live(past, random.Random(1))
    for number in range(5):
        past.post.publish("reminders", "your cart", delay=600 * (number + 1), key=f"cart:{number}")
    past.post.save_schedule("daily report", queue="reports", cron="0 9 * * mon-fri", tz="Europe/Madrid", body={})
    past.post.save_schedule("clean up", queue="maintenance", every=900, body={"keep_days": 30})
    start_chain(past)


def start_chain(past: Past) -> None:
    """An import in three parts, and a summary that waits for all of them."""
    chain = past.post.publish("imports", {"file": "customers.csv"}, key="import:customers", chain=True)
    past.post.publish("summaries", {"file": "customers.csv"}, after=[chain])
    with past.post.receive("imports", renew=False) as message:
        assert message is not None
        past.wait(2)
        for part in range(3):
            message.then("import-parts", {"part": part})


def fill_failing(past: Past) -> None:
    fill_healthy(past)
    post = past.post
    past.wait(-600)
    for number in range(40):
        post.publish("orders", {"id": number, "total": 12.5}, key=f"order:{number}", group="acme", headers=HEADERS)
    with post.receive("orders", renew=False) as message:
        assert message is not None
        past.wait(1.2)
        message.retry(after=0, reason="the bank is busy")
    for _ in range(4):
        bury(past, "orders", 3, "retries_exhausted", BANK_ERROR)
        past.wait(110)
    bury(past, "orders", 3, "rejected", "no such customer")
    post.publish("reports", {"day": "2026-03-06"})
    post.pause("reports")
    post.configure("orders", max_running=20, rate="100/m")


def fill_many(past: Past) -> None:
    chance = random.Random(2)
    for number in range(200):
        past.post.publish(f"tenant-{number:03}", number)
        if number % 7:
            finish(past, f"tenant-{number:03}", 1)
    while past.minute < HISTORY_MINUTES - 1:
        for number in chance.sample(range(200), 40):
            past.post.publish(f"tenant-{number:03}", number)
            if number % 7:
                finish(past, f"tenant-{number:03}", 1)
        past.wait(600)


SCENES: dict[str, Callable[[Past], None]] = {
    "healthy": fill_healthy, "failing": fill_failing, "empty": lambda past: None, "many": fill_many,
}  # fmt: skip


def screens_of(post: Waypost) -> dict[str, str]:
    """The screens that a store has something for."""
    screens = {
        "queues": "/s/main", "schedules": "/s/main/schedules", "timers": "/s/main/timers", "workers": "/s/main/workers",
        "search": "/s/main/search?q=re", "search-nothing": f"/s/main/search?q={'0' * 24}",
        "actions": "/s/main/actions", "new-schedule": "/s/main/do/save_schedule", "problem": "/s/main/queues/nothing",
        "charts": "/s/main/charts",
    }  # fmt: skip
    if "orders" not in post.queues():
        return screens
    queue = "/s/main/queues/orders"
    screens |= {
        "charts": "/s/main/charts?queue=orders&queue=mails&minutes=360",
        "search-key": "/s/main/search?q=import:customers",
        "search-group": "/s/main/search?q=acme&by=group&queue=orders",
        "queue": queue, "queue-day": f"{queue}?state=dead&minutes=1440", "dead": f"{queue}/dead",
        "settings": f"{queue}/do/configure", "purge": f"{queue}/do/purge?state=ready", "remove": f"{queue}/do/remove",
        # These are there after clicks.
        "settings-change": f"{queue}/do/configure", "schedule-preview": "/s/main/do/save_schedule",
        "saved-views": f"{queue}?state=dead", "keys": "/s/main",
    }  # fmt: skip
    letters = post.peek("orders", 1, "dead")
    if letters:
        one = letters[0].id
        screens |= {
            "dead-letter": f"{queue}/messages/{one}", "edit": f"{queue}/do/edit_dead?id={one}",
            "redrive": f"{queue}/do/bulk_redrive", "purge-dead": f"{queue}/do/bulk_purge?reason=rejected",
        }  # fmt: skip
    timers = post.peek("reminders", 1, "delayed")
    if timers:
        reminders = "/s/main/queues/reminders"
        screens |= {
            "timer": f"{reminders}/messages/{timers[0].id}", "timer-list": f"{reminders}?state=delayed",
            "move-timer": f"{reminders}/do/reschedule?id={timers[0].id}",
            "cancel-many": f"{reminders}/do/bulk_cancel?state=delayed&key_prefix=welcome&older_than=1h",
        }  # fmt: skip
    schedules = post.schedules()
    if schedules:
        key, day = f"queue={schedules[0].queue}&key={quote(schedules[0].key, safe='')}", 86_400
        start, end = (time.strftime("%Y-%m-%dT00:00:00", time.gmtime(time.time() - ago * day)) for ago in (8, 1))
        screens["backfill"] = f"/s/main/do/backfill_schedule?{key}&start={start}&end={end}"
    parts = post.peek("import-parts", 1, "leased") or post.peek("import-parts", 1)
    if parts:
        screens["chain"] = f"/s/main/queues/import-parts/messages/{parts[0].id}"
    workers = post.workers()
    if workers:
        screens |= {
            "worker": f"/s/main/workers/{quote(workers[0].name, safe='')}",
            "stop-worker": f"/s/main/do/stop_worker?name={quote(workers[0].name, safe='')}",
        }  # fmt: skip
    return screens


def preview_settings(page: Any) -> None:
    page.get_by_label("max_running").fill("40")
    page.get_by_label("rate", exact=True).fill("")
    page.get_by_label("dead_keep").fill("604800")
    page.get_by_role("button", name="See what would change").click()


def preview_schedule(page: Any) -> None:
    for label, text in (("Name", "nightly"), ("Queue", "reports"), ("Cron pattern", "0 2 * * *")):
        page.get_by_label(label, exact=True).fill(text)
    page.get_by_label("Time zone").fill("Europe/Madrid")
    page.get_by_role("button", name="Preview").click()


#: The clicks that a screen needs after it was opened.
CLICKS: dict[str, Callable[[Any], None]] = {
    "settings-change": preview_settings,
    "schedule-preview": preview_schedule,
    "saved-views": lambda page: page.locator("details.saved summary").click(),
    "keys": lambda page: page.keyboard.press("?"),
}


def act(page: Any, base: str) -> None:
    """Do what leaves something on the page of actions: a pause, a change of settings, a bulk action, a saved view."""
    queue = f"{base}/s/main/queues/orders"
    page.goto(f"{base}/s/main/queues/mails")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()
    page.goto(f"{queue}/do/configure")
    page.get_by_label("lease", exact=True).fill("90")
    page.get_by_role("button", name="See what would change").click()
    page.get_by_role("button", name="Save").click()
    page.goto(f"{queue}?state=dead")
    page.locator("details.saved summary").click()
    page.get_by_label("This view as").fill("dead orders")
    page.locator("details.saved").get_by_role("button", name="Save").click()
    page.goto(f"{queue}/do/bulk_redrive?reason=retries_exhausted")
    page.get_by_label("Rate").fill("2/m")
    page.get_by_role("button", name="Redrive").click()
    page.locator("progress").first.wait_for()


@contextmanager
def serve(url: str) -> Iterator[str]:
    """The pages of a store; where they are."""
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(url), log_config=None))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def start_worker(post: Waypost, scene: str, stack: ExitStack) -> None:
    """Let a worker serve the queues; it is in the middle of some messages. The failing scene has none for orders."""
    ended = threading.Event()
    for queue in ("orders", "mails", "invoices", "reminders"):
        if queue != "orders" or scene == "healthy":
            post.handler(queue)(lambda body: None)

    @post.handler("import-parts", concurrency=3)
    def run_long(body: object) -> None:
        ended.wait(600)

    stack.enter_context(post.worker())
    stack.callback(ended.set)
    post.publish_many("mails", range(40))
    while post.stats("mails").ledger.ready or post.stats("import-parts").ledger.ready:
        time.sleep(0.1)


def take(browser: Any, scene: str, folder: Path, given: argparse.Namespace) -> None:
    """Take all pictures of one scene."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        url = f"sqlite:///{place}/shop.db"
        past = Past(f"{place}/shop.db")
        SCENES[scene](past)
        past.post.close()
        base = stack.enter_context(serve(url))
        post = stack.enter_context(Waypost(url))
        if "orders" in post.queues():
            start_worker(post, scene, stack)
        if scene == "failing":
            with browser.new_context() as context:
                act(context.new_page(), base)
        for size, scheme in itertools.product(given.sizes, given.schemes):
            with browser.new_context(viewport=SIZES[size], color_scheme=scheme) as context:
                take_screens(context.new_page(), post, base, folder, (scene, size, scheme), given.screens)


def take_screens(page: Any, post: Waypost, base: str, folder: Path, kind: tuple[str, str, str], wanted: str) -> None:
    """Take the pictures of each screen, in one size and scheme."""
    scene, size, scheme = kind
    for name, path in screens_of(post).items():
        if fnmatchcase(name, wanted):
            page.goto(base + path)
            if name in CLICKS:
                page.locator("#show-keys").wait_for()  # the scripts run
                CLICKS[name](page)
                page.wait_for_load_state()
            page.screenshot(path=folder / f"{scene}-{name}-{size}-{scheme}.png", full_page=name != "keys")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="python -m scripts.screenshots", description="Take pictures of every screen.")
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(SCENES))
    parser.add_argument("--screens", default="*", help="only screens of this name or pattern")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    given = parser.parse_args()
    if unknown := set(given.scenes) - set(SCENES):
        parser.error(f"the scenes are {', '.join(SCENES)}, not {', '.join(sorted(unknown))}")
    folder, scenes = given.folder, given.scenes or list(SCENES)
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to have one as root
        path = system_parts.PARTS[PROGRAM][0]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        for scene in scenes:
            take(browser, scene, folder, given)
        browser.close()
    print(f"{len(list(folder.glob('*.png')))} pictures in {folder}")


if __name__ == "__main__":
    main()
