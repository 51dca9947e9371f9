"""What commands write: lines and tables for people, JSON for programs, log lines; all of it safe for a terminal."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import secrets
import shutil
import sys
import unicodedata
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, TextIO

import msgspec

from waypost.errors import Undecodable
from waypost.formatting import format_age, printable
from waypost.message import StoredMessage
from waypost.policy import format_retry
from waypost.times import format_datetime
from waypost.urls import redact_text
from waypost.values import REDELIVERY_CAUSES, Ledger
from waypost.views import Event, Stats, to_json

WIDTH = 80
#: No column is made narrower than this.
COLUMN_MIN = 6
#: The last column of a table stands beside the others if it has this many characters there, otherwise below them.
BESIDE_MIN = 24
INDENT = 4
#: On a terminal a cell takes no more lines than this: a body of a megabyte would be thousands of them.
CELL_LINES_MAX = 50
NUMBER = re.compile(r"-?[\d,.]+( ?(ms|s|min|m|h|d|k|M|G))?")
#: Colors are marked by a random text, and become escape codes only when a line is written: so no escape code in a
#: message, a key or an error reaches the terminal.
_MARK = secrets.token_hex(8)
_MARKED = re.compile(rf"⟦{_MARK}(\d+)⟧")
COLORS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def write(text: str) -> None:
    """Write lines to stdout, with control characters escaped."""
    sys.stdout.write(_MARKED.sub("\x1b[\\1m", escape_lines(text)) + "\n")


def write_stderr(text: str, end: str = "\n") -> None:
    """Write lines to stderr at once, with control characters escaped."""
    sys.stderr.write(escape_lines(text) + end)
    sys.stderr.flush()


def escape_lines(text: str) -> str:
    """Escape the control characters of each line."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def write_json(value: Any, *, indent: int = 0) -> None:
    """Write one JSON document, on one line unless indented. Times and durations are those of `to_json`."""
    document = msgspec.json.encode(to_json(value))
    text = escape_json((msgspec.json.format(document, indent=indent) if indent else document).decode())
    if not text.isascii() and not _is_utf8(sys.stdout):
        text = "".join(one if one.isascii() else json.dumps(one)[1:-1] for one in text)
    sys.stdout.write(text + "\n")


def prepare_streams() -> None:
    """Make output possible wherever the command runs.

    Characters that the encoding of stdout does not have are escaped. A standard stream that was closed is replaced by
    an empty one, or by one that discards what is written to it.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, TextIOWrapper) and not _is_utf8(sys.stdout):
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_utf8(stream: TextIO) -> bool:
    # A stream in memory has no encoding, and takes every character.
    return (stream.encoding or "utf-8").lower().replace("-", "").replace("_", "") == "utf8"


def discard_output() -> None:
    """Write nothing more to stdout, whose reader has gone: Python would print another error when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def escape_json(document: str) -> str:
    """Escape the control characters of a JSON document the JSON way."""
    lines = document.split("\n")  # JSON has line ends only between values
    return "\n".join(line if line.isprintable() else _escape_json_line(line) for line in lines)


def _escape_json_line(line: str) -> str:
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)


def redact_secrets(text: str) -> str:
    """Remove the secrets of the URLs that this process was given."""
    return redact_text(text, *given_urls(), ours=True)


#: The arguments of the command; the secrets of URLs among them are never written.
arguments: list[str] = []


def given_urls() -> list[str]:
    """Return the URLs among the arguments and in the environment of this process."""
    texts = [*arguments, *(value for name, value in os.environ.items() if "URL" in name or "WAYPOST" in name)]
    return [part for text in texts for part in (text, text.partition("=")[2]) if "://" in part.partition("=")[0]]


class SafeFormatter(logging.Formatter):
    """Formats log lines without the secrets of URLs and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line for the message, and the lines of a traceback."""
        safe = copy.copy(record)
        safe.msg, safe.args = printable(record.getMessage()), None
        return escape_lines(redact_secrets(super().format(safe)))


