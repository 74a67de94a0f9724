"""The quality of the order of `borda-mlfq`: completion times and preemptions against other orders, on published traces.

Each trace runs on the smallest cluster of 8-GPU nodes that fits its largest job and can do all of its work between the
first and the last submission; two traces run on the clusters of published figures. Placement counts GPUs, as in those
figures. Half of the jobs are predictable, with a log-normal error of 0.3; figures of `borda-mlfq` are means over three
seeds, which draw the predictable jobs and the errors (one seed for the largest traces). The references are `las`,
`fifo` and `drf`, which need no prediction, and `srsf` with exact predictions. Preemptions are free, or cost 30 s of
work.

The literal variant of the paper runs with its best cadence, 20 minutes. Traces are in ../shared/data next to the
checkout; without them the bundled sample is used.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import simulator  # noqa: E402 - likewise

DATA = ROOT.parent / "shared" / "data"
GPUS_PER_NODE = 8
BENCH = (("bench/philly_0e4a51.csv", "6x8"), ("bench/itp_05.csv", "2x8"))
SEARCHED = (
    *("philly/0e4a51", "philly/103959", "philly/2869ce", "philly/e13805", "philly/ed69ec"),
    *("itp/cluster01", "itp/cluster10"),
)
HELD_OUT = ("philly/11cb48", "philly/6c71a0", "itp/cluster02", "itp/cluster08")  # not used for tuning
QUICK = ("philly/2869ce", "itp/cluster10")
COSTS = (0, 30)  # seconds of work repeated after a preemption
SEEDS = range(3)
MANY_JOBS = 3000  # one seed is enough from here on: each job is an independent draw
EXPECTED = {"variant": "expected"}
LITERAL = {"variant": "literal", "cadence_seconds": "1200"}
OTHERS: Mapping[str, Mapping[str, str]] = {
    "las": {},
    "fifo strict": {"mode": "strict"},
    "fifo backfill": {"mode": "backfill"},
    "drf": {},
}
Options = Mapping[str, str]


class Figures(NamedTuple):
    """The figures of a simulation."""

    avg_jct_seconds: float
    p99_jct_seconds: float
    preemptions_per_job: float


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace and its cluster."""

    name: str
    trace: simulator.Trace
    cluster: str

    def run(self, queue: str, cost: int, predictor: str, options: Options, predictable: Options, seed: int) -> Figures:
        """Replay the trace once."""
        groups = {"queue": options, "predictor": predictable, "simulator": {"preemption_cost_seconds": str(cost)}}
        result = simulator.simulate(
            self.trace, self.cluster, queue=queue, placement="count", predictor=predictor, options=groups, seed=seed
        )
        assert result.finished == result.jobs, f"{queue} did not finish all jobs of {self.name}"
        return Figures(result.avg_jct_seconds or 0.0, result.p99_jct_seconds or 0.0, result.preemptions / result.jobs)

    def other(self, name: str, cost: int) -> Figures:
        """Replay it under an order without predictions."""
        return self.run(name.split()[0], cost, "oracle", OTHERS[name], {}, 0)

    def borda(self, cost: int, seeds: Sequence[int], options: Options, predictable: str) -> Figures:
        """Replay it under `borda-mlfq` with some seeds and return the means."""
        known = {"predictable": predictable}
        runs = [self.run("borda-mlfq", cost, "noisy-oracle", options, known, seed) for seed in seeds]
        return Figures(*(statistics.fmean(figures) for figures in zip(*runs, strict=True)))


def smallest_cluster(trace: simulator.Trace) -> str:
    """Return the smallest cluster for a trace, by the rule above."""
    gpus = [sum(role.replicas * role.request.gpu_milli for role in job.roles) / 1000 for job in trace.jobs]
    asked = math.fsum(job.work_seconds * each for job, each in zip(trace.jobs, gpus, strict=True))
    span = trace.jobs[-1].submitted_seconds - trace.jobs[0].submitted_seconds
    return f"{math.ceil(max(max(gpus), asked / span) / GPUS_PER_NODE)}x{GPUS_PER_NODE}"


