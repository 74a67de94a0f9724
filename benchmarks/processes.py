"""A mesh for benchmarks: one process per service, an etcd of several members, and simulated agents."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import grpc.aio
from benchmarks.agents import SimulatedAgent
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.etcd_server import EtcdServer, free_ports, start_cluster

from cotenant.rpc.channel import connect
from cotenant.v1 import array_service_pb2_grpc, job_service_pb2_grpc

SERVICES = ("placement", "predictor", "queue", "contention")
START_SECONDS_MAX = 240.0  # on a machine with much other load
END_SECONDS_MAX = 20.0
GPUS, CORES = 8, 24
CHANNELS = 10  # that the agents share
RUN_SECONDS = 2.0
PROFILES = "COTENANT_BENCH_PROFILES"  # a directory in which each service writes its profile
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
    """The running processes. `pids`, `logs` and `addresses` are keyed by service; a second process has the suffix `-2`.

    `endpoints`, keyed by service, and `token` are for clients.
    """

    pids: Mapping[str, int]
    logs: Mapping[str, Path]
    addresses: Mapping[str, str]
    endpoints: Mapping[str, str]
    etcd: tuple[EtcdServer, ...]
    token: str

    @property
    def store_url(self) -> str:
        """The URL of the store for `open_store`."""
        return store_url(self.etcd)

    def processor_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each process; the members of etcd are summed."""
        used = {name: processor_seconds(pid) for name, pid in self.pids.items()}
        return used | {"etcd": sum(processor_seconds(server.pid) for server in self.etcd)}

    def peak_rss_bytes(self) -> dict[str, int]:
        """Return the peak memory of each service."""
        return {name: status_bytes(pid, "VmHWM") for name, pid in self.pids.items()}

    def event_counts(self, event: str, *words: str) -> dict[str, int]:
        """Return how often each service has logged an event with all of these words, as a warning or error."""
        wanted = (f'"event": "{event}"', *words)
        return {
            name: sum(all(word in line for word in wanted) for line in log.read_text().splitlines())
            for name, log in self.logs.items()
        }

    def pid_at(self, endpoint: str) -> int:
        """Return the pid of the process that serves at an address."""
        return self.pids[next(name for name, own in self.addresses.items() if own == endpoint)]


def store_url(etcd: tuple[EtcdServer, ...]) -> str:
    """Return the URL of an etcd cluster for `open_store`."""
    return "etcd://" + ",".join(server.endpoint for server in etcd)


@asynccontextmanager
async def mesh(
    directory: Path, etcd: tuple[EtcdServer, ...], *, replicas: int = 1, settings: str = ""
) -> AsyncIterator[Processes]:
    """Run `replicas` processes of each service by `cotenant serve`, and stop them at the end."""
    names = [
        f"{service}-{number}" if number > 1 else service for number in range(1, replicas + 1) for service in SERVICES
    ]
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)}
    endpoints = {
        service: "|".join(address for name, address in addresses.items() if _service_of(name) == service)
        for service in SERVICES
    }
    token = secrets.token_hex(16)
    directory.mkdir(mode=0o700)  # noqa: ASYNC240  # once, before anything runs
    config = directory / "settings.toml"
    config.write_text(settings)
    running: dict[str, asyncio.subprocess.Process] = {}
    logs = {name: directory / f"{name}.log" for name in names}
    try:
        for name in names:
            arguments = ["--store", store_url(etcd), "--listen", addresses[name], "--config", str(config)]
            arguments += ["--endpoints", ",".join(f"{service}={all_of}" for service, all_of in endpoints.items())]
            running[name] = await _start(name, directory, arguments, token, logs[name])
        for name, process in running.items():
            await _served(name, process, addresses[name], token)
        yield Processes(
            {name: process.pid for name, process in running.items()}, logs, addresses, endpoints, etcd, token
        )
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
        for name in running:
            sys.stderr.writelines(
                line for line in logs[name].read_text().splitlines(True) if '"level": "error"' in line
            )