class JsonFormatter(logging.Formatter):
    """Formats each log record as one JSON document, as safe as the lines are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the document: time, level, logger, message, what the record has besides, and the traceback."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in PLAIN_RECORD and value is not None},
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        # Each text for itself: a secret may look different in JSON, and what is removed may reach beyond a text.
        safe = {name: redact_secrets(value) if isinstance(value, str) else value for name, value in document.items()}
        is_utf8 = _is_utf8(sys.stderr)
        return escape_json(json.dumps(safe, ensure_ascii=not is_utf8, default=lambda value: redact_secrets(str(value))))


#: What every log record has; the rest is what the code that logs has added.
PLAIN_RECORD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime"))
LOG_FORMATS = ("text", "json")


def report_progress(text: str, form: str) -> None:
    """Tell people what a command that goes on does: on stderr, or as a line of its log if that is JSON."""
    if form == "json":
        logging.getLogger("waypost").info(text)
    else:
        write_stderr(f"waypost: {text}")


def log_to_stderr(level: str, form: str = "text", *, without: Sequence[str] = ()) -> None:
    """Log from this level on to stderr, unless the program has configured logging itself.

    `without`: events that the command itself reports to people.
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        handler.addFilter(lambda record: getattr(record, "event", None) not in without)
    logging.basicConfig(level=level.upper(), handlers=[handler])


@contextmanager
def quiet_log() -> Iterator[None]:
    """Log only errors inside the `with` block, where the command reports the rest itself."""
    log = logging.getLogger("waypost")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def uses_color() -> bool:
    """Whether stdout is a terminal with colors, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def with_color(text: str, color: str) -> str:
    """Return the text in a color, or unchanged where colors are not used."""
    return f"⟦{_MARK}{COLORS[color]}⟧{text}⟦{_MARK}0⟧" if uses_color() else text


def terminal_width() -> int | None:
    """Return the width of the terminal (COLUMNS, if it is set), None if stdout is none: there nothing has to fit."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else None


def text_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    plain = _MARKED.sub("", text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in plain)


def one_line(value: object) -> str:
    """Return a value on one line, safe for a terminal."""
    return "–" if value is None else printable(" ".join(str(value).split()))


def wrap_text(text: str, width: int, *, break_long: bool = True) -> list[str]:
    """Split a line into lines of at most `width` columns, between two of its parts where it can.

    `break_long`: a part that is longer than a line is broken; otherwise it stands alone on a line that is too long.
    """
    if text_width(text) <= width:
        return [text]
    parts = text.lstrip(" ").split(" ")
    parts[0] = " " * (len(text) - len(text.lstrip(" "))) + parts[0]
    lines, line = [], ""
    for part in parts:
        joined = f"{line} {part}" if line else part
        if text_width(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line.rstrip())
        while break_long and text_width(part) > width:
            fits = _count_fitting(part, width)
            lines.append(part[:fits])
            part = part[fits:]
        line = part
    return [*lines, line] if line else lines


def _count_fitting(text: str, width: int) -> int:
    """Return how many of the first characters fit, at least one."""
    if text.isascii():
        return max(1, width)
    count = 1
    while count < len(text) and text_width(text[: count + 1]) <= width:
        count += 1
    return count


def wrap_indented(text: str, indent: int, *, break_long: bool = True) -> list[str]:
    """Split a text into lines that fit the terminal, indented after the first; one line if there is no terminal."""
    width = terminal_width()
    if width is None:
        return [text]
    first, *rest = wrap_text(text, max(COLUMN_MIN, width - indent), break_long=break_long) or [""]
    return [first, *(" " * indent + line for line in rest)]


