"""`waypost relay`: sends a queue on to another system until it is told to stop."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli import worker as working
from waypost.cli.ending import FOUND, LEFT
from waypost.cli.options import add_command, open_post
from waypost.cli.output import log_to_stderr, say
from waypost.client.base import RELAY_BATCH, RELAY_HOLD_SECONDS
from waypost.policy import RETRY_BUDGET_SECONDS


def add(commands: Any) -> None:
    """The arguments of this command."""
    parser = add_command(
        commands, "relay", run, "send a queue on to another system", positional_url=True,
        json_text="at the end, how it went as one JSON document",
        more="Until it is told to stop. Exit code 1: the target takes no messages; they wait.",
        examples=("waypost relay sqlite:///orders.db --queue orders --to kafka://127.0.0.1:9092/orders",),
    )  # fmt: skip
    parser.add_argument("--queue", required=True, help="the queue to send on")
    parser.add_argument(
        "--to", required=True, metavar="URL",
        help="kafka://host:9092/topic, amqp://host/vhost?exchange=…, nats://host:4222/subject, "
        "valkey+stream://host:6379/stream, or another store: postgresql://host/database#queue",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, default=RELAY_BATCH, metavar="N", help=f"so many at a time ({RELAY_BATCH})"
    )
    parser.add_argument(
        "--hold", type=float, default=RELAY_HOLD_SECONDS, metavar="S",
        help="seconds that a batch is held while the target is away, before it is put off (30)",
    )  # fmt: skip
    parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready any more")
    parser.add_argument(
        "--timeout", type=float, default=25.0, metavar="S", help="seconds that a batch has to end after a signal (25)"
    )
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"),
                        help="what is logged on stderr (warning)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    log_to_stderr(options.log_level)
    with open_post(options, retry_budget=RETRY_BUDGET_SECONDS, creates=True) as post:
        relay = post.relay(options.queue, to=options.to, batch=options.batch, hold=options.hold)
        worker = post.worker(scheduler=False)
        say(working.told_start(post, worker))
        report = working.run_worker(worker, options)
        ledger = post.ledger(options.queue)
    left = ledger.ready + ledger.delayed
    working.tell_end(options, report, worker.reports())
    if relay.failure is not None:
        say(f"waypost: {relay.description} does not take messages ({relay.failure}); {left} wait in {options.queue}")
        return FOUND
    return 0 if report.complete else LEFT
