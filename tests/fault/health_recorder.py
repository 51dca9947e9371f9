"""A worker process that records its changes of health: `python -m tests.fault.health_recorder FILE WINDOW QUEUE`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.fault.worker_app import post


def main() -> None:
    path, window, queue = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    worker = post.worker([queue], health_window=window)

    def watch() -> None:
        last = ""
        while not ended.wait(0.01):
            status = worker.health().status
            if status != last and worker.is_running:
                with path.open("a") as file:
                    file.write(status + "\n")
                last = status

    ended = threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    worker.run(timeout=5)
    ended.set()


if __name__ == "__main__":
    main()
