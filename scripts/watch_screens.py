"""Writes the screens of `waypost watch` in docs/how-to/see-what-happens.md: a shop in which several things are wrong.

    python -m scripts.watch_screens

The real view runs on a memory store whose clock stands still, without a terminal. A test fails while the page and the
view differ.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from waypost import NoRetry, Waypost
from waypost.cli.watch.screen import QueueView, WatchScreen
from waypost.store.port import Heartbeat, ServedQueue
from waypost.testing.clock import ManualClock

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "see-what-happens.md"
BEGIN, END = "<!-- written by scripts/watch_screens.py -->", "<!-- end of what it wrote -->"
ID = re.compile(r"\b[0-9a-z]{24}\b")
#: How often the view is given time until what is waited for is on it.
TURNS_MAX = 2_000


def refuse_card() -> None:
    raise ValueError("the card was refused")


def lose_gateway() -> None:
    raise TimeoutError("no answer from the payment gateway")


@contextmanager
def broken_shop() -> Iterator[Waypost]:
    """A shop of five queues: one is well, one has dead letters and a red worker, one no worker, one is paused."""
    clock = ManualClock()
    with Waypost("memory://", clock=clock) as post:
        for minute in range(60):
            post.publish_many("orders", range(2 + minute % 7))
            for _ in range(2 + minute % 7):
                handle(post, "orders", lambda: clock.advance_ms(40))
            if minute > 40:
                post.publish("payments", minute)
                handle(post, "payments", lose_gateway if minute % 3 else refuse_card)
            if minute == 55:
                post.publish_many("payments", range(31))
                post.publish_many("mails", range(1_204))
                post.publish_many("reminders", range(86), delay=3_600)
                post.publish_many("reports", range(3))
                post.pause("reports")
            clock.advance(59)
        register(post, "shop-1:4711", ("orders", "reminders", "reports"))
        register(post, "shop-2:5120", ("payments",), "red", "no claim was possible for 95 s: connection refused")
        yield post


def handle(post: Waypost, queue: str, work: Callable[[], object]) -> None:
    """Receive one message and do something with it; a failure makes it a dead letter."""
    try:
        with post.receive(queue, retry=NoRetry()):
            work()
    except (ValueError, TimeoutError):
        pass  # the message is dead


def register(post: Waypost, name: str, queues: tuple[str, ...], status: str = "green", *reasons: str) -> None:
    """Register a worker, as its heartbeat does."""
    served = tuple(ServedQueue(queue, 10, 0, 100, 500) for queue in queues)
    executor = post.store.connect(start_timeout=20)
    try:
        executor.run(
            post.store.heartbeat(Heartbeat(name, "shop", 1, "0.2", "running", status, reasons, queues=served), 60_000)
        )
    finally:
        executor.close()


async def screen_of(post: Waypost, width: int, height: int, opened: str | None = None) -> str:
    """Return the text of the view at a size, of the list or of a queue."""
    view = WatchScreen(post)
    async with view.run_test(size=(width, height)) as pilot:

        async def wait(is_there: Callable[[], bool]) -> None:
            for _ in range(TURNS_MAX):
                if is_there():
                    return
                await pilot.pause(0.01)
            raise RuntimeError(f"the view did not get there:\n{text_of(view)}")

        await wait(lambda: "orders" in text_of(view) and "quit" in text_of(view))
        if opened is not None:
            await pilot.press("slash", *opened, "enter", "enter")
            await wait(lambda: isinstance(view.screen, QueueView) and "recent errors" in text_of(view))
        return text_of(view)


def text_of(view: WatchScreen) -> str:
    """Return what is on the screen, with an id in place of each that was made up."""
    lines = ["".join(segment.text for segment in strip).rstrip() for strip in view.screen._compositor.render_strips()]
    return ID.sub("1m7fra5gs06ap4cfk9b5jsq9", "\n".join(lines))


def written() -> str:
    """Return the screens as they are on the page."""

    async def screens() -> list[str]:
        return [
            await screen_of(post, 70, 11),
            await screen_of(post, 70, 30, "payments"),
            await screen_of(post, 140, 10),
        ]

    with broken_shop() as post:
        narrow, opened, wide = asyncio.run(screens())
    return (
        f"{BEGIN}\nIn 70 columns:\n\n```text\n{narrow}\n```\n\nEnter on `payments`:\n\n```text\n{opened}\n```\n\n"
        f"In 140 columns:\n\n```text\n{wide}\n```\n{END}"
    )


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + written() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
