"""`waypost relay`: forward a queue to another system until a signal."""

from __future__ import annotations

import argparse
from typing import Any

from waypost.cli.commands.worker import WORKER_EVENTS, describe_start, print_end, run_worker
from waypost.cli.exit_codes import FOUND, LEFT
from waypost.cli.options import add_command, add_log_options, open_client
from waypost.cli.output import log_to_stderr, write_stderr
from waypost.client.base import RELAY_BATCH, RELAY_HOLD_SECONDS
from waypost.policy import RETRY_BUDGET_SECONDS


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "relay", run, "forward a queue to another system", positional_url=True,
        json_text="at the end, a report as one JSON document",
        more="It stops at a signal. Exit code 1: the target accepts no messages; they stay in the queue.",
        examples=("waypost relay sqlite:///orders.db --queue orders --to kafka://127.0.0.1:9092/orders",),
    )  # fmt: skip
    parser.add_argument("--queue", required=True, help="the queue to forward")
    parser.add_argument(
        "--to", required=True, metavar="URL",
        help="kafka://host:9092/topic, amqp://host/vhost?exchange=…, nats://host:4222/subject, "
        "valkey+stream://host:6379/stream, or another store: postgresql://host/database#queue",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, default=RELAY_BATCH, metavar="N", help=f"N messages at a time ({RELAY_BATCH})"
    )
    parser.add_argument(
        "--hold", type=float, default=RELAY_HOLD_SECONDS, metavar="S",
        help="seconds that a batch is held while the target is away, before it is delayed (30)",
    )  # fmt: skip
    parser.add_argument("--until-empty", action="store_true", help="end when nothing is ready any more")
    parser.add_argument(
        "--timeout", type=float, default=25.0, metavar="S", help="seconds that a batch may run on after a signal (25)"
    )
    add_log_options(parser, "info")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    log_to_stderr(options.log_level, options.log_format, without=WORKER_EVENTS)
    with open_client(options, retry_budget=RETRY_BUDGET_SECONDS, creates=True) as post:
        relay = post.relay(options.queue, to=options.to, batch=options.batch, hold=options.hold)
        worker = post.worker(scheduler=False)
        if options.log_format == "text":
            write_stderr(describe_start(post, worker))
        report = run_worker(worker, options)
        ledger = post.ledger(options.queue)
    left = ledger.ready + ledger.delayed
    print_end(options, report, worker.reports())
    if relay.failure is not None:
        write_stderr(
            f"waypost: {relay.description} does not accept messages ({relay.failure}); {left} wait in {options.queue}"
        )
        return FOUND
    if options.until_empty and left and (note := relay.note()):
        write_stderr(f"waypost: {note}; {left} wait in {options.queue}")
        return FOUND
    return 0 if report.complete else LEFT
