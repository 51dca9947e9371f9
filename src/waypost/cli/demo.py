"""`waypost demo`: twenty seconds on SQLite in which a worker is killed and nothing is lost. It needs waypost alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waypost.cli.ending import FOUND, INTERRUPTED, USAGE, Trouble
from waypost.cli.options import add_command

if TYPE_CHECKING:
    from waypost.cli.telling import Company, Teller
    from waypost.client import Waypost
    from waypost.values import Ledger

ORDER_COUNT = 240
#: The worker is killed when this many are done: in the middle.
KILL_AT = 80
#: Short, so that nobody waits long for the end of a dead worker's leases; the usual is a minute.
LEASE_SECONDS = 3
TIMER_SECONDS = 8
#: Each step of the story takes a few seconds; on a machine with much else to do, more.
STEP_SECONDS_MAX = 120.0


def add(commands: Any) -> None:
    """The arguments of the command."""
    parser = add_command(
        commands, "demo", run, "twenty seconds in which a worker is killed and nothing is lost", store=False,
        json_text="the end as one JSON object; the story goes to stderr",
        more="A story on SQLite: orders, a duplicate, a timer, a worker that is killed, a dead letter, a schedule; "
        "then where every message went. No server and no other package is needed.",
        examples=("waypost demo", "waypost demo --directory shop && waypost stats --url sqlite:///shop/demo.db"),
    )  # fmt: skip
    parser.add_argument("--directory", metavar="DIR", help="keep the store here (a temporary one is removed)")


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    from waypost.cli.telling import Stuck, Teller

    tell = Teller(sys.stderr if options.json else sys.stdout)
    try:
        if options.directory is None:
            with tempfile.TemporaryDirectory(prefix="waypost-demo-") as temporary:
                told = tell_story(Path(temporary), tell)
        else:
            directory = Path(options.directory)
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / "demo.db").exists():
                raise Trouble(f"there is a demo.db in {directory} already; choose another directory", USAGE)
            told = tell_story(directory, tell)
            tell(f"kept: sqlite:///{directory / 'demo.db'}")
    except KeyboardInterrupt:
        tell.bad("interrupted; the workers have ended")
        return INTERRUPTED
    except (Stuck, OSError) as error:
        raise Trouble(str(error)) from error
    if options.json:
        sys.stdout.write(json.dumps(told) + "\n")
    return 0 if told["unaccounted"] == told["unexplained"] == 0 else FOUND


def tell_story(directory: Path, tell: Teller) -> dict[str, Any]:
    """All of it; what it came to."""
    from waypost.cli.telling import Company
    from waypost.client import Waypost

    with Waypost(f"sqlite:///{directory / 'demo.db'}") as post, Company() as company:
        story = Story(post, company, tell, directory)
        story.publish()
        held = story.kill_a_worker()
        story.retake(held)
        story.repair()
        return story.account(held)


class Story:
    """The story, chapter by chapter."""

    def __init__(self, post: Waypost, company: Company, tell: Teller, directory: Path) -> None:
        from waypost.cli import demo_shop

        self.post = post
        self.company = company
        self.tell = tell
        self.directory = directory
        #: Fires of the schedule before the worker that made them was killed.
        self.fired = 0
        self.shop = demo_shop

    def publish(self) -> None:
        """Orders, one of them twice, one for later."""
        tell, orders = self.tell, self.shop.ORDERS
        tell.chapter("A shop on SQLite: one file, no server")
        for queue in (orders, self.shop.MAILS, self.shop.ROLLUP):
            self.post.configure(queue, lease=LEASE_SECONDS)
        bodies = [{"id": number} for number in range(1, ORDER_COUNT + 1)]
        self.post.publish_many(orders, bodies, key=lambda body: f"order:{body['id']}")
        tell(f"{ORDER_COUNT} orders are published in one step")
        again = self.post.publish(orders, {"id": 7}, key="order:7")
        tell(f"order 7 once more, same key: {again.status}")
        late = ORDER_COUNT + 1
        timer = self.post.publish(orders, {"id": late}, key=f"order:{late}", delay=TIMER_SECONDS)
        tell(f"order {late} for {TIMER_SECONDS} seconds from now: {timer.status}")

    def start_worker(self, number: int, *, repaired: bool = False) -> subprocess.Popen[bytes]:
        """A process that runs the handlers, just as `waypost worker shop:post` does."""
        environment = {self.shop.URL_VARIABLE: f"sqlite:///{self.directory / 'demo.db'}"}
        if repaired:
            environment[self.shop.REPAIRED_VARIABLE] = "1"
        command = [sys.executable, "-m", "waypost.cli.main", "worker", f"{self.shop.__name__}:post", "--timeout", "5"]
        process = self.company.start(command, environment, self.directory / f"worker-{number}.log")
        self.tell(f"worker {number} starts: process {process.pid}")
        return process

    def follow(self, reached: Any, what: str) -> None:
        """Look at the ledger until something is so."""
        from waypost.cli.telling import wait_until

        def look() -> bool:
            ledger = self.post.ledger(self.shop.ORDERS)
            told = f"{ledger.done} of {ORDER_COUNT + 1} done, {ledger.leased} at work, {ledger.ready} ready"
            self.tell.move(ledger.done, ORDER_COUNT + 1, told)
            return bool(reached(ledger))

        wait_until(look, what, STEP_SECONDS_MAX)

    def kill_a_worker(self) -> dict[str, int]:
        """Start one, kill it at work; the messages that it held, by id."""
        self.tell.chapter("A worker is killed")
        worker = self.start_worker(1)

        def at_work(ledger: Ledger) -> bool:
            return ledger.done >= KILL_AT and ledger.leased > 0

        self.follow(at_work, "the first worker to be at work")
        self.company.kill(worker)
        self.fired = self.post.ledger(self.shop.ROLLUP).published
        held = {message.id: message.body["id"] for message in self.post.messages(self.shop.ORDERS, "leased")}
        ledger = self.post.ledger(self.shop.ORDERS)
        numbers = sorted(held.values())
        named = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        self.tell.bad(f"kill -9: {ledger.done} orders are done; it dies with {len(held)} in its hands, {named}")
        self.tell(f"it also fired the schedule, a rollup each second: {self.fired} so far")
        return held

    def retake(self, held: dict[str, int]) -> None:
        """Another one takes over what the dead one held, when its leases end."""
        tell, orders = self.tell, self.shop.ORDERS
        worker = self.start_worker(2)
        tell(f"nobody may touch these for {LEASE_SECONDS} s: a lease says that the dead one might still be at work")

        def retaken(ledger: Ledger) -> bool:
            return ledger.redelivered.get("expired", 0) >= len(held)

        self.follow(retaken, "the leases to be retaken")
        tell.good(f"the leases have ended, and worker 2 has all {len(held)}: delivery 2, with a new token")
        self.follow(lambda ledger: ledger.dead >= 1, "the unreadable card to be given up")
        for letter in self.post.dead_letters(orders):
            tell.bad(
                f"order {letter.body['id']} failed {letter.attempts} times and is a dead letter: "
                f"{letter.reason}, {letter.error}"
            )
        code = self.company.stop(worker)
        tell(f"worker 2 is asked to stop: it ends what it began, and gives the rest back at once (exit code {code})")

    def repair(self) -> None:
        """A new release of the handler, a redrive, and the rest of the work."""
        from waypost.cli.telling import wait_until

        tell, post = self.tell, self.post
        tell.chapter("The handler is repaired")
        worker = self.start_worker(3, repaired=True)
        redriven = post.redrive(self.shop.ORDERS)
        tell(f"redrive: {len(redriven.moved)} dead letter is ready again")
        self.follow(lambda ledger: ledger.done == ORDER_COUNT + 1, "all orders to be done")
        tell.good(f"all {ORDER_COUNT + 1} orders are done, the timer among them")
        self.follow(lambda _: post.ledger(self.shop.MAILS).done == ORDER_COUNT + 1, "all mails to be sent")
        tell.good(f"{ORDER_COUNT + 1} mails are sent, each a second after its order")
        wait_until(lambda: post.ledger(self.shop.ROLLUP).done > self.fired, "the schedule to go on", STEP_SECONDS_MAX)
        (schedule,) = post.schedules(self.shop.ROLLUP)
        tell.good(
            f"another worker fires the schedule since its leader was killed: {schedule.missed_fires} instants missed, "
            f"none fired twice"
        )
        self.company.stop(worker)

    def account(self, held: dict[str, int]) -> dict[str, Any]:
        """Where everything went."""
        tell, post = self.tell, self.post
        tell.chapter("Where everything went")
        ledgers = {queue: post.ledger(queue) for queue in (self.shop.ORDERS, self.shop.MAILS, self.shop.ROLLUP)}
        for queue, ledger in ledgers.items():
            parts = {"done": ledger.done, "dead": ledger.dead, "ready": ledger.ready + ledger.leased + ledger.delayed}
            went = " + ".join(f"{name} {count}" for name, count in parts.items() if count or name == "done")
            come = f"published {ledger.published}" + (f" + redriven {ledger.redriven}" if ledger.redriven else "")
            again = ", ".join(f"{cause} {count}" for cause, count in ledger.redelivered.items() if count)
            tell(f"{queue:8} {come} = {went}" + (f"; delivered again: {again}" if again else ""))
        for message_id in sorted(held)[:1]:
            tell(f"the history of order {held[message_id]}, which the dead worker held:")
            events = post.history(self.shop.ORDERS, message_id)
            for event in events:
                seconds = (event.at_ms - events[0].at_ms) / 1000
                more = f"token {event.token}" if event.token else ""
                tell(f"    {seconds:5.2f} s  {event.event:<10} {more:9} {event.cause or ''}".rstrip())
        published = sum(ledger.published for ledger in ledgers.values())
        unaccounted = sum(abs(ledger.balance) for ledger in ledgers.values())
        unexplained = sum(abs(ledger.unexplained) for ledger in ledgers.values())
        judge = tell.bad if unaccounted or unexplained else tell.good
        judge(f"{unaccounted} unaccounted of {published:,}; {unexplained} redeliveries without a cause")
        return {
            "seconds": round(tell.seconds, 1),
            "published": published,
            "unaccounted": unaccounted,
            "unexplained": unexplained,
            "retaken": len(held),
            "done": {queue: ledger.done for queue, ledger in ledgers.items()},
        }
