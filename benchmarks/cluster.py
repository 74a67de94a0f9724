"""Throughput of a cluster of 1,000 nodes and 8,000 GPUs: one process per service, on an etcd of three members.

The agents are simulated and use the real stream; they and all clients share this process. Everything runs on one
machine, which may have other load. So each rate has as references the throughput of the same bare etcd within the same
minutes, and the use of the CPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness, processes  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.mesh import empty_calls, raw_commits  # noqa: E402 - likewise
from benchmarks.processes import CORES, GPUS, Cluster, cluster, until  # noqa: E402 - likewise
from tests.support.etcd_server import etcd_binary  # noqa: E402 - likewise

from cotenant.rpc.loop_lag import STALL_SECONDS  # noqa: E402 - likewise
from cotenant.store.open import open_store  # noqa: E402 - likewise
from cotenant.v1 import array_service_pb2 as array_pb  # noqa: E402 - likewise
from cotenant.v1 import job_pb2  # noqa: E402 - likewise
from cotenant.v1 import job_service_pb2 as pb  # noqa: E402 - likewise

AGENTS, QUICK_AGENTS = (100, 300, 1_000), (100,)
SUBMITTERS, BACKLOG = 64, 500  # jobs submitted but not yet running, at most
WARM_SECONDS = 2.0
CALL_SECONDS_MAX = 300.0
SUBMITS_PER_SECOND = 50.0
WATCHERS = 100
RUNNING_BAR, SUBMIT_BAR_MS, PAGE_BAR_MS, RSS_BAR_MIB = 300.0, 100.0, 20.0, 400.0
JOB_BYTES_BAR, PICTURE_BAR_SECONDS = 4096.0, 1.0
PAGE, ARRAY = 100, 1_000  # jobs


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run: seconds of each load, watched jobs, running jobs, listed jobs."""

    load_seconds: float
    submit_seconds: float
    watched: int
    running: int
    waiting: int


FULL = Size(60, 20, 1_000, 10_000, 50_000)
SMALLER, QUICK = Size(15, 10, 100, 500, 10_000), Size(8, 5, 100, 500, 10_000)


def spec(*, gpus: int = 1, cores: int = 2, replicas: int = 1) -> job_pb2.JobSpec:
    """Return a job; without GPUs it is a CPU job."""
    job_spec = job_pb2.JobSpec(name="bench", command=["true"], model="bench")
    job_spec.kind = job_pb2.JOB_KIND_TRAINING if gpus else job_pb2.JOB_KIND_CPU
    role = job_spec.roles.add(name="worker", replicas=replicas)
    role.resources.gpu_milli, role.resources.cores = 1000 * gpus, cores
    return job_spec


async def create(bench: Cluster, job_spec: job_pb2.JobSpec) -> str:
    """Submit a job; the figures show how long it takes."""
    answer = await bench.jobs.CreateJob(pb.CreateJobRequest(spec=job_spec), timeout=CALL_SECONDS_MAX)
    return str(answer.job.id)


# Jobs brought to running -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def steadily(bench: Cluster, submit: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Submit as fast as jobs start; at the end, wait for the answers to all submissions."""
    stop, sent, first = False, 0, len(bench.started)

    async def submits() -> None:
        nonlocal sent
        while not stop:
            if sent - (len(bench.started) - first) >= BACKLOG:
                await asyncio.sleep(0.005)
                continue
            sent += 1
            await submit()

    submitters = [asyncio.ensure_future(submits()) for _ in range(SUBMITTERS)]
    try:
        yield
    finally:
        stop = True
        await asyncio.gather(*submitters)


