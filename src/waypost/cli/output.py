"""What commands print: tables that fit a terminal, one JSON document or one per line, colours only where they help."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import secrets
import shutil
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from waypost.errors import Undecodable
from waypost.formatting import printable
from waypost.message import StoredMessage
from waypost.urls import redact_text
from waypost.values import Event

WIDTH = 80
#: Nothing is cut shorter than this.
COLUMN_MIN = 6
NUMBER = re.compile(r"-?[\d,.]+( ?(ms|s|min|m|h|d|k|M|G))?")
#: Colours are marked by a text that nobody can know beforehand, and become escapes only when a line is written: so
#: no escape that stands in a message, a key or an error is taken for one of ours.
_MARK = secrets.token_hex(8)
_MARKED = re.compile(rf"⟦{_MARK}(\d+)⟧")
COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def write(text: str) -> None:
    """Write lines to the output. What a terminal would act on is written as an escape."""
    sys.stdout.write(_MARKED.sub("\x1b[\\1m", safe_lines(text)) + "\n")


def say(text: str, end: str = "\n") -> None:
    """Write lines for people, apart from the output, at once; as `write` does."""
    sys.stderr.write(safe_lines(text) + end)
    sys.stderr.flush()


def safe_lines(text: str) -> str:
    """A text of several lines, each safe for a terminal."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def write_json(value: Any, *, indent: int = 0) -> None:
    """Write one JSON document, on a line unless it is indented."""
    document = msgspec.json.encode(value)
    sys.stdout.write(safe_json((msgspec.json.format(document, indent=indent) if indent else document).decode()) + "\n")


def safe_json(document: str) -> str:
    """A JSON document in which everything that a terminal would act on is escaped, as JSON escapes it."""
    lines = document.split("\n")  # JSON has line ends between values only
    return "\n".join(line if line.isprintable() else _escape_json(line) for line in lines)


def _escape_json(line: str) -> str:
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)


def without_secrets(text: str) -> str:
    """A text of ours without the secrets of the URLs that this process was given."""
    return redact_text(text, *given_urls(), ours=True)


#: The arguments of the command: URLs among them are never shown whole.
arguments: list[str] = []


def given_urls() -> list[str]:
    """The URLs among the arguments and in the environment of this process."""
    texts = [*arguments, *(value for name, value in os.environ.items() if "URL" in name or "WAYPOST" in name)]
    return [part for text in texts for part in (text, text.partition("=")[2]) if "://" in part.partition("=")[0]]


class SafeFormatter(logging.Formatter):
    """Log lines that hold no secret of a URL, and nothing that a terminal would act on."""

    def format(self, record: logging.LogRecord) -> str:
        """One line for the message, and a traceback line by line."""
        shown = copy.copy(record)
        shown.msg, shown.args = printable(record.getMessage()), None
        return safe_lines(without_secrets(super().format(shown)))


def log_to_stderr(level: str) -> None:
    """Log from this level on to stderr; nothing changes where the program has its own logging."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


@contextmanager
def quiet_log() -> Iterator[None]:
    """Nothing but errors is logged meanwhile: what else there is to say is said by the command itself."""
    log = logging.getLogger("waypost")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def is_coloured() -> bool:
    """Whether colours help: on a terminal, and where nobody asked for none (NO_COLOR)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    """A text in a colour, or as it is."""
    return f"⟦{_MARK}{COLOURS[colour]}⟧{text}⟦{_MARK}0⟧" if is_coloured() else text


