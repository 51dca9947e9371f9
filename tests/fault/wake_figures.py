"""Figures of wake-ups: how many sleepers are woken, how soon they start, and what a lost notification costs.

Claims are counted by a proxy between the workers and their server. Safety polls are out of the way while claims are
counted: an idle loop makes one every fifteen seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fault.figure import Figure
from tests.fault.proxy import Proxy
from tests.waiting import until
from waypost import Waypost
from waypost.policy import SAFETY_POLL_SECONDS
from waypost.testing.bench import fresh_namespace

ROOT = Path(__file__).parents[2]
PROCESSES, LOOPS, MESSAGES = 5, 10, 5
NEVER = 600.0
#: With so few rounds the median counts: other work on the machine makes commits late, and each of those may cost one
#: more claim.
QUICK_ROUNDS = 3
QUIET_SECONDS = 0.3


class Counted:
    """Counts claims, and notes the time of the last one."""

    def __init__(self) -> None:
        self.claims = 0
        self._last_at = 0.0
        self._guard = threading.Lock()

    def add(self, number: int) -> None:
        if number:
            with self._guard:
                self.claims += number
                self._last_at = time.monotonic()

    def settled(self) -> int:
        """Return how many there were, once no more come."""
        until(lambda: time.monotonic() > self._last_at + QUIET_SECONDS, "the end of all claims")
        return self.claims


class CountingProxy(Proxy):
    """A proxy that counts the claims of clients of PostgreSQL, and drops nothing."""

    #: A statement in full (a Parse without a name) or by its name (a Bind). Preparing one is a request, but no claim.
    CLAIM = re.compile(rb'P.{4}\0SELECT[^\0]*_claim_\d+"\(|B.{4}\0waypost_claim_', re.DOTALL)

    def __init__(self, target_port: int, counted: Counted) -> None:
        self.counted = counted
        super().__init__(target_port)

    def takes_reply_of(self, request: bytes) -> bool:
        self.counted.add(len(self.CLAIM.findall(request)))
        return super().takes_reply_of(request)


@contextmanager
def counting(server: Server) -> Iterator[tuple[Counted, str]]:
    """Count the claims of a server, and return the URL for clients whose claims are counted.

    Valkey reports its own commands: a claim behind a blocking wait reaches it long before.
    """
    counted = Counted()
    if server.kind == "postgres":
        with CountingProxy(server.port, counted) as proxy:
            yield counted, server.through(proxy.port)
        return
    from redis.exceptions import ConnectionError as Disconnected

    from tests.servers.valkey_setups import client_of
    from waypost.store.valkey.scripts import script

    claim = f"EVALSHA {script('claim').sha.decode()}"
    client: Any = client_of(server)
    monitor = client.monitor()

    def listen() -> None:
        with suppress(Disconnected, ValueError, OSError):
            for entry in monitor.listen():
                counted.add(entry["command"].startswith(claim))

    with monitor:
        listener = threading.Thread(target=listen)
        listener.start()
        yield counted, server.url
        client.publish("the-end", "")
        monitor.connection.disconnect()
    listener.join()
    client.close()


@dataclass
class Server:
    """A server and a namespace of its own."""

    kind: str
    url: str
    port: int
    namespace: str = field(default_factory=fresh_namespace)

    def through(self, port: int) -> str:
        """Return the URL of the server behind a proxy."""
        return self.url.replace(f":{self.port}", f":{port}")

    def prepare(self) -> None:
        """Make the tables of a fresh namespace, where there are any."""
        if self.kind == "postgres":
            from waypost.store.postgres import migrate

            migrate(self.url, namespace=self.namespace)

    def forget_sleepers(self) -> None:
        """Remove all sleepers from the store."""
        if self.kind == "valkey":
            from tests.servers.valkey_setups import client_of

            with client_of(self) as client:
                client.delete(f"{{{self.namespace}:orders}}:sleepers")
            return
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'DELETE FROM "{self.namespace}_sleeper"')


@dataclass(frozen=True, slots=True)
class SleepingWorkers:
    """Processes of workers, and the file in which they note their starts."""

    notes: Path
    processes: list[subprocess.Popen[bytes]]

    def starts(self) -> list[float]:
        """Return the milliseconds from publish to start of each message."""
        pairs = (line.split() for line in self.notes.read_text().splitlines())
        return [(int(started) - int(published)) / 1e6 for published, started in pairs]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the processes for the length of a block."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self.processes:
                process.send_signal(signal.SIGCONT)


@contextmanager
def sleeping_workers(
    server: Server,
    *,
    url: str | None = None,
    wake: str | None = None,
    poll: float = NEVER,
    number: int = PROCESSES,
    nice: int = 0,
) -> Iterator[SleepingWorkers]:
    """Start processes full of idle loops, and wait until all sleep. `nice`: their CPU priority."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        given = {
            "url": url or server.url, "namespace": server.namespace, "wake": wake, "loops": LOOPS,
            "notes": str(notes), "poll": poll, "nice": nice,
        }  # fmt: skip
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.fault.sleeping_workers", json.dumps(given)], cwd=ROOT,
                stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            )
            for _ in range(number)
        ]  # fmt: skip
        try:
            yield SleepingWorkers(notes, processes)
        finally:
            for process in processes:
                if process.stdin is not None:
                    process.stdin.close()
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def all_asleep(post: Waypost) -> bool:
    return post.stats("orders").sleepers == PROCESSES * LOOPS


