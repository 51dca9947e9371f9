"""`waypost pause`, `resume`, `configure`, `cancel`, `purge` and `remove`: running a queue from outside."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from waypost.cli.asking import add_yes, confirm
from waypost.cli.ending import FOUND, USAGE, Trouble
from waypost.cli.options import add_command, open_post, seconds
from waypost.cli.output import facts, write, write_json
from waypost.formatting import format_age, format_count
from waypost.policy import Policy

#: Settings that are durations.
DURATIONS = ("lease", "dead_keep")
WORDS = {"none": None, "true": True, "false": False}


def add(commands: Any) -> None:
    """The arguments of these commands."""
    for name, run, text in (
        ("pause", run_pause, "hand out nothing of a queue until it is resumed"),
        ("resume", run_resume, "hand out messages of a queue again"),
    ):
        parser = add_command(commands, name, run, text, examples=(f"waypost {name} orders",))
        parser.add_argument("queue", help="the queue")
    configure = add_command(
        commands, "configure", run_configure, "show how a queue behaves, or change it for everybody",
        more="Settings: lease, max_deliveries, max_pending, overload, max_running, rate, journal, journal_max, "
        "dead_max, dead_keep, completed; `none` takes a limit away.",
        examples=("waypost configure orders", "waypost configure orders lease=30s rate=100/m max_pending=none"),
    )  # fmt: skip
    configure.add_argument("queue", help="the queue")
    configure.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="what to change; nothing: only show")
    cancel = add_command(
        commands, "cancel", run_cancel, "cancel a message by its id or key",
        more="A waiting one is gone at once, a running one is asked to stop. Exit code 1: it is not there any more.",
        examples=("waypost cancel orders 1m7fra5gs06ap4cfk9b5jsq9", "waypost cancel orders --key order-7"),
    )  # fmt: skip
    cancel.add_argument("queue", help="the queue")
    cancel.add_argument("id", nargs="?", help="the id of the message")
    cancel.add_argument("--key", help="or its key")
    purge = add_command(
        commands, "purge", run_purge, "remove all messages of a state",
        more="This cannot be undone, so it asks.",
        examples=("waypost purge orders --state delayed", "waypost purge orders --state ready --yes"),
    )  # fmt: skip
    purge.add_argument("queue", help="the queue")
    states = ("ready", "delayed", "waiting", "dead", "done")
    purge.add_argument("--state", choices=states, required=True, help="which ones")
    add_yes(purge)
    remove = add_command(
        commands, "remove", run_remove, "remove a queue that is empty",
        more="Settings, counters, history and journal go with it, which cannot be undone, so it asks. A queue that "
        "still holds something stays, and the exit code is 1. The next publish makes a new queue of the same name.",
        examples=("waypost remove orders", "waypost remove orders --yes"),
    )  # fmt: skip
    remove.add_argument("queue", help="the queue")
    add_yes(remove)


def run_pause(options: argparse.Namespace) -> int:
    """Pause a queue; the exit code."""
    with open_post(options) as post:
        return tell_change(options, post.pause(options.queue), "paused")


def run_resume(options: argparse.Namespace) -> int:
    """Resume a queue; the exit code."""
    with open_post(options) as post:
        return tell_change(options, post.resume(options.queue), "resumed")


def tell_change(options: argparse.Namespace, changed: bool, done: str) -> int:
    """What a pause or resume did; that it was so already is no failure."""
    if options.json:
        write_json({"queue": options.queue, "changed": changed, "paused": done == "paused"})
    elif changed:
        write(f"{options.queue} is {done}")
    else:
        write(f"nothing to change: {options.queue} {'was paused already' if done == 'paused' else 'was not paused'}")
    return 0


# ---- configure --------------------------------------------------------------------------------------------------


def setting(text: str) -> tuple[str, Any]:
    """`lease=30s` as a name and a value."""
    name, separator, given = text.partition("=")
    if not separator or not name or not given:
        raise Trouble(f"a setting is NAME=VALUE, as in lease=30s, not {text!r}", USAGE)
    if given.lower() in WORDS:
        return name, WORDS[given.lower()]
    if name in DURATIONS:
        try:
            return name, seconds(given)
        except argparse.ArgumentTypeError as error:
            raise Trouble(f"{name}: {error}", USAGE) from None
    return name, int(given) if given.lstrip("-").isdigit() else given


def run_configure(options: argparse.Namespace) -> int:
    """Show or change a queue's policy; the exit code."""
    changes = dict(map(setting, options.settings))
    with open_post(options, creates=bool(changes)) as post:
        policy = post.configure(options.queue, **changes) if changes else post.policy(options.queue)
    if options.json:
        write_json({"queue": options.queue, "changed": sorted(changes), "policy": msgspec.to_builtins(policy)})
        return 0
    for line in facts([("queue", options.queue), *settings_of(policy)]):
        write(line)
    return 0


def settings_of(policy: Policy) -> list[tuple[str, object]]:
    """A policy by the names that `configure` takes."""

    def limit(value: int | None) -> str:
        return "none" if value is None else f"{value:,}"

    rate = "none"
    if policy.rate_count is not None:
        rate = f"{policy.rate_count}/{policy.rate_per_ms}ms"
    return [
        ("lease", "none (at most once)" if policy.lease_ms is None else format_age(policy.lease_ms)),
        ("max_deliveries", limit(policy.max_deliveries)),
        ("max_pending", limit(policy.max_pending)),
        ("overload", policy.overload),
        ("max_running", limit(policy.max_running)),
        ("rate", rate),
        ("journal", policy.journal),
        ("journal_max", limit(policy.journal_max)),
        ("dead_max", limit(policy.dead_max)),
        ("dead_keep", "until purged" if policy.dead_keep_ms is None else format_age(policy.dead_keep_ms)),
        ("completed", policy.completed_max),
    ]


# ---- cancel and purge -------------------------------------------------------------------------------------------

CANCELLED = {
    "cancelled": "cancelled",
    "requested": "it is running, and was asked to stop",
    "finished": "it has finished already",
    "unknown": "there is no such message",
}


def run_cancel(options: argparse.Namespace) -> int:
    """Cancel a message; the exit code."""
    with open_post(options) as post:
        status = post.cancel(options.queue, id=options.id, key=options.key)
    if options.json:
        write_json({"queue": options.queue, "id": options.id, "key": options.key, "status": status})
    else:
        write(CANCELLED[status])
    return 0 if status in ("cancelled", "requested") else FOUND


def run_purge(options: argparse.Namespace) -> int:
    """Remove messages; the exit code."""
    with open_post(options) as post:
        ledger = post.ledger(options.queue)
        there = {"ready": ledger.ready, "delayed": ledger.delayed, "dead": ledger.dead_kept}.get(options.state)
        what = "all kept messages" if there is None else format_count(there, f"{options.state} message")
        if there != 0:
            confirm(options, f"Remove {what} of {options.queue} for good?")
        removed = post.purge(options.queue, options.state)
    if options.json:
        write_json({"queue": options.queue, "state": options.state, "removed": removed})
    else:
        write(f"removed {format_count(removed, f'{options.state} message')} of {options.queue}")
    return 0


def run_remove(options: argparse.Namespace) -> int:
    """Remove an empty queue; the exit code."""
    with open_post(options) as post:
        confirm(options, f"Remove the queue {options.queue} with its settings, counters and journal for good?")
        removed = post.remove_queue(options.queue)
    if options.json:
        write_json({"queue": options.queue, "removed": removed})
    else:
        write(f"removed {options.queue}" if removed else f"there is no queue {options.queue}")
    return 0 if removed else FOUND
