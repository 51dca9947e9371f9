"""`make demo`: a shop on real servers, in about two minutes.

    make demo              KEEP=1 make demo    keeps the servers up at the end, until Ctrl-C

A shop takes orders through an outbox in PostgreSQL while the set-up still installs Spark; then Spark imports 200,000
more from Parquet; a worker is killed in the middle; and at the end tables of the whole history show where every
message went.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.processes import ROOT, Environment, Setup, SparkProcess
from examples.demo.storefront import FIRST_NUMBER, MALFORMED, TABLE, Storefront
from waypost import Waypost
from waypost.cli.demo.runner import DemoOutput, DemoTimeout, ShopDemo, wait_until
from waypost.cli.demo.shop import ATTEMPTS, MAIL_SECONDS, MAILS, ORDERS, ROLLUP
from waypost.errors import WaypostError
from waypost.spark.lake.report import REPORT_NAME
from waypost.values import Ledger

IMPORTED = 200_000
#: Short, so that the leases of the killed worker end soon; the default is a minute.
LEASE_SECONDS = 5
#: How many orders the shop takes before anything else happens.
SHOP_ORDERS_MIN = 200
#: How long a step may take on a busy machine, and the set-up with all packages to download.
STEP_SECONDS_MAX, SETUP_SECONDS_MAX = 300.0, 1800.0
INTERRUPTED, DEFECT = 130, 3


class Demo(ShopDemo):
    """The steps of the demo."""

    def __init__(self, environment: Environment, output: DemoOutput, setup: Setup, imported: int) -> None:
        super().__init__(
            Waypost(environment.valkey), environment.processes, output, environment.directory, environment.variables
        )
        self.environment = environment
        self.imported = imported
        self.outbox = Waypost(environment.postgres)
        self.storefront = Storefront(environment.postgres)
        self.setup = setup
        self.spark: SparkProcess | None = None

    def close(self) -> None:
        """Close the shop and the clients."""
        self.storefront.stop()
        self.post.close()
        self.outbox.close()

    def follow(self, condition: Callable[[Ledger], bool], what: str, seconds_max: float = STEP_SECONDS_MAX) -> None:
        """Show the progress of the orders until a condition is fulfilled; meanwhile start Spark once it is there."""

        def poll(ledger: Ledger) -> bool:
            if self.storefront.error is not None:
                raise self.storefront.error
            if self.spark is None and not self.setup.is_running:
                # It needs seconds to start, while the demo goes on.
                self.spark = SparkProcess(self.environment)
            return condition(ledger)

        super().follow(poll, what, seconds_max)

    # ---- the shop ----------------------------------------------------------------------------------------------

    def open_shop(self) -> None:
        """Create tables and queues, start workers and the shop."""
        import psycopg

        from waypost.store.postgres import migrate

        output, environment = self.output, self.environment
        migrate(environment.postgres)
        with psycopg.connect(environment.postgres) as connection:
            connection.execute(TABLE)
        # With bodies in the journal the whole history can be read again, by Spark, without consuming anything.
        self.post.configure(ORDERS, lease=LEASE_SECONDS, journal="full")
        for queue in (MAILS, ROLLUP):
            self.post.configure(queue, lease=LEASE_SECONDS)
        self.relay = self.start_worker("relay", "examples.demo.storefront:outbox")
        self.workers = [self.start_worker("worker-1"), self.start_worker("worker-2")]
        self.storefront.start()
        output.line("the shop is open: each order is a row and a message, in one transaction of PostgreSQL")
        self.follow(lambda ledger: ledger.done > 0, "the first payment")
        output.line("a relay forwards its messages to Valkey, and two workers charge the cards")

    def show_failures(self) -> None:
        """Show rollbacks, duplicates and dead letters."""
        output = self.output
        self.follow(lambda _: self.storefront.counts.committed >= SHOP_ORDERS_MIN, f"{SHOP_ORDERS_MIN} orders")
        self.follow(lambda ledger: ledger.dead >= 2, "two dead letters")
        counts = self.storefront.counts
        output.line(f"{counts.rolled_back} customers cancelled before the commit: no row, no message")
        output.line(f"{counts.duplicates} clicked twice: the second message of each is a duplicate, and is not stored")
        self.show_dead_letters()
        self.follow(lambda _: self.post.ledger(MAILS).done > 0, "the first mail")
        output.line(f"mails go out {MAIL_SECONDS} s after each payment: {self.post.ledger(MAILS).done:,} so far")

    # ---- Spark -------------------------------------------------------------------------------------------------

    def request(self, do: str, what: str, **arguments: Any) -> dict[str, Any]:
        """Send Spark a request, wait until it is done, and return the reply."""
        assert self.spark is not None
        self.spark.send(do, **arguments)
        return self.wait_for_reply(do, what)

    def wait_for_reply(self, did: str, what: str) -> dict[str, Any]:
        """Wait until Spark has done something, and return its reply."""
        result: dict[str, Any] = {}
        spark = self.spark
        assert spark is not None

        def has_reply(_: Ledger) -> bool:
            while reply := spark.reply():
                result.update(reply)
                if "progress" in reply:
                    self.output.line(str(reply["progress"]))
                if reply.get("did") == did:
                    return True
            return False

        self.follow(has_reply, what)
        return result

    def start_spark(self) -> None:
        """Wait for the packages, then for a session."""
        output = self.output
        if self.spark is None:
            output.line("Spark and the other heavy packages are still being installed in the background")
            self.follow(lambda _: self.spark is not None, "the packages", SETUP_SECONDS_MAX)
            output.line("the packages are installed")
        output.line(f"Spark {self.wait_for_reply('session', 'the start of Spark')['version']} is up, on this machine")

    def import_orders(self) -> None:
        """Import 200,000 orders from a file, and kill a worker meanwhile."""
        output, spark = self.output, self.spark
        assert spark is not None
        before = self.post.ledger(ORDERS).done
        spark.send("import", count=self.imported)
        self.follow(lambda ledger: ledger.done > before + self.imported // 3 and ledger.leased > 0, "Spark's import")
        victim = self.workers.pop(0)
        self.processes.kill(victim)
        ledger = self.post.ledger(ORDERS)
        output.bad(f"kill -9 of worker 1 in the middle: {ledger.done:,} are paid, {ledger.leased:,} are running")
        self.workers.append(self.start_worker("worker-3"))
        result = self.wait_for_reply("import", "Spark's import")
        output.good(
            f"Spark imported {self.imported:,} orders of {result['rows']:,} rows "
            f"({result['megabytes']} MB of Parquet): {result['rows'] - self.imported:,} were in it twice"
        )

    def finish(self) -> None:
        """Close the shop, and wait until all messages are settled."""
        output = self.output
        counts = self.storefront.close()
        output.line(f"the shop closes: {counts.committed:,} orders, {counts.amount / 100:,.2f} of revenue")
        wait_until(lambda: _is_settled(self.outbox.ledger(ORDERS)), "the end of the relay's work", STEP_SECONDS_MAX)
        self.follow(_is_settled, "all payments")
        ledger = self.post.ledger(ORDERS)
        retaken = ledger.redelivered.get("expired", 0)
        output.good(
            f"all {ledger.done:,} are paid; {retaken:,} leases of the killed worker ended, "
            "and their messages were delivered again"
        )
        output.line(f"{ledger.retried:,} payments failed and were tried again, at most {ATTEMPTS} times each")
        self.follow(lambda _: _is_settled(self.post.ledger(MAILS)), "the last mails")
        (rollup,) = self.post.schedules(ROLLUP)
        output.line(
            f"{self.post.ledger(MAILS).done:,} mails are sent; the rollup was fired {rollup.fires} times, never twice"
        )
        for worker in (*self.workers, self.relay):
            worker.terminate()
        for worker in (*self.workers, self.relay):
            self.processes.stop(worker)

    def build_lake(self) -> bool:
        """Build tables of the whole history, which consumes nothing; return whether the audit is clean."""
        output = self.output
        result = self.request("ingest", "pipeline ingest")
        minutes = result["minutes"]
        cents = sum(sums[1] for sums in minutes.values())
        output.good(f"pipeline ingest: revenue of {len(minutes)} minutes, {cents / 100:,.2f} in all; the last of them:")
        for minute, (orders, sums) in list(minutes.items())[-3:]:
            output.line(f"    {minute}   {orders:7,} orders   {sums / 100:14,.2f}")
        if result["aside"]:
            output.line(f"    {result['aside']} message does not fit the schema, and was put aside with its body")
        equal = result["shop_cents"] == self.shop_cents()
        write = output.good if equal else output.bad
        write(f"the shop's share of it is {'equal' if equal else 'not equal'} to the sum of its table in PostgreSQL")
        result = self.request("audit", "pipeline run and audit")
        write = output.good if result["clean"] else output.bad
        write(
            f"pipeline audit: {result['events']:,} events, "
            f"{result['unaccounted']:,} unaccounted of {result['published']:,}"
        )
        page = self.request("report", "pipeline report", name=REPORT_NAME)["path"]
        output.good(f"pipeline report: file://{page}")
        return equal and bool(result["clean"])

    def shop_cents(self) -> int:
        """Return the revenue in the shop's own table, without the order in an old format."""
        import psycopg

        with psycopg.connect(self.environment.postgres) as connection:
            query = "SELECT coalesce(sum(amount), 0)::bigint FROM orders WHERE id <> %s"
            row = connection.execute(query, (FIRST_NUMBER + MALFORMED,)).fetchone()
        return int(row[0]) if row else 0

    def is_balanced(self) -> bool:
        """Print the ledgers of both stores; return whether every message is accounted for."""
        ledgers = {f"PostgreSQL {ORDERS}": self.outbox.ledger(ORDERS)}
        ledgers |= {f"Valkey {queue}": self.post.ledger(queue) for queue in (ORDERS, MAILS, ROLLUP)}
        result = self.account(ledgers)
        return result["unaccounted"] == result["unexplained"] == 0


