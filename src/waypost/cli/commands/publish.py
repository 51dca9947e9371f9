"""`waypost publish`: one message from an argument or a file, or one for each line of a file or of stdin."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from waypost.cli.exit_codes import FAILED, FOUND, USAGE, CommandError
from waypost.cli.options import (
    add_command,
    integer_between,
    open_client,
    parse_duration,
    parse_retry_argument,
    parse_time,
)
from waypost.cli.output import discard_output, write, write_json
from waypost.cli.progress import Progress
from waypost.client import Waypost
from waypost.client.options import PublishManyKeywords
from waypost.errors import PartialPublish, WaypostError
from waypost.formatting import format_count
from waypost.operations.publish import CONTENT
from waypost.policy import BODY_BYTES_MAX
from waypost.values import Published

#: Lines published together: enough to keep the store busy, few enough to show progress.
BATCH_LINES = 2_000


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "publish", run, "publish a message, or one for each line of a file",
        more="A body is JSON, unless --text or --bytes is given.",
        examples=(
            "waypost publish orders '{\"id\": 7}' --key order-7",
            "waypost publish mails 'good morning' --text --delay 10m",
            "waypost publish images --file cat.png --bytes",
            "generate | waypost publish orders - --priority 9",
            "waypost publish orders --many orders.ndjson --key-field id --window 1d",
        ),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    parser.add_argument("body", nargs="?", help="the body; - publishes each line of the standard input")
    parser.add_argument("--file", metavar="PATH", help="the body is the content of this file")
    parser.add_argument("--many", metavar="PATH", help="each line of this file (- for the input) is a body")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="bodies are text")
    form.add_argument("--bytes", action="store_true", help="the body is bytes as they are")
    parser.add_argument("--key", help="its key: no second message with this key is stored before it ends")
    parser.add_argument("--key-field", metavar="NAME", help="the key is this field of the body")
    parser.add_argument("--content-key", action="store_true", help="the key is a hash of the content")
    parser.add_argument(
        "--window", type=parse_duration, metavar="S", help="the key stays in use for this time (90, 30s, 5m, 2h)"
    )
    parser.add_argument(
        "--unique", choices=("live", "until_claimed", "live_or_dead"),
        help="how long the key is in use: while the message is unfinished (live), until it is claimed, or also while "
             "it is a dead letter",
    )  # fmt: skip
    parser.add_argument("--on-conflict", choices=("keep", "replace", "extend", "error"), default="keep",
                        help="if the key is in use (keep)")  # fmt: skip
    parser.add_argument("--delay", type=parse_duration, metavar="S", help="due after this time (90, 30s, 5m, 2h, 7d)")
    parser.add_argument("--at", type=parse_time, metavar="TIME", help="due at a time: 2026-03-06T09:00:00Z")
    parser.add_argument("--expires", type=parse_expiry, metavar="S|TIME",
                        help="not handed out after this time, or from this moment on")  # fmt: skip
    parser.add_argument(
        "--priority", type=integer_between(0, 9), default=5, metavar="N", help="0 to 9, higher first (5)"
    )
    parser.add_argument("--group", help="its group, a tenant for instance")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="a header; may be repeated")
    parser.add_argument("--correlation-id", metavar="ID", help="its correlation id")
    parser.add_argument("--retry", type=parse_retry_argument, metavar="POLICY",
                        help="its own retry policy: none, constant, linear or exponential:attempts=5")  # fmt: skip
    parser.add_argument("--timeout", type=parse_duration, metavar="S", help="its own time limit in a handler")
    parser.add_argument("--reply-to", metavar="QUEUE", help="where a reply should go")
    parser.add_argument("--from-line", type=integer_between(1, 2**40), default=1, metavar="N",
                        help="start with this line")  # fmt: skip
    parser.add_argument("--ids", action="store_true", help="print a line for each message instead of the totals")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if sum(given is not None for given in (options.body, options.file, options.many)) != 1:
        raise CommandError(
            "give one thing to publish: a body, --file PATH, --many PATH, or - for the lines of stdin", USAGE
        )
    source = "-" if options.body == "-" else options.many
    if source is None:
        return publish_one(options)
    if options.bytes or options.key:
        raise CommandError(
            "--bytes and --key are for one message; of many, --key-field or --content-key make keys", USAGE
        )
    if source == "-":
        return publish_many(options, sys.stdin.buffer, None)
    try:
        with open(source, "rb") as lines:
            total = sum(1 for _ in lines)
            lines.seek(0)
            return publish_many(options, lines, total)
    except OSError as error:
        raise CommandError(f"{source} cannot be read: {error.strerror or error}", USAGE) from None


def publish_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `Waypost.publish`."""
    headers = {}
    for header in options.header:
        name, separator, value = header.partition("=")
        if not separator or not name:
            raise CommandError(f"a header is NAME=VALUE, not {header!r}", USAGE)
        headers[name] = value
    keys = [given for given in (options.key, options.key_field, options.content_key or None) if given is not None]
    if len(keys) > 1:
        raise CommandError("give one of --key, --key-field and --content-key", USAGE)
    key: Any = options.key
    if options.content_key:
        key = CONTENT
    elif options.key_field is not None:
        key = make_key_function(options.key_field)
    found = {
        "key": key, "window": options.window, "unique": options.unique, "delay": options.delay, "at": options.at,
        "group": options.group,
        "headers": headers or None, "correlation_id": options.correlation_id, "reply_to": options.reply_to,
        "retry": options.retry, "timeout": options.timeout, "expires": options.expires,
    }  # fmt: skip
    given = {name: value for name, value in found.items() if value is not None}
    return given | {"priority": options.priority, "on_conflict": options.on_conflict}


