"""A process that is killed while it handles a message loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faststream.running import Place, run, running, settled
from tests.waiting import until
from waypost import Waypost
from waypost.faststream.annotations import WaypostMessage

pytestmark = pytest.mark.promise("FACE-4")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from waypost.faststream import WaypostBroker
broker = WaypostBroker(sys.argv[1], namespace=sys.argv[2], logger=None)

@broker.subscriber("orders", lease=1)
async def hang(body: int) -> None:
    await asyncio.sleep(3600)

async def main() -> None:
    await broker.start()
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_message_is_delivered_again_after_a_crash(place: Place) -> None:
    broker, seen = place.broker(), []

    @broker.subscriber("orders")
    async def charge(body: int, message: WaypostMessage) -> None:
        seen.append((body, message.raw_message.deliveries))

    command = [sys.executable, "-c", PROGRAM, place.url, place.namespace]
    with Waypost(place.url, namespace=place.namespace) as post:
        worker = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
        try:
            post.publish("orders", 7)
            until(lambda: post.ledger("orders").leased == 1, "the claim")
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait(60)

    async def test() -> None:
        async with running(broker):
            ledger = await settled(broker, "orders", done=1)
            assert ledger.expired >= 1

    run(test())
    assert [body for body, _ in seen] == [7]
    assert seen[0][1] >= 2
