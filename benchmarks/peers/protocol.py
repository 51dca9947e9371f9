"""What a peer's program understands. It runs inside the peer's environment: only the standard library here.

    publish --url U --count N                            fill the queue, as fast as the peer can
    work    --url U --slots FILE [--clock wall]          handle messages until the process is ended
    send    --url U --slots FILE --rate R                publish one by one, at a rate
    timers  --url U --slots FILE --span S --lead L       publish timers, due evenly over a span that follows the lead
    together --url U --count N --kind tasks|threads --server PID
                                                         publish one by one from many tasks or threads at the same time

A slot file holds eight bytes per message: nanoseconds, zero while nothing has happened. `work` writes when a handler
began, `send` when the call to publish did, `timers` when the message is due. It is mapped into memory, so a handler
pays 0.3 µs, and threads and forked processes count as well. Results are JSON lines on the standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NANOSECONDS = 1_000_000_000
#: Calls to publish a timer under way at once, where a peer has no bulk call for it.
TIMERS_AT_ONCE = 50
#: Tasks of an event loop that publish one message each, all at once, and threads that publish one after the other.
TASKS, THREADS = 100, 16
#: Timers whose first was due before the last was published: the lead was too short, and the figure would be wrong.
LEAD_TOO_SHORT = 3

Body = dict[str, Any]
Started = Callable[[int], None]


def body(number: int) -> Body:
    """A message of about 100 bytes as JSON."""
    return {"number": number, "customer": "c-0042", "lines": [{"sku": "A-1", "count": 2}], "total": 1999}


def open_slots(path: str) -> memoryview:
    """Map the slots of a file, shared with all processes that have it open."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def recorder(path: str, clock: str) -> Started:
    """Return a function that records the start of the handler of a message; the first time counts."""
    slots = open_slots(path)
    now = time.monotonic_ns if clock == "monotonic" else time.time_ns

    def started(number: int) -> None:
        if not slots[number]:
            slots[number] = now()

    return started


def print_json(**fields: object) -> None:
    """Print a line of JSON for the parent process."""
    print(json.dumps(fields), flush=True)


class Program:
    """The methods that a peer implements. They may block: nothing else runs in the process."""

    #: Loops of libuv are faster; peers that were measured best with one set this.
    uses_uvloop = False

    def __init__(self, url: str) -> None:
        self.url = url
        #: Another way to do the same; only waypost has some.
        self.variant = ""

    async def open(self) -> None:
        """Connect a producer."""

    async def close(self) -> None:
        """Disconnect it."""

    async def send(self, message: Body) -> None:
        """Publish one message."""
        raise NotImplementedError

    def send_blocking(self, message: Body) -> None:
        """Publish one message from a thread. Only peers with a blocking client have this."""
        raise NotImplementedError

    async def publish(self, messages: Sequence[Body]) -> None:
        """Publish all of them, in bulk where there is a call for it."""
        for message in messages:
            await self.send(message)

    async def send_timer(self, message: Body, due: float) -> None:
        """Publish a message that is due at a wall-clock time."""
        raise NotImplementedError

    def work(self, started: Started) -> None:
        """Handle messages until the process is ended; print `ready` once it does."""
        raise NotImplementedError

    def run(self, main: Callable[[], Any]) -> None:
        """Run a coroutine on the event loop that the peer was measured best with."""
        if self.uses_uvloop:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        else:
            asyncio.run(main())


def fill(program: Program, count: int) -> None:
    """Publish messages 0 to count."""

    async def main() -> None:
        await program.open()
        await program.publish([body(number) for number in range(count)])
        await program.close()

    program.run(main)


def send_steadily(program: Program, path: str, rate: float) -> None:
    """Publish one message after the other at a steady rate; a slow call delays those after it."""
    slots = open_slots(path)

    async def main() -> None:
        await program.open()
        begin = time.monotonic()
        for number in range(len(slots)):
            message = body(number)
            pause = begin + number / rate - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            slots[number] = time.monotonic_ns()
            await program.send(message)
        await program.close()

    program.run(main)


