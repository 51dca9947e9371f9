"""The live screen of `waypost watch`: a list of queues, the view of one, and keys that act on it."""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import ClassVar

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static

from waypost.cli.action_log import logged_action
from waypost.cli.output import redact_secrets
from waypost.cli.watch.collector import TICK_SECONDS, Collector, QueueDetail, QueueLine
from waypost.cli.watch.columns import (
    NUMBERS,
    SORTS,
    Column,
    choose_columns,
    format_name,
    list_totals,
    needed_name_width,
    sort_lines,
    state_color,
)
from waypost.cli.watch.detail import format_detail
from waypost.client import Waypost
from waypost.errors import WaypostError
from waypost.formatting import format_call, printable
from waypost.views import ActionUndo

HELP = """\
Enter   open the queue under the cursor; Escape goes back
/       only queues whose names have a text; Escape shows all
s       sort by name, ready, oldest, dead, done/s, what is wrong
p  r    pause, resume the queue
d       make its dead letters ready again, after a question
?  q    this list, quit

!  no worker serves it, or one of its workers is red
‖  paused
trend: messages done by minute, the current minute last
Columns are those of `waypost stats`; wider terminals have more."""
SORTED = "▾"
SCROLL_BAR_WIDTH = 2
#: Keys of the list only.
LIST_ACTIONS = ("filter", "sort")


def format_row(line: QueueLine, columns: tuple[Column, ...]) -> list[Text]:
    """Return the cells of a table row. A name is text, never markup."""
    name = Text(printable(format_name(line)), state_color(line) or "", overflow="ellipsis")
    return [name, *(format_cell(column.format(line), column, column.color(line)) for column in columns)]


def format_cell(text: str, column: Column, color: str | None) -> Text:
    """Return a cell: figures to the right, texts with a space before them."""
    style = f"bold {color}" if color else ""
    if column.name in NUMBERS:
        return Text(text, style, justify="right")
    return Text(f" {text}", style, overflow="ellipsis")


class Help(ModalScreen[None]):
    """The keys. Any key closes it."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > Vertical { width: 70; max-width: 100%; height: auto; border: round $primary; padding: 0 1; }
    """

    def compose(self) -> ComposeResult:
        """Show the keys."""
        yield Vertical(Static(HELP, markup=False))

    def on_key(self, event: events.Key) -> None:
        """Close, once: a second key may come before the screen is gone."""
        event.stop()
        if self.is_current:
            self.dismiss()


class QueueTable(DataTable[Text]):
    """The list of queues."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "open")]


class QueueView(Screen[None]):
    """The view of one queue."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.close", "back")]
    DEFAULT_CSS = """
    QueueView #status { height: 1; color: $warning; }
    """

    def __init__(self, queue: str) -> None:
        super().__init__()
        self.queue = queue
        self.body = Static("loading …", markup=False)
        self.status = Static("", id="status", markup=False)

    def compose(self) -> ComposeResult:
        """Show the queue, a status line, and the keys."""
        with VerticalScroll():
            yield self.body
        yield self.status
        yield Footer()

    def show(self, detail: QueueDetail | None) -> None:
        """Show what is known of the queue by now."""
        if detail is None:
            self.body.update(Text(f"there is no queue {printable(self.queue)} any more"))
        else:
            self.body.update(format_detail(detail, self.size.width - SCROLL_BAR_WIDTH))


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
        """Close with an answer, once: a second key may come before the screen is gone."""
        if self.is_current:
            self.dismiss(answer)


