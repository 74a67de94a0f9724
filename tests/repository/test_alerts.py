"""Prometheus' files by Prometheus' own tool: it takes them, and each alert comes when it should and not before."""

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
class Story:
    """Series, a value for each minute, of which an alert comes at `at` and not a minute before; `calm` bring none."""

    alert: str
    series: dict[str, str]
    at: int  # minutes
    calm: dict[str, str]


LOOP, CYCLE = "cotenant_loop_delay_seconds", "cotenant_queue_cycle_seconds"
COMMITS = 'cotenant_placement_commits_total{outcome="StoreUnavailable"}'

CERTIFICATE, FORTNIGHT = "cotenant_certificate_left_seconds", 14 * 86_400


def histogram(name: str, below: float, above: float, quick: str) -> dict[str, str]:
    """A thousand events a minute, none of which took longer than `above`, and so many not even as long as `below`."""
    counts = {f"{below:g}": quick, f"{above:g}": "0+1000x30", "+Inf": "0+1000x30"}
    return {f'{name}_bucket{{le="{bound}"}}': values for bound, values in counts.items()}


SIZE, LIMIT = 'cotenant_store_size_bytes{of="size"}', 'cotenant_store_limit_bytes{of="limit"}'
KEPT, BUDGET = 'cotenant_queue_kept_bytes{tenant="a"}', 'cotenant_queue_budget_bytes{tenant="a"}'
FREE, RESERVE = 'cotenant_agent_disk_bytes{of="free"}', 'cotenant_agent_disk_bytes{of="reserve"}'

STORIES = (
    Story("StoreNearlyFull", {SIZE: "70 70 76x20", LIMIT: "100x30"}, 4, {SIZE: "75x30", LIMIT: "100x30"}),
    Story("TenantBudgetUsed", {KEPT: "90 91x20", BUDGET: "100x30"}, 6, {KEPT: "90x30", BUDGET: "100x30"}),
    Story("DiskReserveEntered", {FREE: "100 99x20", RESERVE: "100x30"}, 2, {FREE: "100x30", RESERVE: "100x30"}),
    Story("StoreAway", {COMMITS: "0 0 0 1+1x20"}, 4, {COMMITS: "7x30"}),
    Story(
        "StoreWentBack",
        {'cotenant_store_distrusted{instance="a"}': "0 0 1x20", 'cotenant_store_distrusted{instance="b"}': "0x22"},
        2,
        {"cotenant_store_distrusted": "0x30"},
    ),
    Story(
        "NodesLost",
        {'cotenant_placement_nodes{state="lost",instance="a"}': "0 0 2x20"},
        7,
        {'cotenant_placement_nodes{state="away"}': "5x20", 'cotenant_placement_nodes{state="lost"}': "0 1 1 1 0x20"},
    ),
    Story(
        "GpusIll",
        {'cotenant_placement_gpus{state="ill"}': "0 0 1x20"},
        7,
        {'cotenant_placement_gpus{state="ill"}': "0x20", 'cotenant_placement_gpus{state="free"}': "8x20"},
    ),
    Story(
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
    Story(  # two replicas bear it, and one of them has read the new file already
        "CertificateRunsOut",
        {f'{CERTIFICATE}{{instance="a"}}': f"{FORTNIGHT + 1}-1x20", f'{CERTIFICATE}{{instance="b"}}': "2592000x20"},
        7,
        {f'{CERTIFICATE}{{instance="a"}}': f"{FORTNIGHT + 60}-1x30"},
    ),
    Story(
        "NodesHeld",
        {'cotenant_placement_nodes_held{reason="cannot_launch"}': "1x30"},
        2,
        {'cotenant_placement_nodes_held{reason="cannot_launch"}': "0x30"},
    ),
    Story("LoopStalled", histogram(LOOP, 0.25, 1.0, "0x30"), 11, histogram(LOOP, 0.25, 1.0, "0+999x30")),
    Story("SlowCycle", histogram(CYCLE, 5.0, 10.0, "0x30"), 11, histogram(CYCLE, 5.0, 10.0, "0+999x30")),
    Story(
        "EtcdWithoutQuorum",
        {'etcd_server_has_leader{instance="1"}': "1x30", 'etcd_server_has_leader{instance="2"}': "1 1 0x20"},
        3,
        {'etcd_server_has_leader{instance="1"}': "1x30", 'etcd_server_has_leader{instance="2"}': "1x30"},
    ),
)


def promtool(*words: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not here; on Debian: apt-get install prometheus")
    done = subprocess.run([tool, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_settings_can_be_taken() -> None:
    promtool("check", "config", DEPLOY / "prometheus.yml")


def test_each_alert_comes_when_it_should_and_not_before(tmp_path: Path) -> None:
    def case(story: Story, series: dict[str, str], *, comes: bool) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{story.alert}",alertstate="firing"}})',
                    "eval_time": f"{minute}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if now else [],
                }
                for minute, now in ((story.at - 1, False), (story.at, comes))
            ],
        }

    assert {story.alert for story in STORIES} == ALERTS
    cases = [case(story, story.series, comes=True) for story in STORIES]
    cases += [case(story, story.calm, comes=False) for story in STORIES]
    told = {"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "stories.yml").write_text(yaml.safe_dump(told))
    promtool("test", "rules", tmp_path / "stories.yml")
