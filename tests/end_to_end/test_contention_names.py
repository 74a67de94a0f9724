"""Agents that reach all contention replicas by one DNS name, as with a headless service on Kubernetes, with TLS.

The name is in a file of hosts that the agents alone see, in mount namespaces of their own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc.aio
import pytest
from tests.end_to_end import remains
from tests.end_to_end.commands import TRACEBACK, Cli, Serving, environment_of
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports

from cotenant.rpc.channel import connect
from cotenant.rpc.rendezvous_hash import ranked
from cotenant.security.certificates import Authority
from cotenant.security.subjects import Subject
from cotenant.security.tls_files import TlsFiles
from cotenant.v1.contention_service_pb2 import ListSamplesRequest
from cotenant.v1.contention_service_pb2_grpc import ContentionServiceStub

pytestmark = pytest.mark.root
NAME = "contention.mesh"
AGENT = (  # checks more often whether its own replica is up
    "from cotenant.node_agent.control import contention_link as link; link.PREFERRED_CHECK_SECONDS = 0.5\n"
    "from cotenant.cli.main import main; main()"
)
WITH_HOSTS = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
SAMPLE_SECONDS = 0.2


class Lab:
    """Contention replicas at loopback addresses, and agents."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "certs")
        self.authority.create()
        self.hosts = directory / "hosts"
        (self.port,) = free_ports(1)
        self.cli = Cli(environment_of(directory, COTENANT_STATE_DIR=str(directory / "state")))
        self.serving = ExitStack()
        self.replicas: dict[str, Serving] = {}
        self.shown = self.issue("operator/ann")
        (directory / "agent.toml").write_text(f"sample_seconds = {SAMPLE_SECONDS}\n")

    def issue(self, subject: str, *names: str) -> TlsFiles:
        issued = self.authority.issue(Subject.parse(subject), names)
        return TlsFiles(self.authority.cert_path, issued.path, issued.key_path)

    def name(self, *hosts: str) -> None:
        """Set the addresses of the name, in place: the hosts file is mounted."""
        self.hosts.write_text("".join(f"{host} {NAME}\n" for host in ("127.0.0.1 localhost #", *hosts)))

    def start_replica(self, host: str) -> None:
        words = ("--listen", f"{host}:{self.port}", "--endpoints", "queue=127.0.0.1:1")
        log = self.directory / f"contention-{host}.log"
        files = flags(self.issue("service/contention", NAME, f"*.{NAME}"))
        self.replicas[host] = self.cli.start("serve", "contention", *words, *files, log=log)
        self.serving.callback(self.replicas[host].kill)

    def start_agent(self, node: str) -> None:
        endpoints = f"placement=127.0.0.1:1,contention={NAME}:{self.port}"
        words = (
            "--node",
            node,
            "--endpoints",
            endpoints,
            "--gpus",
            "fake:1",
            "--config",
            str(self.directory / "agent.toml"),
        )
        command = [sys.executable, "-c", AGENT, "serve", "agent", *words, *flags(self.issue(f"agent/{node}"))]
        inside = ["unshare", "--mount", "sh", "-c", WITH_HOSTS, "sh", str(self.hosts), *command]
        log = self.directory / f"{node}.log"
        process = Serving(inside, self.cli.environment, log)
        self.serving.callback(process.terminate)

    def homes(self, nodes: list[str]) -> dict[str, str]:
        """Return the replica that receives each node's samples: the one with the newest sample."""
        return asyncio.run(self._homes(nodes))

    async def _homes(self, nodes: list[str]) -> dict[str, str]:
        newest: dict[str, tuple[float, str]] = {}
        for host, process in self.replicas.items():
            if process.ended():
                continue
            async with connect(f"{host}:{self.port}", tls=self.shown, called=f"contention-7.{NAME}") as channel:
                try:
                    answer = await ContentionServiceStub(channel).ListSamples(ListSamplesRequest())
                except grpc.aio.AioRpcError:
                    continue
            for sample in answer.samples:
                at = (sample.time.ToNanoseconds(), host)
                newest[sample.node_id] = max(newest.get(sample.node_id, (0, "")), at)
        return {node: newest[node][1] for node in nodes if node in newest}


def flags(files: TlsFiles) -> list[str]:
    return ["--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if os.getuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel or container gives no mount namespace")
    made = Lab(tmp_path)
    with made.serving:
        yield made
    remains.remove(remains.groups_of_nodes(prefix(tmp_path)))


def prefix(directory: Path) -> str:
    return f"{directory.name[-12:]}-{os.getpid()}-".replace("_", "-")


def test_each_node_has_a_home_replica_behind_one_name_and_finds_it_again(lab: Lab) -> None:
    first, second, third = (f"127.0.0.{number}" for number in (2, 3, 4))

    def wanted(*hosts: str) -> dict[str, str]:
        addresses = [f"{host}:{lab.port}" for host in hosts]
        return {node: ranked(node, addresses)[0].partition(":")[0] for node in nodes}

    names = [f"{prefix(lab.directory)}{number}" for number in range(100)]
    nodes = names
    two = wanted(first, second)
    later = wanted(second, third)
    # The home of one node stays, that of two is replaced: one moves to the new replica, the other to the remaining one.
    kinds = ((second, second), (first, third), (first, second))
    nodes = [next(node for node in names if (two[node], later[node]) == kind) for kind in kinds]

    lab.name(first, second)
    for host in (first, second):
        lab.start_replica(host)
    for node in nodes:
        lab.start_agent(node)
    until(lambda: lab.homes(nodes) == wanted(first, second), "home of each node")
    lab.replicas[first].kill()
    until(lambda: lab.homes(nodes) == wanted(second), "node that has gone over")
    lab.start_replica(third)  # like a replaced pod: same name, other address
    lab.name(third, second)
    until(lambda: lab.homes(nodes) == wanted(second, third), "return of those whose home is there again")
    assert all(TRACEBACK not in path.read_text() for path in lab.directory.glob("*.log"))