def publish_at_once(server: Server, posts: list[Waypost]) -> None:
    """Publish one message from each of several independent clients at once."""
    start = threading.Barrier(len(posts), timeout=60)

    def publish(post: Waypost) -> None:
        start.wait()
        post.publish("orders", time.monotonic_ns())

    threads = [threading.Thread(target=publish, args=(post,)) for post in posts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def claims(server: Server, rounds: int) -> Iterator[Figure]:
    """Five messages for fifty sleepers: about five of them claim."""
    server.prepare()
    posts = [Waypost(server.url, namespace=server.namespace) for _ in range(MESSAGES)]
    posts[0].configure("orders", lease=NEVER)  # no claim for leases that end
    loops = PROCESSES * LOOPS
    with (
        counting(server) as (counter, url),
        sleeping_workers(server, url=url) as workers,
    ):
        until(lambda: all_asleep(posts[0]), "fifty sleepers")
        counted = []
        for number in range(1, rounds + 1):
            until(lambda: all_asleep(posts[0]), "fifty sleepers again")
            before = counter.settled()
            publish_at_once(server, posts)
            try:
                until(lambda n=number: len(workers.starts()) == n * MESSAGES, "all starts")  # type: ignore[misc]
            except AssertionError as error:
                stats = posts[0].stats("orders")
                raise AssertionError(f"{error}: {len(workers.starts())} of {number * MESSAGES}, {stats}") from None
            until(lambda: all_asleep(posts[0]), "fifty sleepers again")
            counted.append(counter.settled() - before)
        yield Figure(
            f"wake-ups: claims for {MESSAGES} messages, {loops} idle loops",
            f"{max(counted)} at most, {statistics.median(counted):g} as a rule",
            f"{MESSAGES + 2}",
            (max(counted) if rounds > QUICK_ROUNDS else statistics.median(counted)) <= MESSAGES + 2,
        )
        server.forget_sleepers()
        before = counter.settled()
        posts[0].publish_many("orders", [time.monotonic_ns()] * MESSAGES)
        until(lambda: all_asleep(posts[0]), "fifty sleepers again")
        claims_of_all = counter.settled() - before
        expected = (rounds + 1) * MESSAGES
        # A loop may fall asleep before the settle that it handed over has been sent.
        until(lambda: posts[0].ledger("orders").done >= expected, "the last settle")
        done = posts[0].ledger("orders").done
        yield Figure(
            "wake-ups: claims when no sleeper is registered",
            f"{claims_of_all}, done {done}",
            f"about {loops}, {expected}",
            claims_of_all >= loops * 0.8 and done == expected,
        )
    for post in posts:
        post.close()


def starts(server: Server, rounds: int) -> Iterator[Figure]:
    """How soon messages start: the same workers, without a proxy in between."""
    server.prepare()
    posts = [Waypost(server.url, namespace=server.namespace) for _ in range(MESSAGES)]
    with sleeping_workers(server) as workers:
        for number in range(1, rounds + 1):
            until(lambda: all_asleep(posts[0]), "fifty sleepers")
            publish_at_once(server, posts)
            try:
                until(lambda n=number: len(workers.starts()) == n * MESSAGES, "all starts")  # type: ignore[misc]
            except AssertionError as error:
                stats = posts[0].stats("orders")
                raise AssertionError(f"{error}: {len(workers.starts())} of {number * MESSAGES}, {stats}") from None
        latencies = workers.starts()
    for post in posts:
        post.close()
    p50 = statistics.median(latencies)
    yield Figure(
        "wake-ups: start of a message, p50", f"{p50:.1f} ms, slowest {max(latencies):.0f} ms", "10 ms", p50 < 10
    )


def all_lost(server: Server, rounds: int) -> Iterator[Figure]:
    """Every notification is lost: the safety poll finds the messages."""
    server.prepare()
    with (
        Proxy(server.port) as proxy,
        Waypost(server.url, namespace=server.namespace) as post,
        sleeping_workers(server, wake=server.through(proxy.port), poll=SAFETY_POLL_SECONDS) as workers,
    ):
        until(lambda: all_asleep(post), "fifty sleepers")
        proxy.silence(requests=False)
        for number in range(1, rounds + 1):
            post.publish("orders", time.monotonic_ns())
            until(lambda n=number: len(workers.starts()) == n, "the start")  # type: ignore[misc]
        latencies = workers.starts()
        proxy.heal()
    slowest = max(latencies) / 1000
    yield Figure(
        "wake-ups: all lost, slowest start",
        f"{slowest:.2f} s of {len(latencies)}",
        f"{SAFETY_POLL_SECONDS:g} s",
        slowest <= SAFETY_POLL_SECONDS + 0.5,
    )


def busy(server: Server, rounds: int) -> Iterator[Figure]:
    """A PostgreSQL queue under load sends next to no notifications."""
    if server.kind != "postgres":
        return
    import psycopg

    from waypost.wake.port import Topic
    from waypost.wake.postgres import channel_of

    server.prepare()
    each, publishers = 150 * rounds, 4
    with (
        Waypost(server.url, namespace=server.namespace) as post,
        sleeping_workers(server, poll=SAFETY_POLL_SECONDS) as workers,
    ):
        until(lambda: all_asleep(post), "fifty sleepers")
        notifications = [0]
        over = threading.Event()

        def listen() -> None:
            with psycopg.connect(server.url, autocommit=True) as connection:
                channel = channel_of(Topic(server.namespace, "ready", "orders"))
                connection.execute(f'LISTEN "{channel}"')
                while not over.is_set():
                    notifications[0] += sum(1 for _ in connection.notifies(timeout=0.2))

        def publish() -> None:
            with Waypost(server.url, namespace=server.namespace, wake="poll") as publisher:
                for _ in range(each):
                    publisher.publish("orders", time.monotonic_ns())

        listener = threading.Thread(target=listen)
        listener.start()
        threads = [threading.Thread(target=publish) for _ in range(publishers)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        count = each * publishers
        rate = count / (time.monotonic() - began)
        until(lambda: len(workers.starts()) == count, "all starts")
        over.set()
        listener.join()
    share = 1000 * notifications[0] / count
    yield Figure(
        "wake-ups: notifications on a busy queue",
        f"{share:.0f} per 1,000 publishes, at {rate:.0f} a second",
        "100",
        share <= 100,
    )


def commits(server: Server, rounds: int) -> Iterator[Figure]:
    """How long a publishing transaction takes, alternating between workers that are woken and workers that poll.

    The workers give way to the publishers, as if they had another machine: where both share two cores, a worker that
    handles a message at once takes them from the next publish, and one that polls does so later and for many at once.
    Medians of the turns: the machine's own hiccups are longer than the difference that is measured.
    """
    if server.kind != "postgres":
        return
    polled = Server(server.kind, server.url, server.port)
    server.prepare()
    polled.prepare()
    latencies: dict[str, list[float]] = {server.namespace: [], polled.namespace: []}
    rate, seconds, publishers = 1000.0, 2.0, 5
    with (
        Waypost(server.url, namespace=server.namespace) as post,
        sleeping_workers(server, poll=SAFETY_POLL_SECONDS, number=1, nice=15) as woken,
        sleeping_workers(polled, wake="poll", poll=SAFETY_POLL_SECONDS, number=1, nice=15) as polling,
    ):
        for turn in range(rounds + 3):
            for namespace, others in ((server.namespace, polling), (polled.namespace, woken)):
                until(lambda: post.stats("orders").sleepers == LOOPS, "the sleepers")
                with others.frozen():
                    found = publish_evenly(server.url, namespace, rate, seconds, publishers)
                if turn:  # the first turn is a warm-up
                    latencies[namespace].append(statistics.quantiles(found, n=100)[98])
    with_wakeups, without = (statistics.median(values) for values in latencies.values())
    ratio = statistics.median(one / other for one, other in zip(*latencies.values(), strict=True))
    yield Figure(
        "wake-ups: commit of a publish, p99",
        f"{with_wakeups:.1f} ms with sleepers, {without:.1f} ms without wake-ups, ratio {ratio:.2f}",
        "ratio 1.5",
        ratio <= 1.5,
    )


def publish_evenly(url: str, namespace: str, rate: float, seconds: float, publishers: int) -> list[float]:
    """Return the milliseconds of each publish, from several clients that together keep a rate as far as they can."""
    latencies: list[float] = []
    start = time.monotonic() + 0.2

    def publish(offset: float) -> None:
        with Waypost(url, namespace=namespace, wake="poll") as post:
            post.policy("orders")
            due = start + offset
            while due < start + seconds:
                time.sleep(max(0.0, due - time.monotonic()))
                began = time.monotonic_ns()
                post.publish("orders", began)
                latencies.append((time.monotonic_ns() - began) / 1e6)
                due += publishers / rate

    threads = [threading.Thread(target=publish, args=(number / rate,)) for number in range(publishers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


#: Figures that count, and figures that measure time: the latter mean little on a machine with other work.
COUNTED_FIGURES = (claims,)
TIMED_FIGURES = (busy, starts, all_lost, commits)
