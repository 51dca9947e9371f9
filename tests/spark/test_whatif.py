"""What-if: the model against runs of the real worker on a virtual clock, scenarios, and their answers. No Spark."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from tests.simulator.scenario import Step
from tests.spark.crashing_workers import overloaded_deliveries
from tests.spark.recorded_runs import poisson, record
from waypost.cli.commands.insight import format_answer
from waypost.errors import InvalidInput, InvalidPolicy
from waypost.policy import Constant, Exponential, Linear, NoRetry
from waypost.spark.insight.chart import Bar, draw_svg, draw_text
from waypost.spark.insight.history import (
    Delivery,
    History,
    build_history,
    find_crash_share,
    find_slowdown,
    scale_traffic,
)
from waypost.spark.insight.queue_model import Arrival, Attempt, Served, Settings, Surroundings, serve
from waypost.spark.insight.simulate import combine, describe
from waypost.spark.insight.whatif import (
    FIT_PART,
    Fit,
    Scenario,
    answer,
    check_fit,
    check_types,
    format_ms,
    interval,
    parse_retry,
    parse_target,
    parse_traffic,
    run_scenario,
    share_of,
    time_to_drain,
)

pytestmark = pytest.mark.promise("SPARK-10")
MONDAY_MS = 1_799_625_600_000


def steady() -> History:
    return record(poisson(Random(7), 500, every=0.5, seconds=1.6))


def bursts() -> History:
    random = Random(7)
    return record(
        [
            (5.0 + 60 * turn + number * 0.001, {"runs": [["ok", round(random.uniform(0.5, 2), 3)]]})
            for turn in range(8)
            for number in range(60)
        ]
    )


def priorities() -> History:
    random = Random(7)
    low = poisson(random, 300, every=0.8, seconds=2.5, priority=3)
    return record(low + poisson(random, 150, every=1.6, seconds=1.0, priority=8), workers=2, concurrency=2)


def retries_and_timers() -> History:
    random, plan = Random(7), []
    for at, options in poisson(random, 400, every=0.6, seconds=1.2):
        runs: list[Any] = options["runs"]
        if random.random() < 0.3:
            runs = [["fail", round(random.uniform(0.2, 1), 3)]] * random.randint(1, 3) + runs
        plan.append((at, {"runs": runs, **({"delay": 30.0} if random.random() < 0.2 else {})}))
    return record(plan, concurrency=3, quiet=300)


def second_worker_later() -> History:
    faults = [Step(1.0, "worker2", "stop", {}), Step(120.0, "worker2", "start", {})]
    return record(poisson(Random(7), 500, every=0.4, seconds=1.3), workers=2, concurrency=2, faults=faults)


def fair_groups() -> History:
    random = Random(7)
    small = poisson(random, 300, every=1.0, seconds=1.5)
    small = [(at, {**options, "group": f"g{number % 4}"}) for number, (at, options) in enumerate(small)]
    flood = [(60.0, {"runs": [["ok", 1.0]], "group": "big"}) for _ in range(200)]
    return record(sorted([*small, *flood], key=lambda one: one[0]), concurrency=3, settings={"fair": True}, quiet=300)


def ordered_groups() -> History:
    random = Random(7)
    plan = []
    for number, (at, options) in enumerate(poisson(random, 400, every=0.7, seconds=1.2)):
        runs = [["fail", 0.2], *options["runs"]] if number % 10 == 0 else options["runs"]
        plan.append((at, {"runs": runs, "group": f"g{random.randrange(3)}"}))
    return record(plan, concurrency=8, settings={"order": "group"}, quiet=300)


@pytest.mark.parametrize(
    "shape",
    [steady, bursts, priorities, retries_and_timers, second_worker_later, fair_groups, ordered_groups],
    ids=lambda shape: shape.__name__,
)
def test_the_model_repeats_the_waits_of_a_recorded_run(shape: Any) -> None:
    history = shape()
    fit = check_fit(history)
    assert fit.is_good, fit.text
    assert fit.observed_ms is not None
    assert fit.observed_ms > 1_000
    assert fit.model_ms == pytest.approx(fit.observed_ms, rel=FIT_PART)


def test_a_run_whose_waits_it_cannot_explain_gets_no_numbers() -> None:
    """The event loop of the worker was busy again and again: messages waited beside free slots."""
    stalls = [Step(20.0 + 60 * turn, "worker1", "stall", {"seconds": 25.0}) for turn in range(9)]
    history = record(poisson(Random(7), 400, every=1.5, seconds=0.4), faults=stalls)
    fit = check_fit(history)
    assert not fit.is_good
    assert "too far apart" in fit.text
    assert fit.text.startswith("model p95 ")
    assert answer(history, {0: run_scenario(history, Scenario(workers=2))}, fit).outcomes == ()


@pytest.mark.parametrize("load", [0.8, 1.1, 1.3])
def test_waits_after_crashes_get_no_numbers_and_the_same_overload_without_them_does(load: float) -> None:
    """More slots would help less than in a model whose workers do not crash: 2.4 s instead of 0 at a load of 1.1."""
    for seed in range(3):
        crashed = check_fit(build_history("orders", overloaded_deliveries(load=load, seed=seed)))
        assert not crashed.is_good
        assert "waited after a worker had crashed" in crashed.text
        whole = check_fit(build_history("orders", overloaded_deliveries(load=load, crashes=False, seed=seed)))
        assert whole.is_good, whole.text


def test_a_crash_after_which_few_messages_wait_is_part_of_the_history() -> None:
    rows = overloaded_deliveries(load=0.4, crashes=False, seconds=900)
    crash = rows[len(rows) // 2]._replace(worker="host:9:0", outcome="expired", ended_ms=0, run_ms=60_000)
    crash = crash._replace(ended_ms=crash.claimed_ms + 60_000)
    again = crash._replace(claim=2, worker="host:0:0", cause="expired", outcome="done", claimed_ms=crash.ended_ms,
                           wait_ms=0, run_ms=2_000, ended_ms=crash.ended_ms + 2_000)  # fmt: skip
    history = build_history("orders", [*(row for row in rows if row.message_id != crash.message_id), crash, again])
    assert history.crash_share == 0.0
    assert check_fit(history).is_good


def test_the_window_of_a_crash_ends_with_a_lease_that_was_renewed() -> None:
    calm = overloaded_deliveries(load=0.4, crashes=False, seconds=900)[0]
    begin, lease = calm.claimed_ms, 60_000
    crash = calm._replace(worker="host:9:0", outcome="expired", ended_ms=begin + 600_000)

    def waited(until_ms: int) -> Delivery:
        return calm._replace(message_id="m2", claimed_ms=begin + until_ms, wait_ms=5_000, ended_ms=begin + until_ms)

    assert find_crash_share([crash._replace(wait_ms=0), waited(30_000)], lease) == 0.0
    assert find_crash_share([crash._replace(wait_ms=0), waited(590_000)], lease) == 0.5


def test_too_few_claims_get_no_numbers() -> None:
    fit = check_fit(record(poisson(Random(7), 50, every=0.5, seconds=1.6)))
    assert fit.text == "only 50 claims were recorded, and 200 are needed"


@pytest.mark.parametrize(("concurrency", "workers"), [(3, 2), (6, 1)])
def test_what_it_predicts_for_other_workers_is_what_a_run_with_them_records(concurrency: int, workers: int) -> None:
    plan = poisson(Random(10), 600, every=0.4, seconds=1.9)
    history = record(plan, concurrency=5)
    predicted = run_scenario(history, Scenario(workers=workers, concurrency=concurrency))
    recorded = record(plan, concurrency=concurrency, workers=workers)
    assert predicted.slots == concurrency * workers
    assert predicted.p95_ms == pytest.approx(share_of(recorded.wait_ms, 0.95), rel=FIT_PART)
    assert predicted.p95_low_ms <= predicted.p95_ms <= predicted.p95_high_ms


def test_it_finds_how_many_messages_a_worker_runs_at_once() -> None:
    history = bursts()
    assert (history.workers.count, history.workers.concurrency) == (1, 4)
    assert (priorities().workers.count, priorities().workers.concurrency) == (2, 2)


def test_a_target_gives_the_fewest_workers() -> None:
    history = record(poisson(Random(11), 600, every=0.4, seconds=1.9), concurrency=2, workers=3)
    found = run_scenario(history, Scenario(target="p95 wait < 1s"))
    assert found.reached
    assert found.p95_ms < 1_000
    assert run_scenario(history, Scenario(workers=found.workers - 1)).p95_ms >= 1_000
    never = run_scenario(history, Scenario(target="p95 wait < 1ms", policy={"max_running": 1}))
    assert never.reached is False


def test_twice_the_traffic_waits_longer_and_a_longer_retry_pause_less_often_fails() -> None:
    history = retries_and_timers()
    present, twice = (run_scenario(history, Scenario(workers=2, traffic=traffic)) for traffic in ("1x", "2x"))
    assert twice.claims == 2 * present.claims
    assert twice.p95_ms > present.p95_ms
    without = run_scenario(history, Scenario(retry="none"))
    assert without.dead > present.dead == 0
    assert without.claims < present.claims


def test_it_finds_when_the_backlog_is_gone() -> None:
    arrivals = [Arrival(10 * number, (Attempt(30),)) for number in range(400)]
    rows = [
        Delivery(f"m{number}", 1, "w", 5, None, None, 10 * number, 0, "done", 10 * number + 30, 30)
        for number in range(400)
    ]
    history = build_history("orders", rows, never_claimed_ms=[3_990] * 60)
    # Six slots serve twice what arrives: half of them is left for the 60 messages, 30 ms each.
    found = run_scenario(history, Scenario(workers=1, concurrency=6))
    assert found.backlog_gone_ms == pytest.approx(60 * 30 / 3, rel=0.2)
    assert run_scenario(history, Scenario(workers=1, concurrency=2)).backlog_gone_ms is None
    assert time_to_drain(build_history("orders", rows), arrivals, history.present()) == 0


def test_slots_are_busy_for_the_part_of_the_time_that_they_run() -> None:
    rows = [
        Delivery(f"m{number}", 1, "w", 5, None, None, 100 * number, 0, "done", 100 * number + 50, 50)
        for number in range(400)
    ]
    history = build_history("orders", rows)
    assert run_scenario(history, Scenario(workers=1, concurrency=1)).busy == pytest.approx(0.5, rel=0.01)
    assert run_scenario(history, Scenario(workers=2, concurrency=2)).busy == pytest.approx(0.125, rel=0.01)
    paused = build_history("orders", rows, pauses=[(39_990, 2**53)])
    assert run_scenario(paused, Scenario(workers=1, concurrency=1)).busy == pytest.approx(0.5, rel=0.01)


def test_traffic_of_one_day_of_the_week_is_doubled_between_its_own_messages() -> None:
    day = 86_400_000
    arrivals = [Arrival(MONDAY_MS + day * number // 4, (Attempt(1),)) for number in range(28)]
    scaled = scale_traffic(arrivals, parse_traffic("friday=2x"))
    assert len(scaled) == 32
    friday = [one.ready_ms for one in scaled if MONDAY_MS + 4 * day <= one.ready_ms < MONDAY_MS + 5 * day]
    assert len(friday) >= 7
    assert [one.ready_ms for one in scaled] == sorted(one.ready_ms for one in scaled)
    assert 10 <= len(scale_traffic(arrivals, parse_traffic("0.5x"))) <= 18


def typed() -> list[Delivery]:
    """Small messages, and one large one in five that runs twenty times as long; half of the large ones fail once."""
    rows = []
    for number in range(500):
        large, at = number % 5 == 0, 100 * number
        more = {"type_name": "shop.Large" if large else "shop.Small"}
        run = 400 if large else 20
        if number % 10 == 0:
            rows.append(
                Delivery(f"m{number}", 1, "w", 5, None, None, at, 0, "retried", at + 50, 50, None, "OSError", **more)
            )
            rows.append(
                Delivery(f"m{number}", 2, "w", 5, None, "retried", at + 60, 0, "done", at + 60 + run, run, **more)
            )
        else:
            rows.append(Delivery(f"m{number}", 1, "w", 5, None, None, at, 0, "done", at + run, run, **more))
    return rows


def test_run_times_are_by_type_where_the_types_of_messages_are_known() -> None:
    history = build_history("orders", typed())
    large, small = history.types
    assert (large.type_name, large.messages, large.deliveries, large.failed) == ("shop.Large", 100, 150, 50)
    assert (small.type_name, small.messages, small.failed) == ("shop.Small", 400, 0)
    assert (large.run_p95_ms, small.run_p95_ms) == (400, 20)
    outcome = run_scenario(history, Scenario(workers=1, concurrency=1))
    assert [(one.type_name, one.claims) for one in outcome.types] == [("shop.Large", 150), ("shop.Small", 400)]
    found = answer(history, {0: outcome}, Fit(1.0, 1.0, 550))
    text = format_answer(found, by_type=True)
    assert "as recorded" in text
    assert "shop.Large" in text
    assert "shop.Large" not in format_answer(found)
    unknown = build_history("orders", [row._replace(type_name=None) for row in typed()])
    assert unknown.types == ()
    assert "ingest them" in format_answer(answer(unknown, {}, Fit(1.0, 1.0, 550)), by_type=True)


def test_traffic_of_one_type_is_scaled_and_an_unknown_type_refused() -> None:
    history = build_history("orders", typed())
    factors = parse_traffic("2x,type:shop.Large=3x")
    assert factors == {None: 2.0, "shop.Large": 3.0}
    check_types(history, factors)
    scaled = Counter(one.type_name for one in scale_traffic(history.arrivals, factors))
    assert scaled == {"shop.Large": 600, "shop.Small": 800}
    with pytest.raises(InvalidInput, match=r"no message of type 'Huge' was recorded.*types are shop.Large, shop.Small"):
        check_types(history, parse_traffic("type:Huge=2x"))
    unknown = build_history("orders", [row._replace(type_name=None) for row in typed()])
    with pytest.raises(InvalidInput, match=r"no type is known.*pipeline ingest"):
        check_types(unknown, factors)


def test_attempts_that_were_never_made_are_drawn_from_those_of_the_same_type() -> None:
    history = build_history("orders", typed())
    pool = history.surroundings.followers_by_type["shop.Large", "OSError"]
    assert {attempt.run_ms for attempt in pool} == {400}
    failing = [Arrival(0, (Attempt(10, "failed", error="OSError"),), type_name=name) for name in ("a", None)]
    around = Surroundings(
        followers={"OSError": (Attempt(5),)}, followers_by_type={("a", "OSError"): (Attempt(700),)}
    )  # fmt: skip
    settings = Settings.of(2, retry=Constant(pause=1, attempts=4, jitter=0))
    assert serve(failing, settings, around).busy_ms == 10 + 700 + 10 + 5


def test_run_times_that_grow_with_the_load_are_found_and_chance_is_not() -> None:
    random = Random(3)
    loads = [random.randint(1, 6) for _ in range(600)]
    grows = [(load, round(100 * (1 + 0.5 * (load - 1)) * random.uniform(0.8, 1.2))) for load in loads]
    assert find_slowdown(grows) == pytest.approx(0.5, abs=0.05)
    assert find_slowdown([(load, round(random.expovariate(1 / 100))) for load in loads]) == 0
    assert find_slowdown(grows[:100]) == 0


def test_an_interval_comes_from_drawing_days_again() -> None:
    served, day = Served(), 86_400_000
    for number in range(10):
        for _ in range(100):
            served.ready_ms.append(number * day)
            served.wait_ms.append(1_000.0 if number % 2 else 3_000.0)
    low, high = interval(served, 0.4)
    assert low == pytest.approx(1_000, rel=0.01)
    assert high == pytest.approx(3_000, rel=0.01)


def test_retry_policies_traffic_and_targets_are_read_from_texts() -> None:
    assert parse_retry("exponential:attempts=5,first=2") == Exponential(attempts=5, first=2)
    assert parse_retry("linear:step=3s") == Linear(step=3)
    assert parse_retry("constant") == Constant()
    assert parse_retry("none") == NoRetry()
    assert parse_traffic("1.5x,fri=2") == {None: 1.5, 4: 2.0}
    assert parse_target("p95 wait < 5s") == (0.95, 5_000)
    assert parse_target("p99<250ms") == (0.99, 250)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retry": ["often"]}, "a retry policy is one of exponential, linear, constant, none"),
        ({"retry": ["constant:speed=3"]}, "constant takes attempts, jitter, total_cap, pause as NAME=VALUE"),
        ({"retry": ["linear:step=fast"]}, "step of linear is a number, not 'fast'"),
        ({"traffic": ["twice"]}, "traffic is a factor, as in 2x or friday=2x, not 'twice'"),
        ({"traffic": ["someday=2x"]}, "traffic of a day is as in friday=2x, not 'someday=2x'; of a type as in type:"),
        ({"traffic": ["0x"]}, "traffic is a factor from 0 to 1000, not 0x"),
        ({"target": "fast"}, "a target is as in 'p95 wait < 5s', not 'fast'"),
        ({"workers": [0]}, "workers is from 1 to 4,096, not 0"),
        ({"workers": [2], "target": "p95 wait < 5s"}, "a target finds the number of workers"),
        ({"workers": range(1, 1002)}, "these are 1,001 combinations of settings"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    names = ("workers", "concurrency", "lease", "retry", "traffic", "max_running", "rate")
    with pytest.raises(InvalidInput, match=text.replace("(", r"\(")):
        combine(**{**dict.fromkeys(names, ()), **options})


def test_a_setting_of_the_queue_is_validated_as_configure_does() -> None:
    names = ("workers", "concurrency", "retry", "traffic", "max_running", "rate")
    others: dict[str, Any] = dict.fromkeys(names, ())
    with pytest.raises(InvalidPolicy, match="lease"):
        combine(lease=[-1], **others)


def test_scenarios_are_all_combinations_and_described_by_what_they_change() -> None:
    given: dict[str, Any] = dict.fromkeys(("concurrency", "max_running", "rate"), ())
    found = combine(workers=[1, 2], lease=[30.0, 60.0], retry=["none"], traffic=["2x"], **given)
    assert describe(found[0]) == "1 workers, lease 30, retry none, traffic 2x"
    assert len(found) == 4
    assert describe(Scenario()) == "as it is"


def test_a_chart_has_a_bar_for_each_outcome_and_no_markup_from_names() -> None:
    bars = [Bar("observed", 4_000, 4_000, 4_000, is_present=True), Bar("<b> & 8 workers", 900, 700, 1_200)]
    svg = draw_svg('p95 wait of "<orders>"', "model p95 4 s", bars, 1_000)
    assert svg.count("<rect") == 2
    assert "&lt;b&gt; &amp; 8 workers" in svg
    assert "<b>" not in svg
    lines = draw_text(bars, 80)
    assert lines[0].startswith("observed")
    assert lines[1].endswith("900 ms (700 ms to 1.2 s)")
    assert lines[0].count("█") > lines[1].count("█") > 0
    assert all(len(line) <= 80 for line in lines)
    assert draw_text([]) == []


def test_durations_are_written_as_people_read_them() -> None:
    given = (0.4, 999, 1_200, 41_000, 150_000, 9_000_000)
    assert [format_ms(one) for one in given] == ["0 ms", "999 ms", "1.2 s", "41 s", "2.5 min", "2.5 h"]
