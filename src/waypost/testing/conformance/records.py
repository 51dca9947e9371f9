"""Shared records: small data by kind and name, changed by compare-and-set, in a bounded number."""

from __future__ import annotations

import pytest

from waypost.policy import RECORDS_SWEPT_MAX
from waypost.testing.bench import Bench, fresh_namespace
from waypost.testing.clock import START_MS
from waypost.values import RecordPage, RecordSaved, SharedRecord


def save(bench: Bench, name: str, data: bytes | None, kind: str = "notes", **options: int) -> RecordSaved:
    """Save a record."""
    return bench.run(bench.store.save_record(kind, name, data, **options))


def page(bench: Bench, *names: str, kind: str = "notes", cursor: str | None = None, limit: int = 100) -> RecordPage:
    """Read records."""
    return bench.run(bench.store.records(kind, names=names, cursor=cursor, limit=limit))


def names(bench: Bench, kind: str = "notes") -> list[str]:
    """The names of all records of a kind."""
    return [record.name for record in page(bench, kind=kind).records]


class TestSharedRecords:
    """Shared records."""

    @pytest.mark.promise("FACE-3")
    def test_a_record_is_read_as_it_was_saved(self, bench: Bench) -> None:
        data = bytes(range(256)) * 4
        saved = save(bench, "first", data)
        assert saved == RecordSaved(True, SharedRecord("first", data, START_MS, START_MS, None), START_MS)
        assert page(bench).records == page(bench, "first").records == [saved.record]
        assert page(bench, "other").records == page(bench, kind="others").records == []

    @pytest.mark.promise("FACE-3")
    def test_each_save_has_a_larger_version(self, bench: Bench) -> None:
        first = save(bench, "one", b"a").record
        second = save(bench, "one", b"b").record
        bench.clock.advance(5)
        third = save(bench, "one", b"c").record
        assert first is not None
        assert second is not None
        assert third is not None
        assert first.version < second.version < third.version
        assert {first.created_ms, second.created_ms, third.created_ms} == {START_MS}

    @pytest.mark.promise("FACE-3")
    def test_a_save_with_another_version_changes_nothing_and_returns_what_is_there(self, bench: Bench) -> None:
        first = save(bench, "one", b"a", version=0)
        assert first.saved
        assert first.record is not None
        refused = save(bench, "one", b"b", version=0)
        assert refused == RecordSaved(False, first.record, START_MS)
        changed = save(bench, "one", b"b", version=first.record.version)
        assert changed.saved
        assert save(bench, "one", b"c", version=first.record.version) == RecordSaved(False, changed.record, START_MS)
        assert save(bench, "missing", b"c", version=first.record.version) == RecordSaved(False, None, START_MS)
        assert names(bench) == ["one"]

    @pytest.mark.promise("FACE-3")
    def test_a_repeat_of_a_save_counts_as_saved(self, bench: Bench) -> None:
        first = save(bench, "one", b"mine", version=0)
        assert save(bench, "one", b"mine", version=0) == first
        assert first.record is not None
        changed = save(bench, "one", b"next", version=first.record.version)
        assert save(bench, "one", b"next", version=first.record.version) == changed

    @pytest.mark.promise("FACE-3")
    def test_a_removed_record_is_gone_and_does_not_come_back_with_an_old_version(self, bench: Bench) -> None:
        first = save(bench, "one", b"a").record
        assert first is not None
        assert save(bench, "one", None, version=first.version + 7).saved is False
        assert save(bench, "one", None, version=first.version) == RecordSaved(True, None, START_MS)
        assert save(bench, "one", None) == RecordSaved(False, None, START_MS)
        assert names(bench) == []
        bench.clock.advance(0.001)
        again = save(bench, "one", b"a", version=0).record
        assert again is not None
        assert again.version > first.version
        assert again.created_ms == START_MS + 1

    @pytest.mark.promise("FACE-3")
    def test_a_record_with_a_time_to_live_is_forgotten_after_it(self, bench: Bench) -> None:
        save(bench, "short", b"a", ttl_ms=1_000)
        save(bench, "long", b"b", ttl_ms=5_000)
        bench.clock.advance(0.999)
        assert sorted(names(bench)) == ["long", "short"]
        bench.clock.advance(0.001)
        assert names(bench) == ["long"]
        assert page(bench, "short").records == []
        # It is as if it had never been.
        saved = save(bench, "short", b"a", version=0, ttl_ms=1_000)
        assert saved.record == SharedRecord("short", b"a", START_MS + 1_000, START_MS + 1_000, START_MS + 2_000)

    @pytest.mark.promise("FACE-3")
    def test_a_save_sets_the_time_to_live_anew(self, bench: Bench) -> None:
        save(bench, "one", b"a", ttl_ms=1_000)
        bench.clock.advance(0.9)
        assert save(bench, "one", b"b", ttl_ms=1_000).record == SharedRecord(
            "one", b"b", START_MS + 900, START_MS, START_MS + 1_900
        )
        save(bench, "one", b"c")
        bench.clock.advance(10)
        assert names(bench) == ["one"]

    @pytest.mark.promise("FACE-3")
    def test_pages_have_the_newest_first_and_each_record_once(self, bench: Bench) -> None:
        for index in range(7):
            save(bench, f"r{index}", b"%d" % index)
            bench.clock.advance(0.001 * (index % 2))
        everything = names(bench)
        assert everything == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
        found: list[str] = []
        cursor: str | None = None
        while True:
            part = page(bench, cursor=cursor, limit=2)
            found += [record.name for record in part.records]
            cursor = part.cursor
            if cursor is None:
                break
            # The record that a page ends with may be removed before the next one is read.
            save(bench, found[-1], None)
        assert found == everything

    @pytest.mark.promise("FACE-3")
    def test_expired_records_do_not_shorten_a_page(self, bench: Bench) -> None:
        save(bench, "old", b"")
        bench.clock.advance(0.001)
        for index in range(5):
            save(bench, f"gone{index}", b"", ttl_ms=10)
        bench.clock.advance(0.01)
        found = page(bench, limit=1)
        assert [record.name for record in found.records] == ["old"]
        assert found.cursor is None

    @pytest.mark.promise("FACE-3")
    def test_the_oldest_go_when_there_are_too_many(self, bench: Bench) -> None:
        for index in range(6):
            bench.clock.advance(0.001)
            save(bench, f"r{index}", b"x", keep=4)
        save(bench, "r2", b"changed", keep=4)
        assert names(bench) == ["r5", "r4", "r3", "r2"]

    @pytest.mark.promise("FACE-3")
    def test_expired_records_that_no_save_has_removed_yet_are_not_listed(self, bench: Bench) -> None:
        count = RECORDS_SWEPT_MAX + 3
        for index in range(count):
            save(bench, f"r{index:03d}", b"x", ttl_ms=1)
        save(bench, "other", b"x", kind="others", keep=1)
        bench.clock.advance(0.001)
        save(bench, "last", b"x", keep=1)
        assert names(bench) == ["last"]
        assert names(bench, "others") == ["other"]

    @pytest.mark.promise("FACE-3")
    def test_records_of_two_namespaces_never_meet(self, bench: Bench) -> None:
        other = bench.another_client(namespace=fresh_namespace())
        save(bench, "one", b"a")
        assert names(other) == []

    @pytest.mark.promise("FACE-3")
    def test_a_record_makes_no_queue(self, bench: Bench) -> None:
        save(bench, "one", b"a")
        assert bench.run(bench.store.queues()) == []