async def load(bench: Cluster, seconds: float, where: str, raw: float) -> list[harness.Row]:
    """Submit as fast as jobs start for some seconds, then wait until all jobs run."""
    sent, one, first = 0, spec(), len(bench.started)

    async def submit() -> None:
        nonlocal sent
        sent += 1
        await create(bench, one)

    async with steadily(bench, submit):
        await asyncio.sleep(WARM_SECONDS)
        before, own, started, began = (
            bench.processes.processor_seconds(),
            time.process_time(),
            len(bench.started),
            time.perf_counter(),
        )
        await asyncio.sleep(seconds)
        took, started = time.perf_counter() - began, len(bench.started) - started
        used = {name: now - before[name] for name, now in bench.processes.processor_seconds().items()}
        used["agents and callers"] = time.process_time() - own
    await until(lambda: len(bench.started) - first >= sent)
    rate, total = started / took, sum(used.values())
    return [
        harness.Row(
            f"{where}: brought to running, for {seconds:g} s",
            rate,
            "1/s",
            raw,
            "raw commits",
            f"≥ {RUNNING_BAR:g}",
            rate >= RUNNING_BAR,
        ),
        harness.Row(f"{where}: brought to running in a processor second of all", started / total, "1"),
        harness.Row(f"{where}: processors used", total / took, "1"),
        *(
            harness.Row(
                f"{where}: processor time of a job, {name}", 1e3 * seconds / started, "ms", 1e3 * total / started, "all"
            )
            for name, seconds in used.items()
        ),
    ]


async def submits(bench: Cluster, seconds: float, where: str) -> list[harness.Row]:
    """Submit at a constant rate, independent of the answers, and time each answer."""
    calls = await empty_calls(bench.queue, 1.0)
    took: list[float] = []
    one = spec()

    async def submit() -> None:
        began = time.perf_counter()
        await create(bench, one)
        took.append(1e3 * (time.perf_counter() - began))

    waiting, began = [], time.perf_counter()
    for number in range(int(seconds * SUBMITS_PER_SECOND)):
        await asyncio.sleep(max(0.0, began + number / SUBMITS_PER_SECOND - time.perf_counter()))
        waiting.append(asyncio.ensure_future(submit()))
    await asyncio.gather(*waiting)
    p50, p99 = (harness.percentile(took, percent) for percent in (50, 99))
    name = f"{where}: submit at {SUBMITS_PER_SECOND:g}/s"
    return [
        harness.Row(f"{name}, p50", p50, "ms", 1e3 / calls, "an empty call"),
        harness.Row(
            f"{name}, p99", p99, "ms", 1e3 / calls, "an empty call", f"≤ {SUBMIT_BAR_MS:g}", p99 <= SUBMIT_BAR_MS
        ),
    ]


# Watchers ----------------------------------------------------------------------------------------------------


async def watchers(bench: Cluster, jobs: int, where: str) -> list[harness.Row]:
    """Watch jobs with many clients; each client must see the end of each job."""
    heard: list[set[str]] = [set() for _ in range(WATCHERS)]
    messages = synced = 0

    async def watch(ended: set[str]) -> None:
        nonlocal messages, synced
        only = pb.JobFilter(labels={"watched": "yes"})
        async for news in bench.jobs.WatchJobs(pb.WatchJobsRequest(filter=only)):
            synced += news.synced
            messages += len(news.jobs)
            ended |= {job.id for job in news.jobs if job.phase == job_pb2.JOB_PHASE_SUCCEEDED}

    watching = [asyncio.ensure_future(watch(each)) for each in heard]
    await until(lambda: synced == WATCHERS)
    one = spec()
    one.labels["watched"] = "yes"
    began, ids, numbers = time.perf_counter(), set[str](), iter(range(jobs))

    async def submit() -> None:
        for _ in numbers:
            ids.add(await create(bench, one))

    await asyncio.gather(*(submit() for _ in range(SUBMITTERS)))
    with contextlib.suppress(TimeoutError):  # the figure shows it
        await until(lambda: all(len(each) >= jobs for each in heard), 120.0)
    took = time.perf_counter() - began
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    lost = sum(len(ids - each) for each in heard)
    return [
        harness.Row(
            f"{where}: ends of {jobs} jobs that {WATCHERS} watchers did not hear of", lost, "", bar="0", holds=not lost
        ),
        harness.Row(f"{where}: seconds until all had heard of all", took, "s"),
        harness.Row(f"{where}: changes told to watchers", messages / took, "1/s"),
    ]