def _service_of(name: str) -> str:
    return name.partition("-")[0]


async def _start(
    name: str, directory: Path, arguments: Sequence[str], token: str, log: Path
) -> asyncio.subprocess.Process:
    profiles = os.environ.get(PROFILES)
    own = {"COTENANT_LOG": "warning", "COTENANT_TOKEN": token, "PROFILE_FILE": f"{profiles}/{name}.prof"}
    with log.open("wb") as written:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", PROFILED if profiles else COTENANT),
            *("--state-dir", str(directory), "serve", _service_of(name)),
            *arguments,
            env=os.environ | own,
            stderr=written,
        )


async def _served(name: str, process: asyncio.subprocess.Process, endpoint: str, token: str) -> None:
    """Wait until a service reports SERVING."""
    end = asyncio.get_running_loop().time() + START_SECONDS_MAX
    async with connect(endpoint, token) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"{name} exited with {process.returncode} before it served")
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not yet
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"{name} is not SERVING after {START_SECONDS_MAX:g} s")
            await asyncio.sleep(0.05)


def processor_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_bytes(pid: int, name: str) -> int:
    """Return a size from /proc/PID/status, such as VmRSS."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@dataclass
class Cluster:
    """The mesh, its agents, and the jobs that have started."""

    processes: Processes
    queue: grpc.aio.Channel
    agents: list[SimulatedAgent]
    started: dict[str, float] = field(default_factory=dict)  # when each job arrived at an agent
    restarts: Counter[str] = field(default_factory=Counter)  # how often each job was started again

    def record_start(self, job_id: str) -> None:
        """Record that a job was assigned to an agent that did not run it yet."""
        if job_id in self.started:
            self.restarts[job_id] += 1
        else:
            self.started[job_id] = time.perf_counter()

    @cached_property
    def jobs(self) -> job_service_pb2_grpc.JobServiceAsyncStub:
        """The stub of the queue for jobs."""
        return cast("job_service_pb2_grpc.JobServiceAsyncStub", job_service_pb2_grpc.JobServiceStub(self.queue))

    @cached_property
    def arrays(self) -> array_service_pb2_grpc.ArrayServiceAsyncStub:
        """The stub of the queue for arrays."""
        return cast("array_service_pb2_grpc.ArrayServiceAsyncStub", array_service_pb2_grpc.ArrayServiceStub(self.queue))


@asynccontextmanager
async def cluster(nodes: int, directory: Path, *, replicas: int = 1, settings: str = "") -> AsyncIterator[Cluster]:
    """Run etcd, `replicas` processes of each service, and `nodes` agents."""
    directory.mkdir()  # noqa: ASYNC240  # once, before anything runs
    etcd = tuple(start_cluster(directory, members=3))
    try:
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(
                mesh(directory / "state", etcd, replicas=replicas, settings=settings)
            )
            endpoints = served.endpoints
            queue = await stack.enter_async_context(connect(endpoints["queue"], served.token))
            channels = [
                await stack.enter_async_context(connect(endpoints["placement"], served.token)) for _ in range(CHANNELS)
            ]
            made = Cluster(served, queue, [])
            made.agents += [
                SimulatedAgent(
                    f"node-{n:04}",
                    channels[n % CHANNELS],
                    gpus=GPUS,
                    cores=CORES,
                    run_seconds=RUN_SECONDS,
                    on_assigned=made.record_start,
                )
                for n in range(nodes)
            ]
            for agent in made.agents:
                agent.start()
            stack.push_async_callback(lambda: asyncio.gather(*(agent.stop() for agent in made.agents)))
            await until(lambda: all(agent.welcomes for agent in made.agents))
            gc.collect()
            gc.freeze()  # garbage collection over that many agents would disturb the measurement
            yield made
    finally:
        for server in etcd:
            server.kill()


async def until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait until a condition holds."""
    end = time.perf_counter() + seconds
    while not holds():
        if time.perf_counter() > end:
            raise TimeoutError(f"timed out after {seconds:g} s")
        await asyncio.sleep(0.02)
