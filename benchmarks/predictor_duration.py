"""The accuracy of `lightgbm-duration` for run times, compared with `history` and with quantiles of the same group.

Jobs arrive in order of time, and every method learns only from jobs that have ended by then. The first sixth is
warm-up; five folds follow in order of time. The loss is the mean pinball loss of the logarithm of the run time at the
10th, 50th and 90th percentile. Outcomes of a run (accuracy, loss, throughput) are not features.

The traces are in `../shared/data` next to the checkout, or in COTENANT_DATA; without them nothing is measured.
"""

from __future__ import annotations

import csv
import heapq
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.core.model.estimate import Candidate, Observation, Query, Submission  # noqa: E402 - likewise
from cotenant.core.model.job import Request, Role  # noqa: E402 - likewise
from cotenant.core.model.job_table import Floats  # noqa: E402 - likewise
from cotenant.policies.history import History  # noqa: E402 - likewise
from cotenant.policies.lightgbm_duration.policy import LightgbmDuration  # noqa: E402 - likewise

DATA = Path(os.environ.get("COTENANT_DATA", ROOT.parent / "shared" / "data"))
SHARES = np.array([0.1, 0.5, 0.9])
FOLDS = 5
QUICK_JOBS = 2_400


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a trace: its submission, its group and its outcome."""

    query: Query
    group: Hashable
    submitted_seconds: float
    run_seconds: float
    unpredictable: bool | None = None

    def end(self, seconds: float, *, with_surprise: bool) -> Observation:
        """Return the observation of its end."""
        about = self.query
        return Observation(
            about.user,
            about.model,
            about.name,
            about.gpu_milli,
            about.replicas,
            Candidate(1),
            run_seconds=self.run_seconds,
            succeeded=True,
            submission=about.submission,
            surprising=self.unpredictable if with_surprise else None,
            seen_seconds=seconds,
        )


def aiturbo(path: Path) -> Iterator[Job]:
    """Yield AITurbo's jobs. They have an order but no times: each ends before the next arrives."""
    with path.open(encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            gpus, servers, workers = (int(float(row[name] or 0)) for name in ("gpus", "ps", "workers"))
            roles = (
                *([Role("ps", servers, Request())] if servers else []),
                Role("worker", workers, Request(cores=int(row["cpus"]), memory_bytes=int(row["memory_gb"]) * 2**30)),
            )
            asked = ("epochs", "batch_size", "learning_rate", "first_submission")
            labels = (("gpus", str(gpus)), *((name, row[name]) for name in asked))
            submission = Submission("", float(number), "training", roles, int(row["steps"]), labels)
            query = Query("all", f"type {row['job_type']}", "", gpus * 1000, servers + workers, submission=submission)
            odd = row["unpredictable"] == "1"
            yield Job(query, row["job_type"], number, float(row["running_time_s"]), odd)


def philly(paths: Sequence[Path]) -> Iterator[Job]:
    """Yield Philly's jobs: the virtual cluster is the tenant; the only other feature is the size."""
    rows = [row for path in paths for row in csv.DictReader(path.open(encoding="utf-8"))]
    at = {id(row): datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC).timestamp() for row in rows}
    for row in sorted(rows, key=lambda row: (at[id(row)], row["cluster"])):
        gpus, seconds = int(row["num_gpus"]), at[id(row)]
        submission = Submission("", seconds, "training", (Role("worker", gpus, Request(gpu_milli=1000)),))
        query = Query(row["cluster"], "", "", gpus * 1000, gpus, submission=submission)
        yield Job(query, (row["cluster"], gpus), seconds, float(row["duration"]))


OURS, HISTORY, GROUP = "lightgbm-duration", "history", "group"


@dataclass(slots=True)
class Predictions:
    """The predictions of the three methods: quantiles of log seconds, and the probability of a surprise."""

    predicted: dict[str, list[Sequence[float]]] = field(default_factory=lambda: {OURS: [], HISTORY: [], GROUP: []})
    surprise_scores: list[float] = field(default_factory=list)
    models: int = 0
    training_seconds: float = 0.0


