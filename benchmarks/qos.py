"""The gain of placement by objectives: a small version of GENIE's sweep, simulated with interference and distance.

Synthetic training jobs of 1 to 16 GPUs arrive at random at 8 nodes of 8 GPUs, with a given load (requested GPU seconds
over available ones) and deadlines of a given mean tightness (deadline from submission over run time). Gangs that share
a server slow each other down, and so does distance, as Philly measured (`simulator.interference=philly`,
`speed=locality,colocation`). Predictions are exact. Orders and placements are compared by the share of jobs that meet
their deadline and by makespan; each figure is the mean of five seeds, which draw jobs and deadlines. GENIE reports
both (Chen et al., TPDS 2020 [P]), but its testbed and jobs are not published, so there is no published figure to
compare with.

The first rows give the time of a full cycle over gangs with individual deadlines.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import simulator  # noqa: E402 - likewise
from cotenant.core.capacity.ledger import Ledger  # noqa: E402 - likewise
from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate  # noqa: E402 - likewise
from cotenant.core.model.gang import Demand, Gang, Part  # noqa: E402 - likewise
from cotenant.core.model.job import JobSpec, Request, Role  # noqa: E402 - likewise
from cotenant.core.model.node import NodeShape  # noqa: E402 - likewise
from cotenant.core.scheduling import cycle  # noqa: E402 - likewise
from cotenant.policies.qos.policy import KeepsPromises  # noqa: E402 - likewise
from cotenant.simulator.traces import TraceJob, workers  # noqa: E402 - likewise

NODES, GPUS = 8, 8
SIZES, SHARES = (1, 2, 4, 8, 16), (0.35, 0.25, 0.20, 0.15, 0.05)
JOBS, SEEDS = 200, 5
LOADS, TIGHTNESSES = (0.6, 0.9), (1.5, 2.5)
OURS = ("swaf", "qos")
OTHERS = (
    ("swaf", "qos fastest"),
    ("swaf", "consolidate"),
    ("fifo", "consolidate"),
    ("sjf", "consolidate"),
    ("fifo", "random"),
)
PHYSICS = {"speed": "locality,colocation", "interference": "philly"}
WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one combination, in percent and hours."""

    kept_percent: float
    makespan_hours: float


def jobs(load: float, seed: int, count: int) -> simulator.Trace:
    """Return random jobs with a median run time of half an hour."""
    rng = np.random.default_rng(seed)
    gpus = rng.choice(SIZES, size=count, p=SHARES)
    seconds = np.clip(rng.lognormal(np.log(1800), 1.0, size=count), 60, 86_400)
    gap = float((gpus * seconds).mean()) / (load * NODES * GPUS)
    submitted = np.concatenate([[0.0], np.cumsum(rng.exponential(gap, size=count - 1))])
    made = [
        TraceJob(f"job-{number}", round(float(at), 3), round(float(lasts), 3), workers(int(size)))
        for number, (at, lasts, size) in enumerate(zip(submitted, seconds, gpus, strict=True))
    ]
    return simulator.Trace("synthetic", "synthetic", tuple(made))


def run(order: str, placement: str, load: float, tightness: float, seeds: int, count: int) -> Figures:
    """Simulate one combination with each seed and return the means."""
    kept, makespans = [], []
    for seed in range(seeds):
        options = {"simulator": PHYSICS} | ({"queue": {"mode": "backfill"}} if order in ("fifo", "swaf") else {})
        name, _, prefer = placement.partition(" ")
        options |= {"placement": {"prefer": prefer}} if prefer else {}
        result = simulator.simulate(
            jobs(load, seed, count),
            f"{NODES}x{GPUS}",
            queue=order,
            placement=name,
            overlay=f"deadlines={tightness:g}",
            options=options,
            seed=seed,
        )
        assert result.finished == result.jobs
        kept.append(result.qos_guarantee_percent or 0.0)
        makespans.append((result.makespan_seconds or 0.0) / 3600)
    return Figures(statistics.fmean(kept), statistics.fmean(makespans))


def sweep(quick: bool) -> Iterator[harness.Row]:
    """Compare the combinations at each load and tightness."""
    loads, tightnesses = (LOADS[:1], TIGHTNESSES[:1]) if quick else (LOADS, TIGHTNESSES)
    seeds, count = (2, JOBS) if quick else (SEEDS, JOBS)
    for load in loads:
        for tightness in tightnesses:
            where = f"load {load:g}, deadlines {tightness:g}"
            ours = run(*OURS, load, tightness, seeds, count)
            for other in OTHERS:
                theirs = run(*other, load, tightness, seeds, count)
                name = "+".join(other)
                yield harness.Row(f"kept by swaf+qos, {where}", ours.kept_percent, "%", theirs.kept_percent, name)
                yield harness.Row(
                    f"makespan of swaf+qos, {where}", ours.makespan_hours, "h", theirs.makespan_hours, name
                )
            print(where, file=sys.stderr, flush=True)


def full_cycle(nodes: int, *, empty: bool) -> harness.Row:
    """Place 10,000 gangs with individual deadlines on empty nodes, or refuse most of them on nearly full nodes."""
    rng = np.random.default_rng(0)
    ledger = Ledger([NodeShape(GPUS, 24, memory_bytes=2**39)] * nodes)
    if not empty:
        for node in range(nodes):
            ledger.take(node, Demand(1000, 3), GPUS - node % 2)
    gangs = []
    for number, (size, seconds) in enumerate(
        zip(rng.choice(SIZES, size=WAITING, p=SHARES), rng.uniform(1e3, 1e5, size=WAITING), strict=True)
    ):
        role = Role("worker", int(size), Request(1000, 3))
        spec = JobSpec(roles=(role,), deadline_seconds=float(seconds) * 2)
        candidates = tuple(
            CandidateEstimate(1.0 / n**0.2, float(seconds) * n**0.2, 1.0, None, Candidate(3, 1000, n))
            for n in (1, 2, 4)
        )
        estimate = Estimate(True, 1.0, float(seconds), candidates=candidates)
        part = Part("worker", int(size), Demand(1000, 3))
        gangs.append(Gang(f"g{number}", (part,), spec=spec, estimate=estimate))
    took = []
    for _ in range(3):
        began = time.process_time()
        plan = cycle.place(gangs, ledger, KeepsPromises(), np.random.default_rng(0))
        took.append(1e3 * (time.process_time() - began))
    what = "empty" if empty else "nearly full"
    name = f"a cycle of {WAITING:,} gangs with deadlines on {nodes:,} {what} nodes, {len(plan.starts):,} started"
    bar = 500.0 if nodes == 1_000 else None
    table = {f"job-{number}": number for number in range(WAITING)}
    began = time.process_time()
    sum(table[one] for one in table)
    looked = 1e3 * (time.process_time() - began)
    return harness.Row(
        name,
        min(took),
        "ms",
        looked,
        f"{WAITING:,} look-ups",
        f"≤ {bar:g} ms" if bar else "",
        min(took) <= bar if bar else None,
    )


def measure(quick: bool) -> list[harness.Row]:
    """Measure full cycles and the sweep."""
    cycles = [full_cycle(nodes, empty=empty) for nodes in (100, 1_000) for empty in (True, False)]
    return [*cycles, *sweep(quick)]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
