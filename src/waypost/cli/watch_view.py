"""The live view of `waypost watch`: a table of queues, refreshed by a thread, and keys that act on the one chosen."""

from __future__ import annotations

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

from waypost.cli.output import without_secrets
from waypost.cli.watching import HEADERS, TICK_SECONDS, Line, Watcher, cells, totals
from waypost.client import Waypost
from waypost.errors import WaypostError
from waypost.formatting import printable

#: The columns of figures, each with a space before it; together with a short name they fit 80 columns.
WIDTHS = {
    "ready": 6, "timers": 7, "leased": 7, "dead": 6, "oldest": 7, "in/s": 6, "out/s": 6, "wait": 6, "run": 6, "work": 5,
    "lag": 6,
}  # fmt: skip
NAME_WIDTH_MIN = 12


def figure(text: str) -> Text:
    """A figure stands right."""
    return Text(text, justify="right")


def shown(line: Line) -> list[str | Text]:
    """A line as the table shows it. A name is text, and never markup."""
    name, *figures = cells(line)
    return [Text(printable(name), overflow="ellipsis"), *map(figure, figures)]


class Question(ModalScreen[bool]):
    """A question with two answers."""

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
        """The question, and how to answer it."""
        yield Vertical(Static(self.text, markup=False), Static("y: yes    n: no", markup=False))

    def action_answer(self, answer: bool) -> None:
        """End with an answer."""
        self.dismiss(answer)


class WatchView(App[None]):
    """Queues live. The store is asked by one thread at a time, so a slow one never freezes the keys."""

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
        self._watcher = Watcher(post)
        self._asking = threading.Lock()
        self._lines: list[Line] = []
        self._away = False

    def compose(self) -> ComposeResult:
        """A line of totals, the table, a line for what happened, and the keys."""
        yield Static("looking …", id="totals", markup=False)
        yield DataTable[str | Text](id="queues", cursor_type="row", cell_padding=0)
        yield Static("", id="status", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        listing = self._table
        # The name has what the figures leave of the terminal.
        room = self.size.width - sum(WIDTHS.values())
        for header in HEADERS:
            width = WIDTHS.get(header) or max(NAME_WIDTH_MIN, room)
            listing.add_column(figure(header) if header in WIDTHS else header, key=header, width=width)
        listing.focus()
        self._look()
        self.set_interval(TICK_SECONDS, self._look)

    @property
    def _table(self) -> DataTable[str | Text]:
        return self.query_one("#queues", DataTable)

    @property
    def chosen(self) -> str | None:
        """The queue under the cursor."""
        row = self._table.cursor_row
        return self._lines[row].queue if 0 <= row < len(self._lines) else None

    # ---- looking -------------------------------------------------------------------------------------------------

    @work(thread=True)
    def _look(self) -> None:
        if not self._asking.acquire(blocking=False):
            return  # the last look is still under way
        try:
            self._watcher.selected = self.chosen
            self._watcher.tick(time.monotonic())
        except WaypostError as error:
            self._away = True
            self.call_from_thread(self._say, f"the store does not answer: {error}")
        else:
            self.call_from_thread(self._show)
            if self._away:
                self._away = False
                self.call_from_thread(self._say, "")
        finally:
            self._asking.release()

    def _show(self) -> None:
        lines = self._watcher.lines()
        listing = self._table
        if [line.queue for line in lines] != [line.queue for line in self._lines]:
            chosen = self.chosen
            listing.clear()
            for line in lines:
                listing.add_row(*shown(line), key=line.queue)
            names = [line.queue for line in lines]
            if chosen in names:
                listing.move_cursor(row=names.index(chosen))
        else:
            for line in lines:
                for header, cell in zip(HEADERS, shown(line), strict=True):
                    listing.update_cell(line.queue, header, cell)
        self._lines = lines
        self.query_one("#totals", Static).update(totals(lines, self._watcher.workers))

    def _say(self, text: str) -> None:
        self.query_one("#status", Static).update(printable(without_secrets(text)))

    # ---- acting --------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Pause the queue under the cursor."""
        if self.chosen is not None:
            self._act("pause", self.chosen)

    def action_resume(self) -> None:
        """Resume it."""
        if self.chosen is not None:
            self._act("resume", self.chosen)

    def action_redrive(self) -> None:
        """Make its dead letters ready again, after a question."""
        queue = self.chosen
        if queue is None:
            return
        dead = next(line.dead for line in self._lines if line.queue == queue)
        if dead == 0:
            self._say(f"{queue} has no dead letters")
            return

        def answered(answer: bool | None) -> None:
            if answer:
                self._act("redrive", queue)
            else:
                self._say("nothing was done")

        self.push_screen(Question(f"Make {dead:,} dead letters of {queue} ready again?"), answered)

    @work(thread=True)
    def _act(self, verb: str, queue: str) -> None:
        try:
            with self._asking:
                said = self._acted(verb, queue)
                self._watcher.look_now(queue, time.monotonic())
        except WaypostError as error:
            self.call_from_thread(self._say, f"{verb} {queue}: {error}")
            return
        self.call_from_thread(self._show)
        self.call_from_thread(self._say, said)

    def _acted(self, verb: str, queue: str) -> str:
        if verb == "pause":
            return f"{queue} is paused" if self._client.pause(queue) else f"{queue} was paused already"
        if verb == "resume":
            return f"{queue} is resumed" if self._client.resume(queue) else f"{queue} was not paused"
        done = self._client.redrive(queue)
        told = f"{len(done.moved):,} dead letters of {queue} made ready again"
        return told + (f", {len(done.duplicates):,} stay dead: their keys are taken" if done.duplicates else "")
