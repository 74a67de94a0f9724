"""How fast the simulator is: events per second, and how the cost of an event grows with jobs and with nodes.

The workload is synthetic and seeded: gangs of 1 to 64 GPUs, log-normal run times, exponential gaps. Beside each figure
stands the rate at which a bare heap hands out as many events in the same minutes.

Jobs: 1,000, 4,000 and 16,000 jobs offered to 100 nodes at 1.3 times what they can do, so that the backlog deepens all
the time. Nodes: 16,000 jobs on 100, 1,000 and 10,000 nodes at 0.95 of what these can do. Traces: the whole process,
from start to figures, on published traces where they lie in ../shared/data beside the checkout. The quick form takes a
quarter of the jobs, three of the policies, and of the traces the smallest. All seconds are those of the processor, for
machines are shared.
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

from cotenant import simulator  # noqa: E402 - likewise
from cotenant.simulator.traces import workers  # noqa: E402 - likewise

GPUS_PER_NODE = 8
SIZES = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.30, 0.15, 0.20, 0.25, 0.06, 0.03, 0.01)
SPREAD = 1.5  # of the logarithm of run times: a few jobs take most of the time, as on real clusters
JOBS, JOBS_QUICK = (1_000, 4_000, 16_000), (250, 1_000, 4_000)
NODES = (100, 1_000, 10_000)
POLICIES = ("fifo:strict", "fifo:backfill", "las", "srtf", "srsf", "gittins", "drf", "swaf", "borda-mlfq")
POLICIES_QUICK = ("fifo:backfill", "las", "borda-mlfq")
GROWTH_MAX = 4.0
REPLAYS_QUICK = 2  # the first of them
DATA = ROOT.parent / "shared" / "data"


@dataclass(frozen=True, slots=True)
class Replay:
    """A published trace on a cluster, and how long the whole process may take under each policy."""

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
    """Make jobs that ask for `load` times what the nodes can do while they keep coming, one a second on average."""
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
    """Push and pop as many events as there are, with nothing done at any of them."""
    began = time.process_time()
    heap: list[tuple[float, int, int]] = []
    for number in range(events):
        heapq.heappush(heap, (number * 0.618 % 1.0, number, 0))
    while heap:
        heapq.heappop(heap)
    return events / (time.process_time() - began)


def events_per_second(trace: simulator.Trace, nodes: int, arm: str) -> float:
    """Simulate once; counts the processor's seconds, for machines are shared."""
    name, _, mode = arm.partition(":")
    options = {"queue": {"mode": mode}} if mode else {}
    began = time.process_time()
    result = simulator.simulate(trace, f"{nodes}x{GPUS_PER_NODE}", queue=name, options=options)
    return result.events / (time.process_time() - began)


def by_jobs(arm: str, counts: Sequence[int]) -> Iterator[harness.Row]:
    """Measure at three lengths of trace."""
    rates = []
    for jobs in counts:
        rates.append(events_per_second(workload(jobs, 100, load=1.3), 100, arm))
        bare = bare_events_per_second(2 * jobs)
        yield harness.Row(f"{arm}, {jobs:,} jobs on 100 nodes", rates[-1], "events/s", bare, "a bare heap")
    growth = rates[0] / rates[-1]
    bar = f"< {GROWTH_MAX:g} from {counts[0]:,} to {counts[-1]:,} jobs"
    yield harness.Row(f"{arm}, growth of the cost per event with jobs", growth, "", bar=bar, holds=growth < GROWTH_MAX)


def by_nodes(arm: str, counts: Sequence[int], jobs: int) -> Iterator[harness.Row]:
    """Measure on three sizes of cluster."""
    rates = []
    for nodes in counts:
        rates.append(events_per_second(workload(jobs, nodes, load=0.95), nodes, arm))
        bare = bare_events_per_second(2 * jobs)
        yield harness.Row(f"{arm}, {jobs:,} jobs on {nodes:,} nodes", rates[-1], "events/s", bare, "a bare heap")
    growth, most = rates[0] / rates[-1], math.log(counts[-1]) / math.log(counts[0])
    bar = f"≤ {most:g}: the logarithm of the nodes"
    yield harness.Row(f"{arm}, growth of the cost per event with nodes", growth, "", bar=bar, holds=growth <= most)


def whole_process(replay: Replay, policy: str) -> Iterator[harness.Row]:
    """Run the command as a user would, and look at its time, on the processor, and at its memory."""
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
    """Run a program to its end: seconds that it had a processor, and its largest resident set in MiB.

    It is one thread and waits for nothing, so that on a machine of its own this is how long it takes.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(quick: bool) -> list[harness.Row]:
    """Measure all."""
    rows: list[harness.Row] = []
    for arm in POLICIES_QUICK if quick else POLICIES:
        rows += by_jobs(arm, JOBS_QUICK if quick else JOBS)
        rows += by_nodes(arm, NODES, jobs=1_000 if quick else 16_000)
        print(arm, file=sys.stderr, flush=True)
    for replay in REPLAYS[: REPLAYS_QUICK if quick else None] if DATA.is_dir() else ():
        for policy in replay.policies:
            rows += whole_process(replay, policy)
    return rows


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
