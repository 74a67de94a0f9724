"""What choosing among GPU types by predicted speed gives: mean JCT and the smallest effective share of any job.

Jobs are drawn as Gavel's generator does (Narayanan et al., OSDI 2020 [D]): job types uniformly, run times from a
log-uniform distribution, gangs of 1, 2, 4 and 8 GPUs in 70, 10, 15 and 5 of 100, Poisson arrivals; speeds on K80, P100
and V100 are Gavel's. The cluster has as many GPUs of each type. Both arms run the full profile's order and placement;
one does not know types. A job's effective share is its mean rate from submission to end, relative to its rate on an
equal share of all types: 1 for a job that starts at once on the average type. Figures are medians over seeds, each
relative to the arm without types on the same jobs, with the 95 % interval of the median by order statistics.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.core.model.model_name import model_of  # noqa: E402 - likewise
from cotenant.core.model.node import NodeShape  # noqa: E402 - likewise
from cotenant.core.policy.profiles import find  # noqa: E402 - likewise
from cotenant.simulator import Trace, simulate  # noqa: E402 - likewise
from cotenant.simulator.clusters.cluster import Cluster  # noqa: E402 - likewise
from cotenant.simulator.physics import gpus  # noqa: E402 - likewise
from cotenant.simulator.results import Result  # noqa: E402 - likewise
from cotenant.simulator.traces import TraceJob  # noqa: E402 - likewise
from cotenant.simulator.traces.gavel import steps_per_second  # noqa: E402 - likewise
from cotenant.simulator.traces.trace_job import workers  # noqa: E402 - likewise

TYPES = ("K80", "P100", "V100")
NODES, GPUS, CORES = 2, 8, 32  # of each type; of a node
SIZES, SHARES = (1, 2, 4, 8), (0.70, 0.10, 0.15, 0.05)
HOURS = 10**-0.5, 10.0  # run times on a V100
TENANTS = 3
LOADS = 0.5, 0.8, 1.1
ARMS = {"without types": (False, "tenants"), "scorer": (True, "tenants"), "scorer and rule": (True, "throughput")}
FIGURES = "mean JCT", "smallest effective share", "5th percentile of shares"
JOBS, JOBS_QUICK, SEEDS = 250, 150, 5


def workload(seed: int, load: float, count: int) -> list[TraceJob]:
    """Return jobs whose GPU time on V100 is this share of what the cluster gives at the mean speed of its types."""
    rng = np.random.default_rng(seed)
    measured = steps_per_second()
    names = {size: sorted(name for name, gpus in measured if gpus == size) for size in SIZES}
    jobs, now = [], 0.0
    sizes = rng.choice(SIZES, count, p=SHARES)
    models = [str(rng.choice(names[int(size)])) for size in sizes]
    works = 3600 * np.exp(rng.uniform(math.log(HOURS[0]), math.log(HOURS[1]), count))
    wanted = sum(
        work * int(size) / mean_speed(model, int(size)) for work, size, model in zip(works, sizes, models, strict=True)
    )
    gap = wanted / (load * NODES * GPUS * len(TYPES)) / count
    for number, (size, model, work) in enumerate(zip(sizes, models, works, strict=True)):
        now += float(rng.exponential(gap))
        jobs.append(
            TraceJob(
                f"j{number}",
                now,
                float(work),
                workers(int(size)),
                model=model,
                gpu_type="V100",
                tenant=f"t{number % TENANTS}",
            )
        )
    return jobs


def mean_speed(model: str, size: int) -> float:
    """Return a job's mean speed over the types, relative to a V100."""
    known = model_of(model)
    return statistics.fmean((gpus.relative_speed(known, size, one, "V100") if known else None) or 1.0 for one in TYPES)


def shares(result: Result, jobs: Sequence[TraceJob]) -> list[float]:
    """Return each job's effective share."""
    found = []
    ended = {outcome.id: outcome for outcome in result.outcomes}
    for job in jobs:
        size, outcome = sum(role.replicas for role in job.roles), ended[job.id]
        assert outcome.finished_seconds is not None
        jct_seconds = outcome.finished_seconds - outcome.submitted_seconds
        found.append(job.work_seconds / mean_speed(job.model, size) / jct_seconds)
    return found


def run(jobs: Sequence[TraceJob], arm: str, predictor: str = "oracle") -> Result:
    """Return the result of one arm."""
    profile = find("full")
    shapes = [NodeShape(GPUS, CORES, kind) for kind in TYPES for _ in range(NODES)]
    options = {group: dict(given) for group, given in profile.options.items()}
    options["placement"]["gpu_types"] = str(ARMS[arm][0]).lower()
    options["simulator"] = {
        "speed": "gpu-type,locality",
        "fair_share": ARMS[arm][1],
        "preemption_cost_seconds": "model",
    }
    return simulate(
        Trace("generated", "gavel", tuple(jobs)),
        Cluster("2 nodes of each type", tuple(shapes), ("",) * len(shapes)),
        queue=profile.queue,
        placement=profile.placement,
        predictor=predictor,
        options=options,
    )


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the smallest and largest value: of five, they enclose it with 94 %."""
    return statistics.median(values), min(values), max(values)


def measure(quick: bool) -> Sequence[harness.Row]:
    """Return rows of both figures at each load."""
    rows = []
    for load in LOADS[1:2] if quick else LOADS:
        ratios = {(arm, name): list[float]() for arm in list(ARMS)[1:] for name in FIGURES}
        blinds = {name: list[float]() for name in FIGURES}
        for seed in range(SEEDS):
            jobs = workload(seed, load, JOBS_QUICK if quick else JOBS)
            figures = []
            for arm in ARMS:
                result = run(jobs, arm)
                assert result.avg_jct_seconds is not None
                own = sorted(shares(result, jobs))
                figures.append((result.avg_jct_seconds, own[0], harness.percentile(own, 5)))
            blind, *others = figures
            for number, name in enumerate(FIGURES):
                blinds[name].append(blind[number])
                for arm, seen in zip(list(ARMS)[1:], others, strict=True):
                    ratios[arm, name].append(seen[number] / blind[number])
        for (arm, name), values in ratios.items():
            middle, low, high = median_interval(values)
            better = middle < 1 if name == "mean JCT" else middle > 1
            text = f"better than without types ({low:.3g} to {high:.3g})"
            reference = statistics.median(blinds[name])
            unit = "s" if name == "mean JCT" else ""
            rows.append(
                harness.Row(
                    f"load {load:g}, {arm}: {name}", middle * reference, unit, reference, "without types", text, better
                )
            )
    return rows


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
