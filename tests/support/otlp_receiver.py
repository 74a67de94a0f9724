"""A collector for tests: receives OTLP over gRPC on its own port and stores what it receives."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest_asyncio
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

Tree = dict[str, "Tree"]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_seconds: float
    end_seconds: float
    attributes: dict[str, Any]
    failed: bool

    def is_named_by(self, trace_parent: str) -> bool:
        """Whether this is the span of that W3C traceparent. Its flags are not exported, so they are not compared."""
        return trace_parent.split("-")[1:3] == [self.trace_id, self.span_id]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans, metrics and log records; `await wait_for(…)` returns once they are as expected."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metrics: dict[str, list[Any]] = defaultdict(list)
        self.resources: list[dict[str, Any]] = []  # from which metrics came
        self.records: list[tuple[str, dict[str, Any]]] = []  # the body, and the attributes
        self.endpoint = ""
        self._arrived = asyncio.Condition()

    async def start(self) -> None:
        """Start receiving."""
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(self), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop receiving."""
        await self._server.stop(None)

    async def Export(self, request: Any, context: Any) -> Any:
        """Store spans."""
        async with self._arrived:
            self.spans.extend(_spans(request))
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def take_metrics(self, request: Any) -> None:
        """Store metrics."""
        async with self._arrived:
            for resource in request.resource_metrics:
                self.resources.append({one.key: _value(one.value) for one in resource.resource.attributes})
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        self.metrics[metric.name].append(metric)
            self._arrived.notify_all()

    async def take_records(self, request: Any) -> None:
        """Store log records."""
        async with self._arrived:
            for resource in request.resource_logs:
                for scope in resource.scope_logs:
                    for record in scope.log_records:
                        told = {one.key: _value(one.value) for one in record.attributes}
                        self.records.append((record.body.string_value or record.event_name, told))
            self._arrived.notify_all()

    async def wait_for(self, *names: str, seconds: float = 20.0) -> list[ReceivedSpan]:
        """Return all spans once there is one of each of these names."""
        await self._wait(lambda: set(names) <= {span.name for span in self.spans}, seconds)
        return self.spans

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds), self._arrived:
            await self._arrived.wait_for(condition)

    def named(self, name: str) -> ReceivedSpan:
        """Return the one span of that name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def tree(self) -> Tree:
        """Return all spans as nested names, whichever process they came from; a lost parent makes a root."""
        return tree_of(self.spans)


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    async def Export(self, request: Any, context: Any) -> Any:
        await self._receiver.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    async def Export(self, request: Any, context: Any) -> Any:
        await self._receiver.take_records(request)
        return logs_service_pb2.ExportLogsServiceResponse()


def tree_of(spans: Iterable[ReceivedSpan]) -> Tree:
    """Nest spans under their parents, by name."""
    all_spans = sorted(spans, key=lambda span: (span.start_seconds, span.name))
    nodes: dict[str, Tree] = {span.span_id: {} for span in all_spans}
    roots: Tree = {}
    for span in all_spans:
        nodes.get(span.parent_id, roots)[span.name] = nodes[span.span_id]
    return roots


def _spans(request: Any) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            service=next((one.value.string_value for one in sent.resource.attributes if one.key == "service.name"), ""),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_seconds=span.start_time_unix_nano / 1e9,
            end_seconds=span.end_time_unix_nano / 1e9,
            attributes={one.key: _value(one.value) for one in span.attributes},
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for sent in request.resource_spans
        for scope in sent.scope_spans
        for span in scope.spans
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest_asyncio.fixture
async def otlp() -> AsyncIterator[OtlpReceiver]:
    """Yield a receiver for the duration of the test."""
    receiver = OtlpReceiver()
    await receiver.start()
    yield receiver
    await receiver.stop()
