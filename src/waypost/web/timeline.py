"""The history of a message as steps in words, and as spans of time that can be drawn to scale. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from waypost.formatting import format_age
from waypost.web.documents import Span, SpanKind, Step, Timeline
from waypost.web.figures import HistoryEvent

#: What each redelivery was caused by, in words.
CAUSES = {
    "expired": "because its lease expired: the worker crashed, froze or lost the store",
    "released": "because its worker gave it back",
    "retried": "because its handler failed",
    "snoozed": "because its handler asked for it later",
    "redriven": "because its dead letter was redriven",
}
#: The events that end a running span, and those after which a message is not in the queue any more.
RUN_ENDS = frozenset(("done", "retried", "snoozed", "released", "expired", "dead", "dropped", "cancelled", "replaced"))
ENDS = frozenset(("done", "dead", "dropped", "cancelled", "replaced", "dead_trimmed"))
SPAN_TEXTS: dict[SpanKind, str] = {"delayed": "not due yet", "ready": "waiting for a worker", "running": "running"}


def make_timeline(events: Sequence[HistoryEvent], now: datetime) -> Timeline:
    """The timeline of a message from its events, in order. `now` ends the span that it is in."""
    steps = [step_of(event, before) for event, before in zip(events, [None, *events], strict=False)]
    return Timeline(steps=steps, spans=spans_of(events, now), whole=bool(events) and events[0].event == "published")


def step_of(event: HistoryEvent, before: HistoryEvent | None) -> Step:
    """One event in words."""
    return Step(
        at=event.at,
        event=event.event,
        text=describe(event, before),
        cause=event.cause,
        worker=event.worker,
        token=None if event.token is None else str(event.token),
        reason=event.reason,
        error_type=event.error_type,
        error=event.error,
    )


def describe(event: HistoryEvent, before: HistoryEvent | None) -> str:
    """An event as a sentence."""
    passed = "" if before is None else format_age(event.at - before.at)
    # A handler that decides without an error has the class of its outcome here.
    failed = event.error_type is not None and not event.error_type.startswith("waypost.message.")
    failure = f": {event.error_type}" if failed else ""
    match event.event:
        case "published":
            return "Published as a timer" if is_later(event) else "Published"
        case "claimed":
            again = f", again {CAUSES[event.cause]}" if event.cause in CAUSES else ""
            delivery = f" (delivery {event.deliveries})" if event.deliveries else ""
            return f"Claimed{delivery} after {passed}{again}"
        case "done":
            return f"Done after {passed}"
        case "retried":
            return f"Failed after {passed}{failure}; comes back later"
        case "snoozed":
            return "Put off by its handler, at no cost"
        case "released":
            return "Given back by its worker, at no cost"
        case "expired":
            return f"Lease lost after {passed}: the worker did not renew it"
        case "dead":
            return f"Dead letter ({event.reason or 'no reason'}){failure}"
        case "redriven":
            return "Redriven from the dead letters, with fresh counts"
        case "promoted":
            return "Due: ready to be claimed"
        case "cancel_requested":
            return "Cancel requested while it was running"
        case "dropped":
            return f"Dropped ({event.cause or 'by its handler'})"
        case "replaced":
            return "Replaced by a newer message with its key"
        case "postponed":
            return "Priority changed" if event.cause == "priority" else "Due time moved"
        case "duplicate":
            return "Published again with the same key: kept this one"
        case "dead_trimmed":
            return "Removed from the dead letters"
    return event.event.replace("_", " ").capitalize()


def is_later(event: HistoryEvent) -> bool:
    """Whether the message becomes due after the event."""
    return event.due is not None and event.due > event.at


def spans_of(events: Sequence[HistoryEvent], now: datetime) -> list[Span]:
    """How long the message was not due, ready and running, one after the other."""
    spans: list[Span] = []
    kind: SpanKind | None = None
    start, due = now, None

    def close(end: datetime, by: str | None) -> None:
        nonlocal start, due
        if kind is None:
            return
        # A timer that came due before it was claimed was ready from then on.
        if kind == "delayed" and due is not None and start < due < end and by != "promoted":
            spans.append(make_span("delayed", start, due, "promoted"))
            start = due
            spans.append(make_span("ready", start, end, by, is_open=by is None))
        else:
            spans.append(make_span(kind, start, end, by, is_open=by is None))
        due = None

    for event in events:
        following = condition_after(event, kind)
        if following == kind and event.event not in RUN_ENDS:
            continue
        close(event.at, event.event)
        kind, start, due = following, event.at, event.due
    close(max(now, start), None)
    return spans


def condition_after(event: HistoryEvent, kind: SpanKind | None) -> SpanKind | None:
    """The condition of a message after an event; None: it is not in the queue, or is a dead letter."""
    match event.event:
        case "claimed":
            return "running"
        case "published" | "retried" | "snoozed" | "redriven" | "postponed":
            return "delayed" if is_later(event) else "ready"
        case "promoted" | "released" | "expired":
            return "ready"
    return None if event.event in ENDS else kind


def make_span(kind: SpanKind, start: datetime, end: datetime, by: str | None, *, is_open: bool = False) -> Span:
    """One span."""
    seconds = max(0.0, (end - start).total_seconds())
    text = f"{SPAN_TEXTS[kind]} {format_age(timedelta(seconds=seconds))}"
    return Span(kind=kind, text=text, start=start, end=None if is_open else end, seconds=seconds, ended_by=by)
