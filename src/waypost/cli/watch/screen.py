"""The live screen of `waypost watch`: a table of queues, and keys that act on the selected one."""

from __future__ import annotations

import argparse
import threading
import time
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from waypost.cli.action_log import logged_action
from waypost.cli.output import redact_secrets
from waypost.cli.watch.collector import HEADERS, TICK_SECONDS, Collector, QueueLine, format_cells, format_totals
from waypost.client import Waypost
from waypost.errors import WaypostError
from waypost.formatting import format_call, printable
from waypost.views import ActionUndo

#: The columns of figures, each with a space before it; together with a short name they fit 80 columns.
WIDTHS = {
    "ready": 6, "timers": 7, "leased": 7, "dead": 6, "oldest": 7, "in/s": 6, "out/s": 6, "wait": 6, "run": 6, "work": 5,
    "lag": 6,
}  # fmt: skip
NAME_WIDTH_MIN = 12


def align_right(text: str) -> Text:
    """Return a figure aligned to the right."""
    return Text(text, justify="right")


def format_row(line: QueueLine) -> list[str | Text]:
    """Return the cells of a table row. A name is text, never markup."""
    name, *figures = format_cells(line)
    return [Text(printable(name), overflow="ellipsis"), *map(align_right, figures)]


class Question(ModalScreen[bool]):
    """A yes-or-no question."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical { width: 60; height: auto; border: round $warning; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """Show the question and the keys."""
        yield Vertical(Static(self.text, markup=False), Static("y: yes    n: no", markup=False))

    def action_answer(self, answer: bool) -> None:
        """Close with an answer."""
        self.dismiss(answer)


class WatchScreen(App[None]):
    """Shows the queues live. A thread talks to the store, so a slow store never blocks the keys."""

    TITLE = "waypost"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #totals { height: 1; text-style: bold; }
    #status { height: 1; color: $warning; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause"),
        Binding("r", "resume", "resume"),
        Binding("d", "redrive", "redrive dead letters"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, post: Waypost) -> None:
        super().__init__()
        self._client = post
        self._collector = Collector(post)
        self._store_lock = threading.Lock()
        self._lines: list[QueueLine] = []
        self._unreachable = False

    def compose(self) -> ComposeResult:
        """Show a line of totals, the table, a status line, and the keys."""
        yield Static("loading …", id="totals", markup=False)
        yield DataTable[str | Text](id="queues", cursor_type="row", cell_padding=0)
        yield Static("", id="status", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Create the columns and start polling."""
        listing = self._table
        # The name gets the rest of the width.
        room = self.size.width - sum(WIDTHS.values())
        for header in HEADERS:
            width = WIDTHS.get(header) or max(NAME_WIDTH_MIN, room)
            listing.add_column(align_right(header) if header in WIDTHS else header, key=header, width=width)
        listing.focus()
        self._poll()
        self.set_interval(TICK_SECONDS, self._poll)

    @property
    def _table(self) -> DataTable[str | Text]:
        return self.query_one("#queues", DataTable)

    @property
    def selected(self) -> str | None:
        """The queue under the cursor."""
        row = self._table.cursor_row
        return self._lines[row].queue if 0 <= row < len(self._lines) else None

    # ---- polling -------------------------------------------------------------------------------------------------

    @work(thread=True)
    def _poll(self) -> None:
        if not self._store_lock.acquire(blocking=False):
            return  # the last poll is still running
        try:
            self._collector.selected = self.selected
            self._collector.tick(time.monotonic())
        except WaypostError as error:
            self._unreachable = True
            self.call_from_thread(self._set_status, f"the store does not answer: {error}")
        else:
            self.call_from_thread(self._refresh_table)
            if self._unreachable:
                self._unreachable = False
                self.call_from_thread(self._set_status, "")
        finally:
            self._store_lock.release()

    def _refresh_table(self) -> None:
        lines = self._collector.lines()
        listing = self._table
        if [line.queue for line in lines] != [line.queue for line in self._lines]:
            selected = self.selected
            listing.clear()
            for line in lines:
                listing.add_row(*format_row(line), key=line.queue)
            names = [line.queue for line in lines]
            if selected in names:
                listing.move_cursor(row=names.index(selected))
        else:
            for line in lines:
                for header, cell in zip(HEADERS, format_row(line), strict=True):
                    listing.update_cell(line.queue, header, cell)
        self._lines = lines
        self.query_one("#totals", Static).update(format_totals(lines, self._collector.workers))

    def _set_status(self, text: str) -> None:
        self.query_one("#status", Static).update(printable(redact_secrets(text)))

    # ---- actions -------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Pause the queue under the cursor."""
        if self.selected is not None:
            self._start_action("pause", self.selected)

    def action_resume(self) -> None:
        """Resume the queue under the cursor."""
        if self.selected is not None:
            self._start_action("resume", self.selected)

    def action_redrive(self) -> None:
        """Redrive the dead letters of the queue under the cursor, after a question."""
        queue = self.selected
        if queue is None:
            return
        dead = next(line.dead for line in self._lines if line.queue == queue)
        if dead == 0:
            self._set_status(f"{queue} has no dead letters")
            return

        def answered(answer: bool | None) -> None:
            if answer:
                self._start_action("redrive", queue)
            else:
                self._set_status("nothing was done")

        self.push_screen(Question(f"Make {dead:,} dead letters of {queue} ready again?"), answered)

    @work(thread=True)
    def _start_action(self, verb: str, queue: str) -> None:
        try:
            with self._store_lock:
                text = self._run_action(verb, queue)
                self._collector.poll_now(queue, time.monotonic())
        except WaypostError as error:
            self.call_from_thread(self._set_status, f"{verb} {queue}: {error}")
            return
        self.call_from_thread(self._refresh_table)
        self.call_from_thread(self._set_status, text)

    def _run_action(self, verb: str, queue: str) -> str:
        """Act on a queue, log it as the command that does the same, and return what was done."""
        same = argparse.Namespace(arguments=["dead", "redrive", queue, "--all"] if verb == "redrive" else [verb, queue])
        with logged_action(same, self._client, verb, queue, format_call(verb, queue)) as entry:
            if verb == "pause":
                changed = self._client.pause(queue)
                entry.text = f"{queue} is paused" if changed else f"{queue} was paused already"
            elif verb == "resume":
                changed = self._client.resume(queue)
                entry.text = f"{queue} is resumed" if changed else f"{queue} was not paused"
            else:
                done = self._client.redrive(queue)
                changed = bool(done.moved)
                entry.text = f"{len(done.moved):,} dead letters of {queue} made ready again"
                if done.duplicates:
                    entry.text += f", {len(done.duplicates):,} stay dead: their keys are in use"
            entry.undo = ActionUndo.of(verb, changed=changed)
        return entry.text
