"""Observability: metrics for Prometheus, traces and metrics for OpenTelemetry, and a worker's HTTP endpoint.

    from waypost.see import Endpoint, Prometheus, Tracing

    post = Waypost(url, middleware=[Tracing(), prometheus := Prometheus()])
    worker = post.worker()
    with Endpoint(worker, prometheus, port=9464):       # /metrics, /health, /ready
        worker.run()

Each is imported on first use: `Prometheus` needs `waypost[metrics]`, `Tracing` and `OpenTelemetryMetrics` need
`waypost[traces]`, `Endpoint` nothing.
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

#: The module of each name, and the extra that installs its dependencies.
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
