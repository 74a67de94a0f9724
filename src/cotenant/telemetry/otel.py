"""The OpenTelemetry implementation of spans, metrics and log records. Imported only if the environment enables one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.instrumentation.grpc import aio_client_interceptors, aio_server_interceptor
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cotenant.telemetry.attributes import Attribute

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SCOPE = "cotenant"
NANOSECONDS = 1_000_000_000
FLUSH_SECONDS_MAX = 2.0
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
_W3C = TraceContextTextMapPropagator()


def _exporter(protocol: str, module: str, name: str) -> Any:
    """Return an OTLP exporter, made by the standard variables. Only the modules of the protocol in use are imported."""
    return getattr(import_module(f"{EXPORTERS[protocol]}.{module}"), name)()


class Tracing:
    """A tracer provider that exports by OTLP in batches."""

    def __init__(self, resource: Resource, protocol: str) -> None:
        self._exporter: SpanExporter = _exporter(protocol, "trace_exporter", "OTLPSpanExporter")
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `shutdown` below is bounded
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(SCOPE)
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._provider)  # for plug-ins that use OpenTelemetry themselves

    @contextmanager
    def span(self, name: str, parent: str, attributes: Mapping[str, Attribute]) -> Iterator[_LiveSpan]:
        """Open a span and make it the active one."""
        with self._tracer.start_as_current_span(name, _context(parent), attributes=attributes) as span:
            yield _LiveSpan(span)

    def record(
        self,
        name: str,
        parent: str,
        start_seconds: float,
        end_seconds: float,
        attributes: Mapping[str, Attribute],
    ) -> str:
        """Export a span that has ended."""
        span = self._tracer.start_span(
            name,
            _context(parent),
            attributes=attributes,
            start_time=int(start_seconds * NANOSECONDS),
        )
        span.end(end_time=int(end_seconds * NANOSECONDS))
        return _trace_parent(span)

    def root(self, name: str, attributes: Mapping[str, Attribute]) -> str:
        """Export a span of zero length without a parent."""
        span = self._tracer.start_span(name, Context(), attributes=attributes)
        span.end()
        return _trace_parent(span)

    def current(self) -> str:
        """Return the traceparent of the active span."""
        return _trace_parent(trace.get_current_span())

    def server_interceptors(self, traced: Callable[[str], bool]) -> list[Any]:
        """Return interceptors that trace the methods selected by `traced`."""

        def picked(call: Any) -> bool:
            return traced(call.method)

        return [aio_server_interceptor(tracer_provider=self._provider, filter_=picked)]

    def client_interceptors(self) -> list[Any]:
        """Return interceptors for unary calls only: a stream lives as long as its process, and its span never ends."""
        return [aio_client_interceptors(tracer_provider=self._provider)[0]]

    def shutdown(self) -> None:
        """Export what is left and stop."""
        _close(self._provider, self._exporter)


class Metrics:
    """A meter provider that exports periodically by OTLP (OTEL_METRIC_EXPORT_INTERVAL), to Prometheus, or both."""

    def __init__(self, resource: Resource, protocol: str, registry: CollectorRegistry | None) -> None:
        """Export by OTLP with a protocol; "" means not at all. A registry is one that Prometheus scrapes."""
        self._exporter: MetricExporter | None = None
        readers: list[MetricReader] = []
        if protocol:
            self._exporter = _exporter(protocol, "metric_exporter", "OTLPMetricExporter")
            readers.append(PeriodicExportingMetricReader(self._exporter))
        if registry is not None:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader  # only where metrics are scraped

            readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
        self._provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self.meter: metrics.Meter = self._provider.get_meter(SCOPE)

    def shutdown(self) -> None:
        """Export what is left and stop."""
        _close(self._provider, self._exporter)


class Records:
    """A logger provider that exports by OTLP in batches."""

    def __init__(self, resource: Resource, protocol: str) -> None:
        self._exporter: LogRecordExporter = _exporter(protocol, "_log_exporter", "OTLPLogExporter")
        self._provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(self._exporter))
        self._logger = self._provider.get_logger(SCOPE)

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Send a record with the next batch; a mapping in it becomes fields of its own, with dots."""
        now = int(time.time() * NANOSECONDS)
        record = LogRecord(
            timestamp=now,
            observed_timestamp=now,
            severity_number=SeverityNumber.INFO,
            severity_text="INFO",
            body=event,
            event_name=f"{SCOPE}.{event}",
            attributes=dict(_flat(fields)),
        )
        self._logger.emit(record)

    def shutdown(self) -> None:
        """Export what is left and stop."""
        _close(self._provider, self._exporter)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class _LiveSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def trace_parent(self) -> str:
        return _trace_parent(self._span)

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(attributes)


def _close(
    provider: TracerProvider | MeterProvider | LoggerProvider,
    exporter: SpanExporter | MetricExporter | LogRecordExporter | None,
) -> None:
    """Flush and stop, with a time-out: the exporter would retry an unavailable collector for ten seconds."""
    if exporter is None:
        provider.shutdown()
        return
    giving_up = threading.Timer(FLUSH_SECONDS_MAX, exporter.shutdown)
    giving_up.daemon = True
    giving_up.start()
    try:
        provider.shutdown()
    finally:
        giving_up.cancel()


def _context(parent: str) -> Context | None:
    """Parse a traceparent; "" means the active span, and an invalid one starts a new trace."""
    return _W3C.extract({"traceparent": parent}) if parent else None


def _trace_parent(span: trace.Span) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