def parse_expiry(text: str) -> float | datetime:
    """Read a duration (90, 30s, 5m, 2h, 7d) or a time."""
    try:
        return parse_duration(text)
    except argparse.ArgumentTypeError:
        return parse_time(text)


def make_key_function(name: str) -> Any:
    """Return a function that reads the key from a field of the body."""

    def key(body: object) -> str:
        value = body.get(name) if isinstance(body, dict) else None
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise CommandError(f"a body has no field {name!r} of text or a whole number, so it has no key", USAGE)
        return str(value)

    return key


def decode_body(data: bytes, options: argparse.Namespace, where: str) -> object:
    """Decode a body as JSON, text or bytes."""
    if options.bytes:
        return data
    try:
        return data.decode() if options.text else msgspec.json.decode(data)
    except UnicodeDecodeError:
        raise CommandError(f"{where} is not text in UTF-8; --bytes takes a file as it is", USAGE) from None
    except msgspec.DecodeError as error:
        raise CommandError(f"{where} is not JSON ({error}); --text takes it as text", USAGE) from None


def publish_one(options: argparse.Namespace) -> int:
    """Publish one message and return the exit code."""
    if options.file is None:
        data, where = options.body.encode(errors="surrogateescape"), "the body"
    else:
        where = options.file
        try:
            if Path(options.file).stat().st_size > BODY_BYTES_MAX:
                raise CommandError(f"{where} is larger than a body may be, {BODY_BYTES_MAX:,} bytes", USAGE)
            data = Path(options.file).read_bytes()
        except OSError as error:
            raise CommandError(f"{where} cannot be read: {error.strerror or error}", USAGE) from None
    body = decode_body(data, options, where)
    with open_client(options, creates=True) as post:
        published = post.publish(options.queue, body, **publish_options(options))
    if options.json:
        write_json(published)
    else:
        write(f"{published.status} {published.id}")
    return 0


class Lines:
    """Yields the bodies of an input, one a line, and counts its lines. Empty lines are skipped."""

    def __init__(self, lines: IO[bytes], options: argparse.Namespace) -> None:
        self._lines = lines
        self._options = options
        self.number = 0
        self.error: CommandError | None = None

    def __iter__(self) -> Iterator[object]:
        for line in self._lines:
            self.number += 1
            if self.number < self._options.from_line or not line.strip():
                continue
            try:
                yield decode_body(line.rstrip(b"\r\n"), self._options, f"line {self.number}")
            except CommandError as error:
                # The lines before it are published first; then this is raised.
                self.error = error
                return


def publish_many(options: argparse.Namespace, source: IO[bytes], total: int | None) -> int:
    """Publish a message for each line, in batches, and return the exit code."""
    given = cast("PublishManyKeywords", publish_options(options))
    lines = Lines(source, options)
    statuses: Counter[str] = Counter()
    bodies = iter(lines)
    with (
        open_client(options, creates=True) as post,
        Progress(f"publishing to {options.queue}", total, quiet=options.json) as progress,
    ):
        while batch := list(islice(bodies, BATCH_LINES)):
            before = statuses.total()
            try:
                results = publish_batch(post, options, batch, given, statuses)
            except WaypostError as error:
                raise CommandError(
                    f"{error} ({format_count(statuses.total(), 'message')} published; the batch that failed begins "
                    f"{format_count(len(batch), 'message')} before the end of line {lines.number})", FAILED
                ) from None  # fmt: skip
            progress.advance(statuses.total() - before)
            if not print_results(options, results):
                raise CommandError(
                    f"the reader of the ids has gone: {format_count(statuses.total(), 'message')} published; "
                    f"go on with --from-line {lines.number + 1}", FOUND,
                )  # fmt: skip
    if lines.error is not None:
        raise CommandError(
            f"{lines.error}; published before it: {format_count(statuses.total(), 'message')}; repair it and go on "
            f"with --from-line {lines.number}", USAGE,
        )  # fmt: skip
    if options.json and not options.ids:
        write_json({"queue": options.queue, "published": statuses.total(), "statuses": dict(statuses)})
    elif not options.ids:
        counts = ", ".join(f"{number:,} {status}" for status, number in statuses.most_common()) or "nothing to publish"
        write(f"{options.queue}: {counts}")
    return 0


def publish_batch(
    post: Waypost, options: argparse.Namespace, batch: list[object], given: PublishManyKeywords, statuses: Counter[str]
) -> list[Published]:
    """Publish a batch. If only a part of it was stored, count that part before raising the error."""
    try:
        results = post.publish_many(options.queue, batch, **given)
    except PartialPublish as error:
        known = [one for one in error.results if one is not None]
        statuses.update(one.status for one in known)
        print_results(options, known)
        raise
    statuses.update(one.status for one in results)
    return results


def print_results(options: argparse.Namespace, results: Iterable[Published]) -> bool:
    """Print a line for each message, if `--ids` is given, and return whether they could be written."""
    if options.ids:
        try:
            for one in results:
                write_json(one) if options.json else write(f"{one.status} {one.id}")
        except BrokenPipeError:
            discard_output()
            return False
    return True
