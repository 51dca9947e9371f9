"""This release and the next one work on one database at the same time, through an upgrade and back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.upgrade.next_release import NEXT_RELEASE, ROOT, build
from tests.waiting import until
from waypost import Waypost
from waypost.errors import SchemaTooNew
from waypost.store.postgres import migrate, schema
from waypost.testing.bench import fresh_namespace

HERE = Path(__file__).parent
SECONDS = 120


@pytest.fixture(scope="module")
def next_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("next"))


class Fleet:
    """Processes of both releases on one store, and what they published and handled."""

    def __init__(self, url: str, namespace: str, folder: Path, next_source: Path) -> None:
        self.url, self.namespace, self.folder = url, namespace, folder
        self.sources = {"this": ROOT / "src", "next": next_source}
        self.processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def start(self, release: str, what: str) -> None:
        self.processes[release, what] = subprocess.Popen(
            [sys.executable, HERE / "traffic.py", what, self.url, self.namespace, self.file(release, what), release],
            env=self.environment(release),
        )

    def stop(self, release: str, what: str) -> None:
        process = self.processes.pop((release, what))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0

    def file(self, release: str, what: str) -> Path:
        return self.folder / f"{release}-{what}"

    def environment(self, release: str) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.sources[release])}

    def lines(self, release: str, what: str) -> list[str]:
        path = self.file(release, what)
        return path.read_text().split() if path.exists() else []

    def wait_for_more(self, release: str, what: str, count: int = 50) -> None:
        known = len(self.lines(release, what))

        def is_there() -> bool:
            assert all(process.poll() is None for process in self.processes.values()), "a process ended"
            return len(self.lines(release, what)) >= known + count

        until(is_there, f"{count} more by the {what}er of {release} release")

    def migrate(self, release: str, *options: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "waypost.cli.main", "migrate", "--url", self.url, "--namespace", self.namespace,
             *options],
            env=self.environment(release), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def check_all(self) -> None:
        """Every acknowledged message was handled, and once, since no process was killed."""
        published = [body for release in self.sources for body in self.lines(release, "publish")]

        def handled() -> list[str]:
            return [body for release in self.sources for body in self.lines(release, "work")]

        until(lambda: len(handled()) >= len(published), "the end of the queue")
        assert Counter(handled()) == Counter(published)


@pytest.fixture
def fleet(postgres_url: str, tmp_path: Path, next_source: Path) -> Iterator[Fleet]:
    namespace = fresh_namespace()
    migrate(postgres_url, namespace=namespace)
    fleet = Fleet(postgres_url, namespace, tmp_path, next_source)
    yield fleet
    for process in fleet.processes.values():
        process.kill()
        process.wait()


@pytest.fixture
def database(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def begin_upgrade(fleet: Fleet) -> None:
    """Bring the fleet to the middle of an upgrade: both releases publish and work."""
    for what in ("publish", "work"):
        fleet.start("this", what)
    fleet.wait_for_more("this", "work")
    code, printed = fleet.migrate("next")
    assert (code, f"from version {schema.VERSION} to {schema.VERSION + 1}" in printed) == (0, True), printed
    fleet.wait_for_more("this", "work")
    for what in ("publish", "work"):
        fleet.start("next", what)
    fleet.wait_for_more("next", "work")
    fleet.wait_for_more("this", "work")


@pytest.mark.promise("STORE-7")
def test_an_upgrade_goes_on_beside_the_release_before(fleet: Fleet, database: psycopg.Connection[Any]) -> None:
    begin_upgrade(fleet)
    code, printed = fleet.migrate("next", "--finish")
    assert code == 1, printed
    assert f"functions of version {schema.VERSION} were called" in printed
    assert "is registered" in printed
    for what in ("publish", "work"):
        fleet.stop("this", what)
    code, printed = fleet.migrate("next", "--finish")
    assert (code, "is registered" in printed) == (1, False), printed
    database.execute(f'UPDATE "{fleet.namespace}_used" SET at_ms = at_ms - 900000')
    code, printed = fleet.migrate("next", "--finish")
    assert (code, printed.startswith(f"removed the functions of version {schema.VERSION} ")) == (0, True), printed
    assert fleet.migrate("next", "--finish")[1].endswith("has nothing to remove\n")
    assert fleet.migrate("next", "--check")[0] == 0
    fleet.wait_for_more("next", "work")
    fleet.stop("next", "publish")
    fleet.check_all()
    with pytest.raises(SchemaTooNew, match="update waypost here"):
        Waypost(fleet.url, namespace=fleet.namespace).open()


@pytest.mark.promise("STORE-7")
def test_an_upgrade_is_reverted(fleet: Fleet) -> None:
    begin_upgrade(fleet)
    code, printed = fleet.migrate("next", "--undo")
    assert (code, f"of release {NEXT_RELEASE} is registered" in printed) == (1, True), printed
    for what in ("publish", "work"):
        fleet.stop("next", what)
    code, printed = fleet.migrate("next", "--undo")
    assert (code, printed.startswith(f"removed the functions of version {schema.VERSION + 1} ")) == (0, True), printed
    fleet.wait_for_more("this", "work")
    assert fleet.migrate("this", "--check")[0] == 0
    assert fleet.migrate("next")[0] == 0  # and once more
    fleet.wait_for_more("this", "work")
    fleet.stop("this", "publish")
    fleet.check_all()
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        assert (post.ledger("orders").balance, post.ledger("orders").unexplained) == (0, 0)


#: Runs `waypost migrate` and kills it at a point: before the step of a number, or right after it.
KILLED = """
import os, signal, sys
from waypost.cli.main import main
from waypost.store.postgres import migrating

point, run, done = int(sys.argv[1]), migrating._run_step, 0

def run_step(connection, step, *, patient):
    global done
    for is_after in (False, True):
        if done == point:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        if not is_after:
            run(connection, step, patient=patient)

migrating._run_step = run_step
sys.exit(main(["migrate", *sys.argv[2:]]))
"""


@pytest.mark.promise("STORE-7")
def test_a_migration_that_is_killed_goes_on_when_it_is_run_again(
    fleet: Fleet, database: psycopg.Connection[Any]
) -> None:
    with Waypost(fleet.url, namespace=fleet.namespace) as post:
        post.publish_many("orders", range(100))
        for point in range(10):
            killed = subprocess.run(
                [sys.executable, "-c", KILLED, str(point), "--url", fleet.url, "--namespace", fleet.namespace],
                env=fleet.environment("next"), timeout=SECONDS, check=False,
            )  # fmt: skip
            assert killed.returncode == -signal.SIGKILL, f"there is no point {point}"
            # The release before goes on, whatever is there of the next one.
            assert post.publish("orders", point).status == "queued"
            with post.receive("orders", wait=20) as message:
                assert message is not None
            if point == 5:
                # An index whose making was interrupted is left unfinished.
                database.execute(
                    "UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass",
                    (f'"{fleet.namespace}_message_planted"',),
                )
        assert fleet.migrate("next")[0] == 0
        assert fleet.migrate("next", "--check") == (0, f"as this release needs them, version {schema.VERSION + 1}\n")
        ledger = post.ledger("orders")
        assert (ledger.published, ledger.done, ledger.balance) == (110, 10, 0)
    left = database.execute(
        "SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "WHERE starts_with(c.relname, %s) AND NOT i.indisvalid", (fleet.namespace,),
    ).fetchone()  # fmt: skip
    assert left == (0,)
