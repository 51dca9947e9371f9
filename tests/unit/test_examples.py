"""The examples run by themselves, without a server, and print what their reader expects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXPECTED = {
    "first_message": ["charging order 7", "1 done"],
    "shop": ["order 7 is queued"],
    "retries_and_dead_letters": [
        "order 1, attempt 1",
        "  failed: the payment service is away",
        "order 2, attempt 1",
        "order 1, attempt 2",
        "order 1, attempt 3",
        "dead: order 2, negative amount, no error",
        "dead: order 1, retries_exhausted, the payment service is away",
        "1 sent again",
        "  charged",
        "1 done, 1 dead, balance 0",
    ],
    "timers_and_keys": [
        "delayed duplicate True",
        "extended",
        "replaced",
        "['write Ann', 'retire']",
        "now: write Ann",
        "cancelled",
        "price: 8 dropped: 1",
        "['queued', 'queued', 'duplicate', 'duplicate']",
    ],
    "backpressure": [
        "refused: queue strict holds 3 messages that wait and its max_pending is 3",
        "kept: [20.2, 20.3, 20.4]",
        *(f"handled {number}" for number in range(6)),
        "5 of 8 mails at once, the rest at 5 a minute",
    ],
    "groups": [
        "by age: 500 noisy messages before the quiet customer is served",
        "in turns: 5 noisy messages before the quiet customer is served",
        "ann: deposit, to be tried again",
        "bob: close",
        "ann: deposit\nann: close",
        "running at once: 4 gold, 2 silver",
    ],
    "async_client": [
        "9 orders handled by 3 consumers",
        "result of the first: {'charged': 10}",
        "invoices: [20, 40, 60, 80, 100, 120, 140, 160, 180]",
        "9 done, 9 sent on, balance 0",
    ],
    "worker": [
        "mail: order 1 is charged",
        "mail: order 2 is charged",
        "dead: order 3, negative amount",
        "2 done, 1 retried, 1 dead, balance 0",
    ],
    "faststream_app": [
        "mail: order 1 is paid, 10",
        "mail: order 2 is paid, 20",
        "timers: ['order:4']",
        "order 4: cancelled",
        "dead: order 3, negative amount",
        "sum: 6",
    ],
    "fastapi_orders": [
        "ready: True",
        "refused: 422",
        "timers: ['order:1', 'order:2']",
        "payment: cancelled",
        "report: 1 paid",
        "order 1: paid",
        "order 2: open",
        "timers: ['order:2']",
    ],
    "schedules": [
        "True each instant once",
        "heartbeat · every 0.2 s · 2 next fires known",
        "rollup · 0 9 * * mon-fri · 2 next fires known",
    ],
    "history": [
        "the history of order 7:",
        "published  token 0, deliveries 0",
        "claimed    token 1, deliveries 1",
        "retried    token 1, deliveries 1",
        "claimed    token 2, deliveries 2",
        "done       token 2, deliveries 2",
        "the journal: published claimed retried claimed done published published published claimed dropped cancelled",
        "the ledger: 4 published = 1 ready + 1 done + 1 dropped + 1 cancelled, balance 0",
        "redelivered: 1 after a retry, 0 unexplained",
    ],
}


@pytest.mark.promise("FACE-5")
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_its_reader_expects(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    rest = done.stdout
    for line in EXPECTED[name]:
        assert line in rest, f"{line!r} is missing, or too early, in:\n{done.stdout}"
        rest = rest[rest.index(line) + len(line) :]


def test_every_example_is_expected_here() -> None:
    # The demo starts servers of its own, and has tests of its own; the one with Spark is tested with its session.
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__", "spark_job"}
    assert examples == set(EXPECTED)
