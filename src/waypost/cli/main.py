"""`waypost`: reads the arguments and calls the command. Each command has a module, with `add` for its arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from waypost import __version__
from waypost.cli import clockwork, demo, migrate, pipeline, relay, schedules, workers
from waypost.policy import HEALTH_WINDOW_SECONDS

#: Each adds its arguments, and what runs it as `run`.
COMMANDS = (clockwork, schedules, workers, relay, migrate, pipeline, demo)


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    top = argparse.ArgumentParser(prog="waypost", description="Messages that must arrive.")
    top.add_argument("--version", action="version", version=f"waypost {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    worker = commands.add_parser(
        "worker", help="run the handlers of a client", description="Run the handlers registered on a client."
    )
    worker.add_argument("target", metavar="module:post", help="where the client is: shop.queues:post")
    worker.add_argument("--queues", metavar="a,b", help="only these queues")
    worker.add_argument("--processes", type=int, default=1, metavar="N", help="so many worker processes (1)")
    worker.add_argument(
        "--timeout", type=float, default=25.0, metavar="S", help="seconds that handlers have to end after a signal (25)"
    )
    worker.add_argument("--until-empty", action="store_true", help="end when nothing is ready any more")
    worker.add_argument(
        "--health-window", type=float, default=HEALTH_WINDOW_SECONDS, metavar="S",
        help="seconds without a claim that could have been made after which its health is red (15)",
    )  # fmt: skip
    worker.add_argument("--no-scheduler", action="store_true", help="leave schedules to others")
    worker.add_argument("--promoter", action="store_true", help="make timers of all queues ready, too")
    worker.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    for command in COMMANDS:
        command.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    options = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] | None = getattr(options, "run", None)
    if run is not None:
        return run(options)
    from waypost.cli import worker

    return worker.run(options, sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    sys.exit(main())
