"""`waypost schedules`: preview a rule; list, save, pause, resume, trigger, backfill and remove schedules."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import msgspec

from waypost.cli.action_log import Entry, logged_action
from waypost.cli.exit_codes import FOUND, USAGE, CommandError
from waypost.cli.options import (
    add_command,
    integer_between,
    open_client,
    parse_day,
    parse_duration,
    parse_retry_argument,
    parse_time,
    parse_time_or_day,
)
from waypost.cli.output import format_table, write, write_json
from waypost.cli.progress import Progress
from waypost.client import Waypost
from waypost.client.internals import edit_schedule
from waypost.errors import InvalidBody, InvalidSchedule, InvalidTime
from waypost.formatting import Placeholder, format_call, format_count
from waypost.operations.backfill import Backfilled
from waypost.operations.schedules import make_spec
from waypost.policy import (
    BACKFILL_INSTANTS,
    BACKFILL_INSTANTS_MAX,
    GRACE_SECONDS,
    OVERLAPS,
    PRIORITY_DEFAULT,
    CatchUp,
    Missed,
    format_retry,
)
from waypost.schedule.rule import Timeline
from waypost.schedule.schedule import Schedule
from waypost.schedule.zones import zone_of
from waypost.times import format_datetime, to_datetime
from waypost.views import ActionUndo, to_json

COUNT_MAX = 10_000
#: The argument `none`; one that was not given is None.
NONE = object()
#: What `--reset` sets beside the rule.
DEFAULTS: dict[str, Any] = {
    "exclude": [], "missed": "skip", "overlap": "allow", "grace": GRACE_SECONDS, "start": None, "end": None,
    "max_fires": None, "jitter": 0, "body": None, "priority": PRIORITY_DEFAULT, "group": None, "headers": {},
    "correlation_id": None, "reply_to": None, "retry": None, "timeout": None, "expires": None,
}  # fmt: skip


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "schedules", None, "preview, list, save, pause, resume, trigger, backfill or remove", store=False,
        json_text=None,
        examples=('waypost schedules preview "0 9 * * mon-fri" --tz Europe/Madrid', "waypost schedules list --count 3",
                  'waypost schedules save rollup --queue reports --cron "0 9 * * *"',
                  "waypost schedules pause rollup"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    preview = add_command(
        actions, "preview", run_preview, "show when a rule fires; needs no store", store=False,
        json_text="as a list of {utc, local}",
    )  # fmt: skip
    preview.add_argument("pattern", nargs="?", help='a cron pattern: "0 2 * * *", or several separated by ;')
    preview.add_argument("--every", type=float, metavar="S", help="an interval in seconds instead of a pattern")
    preview.add_argument("--tz", default="UTC", help="time zone: UTC, +05:30, Europe/Madrid (UTC)")
    preview.add_argument(
        "--exclude", type=parse_day, action="append", default=[], metavar="DAY", help="not on this day; may be repeated"
    )
    preview.add_argument("--start", metavar="TIME", help="from this time on, as 2026-03-06T00:00:00Z (now)")
    preview.add_argument("--count", type=int, default=5, metavar="N", help="N instants (5)")

    listing = add_command(
        actions, "list", run_list, "list all schedules with their next fires", positional_url=True,
        json_text="as a list of objects",
    )  # fmt: skip
    listing.add_argument("--queue", help="only this queue")
    listing.add_argument("--count", type=integer_between(1, 1_000), default=1, metavar="N", help="the next N fires (1)")
    _add_save(actions)
    for action, text in (
        ("pause", "fire no more until it is resumed"),
        ("resume", "fire again from the next instant on"),
        ("trigger", "publish its message now"),
        ("remove", "remove it; what it has published stays"),
    ):
        parser = add_command(actions, action, run_change, text, positional_url=True)
        parser.add_argument("name", help="its key or its name")
        parser.add_argument("--queue", help="only this queue")
    _add_backfill(actions)


def _add_save(actions: Any) -> None:
    save = add_command(
        actions, "save", run_save, "save a schedule, or change an existing one",
        more="Of an existing schedule (found by --key, or by its name in the queue) only the given options change. "
        "`none` removes a start, an end, a limit, a group, an expiry, a time limit, the headers or the excluded days, "
        "`--retry handler` a retry policy; --reset sets all options not given to their defaults.",
        examples=('waypost schedules save rollup --queue reports --cron "0 9 * * *"',
                  "waypost schedules save rollup --queue reports --jitter 30s --end none"),
    )  # fmt: skip
    save.add_argument("name", help="its name")
    save.add_argument("--queue", required=True, help="the queue that it publishes to")
    save.add_argument("--cron", metavar="PATTERN", help='a cron pattern: "0 2 * * *", or several separated by ;')
    save.add_argument("--every", type=float, metavar="S", help="or an interval in seconds")
    save.add_argument("--tz", help="time zone: UTC, +05:30, Europe/Madrid (UTC)")
    save.add_argument(
        "--exclude", type=_or_none(parse_day), action="append", metavar="DAY",
        help="not on this day, as 2026-12-25; may be repeated",
    )  # fmt: skip
    save.add_argument("--body", metavar="JSON", help="the body of its messages (null)")
    save.add_argument("--key", help="its key (made of name and rule)")
    save.add_argument("--missed", metavar="RULE", help="what becomes of missed fires: skip, once, or at most N (skip)")
    save.add_argument(
        "--overlap",
        choices=OVERLAPS,
        help="at an instant while the last run has not ended: allow, skip, queue_one (allow)",
    )
    save.add_argument("--grace", type=parse_duration, metavar="S", help="a fire later than this is missed (60)")
    save.add_argument(
        "--start", type=_or_none(parse_time), metavar="TIME", help="no fire before, as 2026-03-06T00:00:00Z"
    )
    save.add_argument("--end", type=_or_none(parse_time), metavar="TIME", help="no fire after")
    save.add_argument("--max-fires", type=_or_none(integer_between(1, 2**40)), metavar="N", help="at most N fires")
    save.add_argument("--jitter", type=parse_duration, metavar="S", help="spread its fires over S seconds (0)")
    save.add_argument("--priority", type=integer_between(0, 9), metavar="0-9", help="of its messages (5)")
    save.add_argument("--group", type=_or_none(str), help="of its messages")
    save.add_argument(
        "--expires", type=_or_none(parse_duration), metavar="S", help="not handed out later than S after its fire"
    )
    save.add_argument(
        "--retry", type=_or_none(parse_retry_argument, "handler"), metavar="POLICY",
        help="of its messages: none, constant, linear or exponential:attempts=5; or that of their handler (handler)",
    )  # fmt: skip
    save.add_argument(
        "--timeout", type=_or_none(parse_duration), metavar="S", help="time limit of its messages in a handler"
    )
    save.add_argument("--header", dest="headers", action="append", metavar="NAME=VALUE", help="may be repeated")
    save.add_argument("--reset", action="store_true", help="set all options not given to their defaults")


def _add_backfill(actions: Any) -> None:
    backfill = add_command(
        actions, "backfill", run_backfill, "publish the fires of an interval of the past that have not fired",
        positional_url=True,
        more="Instants that fired, in time or by an earlier backfill, are skipped, so a rerun publishes nothing twice. "
        "Instants from --from on and before --to count.",
        examples=("waypost schedules backfill rollup --from 2026-03-01 --to 2026-03-08 --dry-run",
                  "waypost schedules backfill rollup --from 2026-03-01T06:00:00Z --to 2026-03-01T09:00:00Z"),
    )  # fmt: skip
    backfill.add_argument("name", help="its key or its name")
    backfill.add_argument("--queue", help="only this queue")
    backfill.add_argument(
        "--from", dest="start", type=parse_time_or_day, required=True, metavar="TIME",
        help="2026-03-06T00:00:00Z, or a day, which begins in UTC",
    )  # fmt: skip
    backfill.add_argument("--to", dest="end", type=parse_time_or_day, required=True, metavar="TIME", help="before this")
    backfill.add_argument("--dry-run", action="store_true", help="only count them")
    backfill.add_argument(
        "--limit", type=integer_between(1, BACKFILL_INSTANTS_MAX), default=BACKFILL_INSTANTS, metavar="N",
        help=f"refuse an interval with more instants ({BACKFILL_INSTANTS:,})",
    )  # fmt: skip


def _or_none(read: Callable[[str], Any], none: str = "none") -> Callable[[str], Any]:
    """Return an argument type that also accepts `none`, or another word that removes what is set."""

    def read_or_none(text: str) -> Any:
        return NONE if text.lower() == none else read(text)

    return read_or_none


def _parse_missed(text: str) -> Missed:
    if text in ("skip", "once"):
        return "skip" if text == "skip" else "once"
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000_000:
        return CatchUp(int(text))
    raise CommandError(f"--missed is skip, once, or the most fires to catch up with, not {text!r}", USAGE)


def _given_rule(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given arguments as keywords of `save_schedule`."""
    names = (
        "cron", "every", "tz", "overlap", "grace", "start", "end", "max_fires", "jitter", "priority", "group",
        "expires", "retry", "timeout",
    )  # fmt: skip
    rule = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.body is not None:
        try:
            rule["body"] = msgspec.json.decode(options.body.encode())
        except msgspec.DecodeError as error:
            raise InvalidBody(f"--body is not JSON ({error}); text stands in quotation marks") from None
    if options.exclude is not None:
        rule["exclude"] = [] if NONE in options.exclude else options.exclude
    if options.missed is not None:
        rule["missed"] = _parse_missed(options.missed)
    if options.headers is not None:
        headers = [] if options.headers == ["none"] else [header.partition("=") for header in options.headers]
        for header in headers:
            if not header[1]:
                raise CommandError(f"a header is NAME=VALUE, not {header[0]!r}", USAGE)
        rule["headers"] = {name: value for name, _, value in headers}
    return {name: None if value is NONE else value for name, value in rule.items()}


