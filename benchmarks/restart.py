"""The start of `cotenant up` with many waiting jobs in its store, and how long it then holds its event loop.

The mesh runs in its own process, as `cotenant up` does, on an SQLite store that holds the jobs. After its start, a
client lists all jobs and submits and cancels some, while the mesh reports its loop lag and each garbage collection.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.shared_tenants import LoopLag  # noqa: E402 - likewise

from cotenant.rpc.access import find  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.storage.v1 import records_pb2  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, job_service_pb2_grpc  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2 as pb  # noqa: E402 - likewise

JOBS, JOBS_QUICK = 50_000, 5_000
GPUS = 2
BATCH = 100  # jobs per transaction
SUBMITTED, PAGE = 200, 500
AFTER_SECONDS = 12.0  # periodic work runs every five seconds
START_BAR_SECONDS, PAUSE_BAR_MS = 2.0, 50.0
LOAD_BAR_RATIO, SPECS_OF_GROWTH = 30, 500


def serve(state_dir: str) -> None:
    """Run a mesh until SIGTERM, then write `report.json` into the state directory."""
    from cotenant.cli.mesh import up
    from cotenant.cli.mesh.settings import Settings

    config = up.mesh_config(Settings(gpus=f"fake:{GPUS}", share_machine=True), Path(state_dir), {})
    pauses: list[tuple[float, int, float]] = []  # time (unix seconds), generation, and its processor time in ms
    begun = [0.0]

    def collected(phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.thread_time()
        else:
            pauses.append((time.time(), details["generation"], (time.thread_time() - begun[0]) * 1000))

    async def run() -> None:
        lag = LoopLag(culprits=False)
        sampling = asyncio.create_task(lag.run())
        published = asyncio.create_task(_published(Path(state_dir)))
        await up.run(config)
        sampling.cancel()
        report = {"late_ms": lag.late_ms, "pauses": pauses, "start_seconds": await published}
        (Path(state_dir) / "report.json").write_text(json.dumps(report))

    gc.callbacks.append(collected)
    asyncio.run(run())


async def _published(state_dir: Path) -> float:
    """Return the processor time of this process when the mesh has published its address."""
    while not (state_dir / "endpoint.json").exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    return time.process_time()


@dataclass
class Restart:
    """A measured start and what followed."""

    wall_seconds: float = 0.0  # until the mesh serves
    start_seconds: float = 0.0  # processor time until then
    late_ms: list[tuple[float, float, float]] = field(default_factory=list)
    pauses: list[tuple[float, int, float]] = field(default_factory=list)
    served: float = 0.0  # when it served, in unix seconds

    @property
    def longest_work_ms(self) -> float:
        """The longest processor time of one turn of the event loop after the start."""
        return max((work for at, _, work in self.late_ms if at > self.served + 1.0), default=0.0)

    @property
    def longest_pause_ms(self) -> float:
        """The longest garbage collection after the start."""
        return max((took for at, _, took in self.pauses if at > self.served + 1.0), default=0.0)


async def fill(state_dir: Path, jobs: int, specs_max: int = 3_000) -> None:
    """Write waiting jobs, of at most so many different specs, into the store of a mesh that does not run."""
    from cotenant.cli.mesh.embedded import STORE_FILE
    from cotenant.codec import specs
    from cotenant.services.queue.jobs import job_store
    from cotenant.services.queue.jobs.transitions import new_record
    from cotenant.store.open import open_store
    from cotenant.store.port import Put

    store = await open_store(f"sqlite:{state_dir / STORE_FILE}")
    try:
        for start in range(0, jobs, BATCH):
            puts = []
            for number in range(start, min(jobs, start + BATCH)):
                spec = specs.spec_from_wire(_spec(number % specs_max))
                record = new_record(f"job-{number:08}", spec, "alice", "")
                puts.append(Put(job_store.JOBS + record.id, record.packed))
            await store.transact([], puts)
    finally:
        await store.close()


def _spec(number: int) -> job_pb2.JobSpec:
    """Return one of many short jobs; each takes all GPUs, so one runs at a time."""
    spec = job_pb2.JobSpec(name=f"job-{number % 500}", tenant=f"t{number % 8}", model=f"m{number % 40}")
    spec.command.extend(["true", f"--seed={number % 500}"])
    role = spec.roles.add(name="worker", replicas=1)
    role.resources.gpu_milli, role.resources.cores = 1000 * GPUS, 1
    role.resources.memory_bytes = (4 + number % 60) << 20
    return spec


def raw_load_seconds(state_dir: Path) -> float:
    """Return the processor time of reading and parsing all values of the store's file."""
    begin = time.process_time()
    with closing(sqlite3.connect(state_dir / "cotenant.sqlite")) as connection:
        for (value,) in connection.execute("SELECT value FROM entries WHERE key LIKE 'queue/jobs/%'"):
            records_pb2.StoredJob.FromString(value)
    return time.process_time() - begin


