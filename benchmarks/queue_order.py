"""The order of `borda-mlfq` against the best of other orders, whatever predictions are worth.

Each trace runs on the cluster of `benchmarks/quality.py`, placement counts GPUs, and a preemption costs 30 s of work.
Predictions are none, of 25, 50 or 100 % of the jobs with a log-normal error of 0.3, those shuffled among the jobs or
reversed (the longest job is predicted to be the shortest), learned from jobs that ended, and perfect. The reference is
the best of `las`, `srtf` with the same predictions, and `fifo` with backfill, by average JCT; p99 and preemptions are
compared with `las`.

`--results FILE` keeps each simulation's figures, so that a later run goes on where this one stopped; `--traces` and
`--seeds` choose what is run. `--variants` compares other variants of the order.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.quality import DATA, smallest_cluster  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import simulator  # noqa: E402 - likewise
from cotenant.core.model.estimate import UNKNOWN, Estimate, Observation, Query  # noqa: E402 - likewise

SAMPLE = "sample"
ERROR = 0.3
COST_SECONDS = "30"
NOTHING, LEARNED, PERFECT = "nothing", "learned", "perfect"
QUALITIES = (NOTHING, "25 %", "50 %", "100 %", "shuffled", "reversed", LEARNED, PERFECT)
DRAWN = ("25 %", "50 %", "100 %", "shuffled")  # by the seed
PREDICTORS = {NOTHING: "none", LEARNED: "lightgbm-duration,history", PERFECT: "oracle"}
REFERENCES = ("las", "srtf", "fifo")
UNPREDICTED = ("las", "fifo")  # orders that use no prediction
VARIANTS = ("robust", "expected")
TRACES = ("itp/cluster10", "philly/2869ce", "philly/e13805", "philly/ed69ec", "philly/0e4a51", "philly/103959")
JCT_MAX, JCT_MEAN_MAX, P99_MAX, P99_SHARE_MIN, PREEMPTIONS_MAX = 1.05, 0.95, 1.2, 0.9, 1.1


class Figures(NamedTuple):
    """The figures of a simulation: completion times in seconds."""

    avg: float
    p99: float
    preemptions: int


class Given:
    """Predicts run times that are given by job name."""

    name = "given"
    api_version = 1

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    def observe(self, observation: Observation) -> None:
        """Learn nothing."""

    def estimate(self, query: Query) -> Estimate:
        """Return the given run time, if there is one."""
        seconds = self._seconds.get(query.name)
        if seconds is None:
            return UNKNOWN
        return Estimate(predictable=True, confidence=1.0, remaining_seconds=seconds, source=self.name)

    def dump(self) -> Mapping[str, bytes]:
        """Return no records."""
        return {}

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore no records."""
        return ()


@dataclass
class Results:
    """Figures of simulations, kept in a file of JSON lines."""

    path: Path | None
    known: dict[str, Figures]

    @classmethod
    def of(cls, path: Path | None) -> Results:
        """Read the file, if it exists."""
        lines = path.read_text().splitlines() if path and path.exists() else []
        return cls(path, {one["key"]: Figures(*one["figures"]) for one in map(json.loads, lines)})

    def keep(self, key: str, figures: Figures) -> None:
        """Add figures, also to the file."""
        self.known[key] = figures
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "figures": figures}) + "\n")


