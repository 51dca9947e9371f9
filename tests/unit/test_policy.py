"""Settings, names, times and retry policies: pure numbers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypost import checks, policy
from waypost.errors import InvalidName, InvalidPolicy, InvalidTime
from waypost.policy import Constant, Exponential, Linear, NoRetry, PolicyRecord, policy_changes


@pytest.mark.promise("QUEUE-2")
@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"lease": 30}, {"lease_ms": 30_000}),
        ({"lease": timedelta(minutes=1)}, {"lease_ms": 60_000}),
        ({"lease": None}, {"lease_ms": None}),
        ({"max_deliveries": None, "max_pending": 5}, {"max_deliveries": None, "max_pending": 5}),
        ({"rate": "100/m"}, {"rate_count": 100, "rate_per_ms": 60_000}),
        ({"rate": None}, {"rate_count": None, "rate_per_ms": None}),
        ({"overload": "block", "journal": "full"}, {"overload": "block", "journal": "full"}),
        ({"dead_keep": 0.5, "dead_max": 3}, {"dead_keep_ms": 500, "dead_max": 3}),
        ({"completed": True}, {"completed_max": 1_000}),
        ({"completed": False}, {"completed_max": 0}),
        ({"completed": 7, "journal_max": 9}, {"completed_max": 7, "journal_max": 9}),
    ],
)
def test_settings_become_fields_of_a_policy(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    assert policy_changes(settings) == changes
    changed = PolicyRecord().changed(changes)
    assert {name: getattr(changed, name) for name in changes} == changes


@pytest.mark.parametrize(
    "settings",
    [
        {"unknown": 1}, {"lease": 0}, {"lease": "long"}, {"lease": True}, {"lease": float("nan")}, {"max_pending": 0},
        {"max_deliveries": 1.5}, {"max_running": True}, {"overload": "panic"}, {"journal": "some"}, {"rate": 5},
        {"rate": "5"}, {"rate": "0/s"}, {"rate": "5/0s"}, {"rate": "5/d"}, {"journal_max": None}, {"completed": -1},
        {"dead_keep": -1},
    ],
)  # fmt: skip
def test_an_invalid_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy):
        policy_changes(settings)


@pytest.mark.parametrize(("text", "rate"), [("5/s", (5, 1_000)), ("10/500ms", (10, 500)), ("7/2h", (7, 7_200_000))])
def test_a_rate_is_a_count_per_time(text: str, rate: tuple[int, int]) -> None:
    assert policy.parse_rate(text) == rate


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("name", ["orders", "0", "a.b_c:d-e", "x" * 128])
def test_a_valid_queue_name_is_kept(name: str) -> None:
    assert checks.check_queue(name) == name


@pytest.mark.promise("PUB-8")
@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "ä", "a{b}", "a/b", "a\n", "x" * 129, None, 7])
def test_a_bad_queue_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName, match="queue name"):
        checks.check_queue(name)


@pytest.mark.promise("STORE-6")
@pytest.mark.parametrize("name", ["", "0a", "a.b", "x" * 49, None])
def test_a_bad_namespace_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName, match="namespace"):
        checks.check_namespace(name)
    assert checks.check_namespace("wp-1_a") == "wp-1_a"


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 11, "\ud800", None, b"a"])
def test_a_bad_text_is_refused_and_quoted_cut(text: Any) -> None:
    with pytest.raises(InvalidName) as caught:
        checks.check_text("key", text, 10)
    assert len(str(caught.value)) < 200
    assert checks.check_text("key", "schlüssel", 10) == "schlüssel"


@pytest.mark.promise("TIMER-1")
@pytest.mark.parametrize(
    ("delay", "at", "due"),
    [
        (None, None, (0, None)),
        (1.5, None, (1500, None)),
        (timedelta(days=3650), None, (315_360_000_000, None)),
        (-5, None, (0, None)),
        (None, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), (0, 1000)),
        (None, datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), (0, 0)),
        (None, datetime(1960, 1, 1, tzinfo=UTC), (0, 0)),
    ],
)
def test_a_due_time_is_a_delay_or_a_moment(delay: Any, at: Any, due: tuple[int, int | None]) -> None:
    assert checks.due_ms(delay, at) == due


@pytest.mark.promise("TIMER-1")
@pytest.mark.parametrize(
    ("delay", "at"),
    [
        (1, datetime(2030, 1, 1, tzinfo=UTC)),
        (None, datetime(2030, 1, 1)),  # noqa: DTZ001
        (None, "2030-01-01"),
        ("1", None),
        (True, None),
        (float("nan"), None),
        (float("inf"), None),
        (1e15, None),
    ],
)
def test_an_invalid_due_time_is_refused(delay: Any, at: Any) -> None:
    with pytest.raises(InvalidTime):
        checks.due_ms(delay, at)


# ---- retry ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("LEASE-9")
@pytest.mark.parametrize(
    ("retry", "pauses"),
    [
        (Exponential(jitter=0, attempts=5), [1, 2, 4, 8, None]),
        (Exponential(jitter=0, attempts=4, first=100, factor=3), [100, 300, 300, None]),
        (Linear(jitter=0, attempts=4, step=5, cap=12), [5, 10, 12, None]),
        (Constant(jitter=0, attempts=3, pause=7), [7, 7, None]),
        (Constant(attempts=1), [None]),
        (NoRetry(), [None]),
    ],
)
def test_a_retry_policy_counts_its_pauses(retry: Any, pauses: list[float | None]) -> None:
    assert [retry.delay(attempt) for attempt in range(1, len(pauses) + 1)] == pauses


@pytest.mark.promise("LEASE-9")
def test_exponential_pauses_grow_up_to_the_cap_however_slowly_and_far() -> None:
    slow = Exponential(jitter=0, attempts=2**31, factor=1.05)
    assert [slow.delay(101), slow.delay(1000)] == pytest.approx([1.05**100, 300])
    fast = Exponential(jitter=0, attempts=2**31, factor=10**9)
    assert (fast.delay(2), fast.delay(61), fast.delay(2**31 - 1)) == (300, 300, 300)
    assert Exponential(jitter=0, attempts=2**31, factor=10**9, first=0).delay(61) == 0


@pytest.mark.promise("LEASE-9")
@given(st.integers(1, 10_000))
def test_jitter_stays_within_its_share(attempt: int) -> None:
    pause = Exponential(attempts=100_000).delay(attempt)
    assert pause is not None
    base = min(300.0, 2.0 ** min(attempt - 1, 60))
    assert 0.8 * base <= pause <= 1.2 * base
