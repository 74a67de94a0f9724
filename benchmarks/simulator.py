"""The speed of the simulator: events per second, and growth of the cost of an event with jobs and nodes.

The workload is synthetic and seeded: gangs of 1 to 64 GPUs, log-normal run times, exponential gaps. The reference is
the rate at which a bare heap delivers as many events within the same minutes.

Jobs: 1,000, 4,000 and 16,000 jobs on 100 nodes at a load of 1.3, so that the backlog keeps growing. Nodes: 16,000 jobs
on 100, 1,000 and 10,000 nodes at a load of 0.95. Backlog: 10,306, 20,613 and 41,226 jobs on 6 nodes at a load of 1.5,
of which in the end a third waits; the reference is least attained service in a few plain lines (`plain_las`), after a
check that it comes to the same figures as `las` where both place by counting. Traces: the whole process, from start to
figures, on the published traces available in ../shared/data next to the checkout. The quick form uses a quarter of the
jobs, three policies and the smallest traces. All times are CPU time, because machines are shared.
"""

from __future__ import annotations

import heapq
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.plain_las import plain_las  # noqa: E402 - likewise

from cotenant import simulator  # noqa: E402 - likewise
from cotenant.simulator.traces import workers  # noqa: E402 - likewise

GPUS_PER_NODE = 8
SIZES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.30, 0.15, 0.20, 0.25, 0.06, 0.03, 0.01)
SPREAD = 1.5  # of log run times: a few jobs take most of the time, as on real clusters
JOBS, JOBS_QUICK = (1_000, 4_000, 16_000), (250, 1_000, 4_000)
NODES = (100, 1_000, 10_000)
POLICIES = ("fifo:strict", "fifo:backfill", "las", "srtf", "srsf", "gittins", "drf", "swaf", "borda-mlfq")
POLICIES_QUICK = ("fifo:backfill", "las", "borda-mlfq")
GROWTH_MAX = 4.0
BACKLOG, BACKLOG_QUICK = (10_306, 20_613, 41_226), (1_000, 2_000, 4_000)  # jobs
BACKLOG_NODES, BACKLOG_LOAD = 6, 1.5
PLAIN_CHECKED = 2_000  # jobs
BACKLOG_SECONDS_MAX = {"fifo": 5.0, "las": 6.0, "borda-mlfq": 12.0}  # for the most jobs
REPLAYS_QUICK = 2  # how many of `REPLAYS`
DATA = ROOT.parent / "shared" / "data"


@dataclass(frozen=True, slots=True)
class Replay:
    """A published trace on a cluster, with the time limit of the whole process under each policy."""

    trace: str
    cluster: str
    policies: tuple[str, ...]
    seconds_max: float
    mebibytes_max: float = math.inf
    arguments: tuple[str, ...] = ()


PREEMPTIVE = ("las", "srtf", "srsf", "gittins", "borda-mlfq")
REPLAYS = (
    Replay("bench/philly_0e4a51.csv", "6x8", ("fifo",), 1.5),
    Replay("bench/philly_0e4a51.csv", "6x8", PREEMPTIVE, 4.0),
    Replay("philly/11cb48.csv", "6x8", ("fifo", "sjf", "drf", "swaf", *PREEMPTIVE), 60.0, 600.0),
    Replay(
        "itp/cluster08.csv",
        "128x8",
        ("fifo", "las", "borda-mlfq"),
        60.0,
        arguments=("--overlay", "models=synergy,cores=auto,cpu-jobs=openb,seed=1", "--option", "simulator.speed=all"),
    ),
)


