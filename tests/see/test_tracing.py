"""Traces: one trace through two services in separate processes, and the attributes of spans."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.see.conftest import ROOT, Start
from tests.see.process_handler import square
from tests.waiting import until
from waypost import AsyncWaypost, Dead, Message, NoRetry, Waypost, codec
from waypost.see import Tracing

pytestmark = pytest.mark.promise("SEE-2")


def spans_of(*paths: Path) -> dict[str, dict[str, Any]]:
    """Return the spans that processes wrote, by name."""
    found = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {span["name"]: span for span in found}


def test_a_message_through_two_services_is_one_trace(start: Start, url: str, namespace: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.spans" for name in ("publisher", "front", "back")}
    shop = {"SHOP_URL": url, "SHOP_NAMESPACE": namespace}
    start("worker", "tests.see.traced_app:front", SPANS=str(files["front"]), **shop)
    start("worker", "tests.see.traced_app:back", SPANS=str(files["back"]), **shop)
    subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.see.traced_app"],
        cwd=ROOT, check=True, timeout=60,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "SPANS": str(files["publisher"])} | shop,
    )  # fmt: skip
    wanted = {
        "checkout", "publish orders", "handle orders", "publish mails", "then sales", "handle mails", "handle sales",
    }  # fmt: skip
    spans = until(lambda: found if set(found := spans_of(*files.values())) == wanted else None, "seven spans")

    assert {span["trace"] for span in spans.values()} == {spans["checkout"]["trace"]}
    parents = {
        "publish orders": "checkout",
        "handle orders": "publish orders",
        "publish mails": "handle orders",
        "then sales": "handle orders",
        "handle mails": "publish mails",
        "handle sales": "then sales",
    }
    assert {name: spans[name]["parent"] for name in parents} == {
        name: spans[parent]["span"] for name, parent in parents.items()
    }
    assert spans["checkout"]["parent"] is None
    pids = [spans[name]["pid"] for name in ("publish orders", "handle orders", "handle mails")]
    assert len(set(pids)) == 3
    assert spans["handle sales"]["pid"] == spans["handle mails"]["pid"]
    assert [spans[name]["kind"] for name in ("publish mails", "then sales", "handle mails")] == [
        "PRODUCER", "PRODUCER", "CONSUMER",
    ]  # fmt: skip
    assert (
        spans["publish orders"]["attributes"]["messaging.message.id"]
        == spans["handle orders"]["attributes"]["messaging.message.id"]
    )


# ---- in one process ------------------------------------------------------------------------------------------


class Recorded:
    """Spans kept in memory."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracing = Tracing(self.provider)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._kept.get_finished_spans()}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    made = Recorded()
    yield made
    made.provider.shutdown()


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(name)


def test_a_batch_is_a_trace_of_its_own_with_a_link_to_each_message(recorded: Recorded) -> None:
    with Waypost("memory://batch", middleware=[recorded.tracing]) as post:

        @post.handler("orders", batch=10)
        def charge(bodies: list[int]) -> None:
            post.publish("totals", sum(bodies))

        tracer = recorded.provider.get_tracer("shop")
        for number in (1, 2):
            with tracer.start_as_current_span(f"checkout {number}"):
                post.publish("orders", number)
        with Waypost("memory://batch") as untraced:
            untraced.publish("orders", 3)
        post.worker().run(until_empty=True, signals=False)
    spans = recorded.spans
    handled = spans["handle orders"]
    checkouts = [ids(spans[f"checkout {number}"])[0] for number in (1, 2)]
    assert handled.parent is None
    assert ids(handled)[0] not in checkouts
    assert [link.context.trace_id for link in handled.links] == checkouts
    assert attribute(handled, "messaging.batch.message_count") == 3
    assert spans["publish totals"].parent is not None
    assert ids(handled) == (spans["publish totals"].parent.trace_id, spans["publish totals"].parent.span_id)


def test_a_handler_that_fails_is_an_error_by_its_class_and_never_by_its_text(recorded: Recorded) -> None:
    with Waypost("memory://fails", middleware=[recorded.tracing]) as post:

        @post.handler("orders", retry=NoRetry())
        def charge(body: str) -> None:
            raise ValueError(f"cannot charge {body}")

        post.publish("orders", "card 4711")
        post.worker().run(until_empty=True, signals=False)
    span = recorded.spans["handle orders"]
    assert span.status.status_code is StatusCode.ERROR
    assert attribute(span, "error.type") == "ValueError"
    assert "4711" not in span.to_json()


@pytest.mark.parametrize("raised", [True, False])
def test_an_outcome_is_a_decision_and_no_error(recorded: Recorded, raised: bool) -> None:
    async def main() -> None:
        async with AsyncWaypost(f"memory://outcome-{raised}", middleware=[recorded.tracing]) as post:

            @post.handler("orders")
            async def charge(body: str) -> Dead:
                if raised:
                    raise Dead()
                return Dead()

            await post.publish("orders", "bad")
            await post.worker().run(until_empty=True, signals=False)

    asyncio.run(main())
    span = recorded.spans["handle orders"]
    assert span.status.status_code is StatusCode.UNSET
    assert attribute(span, "waypost.outcome") == "dead"
    assert span.kind is SpanKind.CONSUMER


