"""Figures of leases that end by their holder's own clock, and of handlers that end by an exit.

Workers are real processes behind proxies, several at once, each with queues of its own. When one is cut off for longer
than its lease, this process claims its messages directly from the server. A handler that gives a sign of life after
that ran past its lease.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fault.exiting_app import DELIVERIES, POISONS
from tests.fault.figure import Figure
from tests.fault.proxy import Proxy
from tests.fault.wake_figures import ROOT, Server
from tests.waiting import WAIT_SECONDS_MAX, until
from waypost import Waypost

WORKERS = 5
LEASE_SECONDS = 2.0
#: Replies that are held back are only waited for.
LATE_LEASE_SECONDS = 0.5
KINDS = ("async", "process", "thread")
FINE = 30


class DisconnectedWorker:
    """One worker process behind a proxy of its own."""

    def __init__(self, server: Server, number: int, folder: Path, stack: ExitStack) -> None:
        self.number = number
        self.proxy = stack.enter_context(Proxy(server.port))
        self.notes = folder / f"notes-{number}"
        self.notes.touch()
        given = {
            "url": server.through(self.proxy.port), "namespace": server.namespace, "notes": str(self.notes),
            "number": number,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.disconnected_worker"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"APP_OPTIONS": json.dumps(given)},
        )  # fmt: skip
        stack.callback(self.end)

    def wait_ready(self) -> None:
        """Wait until it claims."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        """Stop it, and wait for its end."""
        self.proxy.heal()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def lines(self) -> list[tuple[str, str, str, int, int]]:
        """Return what it wrote: event, kind, message, delivery, time."""
        found = []
        for line in self.notes.read_text().splitlines():
            what, kind, message_id, delivery, when = line.split()
            found.append((what, kind, message_id, int(delivery), int(when)))
        return found

    def noted(self, what: str) -> dict[str, int]:
        """Return the messages for which it noted an event on their first delivery, and the last time."""
        return {message_id: when for w, _, message_id, nth, when in self.lines() if w == what and nth == 1}

    def cut(self, how: str) -> None:
        """Disconnect it from its store."""
        if how == "silent":
            self.proxy.silence()
        else:
            self.proxy.refuse()
            self.proxy.cut()


@contextmanager
def disconnected_workers(server: Server) -> Iterator[list[DisconnectedWorker]]:
    """Start several of them, and wait until they are ready."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [DisconnectedWorker(server, number, folder, stack) for number in range(WORKERS)]
        for worker in workers:
            worker.wait_ready()
        yield workers


