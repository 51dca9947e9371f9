"""This release and the next one side by side on one store: through an upgrade, back, and through it again.

The next release is a build of this one with a planted change in every layer (see tests/upgrade/next_release.py). Two
publishers, two workers with schedulers, two receivers and two readers of the journal run all the time; the processes
of one release are replaced by those of the other. The figures: what was lost or doubled, whether the releases read the
same, and the slowest publishes and claims. These are compared with a control: the same steps, in the same rhythm, with
processes of this release in place of the next one, so with every start of a process and without an upgrade.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.fault.figure import Figure
from tests.upgrade.fleet import Fleet, Note
from tests.upgrade.next_release import NEXT_RELEASE, build
from tests.upgrade.traffic import TICK_SECONDS
from tests.waiting import until
from waypost import CatchUp, Waypost
from waypost.errors import WaypostError
from waypost.release import VERSION

LONGEST_SECONDS_MAX = 0.5
P99_TIMES_MAX = 3.0
FIRST, SECOND = ("publish", "work", "receive", "read"), ("publish2", "work2", "receive2", "read2")
#: What a client of the next release reports at the end.
REPORT = """
import json
from waypost import Waypost
with Waypost({url!r}, namespace={namespace!r}) as post:
    ledgers = {{queue: post.ledger(queue) for queue in post.queues()}}
    (schedule,) = post.schedules()
    print(json.dumps({{
        "ledgers": {{queue: [one.published, one.done, one.balance, one.unexplained,
                    sum(one.redelivered.values()) - one.redelivered["snoozed"]] for queue, one in ledgers.items()}},
        "fires": schedule.fires,
    }}))