def send_timers(program: Program, path: str, span: float, lead: float) -> int:
    """Publish timers in whole milliseconds before the first of them is due."""
    slots = open_slots(path)
    count, first = len(slots), 0.0

    async def main() -> None:
        nonlocal first
        await program.open()
        first = math.ceil(time.time() + lead)
        dues = [round(first + span * number / count, 3) for number in range(count)]
        for number, due in enumerate(dues):
            slots[number] = round(due * 1000) * 1_000_000
        gate = asyncio.Semaphore(TIMERS_AT_ONCE)

        async def one(number: int, due: float) -> None:
            async with gate:
                await program.send_timer(body(number), due)

        await asyncio.gather(*map(one, range(count), dues))
        await program.close()

    program.run(main)
    return LEAD_TOO_SHORT if time.time() > first else 0


def server_seconds(pid: int) -> float:
    """Return the processor time of a server and of the processes that it has started, also of those that have ended."""
    spent, ended = 0, 0.0
    for folder in Path("/proc").iterdir() if pid else ():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split() if folder.name.isdigit() else []
            if folder.name == str(pid):
                ended = sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
            if folder.name == str(pid) or (fields and int(fields[1]) == pid):
                spent += sum(
                    int((thread / "schedstat").read_text().split()[0]) for thread in (folder / "task").iterdir()
                )
        except OSError:
            continue  # it has ended
    return spent / NANOSECONDS + ended


def publish_together(program: Program, count: int, kind: str, server: int) -> None:
    """Publish from many tasks or threads at the same time; print how long that took, and the processor time."""

    async def tasks(waves: int) -> None:
        for wave in range(waves):
            await asyncio.gather(*(program.send(body(wave * TASKS + number)) for number in range(TASKS)))

    def threads(each: int) -> None:
        def run() -> None:
            for number in range(each):
                program.send_blocking(body(number))

        started = [threading.Thread(target=run) for _ in range(THREADS)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    async def main() -> None:
        await program.open()
        # The first ones connect.
        if kind == "tasks":
            await tasks(2)
        else:
            await asyncio.to_thread(threads, 2)
        served, began, spent = server_seconds(server), time.perf_counter(), time.process_time()
        if kind == "tasks":
            await tasks(count // TASKS)
        else:
            await asyncio.to_thread(threads, count // THREADS)
        seconds, cpu = time.perf_counter() - began, time.process_time() - spent
        print_json(seconds=seconds, cpu=cpu, server=server_seconds(server) - served)
        await program.close()

    program.run(main)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of all commands."""
    parser = argparse.ArgumentParser(description="A peer of the benchmarks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("publish", "work", "send", "timers", "together"):
        command = commands.add_parser(name)
        command.add_argument("--url", required=True)
        command.add_argument("--slots")
        command.add_argument("--count", type=int, default=0)
        command.add_argument("--rate", type=float, default=200.0)
        command.add_argument("--span", type=float, default=5.0)
        command.add_argument("--lead", type=float, default=4.0)
        command.add_argument("--clock", choices=("monotonic", "wall"), default="monotonic")
        command.add_argument("--variant", default="")
        command.add_argument("--server", type=int, default=0)
        command.add_argument("--kind", choices=("tasks", "threads"), default="tasks")
    return parser.parse_args(given)


def main(program_type: Callable[[str], Program], given: Sequence[str] | None = None) -> int:
    """Run the command line of this peer; return the exit code."""
    options = arguments(given)
    program = program_type(options.url)
    program.variant = options.variant
    match options.command:
        case "publish":
            fill(program, options.count)
        case "work":
            program.work(recorder(options.slots, options.clock))
        case "send":
            send_steadily(program, options.slots, options.rate)
        case "timers":
            return send_timers(program, options.slots, options.span, options.lead)
        case "together":
            publish_together(program, options.count, options.kind, options.server)
    return 0
