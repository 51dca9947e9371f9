"""Figures of relays: all messages of a queue arrive in another system, although it is unreachable for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator

from scripts import system_parts
from tests.fault.figure import Figure
from tests.relay.target_systems import SYSTEMS, RabbitKilled, TargetSystem
from tests.waiting import until
from waypost import Waypost

MESSAGES, MESSAGES_QUICK = 10_000, 1_000
BATCH = 200
#: How long a target with durable data is unreachable.
AWAY_SECONDS = {"kafka": 5.0}


def relay_figures(*, quick: bool) -> Iterator[Figure]:
    """One line for each system. In the quick size without RabbitMQ, whose starts take longer than all else."""
    for name, make in {**SYSTEMS, "rabbitmq, killed": RabbitKilled}.items():
        if name.startswith("rabbitmq") and (quick or not system_parts.is_there("rabbitmq-server")):
            continue
        with make() as system:
            count, away = (MESSAGES_QUICK, 0.0) if quick else (MESSAGES, AWAY_SECONDS.get(name, 0.0))
            yield measure_relay(name, system, count, away)


def measure_relay(name: str, system: TargetSystem, count: int, away_seconds: float = 0.0) -> Figure:
    """Relay half of the messages, take the target down, relay the other half, and bring it back."""
    url = system.url("figures")
    with Waypost("memory://") as post:
        post.configure("orders", max_deliveries=2)
        ids = [one.id for one in post.publish_many("orders", [{"n": n} for n in range(count // 2)])]
        relay = post.relay("orders", to=url, batch=BATCH)
        began = time.monotonic()
        with post.worker():
            until(lambda: post.ledger("orders").done > 0, "a first batch")
            system.take_down()
            ids += [one.id for one in post.publish_many("orders", [{"n": n} for n in range(count // 2)])]
            until(lambda: relay.failure is not None or post.ledger("orders").leased > 0, "a batch held")
            away = time.monotonic()
            until(lambda: time.monotonic() - away >= away_seconds, "the end of its absence")
            system.bring_back()
            back = time.monotonic() - away
            until(lambda: post.ledger("orders").done + post.ledger("orders").dead == count, "the end")
        seconds, ledger = time.monotonic() - began, post.ledger("orders")
    arrived = [arrival.id for arrival in system.arrivals("figures")]
    lost, doubled = len(set(ids) - set(arrived)), len(arrived) - len(set(arrived))
    # Another store, and NATS within its window, know what they have already; in the lake a batch rewrites its file.
    once = name in ("store", "nats", "lake")
    return Figure(
        f"relay to {name}, {count:,} messages, target gone and back",
        f"{lost} lost, {ledger.dead} dead, {doubled} twice, {seconds:.1f} s of which {back:.1f} s until it was back",
        "0 lost, 0 dead, 0 twice" if once else f"0 lost, 0 dead, at most {BATCH} twice",
        lost == 0 and ledger.dead == 0 and doubled <= (0 if once else BATCH),
    )
