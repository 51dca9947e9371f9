"""Take pictures of every screen of the web page, on a phone and a desk, light and dark, with four kinds of stores.

    python -m scripts.screenshots FOLDER [SCENE …]

The scenes are `healthy`, `failing`, `empty` and `many` (200 queues). Look at the pictures after a change of the pages:
no test sees whether a page is pleasant to read. It needs the Chromium of the machine (scripts/system_parts.py).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from scripts import system_parts
from waypost import Waypost
from waypost.store.sqlite import SqliteStore
from waypost.web import create_app
from waypost.web.server import bind

PROGRAM = "chromium-headless-shell"
SIZES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
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
    }  # fmt: skip
    if "orders" not in post.queues():
        return screens
    queue = "/s/main/queues/orders"
    screens |= {
        "charts": "/s/main/charts?queue=orders&queue=mails&minutes=360",
        "queue": queue, "queue-day": f"{queue}?state=dead&minutes=1440", "dead": f"{queue}/dead",
        "settings": f"{queue}/do/configure", "purge": f"{queue}/do/purge?state=ready", "remove": f"{queue}/do/remove",
    }  # fmt: skip
    letters = post.peek("orders", 1, "dead")
    if letters:
        screens |= {"dead-letter": f"{queue}/messages/{letters[0].id}", "redrive": f"{queue}/do/redrive?all=true"}
    timers = post.peek("reminders", 1, "delayed")
    if timers:
        reminders = "/s/main/queues/reminders"
        screens |= {"timer": f"{reminders}/messages/{timers[0].id}", "timer-list": f"{reminders}?state=delayed"}
    return screens


def take(browser: Any, scene: str, folder: Path) -> None:
    """Take all pictures of one scene."""
    with tempfile.TemporaryDirectory() as place, Waypost(f"sqlite:///{place}/shop.db") as post:
        past = Past(f"{place}/shop.db")
        SCENES[scene](past)
        past.post.close()
        for queue in ("orders", "mails", "invoices", "reminders") if post.queues() else ():
            post.handler(queue)(lambda body: None) if queue != "orders" or scene == "healthy" else None
        listening = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(create_app(f"sqlite:///{place}/shop.db"), log_config=None))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        if post.handlers:
            with post.worker():
                take_screens(browser, post, base, scene, folder)
        else:
            take_screens(browser, post, base, scene, folder)
        server.should_exit = True
        thread.join()
        listening.close()


def take_screens(browser: Any, post: Waypost, base: str, scene: str, folder: Path) -> None:
    """Take the pictures of each screen, size and scheme."""
    for size, viewport in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            page = context.new_page()
            for name, path in screens_of(post).items():
                page.goto(base + path)
                page.screenshot(path=folder / f"{scene}-{name}-{size}-{scheme}.png", full_page=True)
            context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="python -m scripts.screenshots", description="Take pictures of every screen.")
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(SCENES))
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
            take(browser, scene, folder)
        browser.close()
    print(f"{len(list(folder.glob('*.png')))} pictures in {folder}")


if __name__ == "__main__":
    main()
