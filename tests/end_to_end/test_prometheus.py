"""A real Prometheus with the settings of deploy/ and a running mesh: all queries of dashboards and alerts work."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import PATIENCE_SECONDS
from tests.support.etcd_server import EtcdServer, free_ports
from tests.support.otlp_prometheus import Exposer
from tests.support.paths import DEPLOY

SCRAPE_SECONDS, EXPORT_SECONDS = 0.2, 0.2
RANGE = {"$__rate_interval": "4s", "$__range": "1m"}  # what Grafana would put there
# What nothing happens of here; each panel has an answer once it does.
NOTHING_YET = {
    "Incidents": "no job slows another one down",
    "Outcomes": "no incident has ended",
    "Directives and what agents made of them": "without an incident no job is throttled",
    "Resizes, by outcome": "no job's cores are changed",
    "Certificates: time left": "this mesh speaks without TLS",
}
NEVER = {
    "dropped": "a sample is dropped only where it cannot be read",
    "rejected": "an observation that makes no sense",
}


class Prometheus:
    """The server in its own directory."""

    def __init__(self, directory: Path, target: str, etcd: str) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{SCRAPE_SECONDS * 1000:.0f}ms", "evaluation_interval": "200ms"}
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        for job in config["scrape_configs"]:
            assert set(job) <= {"job_name", "honor_labels", "static_configs"}
            job["static_configs"] = [{"targets": [target if job["job_name"] == "cotenant" else etcd]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / "prometheus.log"
        words = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ask(self, path: str, **words: str) -> Any:
        """Call the HTTP API; return an empty answer while the server starts."""
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=5
            ) as answer:
                return json.load(answer)["data"]
        except OSError:
            return {}

    def series(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of each series of an expression."""
        for name, text in RANGE.items():
            expression = expression.replace(name, text)
        return [one["metric"] for one in self.ask("query", query=expression).get("result", ())]


@pytest_asyncio.fixture
async def exposer() -> AsyncIterator[Exposer]:
    made = Exposer()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def prometheus(exposer: Exposer, etcd: EtcdServer, tmp_path: Path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not here; on Debian: apt-get install prometheus")
    server = Prometheus(tmp_path, exposer.target, etcd.endpoint)
    yield server
    server.process.kill()
    server.process.wait()


@pytest_asyncio.fixture
async def mesh(exposer: Exposer, prometheus: Prometheus, tmp_path: Path) -> AsyncIterator[Mesh]:
    (tmp_path / "config.toml").write_text('gpus = "fake:2"\nsample_seconds = 0.5\n')
    (place := tmp_path / "mesh").mkdir()
    mesh = Mesh(place, "--config", str(tmp_path / "config.toml"))
    mesh.cli.environment |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": exposer.endpoint,
        "OTEL_METRIC_EXPORT_INTERVAL": str(round(EXPORT_SECONDS * 1000)),
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    await asyncio.to_thread(mesh.start)
    yield mesh
    await asyncio.to_thread(mesh.close)


def panels() -> Iterator[tuple[str, str, str]]:
    """Return title, expression and legend of every query of a dashboard, as Grafana reads it."""
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"], target["legendFormat"]


def wait_for_answers(prometheus: Prometheus) -> None:
    """Wait until each expression has data with the label of its legend."""
    left = {one: "" for one in panels() if one[0] not in NOTHING_YET and one[2] not in NEVER}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
        for title, expression, legend in list(left):
            found = prometheus.series(expression)
            if found and all(one.get(label) for one in found for label in re.findall(r"{{(\w+)}}", legend)):
                del left[title, expression, legend]
            else:
                left[title, expression, legend] = str(found)


async def test_dashboards_and_alerts_have_data(mesh: Mesh, prometheus: Prometheus) -> None:
    def work() -> None:
        submit = mesh.cli.submit
        submit("--gpus", "2", "--cpus", "1", "--kind", "training", "--tenant", "a", "--", "sleep", "600")
        waits = submit("--gpus", "1", "--cpus", "1", "--tenant", "b", "--", "true")  # all GPUs are held
        submit("--gpus", "0", "--cpus", "1", "--", "false")
        submit("--gpus", "0", "--cpus", "1", "--", "true")
        mesh.cli("explain", waits)  # which foretells when it starts

    await asyncio.to_thread(work)
    await asyncio.to_thread(wait_for_answers, prometheus)
    targets = prometheus.ask("targets")["activeTargets"]
    assert {one["labels"]["job"]: one["health"] for one in targets} == {"cotenant": "up", "etcd": "up"}
    groups = prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in rules} == {
        rule["alert"]: ("ok", "")
        for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    }
    (jobs,) = {(one["job"], one["instance"]) for one in prometheus.series("cotenant_queue_jobs")}
    assert jobs[0] == "cotenant/cotenant-cotenant"  # the process's own, not the collector's
    assert jobs[1]