def test_many_messages_of_one_publish_share_its_span(recorded: Recorded) -> None:
    with Waypost("memory://many-traced", middleware=[recorded.tracing]) as post:
        published = post.publish_many("orders", [1, 2, 3])
        traces = {message.trace["traceparent"] for message in post.peek("orders", 3)}
    span = recorded.spans["publish orders"]
    trace_id, span_id = ids(span)
    # The flags after it are chosen by the SDK.
    assert {text[:53] for text in traces} == {f"00-{trace_id:032x}-{span_id:016x}-"}
    assert attribute(span, "messaging.batch.message_count") == 3
    assert attribute(span, "waypost.message.ids") == tuple(one.id for one in published)


def test_a_context_given_by_the_caller_is_passed_on_unchanged(recorded: Recorded) -> None:
    given = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with Waypost("memory://given", middleware=[recorded.tracing]) as post:
        post.publish("orders", 1, trace=given)
        assert [message.trace for message in post.peek("orders", 1)] == [given]
    with Waypost("memory://given") as plain:
        plain.publish("mails", 1, trace=given)
        assert [message.trace for message in plain.peek("mails", 1)] == [given]


def test_a_continuation_of_a_handler_in_a_process_continues_its_span(recorded: Recorded) -> None:
    with Waypost("memory://processes", middleware=[recorded.tracing]) as post:
        post.handler("numbers", process=True, concurrency=1)(square)
        post.publish("numbers", 7)
        post.worker().run(until_empty=True, signals=False)
        [message] = post.peek("squares", 1)
        assert message.body == 49
    spans = recorded.spans
    sent_on = spans["then squares"]
    assert sent_on.parent is not None
    assert sent_on.parent.span_id == ids(spans["handle numbers"])[1]
    assert message.trace["traceparent"].split("-")[1:3] == [f"{ids(sent_on)[0]:032x}", f"{ids(sent_on)[1]:016x}"]


def test_a_block_of_receive_can_have_a_span_too(recorded: Recorded) -> None:
    with Waypost("memory://received", middleware=[recorded.tracing]) as post:
        post.publish("orders", 1)
        with post.receive("orders", wait=0) as message:
            assert message is not None
            with recorded.tracing.handling(message):
                post.publish("mails", 1)
    spans = recorded.spans
    parents = {name: span.parent.span_id if span.parent else None for name, span in spans.items()}
    assert parents == {
        "publish orders": None,
        "handle orders": ids(spans["publish orders"])[1],
        "publish mails": ids(spans["handle orders"])[1],
    }


def test_an_undecodable_message_ends_as_it_would_without_traces(recorded: Recorded) -> None:
    with Waypost("memory://unreadable", middleware=[recorded.tracing]) as post:

        @post.handler("orders", batch=2)
        def charge(bodies: list[int]) -> None: ...

        post.publish_many("orders", [1, "two"])
        post.worker().run(until_empty=True, signals=False)
        ledger = post.stats("orders").ledger
    assert (ledger.done, ledger.dead) == (1, 1)


def test_without_an_sdk_nothing_is_recorded_and_a_context_is_still_passed_on() -> None:
    carrier = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with Waypost("memory://no-sdk", middleware=[Tracing()]) as post:

        @post.handler("orders")
        def charge(body: int, message: Message[int]) -> None:
            post.publish("mails", body)
            message.then("sales", body)

        post.publish("orders", 1)
        assert [message.trace for message in post.peek("orders", 1)] == [{}]
        post.purge("orders", state="ready")
        post.publish("orders", 1, trace=carrier)
        post.worker().run(until_empty=True, signals=False)
        assert [message.trace for queue in ("mails", "sales") for message in post.peek(queue, 1)] == [carrier] * 2


def test_an_envelope_with_another_trace_is_otherwise_the_same() -> None:
    head = codec.encode_head(
        type_name="shop.Order", correlation_id="c", reply_to="r", trace={"traceparent": "old"}, headers={"a": "b"}
    )
    encoded = codec.encode_body({"id": 7})
    envelope = codec.make_envelope("0" * 24, encoded, head)
    changed = codec.open_envelope(codec.with_trace(envelope, {"traceparent": "new"}))
    before = codec.open_envelope(envelope)
    assert changed.trace == {"traceparent": "new"}
    assert (changed.id, changed.data, changed.content_type) == (before.id, before.data, before.content_type)
    assert (changed.type_name, changed.correlation_id, changed.reply_to, changed.headers) == (
        "shop.Order", "c", "r", {"a": "b"},
    )  # fmt: skip