@dataclass
class Trace:
    """A trace with its cluster; jobs are named by their ids."""

    name: str
    trace: simulator.Trace
    cluster: str

    @classmethod
    def load(cls, name: str, data: Path) -> Trace:
        """Load a trace of the public data, or the bundled sample."""
        trace = simulator.load(name if name == SAMPLE else data / f"{name}.csv")
        jobs = tuple(replace(job, name=job.id) for job in trace.jobs)
        return cls(name, replace(trace, jobs=jobs), smallest_cluster(trace))

    def predictor(self, quality: str, seed: int) -> Given | str:
        """Return what predicts."""
        if quality in PREDICTORS:
            return PREDICTORS[quality]
        rng = np.random.default_rng([seed, len(quality)])
        work = np.array([job.work_seconds for job in self.trace.jobs])
        names = [job.id for job in self.trace.jobs]
        if quality == "reversed":
            order = np.argsort(work, kind="stable")
            predicted = np.empty(len(work))
            predicted[order] = work[order[::-1]]
            return Given(dict(zip(names, predicted.tolist(), strict=True)))
        predicted = work * np.exp(ERROR * rng.standard_normal(len(work)))
        if quality == "shuffled":
            return Given(dict(zip(names, rng.permutation(predicted).tolist(), strict=True)))
        known = rng.random(len(work)) < float(quality.removesuffix(" %")) / 100
        return Given(
            {name: seconds for name, seconds, told in zip(names, predicted.tolist(), known, strict=True) if told}
        )

    def simulate(self, order: str, quality: str, seed: int) -> Figures:
        """Replay it under one order."""
        queue, _, variant = order.partition(":")
        options = {"variant": variant} if variant else {"mode": "backfill"} if queue == "fifo" else {}
        trace = self.trace
        if quality == LEARNED:  # a name that never recurs tells nothing
            trace = replace(trace, jobs=tuple(replace(job, name="") for job in trace.jobs))
        result = simulator.simulate(
            trace,
            self.cluster,
            queue=queue,
            placement="count",
            predictor=self.predictor(quality, seed),
            options={"queue": options, "simulator": {"preemption_cost_seconds": COST_SECONDS}},
            seed=seed,
        )
        assert result.finished == result.jobs, f"{order} did not finish all jobs of {self.name}"
        return Figures(result.avg_jct_seconds or 0.0, result.p99_jct_seconds or 0.0, result.preemptions)

    def figures(self, order: str, quality: str, seed: int, results: Results) -> Figures:
        """Return the figures of one order, simulated unless they are known."""
        if order in UNPREDICTED:
            quality = NOTHING
        if quality not in DRAWN:
            seed = 0
        key = f"{self.name} {self.cluster} {order} {quality} {seed}"
        if key not in results.known:
            results.keep(key, self.simulate(order, quality, seed))
        return results.known[key]


class Compared(NamedTuple):
    """One row of the table: ratios of an order to the references, the median over seeds, and the worst average JCT."""

    trace: str
    quality: str
    variant: str
    las: float
    srtf: float
    fifo: float
    best: float
    worst: float
    p99: float
    preemptions: float


def compare(
    traces: Iterable[Trace], qualities: Sequence[str], variants: Sequence[str], seeds: int, results: Results
) -> Iterator[Compared]:
    """Yield the rows, one trace after the other."""
    for trace in traces:
        for quality in qualities:
            draws = range(seeds if quality in DRAWN else 1)
            for variant in variants:
                ratios = [_ratios(trace, quality, variant, seed, results) for seed in draws]
                middle = [statistics.median(column) for column in zip(*ratios, strict=True)]
                worst = max(one[3] for one in ratios)
                las, srtf, fifo, best, p99, preemptions = middle
                where = f"{trace.name} on {trace.cluster}"
                yield Compared(where, quality, variant, las, srtf, fifo, best, worst, p99, preemptions)


def _ratios(trace: Trace, quality: str, variant: str, seed: int, results: Results) -> tuple[float, ...]:
    ours = trace.figures(f"borda-mlfq:{variant}", quality, seed, results)
    others = [trace.figures(order, quality, seed, results) for order in REFERENCES]
    las = others[0]
    best = min(other.avg for other in others)
    by_reference = [ours.avg / other.avg for other in others]
    return *by_reference, ours.avg / best, ours.p99 / las.p99, ours.preemptions / max(1, las.preemptions)


def summary(rows: Sequence[Compared]) -> dict[str, float]:
    """Return the figures that have bars."""
    return {
        "average JCT / best, geometric mean": math.exp(statistics.fmean(math.log(row.best) for row in rows)),
        "average JCT / best, worst row": max(row.best for row in rows),
        "average JCT / best, worst seed": max(row.worst for row in rows),
        "rows above 1.05": sum(row.best > JCT_MAX for row in rows),
        "share of rows with p99 at most 1.2 of las": statistics.fmean(row.p99 <= P99_MAX for row in rows),
        "rows with more than 1.1 of las' preemptions": sum(row.preemptions > PREEMPTIONS_MAX for row in rows),
        "rows": len(rows),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--qualities", default=",".join(QUALITIES))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the public traces; without it, the sample")
    options = parser.parse_args()
    names = options.traces.split(",") if options.data.is_dir() else [SAMPLE]
    traces = (Trace.load(name, options.data) for name in names)
    results, rows = Results.of(options.results), list[Compared]()
    print("| trace | predictions | variant | las | srtf | fifo | best | worst seed | p99: las | preemptions: las |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in compare(traces, options.qualities.split(","), options.variants.split(","), options.seeds, results):
        rows.append(row)
        cells = " | ".join(f"{value:.2f}" for value in row[3:])
        print(f"| {row.trace} | {row.quality} | {row.variant} | {cells} |", flush=True)
    for variant in options.variants.split(","):
        print(variant)
        for name, value in summary([row for row in rows if row.variant == variant]).items():
            print(f"  {name}: {value:.3g}")


if __name__ == "__main__":
    main()
