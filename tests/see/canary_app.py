"""A client whose URLs hold a secret, and which logs every event and span: run by `waypost worker`."""

from __future__ import annotations

import os
import sys
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from waypost import Constant, Message, Waypost
from waypost.see import Tracing

provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))


def write(event: Any) -> None:
    """Log all fields of an event."""
    sys.stderr.write(f"event {event!r}\n")


post = Waypost(
    os.environ["WAYPOST_URL"], namespace=os.environ["WAYPOST_NAMESPACE"], on_event=write,
    middleware=[Tracing(provider)], retry_budget=2,
)  # fmt: skip
post.relay("out", to=os.environ["GUARDED_TARGET"])


@post.handler("orders", retry=Constant(pause=0.05, attempts=2))
def charge(body: int, message: Message[int]) -> None:
    """Fail for odd numbers, send the others on."""
    if body % 2:
        raise ValueError("no")
    message.then("out", body)


@post.every(0.2)
def tick() -> None:
    """A schedule that fires often."""