def format_table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, flexible: Sequence[int] = (), gap: int = 2
) -> list[str]:
    """Return rows as aligned lines, numbers to the right. Nothing is cut.

    On a terminal, columns in `flexible` become narrower and their texts take several lines. The last column is put
    below its row if only a few characters beside the others are left for it.
    """
    texts = [[one_line(value) for value in row] for row in rows]
    sizes = [max([text_width(header), *(text_width(row[at]) for row in texts)]) for at, header in enumerate(headers)]
    right = [all(_is_number(row[at]) for row in texts) and bool(texts) for at in range(len(headers))]
    room, last = terminal_width(), len(headers) - 1
    is_below = False
    if room is not None and sum(sizes) + gap * last > room:
        left = room - sum(sizes[:last]) - gap * last
        is_below = last > 0 and last in flexible and left < min(sizes[last], BESIDE_MIN)
        if is_below:
            sizes[last] = room - INDENT
            _make_fit(sizes, [at for at in flexible if at != last], room - gap * (last - 1) + sizes[last])
        else:
            _make_fit(sizes, [last] if last in flexible else flexible, room - gap * last)
    table = [_format_row(row, sizes, right, gap, is_below=is_below) for row in (list(headers), *texts)]
    return [*(with_color(line, "bold") for line in table[0]), *(line for lines in table[1:] for line in lines)]


def _make_fit(sizes: list[int], flexible: Sequence[int], room: int) -> None:
    """Make the widest of the flexible columns narrower until all fit, or none can be narrower."""
    while sum(sizes) > room:
        widest = max(flexible, key=lambda at: sizes[at], default=-1)
        if widest < 0 or sizes[widest] <= COLUMN_MIN:
            return
        sizes[widest] -= 1


def _format_row(
    texts: Sequence[str], sizes: Sequence[int], right: Sequence[bool], gap: int, *, is_below: bool
) -> list[str]:
    """Return the lines of one row."""
    cells = [_wrap_cell(text, size) for text, size in zip(texts, sizes, strict=True)]
    below = [" " * INDENT + line for line in cells.pop() if line not in ("", "–")] if is_below else []
    lines = [
        (" " * gap)
        .join(
            _align(cell[number] if number < len(cell) else "", size, is_right)
            for cell, size, is_right in zip(cells, sizes, right, strict=False)
        )
        .rstrip()
        for number in range(max(map(len, cells)))
    ]
    return [*lines, *below]


def _wrap_cell(text: str, size: int) -> list[str]:
    """Return the lines of a cell; of a very long text the beginning, and how much more there is."""
    lines = wrap_text(text, size)
    if len(lines) <= CELL_LINES_MAX:
        return lines or [""]
    kept = lines[:CELL_LINES_MAX]
    return [*kept, *wrap_text(f"(and {len(text) - sum(map(len, kept)):,} more characters)", size)]


def _align(text: str, size: int, is_right: bool) -> str:
    spaces = " " * (size - text_width(text))
    return spaces + text if is_right else text + spaces


def _is_number(text: str) -> bool:
    return text == "–" or NUMBER.fullmatch(text) is not None


def format_pairs(pairs: Iterable[tuple[str, object]]) -> list[str]:
    """Return aligned names and values, one pair a line; on a terminal a long value takes several."""
    texts = [(printable(name), "–" if value is None else printable(str(value))) for name, value in pairs]
    size = max((len(name) for name, _ in texts), default=0)
    lines = []
    for name, value in texts:
        first, *rest = wrap_indented(value, size + 2)
        lines += [f"{name:{size}}  {first}".rstrip(), *rest]
    return lines


# ---- messages, events and queues ---------------------------------------------------------------------------------


def format_time(at: datetime | None) -> str | None:
    """Return a time as text in UTC, None for None."""
    return None if at is None else format_datetime(at)


def body_json(message: StoredMessage[Any]) -> Any:
    """Return the body for JSON: bytes become `{"base64": …}`, a body that cannot be decoded `{"undecodable": …}`."""
    try:
        body = message.body
    except Undecodable as error:
        return {"undecodable": str(error)}
    return {"base64": b64encode(body).decode()} if isinstance(body, bytes) else body


def format_body(message: StoredMessage[Any]) -> str:
    """Return the body as one text."""
    body = body_json(message)
    return body if isinstance(body, str) else msgspec.json.encode(body).decode()


