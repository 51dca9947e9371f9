"""The steps of `waypost demo`, on SQLite: a worker is killed, its messages are delivered again, none is lost."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from waypost.cli.demo.runner import DemoOutput, DemoProcesses, ShopDemo, wait_until
from waypost.cli.demo.shop import MAIL_SECONDS, MAILS, ORDERS, REPAIRED_VARIABLE, ROLLUP, STORE_VARIABLE, make_order
from waypost.client import Waypost
from waypost.values import Ledger

ORDER_COUNT = 240
UNREADABLE = 13
#: The worker is killed when this many orders are done.
KILL_AT = 80
#: Short, so that the leases of the killed worker end soon; the default is a minute.
LEASE_SECONDS = 3
TIMER_SECONDS = 8
STEP_SECONDS_MAX = 120.0


def run_demo(directory: Path, output: DemoOutput) -> dict[str, Any]:
    """Run all steps and return the result."""
    url = f"sqlite:///{directory / 'demo.db'}"
    with Waypost(url) as post, DemoProcesses() as processes:
        demo = SqliteDemo(post, processes, output, directory, {STORE_VARIABLE: url})
        demo.publish()
        held = demo.kill_a_worker()
        demo.deliver_again(held)
        demo.repair()
        return demo.show_account(held)


class SqliteDemo(ShopDemo):
    """The steps, in their order."""

    #: Fires of the schedule before the worker that fired it was killed.
    fired = 0

    def publish(self) -> None:
        """Publish orders: one of them twice, one for later."""
        output, post = self.output, self.post
        output.heading("A shop on SQLite: one file, no server")
        for queue in (ORDERS, MAILS, ROLLUP):
            post.configure(queue, lease=LEASE_SECONDS)
        orders = [
            make_order(number, card="unreadable" if number == UNREADABLE else "good")
            for number in range(1, ORDER_COUNT + 1)
        ]
        post.publish_many(ORDERS, orders, key=lambda order: f"order:{order.id}")
        output.line(f"{ORDER_COUNT} orders are published in one step")
        again = post.publish(ORDERS, orders[6], key="order:7")
        output.line(f"order 7 once more, same key: {again.status}")
        late = ORDER_COUNT + 1
        timer = post.publish(ORDERS, make_order(late), key=f"order:{late}", delay=TIMER_SECONDS)
        output.line(f"order {late} for {TIMER_SECONDS} seconds from now: {timer.status}")

    def start_numbered(self, number: int, **more: str) -> subprocess.Popen[bytes]:
        """Start a worker and print its process id."""
        worker = self.start_worker(f"worker-{number}", **more)
        self.output.line(f"worker {number} starts: process {worker.pid}")
        return worker

    def kill_a_worker(self) -> dict[str, int]:
        """Start a worker, kill it while it works, and return the numbers of the orders that it held, by message id."""
        self.output.heading("A worker is killed")
        worker = self.start_numbered(1)

        def is_working(ledger: Ledger) -> bool:
            return ledger.done >= KILL_AT and ledger.leased > 0

        self.follow(is_working, "work of the first worker", STEP_SECONDS_MAX)
        self.processes.kill(worker)
        self.fired = self.post.ledger(ROLLUP).published
        held = {message.id: message.body["id"] for message in self.post.messages(ORDERS, "leased")}
        numbers = sorted(held.values())
        named = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        done = self.post.ledger(ORDERS).done
        self.output.bad(f"kill -9: {done} orders are done; it held leases of {len(held)} more: {named}")
        self.output.line(f"it also fired the schedule, a rollup each second: {self.fired} so far")
        return held

    def deliver_again(self, held: dict[str, int]) -> None:
        """Start another worker, which gets the messages of the killed one when their leases end."""
        output = self.output
        worker = self.start_numbered(2)
        output.line(f"no worker gets these for {LEASE_SECONDS} s: until a lease ends, its worker may still be running")

        def is_delivered_again(ledger: Ledger) -> bool:
            return ledger.redelivered.get("expired", 0) >= len(held)

        self.follow(is_delivered_again, "the redelivery of its messages", STEP_SECONDS_MAX)
        output.good(f"the leases have ended, and worker 2 has all {len(held)}: delivery 2, with a new token")
        self.follow(lambda ledger: ledger.dead >= 1, "the dead letter of the unreadable card", STEP_SECONDS_MAX)
        self.show_dead_letters()
        code = self.processes.stop(worker)
        output.line(f"worker 2 stops: it finishes running messages and releases the others at once (exit code {code})")

    def repair(self) -> None:
        """Start a repaired handler, redrive the dead letter, and finish all work."""
        output, post = self.output, self.post
        output.heading("The handler is repaired")
        worker = self.start_numbered(3, **{REPAIRED_VARIABLE: "1"})
        redriven = post.redrive(ORDERS)
        output.line(f"redrive: {len(redriven.moved)} dead letter is ready again")
        total = ORDER_COUNT + 1
        self.follow(lambda ledger: ledger.done == total, "the end of all orders", STEP_SECONDS_MAX)
        output.good(f"all {total} orders are done, the timer among them")
        self.follow(lambda _: post.ledger(MAILS).done == total, "the end of all mails", STEP_SECONDS_MAX)
        output.good(f"{total} mails are sent, each {MAIL_SECONDS} s after its order")
        wait_until(lambda: post.ledger(ROLLUP).done > self.fired, "another fire of the schedule", STEP_SECONDS_MAX)
        (schedule,) = post.schedules(ROLLUP)
        output.good(
            f"another worker fires the schedule since the leader was killed: {schedule.missed_fires} instants missed, "
            f"none fired twice"
        )
        self.processes.stop(worker)

    def show_account(self, held: dict[str, int]) -> dict[str, Any]:
        """Print the history of one message and where every message went; return the figures."""
        output, post = self.output, self.post
        output.heading("Where every message went")
        message_id = min(held)
        output.line(f"the history of order {held[message_id]}, which the killed worker held:")
        events = post.history(ORDERS, message_id)
        for event in events:
            seconds = (event.at - events[0].at).total_seconds()
            token = f"token {event.token}" if event.token else ""
            output.line(f"    {seconds:5.2f} s  {event.event:<10} {token:9} {event.cause or ''}".rstrip())
        ledgers = {queue: post.ledger(queue) for queue in (ORDERS, MAILS, ROLLUP)}
        return {
            **self.account(ledgers),
            "seconds": round(output.seconds, 1),
            "retaken": len(held),
            "done": {queue: ledger.done for queue, ledger in ledgers.items()},
        }
