"""Processes of two releases on one store, and what they noted.

With `politely`, processes import their modules at a low priority and take the usual one before they open the store.
Imports take 0.2 to 0.4 s of a processor, and on a small machine that alone makes the calls of the others slow: a figure
of an upgrade would measure imports.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg

from tests.upgrade.next_release import ROOT
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import Waypost
from waypost.store.postgres.schema import UNUSED_MINUTES

TRAFFIC = Path(__file__).parent / "traffic.py"
#: Messages a second of one publisher, if the caller does not say.
RATE = 100.0
#: A line of a command that takes long on a busy machine.
PROGRESS = re.compile(r"^waypost: \d+ s: .*\n", re.MULTILINE)
#: How much lower the priority of a starting process is.
POLITE = 10


class Note(NamedTuple):
    """A line that a process wrote: what it did, when it began, how long it took, and its wait for a processor."""

    what: str
    name: str
    began: float
    seconds: float
    waited: float


def can_take_priority_back() -> bool:
    """Whether a process here may have its usual priority again after a lower one."""
    script = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)"
    found = subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False)
    return sys.platform == "linux" and found.returncode == 0


class Fleet:
    """Processes of both releases on one store. A role is started in one release and replaced by the other.

    `again` is this release once more: what a deployment does to the others without any change.
    """

    def __init__(
        self, url: str, namespace: str, folder: Path, next_source: Path, *, rate: float = RATE, politely: bool = False
    ) -> None:
        self.url, self.namespace, self.folder, self.rate = url, namespace, folder, rate
        self.sources = {"this": ROOT / "src", "again": ROOT / "src", "next": next_source}
        self._lowered = POLITE if politely and can_take_priority_back() else 0
        self._python = ["nice", "-n", str(self._lowered), sys.executable] if self._lowered else [sys.executable]
        self.processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._started = 0
        #: The files of all processes, by release and what they do.
        self._files: dict[tuple[str, str], list[Path]] = {}
        #: What was read of each file, and how far.
        self._read: dict[Path, tuple[int, list[Note]]] = {}

    def start(self, release: str, *roles: str, rate: float | None = None) -> None:
        """Start a process for each role. Several of one role are told apart by a number behind it: `publish2`."""
        for role in roles:
            what = role.rstrip("0123456789")
            self._started += 1
            file = self.folder / f"{release}-{role}-{self._started}"
            self._files.setdefault((release, what), []).append(file)
            name = f"{release}{self._started}"
            self.processes[release, role] = subprocess.Popen(
                [*self._python, TRAFFIC, what, self.url, self.namespace, file, name, str(rate or self.rate)],
                env=self.environment(release),
            )

    def replace(self, old: str, new: str, *roles: str) -> None:
        """Replace processes of one release by those of the other, each when its successor has done something."""
        for role in roles:
            what = role.rstrip("0123456789")
            self.start(new, role)
            successor = self._files[new, what][-1]
            until(lambda file=successor: bool(self._notes_in(file)), f"the first of {role} by {new} release")  # type: ignore[misc]
            self.stop(old, role)

    def stop(self, release: str, *roles: str) -> None:
        """End the processes of these roles, as a deployment does."""
        stopping = [self.processes.pop((release, role)) for role in roles]
        for process in stopping:
            process.send_signal(signal.SIGTERM)
        for process in stopping:
            assert process.wait(WAIT_SECONDS_MAX) == 0, "a process ended with an error"

    def stop_all(self) -> None:
        """End every process that is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def environment(self, release: str) -> dict[str, str]:
        """Return the environment of a release's processes."""
        return os.environ | {"PYTHONPATH": str(self.sources[release]), "TRAFFIC_STARTS_LOWERED": str(self._lowered)}

    def notes(self, release: str, what: str) -> Iterator[Note]:
        """Yield what all processes of a release noted that do this."""
        for file in self._files.get((release, what), ()):
            yield from self._notes_in(file)

    def runs(self, release: str, what: str) -> list[list[Note]]:
        """Return the notes of each process of a release that did this."""
        return [self._notes_in(file) for file in self._files.get((release, what), ())]

    def _notes_in(self, file: Path) -> list[Note]:
        at, known = self._read.get(file, (0, []))
        if file.exists():
            with file.open("rb") as opened:
                opened.seek(at)
                text = opened.read()
            text = text[: text.rfind(b"\n") + 1]
            for line in text.decode().splitlines():
                noted, name, began, seconds, waited = line.split(" ")
                known.append(Note(noted, name, float(began), float(seconds), float(waited)))
            self._read[file] = (at + len(text), known)
        return known

    def all_notes(self, what: str) -> list[Note]:
        """Return what the processes of both releases noted that do this."""
        return [note for release in self.sources for note in self.notes(release, what)]

    def wait_for_more(self, release: str, what: str, count: int = 50) -> None:
        """Wait until processes of a release have noted so many more of this."""
        known = self._count(release, what)

        def is_there() -> bool:
            self.check_alive()
            return self._count(release, what) >= known + count

        until(is_there, f"{count} more of {what} by {release} release")

    def _count(self, release: str, what: str) -> int:
        return sum(map(len, self.runs(release, what)))

    def check_alive(self) -> None:
        """Fail if a process has ended by itself."""
        ended = [role for role, process in self.processes.items() if process.poll() is not None]
        assert not ended, f"processes ended by themselves: {ended}"

    def migrate(self, release: str, *options: str, seconds: float | None = None) -> tuple[int, str]:
        """Run `waypost migrate` of a release; return its exit code and what it printed, without its progress.

        With `seconds` it may take that long, and its progress is shown.
        """
        place = ("--url", self.url, "--namespace", self.namespace)
        command = ("command", "migrate", *place, *options)
        code, printed = self._run(release, self._python, str(TRAFFIC), *command, seconds=seconds)
        return code, PROGRESS.sub("", printed)

    def pass_time_without_calls(self) -> None:
        """Move back what PostgreSQL has noted about calls, as if older functions had none for 15 minutes."""
        with psycopg.connect(self.url) as connection:
            for table, column in (("used", "at_ms"), ("interface", "made_ms")):
                connection.execute(
                    f'UPDATE "{self.namespace}_{table}" SET {column} = {column} - {UNUSED_MINUTES * 60_000}'.encode()
                )

    def run(self, release: str, *arguments: str) -> tuple[int, str]:
        """Run Python of a release; return its exit code and what it printed."""
        return self._run(release, [sys.executable], *arguments)

    def _run(self, release: str, python: list[str], *arguments: str, seconds: float | None = None) -> tuple[int, str]:
        done = subprocess.run(
            [*python, *arguments], env=self.environment(release), stdout=subprocess.PIPE,
            stderr=None if seconds else subprocess.STDOUT, text=True, timeout=seconds or WAIT_SECONDS_MAX, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def configure(self, release: str, queue: str, **settings: int) -> tuple[int, str]:
        """Change settings of a queue with a client of a release."""
        script = (
            "from waypost import Waypost\n"
            f"with Waypost({self.url!r}, namespace={self.namespace!r}) as post:\n"
            f"    post.configure({queue!r}, **{settings!r})\n"
        )
        return self.run(release, "-c", script)

    # ---- what became of the messages ---------------------------------------------------------------------------

    def published(self) -> list[str]:
        """Return the bodies whose publish was acknowledged."""
        return [note.name for what in ("publish", "flow") for note in self.all_notes(what)]

    def handled(self) -> list[str]:
        """Return the bodies that were handled."""
        return [note.name for what in ("work", "receive") for note in self.all_notes(what) if note.what == "handled"]

    def wait_until_handled(self) -> None:
        """Wait until everything that was published so far is handled."""
        wanted = set(self.published())
        pause = threading.Event()
        # To compare sets of many names takes as long as a message.
        until(lambda: not pause.wait(0.1) and wanted <= set(self.handled()), "the end of the queues")

    def check_all(self) -> None:
        """Every acknowledged message was handled, and once, since no process was killed."""
        self.wait_until_handled()
        assert Counter(self.handled()) == Counter(self.published())

    def check_ledgers(self) -> None:
        """Nothing is unaccounted for in any queue."""
        with Waypost(self.url, namespace=self.namespace) as post:
            for queue in post.queues():
                ledger = post.ledger(queue)
                assert (ledger.balance, ledger.unexplained) == (0, 0), (queue, ledger)
