"""Each rule of the checker finds a history that breaks it, and lets the same history pass that keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulator.checker import Checker
from tests.simulator.handmade import PUBLISHER, QUEUE, WORKER, Handmade, envelope, id_of
from tests.simulator.history import QueueState, StoreStep
from tests.simulator.records import Finding
from tests.simulator.scenario import SchedulePlan
from tests.simulator.step_rules import COUNTED, StepChecker
from waypost.store.port import Woken
from waypost.values import Published

pytestmark = pytest.mark.promise("SEE-7")

#: Writes a history that breaks its rule, or one that differs from it only in that it does not.
Write = Callable[[Handmade, bool], None]
RULES: list[tuple[str, Write, dict[str, Any]]] = []


def rule(name: str, **made_with: Any) -> Callable[[Write], Write]:
    """Add two histories to the list of those that are judged."""

    def add(write: Write) -> Write:
        RULES.append((name, write, made_with))
        return write

    return add


@pytest.mark.parametrize(("name", "write", "made_with"), RULES, ids=[f"{n}-{w.__name__}" for n, w, _ in RULES])
def test_a_rule_finds_what_breaks_it_and_nothing_else(name: str, write: Write, made_with: dict[str, Any]) -> None:
    sound, broken = Handmade(**made_with), Handmade(**made_with)
    write(sound, False)
    assert list(map(str, sound.findings())) == []
    write(broken, True)
    assert name in {finding.rule for finding in broken.findings()}


# ---- publishing --------------------------------------------------------------------------------------------


def published(handmade: Handmade, name: str, id: str, status: str = "queued") -> None:
    call = handmade.call("publish", queue=QUEUE, label=name)
    handmade.answer(call, {"id": id, "status": status, "label": name, "queue": QUEUE})


@rule("lost")
def acknowledged(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    published(handmade, "a", id_of("b" if broken else "a"))


@rule("lost")
def acknowledged_for_another(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    published(handmade, "b", id_of("a"), "queued" if broken else "duplicate")


@rule("lost")
def lost_by_no_restart(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    published(handmade, "a", id_of("a"))
    handmade.restart(kept_step=0 if not broken else 1)
    if broken:
        published(handmade, "b", id_of("b"))


@rule("lost")
def answered_and_not_stored(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", stored=not broken)


@rule("lost")
def answered_with_the_id_of_another_step(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    result = Woken([Published(id_of("a"), "queued" if broken else "duplicate", QUEUE)], {})
    step = handmade.publish("b", stored=False)
    handmade.history.happenings[-1] = StoreStep(
        step.at, step.who, step.step, step.store_ms, step.verb, None, step.arguments, result, None, ()
    )


@rule("once")
def one_number_runs_twice(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", operation="s/1")
    handmade.publish("b", operation="s/1" if broken else "s/2")


@rule("once")
def one_id_is_stored_twice(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.publish("a" if broken else "b")


@rule("once")
def one_publish_makes_two_messages(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    step = handmade.publish("b")
    body = envelope("a" if broken else "b")
    events = tuple(handmade.event("published", "b", body=body) for _ in step.events)
    handmade.history.happenings[-1] = StoreStep(
        step.at, step.who, step.step, step.store_ms, "publish", None, step.arguments, step.result, None, events
    )


@rule("cap")
def more_than_may_wait(handmade: Handmade, broken: bool) -> None:
    handmade.configure(max_pending=2)
    handmade.publish("a", "b")
    if not broken:
        handmade.claim("a")
    handmade.publish("c")


@rule("keys")
def two_live_messages_of_a_key(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", key="k")
    if not broken:
        handmade.claim("a")
    handmade.publish("b", key="k", cause="parked", on_conflict="replace")


@rule("keys")
def stored_within_a_window(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", key="k", window_ms=5_000)
    handmade.claim("a")
    handmade.settle("a")
    handmade.wait(4.9 if broken else 5.0)
    handmade.publish("b", key="k")


@rule("expiry")
def claimed_after_its_expiry(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", expires_ms=-1_000)
    handmade.wait(1.5 if broken else 0.5)
    handmade.claim("a")


@rule("expiry")
def lapsed_too_early(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", expires_ms=-1_000)
    handmade.wait(0.5 if broken else 1.5)
    handmade.step("promote", handmade.event("dropped", "a", cause="lapsed"))


@rule("expiry")
def lapsed_while_it_runs(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", expires_ms=-1_000)
    handmade.claim("a")
    handmade.wait(1.5)
    if not broken:
        handmade.settle("a", "release", event=handmade.event("released", "a"))
    handmade.step("promote", handmade.event("dropped", "a", cause="lapsed"))


@rule("expiry")
def a_key_that_is_not_given_back(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", key="k", expires_ms=-1_000)
    handmade.wait(1.5 if broken else 0.5)
    duplicate = handmade.event("duplicate", "a", key="k")
    step = handmade.publish("b", key="k", stored=False, before=(duplicate,))
    result = Woken([Published(id_of("a"), "duplicate", QUEUE)], {})
    handmade.history.happenings[-1] = replace(step, result=result)
    if not broken:
        handmade.claim("a")


# ---- states ------------------------------------------------------------------------------------------------


@rule("journal")
def an_event_of_an_unknown_message(handmade: Handmade, broken: bool) -> None:
    if not broken:
        handmade.publish("a")
    handmade.step("cancel", handmade.event("cancelled", "a"))


@rule("journal")
def a_claim_without_an_event(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a", journalled=not broken)


@rule("journal")
def a_claim_that_is_not_answered(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a", answered=() if broken else ("a",))


@rule("no revival")
def claimed_after_it_was_done(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", "b")
    handmade.claim("a")
    handmade.settle("a")
    handmade.claim("a" if broken else "b")


@rule("no revival")
def a_dead_letter_ends_again(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a", "dead")
    if not broken:
        handmade.step("redrive", handmade.event("redriven", "a"))
    handmade.step("cancel", handmade.event("cancelled", "a"))


@rule("states")
def done_without_a_claim(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.step("purge", handmade.event("done" if broken else "cancelled", "a"))


@rule("states")
def returned_without_a_claim(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    if not broken:
        handmade.claim("a")
    handmade.fault("freeze", seconds=10.0)
    handmade.claim(before=(handmade.returns("a", "expired"),))


@rule("states")
def postponed_while_it_is_leased(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", key="k")
    if broken:
        handmade.claim("a")
    handmade.step("publish", handmade.event("postponed", "a", due_ms=handmade.store_ms + 1_000), result=Woken([], {}))


@rule("states")
def promoted_while_it_is_ready(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", due=None if broken else 1.0)
    handmade.wait(1.0)
    handmade.step("promote", handmade.event("promoted", "a", cause="due"))


@rule("states")
def claimed_while_it_waits(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", cause="blocked")
    unblocked = handmade.event("promoted", "a", cause="unblocked")
    handmade.claim("a", before=() if broken else (unblocked,))


@rule("states")
def redriven_while_it_is_ready(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    if not broken:
        handmade.claim("a")
        handmade.settle("a", "dead")
    handmade.step("redrive", handmade.event("redriven", "a"))


@rule("states")
def trimmed_while_it_is_ready(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    if not broken:
        handmade.claim("a")
        handmade.settle("a", "dead")
    handmade.step("purge", handmade.event("dead_trimmed", "a"))


@rule("states")
def a_cancel_is_requested_of_a_message_that_does_not_run(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    if not broken:
        handmade.claim("a")
    handmade.step("cancel", handmade.event("cancel_requested", "a"))


# ---- due times ---------------------------------------------------------------------------------------------


@rule("not early")
def claimed_before_it_is_due(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", due=5.0)
    handmade.wait(5.0)
    due = handmade.event("promoted", "a", cause="due")
    handmade.claim("a", before=() if broken else (due,))


@rule("not early")
def promoted_before_it_is_due(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", due=5.0)
    handmade.wait(4.999 if broken else 5.0)
    handmade.step("promote", handmade.event("promoted", "a", cause="due"))


@rule("not early")
def released_by_its_key_before_its_own_time(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a", key="k")
    handmade.claim("a")
    handmade.publish("b", key="k", cause="parked", due=5.0, on_conflict="replace")
    handmade.wait(4.0 if broken else 5.0)
    handmade.settle("a", more=(handmade.event("promoted", "b", cause="unparked"),))
    handmade.claim("b")


@rule("not early")
def a_message_without_a_delay_is_no_timer_after_a_step_back(handmade: Handmade, broken: bool) -> None:
    """Released by its key, it can be claimed at once, though the clock is before its publish."""
    handmade.publish("a", key="k")
    handmade.claim("a")
    handmade.publish("b", key="k", cause="parked", due=5.0 if broken else None, on_conflict="replace")
    handmade.fault("clock_step", "store", by=-3600.0)
    handmade.settle("a", more=(handmade.event("promoted", "b", cause="unparked"),))
    handmade.claim("b")


# ---- claims ------------------------------------------------------------------------------------------------


@rule("one holder")
def claimed_while_another_holds_it(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.fault("freeze", seconds=10.0)
    handmade.claim("a", before=() if broken else (handmade.returns("a", "expired"),))


@rule("tokens grow")
def a_token_is_given_twice(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a", "release", status="released", event=handmade.returns("a", "released"))
    handmade.claim("a", token=1 if broken else 2)


@rule("explained")
def a_claim_gives_another_cause(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a", "release", status="released", event=handmade.returns("a", "released"))
    handmade.claim("a", cause="expired" if broken else "released")


@rule("deliveries")
def a_claim_counts_wrongly(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a", deliveries=2 if broken else 1)


@rule("deliveries")
def handed_out_too_often(handmade: Handmade, broken: bool) -> None:
    handmade.configure(max_deliveries=1 if broken else 2)
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a", "retry", status="retried", event=handmade.returns("a", "retried"))
    handmade.claim("a")


@rule("deliveries")
def buried_too_soon(handmade: Handmade, broken: bool) -> None:
    handmade.configure(max_deliveries=2 if broken else 1)
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a", "retry", status="retried", event=handmade.returns("a", "retried"))
    handmade.claim(before=(handmade.event("dead", "a", reason="max_deliveries"),))


@rule("attempts")
def an_attempt_is_not_counted(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    event = handmade.returns("a", "retried", attempts=0 if broken else 1)
    handmade.settle("a", "retry", status="retried", event=event)


@rule("paused")
def claimed_while_the_queue_is_paused(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.step("pause", handmade.event("paused", None))
    if not broken:
        handmade.step("resume", handmade.event("resumed", None))
    handmade.claim("a")


@rule("max running")
def more_run_than_may(handmade: Handmade, broken: bool) -> None:
    handmade.configure(max_running=1)
    handmade.publish("a", "b")
    handmade.claim("a")
    if not broken:
        handmade.settle("a")
    handmade.claim("b")


@rule("rate")
def claimed_too_fast(handmade: Handmade, broken: bool) -> None:
    handmade.configure(rate_count=1, rate_per_ms=1_000)
    handmade.publish("a", "b")
    handmade.claim("a")
    handmade.wait(0.999 if broken else 1.0)
    handmade.claim("b")


@rule("order")
def a_message_that_came_first_is_left(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.publish("b")
    handmade.claim("b" if broken else "a")


@rule("order")
def a_higher_priority_is_left(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.publish("b", priority=9)
    handmade.claim("a" if broken else "b")


@rule("fence")
def a_repeated_claim_gives_back_what_another_holds(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a", operation="s/1")
    if broken:
        handmade.settle("a")
    handmade.claim(answered=("a",), operation="s/1")


# ---- leases ------------------------------------------------------------------------------------------------


@rule("lease end")
def a_lease_ends_too_early(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.fault("freeze", seconds=9.999 if broken else 10.0)
    handmade.claim(before=(handmade.returns("a", "expired"),))


@rule("lease end")
def a_renewed_lease_ends_too_early(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.wait(5.0)
    handmade.extend("a")
    handmade.fault("freeze", seconds=9.0 if broken else 10.0)
    handmade.claim(before=(handmade.returns("a", "expired"),))


@rule("fence")
def a_stale_settle_is_accepted(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.fault("freeze", seconds=10.0)
    handmade.claim("a", before=(handmade.returns("a", "expired"),), who=PUBLISHER)
    handmade.settle("a", token=1, status="done" if broken else "lost")


@rule("fence")
def the_settle_of_the_holder_is_refused(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a", status="lost" if broken else "done")


@rule("fence")
def a_stale_renewal_is_accepted(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.settle("a")
    handmade.extend("a", "ok" if broken else "lost")


@rule("cancel")
def a_renewal_does_not_report_a_requested_cancel(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.step("cancel", handmade.event("cancel_requested", "a", token=1))
    handmade.extend("a", "ok" if broken else "cancel")


@rule("cancel")
def a_handler_does_not_learn_of_a_cancel(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.step("cancel", handmade.event("cancel_requested", "a", token=1))
    handmade.wait(5.0)
    handmade.extend("a", "cancel")
    if not broken:
        handmade.notify("a", "cancel")
    handmade.wait(5.0)
    handmade.extend("a", "cancel")


@rule("renewal")
def a_lease_expires_though_nothing_was_wrong(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    if not broken:
        handmade.fault("freeze", seconds=9.0)
        handmade.wait(1.0)
    else:
        handmade.wait(10.0)
    handmade.claim(before=(handmade.returns("a", "expired"),))


@rule("drain")
def a_stop_does_not_give_back_what_it_claimed(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    if not broken:
        handmade.settle("a", "release", status="released", event=handmade.returns("a", "released"))
    handmade.stop_worker()
    handmade.wait(10.0)
    handmade.claim(before=(handmade.returns("a", "expired"),) if broken else ())


# ---- handlers ----------------------------------------------------------------------------------------------


@rule("start")
def a_handler_starts_without_a_claim(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    if not broken:
        handmade.claim("a")
    handmade.start("a")


@rule("start")
def a_handler_starts_after_its_lease(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.wait(10.2 if broken else 9.9)
    handmade.start("a")


@rule("one holder")
def a_handler_starts_twice_under_one_lease(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    if broken:
        handmade.start("a", who="other")


@rule("past lease")
def a_handler_goes_on_past_its_lease(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.wait(9.9)
    if not broken:
        handmade.notify("a")
    handmade.wait(1.0)
    handmade.end("a")


@rule("past lease")
def only_a_standstill_excuses_it(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.fault("lose_replies" if broken else "freeze", seconds=12.0)
    handmade.notify("a")
    handmade.end("a", "cancelled")


@rule("outcome")
def a_failed_run_is_settled_as_done(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.end("a", "fail")
    if broken:
        handmade.settle("a")
    else:
        handmade.settle("a", "retry", status="retried", event=handmade.returns("a", "retried"))


@rule("settle")
def a_run_is_not_settled(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.end("a")
    if not broken:
        handmade.settle("a")
    handmade.wait(6.0)
    handmade.claim()


# ---- what a settle sends on, chains, results ---------------------------------------------------------------


@rule("one step")
def sent_on_by_another_step(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.end("a", "then", sent_on=("b",))
    sent = handmade.event("published", "b", cause="forwarded", body=envelope("b"))
    if broken:
        handmade.publish("b", cause="forwarded", forwarded=True)
        handmade.settle("a")
    else:
        handmade.settle("a", more=(sent,))


@rule("one step")
def what_was_sent_on_is_lost(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.start("a")
    handmade.end("a", "then", sent_on=("b",))
    sent = handmade.event("published", "b", cause="forwarded", body=envelope("b"))
    handmade.settle("a", more=() if broken else (sent,))


def waited_for(handmade: Handmade, broken: bool, action: str) -> None:
    handmade.publish("a", chain=f"{QUEUE}/{id_of('a')}" if action == "wait_chain" else None)
    call = handmade.call(action, label="a", timeout=90.0)
    handmade.claim("a")
    handmade.settle("a")
    handmade.wait(50.0)
    handmade.answer(call, error="WaitTimeout" if broken else None)


@rule("results")
def a_wait_for_a_result_outlives_it(handmade: Handmade, broken: bool) -> None:
    waited_for(handmade, broken, "wait_result")


@rule("chains")
def a_wait_for_a_chain_outlives_it(handmade: Handmade, broken: bool) -> None:
    waited_for(handmade, broken, "wait_chain")


@rule("chains")
def a_chain_stays_open_though_all_have_ended(handmade: Handmade, broken: bool) -> None:
    handmade.begin_worker()
    handmade.publish("a", chain=f"{QUEUE}/{id_of('a')}")
    handmade.claim("a")
    handmade.settle("a")
    handmade.wait(300.0)
    chains = {id_of("a"): 1} if broken else {}
    handmade.finish({QUEUE: QueueState({}, {}, open_chains=chains)})


# ---- promptness, schedules, relays, the end ----------------------------------------------------------------


@rule("prompt")
def an_idle_worker_is_not_woken(handmade: Handmade, broken: bool) -> None:
    handmade.configure(lease_ms=30_000)
    handmade.begin_worker()
    handmade.wait(100.0)
    handmade.publish("a")
    handmade.wait(2.5 if broken else 1.5)
    handmade.claim("a", lease=30.0)
    handmade.wait(3.0)
    handmade.settle("a")


@rule("prompt")
def a_worker_that_has_stopped_is_not_idle(handmade: Handmade, broken: bool) -> None:
    handmade.configure(lease_ms=30_000)
    handmade.begin_worker()
    handmade.wait(20.0)
    if not broken:
        handmade.stop_worker()
    handmade.wait(100.0)
    handmade.publish("a")
    handmade.wait(2.5)
    handmade.claim("a", lease=30.0)
    handmade.wait(3.0)
    handmade.settle("a")


@rule("poll")
def a_poll_does_not_find_what_no_wake_up_announced(handmade: Handmade, broken: bool) -> None:
    handmade.configure(lease_ms=30_000)
    handmade.begin_worker()
    handmade.wait(100.0)
    handmade.fault("lose_notifications", seconds=1.0, share=1.0)
    handmade.publish("a")
    handmade.wait(26.0 if broken else 20.0)
    handmade.claim("a", lease=30.0)
    handmade.wait(10.0)
    handmade.settle("a")


TICK = SchedulePlan("tick", QUEUE, 30.0)


def fired(handmade: Handmade, name: str, instant: str) -> None:
    handmade.publish(name, verb="fire_schedule", schedule="tick", instant=instant, who=WORKER)


@rule("schedules")
def an_instant_fires_twice(handmade: Handmade, broken: bool) -> None:
    fired(handmade, "a", "2027-01-01T00:00:00Z")
    fired(handmade, "b", "2027-01-01T00:00:00Z" if broken else "2027-01-01T00:00:30Z")


@rule("schedules")
def only_a_trigger_may_be_at_the_instant_of_another(handmade: Handmade, broken: bool) -> None:
    for name in ("a", "b"):
        verb = "fire_schedule" if broken else "trigger_schedule"
        handmade.publish(name, verb=verb, schedule="tick", instant="2027-01-01T00:00:00Z")


@rule("schedules", schedules=(TICK,))
def fires_are_counted_wrongly(handmade: Handmade, broken: bool) -> None:
    fired(handmade, "a", "2027-01-01T00:00:00Z")
    next_ms = handmade.store_ms + 30_000
    handmade.finish({QUEUE: QueueState({}, {}, schedules={"tick": (next_ms, 2 if broken else 1, 0)})})


@rule("liveness", schedules=(TICK,))
def a_schedule_does_not_go_on(handmade: Handmade, broken: bool) -> None:
    next_ms = handmade.store_ms + 30_000
    handmade.wait(130.0 if broken else 20.0)
    handmade.finish({QUEUE: QueueState({}, {}, schedules={"tick": (next_ms, 0, 0)})})


@rule("liveness", schedules=(TICK,))
def only_a_full_queue_that_is_paused_holds_a_schedule_up(handmade: Handmade, broken: bool) -> None:
    handmade.configure(max_pending=2 if broken else 1)
    handmade.step("pause", handmade.event("paused", None))
    handmade.publish("a", cause="replace")
    next_ms = handmade.store_ms + 30_000
    handmade.wait(130.0)
    handmade.finish({QUEUE: QueueState({}, {}, schedules={"tick": (next_ms, 0, 0)})})


@rule("relay", relays=True)
def a_relayed_message_does_not_arrive(handmade: Handmade, broken: bool) -> None:
    handmade.publish("a")
    handmade.claim("a")
    handmade.publish("b" if broken else "a", queue="mails", who=WORKER, forwarded=True, capped=True, cause="forwarded")
    handmade.settle("a")


@rule("liveness")
def a_message_is_stuck(handmade: Handmade, broken: bool) -> None:
    handmade.begin_worker()
    handmade.publish("a")
    handmade.wait(1.0)
    if not broken:
        handmade.claim("a")
        handmade.settle("a")
    handmade.wait(250.0)
    handmade.finish()


@rule("liveness")
def a_lease_that_never_ends(handmade: Handmade, broken: bool) -> None:
    handmade.begin_worker()
    handmade.publish("a")
    handmade.claim("a")
    if not broken:
        handmade.start("a")  # its handler is still at work
        for _ in range(30):
            handmade.wait(9.0)
            handmade.extend("a")
    else:
        handmade.wait(270.0)
    handmade.finish()


# ---- the store's own records -------------------------------------------------------------------------------


def compared(broken: dict[str, Any], counts: dict[str, int] | None = None, balance: int = 0) -> list[Finding]:
    """What is found when the store's record of a leased message differs in this."""
    handmade = Handmade()
    handmade.publish("a")
    step = handmade.claim("a")
    record = {
        "state": "leased", "token": 1, "deliveries": 1, "attempts": 0, "envelope": envelope("a"),
        "lease_end_ms": step.store_ms + 10_000, "expires_ms": None,
    } | broken  # fmt: skip
    numbers = Counter({"published": 1, "claims": 1, "first_claims": 1} | (counts or {}))
    model = SimpleNamespace(
        messages={} if record["state"] is None else {id_of("a"): SimpleNamespace(**record)},
        counts=numbers,
        ledger=lambda: SimpleNamespace(balance=balance, unexplained=0),
    )
    checker = StepChecker()
    for one in handmade.history:
        assert isinstance(one, StoreStep)
        checker.observe_store(one, SimpleNamespace(_queues={QUEUE: model}) if one is step else None)
    return checker.findings


