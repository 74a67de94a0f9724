"""Logs, spans and metrics of Cotenant.

Logs are always on: events with fields, not prose. Spans and metrics are off until the standard OpenTelemetry variables
enable them; until then the SDK is not even imported and each call below costs a fraction of a microsecond.
"""

from cotenant.telemetry.attributes import Attribute
from cotenant.telemetry.lines import logger
from cotenant.telemetry.metrics import Counter, Gauge, Histogram, counter, gauge, histogram
from cotenant.telemetry.records import emit
from cotenant.telemetry.switch import expose, setup, shutdown
from cotenant.telemetry.tracing import (
    Span,
    client_interceptors,
    current,
    record,
    root,
    server_interceptors,
    span,
)

__all__ = [
    "Attribute",
    "Counter",
    "Gauge",
    "Histogram",
    "Span",
    "client_interceptors",
    "counter",
    "current",
    "emit",
    "expose",
    "gauge",
    "histogram",
    "logger",
    "record",
    "root",
    "server_interceptors",
    "setup",
    "shutdown",
    "span",
]
