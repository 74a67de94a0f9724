"""OTLP over HTTP: all three signals arrive at the standard paths as protobuf messages."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cotenant import telemetry
from cotenant.telemetry import metrics

MESSAGES: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class Collector:
    """An HTTP server that decodes what it receives."""

    def __init__(self) -> None:
        self.received: dict[str, list[Any]] = {}
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # as the standard library wants it
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                received.setdefault(self.path, []).append(MESSAGES[self.path].FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(metrics, "_known", {})  # the page of metrics must not list this test's
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
    yield made
    telemetry.shutdown()
    made.close()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_metrics_and_records_are_exported(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    telemetry.setup("test")
    with telemetry.span("plan", jobs=3):
        telemetry.counter("cotenant.test.placed", "{job}").add(2)
    telemetry.emit("call", {"method": "Submit"})
    telemetry.shutdown()

    (traces,), (measures,), (records,) = (collector.received[path] for path in MESSAGES)
    (span,) = traces.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.attributes[0].value.int_value) == ("plan", 3)
    (metric,) = measures.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.sum.data_points[0].as_int) == ("cotenant.test.placed", 2)
    (record,) = records.resource_logs[0].scope_logs[0].log_records
    assert record.body.string_value == "call"
    service = {one.key: one.value.string_value for one in traces.resource_spans[0].resource.attributes}
    assert service["service.name"] == "cotenant-test"


def test_each_signal_may_have_a_protocol_of_its_own(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.endpoint}/v1/metrics")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    telemetry.setup("test")
    telemetry.gauge("cotenant.test.waiting", "{job}").set(7)
    telemetry.shutdown()
    (measures,) = collector.received["/v1/metrics"]
    assert measures.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0].as_int == 7
