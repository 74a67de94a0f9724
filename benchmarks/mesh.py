"""Submissions and job starts per second of a mesh, with simulated agents that use the real stream.

The mesh runs in its own process, as `cotenant up` does; agents and submitters share another one. The references,
measured within the same minutes, are raw commits of the same store and empty calls to the same server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.agents import SimulatedAgent  # noqa: E402 - likewise

from cotenant.rpc.access import find  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.store.open import open_store  # noqa: E402 - likewise
from cotenant.store.port import Put  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, job_service_pb2_grpc, node_service_pb2_grpc  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2 as pb  # noqa: E402 - likewise
from cotenant.v1 import node_service_pb2 as node_pb2  # noqa: E402 - likewise

AGENTS, GPUS, CORES = 100, 8, 24
JOBS = 2000
SMALL, LARGE = 500, 4000
SUBMITTERS = 64
RUN_SECONDS = 1.0
RUNNING_BAR, GROWTH_BAR = 200.0, 1.5
DONE = [job_pb2.JOB_PHASE_RUNNING, job_pb2.JOB_PHASE_SUCCEEDED]


@dataclass
class Run:
    """The result of a load. Times are in seconds since its start."""

    jobs: int
    submitted: float = 0.0
    running: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    assigned: dict[str, float] = field(default_factory=dict)
    rss_bytes: int = 0

    @property
    def latencies(self) -> list[float]:
        """Seconds from the submission of each job to its arrival at the agent."""
        return [self.assigned[job_id] - sent for job_id, sent in self.sent.items() if job_id in self.assigned]


def serve(state_dir: str, store: str) -> None:
    """Run a mesh in this process: every service, without agents."""
    from cotenant import telemetry
    from cotenant.cli.mesh.embedded import MeshConfig, start_mesh

    async def run() -> None:
        telemetry.setup("cli")
        config = MeshConfig(Path(state_dir), store_url=store, options={"queue": {"mode": "backfill"}})
        mesh = await start_mesh(config)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await mesh.close()

    asyncio.run(run())


@asynccontextmanager
async def mesh(store: str) -> AsyncIterator[tuple[grpc.aio.Channel, int]]:
    """Run a mesh in a separate process; yield a channel to it and its pid."""
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as directory:
        command = [sys.executable, __file__, "--serve", directory, "--store", store]
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | {"COTENANT_LOG": "error"})
        try:
            while not (Path(directory) / "endpoint.json").exists():
                if process.returncode is not None:
                    raise RuntimeError(f"the mesh exited with {process.returncode} before it served")
                await asyncio.sleep(0.05)
            access = find(Path(directory), {})
            async with connect(access.endpoints.queue, access.token) as channel:
                yield channel, process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def load(channel: grpc.aio.Channel, pid: int, jobs: int) -> Run:
    """Submit jobs as fast as the mesh accepts them, and wait until each runs."""
    run = Run(jobs)
    begin = time.perf_counter()

    def assigned(job_id: str) -> None:
        run.assigned[job_id] = time.perf_counter() - begin

    agents = [
        SimulatedAgent(f"node-{n:03}", channel, gpus=GPUS, cores=CORES, run_seconds=RUN_SECONDS, on_assigned=assigned)
        for n in range(AGENTS)
    ]
    for agent in agents:
        agent.start()
    await _until(lambda: _nodes_ready(channel))
    stub = cast("job_service_pb2_grpc.JobServiceAsyncStub", job_service_pb2_grpc.JobServiceStub(channel))
    numbers = iter(range(jobs))
    begin = time.perf_counter()

    async def submit() -> None:
        for number in numbers:
            sent = time.perf_counter() - begin
            answer = await stub.CreateJob(pb.CreateJobRequest(spec=_spec(), request_id=f"{jobs}-{number}"))
            run.sent[answer.job.id] = sent

    async def all_ran() -> bool:
        if len(run.assigned) < jobs:  # a query would itself be load
            return False
        wanted = pb.ListJobsRequest(page_size=1, filter=pb.JobFilter(phases=DONE))
        return bool((await stub.ListJobs(wanted)).total_size >= before + jobs)

    before = (await stub.ListJobs(pb.ListJobsRequest(page_size=1, filter=pb.JobFilter(phases=DONE)))).total_size
    await asyncio.gather(*(submit() for _ in range(SUBMITTERS)))
    run.submitted = time.perf_counter() - begin
    await _until(all_ran)
    run.running = time.perf_counter() - begin
    run.rss_bytes = _peak_rss(pid)
    await asyncio.gather(*(agent.stop() for agent in agents))
    return run


def _spec() -> job_pb2.JobSpec:
    spec = job_pb2.JobSpec(name="bench", command=["true"], model="bench")
    role = spec.roles.add(name="worker", replicas=1)
    role.resources.gpu_milli, role.resources.cores = 1000, 3
    return spec


async def _nodes_ready(channel: grpc.aio.Channel) -> bool:
    stub = cast("node_service_pb2_grpc.NodeServiceAsyncStub", node_service_pb2_grpc.NodeServiceStub(channel))
    nodes = (await stub.ListNodes(node_pb2.ListNodesRequest(page_size=1000))).nodes
    return [node.state for node in nodes].count(node_pb2.NODE_STATE_READY) == AGENTS


async def _until(holds: Callable[[], Coroutine[Any, Any, bool]], seconds: float = 120.0) -> None:
    end = time.perf_counter() + seconds
    while not await holds():
        if time.perf_counter() > end:
            raise TimeoutError(f"timed out after {seconds:g} s")
        await asyncio.sleep(0.05)


def _peak_rss(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


async def empty_calls(channel: grpc.aio.Channel, seconds: float = 2.0) -> float:
    """Return health checks per second, with as many callers as the load."""
    stub = health_pb2_grpc.HealthStub(channel)
    end, count = time.perf_counter() + seconds, 0

    async def call() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await stub.Check(health_pb2.HealthCheckRequest())
            count += 1

    await asyncio.gather(*(call() for _ in range(SUBMITTERS)))
    return count / seconds


async def raw_commits(url: str, seconds: float = 2.0) -> float:
    """Return transactions of one write per second on a store of the same kind, with as many writers as the load."""
    store = await open_store(url)
    end, count = time.perf_counter() + seconds, 0

    async def write(number: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await store.transact([], [Put(f"bench/{number}", b"x" * 300)])
            count += 1

    await asyncio.gather(*(write(number) for number in range(SUBMITTERS)))
    await store.close()
    return count / seconds


async def measure_store(name: str, store: str, raw: str, *, quick: bool) -> list[harness.Row]:
    """Measure a mesh on one kind of store."""
    jobs = SMALL if quick else JOBS
    async with mesh(store) as (channel, pid):
        calls = await empty_calls(channel)
        run = await load(channel, pid, jobs)
    commits = await raw_commits(raw)
    rate = jobs / run.running
    p50, p99 = (harness.percentile(run.latencies, percent) * 1000 for percent in (50, 99))
    where = f"{name}: {jobs} jobs, {AGENTS} agents"
    call_ms = SUBMITTERS / calls * 1000
    return [
        harness.Row(f"{where}: submits acknowledged", jobs / run.submitted, "1/s", calls, "empty calls"),
        harness.Row(
            f"{where}: brought to running",
            rate,
            "1/s",
            commits,
            "raw commits",
            f"≥ {RUNNING_BAR:g}",
            rate >= RUNNING_BAR,
        ),
        harness.Row(f"{where}: submit to assigned, p50", p50, "ms", call_ms, "empty call"),
        harness.Row(f"{where}: submit to assigned, p99", p99, "ms", call_ms, "empty call"),
        harness.Row(f"{where}: peak RSS of the mesh", run.rss_bytes / 2**20, "MiB"),
    ]


async def measure_growth() -> harness.Row:
    """Compare the time per job of a small and a large load, each on a new mesh."""
    per_job = []
    for jobs in (SMALL, LARGE):
        async with mesh("") as (channel, pid):
            per_job.append((await load(channel, pid, jobs)).running / jobs)
    growth = per_job[1] / per_job[0]
    return harness.Row(
        f"time per job, {LARGE} against {SMALL} jobs",
        per_job[1] * 1000,
        "ms",
        per_job[0] * 1000,
        f"at {SMALL} jobs",
        f"ratio ≤ {GROWTH_BAR}",
        growth <= GROWTH_BAR,
    )


async def _measure(quick: bool) -> Sequence[harness.Row]:
    with tempfile.TemporaryDirectory() as directory:
        rows = await measure_store("sqlite", "", f"sqlite:{directory}/raw", quick=quick)
        rows += await _measure_etcd(directory, quick=quick)
    if not quick:
        rows.append(await measure_growth())
    return rows


async def _measure_etcd(directory: str, *, quick: bool) -> list[harness.Row]:
    from tests.support.etcd_server import EtcdServer, etcd_binary

    if etcd_binary() is None:
        return [harness.Row("etcd: no binary here, not measured", 0.0, "")]
    home = Path(directory) / "etcd"
    home.mkdir()
    server = EtcdServer(home)
    server.start()
    try:
        return await measure_store("etcd", server.url, server.url, quick=quick)
    finally:
        server.kill()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serve")
        parser.add_argument("--store", default="")
        options = parser.parse_args()
        serve(options.serve, options.store)
    else:
        harness.main(lambda quick: asyncio.run(_measure(quick)), __doc__ or "")
