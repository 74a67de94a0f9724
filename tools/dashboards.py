"""Generates deploy/grafana/dashboards from the tables below: `make docs`.

Grafana's JSON is generated; edit the panels here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT, COLUMNS = 12, 8, 24
SCHEMA_VERSION = 39


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel with its Prometheus queries, each with a legend."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"  # Grafana's unit id
    stacked: bool = False
    description: str = ""


def rate(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    """Return a query for the rate of a counter, for each value of a label."""
    return ((f"sum by ({by}) (rate({metric}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Return queries for the median and the 99th percentile of a histogram."""
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[$__rate_interval])))", f"p{q * 100:g}")
        for q in (0.5, 0.99)
    )


BOARDS = {
    "cluster": (
        "Cotenant: the cluster and its jobs",
        (
            Panel(
                "GPUs",
                (("max by (state) (cotenant_placement_gpus)", "{{state}}"),),
                stacked=True,
                description="Held by jobs, free, closed (on nodes that take no work) or unhealthy.",
            ),
            Panel("Cores", (("max by (state) (cotenant_placement_cores)", "{{state}}"),), stacked=True),
            Panel(
                "Jobs by phase",
                (("sum by (phase) (max by (phase, kind) (cotenant_queue_jobs))", "{{phase}}"),),
                stacked=True,
            ),
            Panel(
                "Waiting jobs by kind of wait",
                (("sum by (wait) (max by (wait, tenant) (cotenant_queue_waiting))", "{{wait}}"),),
                stacked=True,
                description="Fair share: the tenant holds its share. Fragmentation: enough is free, but not together.",
            ),
            Panel(
                "Waiting jobs by tenant",
                (("sum by (tenant) (max by (wait, tenant) (cotenant_queue_waiting))", "{{tenant}}"),),
                stacked=True,
            ),
            Panel("Submission to placement", quantiles("cotenant_queue_assigned_seconds"), "s"),
            Panel("Failed attempts by class", rate("cotenant_queue_failures_total", "failure_class"), "ops"),
            Panel("Nodes by state", (("max by (state) (cotenant_placement_nodes)", "{{state}}"),), stacked=True),
        ),
    ),
    "control-plane": (
        "Cotenant: the control plane",
        (
            Panel("Scheduling cycle", quantiles("cotenant_queue_cycle_seconds"), "s"),
            Panel("Plan and commit", quantiles("cotenant_placement_plan_seconds"), "s"),
            Panel(
                "Attempts placed", (("sum(rate(cotenant_placement_placed_total[$__rate_interval]))", "placed"),), "ops"
            ),
            Panel("Refusals by reason", rate("cotenant_queue_refused_total", "code"), "ops"),
            Panel(
                "Placement commits by outcome",
                rate("cotenant_placement_commits_total", "outcome"),
                "ops",
                description="Fenced: another placement is the leader. StoreUnavailable: etcd did not answer.",
            ),
            Panel("Start forecasts", quantiles("cotenant_placement_forecast_seconds"), "s"),
            Panel(
                "Predictor",
                (
                    ("sum(rate(cotenant_predictor_queries_total[$__rate_interval]))", "jobs estimated"),
                    ("sum(rate(cotenant_predictor_observations_total[$__rate_interval]))", "observations"),
                    ("sum(rate(cotenant_predictor_rejected_total[$__rate_interval]))", "rejected"),
                ),
                "ops",
            ),
            Panel("Resizes by outcome", rate("cotenant_placement_resizes_total", "outcome"), "ops"),
            Panel(
                "Certificates: time until expiry",
                (("min by (subject) (cotenant_certificate_left_seconds)", "{{subject}}"),),
                "s",
                description="Renew when a month is left, or a third of the validity if that is less.",
            ),
        ),
    ),
    "contention": (
        "Cotenant: contention on nodes",
        (
            Panel("Incidents", (("sum(increase(cotenant_contention_incidents_total[$__range]))", "started"),)),
            Panel("Outcomes", rate("cotenant_contention_outcomes_total", "outcome"), "ops"),
            Panel(
                "Directives and throttle changes",
                (
                    ("sum(rate(cotenant_contention_directives_total[$__rate_interval]))", "directives"),
                    ("sum(rate(cotenant_agent_throttles_total[$__rate_interval]))", "throttle changes"),
                ),
                "ops",
            ),
            Panel(
                "Samples",
                (
                    ("sum(rate(cotenant_contention_samples_total[$__rate_interval]))", "accepted"),
                    ("sum(rate(cotenant_contention_dropped_total[$__rate_interval]))", "dropped"),
                ),
                "ops",
            ),
        ),
    ),
}


def board(name: str) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model."""
    title, panels = BOARDS[name]
    return {
        "uid": f"cotenant-{name}",
        "title": title,
        "tags": ["cotenant"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number * WIDTH, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": column, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 25 if panel.stacked else 5,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def render(name: str) -> str:
    """Return the file of a dashboard."""
    return json.dumps(board(name), indent=2) + "\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in BOARDS:
        (DIRECTORY / f"{name}.json").write_text(render(name))
    print(f"   wrote {DIRECTORY.relative_to(DIRECTORY.parent.parent.parent)}")