def replays(quick: bool) -> Iterator[Replay]:
    """Yield the available traces."""
    if not DATA.is_dir():
        yield Replay("sample", simulator.load("sample"), "2x8")
        return
    for path, cluster in () if quick else BENCH:
        yield Replay(f"{Path(path).stem} on {cluster}", simulator.load(DATA / path), cluster)
    for name in QUICK if quick else (*SEARCHED, *HELD_OUT):
        trace = simulator.load(DATA / f"{name}.csv")
        cluster = smallest_cluster(trace)
        held_out = ", held out" if name in HELD_OUT else ""
        yield Replay(f"{name.replace('/', ' ')} on {cluster}{held_out}", trace, cluster)


def rows_of(replay: Replay, cost: int, seeds: Sequence[int]) -> Iterator[harness.Row]:
    """Compare the orders on one trace at one preemption cost."""
    where = f"{replay.name}, {cost} s"
    ours = replay.borda(cost, seeds, EXPECTED, "0.5")
    sure = replay.borda(cost, seeds, EXPECTED, "1")
    truth = replay.run("srsf", cost, "oracle", {}, {}, 0)
    others = {name: replay.other(name, cost) for name in OTHERS}
    las = others["las"]
    for name, figures in others.items():
        yield _row(f"avg JCT / {name}, {where}", ours[0], figures[0], name, 1.0)
    yield _row(f"avg JCT / srsf, {where}", ours[0], truth[0], "srsf, exact predictions", 1.4)
    yield _row(f"avg JCT / srsf, all predictable, {where}", sure[0], truth[0], "srsf, exact predictions", 1.1)
    yield _row(f"p99 JCT / las, {where}", ours[1], las[1], "las", 1.2)
    yield harness.Row(f"p99 JCT of srsf / las, {where}", truth[1], "s", las[1], "las")
    bar = "at most 3" if cost else ""
    holds = ours[2] <= 3 if cost else None
    yield harness.Row(f"preemptions per job, {where}", ours[2], "1", las[2], "las", bar, holds)
    if len(replay.trace) > MANY_JOBS:
        return  # the literal variant preempts so often that this would take an hour
    literal = replay.borda(cost, seeds[:1], LITERAL, "0.5")
    yield harness.Row(f"avg JCT / srsf, literal, {where}", literal[0], "s", truth[0], "srsf, exact predictions")
    yield harness.Row(f"p99 JCT / las, literal, {where}", literal[1], "s", las[1], "las")
    yield harness.Row(f"preemptions per job, literal, {where}", literal[2], "1", las[2], "las")


def _row(name: str, value: float, reference: float, reference_name: str, most: float) -> harness.Row:
    """Return a row with a multiple of the reference as its bar."""
    bar = f"at most {most:g} of it" if most > 1 else "less"
    below = value <= most * reference if most > 1 else value < reference
    return harness.Row(name, value, "s", reference, reference_name, bar, below)


def worst(rows: Sequence[harness.Row]) -> Iterator[harness.Row]:
    """Yield, for each bar, the worst figure over all traces, and whether all meet the bar."""

    def ratio(row: harness.Row) -> float:
        return (row.ratio or 0.0) if row.unit == "s" else row.value

    for kind in dict.fromkeys(_kind(row) for row in rows if row.bar):
        held = [row for row in rows if row.bar and _kind(row) == kind]
        yield harness.Row(
            f"worst of {len(held)}: {kind}",
            max(map(ratio, held)),
            "1",
            bar=held[0].bar,
            holds=all(r.holds for r in held),
        )


@cache
def _kind(row: harness.Row) -> str:
    """Return the name of a row without the trace."""
    words = row.name.split(", ")
    return ", ".join(words[: 2 if words[1] == "all predictable" else 1])


def measure(quick: bool) -> Sequence[harness.Row]:
    """Compare on each trace at each cost, and add the worst figures."""
    seeds = SEEDS[:1] if quick else SEEDS
    rows: list[harness.Row] = []
    for replay in replays(quick):
        for cost in COSTS:
            rows += rows_of(replay, cost, seeds[:1] if len(replay.trace) > MANY_JOBS else seeds)
            print(f"{replay.name}, {cost} s", file=sys.stderr, flush=True)
    return [*rows, *worst(rows)]


if __name__ == "__main__":
    harness.main(measure, "The quality of the order of borda-mlfq against other orders")
