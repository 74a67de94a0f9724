"""Every service of the mesh as a process of its own, over an etcd of several members, to be loaded and measured."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.etcd_server import EtcdServer, free_ports

from cotenant.rpc.channel import connect

SERVICES = ("placement", "predictor", "queue", "contention")
START_SECONDS_MAX = 60.0
END_SECONDS_MAX = 20.0
PROFILES = "COTENANT_BENCH_PROFILES"  # a folder: each service leaves its profile there
COTENANT = "from cotenant.cli.main import main; main()"
PROFILED = """
import cProfile, os
from cotenant.cli.main import main
profile = cProfile.Profile()
try:
    profile.runcall(main)
finally:
    profile.dump_stats(os.environ["PROFILE_FILE"])
"""


@dataclass(frozen=True, slots=True)
class Processes:
    """Who runs. `pids` are by service; `token` is what callers show."""

    pids: Mapping[str, int]
    endpoints: Mapping[str, str]
    etcd: tuple[EtcdServer, ...]
    token: str

    @property
    def store_url(self) -> str:
        """Name the store as `open_store` wants it."""
        return store_url(self.etcd)

    def processor_seconds(self) -> dict[str, float]:
        """What each has used since it began; the members of etcd together."""
        used = {name: processor_seconds(pid) for name, pid in self.pids.items()}
        return used | {"etcd": sum(processor_seconds(server.pid) for server in self.etcd)}

    def peak_rss_bytes(self) -> dict[str, int]:
        """The most memory that each service has had."""
        return {name: status_bytes(pid, "VmHWM") for name, pid in self.pids.items()}


def store_url(etcd: tuple[EtcdServer, ...]) -> str:
    """Name a cluster of etcd as `open_store` wants it."""
    return "etcd://" + ",".join(server.endpoint for server in etcd)


@asynccontextmanager
async def mesh(directory: Path, etcd: tuple[EtcdServer, ...]) -> AsyncIterator[Processes]:
    """Run each service by `cotenant serve`, and end them all afterwards."""
    endpoints = {name: f"127.0.0.1:{port}" for name, port in zip(SERVICES, free_ports(len(SERVICES)), strict=True)}
    token = secrets.token_hex(16)
    directory.mkdir(mode=0o700)  # noqa: ASYNC240  # once, before anything runs
    running: dict[str, asyncio.subprocess.Process] = {}
    try:
        for name in SERVICES:
            running[name] = await _start(name, directory, store_url(etcd), endpoints, token)
        for name, process in running.items():
            await _served(name, process, endpoints[name], token)
        yield Processes({name: process.pid for name, process in running.items()}, endpoints, etcd, token)
    finally:
        for process in running.values():
            if process.returncode is None:
                process.terminate()
        for process in running.values():
            try:
                await asyncio.wait_for(process.wait(), END_SECONDS_MAX)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _start(
    name: str, directory: Path, store: str, endpoints: Mapping[str, str], token: str
) -> asyncio.subprocess.Process:
    told = ",".join(f"{service}={endpoint}" for service, endpoint in endpoints.items())
    profiles = os.environ.get(PROFILES)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", PROFILED if profiles else COTENANT),
        *("--state-dir", str(directory), "serve", name, "--store", store),
        *("--listen", endpoints[name], "--endpoints", told),
        env=os.environ | {"COTENANT_LOG": "error", "COTENANT_TOKEN": token, "PROFILE_FILE": f"{profiles}/{name}.prof"},
    )


async def _served(name: str, process: asyncio.subprocess.Process, endpoint: str, token: str) -> None:
    """Wait until a service says that it serves."""
    end = asyncio.get_running_loop().time() + START_SECONDS_MAX
    async with connect(endpoint, token) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"{name} ended with {process.returncode} before it served")
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not yet
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"{name} does not serve after {START_SECONDS_MAX:g} s")
            await asyncio.sleep(0.05)


def processor_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_bytes(pid: int, name: str) -> int:
    """One of the sizes that the kernel tells of a process, such as VmRSS."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
