"""What elastic training jobs gain over rigid ones, with requests as traced, mis-sized, and at twice the load.

`python -m benchmarks.elastic [--trace FILE] [--cluster 2x8] [--seeds 5] [--json]` gives the average JCT of FIFO, LAS
and SRSF, each relative to that of elastic jobs with perfect knowledge: the mean over seeds with a 95 % interval. The
bound is one machine with all GPUs on which every job runs at its best efficiency, shortest remaining work first: no
schedule is better. Placement is by counting, restarts of preempted jobs are free, and a resize costs 30 s.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from cotenant.simulator import Trace, simulate
from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.simulator.comparison.bounds import Work, avg_jct_seconds_min
from cotenant.simulator.overlays import parse_overlays
from cotenant.simulator.physics.scaling import speed
from cotenant.simulator.traces import load

SAMPLE = "src/cotenant/simulator/samples/itp_cluster10.csv"
ARMS: Mapping[str, tuple[str, str]] = {
    "fifo": ("fifo", "requested"),
    "las": ("las", "requested"),
    "srsf": ("srsf", "requested"),
    "elastic": ("srtf", "marginal-gain"),
}
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # two-sided, by sample size


@dataclass(frozen=True, slots=True)
class Requests:
    """One kind of requests: the factor of the overlay, and the factor on the times between submissions."""

    name: str
    factor: float
    interarrival: float


KINDS = (Requests("as traced", 1, 1), Requests("mis-sized", 4, 1), Requests("mis-sized, twice the load", 4, 0.5))


def measure(trace: Trace, cluster: str, kind: Requests, seed: int) -> dict[str, float]:
    """Return the average JCT of each arm, that of the bound, and the figures of the resizes."""
    jobs = tuple(replace(job, submitted_seconds=job.submitted_seconds * kind.interarrival) for job in trace.jobs)
    overlays = parse_overlays([f"sizes={kind.factor:g},seed={seed}"])
    laid = overlays.apply(replace(trace, jobs=jobs), parse_cluster(cluster))
    found: dict[str, float] = {}
    for name, (queue, allocator) in ARMS.items():
        result = simulate(laid, cluster, queue=queue, placement="count", allocator=allocator, overlay=overlays)
        assert result.avg_jct_seconds is not None
        assert not result.unschedulable
        found[name] = result.avg_jct_seconds
        found |= result.elasticity or {}
    found["bound"] = _bound(laid, parse_cluster(cluster).gpus)
    return found


def _bound(laid: Trace, gpus: int) -> float:
    """Return a lower bound of the average JCT: no job needs less GPU time than on one GPU, or less time than on all."""
    works = []
    for job in laid.jobs:
        [role] = job.roles
        alone = job.work_seconds * speed(role.replicas)
        most = role.elastic.most if role.elastic else role.replicas
        shortest = alone / speed(most)
        works.append(Work(job.submitted_seconds, shortest, alone / shortest))
    found = avg_jct_seconds_min(works, gpus)
    assert found is not None
    return found


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval; no interval for one value.

    >>> interval([1.0, 3.0])
    (2.0, 12.71)
    """
    every = list(values)
    if len(every) < 2:
        return fmean(every), math.nan
    return fmean(every), round(T95[len(every)] * stdev(every) / math.sqrt(len(every)), 6)


def run(trace: Trace, cluster: str, seeds: int) -> list[dict[str, Any]]:
    """Return a row for each kind of requests."""
    rows = []
    for kind in KINDS:
        runs = [measure(trace, cluster, kind, seed) for seed in range(seeds if kind.factor > 1 else 1)]
        row: dict[str, Any] = {"requests": kind.name, "seeds": len(runs)}
        for arm in ("fifo", "las", "srsf", "bound"):
            mean, half = interval(one[arm] / one["elastic"] for one in runs)
            row[arm] = {"ratio": round(mean, 3), "half_interval": None if math.isnan(half) else round(half, 3)}
        row["elastic_avg_jct_seconds"] = round(fmean(one["elastic"] for one in runs))
        row["resizes"] = round(fmean(one["resizes"] for one in runs))
        row["lost_gpu_hours"] = round(fmean(one["lost_gpu_seconds"] for one in runs) / 3600, 1)
        rows.append(row)
    return rows


def _cell(figure: Mapping[str, float | None]) -> str:
    half = figure["half_interval"]
    return f"{figure['ratio']:.2f}" + (f" ± {half:.2f}" if half is not None else "")


def main() -> None:
    """Print the table, as Markdown or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=SAMPLE)
    parser.add_argument("--cluster", default="2x8")
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 11))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = run(load(given.trace), given.cluster, given.seeds)
    if given.json:
        print(json.dumps({"trace": given.trace, "cluster": given.cluster, "rows": rows}, indent=2))
        return
    print("| requests | FIFO | LAS | SRSF, perfect | lower bound | resizes | GPU hours lost |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (_cell(row[arm]) for arm in ("fifo", "las", "srsf", "bound"))
        print(f"| {row['requests']} | {' | '.join(cells)} | {row['resizes']} | {row['lost_gpu_hours']} |")


if __name__ == "__main__":
    main()