class GroupQuantiles:
    """Quantiles of the ended jobs of a group, or of the latest of them; of all jobs if the group has none."""

    def __init__(self, latest: int | None = None) -> None:
        self._latest = latest
        self._runs: dict[Hashable, list[float]] = defaultdict(list)
        self._known: dict[Hashable, Sequence[float]] = {}

    def predicted(self, *groups: Hashable) -> Sequence[float]:
        """Return the quantiles of the first group with an ended job."""
        for group in groups:
            if group in self._runs:
                if group not in self._known:
                    self._known[group] = np.quantile(self._runs[group][-(self._latest or 0) :], SHARES).tolist()
                return self._known[group]
        return [0.0] * len(SHARES)

    def ended(self, run_seconds: float, *groups: Hashable) -> None:
        """Add the run time of an ended job."""
        for group in groups:
            self._runs[group].append(math.log(run_seconds))
            self._known.pop(group, None)


class Comparison:
    """All three methods on one trace: they predict each job at its submission and observe each end in order of time."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs, self.predictions = jobs, Predictions()
        self._policy = LightgbmDuration()
        self._groups, self._latest = GroupQuantiles(), GroupQuantiles(History.Options().samples_max)

    def run(self) -> Predictions:
        """Process all jobs in order of time and return the predictions."""
        running: list[tuple[float, int]] = []
        for number, job in enumerate(self._jobs):
            while running and running[0][0] <= job.submitted_seconds:
                seconds, ended = heapq.heappop(running)
                self._end(self._jobs[ended], seconds)
            self._ask(job)
            takes = 0.5 if job.unpredictable is not None else job.run_seconds
            heapq.heappush(running, (job.submitted_seconds + takes, number))
        return self.predictions

    def _ask(self, job: Job) -> None:
        predicted, surprise = self._policy.quantiles([job.query])
        group = self._groups.predicted(job.group, "all")
        key = _history_key(job)
        latest = self._latest.predicted(key, job.group, "all")
        self.predictions.predicted[GROUP].append(group)
        self.predictions.predicted[HISTORY].append(latest)
        self.predictions.predicted[OURS].append(latest if math.isnan(predicted[0, 1]) else predicted[0].tolist())
        self.predictions.surprise_scores.append(float(surprise[0]))

    def _end(self, job: Job, seconds: float) -> None:
        self._groups.ended(job.run_seconds, job.group, "all")
        self._latest.ended(job.run_seconds, _history_key(job), job.group, "all")
        self._policy.observe(job.end(seconds, with_surprise=True))
        if training_task := self._policy.training_task():
            begin = time.perf_counter()
            self._policy.adopt(training_task.train())
            self.predictions.training_seconds += time.perf_counter() - begin
            self.predictions.models += 1


def _history_key(job: Job) -> Hashable:
    """Return the key by which `history` groups jobs."""
    query = job.query
    return query.user, query.model, query.gpu_milli, query.replicas


def loss(predicted: Floats, outcome: Floats) -> float:
    """Return the mean pinball loss over jobs and quantiles."""
    short = outcome[:, None] - predicted
    return float(np.maximum(SHARES * short, (SHARES - 1) * short).mean())


def relative_error(predicted: Floats, outcome: Floats) -> float:
    """Return the median of |predicted / actual - 1| for the 50th percentile."""
    return float(np.median(np.abs(np.exp(predicted[:, 1] - outcome) - 1)))


def coverage_percent(predicted: Floats, outcome: Floats) -> float:
    """Return the percentage of outcomes between the 10th and the 90th percentile."""
    return float(100 * ((predicted[:, 0] <= outcome) & (outcome <= predicted[:, 2])).mean())


def auc(score: Floats, odd: Floats) -> float:
    """Return the area under the ROC curve: how often an odd job scores higher than another job; ties count half."""
    order = np.argsort(score, kind="stable")
    _, inverse, counts = np.unique(score[order], return_inverse=True, return_counts=True)
    ranks = np.empty(len(score))
    ranks[order] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    hits = odd.sum()
    return float((ranks[odd == 1].sum() - hits * (hits + 1) / 2) / (hits * (len(odd) - hits)))


def evaluate(name: str, jobs: Sequence[Job]) -> Iterator[harness.Row]:
    """Compare the methods on a trace and yield the figures of each fold."""
    predictions = Comparison(jobs).run()
    outcome = np.log([job.run_seconds for job in jobs])
    odd = np.array([bool(job.unpredictable) for job in jobs], dtype=float)
    edges = np.linspace(0, len(jobs), FOLDS + 2).astype(int)
    for fold in range(FOLDS):
        part = slice(int(edges[fold + 1]), int(edges[fold + 2]))
        predicted = {method: np.array(quantiles[part]) for method, quantiles in predictions.predicted.items()}
        losses = {method: loss(quantiles, outcome[part]) for method, quantiles in predicted.items()}
        errors = {method: relative_error(quantiles, outcome[part]) for method, quantiles in predicted.items()}
        where = f"{name}, fold {fold + 1}"
        for method, share in ((HISTORY, 0.10), (GROUP, 0.15)):
            bar, holds = f"at least {share:.0%} below", losses[OURS] <= (1 - share) * losses[method]
            yield harness.Row(f"{where}: pinball loss", losses[OURS], "ln s", losses[method], method, bar, holds)
        least = min(errors[HISTORY], errors[GROUP])
        holds = errors[OURS] <= least
        yield harness.Row(f"{where}: relative error", errors[OURS], "", least, "better of both", "no worse", holds)
        covered = coverage_percent(predicted[OURS], outcome[part])
        beside = coverage_percent(predicted[HISTORY], outcome[part])
        holds = 77 <= covered <= 83
        yield harness.Row(f"{where}: in the interval", covered, "%", beside, HISTORY, "77 to 83 %", holds)
        if odd[part].any():
            area = auc(np.array(predictions.surprise_scores[part]), odd[part])
            first = np.array([dict(job.query.submission.labels)["first_submission"] == "1" for job in jobs[part]])
            prior = auc(first.astype(float), odd[part])
            yield harness.Row(f"{where}: ROC AUC", area, "", prior, "first submission", "0.95 or more", area >= 0.95)
    each = predictions.training_seconds / max(1, predictions.models)
    yield harness.Row(f"{name}: a training, of {predictions.models}", each, "s", len(jobs), "jobs in the trace")


def training(ends: int) -> harness.Row:
    """Time one training on synthetic, mostly distinct jobs."""
    rng, policy = np.random.default_rng(0), LightgbmDuration()
    for number in range(ends):
        user, kind, batch = (int(one) for one in rng.integers(0, (300, 2_000, 40)))
        submission = Submission(
            f"user-{user}", 60.0 * number, "training", (Role("worker", 1 + kind % 4),), 0, (("b", str(batch)),)
        )
        seconds = float(np.exp(5 + kind % 50 / 10 + batch / 40 + rng.normal() / 3))
        seen = 60.0 * number + seconds
        run = Observation(
            f"team-{user % 20}", f"model-{kind}", "", 1000, 1 + kind % 4, Candidate(1), run_seconds=seconds
        )
        policy.observe(replace(run, submission=submission, seen_seconds=seen))
    training_task = policy.training_task()
    assert training_task
    begin = time.perf_counter()
    training_task.train()
    took = time.perf_counter() - begin
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {mebibytes:.0f} MiB", file=sys.stderr)
    return harness.Row(f"training on {ends:,} ends", took, "s", 60.0, "bar", "60 s or less", took <= 60)


def _measure(quick: bool) -> Sequence[harness.Row]:
    rows: list[harness.Row] = []
    traces = (("aiturbo", DATA / "aiturbo" / "ddl_jobs.csv"), ("philly", DATA / "philly"))
    for name, path in traces:
        if not path.exists():
            print(f"{path} not found; {name} is not measured", file=sys.stderr)
            continue
        jobs = list(aiturbo(path) if path.is_file() else philly(sorted(path.glob("*.csv"))))
        rows.extend(evaluate(name, jobs[:QUICK_JOBS] if quick else jobs))
    return [*rows, training(10_000 if quick else 100_000)]


if __name__ == "__main__":
    harness.main(_measure, __doc__ or "")
