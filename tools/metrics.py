"""Generates docs/metrics.md from the instruments that the code creates: `make docs`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import cotenant.codec
import cotenant.leadership
import cotenant.node_agent
import cotenant.rpc
import cotenant.security
import cotenant.services
import cotenant.store
from cotenant.telemetry.metrics import InstrumentInfo, known

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

TEXT = """\
# Metrics

If `OTEL_EXPORTER_OTLP_ENDPOINT` is set, every process of the mesh exports these metrics, and its spans, by OTLP: over
gRPC, or over HTTP with `OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf`. The collector of `deploy/` offers them to
Prometheus under the name in the second column. The dashboards of `deploy/grafana/dashboards` use them; a test fails if
a dashboard queries a metric that is not listed here. `make docs` draws this page from the code.

## Without a collector

`--metrics PORT`, or `metrics = "HOST:PORT"` in the settings, makes `up` and each `serve` offer the same metrics to
Prometheus, with or without export by OTLP. A port alone means loopback. There is one address for each process, as
Prometheus expects it: `up --metrics 9464` serves the metrics of its services at port 9464, and those of its agents at
9465 and following, in the order of the nodes. With port 0 each process takes a free port and logs it.

```yaml
scrape_configs:
  - job_name: cotenant
    static_configs:
      - targets: ["localhost:9464", "localhost:9465"]  # `cotenant up --metrics 9464`: the services, the agent
      - targets: ["head:9464", "node-1:9464"]          # `cotenant serve queue --metrics 0.0.0.0:9464`, and so on
```

The metrics contain names of tenants, and are served without TLS or a token. If the address is not on loopback, let a
firewall admit only Prometheus.

{tables}"""

PARTS = {
    "queue": "Queue",
    "placement": "Placement",
    "predictor": "Predictor",
    "contention": "Contention",
    "agent": "Node agents",
    "store": "The store",
    "loop": "Every service",
    "connections": "Connections to a service",
    "descriptors": "File descriptors of a service",
    "audit": "The audit log",
    "certificate": "Certificates, of services and agents",
}


UNITS = {"s": "_seconds", "By": "_bytes"}  # the exporter's suffixes; counts have none
PACKAGES = (
    cotenant.codec,
    cotenant.security,
    cotenant.store,
    cotenant.rpc,
    cotenant.leadership,
    cotenant.services,
    cotenant.node_agent,
)
CREATES_INSTRUMENT = re.compile(r"\btelemetry\.(counter|gauge|histogram)\(")


def instruments() -> list[InstrumentInfo]:
    """Import all modules that create instruments, and return the instruments."""
    for package in PACKAGES:
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            if CREATES_INSTRUMENT.search(path.read_text()):
                importlib.import_module(".".join((package.__name__, *path.relative_to(root).with_suffix("").parts)))
    return known()


def prometheus_name(metric: InstrumentInfo) -> str:
    """Return the name of a metric in the collector's Prometheus exporter.

    >>> prometheus_name(InstrumentInfo("cotenant.queue.cycle", "histogram", "s", ""))
    'cotenant_queue_cycle_seconds'
    >>> prometheus_name(InstrumentInfo("cotenant.queue.failures", "counter", "{attempt}", ""))
    'cotenant_queue_failures_total'
    >>> prometheus_name(InstrumentInfo("cotenant.queue.waited", "counter", "s", ""))
    'cotenant_queue_waited_seconds_total'
    """
    unit = UNITS.get(metric.unit, "")
    return metric.name.replace(".", "_") + unit + ("_total" if metric.kind == "counter" else "")


def page() -> str:
    """Return the whole page."""
    return TEXT.format(tables="\n".join(_tables(instruments())))


def _tables(metrics: list[InstrumentInfo]) -> Iterator[str]:
    for part, title in PARTS.items():
        rows = [metric for metric in metrics if metric.name.startswith(f"cotenant.{part}.")]
        if rows:
            yield f"## {title}\n\n| metric | in Prometheus | kind | meaning |\n|---|---|---|---|"
            yield from (
                f"| `{metric.name}` | `{prometheus_name(metric)}` | {metric.kind} | {metric.description.rstrip('.')} |"
                for metric in rows
            )
            yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