"""


def release_figures(url: str, namespace: str, *, quick: bool, timed: bool = True) -> Iterator[Figure]:
    """Upgrade, take that back, and upgrade again, all under load."""
    with TemporaryDirectory() as folder:
        source = build(Path(folder) / "next")
        fleet = Fleet(url, namespace, Path(folder), source, rate=25.0 if quick else 100.0, politely=timed)
        try:
            upgrade = Upgrade(fleet, seconds=1.0 if quick else 15.0, in_pairs=not quick)
            yield from upgrade.run(with_control=timed)
            yield from judge(fleet, upgrade.report)
            if timed:
                yield from upgrade.times()
        finally:
            fleet.stop_all()


class Upgrade:
    """The steps of an upgrade, and when they began and ended."""

    def __init__(self, fleet: Fleet, *, seconds: float, in_pairs: bool) -> None:
        self.fleet = fleet
        #: Whether a second process of each role is there before the upgrade; in a small run the next release adds it.
        self._in_pairs = in_pairs
        self._messages = int(fleet.rate * seconds)
        self._versions = {"this": VERSION, "again": VERSION, "next": NEXT_RELEASE}
        self._usual = self._restarts = self._upgrade = (0.0, 0.0)
        self.report: dict[str, Any] = {}

    def run(self, *, with_control: bool) -> Iterator[Figure]:
        """Run all steps; before them, with a control, the same ones with this release in place of the next."""
        fleet, old = self.fleet, "this"
        with Waypost(fleet.url, namespace=fleet.namespace) as post:
            post.save_schedule("tick", queue="ticks", every=TICK_SECONDS, body="tick", missed=CatchUp(500))
            post.publish("planted", 0)
        fleet.start("this", *FIRST, *(SECOND if self._in_pairs else ()))
        self._go_on("this")
        began = time.monotonic()
        self._go_on("this", self._messages)
        self._usual = (began, time.monotonic())
        if with_control:
            began = time.monotonic()
            for _ in self._there_and_back("this", "again"):
                pass
            for _ in self._to_the_end("this", "again"):
                pass
            self._restarts = (began, time.monotonic())
            if not self._in_pairs:
                fleet.stop("again", *SECOND)
            old = "again"
        began = time.monotonic()
        yield from self._there_and_back(old, "next")
        yield from self._to_the_end(old, "next")
        self._upgrade = (began, time.monotonic())
        fleet.stop("next", "publish", "publish2")
        fleet.wait_until_handled()
        fleet.stop("next", "work", "work2", "receive", "receive2")
        self._let_readers_end()

    def _there_and_back(self, old: str, new: str) -> Iterator[Figure]:
        """Replace one process of each role, and take that back."""
        fleet = self.fleet
        code, printed = fleet.migrate(new)
        assert code == 0, printed
        self._replace_second(old, new)
        self._go_on(old, self._messages // 2)
        yield self._registered({self._versions[old], self._versions[new]})
        code, printed = fleet.configure(new, "planted", planted=1)
        refused = code != 0 and "--finish" in printed
        yield Figure("mixed releases: a new setting", "refused" if refused else printed, "refused", refused)
        # Messages with newer envelopes are left for the next attempt.
        if self._in_pairs:
            fleet.replace(new, old, *SECOND)
        else:
            fleet.stop(new, *SECOND)
        code, printed = fleet.migrate(new, "--undo")
        yield Figure("mixed releases: taken back", f"exit code {code}", "0", code == 0)
        self._go_on(old, self._messages // 2)

    def _to_the_end(self, old: str, new: str) -> Iterator[Figure]:
        """Replace all processes, and finish."""
        fleet = self.fleet
        code, printed = fleet.migrate(new)
        assert code == 0, printed
        self._replace_second(old, new)
        fleet.replace(old, new, *FIRST)
        yield from self._finish(new)
        self._go_on(new, self._messages // 2)

    def _go_on(self, release: str, messages: int = 10) -> None:
        for what in ("publish", "work", "receive"):
            self.fleet.wait_for_more(release, what, messages if what == "publish" else messages // 4)

    def _replace_second(self, old: str, new: str) -> None:
        if self._in_pairs:
            self.fleet.replace(old, new, *SECOND)
        else:
            self.fleet.start(new, *SECOND)
        self._go_on(new)

    def _registered(self, wanted: set[str]) -> Figure:
        """Workers of both releases are registered, each with its own."""
        with Waypost(self.fleet.url, namespace=self.fleet.namespace) as post:
            until(lambda: {worker.version for worker in post.workers()} == wanted, "workers of both releases")
        return Figure("mixed releases: registered workers", ", ".join(sorted(wanted)), "both releases", True)

    def _finish(self, new: str) -> Iterator[Figure]:
        code, printed = 1, ""

        def is_alone() -> bool:
            """Whether no worker is left: one that did not reach the store at its end stays in the list for a while."""
            nonlocal code, printed
            code, printed = self.fleet.migrate(new, "--finish")
            return "is registered" not in printed

        until(is_alone, "the end of the last old worker")
        if "calls of older functions" in printed:
            # Processes that only publish do not register, so PostgreSQL waits for 15 minutes without a call.
            self.fleet.pass_time_without_calls()
            code, printed = self.fleet.migrate(new, "--finish")
        yield Figure("mixed releases: finished", printed.splitlines()[0], "exit code 0", code == 0)
        code, printed = self.fleet.configure(new, "planted", planted=1)
        yield Figure("mixed releases: a new setting then", f"exit code {code}", "0", code == 0)
        error = ""
        try:
            with Waypost(self.fleet.url, namespace=self.fleet.namespace) as late:
                late.publish("planted", 1)
        except WaypostError as raised:
            error = type(raised).__name__
        yield Figure("mixed releases: a late old process", error, "SchemaTooNew", error == "SchemaTooNew")

    def _let_readers_end(self) -> None:
        """Wait until the readers have read what the others noted at the end, and end them."""
        self.report = report(self.fleet)
        done: int = self.report["ledgers"]["orders"][1]

        def have_read() -> bool:
            newest = self.fleet.runs("next", "read")[-1]
            return sum(note.name.split(":")[1] == "done" for note in newest) == done

        until(have_read, "the end of the journal")
        self.fleet.stop("next", "read", "read2")

    def times(self) -> Iterator[Figure]:
        """Compare the publishes and claims of the upgrade with those of a restart without one, and with the usual."""
        return compare_times("mixed releases", self.fleet, self._usual, [self._upgrade], restarts=self._restarts)


class Times(NamedTuple):
    """How long the calls of some spans of time took."""

    number: int
    longest: float
    p99: float
    #: The part of the slowest percent's time in which the client could run and had no processor.
    waited: float

    @classmethod
    def of(cls, notes: Sequence[Note], windows: Sequence[tuple[float, float]]) -> Times:
        """Return the times of the calls that began in one of these spans."""
        chosen = sorted(
            (note.seconds, note.waited) for note in notes if any(first <= note.began < last for first, last in windows)
        )
        slowest = chosen[min(len(chosen) - 1, int(len(chosen) * 0.99)) :]
        waited = sum(waited for _, waited in slowest) / sum(seconds for seconds, _ in slowest)
        return cls(len(chosen), chosen[-1][0], slowest[0][0], waited)


def compare_times(
    title: str,
    fleet: Fleet,
    usual: tuple[float, float],
    upgrade: Sequence[tuple[float, float]],
    *,
    restarts: tuple[float, float] | None = None,
) -> Iterator[Figure]:
    """Compare how long single publishes and claims took in an upgrade with those before it.

    If processes are replaced meanwhile, `restarts` is a span in which the same happened without an upgrade: what a
    start of a process takes from the others is not the upgrade's.
    """
    for name, what in (("publish", "publish"), ("claim", "receive")):
        notes = [note for note in fleet.all_notes(what) if note.what in ("published", "handled")]
        during, before = Times.of(notes, upgrade), Times.of(notes, [usual])
        control = before if restarts is None else Times.of(notes, [restarts])
        restarted = "" if restarts is None else f"restarts of one release {control.longest * 1000:.0f} ms, "
        yield Figure(
            f"{title}: longest {name} of {during.number}",
            f"{during.longest * 1000:.0f} ms, {restarted}before {before.longest * 1000:.0f} ms",
            f"{LONGEST_SECONDS_MAX * 1000:.0f} ms",
            during.longest <= LONGEST_SECONDS_MAX,
        )
        restarted = "" if restarts is None else f"restarts of one release {control.p99 * 1000:.1f} ms, "
        yield Figure(
            f"{title}: p99 of {name}",
            f"{during.p99 * 1000:.1f} ms, {restarted}before {before.p99 * 1000:.1f} ms; "
            f"{during.waited:.0%} of the slowest waited for a processor",
            f"{P99_TIMES_MAX:.0f} times as long as {'before' if restarts is None else 'restarts'}",
            during.p99 <= P99_TIMES_MAX * control.p99,
        )


def report(fleet: Fleet) -> dict[str, Any]:
    """Return ledgers and fires as a client of the next release reads them."""
    code, printed = fleet.run("next", "-c", REPORT.format(url=fleet.url, namespace=fleet.namespace))
    assert code == 0, printed
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def judge(fleet: Fleet, found: dict[str, Any]) -> Iterator[Figure]:
    """Compare what was published, fired, handled and read."""
    published, handled = Counter(fleet.published()), Counter(fleet.handled())
    ledgers = found["ledgers"]
    lost = published - handled
    again, explained = (handled - published).total(), sum(ledger[4] for ledger in ledgers.values())
    yield Figure(
        f"mixed releases: {published.total()} messages",
        f"lost {lost.total()}, doubled {again} ({explained} explained)",
        "0, as many as explained",
        not lost and again <= explained,
    )
    sound = all(tuple(ledger[2:4]) == (0, 0) for ledger in ledgers.values())
    yield Figure("mixed releases: ledgers", "balanced" if sound else f"{ledgers}", "balanced", sound)
    ticked = Counter(note.what for note in fleet.all_notes("work"))["ticked"]
    fired, ticks = found["fires"], ledgers["ticks"]
    yield Figure(
        "mixed releases: ticks", f"fired {fired}, published {ticks[0]}, handled {ticked} of {ticks[1]}",
        "all equal, none ready but the last", fired == ticks[0] and ticked == ticks[1] and fired > 0,
    )  # fmt: skip
    yield from judge_readers(fleet)


def judge_readers(fleet: Fleet) -> Iterator[Figure]:
    """Every reader saw each event once and in order, and all saw the same."""
    seen: dict[int, str] = {}
    gaps = differences = 0
    runs = [notes for release in fleet.sources for notes in fleet.runs(release, "read")]
    for notes in runs:
        for place, note in enumerate(notes, 1):
            number, _, event = note.name.partition(":")
            gaps += int(number) != place
            differences += seen.setdefault(int(number), event) != event
    yield Figure(
        f"mixed releases: journal, {len(runs)} readers, {len(seen)} events", f"gaps {gaps}, differences {differences}",
        "0, 0", gaps == differences == 0 and len(seen) > 0,
    )  # fmt: skip
