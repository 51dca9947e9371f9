"""The story of `make demo`, in about two minutes, and by itself.

    make demo              KEEP=1 make demo    keeps the servers up at the end, until Ctrl-C

A small shop takes orders through an outbox in PostgreSQL while the heavy packages still install; then Spark imports
200,000 more from Parquet; a worker is killed in the middle; and at the end tables of the whole history say where
every message went.
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

from examples.demo.parts import ROOT, Parts, Setup, SparkProcess
from examples.demo.shop import ATTEMPTS, MAIL_SECONDS, MAILS, ORDERS, ROLLUP
from examples.demo.storefront import FIRST_NUMBER, MALFORMED, TABLES, Storefront
from waypost import Waypost
from waypost.cli.telling import Stuck, Teller, wait_until
from waypost.errors import WaypostError
from waypost.spark.lake.report import REPORT_NAME
from waypost.values import Ledger

IMPORTED = 200_000
#: Short, so that nobody waits long for the end of a dead worker's leases; the usual is a minute.
LEASE_SECONDS = 5
#: The shop takes at least so many orders before anything else happens.
SHOP_ORDERS_MIN = 200
#: What a step may take on a machine with much else to do; the set-up on one that has to fetch all packages.
STEP_SECONDS_MAX, SETUP_SECONDS_MAX = 300.0, 1800.0
INTERRUPTED, DEFECT = 130, 3


class Story:
    """The story, chapter by chapter."""

    def __init__(self, parts: Parts, tell: Teller, setup: Setup, imported: int) -> None:
        self.parts = parts
        self.tell = tell
        self.imported = imported
        self.post = Waypost(parts.valkey)
        self.outbox = Waypost(parts.postgres)
        self.storefront = Storefront(parts.postgres)
        self.setup = setup
        self.spark: SparkProcess | None = None

    def close(self) -> None:
        """Let go of the servers."""
        self.storefront.stop()
        self.post.close()
        self.outbox.close()

    def follow(self, reached: Callable[[Ledger], bool], what: str, seconds_max: float = STEP_SECONDS_MAX) -> None:
        """Look at the ledger until something is so, and show it."""

        def look() -> bool:
            if self.storefront.error is not None:
                raise self.storefront.error
            if self.spark is None and not self.setup.under_way:
                # It needs seconds to start; the story goes on meanwhile.
                self.spark = SparkProcess(self.parts)
            ledger = self.post.ledger(ORDERS)
            shop = f"shop {self.storefront.taken.committed:,}"
            told = f"{ledger.done:,} of {ledger.published:,} paid, {ledger.ready:,} ready · {shop} · {what}"
            self.tell.move(ledger.done, max(ledger.published, self.imported), told)
            return reached(ledger)

        wait_until(look, what, seconds_max)

    # ---- the shop ----------------------------------------------------------------------------------------------

    def open_shop(self) -> None:
        """Tables, queues, workers and the first customers."""
        import psycopg

        from waypost.store.postgres import migrate

        tell, parts = self.tell, self.parts
        migrate(parts.postgres)
        with psycopg.connect(parts.postgres) as connection:
            connection.execute(TABLES)
        # With bodies in the journal the whole history can be read again, by Spark, without consuming anything.
        self.post.configure(ORDERS, lease=LEASE_SECONDS, journal="full")
        for queue in (MAILS, ROLLUP):
            self.post.configure(queue, lease=LEASE_SECONDS)
        self.relay = parts.start_worker("relay", "examples.demo.shop:outbox")
        self.workers = [parts.start_worker("worker-1"), parts.start_worker("worker-2")]
        self.storefront.start()
        tell("the shop is open: each order is a row and a message, in one transaction of PostgreSQL")
        self.follow(lambda ledger: ledger.done > 0, "the first payment")
        tell("a relay carries its messages to Valkey, and two workers take the money")

    def see_failures(self) -> None:
        """What goes wrong in a shop."""
        tell = self.tell
        self.follow(lambda _: self.storefront.taken.committed >= SHOP_ORDERS_MIN, f"{SHOP_ORDERS_MIN} orders")
        self.follow(lambda ledger: ledger.dead >= 2, "two orders to be given up")
        taken = self.storefront.taken
        tell(f"{taken.rolled_back} customers changed their mind before the commit: no row, no message")
        tell(f"{taken.duplicates} clicked twice: the second message of each is a duplicate, and is not stored")
        for letter in self.post.dead_letters(ORDERS):
            why = letter.error.splitlines()[0].partition(" - at")[0] if letter.error else ""
            times = "1 delivery" if letter.deliveries == 1 else f"{letter.deliveries} deliveries"
            tell.bad(f"a dead letter after {times}: {letter.reason}, {why}")
        self.follow(lambda _: self.post.ledger(MAILS).done > 0, "the first mail")
        tell(f"mails go out {MAIL_SECONDS} s after each payment: {self.post.ledger(MAILS).done:,} so far")

    # ---- Spark -------------------------------------------------------------------------------------------------

    def wait_for(self, did: str, what: str, **request: Any) -> dict[str, Any]:
        """Ask Spark for something, if there is anything to say, and wait until it is done; what it says of it."""
        said: dict[str, Any] = {}
        spark = self.spark
        assert spark is not None
        if request:
            spark.ask(did, **request)

        def heard(_: Ledger) -> bool:
            while reply := spark.reply():
                said.update(reply)
                if "told" in reply:
                    self.tell(str(reply["told"]))
                if reply.get("did") == did:
                    return True
            return False

        self.follow(heard, what)
        return said

    def bring_spark(self) -> None:
        """The rest of the packages, then a session."""
        tell = self.tell
        if self.spark is None:
            tell("Spark and the other heavy packages are still being installed in the background")
            self.follow(lambda _: self.spark is not None, "the packages", SETUP_SECONDS_MAX)
            tell("the packages are there")
        tell(f"Spark {self.wait_for('session', 'Spark to start')['version']} is up, on this machine")

    def import_orders(self) -> None:
        """200,000 orders of a file, while a worker dies."""
        tell, spark = self.tell, self.spark
        assert spark is not None
        before = self.post.ledger(ORDERS).done
        spark.ask("import", url=self.parts.valkey, count=self.imported)
        self.follow(lambda ledger: ledger.done > before + self.imported // 3 and ledger.leased > 0, "Spark's import")
        victim = self.workers.pop(0)
        self.parts.company.kill(victim)
        ledger = self.post.ledger(ORDERS)
        tell.bad(f"kill -9 of worker 1 in the middle: {ledger.done:,} are paid, {ledger.leased:,} leases are out")
        self.workers.append(self.parts.start_worker("worker-3"))
        said = self.wait_for("import", "Spark's import")
        tell.good(
            f"Spark imported {self.imported:,} orders of {said['rows']:,} rows ({said['megabytes']} MB of Parquet): "
            f"{said['rows'] - self.imported:,} were in it twice"
        )

    def finish(self) -> None:
        """Close the shop, and wait until everything has come to its end."""
        tell = self.tell
        taken = self.storefront.close()
        tell(f"the shop closes: {taken.committed:,} orders, {taken.amount / 100:,.2f} taken")
        wait_until(lambda: _at_rest(self.outbox.ledger(ORDERS)), "the relay to carry everything", STEP_SECONDS_MAX)
        self.follow(_at_rest, "all payments")
        ledger = self.post.ledger(ORDERS)
        retaken = ledger.redelivered.get("expired", 0)
        tell.good(f"all {ledger.done:,} are paid; {retaken:,} leases of the dead worker ended and were retaken")
        tell(f"{ledger.retried:,} payments failed and were tried again, at most {ATTEMPTS} times each")
        self.follow(lambda _: _at_rest(self.post.ledger(MAILS)), "the last mails")
        (rollup,) = self.post.schedules(ROLLUP)
        tell(f"{self.post.ledger(MAILS).done:,} mails are sent; the rollup was fired {rollup.fires} times, never twice")
        for worker in (*self.workers, self.relay):
            worker.terminate()
        for worker in (*self.workers, self.relay):
            self.parts.company.stop(worker)

    def build_lake(self) -> bool:
        """Tables of the whole history, read without consuming anything; whether the audit is clean."""
        tell, url = self.tell, self.parts.valkey
        said = self.wait_for("ingest", "pipeline ingest", url=url)
        minutes = said["minutes"]
        cents = sum(sums[1] for sums in minutes.values())
        tell.good(f"pipeline ingest: revenue of {len(minutes)} minutes, {cents / 100:,.2f} in all; the last of them:")
        for minute, (orders, sums) in list(minutes.items())[-3:]:
            tell(f"    {minute}   {orders:7,} orders   {sums / 100:14,.2f}")
        if said["aside"]:
            tell(f"    {said['aside']} message is no order by its schema, and was put aside with its body")
        equal = said["shop_cents"] == self.shop_cents()
        compare = tell.good if equal else tell.bad
        compare(f"the shop's share of it is {'what' if equal else 'not what'} its table in PostgreSQL adds up to")
        said = self.wait_for("audit", "pipeline run and audit", url=url)
        judge = tell.good if said["clean"] else tell.bad
        judge(
            f"pipeline audit: {said['events']:,} events, {said['unaccounted']:,} unaccounted of {said['published']:,}"
        )
        page = self.wait_for("report", "pipeline report", name=REPORT_NAME)["path"]
        tell.good(f"pipeline report: file://{page}")
        return equal and bool(said["clean"])

    def shop_cents(self) -> int:
        """What the shop's own table says, without the order whose message is none."""
        import psycopg

        with psycopg.connect(self.parts.postgres) as connection:
            query = "SELECT coalesce(sum(amount), 0)::bigint FROM orders WHERE id <> %s"
            row = connection.execute(query, (FIRST_NUMBER + MALFORMED,)).fetchone()
        return int(row[0]) if row else 0

    def account(self) -> bool:
        """The ledgers of both stores; whether they balance."""
        ledgers = {f"PostgreSQL {ORDERS}": self.outbox.ledger(ORDERS)}
        ledgers |= {f"Valkey {queue}": self.post.ledger(queue) for queue in (ORDERS, MAILS, ROLLUP)}
        for name, ledger in ledgers.items():
            went = f"done {ledger.done:,}" + (f" + dead {ledger.dead:,}" if ledger.dead else "")
            rest = ledger.ready + ledger.leased + ledger.delayed
            went += f" + waiting {rest:,}" if rest else ""
            causes = ", ".join(f"{cause} {count:,}" for cause, count in ledger.redelivered.items() if count)
            self.tell(f"{name:18} published {ledger.published:,} = {went}" + (f"; again: {causes}" if causes else ""))
        return all(ledger.balance == ledger.unexplained == 0 for ledger in ledgers.values())