def workload(jobs: int, nodes: int, load: float, seed: int = 0) -> simulator.Trace:
    """Return jobs that arrive at one per second on average and demand `load` times the capacity of the nodes."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice(SIZES, size=jobs, p=SHARES)
    arrivals = np.cumsum(rng.exponential(1.0, size=jobs))
    mean_size = sum(size * share for size, share in zip(SIZES, SHARES, strict=True))
    mean_seconds = load * nodes * GPUS_PER_NODE / mean_size
    seconds = rng.lognormal(math.log(mean_seconds) - SPREAD**2 / 2, SPREAD, size=jobs)
    rows = enumerate(zip(arrivals.tolist(), seconds.tolist(), sizes.tolist(), strict=True))
    return simulator.Trace(
        "synthetic",
        "synthetic",
        tuple(
            simulator.TraceJob(f"job-{number}", at, max(1.0, lasts), workers(gpus))
            for number, (at, lasts, gpus) in rows
        ),
    )


def bare_events_per_second(events: int) -> float:
    """Return the rate at which a heap pushes and pops events without any work."""
    began = time.process_time()
    heap: list[tuple[float, int, int]] = []
    for number in range(events):
        heapq.heappush(heap, (number * 0.618 % 1.0, number, 0))
    while heap:
        heapq.heappop(heap)
    return events / (time.process_time() - began)


def events_per_second(trace: simulator.Trace, nodes: int, arm: str) -> float:
    """Simulate once and return the events per CPU second."""
    name, _, mode = arm.partition(":")
    options = {"queue": {"mode": mode}} if mode else {}
    began = time.process_time()
    result = simulator.simulate(trace, f"{nodes}x{GPUS_PER_NODE}", queue=name, options=options)
    return result.events / (time.process_time() - began)


def by_jobs(arm: str, counts: Sequence[int]) -> Iterator[harness.Row]:
    """Measure three lengths of trace."""
    rates = []
    for jobs in counts:
        rates.append(events_per_second(workload(jobs, 100, load=1.3), 100, arm))
        bare = bare_events_per_second(2 * jobs)
        yield harness.Row(f"{arm}, {jobs:,} jobs on 100 nodes", rates[-1], "events/s", bare, "a bare heap")
    growth = rates[0] / rates[-1]
    bar = f"< {GROWTH_MAX:g} from {counts[0]:,} to {counts[-1]:,} jobs"
    yield harness.Row(f"{arm}, growth of the cost per event with jobs", growth, "", bar=bar, holds=growth < GROWTH_MAX)


def by_nodes(arm: str, counts: Sequence[int], jobs: int) -> Iterator[harness.Row]:
    """Measure three sizes of cluster."""
    rates = []
    for nodes in counts:
        rates.append(events_per_second(workload(jobs, nodes, load=0.95), nodes, arm))
        bare = bare_events_per_second(2 * jobs)
        yield harness.Row(f"{arm}, {jobs:,} jobs on {nodes:,} nodes", rates[-1], "events/s", bare, "a bare heap")
    growth, most = rates[0] / rates[-1], math.log(counts[-1]) / math.log(counts[0])
    bar = f"≤ {most:g}: the logarithm of the nodes"
    yield harness.Row(f"{arm}, growth of the cost per event with nodes", growth, "", bar=bar, holds=growth <= most)


def backlog(counts: Sequence[int], *, bars: bool) -> Iterator[harness.Row]:
    """Measure three lengths of a trace whose jobs wait for long; the bars are for the longest."""
    check_plain_las()
    for jobs in counts:
        trace = workload(jobs, BACKLOG_NODES, BACKLOG_LOAD)
        plain = plain_las_seconds(trace)
        for queue, most in BACKLOG_SECONDS_MAX.items():
            predictor = "noisy-oracle" if queue == "borda-mlfq" else "oracle"
            began = time.process_time()
            simulator.simulate(trace, f"{BACKLOG_NODES}x{GPUS_PER_NODE}", queue=queue, predictor=predictor)
            seconds = time.process_time() - began
            barred = bars and jobs == counts[-1]
            bar, holds = (f"≤ {most:g} s", seconds <= most) if barred else ("", None)
            name = f"{queue}, {jobs:,} jobs of which many wait"
            yield harness.Row(name, seconds, "s", plain, "a plain LAS, a heap per level and size", bar, holds)


def plain_las_seconds(trace: simulator.Trace) -> float:
    """Return the CPU time of the plain simulation of a trace."""
    jobs = plain(trace)
    began = time.process_time()
    plain_las(jobs, BACKLOG_NODES * GPUS_PER_NODE)
    return time.process_time() - began


def plain(trace: simulator.Trace) -> list[tuple[float, float, int]]:
    """Return the arrival, duration and GPUs of the jobs that fit on the cluster."""
    jobs = [(job.submitted_seconds, job.work_seconds, job.roles[0].replicas) for job in trace.jobs]
    return [job for job in jobs if job[2] <= BACKLOG_NODES * GPUS_PER_NODE]


def check_plain_las() -> None:
    """Check that the plain simulation comes to the same figures.

    Raises:
        RuntimeError: it does not, so it is no reference.
    """
    trace = workload(PLAIN_CHECKED, BACKLOG_NODES, BACKLOG_LOAD)
    average, preemptions = plain_las(plain(trace), BACKLOG_NODES * GPUS_PER_NODE)
    ours = simulator.simulate(trace, f"{BACKLOG_NODES}x{GPUS_PER_NODE}", queue="las", placement="count")
    if ours.preemptions != preemptions or not math.isclose(ours.avg_jct_seconds or 0.0, average, rel_tol=1e-9):
        raise RuntimeError(f"the plain LAS differs: {average} s on average and {preemptions} preemptions")


def whole_process(replay: Replay, policy: str) -> Iterator[harness.Row]:
    """Run the command as a user would, and measure its CPU time and memory."""
    command = [str(Path(sys.executable).with_name("cotenant")), "simulate", "--trace", str(DATA / replay.trace)]
    command += ["--cluster", replay.cluster, "--queue", policy, "--json", *replay.arguments]
    if policy == "borda-mlfq":
        command += ["--predictor", "noisy-oracle"]
    bare = seconds_and_rss([sys.executable, "-c", "import numpy"])[0]
    seconds, mebibytes = seconds_and_rss(command)
    name = f"{policy}, {replay.trace} on {replay.cluster}" + (", all speed models, CPU jobs" * bool(replay.arguments))
    bar = f"≤ {replay.seconds_max:g} s"
    yield harness.Row(name, seconds, "s", bare, "Python with numpy", bar, seconds <= replay.seconds_max)
    if replay.mebibytes_max < math.inf:
        bar = f"≤ {replay.mebibytes_max:g} MiB"
        yield harness.Row(f"{name}, memory", mebibytes, "MiB", bar=bar, holds=mebibytes <= replay.mebibytes_max)


def seconds_and_rss(command: Sequence[str]) -> tuple[float, float]:
    """Run a program to its end; return its CPU seconds and its peak resident memory in MiB.

    The program has one thread and never waits, so on an idle machine this is also its duration.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(quick: bool) -> list[harness.Row]:
    """Measure all."""
    rows: list[harness.Row] = []
    for arm in POLICIES_QUICK if quick else POLICIES:
        rows += by_jobs(arm, JOBS_QUICK if quick else JOBS)
        rows += by_nodes(arm, NODES, jobs=1_000 if quick else 16_000)
        print(arm, file=sys.stderr, flush=True)
    rows += backlog(BACKLOG_QUICK if quick else BACKLOG, bars=not quick)
    for replay in REPLAYS[: REPLAYS_QUICK if quick else None] if DATA.is_dir() else ():
        for policy in replay.policies:
            rows += whole_process(replay, policy)
    return rows


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
