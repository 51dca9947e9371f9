"""`waypost demo`: twenty seconds on SQLite in which a worker is killed and no message is lost."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waypost.cli.exit_codes import FOUND, INTERRUPTED, USAGE, CommandError
from waypost.cli.options import add_command

if TYPE_CHECKING:
    from waypost.cli.demo.runner import DemoOutput, DemoProcesses
    from waypost.client import Waypost
    from waypost.values import Ledger

ORDER_COUNT = 240
#: The worker is killed when this many orders are done.
KILL_AT = 80
#: Short, so that the leases of the killed worker end soon; the default is a minute.
LEASE_SECONDS = 3
TIMER_SECONDS = 8
#: Each step takes a few seconds, on a busy machine more.
STEP_SECONDS_MAX = 120.0


def add(commands: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        commands, "demo", run, "show in twenty seconds that a killed worker loses no message", store=False,
        json_text="the result as one JSON object; the steps go to stderr",
        more="On SQLite: orders, a duplicate, a timer, a worker that is killed, a dead letter, a schedule; "
        "then where every message went. No server and no other package is needed.",
        examples=("waypost demo", "waypost demo --directory shop && waypost stats --url sqlite:///shop/demo.db"),
    )  # fmt: skip
    parser.add_argument("--directory", metavar="DIR", help="keep the store here (else it is temporary)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from waypost.cli.demo.runner import DemoOutput, DemoTimeout

    output = DemoOutput(sys.stderr if options.json else sys.stdout)
    try:
        if options.directory is None:
            with tempfile.TemporaryDirectory(prefix="waypost-demo-") as temporary:
                result = run_demo(Path(temporary), output)
        else:
            directory = Path(options.directory)
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / "demo.db").exists():
                raise CommandError(f"{directory} already contains a demo.db; choose another directory", USAGE)
            result = run_demo(directory, output)
            output.line(f"kept: sqlite:///{directory / 'demo.db'}")
    except KeyboardInterrupt:
        output.bad("interrupted; the workers have ended")
        return INTERRUPTED
    except (DemoTimeout, OSError) as error:
        raise CommandError(str(error)) from error
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["unaccounted"] == result["unexplained"] == 0 else FOUND


def run_demo(directory: Path, output: DemoOutput) -> dict[str, Any]:
    """Run all steps and return the result."""
    from waypost.cli.demo.runner import DemoProcesses
    from waypost.client import Waypost

    with Waypost(f"sqlite:///{directory / 'demo.db'}") as post, DemoProcesses() as processes:
        demo = Demo(post, processes, output, directory)
        demo.publish()
        held = demo.kill_a_worker()
        demo.retake(held)
        demo.repair()
        return demo.account(held)


class Demo:
    """The steps of the demo."""

    def __init__(self, post: Waypost, processes: DemoProcesses, output: DemoOutput, directory: Path) -> None:
        from waypost.cli.demo import shop

        self.post = post
        self.processes = processes
        self.output = output
        self.directory = directory
        #: Fires of the schedule before its worker was killed.
        self.fired = 0
        self.shop = shop

    def publish(self) -> None:
        """Publish orders: one of them twice, one for later."""
        output, orders = self.output, self.shop.ORDERS
        output.heading("A shop on SQLite: one file, no server")
        for queue in (orders, self.shop.MAILS, self.shop.ROLLUP):
            self.post.configure(queue, lease=LEASE_SECONDS)
        bodies = [{"id": number} for number in range(1, ORDER_COUNT + 1)]
        self.post.publish_many(orders, bodies, key=lambda body: f"order:{body['id']}")
        output.line(f"{ORDER_COUNT} orders are published in one step")
        again = self.post.publish(orders, {"id": 7}, key="order:7")
        output.line(f"order 7 once more, same key: {again.status}")
        late = ORDER_COUNT + 1
        timer = self.post.publish(orders, {"id": late}, key=f"order:{late}", delay=TIMER_SECONDS)
        output.line(f"order {late} for {TIMER_SECONDS} seconds from now: {timer.status}")

    def start_worker(self, number: int, *, repaired: bool = False) -> subprocess.Popen[bytes]:
        """Start a process that runs the handlers, as `waypost worker shop:post` does."""
        environment = {self.shop.URL_VARIABLE: f"sqlite:///{self.directory / 'demo.db'}"}
        if repaired:
            environment[self.shop.REPAIRED_VARIABLE] = "1"
        command = [sys.executable, "-m", "waypost.cli.main", "worker", f"{self.shop.__name__}:post", "--timeout", "5"]
        process = self.processes.start(command, environment, self.directory / f"worker-{number}.log")
        self.output.line(f"worker {number} starts: process {process.pid}")
        return process

    def follow(self, condition: Callable[[Ledger], bool], what: str) -> None:
        """Show the ledger until it fulfils a condition."""
        from waypost.cli.demo.runner import wait_until

        def poll() -> bool:
            ledger = self.post.ledger(self.shop.ORDERS)
            text = f"{ledger.done} of {ORDER_COUNT + 1} done, {ledger.leased} running, {ledger.ready} ready"
            self.output.progress(ledger.done, ORDER_COUNT + 1, text)
            return condition(ledger)

        wait_until(poll, what, STEP_SECONDS_MAX)

    def kill_a_worker(self) -> dict[str, int]:
        """Start a worker, kill it at work, and return the messages that it held, by id."""
        self.output.heading("A worker is killed")
        worker = self.start_worker(1)

        def at_work(ledger: Ledger) -> bool:
            return ledger.done >= KILL_AT and ledger.leased > 0

        self.follow(at_work, "work of the first worker")
        self.processes.kill(worker)
        self.fired = self.post.ledger(self.shop.ROLLUP).published
        held = {message.id: message.body["id"] for message in self.post.messages(self.shop.ORDERS, "leased")}
        ledger = self.post.ledger(self.shop.ORDERS)
        numbers = sorted(held.values())
        named = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        self.output.bad(f"kill -9: {ledger.done} orders are done; {len(held)} were running: {named}")
        self.output.line(f"it also fired the schedule, a rollup each second: {self.fired} so far")
        return held

    def retake(self, held: dict[str, int]) -> None:
        """Let another worker take over the messages of the killed one when their leases end."""
        output, orders = self.output, self.shop.ORDERS
        worker = self.start_worker(2)
        output.line(f"no worker gets these for {LEASE_SECONDS} s: until a lease ends, its worker may still be running")

        def retaken(ledger: Ledger) -> bool:
            return ledger.redelivered.get("expired", 0) >= len(held)

        self.follow(retaken, "the redelivery of its messages")
        output.good(f"the leases have ended, and worker 2 has all {len(held)}: delivery 2, with a new token")
        self.follow(lambda ledger: ledger.dead >= 1, "the dead letter of the unreadable card")
        for letter in self.post.dead_letters(orders):
            output.bad(
                f"order {letter.body['id']} failed {letter.attempts} times and is a dead letter: "
                f"{letter.reason}, {letter.error}"
            )
        code = self.processes.stop(worker)
        output.line(f"worker 2 stops: it finishes running messages and releases the others at once (exit code {code})")

    def repair(self) -> None:
        """Start a repaired handler, redrive the dead letter, and finish all work."""
        from waypost.cli.demo.runner import wait_until

        output, post = self.output, self.post
        output.heading("The handler is repaired")
        worker = self.start_worker(3, repaired=True)
        redriven = post.redrive(self.shop.ORDERS)
        output.line(f"redrive: {len(redriven.moved)} dead letter is ready again")
        self.follow(lambda ledger: ledger.done == ORDER_COUNT + 1, "the end of all orders")
        output.good(f"all {ORDER_COUNT + 1} orders are done, the timer among them")
        self.follow(lambda _: post.ledger(self.shop.MAILS).done == ORDER_COUNT + 1, "the end of all mails")
        output.good(f"{ORDER_COUNT + 1} mails are sent, each a second after its order")
        wait_until(
            lambda: post.ledger(self.shop.ROLLUP).done > self.fired, "another fire of the schedule", STEP_SECONDS_MAX
        )
        (schedule,) = post.schedules(self.shop.ROLLUP)
        output.good(
            f"another worker fires the schedule since the leader was killed: {schedule.missed_fires} instants missed, "
            f"none fired twice"
        )
        self.processes.stop(worker)

    def account(self, held: dict[str, int]) -> dict[str, Any]:
        """Print where every message went, and return the figures."""
        from waypost.cli.demo.runner import format_ledger

        output, post = self.output, self.post
        output.heading("Where every message went")
        ledgers = {queue: post.ledger(queue) for queue in (self.shop.ORDERS, self.shop.MAILS, self.shop.ROLLUP)}
        for queue, ledger in ledgers.items():
            output.line(format_ledger(f"{queue:8}", ledger))
        for message_id in sorted(held)[:1]:
            output.line(f"the history of order {held[message_id]}, which the killed worker held:")
            events = post.history(self.shop.ORDERS, message_id)
            for event in events:
                seconds = (event.at_ms - events[0].at_ms) / 1000
                more = f"token {event.token}" if event.token else ""
                output.line(f"    {seconds:5.2f} s  {event.event:<10} {more:9} {event.cause or ''}".rstrip())
        published = sum(ledger.published for ledger in ledgers.values())
        unaccounted = sum(abs(ledger.balance) for ledger in ledgers.values())
        unexplained = sum(abs(ledger.unexplained) for ledger in ledgers.values())
        write = output.bad if unaccounted or unexplained else output.good
        write(f"{unaccounted} unaccounted of {published:,}; {unexplained} redeliveries without a cause")
        return {
            "seconds": round(output.seconds, 1),
            "published": published,
            "unaccounted": unaccounted,
            "unexplained": unexplained,
            "retaken": len(held),
            "done": {queue: ledger.done for queue, ledger in ledgers.items()},
        }