def disconnected(server: Server, cuts: int) -> Iterator[Figure]:
    """Workers cut off for longer than their leases, half of them by silence and half by refused connections."""
    server.prepare()
    with Waypost(server.url, namespace=server.namespace) as post, disconnected_workers(server) as workers:
        for worker in workers:
            for kind in KINDS:
                post.configure(f"{kind}-{worker.number}", lease=LEASE_SECONDS)
        claimed_at: dict[str, int] = {}
        published: Counter[str] = Counter()
        for turn in range(cuts // WORKERS):
            threads = [
                threading.Thread(target=_disconnect_once, args=(post, worker, turn, claimed_at, published))
                for worker in workers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        notified = sum(len(worker.noted("lease-lost")) for worker in workers)
        callbacks = Counter(kind for worker in workers for what, kind, *_ in worker.lines() if what == "callback")
        past = Counter(
            kind for worker in workers for what, kind, message_id, nth, when in worker.lines()
            if what == "alive" and nth == 1 and when > claimed_at.get(message_id, time.monotonic_ns())
        )  # fmt: skip
    count = published["async"]
    yield Figure(
        f"cut off {count} times for longer than the lease",
        f"handlers that ran past it: async {past['async']}, process {past['process']}",
        "0, 0",
        count == cuts == len(claimed_at) // len(KINDS) and not past,
    )
    yield Figure("cut off, threads that saw the lost lease", f"{notified} of {count}", f"{count}", notified == count)
    each = ", ".join(f"{kind} {callbacks[kind]}" for kind in KINDS)
    yield Figure("cut off, callbacks", f"{each}", f"{count} each", all(callbacks[kind] == count for kind in KINDS))


def _disconnect_once(
    post: Waypost, worker: DisconnectedWorker, turn: int, claimed_at: dict[str, int], published: Counter[str]
) -> None:
    ids = {kind: post.publish(f"{kind}-{worker.number}", turn).id for kind in KINDS}
    until(lambda: worker.noted("began").keys() >= set(ids.values()), "the start of the handlers")
    worker.cut("silent" if (turn + worker.number) % 2 else "refused")

    def claim_message(kind: str) -> None:
        with post.receive(f"{kind}-{worker.number}", wait=WAIT_SECONDS_MAX) as message:
            assert message is not None
            claimed_at[message.id] = time.monotonic_ns()
            published[kind] += 1

    claimers = [threading.Thread(target=claim_message, args=(kind,)) for kind in KINDS]
    for claimer in claimers:
        claimer.start()
    for claimer in claimers:
        claimer.join()
    worker.proxy.heal()


def late_answers(server: Server, count: int) -> Iterator[Figure]:
    """Answers to claims held back until the lease is over and another client has the message."""
    server.prepare()
    mark = b"_claim"
    if server.kind == "valkey":
        from waypost.store.valkey.scripts import script

        mark = script("claim").sha
    held: list[str] = []
    with Waypost(server.url, namespace=server.namespace) as post, disconnected_workers(server) as workers:
        for worker in workers:
            post.configure(f"quick-{worker.number}", lease=LATE_LEASE_SECONDS)
        for turn in range(count // WORKERS):
            threads = [threading.Thread(target=_hold_once, args=(post, worker, turn, mark, held)) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        started = sum(message_id in held for worker in workers for message_id in worker.noted("began"))
        ledgers = [post.ledger(f"quick-{worker.number}") for worker in workers]
    yield Figure(
        "late answers to claims", f"held back {len(held)}, handlers started {started}", f"{count}, 0",
        len(held) == count and started == 0,
    )  # fmt: skip
    done, published = sum(ledger.done for ledger in ledgers), sum(ledger.published for ledger in ledgers)
    yield Figure("late answers to claims, done", f"{done}", f"{published}", done == published >= 2 * count)


def _hold_once(post: Waypost, worker: DisconnectedWorker, turn: int, mark: bytes, held: list[str]) -> None:
    queue = f"quick-{worker.number}"
    while True:
        worker.proxy.hold_replies(to=mark)
        published = post.publish(queue, turn)
        until(lambda: worker.proxy.held, "the answer that is held back")
        if post.ledger(queue).leased:
            break
        # That of a claim which had found nothing before.
        worker.proxy.heal()
        until(lambda: published.id in worker.noted("began"), "the message that was not claimed")  # noqa: B023
    with post.receive(queue, wait=WAIT_SECONDS_MAX) as message:
        assert message is not None
        was_held = (message.id, message.deliveries) == (published.id, 2)
        if was_held:
            held.append(message.id)
    worker.proxy.heal()
    # The worker goes on, and the late answer did not keep it from that.
    after = post.publish(queue, "after")
    until(lambda: after.id in worker.noted("began"), "the next message")
    until(lambda: not post.ledger(queue).leased, "its end")
    if not was_held:
        # The claim was sent again and held back again before the other client came: that is not what is counted.
        _hold_once(post, worker, turn, mark, held)


def _ended(post: Waypost) -> int:
    ledgers = [post.ledger(queue) for queue in POISONS]
    return sum(ledger.done + ledger.dead for ledger in ledgers)


def poison_by_exit(url: str, namespace: str) -> Iterator[Figure]:
    """Handlers that exit, raise what is no `Exception`, cancel themselves, or kill a process: two worker processes."""
    poisons = sum(map(len, POISONS.values()))
    with Waypost(url, namespace=namespace) as post:
        for queue, kinds in POISONS.items():
            post.configure(queue, lease=1, max_deliveries=DELIVERIES if queue == "worker" else 10)
            # One that kills its worker takes deliveries from whatever is under way beside it, so it comes alone.
            if queue != "worker":
                post.publish_many(queue, [*kinds, *(f"fine {number}" for number in range(FINE))])
        command = [
            sys.executable,
            "-m",
            "waypost.cli.main",
            "worker",
            "tests.fault.exiting_app:post",
            "--processes",
            "2",
        ]
        environment = os.environ | {"APP_URL": url, "APP_NAMESPACE": namespace}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as workers:
            try:
                until(lambda: _ended(post) == poisons - 1 + FINE * (len(POISONS) - 1), "the end of the poison")
                post.publish_many("worker", POISONS["worker"])
                until(lambda: post.ledger("worker").dead, "the end of the one that kills its worker")
                # The workers go on: new messages are handled.
                for queue in POISONS:
                    post.publish(queue, "after")
                wanted = FINE * (len(POISONS) - 1) + len(POISONS)
                until(lambda: sum(post.ledger(queue).done for queue in POISONS) >= wanted, "the others")
            finally:
                workers.terminate()
                workers.wait(60)
        letters = [letter for queue in POISONS for letter in post.dead_letters(queue)]
        done = sum(post.ledger(queue).done for queue in POISONS)
        sound = all(not (ledger := post.ledger(queue)).balance and not ledger.unexplained for queue in POISONS)
    exact = sum(letter.deliveries == DELIVERIES for letter in letters)
    yield Figure(
        "poison by exit", f"dead {len(letters)}, after exactly {DELIVERIES} deliveries {exact}",
        f"{poisons}, {poisons}", len(letters) == exact == poisons,
    )  # fmt: skip
    yield Figure("poison by exit, the others", f"done {done}, ledgers sound {sound}", f"{wanted}, True",
                  done == wanted and sound)  # fmt: skip
