"""The rules of advice, on facts made by hand: what each finds, what it leaves alone, and its measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import duckdb
import pytest
from msgspec import structs

from waypost import Waypost
from waypost.errors import InvalidInput
from waypost.policy import PolicyRecord
from waypost.spark.insight.advice import (
    TEXT_OF_VALUE,
    Advice,
    Bodies,
    Facts,
    FieldValue,
    GroupChange,
    ScheduledRun,
    rank,
    round_up_count,
    round_up_seconds,
    sql_text,
)
from waypost.spark.insight.advise import apply_advice, find_advice, judge
from waypost.spark.insight.facts import merge_partial, to_run
from waypost.spark.insight.history import Delivery
from waypost.spark.insight.lake_history import Change, find_never_claimed
from waypost.spark.insight.rules import BY_KIND, RULES

pytestmark = pytest.mark.promise("SPARK-6")
SECOND, DAY = 1_000, 86_400_000


def delivery(
    number: int | str, *, at: int, wait: int = 5, run: int = 100, outcome: str = "done", claim: int = 1, **more: Any
) -> Delivery:
    options = {"worker": "w1", "priority": 5, "group": None, "cause": None, **more}
    return Delivery(
        f"m{number}", claim, claimed_ms=at, wait_ms=wait, outcome=outcome, ended_ms=at + run, run_ms=run, **options
    )


def healthy(count: int = 300, **options: Any) -> list[Delivery]:
    return [delivery(f"h{number}", at=number * SECOND, **options) for number in range(count)]


def kinds(facts: Facts) -> list[str]:
    return [one.kind for one in find_advice(facts)]


def only(facts: Facts) -> Advice:
    (found,) = find_advice(facts)
    return found


def test_a_healthy_queue_gets_no_advice() -> None:
    facts = Facts("orders", deliveries=healthy(), run_events=[900, 900, 900], bodies=Bodies(300, 0, ()))
    assert find_advice(facts) == []
    assert find_advice(Facts("empty")) == []


def expiring(lease: int, expired: int = 20) -> list[Delivery]:
    """Runs up to the lease, and some beyond it that end at a later delivery."""
    rows = [delivery(number, at=number * SECOND, run=lease * (number % 10) // 10) for number in range(200)]
    for number in range(expired):
        at = 300 * SECOND + number * SECOND
        rows.append(delivery(f"x{number}", at=at, run=lease, outcome="expired"))
        rows.append(delivery(f"x{number}", at=at + lease, run=lease // 2, claim=2, cause="expired"))
    return rows


def test_a_lease_below_run_times_is_doubled() -> None:
    facts = Facts("orders", PolicyRecord(lease_ms=30_000), deliveries=expiring(30_000))
    found = only(facts)
    assert (found.kind, found.settings, found.before) == ("lease", {"lease": 60}, {"lease": 30.0})
    assert found.call == "post.configure('orders', lease=60)"
    assert found.undo == "post.configure('orders', lease=30.0)"
    assert found.figures["expired_then_done"] == 20
    assert found.measured == pytest.approx(20 / 240)


def test_the_type_is_named_that_nearly_all_of_the_problem_is_of() -> None:
    policy, rows = PolicyRecord(lease_ms=30_000), expiring(30_000)
    typed = [row._replace(type_name="shop.Large" if row.message_id.startswith("mx") else "shop.Small") for row in rows]
    found = only(Facts("orders", policy, deliveries=typed))
    assert found.title.endswith("; 20 of 20 are of type shop.Large")
    assert found.figures["expired_by_type"] == {"shop.Large": 20}
    mixed = [row._replace(type_name=f"shop.T{number % 3}") for number, row in enumerate(rows)]
    assert "of type" not in only(Facts("orders", policy, deliveries=mixed)).title
    assert "expired_by_type" not in only(Facts("orders", policy, deliveries=rows)).figures
    useless = [row._replace(type_name="shop.Old") for row in failing("ValueError", 20, 10)]
    assert only(Facts("orders", deliveries=[*healthy(), *useless])).title.endswith("180 of 180 are of type shop.Old")


def test_leases_that_end_by_crashes_are_not_too_short() -> None:
    crashes = [*healthy(), delivery("c", at=1, run=30_000, outcome="expired"), delivery("c", at=30_001, claim=2)]
    assert kinds(Facts("orders", PolicyRecord(lease_ms=30_000), deliveries=crashes * 20)) == []
    few = Facts("orders", PolicyRecord(lease_ms=30_000), deliveries=expiring(30_000, expired=9))
    assert kinds(few) == []


def test_what_was_before_a_change_of_the_setting_does_not_count() -> None:
    rows = expiring(30_000)
    changed = [Change(10**9, {"lease_ms": "60000"})]
    assert kinds(Facts("orders", PolicyRecord(lease_ms=60_000), changes=changed, deliveries=rows)) == []


def test_leases_of_workers_that_renew_them_end_by_crashes() -> None:
    """Runs beyond the lease ended done, so leases were renewed: a longer one would only delay what a crash leaves."""
    rows = [*expiring(30_000), *(delivery(f"r{n}", at=n * SECOND, run=90_000) for n in range(20))]
    assert kinds(Facts("orders", PolicyRecord(lease_ms=30_000), deliveries=rows)) == []


def failing(
    error: str, messages: int, deliveries: int, *, at: int = 0, days: int = 3, end: str = "dead"
) -> list[Delivery]:
    """Messages that fail again and again, spread over days."""
    rows = []
    for number in range(messages):
        for claim in range(1, deliveries + 1):
            is_last = claim == deliveries
            outcome = end if is_last else "retried"
            cause = None if claim == 1 else "retried"
            moment = at + number % days * DAY + number * 1_237 + claim * 10_000
            rows.append(
                delivery(f"{error}{number}", at=moment, outcome=outcome, claim=claim, error_type=error, cause=cause)
            )
    return rows


def test_retries_that_never_helped_are_limited_by_the_queue() -> None:
    facts = Facts("orders", deliveries=[*healthy(), *failing("ValueError", 20, 10)])
    found = only(facts)
    assert (found.kind, found.subject, found.settings) == ("retries", "ValueError", {"max_deliveries": 2})
    assert found.before == {"max_deliveries": 10}
    assert found.figures["retries"] == 180
    assert found.figures["attempts_wasted"] == 160
    assert (found.measured, found.expected) == (9.0, 1.0)
    assert found.title == "none of 180 retries after ValueError was successful, on 3 days"


@pytest.mark.parametrize("days", [1, 2])
def test_an_outage_of_a_day_is_no_reason_against_retries(days: int) -> None:
    assert kinds(Facts("orders", deliveries=[*healthy(), *failing("OSError", 200, 10, days=days)])) == []


def test_messages_that_are_still_retried_do_not_count_against_retries() -> None:
    still = failing("OSError", 200, 9, end="retried")
    assert kinds(Facts("orders", deliveries=[*healthy(), *still])) == []
    # At the limit a store buries a message at its next claim: its last delivery is recorded as retried.
    buried = failing("OSError", 200, 10, end="retried")
    assert only(Facts("orders", deliveries=[*healthy(), *buried])).figures["retries"] == 1_800


def test_a_retry_helps_if_its_message_is_done_at_a_later_attempt() -> None:
    later = [
        row for number in range(5)
        for row in (
            delivery(f"l{number}", at=1, outcome="retried", error_type="ValueError"),
            delivery(f"l{number}", at=2, outcome="retried", error_type="OSError", claim=2, cause="retried"),
            delivery(f"l{number}", at=3, claim=3, cause="retried"),
        )
    ]  # fmt: skip
    assert kinds(Facts("orders", deliveries=[*healthy(), *failing("ValueError", 20, 10), *later])) == []


def test_retries_that_help_other_errors_stay() -> None:
    helped = failing("OSError", 20, 10, at=5, end="done")
    found = only(Facts("orders", deliveries=[*failing("ValueError", 20, 10), *helped]))
    assert found.subject == "ValueError"
    assert not found.can_be_applied
    assert found.code == "@post.handler('orders', retry=ByException((ValueError, NoRetry())))"
    assert found.undo == ""
    assert kinds(Facts("orders", deliveries=failing("ValueError", 5, 10))) == []
    assert kinds(Facts("orders", PolicyRecord(max_deliveries=2), deliveries=failing("ValueError", 60, 2))) == []


def test_retries_that_come_together_need_jitter() -> None:
    together = [delivery(number, at=60_000 * (number // 50), wait=0, claim=2, cause="retried") for number in range(200)]
    found = only(Facts("orders", deliveries=[*healthy(), *together]))
    assert (found.kind, found.measured) == ("backoff", 1.0)
    assert found.code == "add jitter=0.5 to the retry policy of the handler of 'orders'"
    spread = [delivery(number, at=1_000 * number, claim=2, cause="retried") for number in range(200)]
    assert kinds(Facts("orders", deliveries=[*healthy(), *spread])) == []


def test_a_value_that_the_dead_share_is_named() -> None:
    values = (
        FieldValue("country", '"XX"', 40, 40),
        FieldValue("plan", '"free"', 500, 35),
        FieldValue("id", "7", 1, 1),
    )
    found = only(Facts("orders", bodies=Bodies(1_000, 45, values)))
    assert (found.kind, found.subject) == ("poison", 'country="XX"')
    assert found.title == '40 of 45 dead letters have country = "XX"'
    assert "from_json(text, 'map<string,string>')['country']" in found.evidence
    assert found.code.startswith("if body.get('country') == 'XX': return Dead('unsupported')")
    assert kinds(Facts("orders", bodies=Bodies(1_000, 10, (FieldValue("country", '"XX"', 10, 10),)))) == []
    all_die = Bodies(1_000, 900, (FieldValue("country", '"XX"', 600, 560),))
    assert kinds(Facts("orders", bodies=all_die)) == []


def poison(group: str | None, dead: int = 40, *, policy: PolicyRecord | None = None, **more: Any) -> Facts:
    values = (FieldValue("country", '"XX"', 40, dead, group, died_ms=500),)
    return Facts("orders", policy or PolicyRecord(), bodies=Bodies(1_000, 45, values), **more)


def test_the_group_of_a_value_that_the_dead_share_is_paused() -> None:
    found = only(poison("xx"))
    assert (found.group, found.settings, found.before) == ("xx", {"fair": True}, {"fair": False})
    assert found.call.splitlines() == ["post.configure('orders', fair=True)", "post.pause_group('orders', 'xx')"]
    assert found.undo.splitlines() == ["post.resume_group('orders', 'xx')", "post.configure('orders', fair=False)"]
    assert "return Dead('unsupported')" in found.code
    assert only(poison("xx", policy=PolicyRecord(order="group"))).call == "post.pause_group('orders', 'xx')"


@pytest.mark.parametrize(
    "facts",
    [
        poison(None),
        poison("xx", dead=36),
        poison("xx", policy=PolicyRecord(max_pending=10_000)),
        poison("xx", policy=PolicyRecord(group_max_pending=10_000)),
    ],
)
def test_messages_are_not_held_back_where_others_would_wait_or_be_refused(facts: Facts) -> None:
    found = only(facts)
    assert not found.can_be_applied
    assert found.call == found.code
    assert found.undo == ""


def test_a_group_that_is_paused_or_was_resumed_after_the_last_death_is_not_named_again() -> None:
    assert kinds(poison("xx", groups={"xx": GroupChange(400, True)})) == []
    assert kinds(poison("xx", groups={"xx": GroupChange(600, False)})) == []
    assert kinds(poison("xx", groups={"xx": GroupChange(400, False)})) == ["poison"]


def test_advice_is_applied_recorded_and_logged_with_its_undo() -> None:
    with Waypost("memory://") as post:
        post.publish("orders", 1, group="xx")
        done: list[Advice] = []
        found = only(poison("xx"))
        apply_advice(post, found, done.append)
        assert done == [found]
        (group,) = post.groups("orders").groups
        assert (group.group, group.paused) == ("xx", True)
        (action,) = post.actions().actions
        assert (action.via, action.action) == ("advice", "pause_group")
        assert action.python == "post.configure('orders', fair=True); post.pause_group('orders', 'xx')"
        assert action.undo is not None
        assert action.undo.text.endswith("post.resume_group('orders', 'xx'); post.configure('orders', fair=False)")
        # As the undo says.
        post.resume_group("orders", "xx")
        post.configure("orders", fair=False)
        assert not post.policy("orders").fair
        with post.receive("orders") as message:
            assert message is not None


def test_of_advice_that_is_refused_halfway_the_first_half_is_recorded() -> None:
    with Waypost("memory://") as post:
        done: list[Advice] = []
        found = structs.replace(only(poison("xx")), group="x" * 200)
        with pytest.raises(InvalidInput):
            apply_advice(post, found, done.append)
        (part,) = done
        assert (part.settings, part.group) == ({"fair": True}, "")


@pytest.mark.parametrize(
    ("value", "condition"), [("5", "== 5"), ('"5"', "== '5'"), ("true", "== True"), ("null", "is None")]
)
def test_a_shared_value_is_written_as_what_it_is(value: str, condition: str) -> None:
    values = (FieldValue("it's", value, 40, 40),)
    found = only(Facts("orders", bodies=Bodies(1_000, 45, values, TEXT_OF_VALUE)))
    assert found.title == f'40 of 45 dead letters have "it\'s" = {value}'
    assert f"""if body.get("it's") {condition}: return""" in found.code
    assert "from_json(to_json(value), 'map<string,string>')[('it' || chr(39) || 's')]" in found.evidence


def test_bodies_from_before_a_change_do_not_judge_it() -> None:
    values = (FieldValue("country", '"XX"', 40, 40),)
    advice = only(Facts("orders", bodies=Bodies(1_000, 45, values)))
    row = row_of(advice, "advised", 500)
    older = Facts("orders", bodies=Bodies(1_000, 45, values, since_ms=500), now_ms=900)
    assert judge(row, older).verdict == "too early"
    assert judge(row, replace(older, bodies=Bodies(1_000, 45, values, since_ms=501))).verdict == "still holds"
    assert judge(row, replace(older, bodies=Bodies(1_000, 0, (), since_ms=501))).verdict == "solved"


NAMES = ["plain", "", "it's", "'", "\\", "\\' OR 1=1 --", "a\\nb", "two\nlines", "${env:HOME}", "$.a", "tab\t", "ñ 😀"]


@pytest.mark.parametrize("text", NAMES)
def test_a_text_in_sql_has_no_character_that_means_something_else(text: str) -> None:
    literal = sql_text(text)
    with duckdb.connect() as connection:
        assert connection.sql(f"SELECT {literal}").fetchall() == [(text,)]
    assert not {"\\", "\n"} & set(literal)
    assert "''" not in literal or text == ""
    assert "${" not in literal


def test_a_wait_above_the_target_gets_workers_or_a_higher_limit() -> None:
    rows = []
    for number in range(400):
        start = number * 1_000
        rows.append(delivery(number, at=start, wait=start - number * 900, run=1_000))
    found = only(Facts("orders", deliveries=rows, target="p95 wait < 1s"))
    assert found.kind == "concurrency"
    assert found.figures["workers_needed"] == 2
    assert "start 2 workers instead of 1" in found.call
    limited = only(Facts("orders", PolicyRecord(max_running=1), deliveries=rows, target="p95 wait < 1s"))
    assert limited.settings == {"max_running": 2}
    assert limited.before == {"max_running": 1}
    assert kinds(Facts("orders", deliveries=rows)) == []
    assert kinds(Facts("orders", deliveries=healthy(), target="p95 wait < 1s")) == []


def starving() -> list[Delivery]:
    """A flood of one group, and others that wait behind it."""
    flood = [delivery(f"f{n}", at=500_000 + n * 100, wait=n * 100, group="big") for n in range(600)]
    small = [delivery(f"s{n}", at=520_000 + n * 1_000, wait=20_000, group=f"g{n % 3}") for n in range(30)]
    before = [delivery(f"b{n}", at=n * SECOND, group=f"g{n % 3}") for n in range(100)]
    return [*before, *flood, *small]


def test_groups_that_wait_behind_a_large_one_get_turns() -> None:
    before, flood, small = starving()[:100], starving()[100:700], starving()[700:]
    found = only(Facts("orders", deliveries=[*before, *flood, *small]))
    assert (found.kind, found.subject) == ("groups", "big")
    assert (found.settings, found.before) == ({"fair": True}, {"fair": False})
    assert kinds(Facts("orders", deliveries=[*before, *flood])) == []
    without = [row._replace(group=None) for row in flood]
    unnamed = only(Facts("orders", deliveries=[*before, *without, *small]))
    assert (unnamed.subject, unnamed.settings) == ("", {"fair": True})
    assert "behind messages without a group" in unnamed.title


def flooded(slow: int) -> list[Delivery]:
    """One slot: small messages every second, then 400 large ones at once; all run for 200 ms, or so many times it."""
    waiting = [(1_000 * n * slow, f"s{n}", f"g{n % 4}") for n in range(900)]
    waiting += [(100_000 * slow, f"f{n}", "big") for n in range(1_000)]
    rows, free = [], 0
    for ready, name, group in sorted(waiting):
        start = max(free, ready)
        free = start + 200 * slow
        rows.append(delivery(name, at=start, wait=start - ready, run=200 * slow, group=group))
    return rows


@pytest.mark.parametrize("slow", [1, 20])
def test_the_effect_of_turns_between_groups_comes_from_the_model(slow: int) -> None:
    """Where runs are long, a round of turns is long, too: advice expects that, and not the wait without a flood."""
    found = only(Facts("orders", deliveries=flooded(slow)))
    assert (found.kind, found.settings) == ("groups", {"fair": True})
    assert "by the model" in found.effect
    assert found.measured > 30_000 * slow
    assert 200 * slow <= found.expected <= 2_000 * slow


@pytest.mark.parametrize("policy", [PolicyRecord(fair=True), PolicyRecord(order="group")])
def test_groups_of_a_queue_that_takes_turns_wait_for_workers(policy: PolicyRecord) -> None:
    assert kinds(Facts("orders", policy, deliveries=starving())) == []


def test_turns_between_groups_are_judged_by_what_others_waited_since() -> None:
    row = row_of(only(Facts("orders", deliveries=starving())), "applied", 10**9)
    policy, changes = PolicyRecord(fair=True), [Change(10**9 + 1, {"fair": "True"})]
    since = [row._replace(claimed_ms=row.claimed_ms + 2 * 10**9) for row in starving()]
    facts = Facts("orders", policy, changes, [*starving(), *since], now_ms=3 * 10**9)
    assert judge(row, facts).verdict == "did not come true"
    prompt = [row if row.group == "big" else row._replace(wait_ms=300) for row in since]
    assert judge(row, replace(facts, deliveries=[*starving(), *prompt])).verdict == "came true"


def test_priorities_that_wait_behind_higher_ones_are_named() -> None:
    low = [delivery(f"l{n}", at=100_000 + n * SECOND, wait=90_000, priority=1) for n in range(60)]
    found = only(Facts("orders", PolicyRecord(rate_count=1, rate_per_ms=1), deliveries=[*healthy(), *low]))
    assert (found.kind, found.subject) == ("priorities", "1")
    assert found.measured == 90_000
    # A flood of a low priority that waits for itself is not passed by others.
    flood = [delivery(f"l{n}", at=100_000 + n * 200, wait=n * 200, priority=1) for n in range(600)]
    assert kinds(Facts("orders", deliveries=[*healthy(), *flood])) == []


def test_a_schedule_that_fires_before_its_last_run_has_ended_is_named() -> None:
    runs = [ScheduledRun("rollup", n * 60_000, 5, n * 60_000 + 90_000) for n in range(20)]
    found = only(Facts("orders", scheduled=runs, schedules={"rollup": 0.0}))
    assert (found.kind, found.subject, found.measured) == ("schedule", "rollup", 1.0)
    assert found.code.startswith("waypost schedules save rollup --queue orders --key rollup --every 120")
    assert kinds(Facts("orders", scheduled=runs[:5])) == []
    in_time = [ScheduledRun("rollup", n * 60_000, 5, n * 60_000 + 30_000) for n in range(20)]
    assert kinds(Facts("orders", scheduled=in_time)) == []


def spike(jitter_ms: int = 0) -> list[ScheduledRun]:
    """Twenty schedules at the same moments: each message waits for those before it."""
    return [
        ScheduledRun(f"s{k}", n * 3_600_000 + k * jitter_ms, 0 if jitter_ms else k * 1_000, n * 3_600_000 + 60_000)
        for n in range(5) for k in range(20)
    ]  # fmt: skip


def test_schedules_of_the_same_moment_get_jitter() -> None:
    schedules = {f"s{k}": 0.0 for k in range(20)}
    found = only(Facts("orders", deliveries=healthy(), scheduled=spike(), schedules=schedules))
    assert found.kind == "spike"
    assert found.jitter == dict.fromkeys(schedules, 90.0)
    assert found.jitter_before == schedules
    assert found.call.splitlines()[0] == "waypost schedules save s0 --queue orders --key s0 --jitter 90"
    assert found.undo.splitlines()[0].endswith("--jitter 0")
    assert kinds(Facts("orders", deliveries=healthy(), scheduled=spike(4_000), schedules=schedules)) == []


def test_jitter_is_a_small_part_of_the_interval_of_each_schedule() -> None:
    schedules = {f"s{k}": 0.0 for k in range(20)}
    often = [
        ScheduledRun(f"s{k}", n * (60_000 if k < 5 else 300_000), k * 1_000, None)
        for n in range(5) for k in range(20)
    ]  # fmt: skip
    found = next(one for one in find_advice(Facts("orders", scheduled=often, schedules=schedules)) if one.jitter)
    assert found.jitter == {name: 6.0 if name in {"s0", "s1", "s2", "s3", "s4"} else 30.0 for name in schedules}
    # A single message that waited for an hour does not make the jitter longer.
    odd = [run if number else ScheduledRun("s0", 0, 3_600_000, None) for number, run in enumerate(spike())]
    assert set(only(Facts("orders", scheduled=odd, schedules=schedules)).jitter.values()) == {90.0}


def test_partial_rows_of_a_message_of_a_schedule_are_one_run() -> None:
    names = ("schedule", "published_ms", "due_ms", "claimed_ms", "ended_ms")
    nothing: dict[str, Any] = {"message_id": "m", **dict.fromkeys(names)}
    first, claimed = nothing | {"schedule": "s", "published_ms": 5}, nothing | {"claimed_ms": 25}
    again, dead = nothing | {"claimed_ms": 900}, nothing | {"ended_ms": 950}
    (row,) = merge_partial([first, claimed, again, dead])
    assert to_run(row) == ScheduledRun("s", 5, 20, 950)
    assert to_run(first) == ScheduledRun("s", 5, None, None)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([("published", "ready", 5, None, 0)], [5]),
        ([("published", "delayed", 5, 50, 0)], [50]),
        ([("published", "delayed", 5, 500, 0)], []),
        ([("published", "waiting", 5, None, 0)], []),
        ([("published", "waiting", 5, None, 0), ("promoted", "ready", None, None, 0)], [70]),
        ([("published", "ready", 5, None, 0), ("claimed", "leased", None, None, 1)], []),
        ([("published", "ready", 5, None, 0), ("dead", "dead", None, None, 0)], []),
        ([("published", "ready", 5, None, 0), ("cancelled", "cancelled", None, None, 0)], []),
        ([("published", "ready", 5, None, 0), ("postponed", "delayed", None, None, 0)], []),
    ],
)  # fmt: skip
def test_only_messages_that_a_worker_could_claim_are_waiting(
    rows: list[tuple[str, str, int | None, int | None, int]], found: list[int]
) -> None:
    partial = [
        {"message_id": "m", "last_event": event, "state": state, "published_ms": published, "due_ms": due,
         "claimed": claimed, "last_ms": 70}
        for event, state, published, due, claimed in rows
    ]  # fmt: skip
    assert find_never_claimed(partial, 100) == found


def test_free_workers_that_poll_are_not_woken() -> None:
    found = only(Facts("orders", deliveries=healthy(wait=2_500)))
    assert (found.kind, found.measured) == ("wakeups", 2_500)
    assert "waypost doctor" in found.call


def test_a_time_to_keep_dead_letters_is_printed_and_never_applied() -> None:
    growing = [(n * DAY // 4, 1) for n in range(200)]
    found = only(Facts("orders", dead_changes=growing))
    assert not found.can_be_applied
    assert found.code.startswith("post.configure('orders', dead_keep=2592000)  # deletes letters")
    assert found.undo == ""
    # The last one came after 49.75 days: 79 are older than 30 of them.
    assert "are deleted for good: up to 79 at once" in found.effect
    assert kinds(Facts("orders", PolicyRecord(dead_keep_ms=1), dead_changes=growing)) == []
    purged = [*growing, *((190 * DAY // 4, -1) for _ in range(100))]
    assert kinds(Facts("orders", dead_changes=sorted(purged))) == []


def test_a_journal_that_one_interval_fills_gets_longer() -> None:
    found = only(Facts("orders", PolicyRecord(journal_max=10_000), run_events=[4_000, 9_000, 5_000], not_seen=7))
    assert found.settings == {"journal_max": 50_000}
    assert "7 were trimmed before they were loaded" in found.title
    assert kinds(Facts("orders", PolicyRecord(journal_max=10_000), run_events=[9_000])) == []


def test_every_rule_has_a_kind_of_its_own_and_measures_nothing_of_nothing() -> None:
    assert len(BY_KIND) == len(RULES) == 12
    facts = Facts("orders")
    for rule in RULES:
        measured = rule.measure(facts, "5")
        assert measured is None or rule.kind == "dead_keep"


def row_of(advice: Advice, record: str, at_ms: int = 0) -> dict[str, Any]:
    return {
        "id": advice.id, "kind": advice.kind, "queue": advice.queue, "subject": advice.subject, "title": advice.title,
        "record": record, "at_ms": at_ms, "measured": advice.measured, "expected": advice.expected,
    }  # fmt: skip


def test_past_advice_is_judged_by_what_came_since() -> None:
    before = Facts("orders", PolicyRecord(lease_ms=30_000), deliveries=expiring(30_000))
    advice = only(before)
    now = 10**9
    later = [row._replace(claimed_ms=row.claimed_ms + now) for row in healthy()]
    better = Facts("orders", PolicyRecord(lease_ms=60_000), deliveries=[*before.deliveries, *later], now_ms=2 * now)
    assert judge(row_of(advice, "applied", now - 1), better).verdict == "came true"
    assert judge(row_of(advice, "advised", now - 1), better).verdict == "solved"
    again = [row._replace(claimed_ms=row.claimed_ms + now) for row in expiring(30_000)]
    same = Facts("orders", PolicyRecord(lease_ms=60_000), deliveries=again, now_ms=2 * now)
    found = judge(row_of(advice, "applied", now - 1), same)
    assert found.verdict == "did not come true"
    assert found.after == pytest.approx(20 / 240)
    assert judge(row_of(advice, "advised", now - 1), same).verdict == "still holds"
    few = replace(better, deliveries=later[:110])
    rare = row_of(advice, "applied", now - 1) | {"measured": 0.01}
    assert judge(rare, few).verdict == "too early"
    assert judge(row_of(advice, "applied", now - 1), few).verdict == "came true"
    nothing = Facts("orders", PolicyRecord(lease_ms=60_000), deliveries=before.deliveries, now_ms=now)
    assert judge(row_of(advice, "applied", now - 1), nothing).verdict == "too early"


def test_settings_are_rounded_up_to_what_people_set() -> None:
    assert [round_up_seconds(ms) for ms in (900, 31_000, 61_000, 7_300_000)] == [1, 45, 90, 10_800]
    assert [round_up_count(count) for count in (1, 3, 60, 36_000)] == [1, 5, 100, 50_000]
    assert rank([3, 1, 2], 0.5) == 2
    assert rank([], 0.5) == 0
