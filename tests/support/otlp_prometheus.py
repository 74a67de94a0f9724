"""A collector for metrics in tests: it receives OTLP and serves Prometheus under the collector's names.

It stands in for the collector of deploy/otel-collector.yaml, whose exporter for Prometheus makes `job` and `instance`
of the resource, writes dots as `_`, adds the unit's name and `_total`, and serves the latest value of each process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.otlp_receiver import OtlpReceiver

Labels = tuple[tuple[str, str], ...]
UNITS = {"s": "_seconds"}  # others are words in braces and have no suffix


class Exposer(OtlpReceiver):
    """Receives metrics by OTLP and serves them at `target`, as host:port."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: dict[tuple[str, Labels], float] = {}
        self._types: dict[str, str] = {}
        self._lock = threading.Lock()
        self.target = ""

    async def start(self) -> None:
        """Start receiving and serving."""
        await super().start()
        exposer = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # as the standard library wants it
                text = exposer.page().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: Any) -> None:
                """Log nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self.target = f"127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    async def stop(self) -> None:
        """Stop receiving and serving."""
        self._http.shutdown()
        self._http.server_close()
        await super().stop()

    async def take_metrics(self, request: Any) -> None:
        """Take metrics in."""
        with self._lock:
            for sent in request.resource_metrics:
                told = {one.key: one.value.string_value for one in sent.resource.attributes}
                job = "/".join(told[key] for key in ("service.namespace", "service.name") if told.get(key))
                own = (("instance", told["service.instance.id"]), ("job", job))
                for metric in (metric for scope in sent.scope_metrics for metric in scope.metrics):
                    self._take(metric, own)

    def _take(self, metric: Any, own: Labels) -> None:
        kind = metric.WhichOneof("data")
        name = metric.name.replace(".", "_") + UNITS.get(metric.unit, "")
        if kind == "sum" and metric.sum.is_monotonic:
            name += "_total"
        self._types[name] = {"sum": "counter", "gauge": "gauge", "histogram": "histogram"}[kind]
        for point in getattr(metric, kind).data_points:
            labels = tuple(sorted((*own, *((one.key, _text(one.value)) for one in point.attributes))))
            self._samples.update(
                _histogram(name, labels, point) if kind == "histogram" else _number(name, labels, point)
            )

    def page(self) -> str:
        """Return all samples as text, grouped by metric."""
        with self._lock:
            samples, types = sorted(self._samples.items(), key=lambda one: one[0][0]), dict(self._types)
        lines = [f"# TYPE {name} {kind}" for name, kind in types.items()]
        for (name, labels), value in samples:
            told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"{name}{{{told}}} {value!r}")
        return "\n".join(lines) + "\n"


def _number(name: str, labels: Labels, point: Any) -> Iterator[tuple[tuple[str, Labels], float]]:
    yield (name, labels), float(getattr(point, point.WhichOneof("value")))


def _histogram(name: str, labels: Labels, point: Any) -> Iterator[tuple[tuple[str, Labels], float]]:
    below = 0
    for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
        below += count
        le = "+Inf" if bound == float("inf") else repr(bound)
        yield (f"{name}_bucket", (*labels, ("le", le))), float(below)
    yield (f"{name}_sum", labels), point.sum
    yield (f"{name}_count", labels), float(point.count)


def _text(value: Any) -> str:
    kind = value.WhichOneof("value")
    told = getattr(value, kind)
    return str(told).lower() if kind == "bool_value" else str(told)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
