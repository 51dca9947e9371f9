"""`waypost groups`: list the groups of a queue; pause, resume or configure one, or skip what holds it."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.action_log import logged_action
from waypost.cli.commands.configure import parse_setting
from waypost.cli.exit_codes import USAGE, CommandError
from waypost.cli.options import add_command, integer_between, open_client
from waypost.cli.output import format_table, write, write_json
from waypost.formatting import format_age, format_call
from waypost.policy import PAGE_MAX
from waypost.times import format_datetime
from waypost.views import Group


def add(commands: Any) -> None:
    """Declare the arguments."""
    top = add_command(
        commands, "groups", None, "list the groups of a queue; pause, resume, configure or skip", store=False,
        json_text=None,
        examples=("waypost groups list orders", "waypost groups pause orders acme",
                  "waypost groups configure orders acme weight=3 rate=100/m", "waypost groups skip orders acme"),
    )  # fmt: skip
    actions = top.add_subparsers(dest="action", required=True, metavar="action")
    listing = add_command(actions, "list", run_list, "list groups with what they have and what holds or limits them")
    listing.add_argument("queue", help="the queue, which takes turns between groups")
    listing.add_argument("group", nargs="?", help="only this group")
    listing.add_argument(
        "-n", type=integer_between(1, PAGE_MAX), default=100, metavar="N", dest="limit", help="at most N groups (100)"
    )
    listing.add_argument("--cursor", help="go on where another listing ended")
    for action, run, text in (
        ("pause", run_change, "hand out nothing of a group until it is resumed"),
        ("resume", run_change, "hand out messages of a group again"),
        ("configure", run_configure, "give a group settings of its own"),
        ("skip", run_skip, "let the next message pass the failed one that holds an ordered group"),
    ):
        parser = add_command(actions, action, run, text)
        parser.add_argument("queue", help="the queue, which takes turns between groups")
        parser.add_argument("group", help="the group")
        if action == "configure":
            parser.add_argument(
                "settings", nargs="+", metavar="SETTING=VALUE",
                help="weight, max_running, rate, max_pending; `none`: as the queue has it",
            )  # fmt: skip


def run_list(options: argparse.Namespace) -> int:
    """List groups and return the exit code."""
    with open_client(options) as post:
        found = post.groups(options.queue, group=options.group, limit=options.limit, cursor=options.cursor)
    if options.json:
        write_json(found)
        return 0
    header = ("group", "ready", "later", "running", "oldest", "weight", "limits", "state")
    for line in format_table(header, [list_group(one) for one in found.groups], flexible=(0, 6)):
        write(line)
    if found.cursor is not None:
        write(f"there are more: --cursor '{found.cursor}'")
    return 0


def list_group(group: Group) -> tuple[str, ...]:
    """Return the cells of one group."""
    own = {"max_running": group.max_running, "rate": group.rate, "max_pending": group.max_pending}
    limits = " ".join(f"{name}={value}" for name, value in own.items() if value is not None)
    state = ["paused"] if group.paused else []
    state += [f"held by {group.held_by} ({group.held_state})"] if group.held_by else []
    for limit in group.limited_by:
        until = f" until {format_datetime(group.limited_until)}" if limit == "rate" and group.limited_until else ""
        state.append(f"at its {limit}{until}")
    return (
        "(none)" if group.group is None else group.group, f"{group.ready:,}", f"{group.later:,}", f"{group.running:,}",
        "" if group.oldest is None else format_age(group.oldest), str(group.weight), limits, ", ".join(state),
    )  # fmt: skip


def run_change(options: argparse.Namespace) -> int:
    """Pause or resume a group and return the exit code. One that is so already is no failure."""
    pauses, group = options.action == "pause", options.group
    method = "pause_group" if pauses else "resume_group"
    python = format_call(method, options.queue, group)
    with open_client(options) as post, logged_action(options, post, method, options.queue, python) as entry:
        changed = post.pause_group(options.queue, group) if pauses else post.resume_group(options.queue, group)
        done = f"group {group} of {options.queue} is {'paused' if pauses else 'resumed'}"
        entry.text = done if changed else f"nothing to change: group {group} was {'' if pauses else 'not '}paused"
    return report(options, entry.text, changed=changed, paused=pauses)


def run_configure(options: argparse.Namespace) -> int:
    """Change the settings of a group and return the exit code."""
    changes = dict(map(parse_setting, options.settings))
    if not changes:
        raise CommandError("name a setting, as in weight=3", USAGE)
    python = format_call("configure_group", options.queue, options.group, **changes)
    with open_client(options) as post, logged_action(options, post, "configure_group", options.queue, python) as entry:
        changed = post.configure_group(options.queue, options.group, **changes)
        done = f"changed {', '.join(sorted(changes))} of group {options.group} of {options.queue}"
        entry.text = done if changed else "nothing to change"
    return report(options, entry.text, changed=changed)


def run_skip(options: argparse.Namespace) -> int:
    """Skip what holds a group and return the exit code. A group that nothing holds is no failure."""
    python = format_call("skip_held", options.queue, options.group)
    with open_client(options) as post, logged_action(options, post, "skip_held", options.queue, python) as entry:
        skipped = post.skip_held(options.queue, options.group)
        entry.text = f"others may pass {skipped}" if skipped else f"nothing to change: nothing holds {options.group}"
    return report(options, entry.text, skipped=skipped)


def report(options: argparse.Namespace, text: str, **document: object) -> int:
    """Print what a command did."""
    if options.json:
        write_json({"queue": options.queue, "group": options.group, **document})
    else:
        write(text)
    return 0
