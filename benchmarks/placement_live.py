"""The cost of a live scheduling cycle: queue and placement with simulated agents, all in one process.

The cluster is full, and gangs of 84 shapes wait. Then one more gang arrives, or a running one ends, and the next cycle
is timed: its wall time in the queue, and the CPU time of placement within it. The reference is an empty call.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness, placement_speed  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.agents import SimulatedAgent  # noqa: E402 - likewise

from cotenant.cli.mesh.embedded import MeshConfig, start_mesh  # noqa: E402 - likewise
from cotenant.rpc.access import find  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.services.placement.planning import planner  # noqa: E402 - likewise
from cotenant.services.queue.scheduling.scheduler import Scheduler  # noqa: E402 - likewise
from cotenant.simulator.traces import TraceJob  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, job_service_pb2_grpc  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2 as pb  # noqa: E402 - likewise

SIZES = ((100, 1_000), (300, 3_000), (1_000, 10_000))  # nodes, and gangs that wait
GPUS, CORES = 8, 24
STEPS = 10  # arrivals that are measured, and ends
SUBMITTERS = 64
QUIET_SECONDS = 0.5


@dataclass
class CycleTimes:
    """Durations of the cycles since the last reset, and the CPU time of placement in them, in milliseconds."""

    cycles: list[float] = field(default_factory=list)
    deciding: float = 0.0
    ended: float = 0.0

    def reset(self) -> tuple[float, float]:
        """Return the longest cycle and the CPU time of placement, and start over."""
        result = max(self.cycles, default=0.0), self.deciding
        self.cycles, self.deciding = [], 0.0
        return result


@contextmanager
def timed_cycles() -> Iterator[CycleTimes]:
    """Time the cycles of the queue and the plans of placement."""
    times, cycle = CycleTimes(), Scheduler._cycle  # the whole cycle, also the part outside of placement

    async def timed(scheduler: Scheduler) -> float:
        began = time.perf_counter()
        try:
            return await cycle(scheduler)
        finally:
            times.ended = time.perf_counter()
            times.cycles.append(1e3 * (times.ended - began))

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **named)
            finally:
                times.deciding += 1e3 * (time.process_time() - began)

        return call

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(Scheduler, "_cycle", timed))
        for name in ("plan", "decide", "answer"):
            patched.enter_context(mock.patch.object(planner, name, counted(getattr(planner, name))))
        yield times


@asynccontextmanager
async def mesh(nodes: int, placement: str) -> AsyncIterator[tuple[grpc.aio.Channel, list[SimulatedAgent]]]:
    """Run a mesh with `nodes` agents and rare heartbeats."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cotenant-bench-")))
        config = MeshConfig(
            directory,
            placement=placement,
            options={"queue": {"mode": "backfill"}},
            heartbeat_seconds=60.0,
            lost_after_seconds=600.0,
        )
        served = await start_mesh(config)
        stack.push_async_callback(served.close)
        access = find(directory, {})
        channel = await stack.enter_async_context(connect(access.endpoints.queue, access.token))
        agents = [SimulatedAgent(f"node-{n:05}", channel, gpus=GPUS, cores=CORES) for n in range(nodes)]
        for agent in agents:
            agent.start()
        stack.push_async_callback(lambda: asyncio.gather(*(agent.stop() for agent in agents)))
        await until(lambda: all(agent.welcomes for agent in agents))
        yield channel, agents


async def until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait until a condition holds."""
    end = time.perf_counter() + seconds
    while not holds():
        if time.perf_counter() > end:
            raise TimeoutError(f"timed out after {seconds:g} s")
        await asyncio.sleep(0.02)


def spec(job: TraceJob) -> job_pb2.JobSpec:
    """Return the job specification of a gang."""
    job_spec = job_pb2.JobSpec(name=job.id, command=["true"], model="bench")
    role = job_spec.roles.add(name="worker", replicas=job.roles[0].replicas)
    asked = job.roles[0].request
    role.resources.gpu_milli, role.resources.cores = asked.gpu_milli, asked.cores or 0
    role.resources.memory_bytes = asked.memory_bytes
    return job_spec


async def submit(channel: grpc.aio.Channel, specs: Sequence[job_pb2.JobSpec]) -> None:
    """Submit jobs concurrently."""
    stub = cast("job_service_pb2_grpc.JobServiceAsyncStub", job_service_pb2_grpc.JobServiceStub(channel))
    left = iter(specs)

    async def one_by_one() -> None:
        for each in left:
            await stub.CreateJob(pb.CreateJobRequest(spec=each))

    await asyncio.gather(*(one_by_one() for _ in range(SUBMITTERS)))


async def measure_size(nodes: int, waiting: int, placement: str) -> list[harness.Row]:
    """Fill a cluster, queue gangs, and time the cycle after one event."""
    logging.getLogger().setLevel(logging.ERROR)  # agents disconnect at the end, which is no error
    with timed_cycles() as times:
        async with mesh(nodes, placement) as (channel, agents):
            whole = job_pb2.JobSpec(name="whole", command=["true"], model="bench")
            role = whole.roles.add(name="worker", replicas=1)
            role.resources.gpu_milli, role.resources.cores = 1000 * GPUS, CORES
            await submit(channel, [whole] * nodes)
            await until(lambda: all(agent.attempts for agent in agents))
            await submit(channel, [spec(job) for job in placement_speed.jobs(waiting, alike=True)])
            await quiet(times)
            call_ms = await empty_call_ms(channel)
            rows: list[harness.Row] = []
            one = [spec(job) for job in placement_speed.jobs(STEPS, alike=True, seed=1)]
            for what in ("came", "ended"):
                took: list[tuple[float, float]] = []
                for number in range(STEPS):
                    times.reset()
                    if what == "came":
                        await submit(channel, [one[number]])
                    else:
                        agents[number].finish(next(iter(agents[number].attempts)))
                    await until(lambda: bool(times.cycles))
                    await quiet(times)
                    took.append(times.reset())
                name = f"{placement}: one {what}, {waiting:,} wait, {nodes:,} nodes"
                cycle, deciding = (statistics.median(each) for each in zip(*took, strict=True))
                rows.append(harness.Row(f"{name}: cycle", cycle, "ms", call_ms, "an empty call"))
                rows.append(harness.Row(f"{name}: placement's part, processor", deciding, "ms"))
    return rows


async def quiet(times: CycleTimes) -> None:
    """Wait until no cycle has run for a while."""
    times.ended = max(times.ended, time.perf_counter())
    await until(lambda: time.perf_counter() - times.ended > QUIET_SECONDS)


async def empty_call_ms(channel: grpc.aio.Channel, calls: int = 200) -> float:
    """Return the milliseconds of a health check."""
    stub = health_pb2_grpc.HealthStub(channel)
    began = time.perf_counter()
    for _ in range(calls):
        await stub.Check(health_pb2.HealthCheckRequest())
    return 1e3 * (time.perf_counter() - began) / calls


def measure(quick: bool) -> list[harness.Row]:
    """Measure all sizes, or the smallest."""
    rows: list[harness.Row] = []
    for nodes, waiting in SIZES[:1] if quick else SIZES:
        rows += asyncio.run(measure_size(nodes, waiting, "consolidate"))
    return rows


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