def message_json(message: StoredMessage[Any]) -> dict[str, Any]:
    """Return all fields of a message for JSON."""
    fields: dict[str, Any] = {
        "queue": message.queue,
        "id": message.id,
        "state": message.state,
        "key": message.key,
        "group": message.group,
        "priority": message.priority,
        # A number above 2**53 is not exact in many readers of JSON.
        "token": str(message.token),
        "deliveries": message.deliveries,
        "attempts": message.attempts,
        "published_at": format_time(message.published_at),
        "ready_at": format_time(message.ready_at),
        "expires_at": format_time(message.expires_at),
        "claimed_at": format_time(message.claimed_at),
        "lease_end_at": format_time(message.lease_end_at),
        "worker": message.worker,
        "cancel_requested": message.cancel_requested,
        "ended_at": format_time(message.ended_at),
        "reason": message.reason,
        "error_type": message.error_type,
        "error": message.error,
        "traceback": message.traceback,
        "note": message.note,
        "bytes": message.size,
        "body": body_json(message),
    }
    with suppress(Undecodable):
        fields |= {
            "type": message.type_name,
            "correlation_id": message.correlation_id,
            "reply_to": message.reply_to,
            "retry": None if message.retry_policy is None else format_retry(message.retry_policy),
            "timeout": message.own_timeout(),
            "headers": dict(message.headers),
        }
    return fields


def event_json(event: Event) -> dict[str, Any]:
    """Return the fields of an event for JSON, without empty ones."""
    return {name: value for name, value in to_json(event).items() if value is not None}


def print_events(events: Sequence[Event], *, with_id: bool = False) -> None:
    """Print events, one a line."""
    rows = [
        (
            event.number,
            str(format_time(event.at))[:23],
            event.event,
            *([event.message_id] if with_id else []),
            format_event(event),
        )
        for event in events
    ]
    headers = ("number", "at (UTC)", "event", *(["message"] if with_id else []), "more")
    for line in format_table(headers, rows, flexible=(len(headers) - 1,)):
        write(line)


def format_event(event: Event) -> str:
    """Return the details of an event besides its name."""
    parts = [f"delivery {event.deliveries}"] if event.event == "claimed" and event.deliveries else []
    parts += [event.cause] if event.cause else []
    parts += [event.reason] if event.reason else []
    failure = ": ".join(filter(None, (event.error_type, event.error)))
    parts += [failure] if failure else []
    parts += [f"waited {format_age(event.wait_time)}"] if event.wait_time is not None else []
    parts += [f"ran {format_age(event.run_time)}"] if event.run_time is not None else []
    parts += [f"due {format_time(event.due_at)}"] if event.due_at is not None else []
    parts += [f"by {event.worker}"] if event.worker else []
    return ", ".join(parts)


def print_message(message: StoredMessage[Any]) -> None:
    """Print one message in full."""
    fields = message_json(message)
    body, traceback = fields.pop("body"), fields.pop("traceback")
    for line in format_pairs((name, value) for name, value in fields.items() if value not in (None, {}, False)):
        write(line)
    if traceback is not None:
        write("")
        for line in traceback.splitlines():
            write(line)
    write("")
    write_json(body, indent=2)


def print_queues(queues: Sequence[Stats]) -> None:
    """Print a table with a line for each queue."""
    if not queues:
        write("no queues")
        return
    headers = ("queue", "ready", "delayed", "waiting", "leased", "dead", "done", "oldest", "state")
    rows = [
        (stats.queue, one.ready, one.delayed, one.waiting, one.leased, one.dead_kept, one.done,
         format_age(stats.oldest_ready_age), "paused" if stats.paused else "")
        for stats in queues for one in [stats.ledger]
    ]  # fmt: skip
    for line in format_table(headers, rows, flexible=(0,)):
        write(line)


def format_redeliveries(ledger: Ledger) -> str:
    """Return the number of redeliveries by cause."""
    causes = [f"{ledger.redelivered[name]:,} {name}" for name in REDELIVERY_CAUSES if ledger.redelivered.get(name)]
    return ", ".join(causes) or "none"