async def load_seconds(state_dir: Path) -> float:
    """Return the processor time in which a queue reads all jobs of an open store's file into its memory."""
    from cotenant.cli.mesh.embedded import STORE_FILE
    from cotenant.services.queue.jobs.job_store import JobStore
    from cotenant.services.queue.jobs.queue_state import State
    from cotenant.store.open import open_store

    store = await open_store(f"sqlite:{state_dir / STORE_FILE}")
    try:
        begin = time.process_time()
        await JobStore(store, State()).load()
        return time.process_time() - begin
    finally:
        await store.close()


def growth(jobs: int) -> Sequence[harness.Row]:
    """Measure the load of one job in three sizes of the queue: it must not grow with their number."""
    rows = []
    for count in (0, jobs // 4, jobs // 2, jobs):  # the first only for its imports
        with tempfile.TemporaryDirectory(prefix="cotenant-bench-", ignore_cleanup_errors=True) as directory:
            asyncio.run(fill(Path(directory), count, SPECS_OF_GROWTH))
            raw = raw_load_seconds(Path(directory))
            loaded = asyncio.run(load_seconds(Path(directory)))
        if not count:
            continue
        rows.append(
            harness.Row(
                f"{count:,} waiting jobs: load of one",
                loaded / count * 1e6,
                "µs",
                raw / count * 1e6,
                "reading and parsing its value",
                f"≤ {LOAD_BAR_RATIO} times",
                loaded <= LOAD_BAR_RATIO * raw,
            )
        )
    return rows


async def restart(state_dir: Path) -> Restart:
    """Start a mesh, use it for a while, and stop it."""
    measured, begin = Restart(), time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--serve",
        str(state_dir),
        env=os.environ | {"COTENANT_LOG": "error"},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while not (state_dir / "endpoint.json").exists():
            if process.returncode is not None:
                raise RuntimeError(f"the mesh exited with {process.returncode} before it served")
            await asyncio.sleep(0.02)
        measured.wall_seconds, measured.served = time.perf_counter() - begin, time.time()
        access = find(state_dir, {})
        async with connect(access.endpoints.queue, access.token) as channel:
            await _use(cast("job_service_pb2_grpc.JobServiceAsyncStub", job_service_pb2_grpc.JobServiceStub(channel)))
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
    report = json.loads((state_dir / "report.json").read_text())
    measured.start_seconds, measured.late_ms, measured.pauses = (
        report["start_seconds"],
        report["late_ms"],
        report["pauses"],
    )
    return measured


async def _use(jobs: job_service_pb2_grpc.JobServiceAsyncStub) -> None:
    """List all jobs; submit and cancel some."""
    until, token = time.monotonic() + AFTER_SECONDS, ""
    while True:
        page = await jobs.ListJobs(pb.ListJobsRequest(page_size=PAGE, page_token=token), timeout=60)
        if not (token := page.next_page_token):
            break
    ids = [(await jobs.CreateJob(pb.CreateJobRequest(spec=_spec(one)), timeout=60)).job.id for one in range(SUBMITTED)]
    for job_id in ids:
        await jobs.CancelJob(pb.CancelJobRequest(id=job_id), timeout=60)
    await asyncio.sleep(max(0.0, until - time.monotonic()))


def measure(quick: bool) -> Sequence[harness.Row]:
    """Start a mesh on an empty store and on a full one."""
    jobs = JOBS_QUICK if quick else JOBS
    found = {}
    for count in (0, jobs):
        with tempfile.TemporaryDirectory(prefix="cotenant-bench-", ignore_cleanup_errors=True) as directory:
            asyncio.run(fill(Path(directory), count))
            raw = raw_load_seconds(Path(directory))
            found[count] = asyncio.run(restart(Path(directory)))
    empty, full, where = found[0], found[jobs], f"{jobs:,} waiting jobs"
    load_seconds = full.start_seconds - empty.start_seconds
    return [
        harness.Row(
            f"{where}: start of `cotenant up`, processor time",
            full.start_seconds,
            "s",
            empty.start_seconds,
            "with an empty store",
            f"≤ {START_BAR_SECONDS:g} s",
            full.start_seconds <= START_BAR_SECONDS,
        ),
        harness.Row(f"{where}: of which for them", load_seconds, "s", raw, "reading and parsing the values"),
        harness.Row(f"{where}: start of `cotenant up`", full.wall_seconds, "s", empty.wall_seconds, "with none"),
        harness.Row(
            f"{where}: longest work of the event loop",
            full.longest_work_ms,
            "ms",
            empty.longest_work_ms,
            "with an empty store",
            f"≤ {PAUSE_BAR_MS:g} ms",
            full.longest_work_ms <= PAUSE_BAR_MS,
        ),
        harness.Row(
            f"{where}: longest garbage collection",
            full.longest_pause_ms,
            "ms",
            empty.longest_pause_ms,
            "with an empty store",
        ),
        *growth(jobs),
    ]


if __name__ == "__main__":
    if "--serve" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serve", required=True)
        serve(parser.parse_args().serve)
    else:
        harness.main(measure, __doc__ or "")
