"""One process of a scenario in real time: a client and a worker of its own, and a file of what happens in it.

    python -m tests.simulator.real_process SCENARIO PROCESS URL NAMESPACE HISTORY

When it is connected it makes a file with the suffix .ready and waits for a line of input: when the scenario begins
or began, by the clock of the machine. Steps before now are left out. It ends when its input is closed. What happens is
written at once, so that a kill loses none of it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.simulator.history import Happening, Recorder, to_line
from tests.simulator.play import Player, Registry
from tests.simulator.scenario import CLIENT_VERBS, OPERATOR_VERBS, Scenario, Step, from_json
from waypost import AsyncWaypost
from waypost.outbox.relay.waypost import WaypostTarget

#: How long handlers may go on at the end.
STOP_SECONDS = 5.0


def main(path: str, name: str, url: str, namespace: str, history: str) -> None:
    logging.disable(logging.CRITICAL)
    scenario = from_json(Path(path).read_text())
    asyncio.run(run(scenario, name, url, namespace, Path(history)))


def wait_for_start(history: Path) -> float:
    """Say that this process is ready, and wait until it is told when the scenario begins."""
    history.with_suffix(".ready").touch()
    return float(sys.stdin.readline())


async def run(scenario: Scenario, name: str, url: str, namespace: str, history: Path) -> None:
    plan = scenario.process(name)
    async with AsyncWaypost(url, namespace=namespace, retry_budget=plan.retry_budget) as post:
        began = await asyncio.to_thread(wait_for_start, history)
        with ExitStack() as stack:
            file = stack.enter_context(open_history(history))

            def write(happening: Happening) -> None:
                file.write(to_line(happening))

            recorder = Recorder(lambda: time.time() - began, observe=write, first_call=os.getpid() * 1_000_000)
            for relay in plan.relays:
                post.relay(relay.source, to=WaypostTarget(url, relay.target, namespace=namespace))
            player = Player(name, plan, post, recorder, Registry())
            tasks = [asyncio.create_task(player.start())]
            for step in scenario.steps:
                if step.who == name and step.action in (CLIENT_VERBS | OPERATOR_VERBS) and step.at > recorder.now:
                    tasks.append(asyncio.create_task(perform_at(player, step, recorder)))
            await asyncio.to_thread(sys.stdin.read)
            await player.stop(STOP_SECONDS)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def open_history(path: Path) -> io.FileIO:
    """The file in which happenings are kept, without a buffer."""
    return path.open("ab", buffering=0)


async def perform_at(player: Player, step: Step, recorder: Recorder) -> None:
    """Do a step when its time has come."""
    await asyncio.sleep(max(0.0, step.at - recorder.now))
    await player.perform(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
