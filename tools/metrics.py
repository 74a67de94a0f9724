"""Draws docs/metrics.md from the instruments that the code makes: `make docs`."""

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

With `OTEL_EXPORTER_OTLP_ENDPOINT` set, every process of the mesh sends these by OTLP over gRPC, beside its spans. The
collector of `deploy/` offers them to Prometheus under the name in the second column; the dashboards of
`deploy/grafana/dashboards` are made of them, and a test fails where one asks for a metric that is not here. `make docs`
draws this page from the code.

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


UNITS = {"s": "_seconds", "By": "_bytes"}  # as the exporter spells them out; what is counted has none
PACKAGES = (
    cotenant.codec,
    cotenant.security,
    cotenant.store,
    cotenant.rpc,
    cotenant.leadership,
    cotenant.services,
    cotenant.node_agent,
)
MAKES_ONE = re.compile(r"\btelemetry\.(counter|gauge|histogram)\(")


def instruments() -> list[InstrumentInfo]:
    """Import all modules that make instruments, and name these."""
    for package in PACKAGES:
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            if MAKES_ONE.search(path.read_text()):
                importlib.import_module(".".join((package.__name__, *path.relative_to(root).with_suffix("").parts)))
    return known()


def prometheus_name(metric: InstrumentInfo) -> str:
    """Name a metric as the collector's Prometheus exporter does.

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
    """Write the whole page."""
    return TEXT.format(tables="\n".join(_tables(instruments())))


def _tables(metrics: list[InstrumentInfo]) -> Iterator[str]:
    for part, title in PARTS.items():
        rows = [metric for metric in metrics if metric.name.startswith(f"cotenant.{part}.")]
        if rows:
            yield f"## {title}\n\n| metric | in Prometheus | kind | what |\n|---|---|---|---|"
            yield from (
                f"| `{one.name}` | `{prometheus_name(one)}` | {one.kind} | {one.description.rstrip('.')} |"
                for one in rows
            )
            yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   {PAGE.relative_to(PAGE.parent.parent)} is drawn")
