"""The result of a simulation of the policy lab, as its page shows it: what `cotenant compare` computes, and who gains.

Changes are against the policies in use, job by job, over the jobs that finish under both. Times of jobs count from
their submission, those of charts from the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cotenant.core.model.job_table import Floats
from cotenant.simulator.comparison.arms import ComparedArm
from cotenant.simulator.comparison.runner import ArmRun
from cotenant.simulator.comparison.summary import Comparison
from cotenant.simulator.comparison.time_series import TimeSeries
from cotenant.simulator.scenario import DECIDING
from cotenant.simulator.snapshots import Snapshot
from cotenant.simulator.traces import Trace, TraceJob
from cotenant.web.rows import Row

IN_USE = "in use now"
FIGURES = (
    "avg_jct_seconds", "median_jct_seconds", "p99_jct_seconds", "avg_queue_seconds", "gpu_utilisation",
    "cpu_utilisation", "preemptions",
)  # fmt: skip
POINTS = 200
CHARTED = 0.95  # of the jobs: charts end when so many have ended
SAME_SECONDS = 1.0  # a smaller change is none
TENANTS_MAX = 50
JOBS_MAX = 20

Changes = Mapping[str, float | None]  # by job; None: it does not finish under this policy


def result_view(comparison: Comparison, trace: Trace, snapshot: Snapshot, notes: Sequence[str] = ()) -> Row:
    """Return all that the page shows."""
    arms = comparison.runs.arms
    runs = {arm.label: comparison.runs.by_arm[arm.label][0] for arm in arms}
    jcts = {label: _jcts(ran) for label, ran in runs.items()}
    base = jcts[comparison.baseline]
    changes = {arm.label: _changes(jcts[arm.label], base) for arm in arms[1:]}
    now = trace.snapshot_state.now_seconds if trace.snapshot_state else 0.0
    jobs = {job.id: job for job in trace.jobs}
    times = _times([base, *jcts.values()], jobs, now)
    running = sum(job.running_since_seconds is not None for job in snapshot.jobs)
    return {
        "taken": snapshot.taken_seconds,
        "nodes": len(snapshot.nodes),
        "running": running,
        "waiting": len(snapshot.jobs) - running,
        "times": _rounded(times),
        "policies": [_policy(comparison, arm, changes.get(arm.label, {}), times) for arm in arms],
        "tenants": list(_tenants(jobs, base, changes)),
        "jobs": list(_jobs(jobs, base, changes, now)),
        "notes": [*notes, *_notes(comparison, runs)],
    }


def _jcts(ran: ArmRun) -> dict[str, float]:
    assert ran.jobs
    return dict(zip(ran.jobs.ids, ran.jobs.jct_seconds.tolist(), strict=True))


def _changes(jcts: Mapping[str, float], base: Mapping[str, float]) -> Changes:
    """Return by how much later than in the baseline each of its jobs finishes."""
    return {job_id: jcts[job_id] - before if job_id in jcts else None for job_id, before in base.items()}


def _policy(comparison: Comparison, arm: ComparedArm, changes: Changes, times: Floats) -> Row:
    figures, ratios = comparison.figures(arm.label), comparison.ratios(arm.label)
    ran = comparison.runs.by_arm[arm.label][0]
    known = [change for change in changes.values() if change is not None]
    return {
        "label": arm.label,
        "choices": {group: getattr(arm.scenario, group) for group in DECIDING},
        **{name: figures[name].mean if name in figures else None for name in FIGURES},
        "ratios": {name: ratios[name].mean for name in FIGURES if name in ratios and name.endswith("_seconds")},
        "finished": ran.result.finished,
        "never": len(ran.result.unschedulable) + ran.result.given_up,
        "change_seconds": sum(known) / len(known) if known else None,
        "sooner": sum(change < -SAME_SECONDS for change in known),
        "later": sum(change > SAME_SECONDS for change in known),
        "series": _series(ran.series, times) if ran.series else {},
    }


def _times(jcts: Sequence[Mapping[str, float]], jobs: Mapping[str, TraceJob], now: float) -> Floats:
    """Return the times of the charts, until nearly all jobs have ended under each policy."""
    ends = [
        np.quantile([jobs[one].submitted_seconds + jct - now for one, jct in ended.items()], CHARTED, method="higher")
        for ended in jcts
        if ended
    ]
    return np.linspace(0.0, max([1.0, *map(float, ends)]), POINTS)


def _series(series: TimeSeries, times: Floats) -> Row:
    spans = (times / series.span_seconds).astype(np.int64)
    return {"gpus": _at(series.gpus, spans), "waiting": _at(series.waiting, spans)}


def _at(values: Floats, spans: np.ndarray) -> list[float]:
    """Return the values in some spans; 0 after the last."""
    return _rounded(np.append(values, 0.0)[np.minimum(spans, len(values))])


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


def _tenants(jobs: Mapping[str, TraceJob], base: Mapping[str, float], changes: Mapping[str, Changes]) -> Iterator[Row]:
    """Yield the tenants with the mean change of their jobs under each policy, the most changed first."""
    of: dict[str, list[str]] = {}
    for job_id in base:
        of.setdefault(jobs[job_id].tenant, []).append(job_id)
    rows: list[Row] = [
        {
            "tenant": tenant,
            "jobs": len(theirs),
            "avg_jct_seconds": sum(base[one] for one in theirs) / len(theirs),
            "changes": [_mean([change[one] for one in theirs]) for change in changes.values()],
        }
        for tenant, theirs in of.items()
    ]
    yield from sorted(rows, key=lambda row: (-_most(row["changes"]), row["tenant"]))[:TENANTS_MAX]


def _jobs(
    jobs: Mapping[str, TraceJob], base: Mapping[str, float], changes: Mapping[str, Changes], now: float
) -> Iterator[Row]:
    """Yield the jobs that change most under any policy; those that do not finish under one come first."""
    rows: list[Row] = [
        {
            "id": job_id,
            "name": jobs[job_id].name,
            "tenant": jobs[job_id].tenant,
            "ends_in_seconds": jobs[job_id].submitted_seconds + jct - now,
            "changes": [change[job_id] for change in changes.values()],
        }
        for job_id, jct in base.items()
    ]
    changed = [row for row in rows if None in row["changes"] or _most(row["changes"]) > SAME_SECONDS]
    yield from sorted(changed, key=lambda row: (None not in row["changes"], -_most(row["changes"]), row["id"]))[
        :JOBS_MAX
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _most(values: Sequence[float | None]) -> float:
    return max((abs(value) for value in values if value is not None), default=0.0)


def _notes(comparison: Comparison, runs: Mapping[str, ArmRun]) -> Iterator[str]:
    """Yield what was assumed. The lower bound is not shown, nor is why there is none."""
    yield from (note for note in comparison.notes if not note.startswith("no lower bound"))
    if drawn := [label for label, ran in runs.items() if ran.result.by_chance]:
        yield f"{' and '.join(drawn)}: something is drawn at random; another draw may give other figures"
    yield "policies that are not in use have their default options, and profiles their own"
    yield "no job is submitted after the snapshot, nothing fails, and preemptions cost no time"
    yield "times count from a job's submission; of what it waited before the snapshot, nothing counts as waiting"
