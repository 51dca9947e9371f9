"""Take pictures of every screen of the web page, on a phone and a desk, light and dark, with four kinds of stores.

    python -m scripts.screenshots FOLDER [SCENE …]

The scenes are `healthy`, `failing`, `empty` and `many` (200 queues). Look at the pictures after a change of the pages:
no test sees whether a page is pleasant to read. It needs the Chromium of the machine (scripts/system_parts.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from scripts import system_parts
from waypost import Waypost
from waypost.web import create_app
from waypost.web.server import bind

PROGRAM = "chromium-headless-shell"
SIZES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
BANK_ERROR = """Traceback (most recent call last):
  File "shop/payments.py", line 41, in charge
    bank.pay(order)
TimeoutError: the bank did not answer within 30 s"""


def finish(post: Waypost, queue: str, count: int) -> None:
    """Handle some messages."""
    for _ in range(count):
        with post.receive(queue):
            pass


def bury(post: Waypost, queue: str, count: int, reason: str, error: str) -> None:
    """Make some dead letters."""
    for _ in range(count):
        with post.receive(queue) as message:
            assert message is not None
            message.dead(reason, error)


def fill_healthy(post: Waypost) -> None:
    for queue, count in (("orders", 40), ("mails", 25), ("invoices", 12)):
        post.publish_many(queue, ({"number": number} for number in range(count)))
        finish(post, queue, count)
    for number in range(5):
        post.publish("reminders", "your cart", delay=600 * (number + 1), key=f"cart:{number}")
    post.save_schedule("daily report", queue="reports", cron="0 9 * * mon-fri", tz="Europe/Madrid", body={})


def fill_failing(post: Waypost) -> None:
    fill_healthy(post)
    for number in range(40):
        post.publish("orders", {"id": number, "total": 12.5}, key=f"order:{number}", group="acme")
    bury(post, "orders", 12, "retries_exhausted", BANK_ERROR)
    bury(post, "orders", 3, "rejected", "no such customer")
    with post.receive("orders") as message:
        assert message is not None
        message.retry(after=0, reason="the bank is busy")
    post.publish("reports", {"day": "2026-03-06"})
    post.pause("reports")
    post.configure("orders", max_running=20, rate="100/m")


def fill_many(post: Waypost) -> None:
    for number in range(200):
        post.publish(f"tenant-{number:03}", number)
        if number % 7:
            finish(post, f"tenant-{number:03}", 1)


SCENES: dict[str, Callable[[Waypost], None]] = {
    "healthy": fill_healthy, "failing": fill_failing, "empty": lambda post: None, "many": fill_many,
}  # fmt: skip


def screens_of(post: Waypost) -> dict[str, str]:
    """The screens that a store has something for."""
    screens = {
        "queues": "/s/main", "schedules": "/s/main/schedules", "timers": "/s/main/timers", "workers": "/s/main/workers",
        "search": "/s/main/search?q=re",
    }  # fmt: skip
    if "orders" not in post.queues():
        return screens
    queue = "/s/main/queues/orders"
    screens |= {"queue": queue, "dead": f"{queue}/dead", "settings": f"{queue}/do/configure"}
    letters = post.peek("orders", 1, "dead")
    if letters:
        screens |= {"dead-letter": f"{queue}/messages/{letters[0].id}", "redrive": f"{queue}/do/redrive?all=true"}
    return screens


def take(browser: Any, scene: str, folder: Path) -> None:
    """Take all pictures of one scene."""
    with tempfile.TemporaryDirectory() as place, Waypost(f"sqlite:///{place}/shop.db") as post:
        SCENES[scene](post)
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
