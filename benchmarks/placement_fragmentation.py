"""The share of GPUs that can be allocated by a load that grows until nothing fits, as in Weng et al. (ATC 2023).

Pods are drawn with replacement from a published list, in an order that depends on the seed, and never end; the nodes
are those of the same trace. Measured are the GPUs allocated when the first pod does not fit, and when pods for 90 to
130 % of all GPUs have arrived and those that do not fit are skipped.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import plugins, simulator  # noqa: E402 - likewise
from cotenant.core.capacity.ledger import Ledger  # noqa: E402 - likewise
from cotenant.core.model.estimate import UNKNOWN  # noqa: E402 - likewise
from cotenant.core.model.gang import Gang  # noqa: E402 - likewise
from cotenant.core.model.job import JobSpec  # noqa: E402 - likewise
from cotenant.core.model.refusal import Refusal  # noqa: E402 - likewise
from cotenant.core.scheduling import cycle  # noqa: E402 - likewise

DATA = ROOT.parent / "shared" / "data" / "openb"
OURS, BASELINES = ("consolidate", "fgd"), ("random", "first-fit", "spread")
SEEDS = 10
LOADS = (0.9, 1.0, 1.1, 1.2, 1.3)  # requested GPUs relative to all GPUs


@dataclass(frozen=True, slots=True)
class Grown:
    """The result of one growing load: allocated shares of all GPUs."""

    at_first_refusal: float
    at_loads: Mapping[float, float]
    seconds: float


def pods(trace: str) -> list[Gang]:
    """Read pods as gangs."""
    jobs = simulator.load(DATA / trace, skip_bad_rows=True).jobs
    requested = plugins.load("cotenant.cpu_allocators", "requested")
    return [cycle.gang_of(job.id, JobSpec(kind=job.kind, roles=job.roles), UNKNOWN, requested, ()) for job in jobs]


def grow(policy_name: str, some: Sequence[Gang], ledger: Ledger, seed: int) -> Grown:
    """Add pods up to the largest load and count the allocated GPUs."""
    policy = plugins.load("cotenant.placement_policies", policy_name)
    draws, rng = np.random.default_rng(seed), np.random.default_rng(seed)
    all_milli = ledger.total_gpu_milli
    asked = given = 0
    first: float | None = None
    at_loads: dict[float, float] = {}
    began = time.process_time()
    number = 0
    while len(at_loads) < len(LOADS):
        drawn = some[int(draws.integers(len(some)))]
        gang = Gang(f"pod-{number}", drawn.parts)
        number += 1
        asked += gang.gpu_milli
        offer = policy.place(gang, ledger, rng)
        if not isinstance(offer, Refusal):
            cycle.take(ledger, gang, offer)
            given += gang.gpu_milli
        elif first is None:
            first = given / all_milli
        at_loads |= {load: given / all_milli for load in LOADS if load not in at_loads and asked >= load * all_milli}
    return Grown(given / all_milli if first is None else first, at_loads, time.process_time() - began)


def measure(quick: bool) -> Iterator[harness.Row]:
    """Compare policies on lists of pods with identical draws; the quick form uses one list."""
    if not DATA.is_dir():
        return
    cluster = simulator.parse_cluster(str(DATA / "openb_node_list_all_node.csv"))
    lists = sorted(DATA.glob("openb_pod_list_*.csv"))
    for path in [DATA / "openb_pod_list_default.csv"] if quick else lists:
        some = pods(path.name)
        grown = {
            name: [grow(name, some, cluster.ledger(), seed) for seed in range(2 if quick else SEEDS)]
            for name in (*BASELINES, *OURS)
        }
        yield from rows_of(path.stem.removeprefix("openb_pod_list_"), grown)


def rows_of(name: str, grown: Mapping[str, Sequence[Grown]]) -> Iterator[harness.Row]:
    """Yield the means over the seeds. The bar compares the best of our policies with the best of the others."""

    def mean(policy: str) -> float:
        return 100 * statistics.fmean(one.at_first_refusal for one in grown[policy])

    best_of_others = max(BASELINES, key=mean)
    best = max(OURS, key=mean)
    for policy, runs in grown.items():
        reference, named = (mean(best_of_others), best_of_others) if policy in OURS else (None, "")
        bar = f"beats {', '.join(BASELINES)}" if policy == best else ""
        holds = mean(policy) > mean(best_of_others) if policy == best else None
        title = f"{name}: GPUs given out at the first refusal, {policy}, {len(runs)} seeds"
        yield harness.Row(title, mean(policy), "%", reference, named, bar, holds)
        for load in LOADS:
            at_load = 100 * statistics.fmean(one.at_loads[load] for one in runs)
            yield harness.Row(f"{name}: GPUs given out at a load of {load:.0%}, {policy}", at_load, "%")
        yield harness.Row(f"{name}: {policy}, one growing load", statistics.fmean(one.seconds for one in runs), "s")


if __name__ == "__main__":
    harness.main(lambda quick: list(measure(quick)), __doc__ or "")