def width() -> int:
    """How wide a table may be: the terminal, or 80 columns where there is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def cut(text: str, length: int) -> str:
    """A text on one line, of at most so many characters, safe for a terminal."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, flexible: Sequence[int] = (), gap: int = 2
) -> list[str]:
    """Rows as aligned lines. Numbers stand right; columns in `flexible` are cut so that a line fits, others never."""
    texts = [["–" if value is None else printable(" ".join(str(value).split())) for value in row] for row in rows]
    sizes = [max([len(header), *(len(row[at]) for row in texts)]) for at, header in enumerate(headers)]
    right = [all(_is_number(row[at]) for row in texts) and bool(texts) for at in range(len(headers))]
    room = width() - gap * (len(headers) - 1)
    while sum(sizes) > room:
        widest = max(flexible, key=lambda at: sizes[at], default=-1)
        if widest < 0 or sizes[widest] <= COLUMN_MIN:
            break
        sizes[widest] -= 1
    lines = [_line(headers, sizes, right, gap)]
    lines += [
        _line([cut(text, size) for text, size in zip(row, sizes, strict=True)], sizes, right, gap) for row in texts
    ]
    return [coloured(lines[0], "bold"), *lines[1:]]


def _is_number(text: str) -> bool:
    return text == "–" or NUMBER.fullmatch(text) is not None


def _line(values: Sequence[str], sizes: Sequence[int], right: Sequence[bool], gap: int) -> str:
    cells = [
        f"{value:>{size}}" if is_right else f"{value:{size}}"
        for value, size, is_right in zip(values, sizes, right, strict=True)
    ]
    return (" " * gap).join(cells).rstrip()


def facts(pairs: Iterable[tuple[str, object]]) -> list[str]:
    """Names and values, one a line."""
    shown = [(printable(name), "–" if value is None else printable(str(value))) for name, value in pairs]
    size = max((len(name) for name, _ in shown), default=0)
    return [f"{name:{size}}  {value}".rstrip() for name, value in shown]


# ---- values as people and programs read them ---------------------------------------------------------------------


def time_of(milliseconds: int | None) -> str | None:
    """A moment of the store's clock as text, with its zone."""
    if milliseconds is None:
        return None
    text = datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z").replace(".000Z", "Z")


def body_of(message: StoredMessage[Any]) -> Any:
    """A body as JSON can carry it: bytes become `{"base64": …}`, what cannot be read `{"undecodable": …}`."""
    try:
        body = message.body
    except Undecodable as error:
        return {"undecodable": str(error)}
    return {"base64": b64encode(body).decode()} if isinstance(body, bytes) else body


def body_text(message: StoredMessage[Any]) -> str:
    """A body as a line shows it."""
    body = body_of(message)
    return body if isinstance(body, str) else msgspec.json.encode(body).decode()


def message_json(message: StoredMessage[Any]) -> dict[str, Any]:
    """A message with all that is known of it."""
    stored = message.stored
    shown: dict[str, Any] = {
        "queue": message.queue,
        "id": stored.id,
        "state": stored.state,
        "key": stored.key,
        "group": stored.group,
        "priority": stored.priority,
        # A number above 2**53 is not exact in many readers of JSON.
        "token": str(stored.token),
        "deliveries": stored.deliveries,
        "attempts": stored.attempts,
        "published_at": time_of(stored.published_ms),
        "ready_at": time_of(stored.ready_ms),
        "claimed_at": time_of(stored.claimed_ms),
        "lease_end_at": time_of(stored.lease_end_ms),
        "worker": stored.worker,
        "cancel_requested": stored.cancel_requested,
        "ended_at": time_of(stored.ended_ms),
        "reason": stored.reason,
        "error_type": stored.error_type,
        "error": stored.error,
        "note": message.note,
        "bytes": len(stored.envelope),
        "body": body_of(message),
    }
    with suppress(Undecodable):
        shown |= {
            "type": message.type_name,
            "correlation_id": message.correlation_id,
            "reply_to": message.reply_to,
            "headers": dict(message.headers),
        }
    return shown


def event_json(event: Event) -> dict[str, Any]:
    """An event without what it has no use for."""
    shown = {name: value for name, value in msgspec.structs.asdict(event).items() if value is not None}
    shown["at"] = time_of(shown.pop("at_ms"))
    if "token" in shown:
        shown["token"] = str(shown["token"])
    if "body" in shown:
        shown["body"] = {"base64": b64encode(shown["body"]).decode()}
    return shown