# What is kept ------------------------------------------------------------------------------------------------


async def kept(bench: Cluster, jobs: int, where: str) -> list[harness.Row]:
    """Measure the store size of running jobs and its largest value."""
    for agent in bench.agents:
        agent.run_seconds = None
    await until(lambda: not any(agent.attempts for agent in bench.agents))
    before, started = await sizes(bench), len(bench.started)
    one, numbers = spec(gpus=0, cores=1), iter(range(jobs))

    async def submit() -> None:
        for _ in numbers:
            await create(bench, one)

    began = time.perf_counter()
    await asyncio.gather(*(submit() for _ in range(SUBMITTERS)))
    await until(lambda: len(bench.started) - started >= jobs)
    took = time.perf_counter() - began
    await asyncio.sleep(WARM_SECONDS)
    after = await sizes(bench)
    each = (sum(after.values()) - sum(before.values())) / jobs
    return [
        harness.Row(
            f"{where}: {jobs:,} jobs that run on: bytes of each in the store",
            each,
            "B",
            bar=f"≤ {JOB_BYTES_BAR:g}",
            holds=each <= JOB_BYTES_BAR,
        ),
        harness.Row(f"{where}: keys of each", (len(after) - len(before)) / jobs, ""),
        harness.Row(f"{where}: the largest value in the store", max(after.values()) / 1024, "KiB"),
        harness.Row(f"{where}: brought to running until all {jobs:,} did", jobs / took, "1/s"),
    ]


async def sizes(bench: Cluster) -> dict[str, int]:
    """Return the bytes of each entry in the store, by key."""
    store = await open_store(bench.processes.store_url)
    try:
        return {one.key: len(one.key) + len(one.value) for one in (await store.list("")).entries}
    finally:
        await store.close()


# Lists -------------------------------------------------------------------------------------------------------


