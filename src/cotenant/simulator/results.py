"""What came out of a simulation: the figures, and each job's fate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cotenant.core.jobs import JobKind
from cotenant.core.refusals import Code, Refusal
from cotenant.simulator.engine import Simulation
from cotenant.simulator.lives import Life
from cotenant.simulator.waits import WAITS, Seconds, dominant

ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "jobs": "jobs of the trace that were submitted, unschedulable ones too",
        "jct": "finish - submission, of finished jobs, killed and failed ones too; percentiles interpolate linearly",
        "makespan_seconds": "last finish - first submission",
        "avg_queue_seconds": "mean time that a finished job spent waiting, first and after preemptions",
        "gpu_utilisation": "GPU time held by jobs / GPU time of the cluster over the makespan, from 0 to 1",
        "cpu_utilisation": "the same for cores",
        "cpu_jobs_avg_queue_seconds": "avg_queue_seconds of jobs without GPUs; null where there are none",
        "qos_guarantee_percent": "jobs whose QoS was met; null where no job has a QoS",
        "waits": "jobs by the kind of wait that cost them most seconds; jobs that never waited are in none",
        "waits_seconds": "seconds of waiting by kind, summed over all jobs",
        "events": "submissions, finishes, preemptions and ends of an order's validity",
        "wall_seconds": "time that the simulation took; the only figure that differs from run to run",
        "unschedulable": "jobs that can never run, with the reason; they are in no other figure but jobs",
    }
)


LEFT_WAITING = Refusal(
    Code.NOT_YET_CONSIDERED,
    "was still waiting when nothing ran any more and nothing was to come: the policies found no place for it",
    "another policy, or a larger cluster",
)


class Outcome(NamedTuple):
    """What became of one job. Times count from the first submission; `finished_seconds` None: it did not finish."""

    id: str
    kind: JobKind
    gpu_milli: int
    submitted_seconds: float
    work_seconds: float
    finished_seconds: float | None
    run_seconds: float
    waits_seconds: Seconds
    preemptions: int

    @property
    def jct_seconds(self) -> float | None:
        """From submission to finish."""
        return None if self.finished_seconds is None else self.finished_seconds - self.submitted_seconds

    @property
    def queue_seconds(self) -> float:
        """All time spent waiting."""
        return sum(self.waits_seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one simulation; None where there is nothing to take a figure of. `ABOUT` says what each means."""

    jobs: int
    finished: int
    avg_jct_seconds: float | None
    median_jct_seconds: float | None
    p95_jct_seconds: float | None
    p99_jct_seconds: float | None
    makespan_seconds: float | None
    avg_queue_seconds: float | None
    preemptions: int
    gpu_utilisation: float | None
    cpu_utilisation: float | None
    cpu_jobs_avg_queue_seconds: float | None
    qos_guarantee_percent: float | None
    waits: Mapping[str, int]
    waits_seconds: Mapping[str, float]
    events: int
    wall_seconds: float
    seed: int
    policies: Mapping[str, str]
    options: Mapping[str, Mapping[str, str]]
    trace: str
    format: str
    cluster: str
    complete: bool  # False: it was stopped at `simulated_seconds`, before the last event
    simulated_seconds: float
    unschedulable: tuple[tuple[str, Refusal], ...]
    skipped_rows: tuple[str, ...]
    notes: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    def as_json(self) -> dict[str, Any]:
        """Give all figures as plain values; `about` says what each means. The jobs' outcomes are left out."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "outcomes"}
        return {
            **plain,
            "waits": dict(self.waits),
            "waits_seconds": dict(self.waits_seconds),
            "policies": dict(self.policies),
            "options": {group: dict(given) for group, given in self.options.items()},
            "unschedulable": [
                {"job_id": job_id, "code": refusal.code.value, "reason": refusal.detail, "remedy": refusal.remedy}
                for job_id, refusal in self.unschedulable
            ],
            "skipped_rows": {"count": len(self.skipped_rows), "rows": list(self.skipped_rows)},
            "notes": list(self.notes),
            "about": dict(ABOUT),
        }


def result_of(
    simulation: Simulation,
    *,
    complete: bool,
    wall_seconds: float,
    seed: int,
    policies: Mapping[str, str],
    options: Mapping[str, Mapping[str, str]],
) -> Result:
    """Sum a simulation up as it stands."""
    trace, cluster = simulation.trace, simulation.cluster
    outcomes = tuple(_outcome(life, simulation.now) for life in simulation.lives)
    done = [outcome for outcome in outcomes if outcome.finished_seconds is not None]
    jcts = np.array([outcome.jct_seconds for outcome in done], dtype=np.float64)
    makespan = max((outcome.finished_seconds or 0.0 for outcome in done), default=None)
    span = (makespan if complete else simulation.now) or 0.0
    preemptions = sum(outcome.preemptions for outcome in outcomes)
    return Result(
        jobs=simulation.submitted,
        finished=len(done),
        avg_jct_seconds=_mean(jcts),
        median_jct_seconds=_percentile(jcts, 50),
        p95_jct_seconds=_percentile(jcts, 95),
        p99_jct_seconds=_percentile(jcts, 99),
        makespan_seconds=makespan,
        avg_queue_seconds=_mean(np.array([outcome.queue_seconds for outcome in done])),
        preemptions=preemptions,
        gpu_utilisation=_share(
            [life.shape.gpu_milli for life in simulation.lives], outcomes, cluster.gpus * 1000, span
        ),
        cpu_utilisation=_share([life.shape.cores for life in simulation.lives], outcomes, cluster.cores, span),
        cpu_jobs_avg_queue_seconds=_mean(np.array([one.queue_seconds for one in done if not one.gpu_milli])),
        qos_guarantee_percent=None,
        waits=_jobs_by_wait(outcomes),
        waits_seconds=_seconds_by_wait(outcomes),
        events=simulation.events + preemptions,
        wall_seconds=wall_seconds,
        seed=seed,
        policies=policies,
        options=options,
        trace=trace.source,
        format=trace.format,
        cluster=cluster.name,
        complete=complete,
        simulated_seconds=simulation.now,
        unschedulable=(
            *((job.id, refusal) for job, refusal in simulation.unschedulable),
            *((life.job.id, LEFT_WAITING) for life in simulation.lives if complete and not life.finished),
        ),
        skipped_rows=tuple(str(row) for row in trace.skipped),
        notes=trace.notes,
        outcomes=outcomes,
    )


def _outcome(life: Life, now: float) -> Outcome:
    job = life.job
    return Outcome(
        id=job.id,
        kind=job.kind,
        gpu_milli=life.shape.gpu_milli,
        submitted_seconds=job.submitted_seconds,
        work_seconds=job.work_seconds,
        finished_seconds=life.finished_seconds if life.finished else None,
        run_seconds=life.attained_seconds + (now - life.running_since if life.running else 0.0),
        waits_seconds=life.waited_until(now),
        preemptions=life.preemptions,
    )


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _percentile(values: np.ndarray, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _share(held: list[int], outcomes: tuple[Outcome, ...], total: int, span_seconds: float) -> float | None:
    """Sum up what was held and for how long, as a share of all there is."""
    if not total or not span_seconds:
        return None
    run_seconds = np.array([outcome.run_seconds for outcome in outcomes], dtype=np.float64)
    return float((np.array(held, dtype=np.float64) * run_seconds).sum()) / (total * span_seconds)


def _jobs_by_wait(outcomes: tuple[Outcome, ...]) -> dict[str, int]:
    counts = {wait.value: 0 for wait in WAITS}
    for outcome in outcomes:
        if wait := dominant(outcome.waits_seconds):
            counts[wait.value] += 1
    return counts


def _seconds_by_wait(outcomes: tuple[Outcome, ...]) -> dict[str, float]:
    sums = (
        np.array([outcome.waits_seconds for outcome in outcomes], dtype=np.float64).reshape(-1, len(WAITS)).sum(axis=0)
    )
    return {wait.value: float(seconds) for wait, seconds in zip(WAITS, sums, strict=True)}
