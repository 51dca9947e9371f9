"""Two services and a publisher, each a process that writes its spans to its own file.

python -m tests.see.traced_app              publishes an order
waypost worker tests.see.traced_app:front   handles orders and publishes mails
waypost worker tests.see.traced_app:back    handles the mails
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from waypost import AsyncWaypost, Message, Waypost
from waypost.see import Tracing


class FileSpanExporter(SpanExporter):
    """Append each ended span to a file, as a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans."""
        with self._path.open("a") as file:
            for span in spans:
                context = span.get_span_context()
                assert context is not None
                record = {
                    "name": span.name, "kind": span.kind.name, "trace": f"{context.trace_id:032x}",
                    "span": f"{context.span_id:016x}", "pid": os.getpid(),
                    "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
                    "attributes": dict(span.attributes or {}),
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
        return SpanExportResult.SUCCESS


provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter(Path(os.environ["SPANS"]))))
url, namespace = os.environ["SHOP_URL"], os.environ["SHOP_NAMESPACE"]
front = AsyncWaypost(url, namespace=namespace, middleware=[Tracing(provider)])
back = Waypost(url, namespace=namespace, middleware=[Tracing(provider)])


@front.handler("orders")
async def charge(body: str, message: Message[str]) -> None:
    """Publish a mail, and send the order on to sales."""
    await front.publish("mails", body)
    message.then("sales", body)


@back.handler("mails")
def send(body: str) -> None:
    """The end of one branch."""


@back.handler("sales")
def record_sale(body: str) -> None:
    """The end of the other."""


def main() -> None:
    with back, provider.get_tracer("shop").start_as_current_span("checkout"):
        back.publish("orders", "a lamp")


if __name__ == "__main__":
    main()