async def lists(bench: Cluster, jobs: int, where: str) -> list[harness.Row]:
    """Queue many jobs that need the whole cluster, and list pages of them."""
    rss = processes.status_bytes(bench.processes.pids["queue"], "VmRSS")
    for _ in range(jobs // ARRAY):
        array = spec(gpus=GPUS, cores=CORES, replicas=len(bench.agents))  # cannot start while any job runs
        array.array.ranges.add(first=0, last=ARRAY - 1)
        await bench.arrays.CreateArray(array_pb.CreateArrayRequest(spec=array), timeout=CALL_SECONDS_MAX)
    there = (await bench.jobs.ListJobs(pb.ListJobsRequest(page_size=1))).total_size
    assert there >= jobs, f"{there} jobs are listed, not {jobs}"  # some ended jobs are already in the archive
    more = processes.status_bytes(bench.processes.pids["queue"], "VmRSS") - rss
    rows = []
    for name, wanted in (
        ("", pb.JobFilter()),
        (", of a phase", pb.JobFilter(phases=[job_pb2.JOB_PHASE_QUEUED])),
        (", of a tenant", pb.JobFilter(tenant="default")),
        (", of a label", pb.JobFilter(labels={"watched": "yes"})),
    ):
        took, token = [], ""
        for _ in range(20):
            began = time.perf_counter()
            page = await bench.jobs.ListJobs(pb.ListJobsRequest(page_size=PAGE, page_token=token, filter=wanted))
            took.append(1e3 * (time.perf_counter() - began))
            token = page.next_page_token
        median = statistics.median(took)
        bar = {"": f"≤ {PAGE_BAR_MS:g}"}.get(name, "")
        rows.append(
            harness.Row(
                f"{where}: a page of {PAGE} over {there:,} jobs{name}",
                median,
                "ms",
                bar=bar,
                holds=median <= PAGE_BAR_MS if bar else None,
            )
        )
    rows.append(await first_picture(bench, there, where))
    rows.append(harness.Row(f"{where}: memory of the queue for a waiting job", more / jobs / 1024, "KiB"))
    return rows


async def first_picture(bench: Cluster, jobs: int, where: str) -> harness.Row:
    """Watch all jobs until the initial state is complete; the reference decodes the same messages once more."""
    received: list[bytes] = []
    began = time.perf_counter()
    watch = bench.jobs.WatchJobs(pb.WatchJobsRequest())
    async for message in watch:
        received.append(message.SerializeToString())
        if message.synced:
            break
    took = time.perf_counter() - began
    watch.cancel()
    began = time.perf_counter()
    for content in received:
        pb.WatchJobsResponse.FromString(content)
    decoded = time.perf_counter() - began
    name = f"{where}: first picture of a watch of {jobs:,} jobs"
    return harness.Row(
        name, took, "s", decoded, "decoding it", f"≤ {PICTURE_BAR_SECONDS:g}", took <= PICTURE_BAR_SECONDS
    )


def memory(bench: Cluster, where: str) -> list[harness.Row]:
    """Return the peak memory of each service."""
    return [
        harness.Row(
            f"{where}: peak memory, {name}",
            rss / 2**20,
            "MiB",
            bar=f"≤ {RSS_BAR_MIB:g}",
            holds=rss / 2**20 <= RSS_BAR_MIB,
        )
        for name, rss in bench.processes.peak_rss_bytes().items()
    ]


def stalls(bench: Cluster, where: str) -> list[harness.Row]:
    """Return how often event loops stalled for half a second or more, and how often a leader lost its lease."""
    lost = sum(bench.processes.event_counts("leadership_lost").values())
    return [
        *(
            harness.Row(f"{where}: stalls of {STALL_SECONDS:g} s or more, {name}", times, "")
            for name, times in bench.processes.event_counts("loop_stalled").items()
        ),
        harness.Row(f"{where}: leaders that lost their lease", lost, "", bar="0", holds=not lost),
    ]


def growth(rows: Sequence[harness.Row]) -> Iterator[harness.Row]:
    """Yield the cost of a job in the largest cluster relative to the smallest."""
    small, large = (f"{nodes:,} agents" for nodes in (AGENTS[0], AGENTS[-1]))
    values = {row.name: row.value for row in rows}
    for row in rows:
        what = row.name.removeprefix(f"{small}: ")
        if what != row.name and what.startswith("processor time of a job"):
            yield harness.Row(
                f"{large}: {what}, as the cluster grows", values[f"{large}: {what}"], "ms", row.value, small
            )


async def measure_size(nodes: int, size: Size, directory: Path) -> list[harness.Row]:
    """Measure one cluster; print each figure as soon as it is known, because the whole takes minutes."""
    where = f"{nodes:,} agents"
    rows: list[harness.Row] = []

    def report(more: Sequence[harness.Row]) -> None:
        rows.extend(more)
        for row in more:
            sys.stderr.write(f"{row.name}: {row.value:,.4g} {row.unit}\n")

    async with cluster(nodes, directory / f"of-{nodes}") as bench:
        raw = await raw_commits(bench.processes.store_url)
        report(await load(bench, size.load_seconds, where, raw))
        report(await submits(bench, size.submit_seconds, where))
        report(await watchers(bench, size.watched, where))
        report(await kept(bench, size.running, where))
        report(await lists(bench, size.waiting, where))
        report(memory(bench, where))
        report(stalls(bench, where))
    return rows


async def _measure(quick: bool) -> list[harness.Row]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as directory:
        for nodes in QUICK_AGENTS if quick else AGENTS:
            size = QUICK if quick else FULL if nodes == AGENTS[-1] else SMALLER
            rows += await measure_size(nodes, size, Path(directory))
    return rows if quick else [*rows, *growth(rows)]


def measure(quick: bool) -> Sequence[harness.Row]:
    """Measure three clusters, or a small one."""
    if etcd_binary() is None:
        return [harness.Row("etcd: no binary here, not measured", 0.0, "")]
    return asyncio.run(_measure(quick))


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
