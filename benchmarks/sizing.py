"""The gain of finding the number of cores that jobs need: completion times against equal shares, on a published trace.

The trace is Synergy's (OSDI 2022): 100 jobs with one GPU that all arrive at once, on 4 servers of 8 GPUs, 24 cores and
500 GB. Speeds by cores are Synergy's profiles. The public simulator of that trace knows the profiles in advance; its
mean completion time is 9.7, 8.1 and 6.9 % shorter than with equal shares, under fifo, las and srtf. Here nothing is
known in advance: curves are learned while jobs run, from rates with 2 % noise, and figures are means over five seeds
of that noise. Memory is a GPU's equal share throughout, because the jobs request none: the higher speeds of the
profiles with more memory are out of reach for every allocator. The quick form measures one order and one seed.

Then the cost: CPU time of the simulations; its growth with jobs and nodes shows what the allocator costs. Without the
trace, a synthetic one with the same models is used.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import simulator  # noqa: E402 - likewise
from cotenant.core.model.job import Request, Role  # noqa: E402 - likewise

TRACE = ROOT.parent / "shared" / "data" / "synergy" / "static_100job_6_3_1100.0"
CLUSTER = "4x8x24"
PUBLISHED = {"fifo": 9.7, "las": 8.1, "srtf": 6.9}  # percent shorter, with profiles known in advance
ALLOCATORS = {"xiao": "oracle", "coda-adaptive": "oracle", "aiturbo": "oracle", "xiao, θ predicted": "xiao-piecewise"}
BARRED = ("xiao", "coda-adaptive")
SEEDS = range(5)
MODELS = ("alexnet", "res18", "shufflenet", "mobilenet", "res50", "deepspeech", "gnmt", "lstm", "transformer")
SIZES = (1, 4, 16)  # multiples of 100 jobs on 4 nodes
GROWTH_MAX = 2.0


class Figures(NamedTuple):
    """The figures of a simulation."""

    avg_jct_seconds: float
    makespan_seconds: float
    gpu_utilisation: float
    cpu_utilisation: float
    slimmed_cores: float
    lent_cores: float
    resizes_per_job: float


@cache
def trace() -> simulator.Trace:
    """Return the trace, or a synthetic one."""
    return simulator.load(TRACE, "synergy") if TRACE.is_file() else made_up(100)


def made_up(count: int) -> simulator.Trace:
    """Return synthetic jobs with one GPU and the same models that all arrive at once."""
    rng = random.Random(count)
    roles = (Role("worker", 1, Request(1000, 0)),)
    jobs = [
        simulator.TraceJob(
            str(number), number / 1000, rng.lognormvariate(9.0, 0.8), roles, model=rng.choice(MODELS), gpu_type="V100"
        )
        for number in range(count)
    ]
    return simulator.Trace("made up", "none", tuple(jobs))


def run(queue: str, allocator: str, seed: int, jobs: simulator.Trace | None = None, cluster: str = CLUSTER) -> Figures:
    """Replay the trace once."""
    result = simulator.simulate(
        jobs or trace(),
        cluster,
        queue=queue,
        allocator=allocator.split(",")[0],
        predictor=ALLOCATORS.get(allocator, "oracle"),
        options={"simulator": {"cores": "auto", "speed": "cores", "utilisation": "philly"}},
        seed=seed,
    )
    assert result.finished == result.jobs, f"{allocator} did not finish all jobs"
    sizing = result.sizing or {}
    return Figures(
        result.avg_jct_seconds or 0.0,
        result.makespan_seconds or 0.0,
        100 * (result.gpu_utilisation or 0.0),
        100 * (result.cpu_utilisation or 0.0),
        sizing.get("slimmed_cores") or 0.0,
        sizing.get("lent_cores") or 0.0,
        (sizing.get("resizes") or 0.0) / result.jobs,
    )


def shorter(queue: str, seeds: Sequence[int]) -> Iterator[harness.Row]:
    """Compare the allocators with equal shares, under one order."""
    equal = run(queue, "proportional", 0)
    published, where = PUBLISHED[queue], "published, profiles known in advance"
    for allocator in ALLOCATORS:
        if "predicted" in allocator and queue == "srtf":
            continue  # that predictor has no run times, which this order needs
        runs = [run(queue, allocator, seed) for seed in seeds]
        gains = [100 * (1 - one.avg_jct_seconds / equal.avg_jct_seconds) for one in runs]
        mean, name = statistics.fmean(gains), f"{queue}, {allocator}"
        bar, holds = (f"more than {published:g} %", min(gains) > published) if allocator in BARRED else ("", None)
        yield harness.Row(f"avg JCT shorter by, {name}", mean, "%", published, where, bar, holds)
        yield harness.Row(f"  least and most of {len(gains)} seeds, {name}", min(gains), "%", max(gains), "most")
        for what in Figures._fields[1:]:
            value = statistics.fmean(getattr(one, what) for one in runs)
            unit = {"makespan_seconds": "s", "resizes_per_job": "1"}.get(what, "cores" if "cores" in what else "%")
            beside = getattr(equal, what) or None
            yield harness.Row(
                f"  {what.replace('_', ' ')}, {name}", value, unit, beside, "proportional" if beside else ""
            )


def cost(quick: bool) -> Iterator[harness.Row]:
    """Measure the CPU time per job as jobs and nodes grow together."""
    for allocator in BARRED:
        first = 0.0
        for size in SIZES[: 2 if quick else 3]:
            jobs, cluster = made_up(100 * size), f"{4 * size}x8x24"
            each, plain = (_cost(jobs, cluster, one) for one in (allocator, "proportional"))
            first = first or each
            last = size == SIZES[1 if quick else 2]
            name = f"processor time for each job, {len(jobs)} jobs on {4 * size} nodes, {allocator}"
            yield harness.Row(name, 1000 * each, "ms", 1000 * plain, "proportional")
            if last:
                grown, bar = each / first, f"at most {GROWTH_MAX:g} times for {size} times the jobs and nodes"
                yield harness.Row(f"its growth, {allocator}", grown, "1", bar=bar, holds=grown <= GROWTH_MAX)


def _cost(jobs: simulator.Trace, cluster: str, allocator: str) -> float:
    begin = time.process_time()
    run("fifo", allocator, 0, jobs, cluster)
    return (time.process_time() - begin) / len(jobs)


def measure(quick: bool) -> Sequence[harness.Row]:
    """Compare under each order, then measure the cost."""
    rows: list[harness.Row] = []
    for queue in list(PUBLISHED)[: 1 if quick else None]:
        rows += shorter(queue, SEEDS[:1] if quick else SEEDS)
        print(queue, file=sys.stderr, flush=True)
    return [*rows, *cost(quick)]


if __name__ == "__main__":
    harness.main(measure, "The gain of finding the number of cores that jobs need")