def _is_settled(ledger: Ledger) -> bool:
    return ledger.ready + ledger.leased + ledger.delayed + ledger.waiting == 0


def run_demo(directory: Path, output: DemoOutput, options: argparse.Namespace) -> int:
    """Run all steps and return the exit code."""
    with Environment(directory) as environment:
        setup = Setup(environment)
        output.heading("A shop on real servers")
        environment.start_servers()
        output.line("a Valkey and a PostgreSQL are up, from wheels, with a random password that is printed nowhere")
        demo = Demo(environment, output, setup, options.orders)
        try:
            demo.open_shop()
            demo.show_failures()
            output.heading("Spark")
            demo.start_spark()
            demo.import_orders()
            demo.finish()
            output.heading("Where every message went")
            balanced = demo.is_balanced()
            clean = demo.build_lake()
            environment.kill_all()
            output.line(f"this took {output.seconds:.0f} s")
            if options.keep:
                keep_servers(environment, output)
            remove_leftovers(directory)
        finally:
            demo.close()
    return 0 if balanced and clean else DEFECT


def remove_leftovers(directory: Path) -> None:
    """Remove everything but the lake with its page."""
    for path in directory.iterdir():
        if path.name != "lake":
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def keep_servers(environment: Environment, output: DemoOutput) -> None:
    """Keep the servers up until Ctrl-C. Their URLs are in files, because they have a password."""
    from waypost.testing.servers import write_private

    output.heading("The servers stay up; Ctrl-C ends them")
    for name, url in (("valkey", environment.valkey), ("postgres", environment.postgres)):
        path = write_private(environment.directory / f"{name}.url", url)
        output.line(f'WAYPOST_URL="$(cat {path})" waypost stats {ORDERS}')
    try:
        signal.pause()
    except KeyboardInterrupt:
        output.line("ended")


def main() -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description="Everything, on real servers.")
    parser.add_argument("--orders", type=int, default=IMPORTED, help="orders that Spark imports (200000)")
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo", help="where its tables are left (.demo)")
    parser.add_argument("--keep", action="store_true", default=os.environ.get("KEEP", "0") not in ("", "0"))
    options = parser.parse_args()
    output = DemoOutput()
    options.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=options.directory))
    # Other signals do the same as Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return run_demo(directory, output, options)
    except KeyboardInterrupt:
        output.bad("interrupted; everything that was started has ended")
        shutil.rmtree(directory, ignore_errors=True)
        return INTERRUPTED
    except (DemoTimeout, WaypostError, OSError) as error:
        sys.stderr.write(f"demo: {error}\nIts logs are in {directory}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
