"""The delay that a tenant's large arrays cause to another tenant of equal weight, and to all callers of the mesh.

One tenant submits nine arrays of 10,000 real tasks to a mesh with one real agent; then another tenant submits one job.
The mesh runs in its own process, as `cotenant up` does, and reports its loop lag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc.aio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.rpc.access import find  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.v1 import array_service_pb2 as array_pb  # noqa: E402 - likewise
from cotenant.v1 import array_service_pb2_grpc, job_pb2, job_service_pb2_grpc  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2 as pb  # noqa: E402 - likewise

ARRAYS, TASKS = 9, 10_000
ARRAYS_QUICK, TASKS_QUICK = 3, 2_000
GPUS = 2
POLL_SECONDS = 0.005  # between two samples of the loop
PROBE_SECONDS = 0.02  # between two calls of an uninvolved client
LAG_BAR_MS, CALL_BAR_MS, SUBMIT_BAR_SECONDS, START_BAR_SECONDS = 50.0, 100.0, 10.0, 5.0
AFTER_SECONDS, AFTER_SECONDS_QUICK = 15.0, 6.0  # periodic work runs every five seconds
ENDED = (job_pb2.JOB_PHASE_SUCCEEDED, job_pb2.JOB_PHASE_FAILED, job_pb2.JOB_PHASE_CANCELLED)
STARTED = (job_pb2.JOB_PHASE_RUNNING, *ENDED)


# The mesh ------------------------------------------------------------------------------------------------------


class LoopLag:
    """Samples the lag of the event loop; with `culprits`, a thread prints what the loop is executing."""

    def __init__(self, *, culprits: bool) -> None:
        self.late_ms: list[tuple[float, float, float]] = []  # time (unix seconds), lag, and CPU time within it
        self._due = time.perf_counter() + 1.0
        self._main = threading.get_ident()
        if culprits:
            threading.Thread(target=self._watch, daemon=True).start()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            worked, self._due = time.thread_time(), time.perf_counter() + POLL_SECONDS
            await asyncio.sleep(POLL_SECONDS)
            late = time.perf_counter() - self._due
            if late > 0.01:
                self.late_ms.append((time.time(), late * 1000, (time.thread_time() - worked) * 1000))

    def _watch(self) -> None:
        while True:
            time.sleep(0.02)
            if time.perf_counter() - self._due > LAG_BAR_MS / 1000:
                stack = traceback.extract_stack(sys._current_frames()[self._main])
                where = " < ".join(f"{Path(one.filename).name}:{one.lineno}:{one.name}" for one in stack[-1:-9:-1])
                late = (time.perf_counter() - self._due) * 1000
                print(f"LATE {late:.0f} ms {where}", file=sys.stderr, flush=True)


def serve(state_dir: str, fair_share: str, *, culprits: bool) -> None:
    """Run a mesh until SIGTERM, then write `lag.json` into the state directory."""
    from cotenant import telemetry
    from cotenant.cli.mesh import up
    from cotenant.cli.mesh.embedded import start_mesh
    from cotenant.cli.mesh.settings import Settings
    from cotenant.rpc import gc_tuning

    given = {"fair_share": fair_share} if fair_share and "fair_share" in Settings.__dataclass_fields__ else {}
    config = up.mesh_config(Settings(gpus=f"fake:{GPUS}", **given), Path(state_dir), {})  # type: ignore[arg-type]  # texts

    async def run() -> None:
        telemetry.setup("cli")
        mesh = await start_mesh(config)
        gc_tuning.tune_gc()
        lag = LoopLag(culprits=culprits)
        sampling = asyncio.create_task(lag.run())
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        sampling.cancel()
        (Path(state_dir) / "lag.json").write_text(json.dumps(lag.late_ms))
        await mesh.close()

    asyncio.run(run())


@dataclass
class Load:
    """The result of a load, in seconds."""

    submits: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)  # of an uninvolved client during the submissions
    waited: float = 0.0  # from the other tenant's submission to the start of its job
    outlook: str = ""
    rss_before: int = 0
    rss_after: int = 0
    late_ms: list[tuple[float, float, float]] = field(default_factory=list)
    begin: float = 0.0


@asynccontextmanager
async def mesh(fair_share: str, load: Load, *, culprits: bool) -> AsyncIterator[tuple[grpc.aio.Channel, int]]:
    """Run a mesh in a separate process; yield a channel to it and its pid."""
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, __file__, "--serve", directory, "--fair-share", fair_share]
        command += ["--culprits"] if culprits else []
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
            with suppress(OSError):
                load.late_ms = json.loads((Path(directory) / "lag.json").read_text())


def _spec(tenant: str, tasks: int = 0) -> job_pb2.JobSpec:
    spec = job_pb2.JobSpec(name=f"of-{tenant}", tenant=tenant, command=["true"])
    if tasks:
        spec.array.ranges.add(first=0, last=tasks - 1)
    role = spec.roles.add(name="worker", replicas=1)
    role.resources.gpu_milli, role.resources.cores = 1000, 1
    return spec


def _rss(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


async def _probe(stub: job_service_pb2_grpc.JobServiceAsyncStub, job_id: str, took: list[float]) -> None:
    """Act as an uninvolved client that polls one job."""
    while True:
        begin = time.perf_counter()
        await stub.GetJob(pb.GetJobRequest(id=job_id))
        took.append(time.perf_counter() - begin)
        await asyncio.sleep(PROBE_SECONDS)


async def _until(
    stub: job_service_pb2_grpc.JobServiceAsyncStub, job_id: str, phases: Sequence[job_pb2.JobPhase.ValueType]
) -> None:
    """Wait until a job is in one of some phases."""
    asked = pb.JobFilter(ids=[job_id])
    async for event in stub.WatchJobs(pb.WatchJobsRequest(filter=asked)):
        if any(job.phase in phases for job in event.jobs):
            return


async def run(
    arrays: int,
    tasks: int,
    fair_share: str = "tenants",
    *,
    culprits: bool = False,
    after_seconds: float = AFTER_SECONDS,
    start_seconds_max: float = 60.0,
) -> Load:
    """Run the load on a mesh, and observe it for a while after the other tenant's job has started."""
    load = Load()
    async with mesh(fair_share, load, culprits=culprits) as (channel, pid):
        stub = cast("job_service_pb2_grpc.JobServiceAsyncStub", job_service_pb2_grpc.JobServiceStub(channel))
        arrays_stub = cast(
            "array_service_pb2_grpc.ArrayServiceAsyncStub", array_service_pb2_grpc.ArrayServiceStub(channel)
        )
        first = (await stub.CreateJob(pb.CreateJobRequest(spec=_spec("first")))).job.id
        await _until(stub, first, ENDED)
        load.rss_before, load.begin = _rss(pid), time.time()
        probe = asyncio.create_task(_probe(stub, first, load.calls))
        for _ in range(arrays):
            begin = time.perf_counter()
            await arrays_stub.CreateArray(array_pb.CreateArrayRequest(spec=_spec("large", tasks)), timeout=120)
            load.submits.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        other = (await stub.CreateJob(pb.CreateJobRequest(spec=_spec("small")), timeout=120)).job.id
        answer = await stub.ExplainJob(pb.ExplainJobRequest(id=other), timeout=120)
        load.outlook = f"{answer.summary} | {answer.outlook}"
        with suppress(TimeoutError):
            async with asyncio.timeout(start_seconds_max):
                await _until(stub, other, STARTED)
        load.waited = time.perf_counter() - begin
        last = (await stub.ListJobs(pb.ListJobsRequest(page_size=1))).jobs[0].id
        for one in (other, last):
            answer = await stub.ExplainJob(pb.ExplainJobRequest(id=one), timeout=120)
        load.outlook += f"\nthe last task: {answer.summary} | {answer.outlook}"
        await asyncio.sleep(after_seconds)
        load.rss_after = _rss(pid)
        probe.cancel()
        with suppress(asyncio.CancelledError):
            await probe
    return load


