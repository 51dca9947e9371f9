"""Writes what a worker logs into docs/how-to/run-handlers.md: success, retry, dead letter, Ctrl-C, a lost store.

    python -m scripts.record_logs

Each scene is a real `waypost worker` on a real store. Times, ids, names of workers, durations and paths are replaced by
fixed ones, so that a recording changes only if the log does. A test compares the page with new recordings, but for
the lost store, whose lines depend on how fast the machine is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from waypost import Waypost
from waypost.testing.servers import ValkeyServer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "run-handlers.md"
BEGIN, END = "<!-- written by scripts/record_logs.py -->", "<!-- end of what it wrote -->"
WAIT_SECONDS_MAX = 60.0
SHOP = """\
import os
import time

from waypost import Constant, Message, Waypost

post = Waypost(os.environ["WAYPOST_URL"])


@post.handler("orders", retry=Constant(attempts=2, pause=0.5, jitter=0))
def charge(order: dict[str, str], message: Message) -> None:
    card = order["card"]
    if card == "refused" or (card == "slow gateway" and message.attempts == 0):
        raise ValueError(f"the card was refused: {card}")
    if card == "slow":
        open("started", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
"""
REPLACED = (
    (r"waypost worker \S+:\d+:\w+", "waypost worker shop-1:4711:9f3a2b7c"),
    (r"\b[0-9a-z]{24}\b", "1m7fra5gs06ap4cfk9b5jsq9"),
    (r"done in [\d.]+ m?s", "done in 12 ms"),
    (r'File "[^"]*/shop\.py"', 'File "shop.py"'),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:6379"),
)
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", re.MULTILINE)


class Scene:
    """A worker of the shop, and what it has logged so far."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._log = folder / "log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WAYPOST_")}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waypost.cli.main", "worker", "shop", "--log-done", "info", "--no-scheduler"],
                cwd=folder, stdout=subprocess.DEVNULL, stderr=log,
                env=kept | {"WAYPOST_URL": url, "PYTHONPATH": str(ROOT / "src")},
                # The process that runs this may ignore it (a shell's background), and then so would the worker.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )  # fmt: skip

    def text(self) -> str:
        """Return what was logged."""
        return self._log.read_text()

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until something is so."""
        until = time.monotonic() + WAIT_SECONDS_MAX
        while not condition():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"it did not happen:\n{self.text()}")
            time.sleep(0.01)

    def wait_logged(self, text: str) -> None:
        """Wait until a text is logged."""
        self.wait(lambda: text in self.text())

    def press_ctrl_c(self) -> None:
        """Stop the worker as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def finish(self) -> str:
        """Wait for the end of the worker, and return its log with fixed times, ids, durations and names."""
        self.process.wait(WAIT_SECONDS_MAX)
        text = self.text()
        for pattern, fixed in REPLACED:
            text = re.sub(pattern, fixed, text)
        seconds = iter(range(10_000))
        return TIME.sub(lambda _: f"2026-03-06 09:00:{next(seconds):02},000", text).rstrip()


@contextmanager
def started(url: str | None = None) -> Iterator[Scene]:
    """A scene in a folder of its own, on SQLite unless a URL is given."""
    with tempfile.TemporaryDirectory(prefix="waypost-logs-") as name:
        folder = Path(name)
        (folder / "shop.py").write_text(SHOP)
        scene = Scene(folder, url or f"sqlite:///{folder / 'shop.db'}")
        try:
            scene.wait_logged("stop with SIGINT")
            yield scene
        finally:
            if scene.process.poll() is None:
                scene.process.kill()
            scene.process.wait()


def publish(scene: Scene, card: str, url: str | None = None) -> None:
    with Waypost(url or f"sqlite:///{scene.folder / 'shop.db'}") as post:
        post.publish("orders", {"card": card})


def record_order(card: str, end: str) -> str:
    """Return the log of one order, until a text is logged. Ctrl-C has a recording of its own."""
    with started() as scene:
        publish(scene, card)
        scene.wait_logged(end)
        scene.press_ctrl_c()
        return re.sub(r"^.* SIGINT: .*\n", "", scene.finish(), flags=re.MULTILINE)


def record_success() -> str:
    """Return the log of an order that is done."""
    return record_order("good", "done in")


def record_retry() -> str:
    """Return the log of an order that is done at the second attempt."""
    return record_order("slow gateway", "done in")


def record_dead_letter() -> str:
    """Return the log of an order that becomes a dead letter."""
    return record_order("refused", "dead letter:")


def record_stop() -> str:
    """Return the log of Ctrl-C while a handler runs."""
    with started() as scene:
        publish(scene, "slow")
        scene.wait((scene.folder / "started").exists)
        scene.press_ctrl_c()
        scene.wait_logged("waiting up to")
        (scene.folder / "go").touch()
        return scene.finish()


def record_lost_store() -> str:
    """Return the log of a worker whose server goes away and comes back."""
    with ValkeyServer(appendonly=True) as server, started(server.url) as scene:
        publish(scene, "good", server.url)
        scene.wait_logged("done in")
        server.stop()
        scene.wait_logged("could not poll")
        server.start()
        publish(scene, "good", server.url)
        scene.wait(lambda: scene.text().count("done in") == 2)
        scene.press_ctrl_c()
        return scene.finish()


SCENES: dict[str, Callable[[], str]] = {
    "Success, with `--log-done info`": record_success,
    "A retry": record_retry,
    "A dead letter": record_dead_letter,
    "Ctrl-C while a handler runs": record_stop,
    "The store is away for a moment": record_lost_store,
}


def block(title: str, text: str) -> str:
    """Return a recording as it is on the page."""
    return f"{title}:\n\n```text\n{text}\n```\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    blocks = "\n".join(block(title, record()) for title, record in SCENES.items())
    PAGE.write_text(f"{before}{BEGIN}\n{blocks}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