class WatchScreen(App[None]):
    """Shows the queues live. A thread talks to the store, so a slow store never blocks the keys."""

    TITLE = "waypost"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #totals { height: auto; max-height: 2; text-style: bold; }
    #status { height: 1; color: $warning; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    DataTable { height: 1fr; }
    DataTable:nocolor > .datatable--cursor { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "back", show=False),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("s", "sort", "sort"),
        Binding("p", "pause", "pause", key_display="p/r"),
        Binding("r", "resume", "resume", show=False),
        Binding("d", "redrive", "redrive"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, post: Waypost) -> None:
        # Without colors of its own, so that NO_COLOR removes all of them; otherwise they would become shades of gray.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self._client = post
        self._collector = Collector(post)
        self._store_lock = threading.Lock()
        self._table = QueueTable(id="queues", cursor_type="row", cell_padding=0)
        self._totals = Static("loading …", id="totals", markup=False)
        self._status = Static("", id="status", markup=False)
        self._filter = Input(placeholder="part of a name", id="filter")
        #: What was read last, and of that the queues in the list, in its order.
        self._all: list[QueueLine] = []
        self._lines: list[QueueLine] = []
        self._columns: tuple[Column, ...] = ()
        self._layout: tuple[int, tuple[str, ...], str] | None = None
        self._sort = SORTS[0]
        self._unreachable = False

    def compose(self) -> ComposeResult:
        """Show a line of totals, the table, a status line, and the keys."""
        yield self._totals
        yield self._table
        yield self._filter
        yield self._status
        yield Footer()

    def on_mount(self) -> None:
        """Start polling."""
        self._table.focus()
        self._poll()
        self.set_interval(TICK_SECONDS, self._poll)

    def on_resize(self) -> None:
        """Choose the columns that fit."""
        self._show_lines()

    @property
    def selected(self) -> str | None:
        """The queue that is open, or the one under the cursor."""
        if isinstance(self.screen, QueueView):
            return self.screen.queue
        row = self._table.cursor_row
        return self._lines[row].queue if 0 <= row < len(self._lines) else None

    # ---- polling -------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        # Not in the thread: the screens may be gone there, when the program ends.
        self._collector.selected = self.selected
        self._tick()

    @work(thread=True)
    def _tick(self) -> None:
        if not self._store_lock.acquire(blocking=False):
            return  # the last poll is still running
        try:
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
        self._all = self._collector.lines()
        self._totals.update(self._describe_totals())
        self._show_lines()
        if isinstance(self.screen, QueueView):
            self.screen.show(self._collector.detail(self.screen.queue))

    def _describe_totals(self) -> Text:
        """Return the filter and the totals, what is wrong in color."""
        text = Text(f"/{printable(self._filter.value)}  " if self._filter.value else "")
        for number, (part, color) in enumerate(list_totals(self._all, self._collector.workers)):
            text.append(", " if number else "")
            text.append(part, color or "")
        return text

    def _show_lines(self) -> None:
        """Show the queues that fit the filter, in order, in the columns that fit the terminal."""
        wanted = self._filter.value.lower()
        lines = sort_lines([line for line in self._all if wanted in line.queue.lower()], self._sort)
        width = self.size.width
        name_width = needed_name_width(self._all, width)
        columns = choose_columns(width, name_width)
        selected, before = self.selected, [line.queue for line in self._lines]
        layout = (width, tuple(column.name for column in columns), self._sort)
        names = [line.queue for line in lines]
        if layout != self._layout:
            self._layout, self._columns = layout, columns
            self._table.clear(columns=True)
            self._add_columns(width - sum(column.width for column in columns))
        elif names == before:
            for line in lines:
                for header, cell in zip(("queue", *layout[1]), format_row(line, columns), strict=True):
                    self._table.update_cell(line.queue, header, cell)
            self._lines = lines
            return
        else:
            self._table.clear()
        for line in lines:
            self._table.add_row(*format_row(line, columns), key=line.queue)
        self._lines = lines
        if selected in names:
            self._table.move_cursor(row=names.index(selected))

    def _add_columns(self, name_width: int) -> None:
        """Add the columns to the table; the name gets the rest of the width."""
        for name, column in (("queue", None), *((one.name, one) for one in self._columns)):
            label = f"{name}{SORTED}" if name == self._sort else name
            if column is None:
                self._table.add_column(Text(label), key=name, width=name_width)
            else:
                self._table.add_column(format_cell(label, column, None), key=name, width=column.width)

    def _set_status(self, text: str) -> None:
        safe = printable(redact_secrets(text))
        self._status.update(safe)
        if isinstance(self.screen, QueueView):
            self.screen.status.update(safe)

    # ---- what is shown -------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key does something here: those of the list do nothing while a queue is open."""
        return not (action in LIST_ACTIONS and isinstance(self.screen, QueueView))

    def on_data_table_row_selected(self) -> None:
        """Open the queue under the cursor."""
        queue = self.selected
        if queue is None or isinstance(self.screen, QueueView):
            return  # nothing is there, or the key was pressed twice
        self._collector.opened = queue
        self.push_screen(QueueView(queue))
        self._poll_opened(queue)

    @work(thread=True)
    def _poll_opened(self, queue: str) -> None:
        """Read what the view of a queue shows, at once."""
        try:
            with self._store_lock:
                self._collector.poll_now(queue, time.monotonic())
                self.call_from_thread(self._refresh_table)
        except WaypostError as error:
            self.call_from_thread(self._set_status, f"the store does not answer: {error}")

    def action_close(self) -> None:
        """Go back to the list; there, show all queues again."""
        if isinstance(self.screen, QueueView):
            self._collector.opened = None
            self.pop_screen()
        else:
            self._filter.value = ""
            self._close_filter()

    def action_filter(self) -> None:
        """Ask for a part of the names."""
        self._filter.display = True
        self._filter.focus()

    def on_input_changed(self) -> None:
        """Show the queues that fit what was typed so far."""
        self._totals.update(self._describe_totals())
        self._show_lines()

    def on_input_submitted(self) -> None:
        """Go back to the list of the queues that fit."""
        self._close_filter()

    def _close_filter(self) -> None:
        self._filter.display = False
        self._table.focus()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        self._show_lines()
        self._set_status(f"sorted by {'what is wrong' if self._sort == 'state' else self._sort}")

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    # ---- actions -------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Pause the queue that is open or under the cursor."""
        if self.selected is not None:
            self._start_action("pause", self.selected)

    def action_resume(self) -> None:
        """Resume the queue that is open or under the cursor."""
        if self.selected is not None:
            self._start_action("resume", self.selected)

    def action_redrive(self) -> None:
        """Redrive the dead letters of the queue that is open or under the cursor, after a question."""
        queue = self.selected
        if queue is None:
            return
        dead = next((line.dead for line in self._all if line.queue == queue), 0)
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
                # Nothing else may change the figures while they are read.
                self.call_from_thread(self._refresh_table)
        except WaypostError as error:
            self.call_from_thread(self._set_status, f"{verb} {queue}: {error}")
            return
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