def _parse_start(text: str | None) -> int:
    try:
        at = datetime.now(UTC) if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTime(f"--start is a time as 2026-03-06T00:00:00Z, not {text!r}") from None
    if at.tzinfo is None:
        raise InvalidTime("--start needs its zone: end it with Z, or an offset as +01:00")
    return round(at.timestamp() * 1000)


def run_preview(options: argparse.Namespace) -> int:
    """Print when a rule fires and return the exit code."""
    if not 1 <= options.count <= COUNT_MAX:
        raise InvalidSchedule(f"--count is a whole number from 1 to {COUNT_MAX}")
    start_ms = _parse_start(options.start)
    start = to_datetime(start_ms) if options.every is not None else None
    spec = make_spec(
        "preview", cron=options.pattern, every=options.every, tz=options.tz, exclude=options.exclude, start=start
    )
    fires = Timeline("preview", spec).next_fires_after(start_ms - 1, options.count)
    zone = zone_of(spec.tz)
    instants = [
        {"utc": format_datetime(at), "local": at.astimezone(zone).isoformat()}
        for at in (to_datetime(fire.instant_ms) for fire in fires)
    ]
    if options.json:
        write_json(instants, indent=2)
    else:
        for one in instants:
            write(f"{one['utc']}  {one['local']}")
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Print the schedules and return the exit code."""
    with open_client(options) as post:
        found = post.schedules(options.queue, count=options.count)
    if options.json:
        write_json([_schedule_json(schedule) for schedule in found], indent=2)
        return 0
    if not found:
        write("no schedules")
        return 0
    rows: list[tuple[object, ...]] = []
    for schedule in found:
        rule = (
            f"every {schedule.every.total_seconds():g} s"
            if schedule.every is not None
            else f"{schedule.cron} {schedule.tz}" + (f" but {len(schedule.exclude)} days" if schedule.exclude else "")
        )
        state = (
            "paused"
            if schedule.paused
            else ("over" if not schedule.next_fires else _format_second(schedule.next_fires[0]))
        )
        rows.append((schedule.queue, schedule.name, rule, state, schedule.fires, schedule.missed_fires))
        rows += [("", "", "", _format_second(at), "", "") for at in schedule.next_fires[1:]]
    for line in format_table(("queue", "name", "rule", "next (UTC)", "fired", "missed"), rows, flexible=(0, 1, 2)):
        write(line)
    return 0


def run_save(options: argparse.Namespace) -> int:
    """Save a schedule and return the exit code."""
    rule = _given_rule(options)
    if options.reset:
        if "cron" not in rule and "every" not in rule:
            raise CommandError("--reset also resets the rule: give --cron or --every too", USAGE)
        rule = DEFAULTS | {"tz": "UTC"} | rule
    keywords = {name: Placeholder(name) if name in ("body", "headers") else value for name, value in rule.items()}
    keywords |= {} if options.key is None else {"key": options.key}
    python = format_call("save_schedule", options.name, queue=options.queue, **keywords)
    with (
        open_client(options, creates=True) as post,
        logged_action(options, post, "save_schedule", options.queue, python) as entry,
    ):
        saved = edit_schedule(post, options.name, options.queue, options.key, cast("Any", rule))
        next_fire = format_datetime(saved.next_fires[0]) if saved.next_fires else "never"
        entry.text, entry.undo = f"saved {saved.key}, next {next_fire}", ActionUndo.of("save_schedule")
    if options.json:
        write_json(_schedule_json(saved))
    else:
        write(entry.text)
    return 0


def _format_second(at: datetime) -> str:
    return format_datetime(at)[:19]


def _schedule_json(schedule: Schedule) -> dict[str, Any]:
    fields: dict[str, Any] = to_json(schedule)
    del fields["body"]
    if isinstance(schedule.missed, CatchUp):
        fields["missed"] = {"catch_up": schedule.missed.max_catchup}
    fields["retry"] = None if schedule.retry is None else format_retry(schedule.retry)
    fields["next_fires"] = [
        {"utc": format_datetime(at), "local": schedule.local(at).isoformat()} for at in schedule.next_fires
    ]
    return fields


def run_change(options: argparse.Namespace) -> int:
    """Pause, resume, trigger or remove one schedule and return the exit code."""
    action = f"{options.action}_schedule"
    where = {} if options.queue is None else {"queue": options.queue}
    python = format_call(action, options.name, **where)
    with open_client(options) as post, logged_action(options, post, action, options.queue, python) as entry:
        if options.action == "trigger":
            return _trigger(options, post, entry)
        change = {"pause": post.pause_schedule, "resume": post.resume_schedule, "remove": post.remove_schedule}
        known = [one for one in post.schedules(options.queue) if options.name in (one.key, one.name)]
        changed = change[options.action](options.name, queue=options.queue)
        done = {"pause": "paused", "resume": "resumed", "remove": "removed"}[options.action]
        text = done if changed else f"nothing to change: it was not there, or {done} already"
        entry.text = f"schedule {options.name}: {text}"
        if len(known) == 1:
            entry.queue = known[0].queue
            entry.undo = ActionUndo.of(action, {"queue": known[0].queue, "key": known[0].key}, changed=changed)
    if options.json:
        write_json({"name": options.name, "changed": changed})
    else:
        write(text)
    return 0 if changed or options.action != "remove" else FOUND


def _trigger(options: argparse.Namespace, post: Waypost, entry: Entry) -> int:
    published = post.trigger_schedule(options.name, queue=options.queue)
    entry.text, entry.queue = f"published {published.id}", published.queue
    entry.undo = ActionUndo.of("trigger_schedule", {"queue": published.queue, "id": published.id})
    write_json(published) if options.json else write(entry.text)
    return 0


def run_backfill(options: argparse.Namespace) -> int:
    """Publish the fires of an interval of the past and return the exit code."""
    start, end, where = options.start, options.end, {} if options.queue is None else {"queue": options.queue}
    python = format_call("backfill", options.name, start, end, limit=options.limit, **where)
    with open_client(options) as post:
        found = post.backfill(options.name, start, end, queue=options.queue, limit=options.limit, dry_run=True)
        if not options.dry_run:
            bar = Progress(f"backfill of {found.key}", found.published + found.skipped, quiet=options.json)
            with bar, logged_action(options, post, "backfill_schedule", found.queue, python) as entry:
                found = post.backfill(
                    options.name, start, end, queue=options.queue, limit=options.limit,
                    progress=lambda done: bar.advance(done - bar.done),
                )  # fmt: skip
                entry.text, entry.undo = _describe_backfill(found), ActionUndo.of("backfill_schedule")
    write_json(found) if options.json else write(_describe_backfill(found))
    return 0


def _describe_backfill(found: Backfilled) -> str:
    published = format_count(found.published, "message")
    text = f"would publish {published}" if found.dry_run else f"published {published}"
    if found.first is not None and found.last is not None:
        text += f", {_format_second(found.first)} to {_format_second(found.last)} UTC"
    text += f"; skipped {found.skipped:,} that had fired"
    return text + (f"; left {found.left:,} to the scheduler, which has not come to them yet" if found.left else "")
