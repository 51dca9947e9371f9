"""Traces for OpenTelemetry: a span for each publish and each handler call, linked by the context in the envelope.

    post = Waypost(url, middleware=[Tracing()])

A publish is a producer span; its context (W3C `traceparent` and `tracestate`) is stored in the envelope. The handler's
span, in any process, is its child. A call that handles several messages belongs to several traces: its span starts a
new trace with a link to each. What a handler publishes, or sends on with `then`, is a child of the handler's span.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from waypost import codec
from waypost.errors import Undecodable
from waypost.message import Message, Outcome, error_type
from waypost.middleware import Middleware, Outgoing
from waypost.release import VERSION
from waypost.values import Continuation, Published

#: The default limit of SDKs for links of a span.
LINKS_MAX = 128
#: How many message ids of a batch are recorded.
IDS_MAX = 16


class Tracing(Middleware):
    """A middleware that makes spans with `tracer_provider`, by default the global one.

    Without an SDK nothing is recorded, and the context of a message is still passed on.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, propagator: TextMapPropagator | None = None
    ) -> None:
        self._tracer: Tracer = trace.get_tracer("waypost", VERSION, tracer_provider)
        self._propagator = propagator or TraceContextTextMapPropagator()

    # ---- publishing --------------------------------------------------------------------------------------

    def publish(self, outgoing: Outgoing, call_next: Callable[[Outgoing], list[Published]]) -> list[Published]:
        """Make a producer span around a sync publish."""
        if outgoing.via == "then":
            return call_next(outgoing)  # the handler made its span
        with self._sending(outgoing) as (span, traced):
            return _note_published(span, call_next(traced))

    async def publish_async(
        self, outgoing: Outgoing, call_next: Callable[[Outgoing], Awaitable[list[Published]]]
    ) -> list[Published]:
        """Make a producer span around an async publish."""
        if outgoing.via == "then":
            return await call_next(outgoing)
        with self._sending(outgoing) as (span, traced):
            return _note_published(span, await call_next(traced))

    @contextmanager
    def _sending(self, outgoing: Outgoing) -> Iterator[tuple[Span, Outgoing]]:
        attributes = _attributes("send", "publish", outgoing.queue)
        with self._span(f"publish {outgoing.queue}", SpanKind.PRODUCER, attributes) as span:
            carrier = self._carrier()
            # A context given by the caller is kept.
            yield span, outgoing if not carrier or outgoing.options.get("trace") else outgoing.with_trace(carrier)

    def _carrier(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    # ---- handling ----------------------------------------------------------------------------------------

    def handle(self, messages: Sequence[Message[Any]], call_next: Callable[[], Any]) -> Any:
        """Make a consumer span around a sync handler."""
        with self.handling(*messages) as span:
            return self._record_end(span, messages, call_next())

    async def handle_async(self, messages: Sequence[Message[Any]], call_next: Callable[[], Awaitable[Any]]) -> Any:
        """Make a consumer span around an async handler, or one that runs in a process."""
        with self.handling(*messages) as span:
            return self._record_end(span, messages, await call_next())

    @contextmanager
    def handling(self, *messages: Message[Any]) -> Iterator[Span]:
        """Make a consumer span around a block, for messages of `receive` and `consume`."""
        first = messages[0]
        attributes = _attributes("process", "handle", first.queue)
        context: Context | None = None
        links: list[Link] = []
        if len(messages) == 1:
            attributes["messaging.message.id"] = first.id
            attributes["waypost.message.deliveries"] = first.deliveries
            if first.attempts:
                attributes["waypost.message.attempts"] = first.attempts
            carrier = _trace_of(first)
            context = self._propagator.extract(carrier) if carrier else None
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            links = self._links(messages)
        with self._span(f"handle {first.queue}", SpanKind.CONSUMER, attributes, context, links) as span:
            yield span

    def _links(self, messages: Sequence[Message[Any]]) -> list[Link]:
        links = []
        for message in messages[:LINKS_MAX]:
            carrier = _trace_of(message)
            if carrier:
                parent = trace.get_current_span(self._propagator.extract(carrier, Context())).get_span_context()
                if parent.is_valid:
                    links.append(Link(parent, {"messaging.message.id": message.id}))
        return links

    def _record_end(self, span: Span, messages: Sequence[Message[Any]], returned: Any) -> Any:
        """Record the outcome of a handler, and make its continuations children of its span."""
        if isinstance(returned, Outcome):
            span.set_attribute("waypost.outcome", type(returned).__name__.lower())
        for message in messages:
            if message._then:
                message._then = tuple(self._trace_continuation(continuation) for continuation in message._then)
        return returned

    def _trace_continuation(self, continuation: Continuation) -> Continuation:
        """Return a continuation as a child of the handler's span, in place of the context that `then` copied."""
        attributes = _attributes("create", "then", continuation.queue)
        attributes["messaging.message.id"] = continuation.id
        with self._span(f"then {continuation.queue}", SpanKind.PRODUCER, attributes):
            carrier = self._carrier()
        if not carrier:
            return continuation
        return structs.replace(continuation, envelope=codec.with_trace(continuation.envelope, carrier))

    # ---- spans -------------------------------------------------------------------------------------------

    @contextmanager
    def _span(
        self,
        name: str,
        kind: SpanKind,
        attributes: dict[str, Any],
        context: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Span]:
        started = self._tracer.start_as_current_span(
            name, context, kind, attributes, links, record_exception=False, set_status_on_exception=False
        )
        with started as span:
            try:
                yield span
            except Outcome as outcome:
                # Raised or returned, an outcome is not a failure.
                span.set_attribute("waypost.outcome", type(outcome).__name__.lower())
                raise
            except BaseException as error:
                _note_error(span, error)
                raise


def _attributes(kind: str, name: str, queue: str) -> dict[str, Any]:
    return {
        "messaging.system": "waypost",
        "messaging.operation.type": kind,
        "messaging.operation.name": name,
        "messaging.destination.name": queue,
    }


def _note_published(span: Span, published: list[Published]) -> list[Published]:
    if span.is_recording():
        if len(published) == 1:
            span.set_attribute("messaging.message.id", published[0].id)
            span.set_attribute("waypost.publish.status", published[0].status)
        else:
            span.set_attribute("messaging.batch.message_count", len(published))
            span.set_attribute("waypost.message.ids", [one.id for one in published[:IDS_MAX]])
    return published


def _note_error(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", error_type(error))
    if isinstance(error, Exception):
        # Only the class: the text of an error may contain parts of a body. Logs and dead letters have the text.
        span.set_status(Status(StatusCode.ERROR, error_type(error)))


def _trace_of(message: Message[Any]) -> dict[str, str]:
    try:
        return message.trace
    except Undecodable:
        # The call of the handler raises it for this message.
        return {}
