"""The register of workers: a worker is listed until its TTL ends by the store's clock, and is then removed."""

from __future__ import annotations

import pytest

from waypost import policy
from waypost.errors import InvalidInput, InvalidName
from waypost.store.port import Heartbeat, Idle, Registration, ServedQueue
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.clock import START_MS
from waypost.values import Requested, WorkerQueueRecord, WorkerRecord, WorkerRequest

TTL_MS = 30_000


def heartbeat(bench: Bench, name: str = "a", *, ttl_ms: int = TTL_MS, pid: int = 7) -> int:
    """Send a heartbeat of a worker."""
    return bench.run(bench.store.heartbeat(Heartbeat(name, "host", pid), ttl_ms))


def workers(bench: Bench) -> list[WorkerRecord]:
    """Return the workers that are listed."""
    return bench.run(bench.store.workers())


def names(bench: Bench) -> list[str]:
    """Return the names of the workers that are listed."""
    return [worker.name for worker in workers(bench)]


class TestWorkerRegister:
    """The register of workers."""

    @pytest.mark.promise("SEE-4")
    def test_a_store_without_workers_lists_none(self, bench: Bench) -> None:
        assert workers(bench) == []

    @pytest.mark.promise("SEE-4")
    def test_the_record_of_a_worker_is_listed_with_times_of_the_store(self, bench: Bench) -> None:
        record = Heartbeat(
            "host:7:ab", "host", 7, "0.1.0", "quiet", "degraded", ("wake channel down: polling",), 4, START_MS - 5,
            (ServedQueue("orders", 10, 3, 99, 250), ServedQueue("mails", 2)), 1,
        )  # fmt: skip
        assert bench.run(bench.store.heartbeat(record, TTL_MS)) == START_MS
        assert workers(bench) == [
            WorkerRecord(
                "host:7:ab", "host", 7, "0.1.0", "quiet", "degraded", ["wake channel down: polling"], 4,
                START_MS - 5, START_MS, START_MS + TTL_MS,
                [WorkerQueueRecord("orders", 10, 3, 99, START_MS - 250), WorkerQueueRecord("mails", 2, 0, 0, None)], 1,
            )
        ]  # fmt: skip

    @pytest.mark.promise("SEE-4")
    def test_a_worker_without_the_stores_time_starts_with_its_first_heartbeat(self, bench: Bench) -> None:
        started = heartbeat(bench)
        assert [worker.started_ms for worker in workers(bench)] == [started] == [START_MS]

    @pytest.mark.promise("SEE-4")
    def test_the_last_heartbeat_of_a_worker_counts(self, bench: Bench) -> None:
        heartbeat(bench, pid=1)
        bench.after(10)
        assert heartbeat(bench, pid=2) == START_MS + 10_000
        assert [(worker.pid, worker.seen_ms, worker.until_ms) for worker in workers(bench)] == [
            (2, START_MS + 10_000, START_MS + 40_000)
        ]

    @pytest.mark.promise("SEE-4")
    def test_a_silent_worker_is_removed_when_its_ttl_ends_and_not_before(self, bench: Bench) -> None:
        heartbeat(bench, "silent")
        heartbeat(bench, "alive", ttl_ms=2 * TTL_MS)
        bench.after(TTL_MS / 1000 - 0.001)
        assert names(bench) == ["alive", "silent"]
        bench.after(0.001)
        assert names(bench) == ["alive"]

    @pytest.mark.promise("SEE-4")
    def test_a_removed_worker_is_listed_again_by_its_next_heartbeat(self, bench: Bench) -> None:
        heartbeat(bench)
        bench.after(TTL_MS / 1000)
        assert names(bench) == []
        heartbeat(bench)
        assert names(bench) == ["a"]

    @pytest.mark.promise("SEE-4")
    def test_an_unregistered_worker_is_gone_at_once(self, bench: Bench) -> None:
        heartbeat(bench, "a")
        heartbeat(bench, "b")
        assert bench.run(bench.store.unregister("a")) is True
        assert names(bench) == ["b"]
        assert bench.run(bench.store.unregister("a")) is False
        assert bench.run(bench.store.unregister("never seen")) is False

    @pytest.mark.promise("SEE-4")
    def test_workers_are_listed_by_name(self, bench: Bench) -> None:
        for name in ("b", "a:10", "ä", "a:9"):
            heartbeat(bench, name)
        assert names(bench) == sorted(["b", "a:10", "ä", "a:9"])

    @pytest.mark.promise("SEE-4")
    def test_a_full_register_removes_the_worker_whose_ttl_ends_first(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # fmt: skip
        monkeypatch.setattr(policy, "WORKERS_MAX", 3)
        for name in ("d", "c", "b"):
            heartbeat(bench, name)
            bench.after(1)
        heartbeat(bench, "d")
        assert names(bench) == ["b", "c", "d"]
        heartbeat(bench, "a", ttl_ms=1)
        assert names(bench) == ["a", "b", "d"]

    @pytest.mark.promise("SEE-4")
    def test_workers_whose_ttl_has_ended_make_room(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(policy, "WORKERS_MAX", 2)
        heartbeat(bench, "short", ttl_ms=1_000)
        heartbeat(bench, "long")
        bench.after(1)
        heartbeat(bench, "new")
        assert names(bench) == ["long", "new"]
        assert bench.run(bench.store.unregister("short")) is False

    @pytest.mark.promise("SEE-4", "STORE-6")
    def test_namespaces_have_workers_of_their_own(self, bench: Bench) -> None:
        other = bench.another_client(namespace=fresh_namespace())
        heartbeat(bench, "here")
        heartbeat(other, "there")
        assert (names(bench), names(other)) == (["here"], ["there"])

    @pytest.mark.promise("SEE-4")
    def test_a_record_without_a_name_or_without_an_end_is_refused(self, bench: Bench) -> None:
        with pytest.raises(InvalidName, match="the name of a worker"):
            bench.store.heartbeat(Heartbeat(""), TTL_MS)
        many = tuple(ServedQueue(f"queue-{number:04}-with-a-name") for number in range(2_000))
        with pytest.raises(InvalidInput, match="name fewer queues"):
            bench.store.heartbeat(Heartbeat("a", queues=many), TTL_MS)
        assert workers(bench) == []

    @pytest.mark.promise("SEE-4")
    def test_the_register_creates_and_changes_no_queue(self, bench: Bench) -> None:
        heartbeat(bench, "orders")
        assert bench.run(bench.store.queues()) == []
        bench.publish()
        assert bench.stats().ledger.ready == 1
        assert names(bench) == ["orders"]


class TestWorkerRequests:
    """What was requested of a worker, which learns of it with its next heartbeat."""

    def poll(self, bench: Bench, name: str = "a", *, started_ms: int | None = None) -> Requested | None:
        """Send a heartbeat with a poll."""
        registration = Registration(Heartbeat(name, "host", 7, started_ms=started_ms), TTL_MS)
        return bench.poll(Idle("orders"), registration=registration).requested

    def request(self, bench: Bench, name: str, request: WorkerRequest) -> bool:
        """Request something of a worker."""
        return bench.run(bench.store.request_worker(name, request))

    @pytest.mark.promise("SEE-4")
    def test_a_request_is_returned_with_each_heartbeat_of_its_worker(self, bench: Bench) -> None:
        assert self.poll(bench, "a") is self.poll(bench, "b") is None
        bench.after(1)
        assert self.request(bench, "a", "quiet")
        expected = Requested("quiet", bench.now_ms)
        assert self.poll(bench, "a", started_ms=START_MS) == expected
        assert self.poll(bench, "b", started_ms=START_MS) is None
        assert self.poll(bench, "a", started_ms=START_MS) == expected
        assert [(worker.name, worker.requested) for worker in workers(bench)] == [("a", "quiet"), ("b", None)]

    @pytest.mark.promise("SEE-4")
    def test_the_last_request_counts(self, bench: Bench) -> None:
        self.poll(bench)
        assert self.request(bench, "a", "quiet")
        bench.after(1)
        assert self.request(bench, "a", "stop")
        assert self.poll(bench) == Requested("stop", bench.now_ms)

    @pytest.mark.promise("SEE-4")
    def test_nothing_is_requested_of_a_worker_that_is_not_there(self, bench: Bench) -> None:
        assert not self.request(bench, "absent", "stop")
        self.poll(bench, "a")
        bench.after(TTL_MS / 1000)
        assert not self.request(bench, "a", "stop")
        assert self.poll(bench, "a") is None

    @pytest.mark.promise("SEE-4")
    def test_a_request_goes_with_its_worker(self, bench: Bench) -> None:
        self.poll(bench, "a")
        assert self.request(bench, "a", "stop")
        assert bench.run(bench.store.unregister("a"))
        assert self.poll(bench, "a") is None

    @pytest.mark.promise("SEE-4")
    def test_a_worker_whose_heartbeat_is_late_learns_of_a_request(self, bench: Bench) -> None:
        self.poll(bench, "a")
        assert self.request(bench, "a", "stop")
        expected = Requested("stop", bench.now_ms)
        bench.after(TTL_MS / 1000 + 1)
        assert self.poll(bench, "a") == expected

    @pytest.mark.promise("SEE-4")
    def test_a_request_for_an_earlier_worker_of_the_same_name_is_not_listed(self, bench: Bench) -> None:
        self.poll(bench, "a", started_ms=bench.now_ms)
        assert self.request(bench, "a", "stop")
        requested_ms = bench.now_ms
        bench.after(2)
        # It crashed, and another one began under its name: that one sees that the request is older than itself.
        assert self.poll(bench, "a", started_ms=bench.now_ms) == Requested("stop", requested_ms)
        assert [worker.requested for worker in workers(bench)] == [None]
