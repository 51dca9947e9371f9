"""Several patterns in one schedule, and days on which it does not fire."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from tests.schedule.oracle import Window, changes, utc
from tests.schedule.test_backfill import counts
from tests.schedule.test_command import run_command
from waypost import AsyncWaypost, Waypost
from waypost.errors import InvalidSchedule
from waypost.operations.schedules import EXCLUDED_MAX, make_spec
from waypost.schedule.cron import PATTERNS_MAX
from waypost.schedule.rule import Timeline, pack_spec, unpack_spec
from waypost.schedule.state import FiredInstants, after_change, pack_state, read_state
from waypost.times import to_ms
from waypost.values import StoredSchedule

HOLIDAYS = [date(2026, 12, 25), date(2027, 1, 1)]


def local_fires(count: int, start: datetime, **rule: Any) -> list[str]:
    spec = make_spec("x", **rule)
    zone = ZoneInfo(rule.get("tz", "UTC"))
    fires = Timeline("x", spec).next_fires_after(to_ms(start) - 1, count)
    moments = [datetime.fromtimestamp(fire.instant_ms / 1000, UTC).astimezone(zone) for fire in fires]
    return [f"{moment:%m-%d %H:%M}" for moment in moments]


@pytest.mark.promise("CRON-8")
def test_several_patterns_fire_in_order_and_an_instant_of_two_of_them_once() -> None:
    patterns = ["0 9 * * mon-fri", "0 12 * * sat", "0 9 1 * *"]
    # 1 June 2026 is a Monday: two patterns have its nine o'clock.
    found = local_fires(8, datetime(2026, 5, 29, tzinfo=UTC), cron=patterns)
    assert found == [
        "05-29 09:00", "05-30 12:00", "06-01 09:00", "06-02 09:00", "06-03 09:00", "06-04 09:00", "06-05 09:00",
        "06-06 12:00",
    ]  # fmt: skip
    assert make_spec("x", cron=patterns).cron == "0 9 * * mon-fri; 0 12 * * sat; 0 9 1 * *"
    assert make_spec("x", cron="0  9 * * 1 ;0 12 * * 6;0 9 * * 1").cron == "0 9 * * 1; 0 12 * * 6"


@pytest.mark.promise("CRON-8", "CRON-3")
def test_excluded_days_are_those_of_the_zone() -> None:
    found = local_fires(
        4, datetime(2026, 12, 24, tzinfo=UTC), cron=["30 0 * * *", "*/20 23 * * *"], tz="Pacific/Auckland",
        exclude=HOLIDAYS,
    )  # fmt: skip
    assert found == ["12-24 23:00", "12-24 23:20", "12-24 23:40", "12-26 00:30"]
    # A pattern with an instant each second: the day is passed over, not walked through.
    assert local_fires(2, datetime(2026, 12, 24, 23, 59, 59, tzinfo=UTC), cron="* * * * * *", exclude=HOLIDAYS) == [
        "12-24 23:59", "12-26 00:00",
    ]  # fmt: skip


@pytest.mark.promise("CRON-8", "CRON-3")
@pytest.mark.parametrize(
    "zone", ["Europe/Madrid", "America/Sao_Paulo", "Australia/Lord_Howe", "Asia/Beirut", "Africa/Cairo"]
)
def test_patterns_and_excluded_days_around_changes_of_the_clocks_are_as_the_oracle_has_them(zone: str) -> None:
    patterns = ("*/30 * * * *", "15 2 * * *", "0 0 * * *", "30 23 * * *")  # midnight is in the gap in two of the zones
    info = ZoneInfo(zone)
    moments = changes(info, utc(2017), utc(2027))[-2:]
    assert moments
    for moment in moments:
        window = Window(info, moment - timedelta(hours=34), moment + timedelta(hours=34))
        begin = window.start + timedelta(hours=4)
        for day in {(moment + timedelta(days=days)).astimezone(info).date() for days in (-1, 0, 1)}:
            expected = sorted({instant for pattern in patterns for instant in window.instants(pattern)})
            wanted = [at for at in expected if at >= begin and at.astimezone(info).date() != day]
            spec = make_spec("x", cron=patterns, tz=zone, exclude=[day])
            fires = Timeline("x", spec).next_fires_after(to_ms(begin) - 1, len(wanted))
            assert [datetime.fromtimestamp(fire.instant_ms / 1000, UTC) for fire in fires] == wanted


@pytest.mark.promise("CRON-8", "CRON-1")
def test_wrong_lists_are_refused_by_what_is_wrong() -> None:
    with pytest.raises(InvalidSchedule, match="cron field hours: 25 is out of range"):
        make_spec("x", cron=["0 9 * * *", "0 25 * * *"])
    with pytest.raises(InvalidSchedule, match="cron must be a pattern as text, or a list of patterns, not"):
        make_spec("x", cron=[])
    with pytest.raises(InvalidSchedule, match="cron must be a pattern as text, or a list of patterns, not"):
        make_spec("x", cron=cast(Any, [7]))
    with pytest.raises(InvalidSchedule, match=f"at most {PATTERNS_MAX} cron patterns"):
        make_spec("x", cron=[f"{minute} * * * *" for minute in range(PATTERNS_MAX + 1)])
    for wrong in ("2026-12-25", [datetime(2026, 12, 25, tzinfo=UTC)], ["2026-12-25"], 7):
        with pytest.raises(InvalidSchedule, match=r"exclude is a list of days, as \[date\(2026, 12, 25\)\], not"):
            make_spec("x", cron="@daily", exclude=cast(Any, wrong))
    with pytest.raises(InvalidSchedule, match="exclude belongs to cron"):
        make_spec("x", every=60, exclude=HOLIDAYS)
    with pytest.raises(InvalidSchedule, match="at most 1,000 excluded days"):
        make_spec("x", cron="@daily", exclude=[date(2026, 1, 1) + timedelta(days=n) for n in range(EXCLUDED_MAX + 1)])


@pytest.mark.promise("CRON-8", "CRON-5")
def test_a_changed_list_decides_the_next_fire_and_the_same_one_does_not() -> None:
    with Waypost("memory://several-rules") as post:
        rule: dict[str, Any] = {"queue": "reports", "key": "k", "cron": ["0 9 * * *", "0 21 * * *"]}
        first = post.save_schedule("rollup", **rule, exclude=HOLIDAYS)
        assert (first.cron, first.exclude) == ("0 9 * * *; 0 21 * * *", HOLIDAYS)
        assert post.save_schedule("rollup", **rule, exclude=HOLIDAYS[::-1]) == first
        assert first.next_fire is not None
        moved = post.save_schedule("rollup", **rule, exclude=[first.next_fire.date(), *HOLIDAYS])
        assert moved.next_fire is not None
        assert moved.next_fire > first.next_fire
        start, end = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 4, tzinfo=UTC)
        post.save_schedule("rollup", **rule, exclude=[date(2026, 3, 2)])
        assert counts(post.backfill("rollup", start, end)) == (4, 0, 0)
        post.save_schedule("rollup", **rule)
        assert counts(post.backfill("rollup", start, end)) == (2, 4, 0)


@pytest.mark.promise("CRON-8")
def test_a_past_rule_knows_its_excluded_days() -> None:
    old = make_spec("x", cron="0 9 * * *", exclude=[date(2026, 3, 2)])
    instants = [to_ms(datetime(2026, 3, day, 9, tzinfo=UTC)) for day in (1, 2, 3)]
    stored = StoredSchedule("x", "v", pack_spec(old), False, None, None, 2, 0, instants[-1])
    state = after_change(read_state(stored), stored.last_ms, old)
    stored = StoredSchedule("x", "v", pack_spec(make_spec("x", cron="0 9 * * *")), False, None, None, 2, 0, None, b"")
    fired = FiredInstants(state, stored)
    assert [instant in fired for instant in instants] == [True, False, True]
    assert read_state(StoredSchedule("x", "v", b"", False, None, None, state=pack_state(state))) == state


@pytest.mark.promise("CRON-8")
def test_a_spec_of_the_first_release_is_read_as_before() -> None:
    first_release = b"\x83\xa4name\xa6rollup\xa4cron\xa90 9 * * *\xa2tz\xadEurope/Madrid"
    spec = unpack_spec(first_release)
    assert (spec.cron, spec.exclude, spec.overlap) == ("0 9 * * *", (), "allow")
    assert pack_spec(make_spec("rollup", every=60)).find(b"exclude") == -1


@pytest.mark.promise("CRON-8", "CRON-7")
def test_a_decorator_takes_several_patterns() -> None:
    post = AsyncWaypost("memory://several-declared")

    @post.cron(["0 9 * * mon-fri", "0 12 * * sat"], exclude=HOLIDAYS)
    async def rollup() -> None: ...

    (declared,) = post._declared.values()
    assert (declared.spec.cron, declared.spec.exclude) == (
        "0 9 * * mon-fri; 0 12 * * sat", ("2026-12-25", "2027-01-01")
    )  # fmt: skip


@pytest.mark.promise("CRON-8", "FACE-2")
def test_commands_preview_and_save_several_patterns_and_excluded_days(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = ["0 9 * * mon-fri; 0 12 * * sat", "--exclude", "2026-12-25", "--start", "2026-12-24T00:00:00Z"]
    found = json.loads(run_command(capsys, "preview", *rule, "--count", "3", "--json"))
    assert [one["utc"] for one in found] == ["2026-12-24T09:00:00Z", "2026-12-26T12:00:00Z", "2026-12-28T09:00:00Z"]
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    save = ["save", "rollup", "--queue", "reports", "--url", url]
    run_command(capsys, *save, "--cron", rule[0], "--exclude", "2026-12-25", "--exclude", "2027-01-01")
    run_command(capsys, *save, "--jitter", "5")
    with Waypost(url) as post:
        (saved,) = post.schedules()
    assert (saved.cron, saved.exclude) == (rule[0], HOLIDAYS)
    assert "0 12 * * sat UTC but 2 days" in run_command(capsys, "list", url)
    run_command(capsys, *save, "--exclude", "none")
    with Waypost(url) as post:
        assert post.schedules()[0].exclude == []
