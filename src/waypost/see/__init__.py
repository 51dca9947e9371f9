"""Seeing what happens: metrics for Prometheus, traces and metrics for OpenTelemetry, and a worker's own web address.

    from waypost.see import Endpoint, Prometheus, Tracing

    post = Waypost(url, middleware=[Tracing(), prometheus := Prometheus()])
    worker = post.worker()
    with Endpoint(worker, prometheus, port=9464):       # /metrics, /health, /ready
        worker.run()

Each is loaded when it is asked for: `Prometheus` needs `waypost[metrics]`, `Tracing` and `OpenTelemetryMetrics` need
`waypost[traces]`, `Endpoint` nothing. Whoever does not use them pays nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from waypost.errors import MissingExtra

if TYPE_CHECKING:
    from waypost.see.endpoint import Endpoint
    from waypost.see.opentelemetry_metrics import OpenTelemetryMetrics
    from waypost.see.prometheus import Prometheus
    from waypost.see.tracing import Tracing

__all__ = ["Endpoint", "OpenTelemetryMetrics", "Prometheus", "Tracing"]

#: Where each name is found, and the extra that brings what it needs.
_MODULES = {
    "Endpoint": ("waypost.see.endpoint", None),
    "OpenTelemetryMetrics": ("waypost.see.opentelemetry_metrics", "traces"),
    "Prometheus": ("waypost.see.prometheus", "metrics"),
    "Tracing": ("waypost.see.tracing", "traces"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _MODULES[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("waypost"):
            raise
        raise MissingExtra(f'{name} needs the package {error.name}: pip install "waypost[{extra}]"') from None
