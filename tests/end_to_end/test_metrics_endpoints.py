"""`up --metrics`: the services and each agent serve their metrics to Prometheus."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports

SERVED = re.compile(
    r'(?:metrics are served at http://|"address": ")(127\.0\.0\.1:\d+)(?:/metrics|", .*"metrics_served")'
)


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def test_a_mesh_serves_the_metrics_of_each_process(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    mesh = Mesh(tmp_path, "--gpus", "fake:1", "--metrics", "0")
    mesh.start()
    try:
        mesh.cli("submit", "--gpus", "0", "--cpus", "1", "--wait", "--", "true")
        services, agent = until(lambda: [*map(str, SERVED.findall(mesh.log.read_text()))], "two addresses")
        until(lambda: "cotenant_queue_attempts_ended_total{" in page(services), "the end of the job")
        assert 'service_name="cotenant-cotenant"' in page(services)
        until(lambda: "cotenant_agent_" in page(agent), "metrics of the agent")
        refused = mesh.cli("serve", "contention", "--listen", f"127.0.0.1:{port}", "--metrics", services, code=1)
        assert refused.error == f"error: cannot serve metrics at {services}: Address already in use"
    finally:
        mesh.close()