def _at_rest(ledger: Ledger) -> bool:
    return ledger.ready + ledger.leased + ledger.delayed + ledger.waiting == 0


def tell_story(home: Path, tell: Teller, options: argparse.Namespace) -> int:
    """All of it; the exit code."""
    with Parts(home) as parts:
        setup = Setup(parts)
        tell.chapter("A shop on real servers")
        parts.start_servers()
        tell("a Valkey and a PostgreSQL are up, from wheels, on sockets that only you can open")
        story = Story(parts, tell, setup, options.orders)
        try:
            story.open_shop()
            story.see_failures()
            tell.chapter("Spark")
            story.bring_spark()
            story.import_orders()
            story.finish()
            tell.chapter("Where everything went")
            balanced = story.account()
            clean = story.build_lake()
            parts.end_at_once()
            tidy(home)
            tell(f"this took {tell.seconds:.0f} s")
            if options.keep:
                keep(parts, tell)
        finally:
            story.close()
    return 0 if balanced and clean else DEFECT


def tidy(home: Path) -> None:
    """Leave the lake with its page, and nothing else."""
    for path in home.iterdir():
        if path.name != "lake":
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def keep(parts: Parts, tell: Teller) -> None:
    """Until somebody says that it is enough."""
    tell.chapter("The servers stay up; Ctrl-C ends them")
    tell(f"waypost workers {parts.valkey}")
    tell(f"waypost workers {parts.postgres}")
    try:
        signal.pause()
    except KeyboardInterrupt:
        tell("enough")


def main() -> int:
    """Tell it; the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description="Everything, on real servers.")
    parser.add_argument("--orders", type=int, default=IMPORTED, help="orders that Spark imports (200000)")
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo", help="where its tables are left (.demo)")
    parser.add_argument("--keep", action="store_true", default=os.environ.get("KEEP", "0") not in ("", "0"))
    options = parser.parse_args()
    tell = Teller()
    options.directory.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=options.directory))
    # Whoever ends it in another way than Ctrl-C wants the same.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return tell_story(home, tell, options)
    except KeyboardInterrupt:
        tell.bad("interrupted; everything that was started has ended")
        shutil.rmtree(home, ignore_errors=True)
        return INTERRUPTED
    except (Stuck, WaypostError, OSError) as error:
        sys.stderr.write(f"demo: {error}\nIts logs are in {home}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
