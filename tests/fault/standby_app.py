"""A program without schedules of its own, for worker processes whose schedulers fire those of others.

It prints `ready` after the first tick of its scheduler.
"""

from __future__ import annotations

import os

from waypost import Waypost
from waypost.operations.flow import Flow
from waypost.schedule.scheduler import Scheduler, Tick

post = Waypost(os.environ["APP_URL"], namespace=os.environ["APP_NAMESPACE"])


@post.handler("unused")
def handle(body: object) -> None: ...


def report_first_tick() -> None:
    tick = Scheduler.tick

    def tick_and_report(scheduler: Scheduler) -> Flow[Tick]:
        Scheduler.tick = tick  # type: ignore[method-assign]
        ticked = yield from tick(scheduler)
        print("ready", flush=True)
        return ticked

    Scheduler.tick = tick_and_report  # type: ignore[assignment,method-assign]


report_first_tick()
