"""Traffic for upgrades: a process of one release publishes or handles messages until it gets SIGTERM.

    python traffic.py publish URL NAMESPACE FILE NAME     one line for each acknowledged publish: its body
    python traffic.py work URL NAMESPACE FILE NAME        one line for each handled message: its body

It uses only names that every release has, because releases side by side run it.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TextIO

from waypost import Waypost

QUEUE = "orders"


def publish(post: Waypost, log: TextIO, name: str, stopped: threading.Event) -> None:
    number = 0
    while not stopped.is_set():
        body = f"{name}:{number}"
        post.publish(QUEUE, body, key=body, delay=0.05 if number % 10 == 0 else None)
        log.write(f"{body}\n")
        number += 1


def work(post: Waypost, log: TextIO) -> None:
    @post.handler(QUEUE, concurrency=4)
    def handle(body: str) -> None:
        log.write(f"{body}\n")

    post.worker([QUEUE]).run()


def main() -> None:
    what, url, namespace, path, name = sys.argv[1:]
    stopped = threading.Event()
    with open(path, "a", buffering=1) as log, Waypost(url, namespace=namespace) as post:
        if what == "work":
            work(post, log)
        else:
            signal.signal(signal.SIGTERM, lambda *_: stopped.set())
            publish(post, log, name, stopped)


if __name__ == "__main__":
    main()
