"""`waypost schedules`: preview a rule, list what is saved, pause, resume, trigger, remove."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import Any

from waypost.client import Waypost
from waypost.errors import InvalidSchedule, InvalidTime, WaypostError
from waypost.operations.schedules import make_spec
from waypost.schedule.described import Schedule, moment, told
from waypost.schedule.rule import Timeline
from waypost.schedule.zones import zone_of

COUNT_MAX = 10_000


def add(commands: Any) -> None:
    """The arguments of this command."""
    top = commands.add_parser("schedules", help="preview, list, pause, resume, trigger, remove", description=__doc__)
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    preview = actions.add_parser("preview", help="when a rule fires; needs no store")
    preview.add_argument("pattern", nargs="?", help='a cron pattern: "0 2 * * *"')
    preview.add_argument("--every", type=float, metavar="S", help="an interval in seconds instead of a pattern")
    preview.add_argument("--tz", default="UTC", help="time zone: UTC, +05:30, Europe/Madrid (UTC)")
    preview.add_argument("--start", metavar="TIME", help="from this time on, as 2026-03-06T00:00:00Z (now)")
    preview.add_argument("--count", type=int, default=5, metavar="N", help="so many instants (5)")
    preview.add_argument("--json", action="store_true", help="as a list of {utc, local}")
    preview.set_defaults(run=run_preview)

    listing = actions.add_parser("list", help="all schedules with their next fires")
    _add_store(listing)
    listing.add_argument("--count", type=int, default=1, metavar="N", help="so many next fires (1)")
    listing.add_argument("--json", action="store_true", help="as a list of objects")
    listing.set_defaults(run=run_list)
    for action, text in (
        ("pause", "fire no more until it is resumed"),
        ("resume", "fire again from the next instant on"),
        ("trigger", "publish its message now"),
        ("remove", "remove it; what it has published stays"),
    ):
        parser = actions.add_parser(action, help=text)
        _add_store(parser)
        parser.add_argument("name", help="its key or its name")
        parser.set_defaults(run=run_change)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the store: sqlite:///orders.db, valkey://127.0.0.1:6379, postgresql://…")
    parser.add_argument("--namespace", default="wp", help="the namespace (wp)")
    parser.add_argument("--queue", help="only this queue")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _failed(error: WaypostError) -> int:
    sys.stderr.write(f"waypost: {error}\n")
    return 2 if isinstance(error, InvalidSchedule | InvalidTime) else 1


def _start_ms(text: str | None) -> int:
    try:
        at = datetime.now(UTC) if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTime(f"--start is a time as 2026-03-06T00:00:00Z, not {text!r}") from None
    if at.tzinfo is None:
        raise InvalidTime("--start needs its zone: end it with Z, or an offset as +01:00")
    return round(at.timestamp() * 1000)


def run_preview(options: argparse.Namespace) -> int:
    """Print when a rule fires; the exit code."""
    try:
        if not 1 <= options.count <= COUNT_MAX:
            raise InvalidSchedule(f"--count is a whole number from 1 to {COUNT_MAX}")
        start_ms = _start_ms(options.start)
        start = moment(start_ms) if options.every is not None else None
        spec = make_spec("preview", cron=options.pattern, every=options.every, tz=options.tz, start=start)
        fires = Timeline("preview", spec).many(start_ms - 1, options.count)
    except WaypostError as error:
        return _failed(error)
    zone = zone_of(spec.tz)
    shown = [
        {"utc": told(fire.instant_ms), "local": moment(fire.instant_ms).astimezone(zone).isoformat()} for fire in fires
    ]
    if options.json:
        _print(json.dumps(shown, indent=2))
    else:
        for one in shown:
            _print(f"{one['utc']}  {one['local']}")
    return 0


def run_list(options: argparse.Namespace) -> int:
    """Print the schedules; the exit code."""
    try:
        with Waypost(options.url, namespace=options.namespace, retry_budget=0) as post:
            found = post.schedules(options.queue, count=options.count)
    except WaypostError as error:
        return _failed(error)
    if options.json:
        _print(json.dumps([_shown(schedule) for schedule in found], indent=2))
        return 0
    for schedule in found:
        rule = f"every {schedule.every:g} s" if schedule.cron is None else f"{schedule.cron} {schedule.tz}"
        state = "paused" if schedule.paused else ("over" if not schedule.next_fires else _time(schedule.next_fires[0]))
        _print(
            f"{schedule.queue}  {schedule.key}  {rule}  next {state}  fired {schedule.fires}  missed "
            f"{schedule.missed_fires}"
        )
    return 0


def _time(at: datetime) -> str:
    return told(round(at.timestamp() * 1000))


def _shown(schedule: Schedule) -> dict[str, Any]:
    missed = schedule.missed if isinstance(schedule.missed, str) else {"catch_up": schedule.missed.max_catchup}
    return {
        "queue": schedule.queue,
        "key": schedule.key,
        "name": schedule.name,
        "cron": schedule.cron,
        "every": schedule.every,
        "tz": schedule.tz,
        "missed": missed,
        "paused": schedule.paused,
        "declared": schedule.declared,
        "fires": schedule.fires,
        "missed_fires": schedule.missed_fires,
        "last_fire": None if schedule.last_fire is None else _time(schedule.last_fire),
        "next_fires": [
            {"utc": _time(at), "local": schedule.local(at).isoformat()} for at in schedule.next_fires
        ],
    }  # fmt: skip


def run_change(options: argparse.Namespace) -> int:
    """Pause, resume, trigger or remove one schedule; the exit code."""
    try:
        with Waypost(options.url, namespace=options.namespace, retry_budget=0) as post:
            if options.action == "trigger":
                _print(f"published {post.trigger_schedule(options.name, queue=options.queue).id}")
                return 0
            change = {"pause": post.pause_schedule, "resume": post.resume_schedule, "remove": post.remove_schedule}
            changed = change[options.action](options.name, queue=options.queue)
    except WaypostError as error:
        return _failed(error)
    done = {"pause": "paused", "resume": "resumed", "remove": "removed"}[options.action]
    _print(done if changed else f"nothing to change: it was not there, or {done} already")
    return 0 if changed or options.action != "remove" else 1