def measure(quick: bool) -> Sequence[harness.Row]:
    """Measure the full load, or a tenth of it."""
    arrays, tasks = (ARRAYS_QUICK, TASKS_QUICK) if quick else (ARRAYS, TASKS)
    load = asyncio.run(run(arrays, tasks, after_seconds=AFTER_SECONDS_QUICK if quick else AFTER_SECONDS))
    return rows(load, f"{arrays} arrays of {tasks:,}")


def rows(load: Load, where: str) -> list[harness.Row]:
    """Return the rows of a load."""
    late = max((late for at, late, _ in load.late_ms if at >= load.begin), default=0.0)
    worked = max((work for at, _, work in load.late_ms if at >= load.begin), default=0.0)
    p99 = harness.percentile(load.calls, 99) * 1000
    slowest, growth = max(load.submits), (load.rss_after - load.rss_before) / 2**20
    return [
        harness.Row(
            f"{where}: another tenant's job starts after",
            load.waited,
            "s",
            bar=f"≤ {START_BAR_SECONDS:g} s",
            holds=load.waited <= START_BAR_SECONDS,
        ),
        harness.Row(
            f"{where}: slowest submission of an array",
            slowest,
            "s",
            bar=f"≤ {SUBMIT_BAR_SECONDS:g} s",
            holds=slowest <= SUBMIT_BAR_SECONDS,
        ),
        harness.Row(
            f"{where}: a bystander's calls, p99", p99, "ms", bar=f"< {CALL_BAR_MS:g} ms", holds=p99 < CALL_BAR_MS
        ),
        harness.Row(
            f"{where}: longest piece of work of the event loop",
            worked,
            "ms",
            bar=f"≤ {LAG_BAR_MS:g} ms",
            holds=worked <= LAG_BAR_MS,
        ),
        harness.Row(f"{where}: longest delay of the event loop, others on the machine included", late, "ms"),
        harness.Row(f"{where}: memory that the mesh takes for them", growth, "MiB"),
    ]


if __name__ == "__main__":
    if "--serve" in sys.argv or "--culprits" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serve", default="")
        parser.add_argument("--fair-share", default="tenants")
        parser.add_argument("--culprits", action="store_true")
        parser.add_argument("--arrays", type=int, default=ARRAYS)
        parser.add_argument("--tasks", type=int, default=TASKS)
        options = parser.parse_args()
        if options.serve:
            serve(options.serve, options.fair_share, culprits=options.culprits)
        else:
            shown = asyncio.run(run(options.arrays, options.tasks, options.fair_share, culprits=True))
            harness.print_table(rows(shown, f"{options.arrays} arrays of {options.tasks:,}"))
            print(shown.outlook, [round(one, 2) for one in shown.submits])
            print(sorted(((round(work), round(late)) for _, late, work in shown.late_ms), reverse=True)[:40])
    else:
        harness.main(measure, __doc__ or "")
