"""Schedules: a function that runs by itself, a rule saved by hand, and when it fires next."""

from __future__ import annotations

import time

from waypost import CatchUp, Message, Waypost

post = Waypost("memory://")
instants: list[str] = []


@post.every(0.2)
def heartbeat(message: Message[None]) -> None:
    instants.append(message.headers["waypost-instant"])


def main() -> None:
    post.save_schedule("rollup", queue="reports", cron="0 9 * * mon-fri", tz="Europe/Madrid", missed=CatchUp(5))
    with post.worker():
        while len(instants) < 3:
            time.sleep(0.01)
    print(len(set(instants)) == len(instants), "each instant once")
    for schedule in post.schedules(count=2):
        rule = schedule.cron if schedule.every is None else f"every {schedule.every.total_seconds():g} s"
        print(schedule.name, "·", rule, "·", len(schedule.next_fires), "next fires known")


if __name__ == "__main__":
    main()
