"""Prometheus' files, checked by promtool: they are valid, and each alert fires exactly when it should."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.paths import DEPLOY

ALERTS = {
    rule["alert"] for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]
}


@dataclass(frozen=True)
class AlertCase:
    """Series, one value per minute, for which an alert fires at `at` and not a minute before; `calm` never fires."""

    alert: str
    series: dict[str, str]
    at: int  # minutes
    calm: dict[str, str]


LOOP, CYCLE = "cotenant_loop_delay_seconds", "cotenant_queue_cycle_seconds"
COMMITS = 'cotenant_placement_commits_total{outcome="StoreUnavailable"}'

CERTIFICATE, FORTNIGHT = "cotenant_certificate_left_seconds", 14 * 86_400


def histogram(name: str, below: float, above: float, quick: str) -> dict[str, str]:
    """A thousand events a minute of at most `above` seconds; `quick` counts those of at most `below` seconds."""
    counts = {f"{below:g}": quick, f"{above:g}": "0+1000x30", "+Inf": "0+1000x30"}
    return {f'{name}_bucket{{le="{bound}"}}': values for bound, values in counts.items()}


SIZE, LIMIT = 'cotenant_store_size_bytes{of="size"}', 'cotenant_store_limit_bytes{of="limit"}'
KEPT, BUDGET = 'cotenant_queue_kept_bytes{tenant="a"}', 'cotenant_queue_budget_bytes{tenant="a"}'
FREE, RESERVE = 'cotenant_agent_disk_bytes{of="free"}', 'cotenant_agent_disk_bytes{of="reserve"}'

CASES = (
    AlertCase("StoreNearlyFull", {SIZE: "70 70 76x20", LIMIT: "100x30"}, 4, {SIZE: "75x30", LIMIT: "100x30"}),
    AlertCase("TenantBudgetUsed", {KEPT: "90 91x20", BUDGET: "100x30"}, 6, {KEPT: "90x30", BUDGET: "100x30"}),
    AlertCase("DiskReserveEntered", {FREE: "100 99x20", RESERVE: "100x30"}, 2, {FREE: "100x30", RESERVE: "100x30"}),
    AlertCase("StoreAway", {COMMITS: "0 0 0 1+1x20"}, 4, {COMMITS: "7x30"}),
    AlertCase(
        "StoreWentBack",
        {'cotenant_store_distrusted{instance="a"}': "0 0 1x20", 'cotenant_store_distrusted{instance="b"}': "0x22"},
        2,
        {"cotenant_store_distrusted": "0x30"},
    ),
    AlertCase(
        "NodesLost",
        {'cotenant_placement_nodes{state="lost",instance="a"}': "0 0 2x20"},
        7,
        {'cotenant_placement_nodes{state="away"}': "5x20", 'cotenant_placement_nodes{state="lost"}': "0 1 1 1 0x20"},
    ),
    AlertCase(
        "GpusIll",
        {'cotenant_placement_gpus{state="ill"}': "0 0 1x20"},
        7,
        {'cotenant_placement_gpus{state="ill"}': "0x20", 'cotenant_placement_gpus{state="free"}': "8x20"},
    ),
    AlertCase(
        "DescriptorsScarce",
        {
            'cotenant_descriptors_used{instance="a"}': "100 100 850x20",
            'cotenant_descriptors_limit{instance="a"}': "1000x22",
        },
        7,
        {
            'cotenant_descriptors_used{instance="a"}': "850 850 100x20",
            'cotenant_descriptors_limit{instance="a"}': "1000x22",
        },
    ),
    AlertCase(  # of two replicas, one has already read the new file
        "CertificateRunsOut",
        {f'{CERTIFICATE}{{instance="a"}}': f"{FORTNIGHT + 1}-1x20", f'{CERTIFICATE}{{instance="b"}}': "2592000x20"},
        7,
        {f'{CERTIFICATE}{{instance="a"}}': f"{FORTNIGHT + 60}-1x30"},
    ),
    AlertCase(
        "NodesHeld",
        {'cotenant_placement_nodes_held{reason="cannot_launch"}': "1x30"},
        2,
        {'cotenant_placement_nodes_held{reason="cannot_launch"}': "0x30"},
    ),
    AlertCase("LoopStalled", histogram(LOOP, 0.25, 1.0, "0x30"), 11, histogram(LOOP, 0.25, 1.0, "0+999x30")),
    AlertCase("SlowCycle", histogram(CYCLE, 5.0, 10.0, "0x30"), 11, histogram(CYCLE, 5.0, 10.0, "0+999x30")),
    AlertCase(
        "EtcdWithoutQuorum",
        {'etcd_server_has_leader{instance="1"}': "1x30", 'etcd_server_has_leader{instance="2"}': "1 1 0x20"},
        3,
        {'etcd_server_has_leader{instance="1"}': "1x30", 'etcd_server_has_leader{instance="2"}': "1x30"},
    ),
)


def promtool(*words: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool not found; on Debian: apt-get install prometheus")
    done = subprocess.run([tool, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_valid() -> None:
    promtool("check", "config", DEPLOY / "prometheus.yml")


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    def case(alert_case: AlertCase, series: dict[str, str], *, fires: bool) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert_case.alert}",alertstate="firing"}})',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if now else [],
                }
                for minute, now in ((alert_case.at - 1, False), (alert_case.at, fires))
            ],
        }

    assert {alert_case.alert for alert_case in CASES} == ALERTS
    cases = [case(alert_case, alert_case.series, fires=True) for alert_case in CASES]
    cases += [case(alert_case, alert_case.calm, fires=False) for alert_case in CASES]
    rules = {"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(rules))
    promtool("test", "rules", tmp_path / "cases.yml")