def test_records_that_agree_with_the_history_are_right() -> None:
    assert compared({}) == []


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ({"state": "ready"}, "states"),
        ({"state": None}, "states"),
        ({"token": 2}, "tokens grow"),
        ({"deliveries": 2}, "deliveries"),
        ({"expires_ms": 1}, "expiry"),
        ({"attempts": 1}, "attempts"),
        ({"envelope": b"other"}, "bodies"),
        ({"lease_end_ms": 0}, "renewal"),
    ],
)
def test_a_record_that_differs_from_its_history_is_found(broken: dict[str, Any], name: str) -> None:
    assert {finding.rule for finding in compared(broken)} == {name}


@pytest.mark.parametrize("count", COUNTED)
def test_a_counter_that_is_off_is_found(count: str) -> None:
    found = compared({}, {count: 7})
    assert {finding.rule for finding in found} == {"ledger"}
    assert f" 7 {count}" in found[0].sentence


def test_a_ledger_that_does_not_balance_is_found() -> None:
    assert {finding.rule for finding in compared({}, balance=1)} == {"ledger"}


def test_an_error_that_nothing_caught_is_found() -> None:
    handmade = Handmade()
    handmade.publish("a")
    checker = Checker(handmade.scenario)
    assert [one.rule for one in checker.judge(handmade.history, [{"message": "boom"}])] == ["unhandled"]


def test_every_rule_in_the_docs_has_a_history() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    section = text.split("## What is checked")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name.strip(" `") for row in rows for name in row.split(",")}
    assert documented == {name for name, _, _ in RULES} | {"bodies", "ledger", "unhandled"}
