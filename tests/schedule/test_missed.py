"""What is fired after an outage: policies × outages, bounds, and steps that stay short."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from waypost.checks import DUE_MS_MAX
from waypost.errors import InvalidSchedule, SchemaTooNew
from waypost.policy import CHUNK_MESSAGES_MAX
from waypost.schedule.missed import DECISION_MS, Decision, decide
from waypost.schedule.rule import WALK_MAX, Fire, Spec, Timeline, fire_id, interval_ms, pack_spec, unpack_spec
from waypost.schedule.schedule import describe
from waypost.schedule.state import read_state
from waypost.values import StoredSchedule

T0 = 1_800_000_000_000
MINUTE = 60_000


def spec(missed: str = "skip", max_catchup: int = 0, **more: object) -> Spec:
    given: dict[str, object] = {"every_ms": MINUTE, "anchor_ms": T0, "grace_ms": 30_000} | more
    return Spec("rollup", missed=missed, max_catchup=max_catchup, **given)  # type: ignore[arg-type]


def decided(one: Spec, now_ms: int, *, expected: int = T0 + MINUTE, fired: int = 0) -> Decision:
    fire = Timeline("key", one).after(expected - 1)
    assert fire is not None
    found = decide(one, "key", fire, fired, now_ms)
    assert found is not None
    return found


def minutes(decision: Decision) -> list[int]:
    """The instants that fire, as minutes after the anchor."""
    return [(fire.instant_ms - T0) // MINUTE for fire in decision.fires]


@pytest.mark.promise("CRON-1")
def test_a_rule_ends_at_its_end_or_at_the_last_time_that_can_be_kept() -> None:
    end = Timeline("key", spec(end_ms=T0 + MINUTE))
    assert end.after(T0) == (T0 + MINUTE, T0 + MINUTE)
    assert end.after(T0 + MINUTE) is None
    last = Timeline("key", spec(anchor_ms=DUE_MS_MAX))
    assert last.after(DUE_MS_MAX - 1) == (DUE_MS_MAX, DUE_MS_MAX)
    assert last.after(DUE_MS_MAX) is None
    yearly = Timeline("key", spec(every_ms=None, cron="0 0 1 1 *"))
    assert yearly.after(T0) is not None
    assert yearly.after(DUE_MS_MAX) is None


@pytest.mark.promise("CRON-2", "CRON-4")
@pytest.mark.parametrize(("missed", "max_catchup"), [("skip", 0), ("once", 0), ("all", 10)])
def test_an_instant_that_the_rule_does_not_have_any_more_is_missed_and_the_schedule_goes_on(
    missed: str, max_catchup: int
) -> None:
    """As when the rules of a time zone change between two fires."""
    daily = spec(missed, max_catchup, every_ms=None, cron="0 9 * * *", tz="Europe/Madrid")
    following = Timeline("key", daily).after(T0)
    assert following is not None
    gone = Fire(following.instant_ms - 60 * MINUTE, following.due_ms - 60 * MINUTE)
    decision = decide(daily, "key", gone, 0, gone.due_ms + 5)
    assert decision is not None
    assert (decision.fires, decision.missed, decision.following) == ((), 1, following)
    assert decision.last_due_ms <= gone.due_ms + 5 <= decision.valid_until_ms
    ends = msgspec.structs.replace(daily, end_ms=gone.instant_ms)
    over = decide(ends, "key", gone, 0, gone.due_ms + 5)
    assert over is not None
    assert (over.fires, over.missed, over.following) == ((), 1, None)


@pytest.mark.promise("CRON-1", "CRON-4")
def test_an_instant_whose_jitter_has_grown_is_not_missed() -> None:
    jittered = spec(jitter_ms=MINUTE)
    fire = next(fire for fire in Timeline("key", jittered).walk(T0) if fire.due_ms > fire.instant_ms)
    decision = decide(jittered, "key", Fire(fire.instant_ms, fire.instant_ms), 0, fire.due_ms - 1)
    assert decision is not None
    assert (decision.fires, decision.missed, decision.following) == ((), 0, fire)


@pytest.mark.promise("CRON-1")
def test_an_interval_is_from_a_millisecond_to_ten_years() -> None:
    ten_years = 10 * 366 * 86_400
    assert (interval_ms(0.001), interval_ms(ten_years)) == (1, ten_years * 1000)
    for seconds in (0.0009995, ten_years + 0.001):
        with pytest.raises(InvalidSchedule, match="from a millisecond to ten years"):
            interval_ms(seconds)


@pytest.mark.promise("CRON-7")
def test_no_more_fires_are_listed_than_are_left() -> None:
    stored = StoredSchedule("key", "v1", pack_spec(spec(max_fires=5)), False, T0, T0, fires=3)
    assert len(describe("reports", stored, 10).next_fires) == 2
    assert len(describe("reports", stored, 1).next_fires) == 1


@pytest.mark.promise("CRON-4", "PUB-7")
def test_the_oldest_fires_of_a_step_can_be_a_step_of_their_own() -> None:
    whole = decided(spec("all", 10), T0 + 5 * MINUTE)
    assert minutes(whole) == [1, 2, 3, 4, 5]
    part = whole.first(2)
    assert minutes(part) == [1, 2]
    assert (part.last_due_ms, part.following) == (whole.fires[1].due_ms, whole.fires[2])
    assert (part.missed, part.valid_until_ms) == (whole.missed, whole.valid_until_ms)
    assert whole.first(5) is whole


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize("windows", [1, 3, 5])
@pytest.mark.parametrize("late_ms", [0, 29_999, 30_000, 30_001, 59_999])
@pytest.mark.parametrize(("missed", "most"), [("skip", 0), ("once", 0), ("all", 1), ("all", 2), ("all", 4), ("all", 9)])
def test_each_policy_after_each_outage(missed: str, most: int, late_ms: int, windows: int) -> None:
    decision = decided(spec(missed, most), T0 + windows * MINUTE + late_ms)
    newest = list(range(1, windows + 1))
    expected = {
        "skip": newest[-1:] if late_ms <= 30_000 else [],
        "once": newest[-1:],
        "all": newest[-most:] if most else [],
    }[missed]
    assert minutes(decision) == expected
    assert decision.missed == windows - len(expected)
    assert decision.following is not None
    assert decision.following.instant_ms == T0 + (windows + 1) * MINUTE


@pytest.mark.promise("CRON-4")
def test_nothing_is_decided_before_it_is_due() -> None:
    assert decide(spec(), "key", Fire(T0 + MINUTE, T0 + MINUTE), 0, T0 + MINUTE - 1) is None


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize(("fired", "expected"), [(0, [1, 2, 3]), (1, [1, 2]), (2, [1])])
def test_max_fires_holds_in_a_catch_up_as_if_all_had_fired_in_time(fired: int, expected: list[int]) -> None:
    decision = decided(spec("all", 9, max_fires=3), T0 + 5 * MINUTE, fired=fired)
    assert minutes(decision) == expected
    assert decision.following is None
    assert decision.missed == 0


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_nothing_fires_after_the_end(missed: str) -> None:
    decision = decided(spec(missed, 9, end_ms=T0 + 3 * MINUTE), T0 + 60 * MINUTE)
    assert minutes(decision) == {"skip": [], "once": [3], "all": [1, 2, 3]}[missed]
    assert decision.following is None


@pytest.mark.promise("CRON-4")
def test_a_decision_is_good_until_the_next_instant_or_the_end_of_the_grace() -> None:
    in_time = decided(spec(), T0 + MINUTE + 10)
    assert (in_time.last_due_ms, in_time.valid_until_ms) == (T0 + MINUTE, T0 + MINUTE + 30_000)
    long_grace = decided(spec(grace_ms=10 * MINUTE), T0 + MINUTE + 10)
    assert long_grace.valid_until_ms == T0 + 2 * MINUTE - 1
    late = decided(spec("once"), T0 + MINUTE + 40_000)
    assert late.valid_until_ms == T0 + 2 * MINUTE - 1
    short = decided(spec(every_ms=1), T0 + MINUTE + 10)
    assert short.valid_until_ms == T0 + MINUTE + 10 + DECISION_MS


@pytest.mark.promise("CRON-4")
@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_a_day_of_milliseconds_is_counted_without_walking_through_it(missed: str) -> None:
    one = spec(missed, 5, every_ms=1, grace_ms=1_000)
    now = T0 + 86_400_000
    decision = decided(one, now, expected=T0 + 1)
    assert len(decision.fires) == {"skip": 1, "once": 1, "all": 5}[missed]
    assert decision.missed + len(decision.fires) == 86_400_000
    assert decision.following is not None
    assert decision.following.instant_ms == now + 1


@pytest.mark.promise("CRON-4")
def test_an_end_in_the_middle_of_a_long_outage_is_kept() -> None:
    decision = decided(spec("all", 5, every_ms=1, end_ms=T0 + 5_000_000), T0 + 86_400_000, expected=T0 + 1)
    assert [fire.instant_ms - T0 for fire in decision.fires] == [4_999_996, 4_999_997, 4_999_998, 4_999_999, 5_000_000]
    assert decision.missed == 5_000_000 - 5
    assert decision.following is None


@pytest.mark.promise("CRON-4")
def test_a_long_outage_of_a_pattern_is_counted_in_several_short_steps() -> None:
    one = Spec("tick", cron="* * * * * *", missed="all", max_catchup=3)
    first = Timeline("key", one).after(T0)
    assert first is not None
    now, expected, missed, steps = first.instant_ms + 50_000_000, first, 0, 0
    while True:
        decision = decide(one, "key", expected, 0, now)
        assert decision is not None
        steps += 1
        missed += decision.missed
        assert decision.following is not None
        expected = decision.following
        if decision.fires:
            break
        assert decision.valid_until_ms == DUE_MS_MAX, "a slow walk makes the step stale, and so each one after it"
    assert steps == -(-(50_001 - WALK_MAX) // (WALK_MAX - CHUNK_MESSAGES_MAX)) + 1
    assert [fire.instant_ms for fire in decision.fires] == [now - 2_000, now - 1_000, now]
    assert missed == 50_001 - 3


@pytest.mark.promise("CRON-4")
def test_a_catch_up_after_a_long_outage_has_all_its_fires() -> None:
    one = Spec("tick", cron="* * * * * *", missed="all", max_catchup=500)
    now = T0 + 1_000 * (WALK_MAX + 1)
    first = Timeline("key", one).after(T0)
    assert first is not None
    step = decide(one, "key", first, 0, now)
    assert step is not None
    assert step.following is not None
    last = decide(one, "key", step.following, 0, now)
    assert last is not None
    assert (step.fires, len(last.fires), step.missed + last.missed) == ((), 500, WALK_MAX + 1 - 500)


@pytest.mark.promise("CRON-1")
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "-12:00"])
def test_a_rule_without_an_instant_before_the_end_of_time_never_fires(zone: str) -> None:
    end_of_time = 253_402_214_300_000
    one = Spec("late", cron="* * * * *", tz=zone, start_ms=end_of_time, exclude=("9999-12-30", "9999-12-31"))
    assert Timeline("key", one).after(T0) is None


@pytest.mark.promise("CRON-1")
@pytest.mark.parametrize("zone", ["UTC", "Europe/Madrid"])
def test_a_walk_through_several_patterns_finds_what_single_searches_find(zone: str) -> None:
    one = Spec("many", cron="*/20 * * * *; 30 2 * * *; 15 1-3 * * sun", tz=zone, exclude=("2026-03-28",))
    timeline = Timeline("key", one)
    begin = 1_774_566_000_000  # 26 March 2026: clocks go forward three days later
    walked = timeline.next_fires_after(begin, 400)
    after, searched = begin, []
    for _ in range(400):
        fire = timeline.after(after)
        assert fire is not None
        searched.append(fire)
        after = fire.instant_ms
    assert walked == searched


@pytest.mark.promise("CRON-4", "CRON-1")
def test_jitter_is_deterministic_and_stays_before_the_next_instant() -> None:
    one = spec(jitter_ms=10 * MINUTE)
    fires = Timeline("key", one).next_fires_after(T0, 200)
    assert fires == Timeline("key", one).next_fires_after(T0, 200)
    assert fires != Timeline("other", one).next_fires_after(T0, 200)
    dues = [fire.due_ms for fire in fires]
    assert dues == sorted(dues)
    assert all(fire.instant_ms <= fire.due_ms < fire.instant_ms + MINUTE for fire in fires)


@pytest.mark.promise("CRON-1")
def test_a_thousand_schedules_of_one_hour_do_not_fire_in_one_second() -> None:
    one = Spec("hourly", cron="0 * * * *", jitter_ms=300_000)
    seconds: dict[int, int] = {}
    for number in range(1_000):
        fire = Timeline(f"key {number}", one).after(T0)
        assert fire is not None
        seconds[fire.due_ms // 1_000] = seconds.get(fire.due_ms // 1_000, 0) + 1
    assert max(seconds.values()) < 20
    assert len(seconds) > 250


@pytest.mark.promise("CRON-6")
def test_the_id_of_a_fire_follows_from_schedule_and_instant() -> None:
    one = fire_id("reports", "rollup", "v1", T0)
    assert one == fire_id("reports", "rollup", "v1", T0)
    others = {
        fire_id("reports", "rollup", "v1", T0 + 1),
        fire_id("reports", "rollup", "v2", T0),
        fire_id("x", "rollup", "v1", T0),
    }
    assert len({one, *others}) == 4
    assert len(one) == 24


@pytest.mark.promise("CRON-5")
def test_a_spec_is_read_back_unchanged() -> None:
    one = spec(body=b"\0\xff", headers={"a": "b"}, tz="UTC")
    assert unpack_spec(pack_spec(one)) == one


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize(
    "newer", [{"flavor": "blue"}, {"overlap": "newest"}, {"missed": "newest"}, {"content": 9}, {"grace_ms": "long"}]
)
def test_a_spec_with_something_of_a_newer_release_is_not_read_without_it(newer: dict[str, Any]) -> None:
    with pytest.raises(SchemaTooNew, match="update waypost to use it"):
        unpack_spec(msgspec.msgpack.encode({"name": "rollup", "every_ms": 5} | newer))


@pytest.mark.promise("STORE-7")
@pytest.mark.parametrize("newer", [{"flavor": "blue"}, {"past": [[b"", [], 1]]}, {"since_ms": "now"}])
def test_a_state_with_something_of_a_newer_release_is_not_read_without_it(newer: dict[str, Any]) -> None:
    state = msgspec.msgpack.encode({"skipped": 2} | newer)
    with pytest.raises(SchemaTooNew, match=r"'rollup'.*update waypost to use it"):
        read_state(StoredSchedule("rollup", "v", b"", False, None, None, state=state))


@pytest.mark.promise("CRON-4")
def test_no_step_publishes_more_than_a_chunk() -> None:
    decision = decided(spec("all", CHUNK_MESSAGES_MAX, every_ms=10), T0 + 3_600_000, expected=T0 + 10)
    assert len(decision.fires) == CHUNK_MESSAGES_MAX


@pytest.mark.promise("PUB-12", "STORE-7")
def test_a_schedule_with_a_retry_policy_of_a_newer_release_is_listed_without_it() -> None:
    newer = Spec("rollup", every_ms=5, retry={"kind": "spiral", "attempts": 3})
    described = describe("reports", StoredSchedule("rollup", "v1", pack_spec(newer), False, 5, 5))
    assert (described.name, described.retry) == ("rollup", None)
