"""`waypost configure`: show or change the settings of a queue."""

from __future__ import annotations

import argparse
import re
from datetime import timedelta
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.exit_codes import USAGE, CommandError
from waypost.cli.options import add_command, open_client, parse_duration
from waypost.cli.output import format_pairs, write, write_json
from waypost.client import Waypost
from waypost.formatting import format_age, format_call
from waypost.views import ActionUndo, Policy

#: Settings that are durations.
DURATIONS = ("lease", "dead_keep")
CONSTANTS = {"none": None, "true": True, "false": False}
#: Other texts are left to `configure`, which names those that it does not take.
INTEGER = re.compile(r"-?[0-9]{1,18}")


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "configure", run, "show the settings of a queue, or change them for all its clients",
        more="Settings: lease, max_deliveries, max_pending, overload, max_running, rate, journal, journal_max, "
        "dead_max, dead_keep, completed, hide_bodies, tracebacks, fair, order, on_failure, "
        "group_max_running, group_rate, group_max_pending; `none` removes a limit.",
        examples=("waypost configure orders", "waypost configure orders lease=30s rate=100/m max_pending=none"),
    )  # fmt: skip
    parser.add_argument("queue", help="the queue")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="what to change; nothing: only show")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    changes = dict(map(parse_setting, options.settings))
    with open_client(options, creates=bool(changes)) as post:
        policy = configure(options, post, changes) if changes else post.policy(options.queue)
    if options.json:
        write_json({"queue": options.queue, "changed": sorted(changes), "policy": policy})
        return 0
    for line in format_pairs([("queue", options.queue), *list_settings(policy)]):
        write(line)
    return 0


def configure(options: argparse.Namespace, post: Waypost, changes: dict[str, Any]) -> Policy:
    """Change settings and log it, with the values before."""
    queue = options.queue
    with logged_action(options, post, "configure", queue, format_call("configure", queue, **changes)) as entry:
        before = post.policy(queue)
        policy = post.configure(queue, **changes)
        old = {name: getattr(before, name) for name in changes if getattr(before, name) != getattr(policy, name)}
        entry.text = f"changed {', '.join(old)} of {queue}" if old else "nothing to change"
        options_before = {
            name: value.total_seconds() if isinstance(value, timedelta) else value for name, value in old.items()
        }
        entry.undo = ActionUndo.of("configure", options_before, changed=bool(old))
    return policy


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `lease=30s` into a name and a value."""
    name, separator, given = text.partition("=")
    if not separator or not name or not given:
        raise CommandError(f"a setting is NAME=VALUE, as in lease=30s, not {text!r}", USAGE)
    if given.lower() in CONSTANTS:
        return name, CONSTANTS[given.lower()]
    if name in DURATIONS:
        try:
            return name, parse_duration(given)
        except argparse.ArgumentTypeError as error:
            raise CommandError(f"{name}: {error}", USAGE) from None
    return name, int(given) if INTEGER.fullmatch(given) else given


def list_settings(policy: Policy) -> list[tuple[str, object]]:
    """Return a policy by the setting names that `configure` accepts."""

    def limit(value: int | None) -> str:
        return "none" if value is None else f"{value:,}"

    return [
        ("lease", "none (at most once)" if policy.lease is None else format_age(policy.lease)),
        ("max_deliveries", limit(policy.max_deliveries)),
        ("max_pending", limit(policy.max_pending)),
        ("overload", policy.overload),
        ("max_running", limit(policy.max_running)),
        ("rate", policy.rate or "none"),
        ("journal", policy.journal),
        ("journal_max", limit(policy.journal_max)),
        ("dead_max", limit(policy.dead_max)),
        ("dead_keep", "until purged" if policy.dead_keep is None else format_age(policy.dead_keep)),
        ("completed", policy.completed),
        ("hide_bodies", "true" if policy.hide_bodies else "false"),
        ("tracebacks", "true" if policy.tracebacks else "false"),
        ("fair", "true" if policy.fair else "false"),
        ("order", policy.order or "none"),
        ("on_failure", policy.on_failure),
        ("group_max_running", limit(policy.group_max_running)),
        ("group_rate", policy.group_rate or "none"),
        ("group_max_pending", limit(policy.group_max_pending)),
    ]
