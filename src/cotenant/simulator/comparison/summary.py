"""The result of a comparison: each arm's figures over its seeds, ratios to the first arm, and the lower bound."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.simulator.comparison.arms import ComparedArm
from cotenant.simulator.comparison.bounds import Work, avg_jct_seconds_min, gpus_only, pooled
from cotenant.simulator.comparison.runner import ArmRun, Progress, Runs, Share, run_arms, trace_of
from cotenant.simulator.overlays import parse_overlays
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.process_pool import Stopped
from cotenant.simulator.recording.event_file import versions
from cotenant.simulator.results import ABOUT
from cotenant.simulator.run import settings_of, simulate
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.workload import workload

NO_FIGURES = ("wall_seconds", "seed", "simulated_seconds")
COMPARED = "avg_jct_seconds"

ABOUT_COMPARISONS: Mapping[str, str] = MappingProxyType(
    {
        "figures": "of each arm over its seeds: mean, sd (of the sample), min, max, and per_seed in order",
        "ratios": "each figure / the first arm's, seed by seed if both depend on the seed, else by its mean",
        "seeds": "an arm without randomness is run once, with the first seed",
        "lower_bound": "avg_jct_seconds_min: no schedule of these jobs on this many GPUs has a smaller average JCT; "
        "pooled_srsf_avg_jct_seconds: what shortest remaining service first attains with perfect knowledge if all "
        "GPUs are in one server, a reference and not a bound; arms: the average of each over the same jobs",
    }
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the seeds."""

    per_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return math.fsum(self.per_seed) / len(self.per_seed)

    @property
    def sd(self) -> float:
        """The standard deviation of the sample; 0 for a single value."""
        mean, count = self.mean, len(self.per_seed)
        return math.sqrt(math.fsum((each - mean) ** 2 for each in self.per_seed) / (count - 1)) if count > 1 else 0.0

    def over(self, base: Spread) -> Spread | None:
        """Return the ratio to another, seed by seed if both have the same number, else to its mean; None for 0."""
        count = max(len(self.per_seed), len(base.per_seed))
        mine = self.per_seed if len(self.per_seed) == count else self.per_seed[:1] * count
        theirs = base.per_seed if len(base.per_seed) == count else (base.mean,) * count
        return None if 0 in theirs else Spread(tuple(one / other for one, other in zip(mine, theirs, strict=True)))

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "mean": self.mean,
            "sd": self.sd,
            "min": min(self.per_seed),
            "max": max(self.per_seed),
            "per_seed": list(self.per_seed),
        }


@dataclass(frozen=True, slots=True)
class Bound:
    """The lower bound, and the result of shortest remaining service first on one server with all GPUs.

    Both are average JCTs of the `jobs` that finished in every arm; so are the arms' here.
    """

    avg_jct_seconds_min: float
    pooled_srsf_avg_jct_seconds: float
    jobs: int
    arms: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "avg_jct_seconds_min": self.avg_jct_seconds_min,
            "pooled_srsf_avg_jct_seconds": self.pooled_srsf_avg_jct_seconds,
            "jobs": self.jobs,
            "arms": dict(self.arms),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison. `baseline` is the first arm's label; arms without a finished run have no figures."""

    runs: Runs
    seeds: tuple[int, ...]
    bound: Bound | None
    notes: tuple[str, ...]
    wall_seconds: float

    @property
    def baseline(self) -> str:
        """The label of the arm that the others are compared with."""
        return self.runs.arms[0].label

    def figures(self, label: str) -> dict[str, Spread]:
        """Return an arm's figures by name; only those that every run of it has."""
        every = [dict(_numbers("", ran.result.as_json())) for ran in self.runs.by_arm[label]]
        names = [name for name in every[0] if all(name in one for one in every)] if every else []
        return {name: Spread(tuple(one[name] for one in every)) for name in names}

    def ratios(self, label: str) -> dict[str, Spread]:
        """Return an arm's figures relative to the first arm's, if that is not 0."""
        base = self.figures(self.baseline)
        pairs = {name: mine.over(base[name]) for name, mine in self.figures(label).items() if name in base}
        return {name: ratio for name, ratio in pairs.items() if ratio}

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values; only `wall_seconds` differ from run to run."""
        first = self.runs.arms[0].scenario
        return {
            "complete": self.runs.complete,
            "trace": first.trace,
            "cluster": first.cluster,
            "baseline": self.baseline,
            "seeds": list(self.seeds),
            "arms": {arm.label: self._arm(arm) for arm in self.runs.arms},
            "lower_bound": self.bound.as_json() if self.bound else None,
            "notes": list(self.notes),
            "versions": versions(),
            "wall_seconds": self.wall_seconds,
            "about": {**ABOUT, **ABOUT_COMPARISONS},
        }

    def _arm(self, arm: ComparedArm) -> dict[str, Any]:
        ran = self.runs.by_arm[arm.label]
        return {
            "scenario": arm.scenario.as_json(),
            "by_chance": any(one.result.by_chance for one in ran),
            "seeds": [one.result.seed for one in ran],
            "figures": {name: figure.as_json() for name, figure in self.figures(arm.label).items()},
            "ratios": {name: ratio.as_json() for name, ratio in self.ratios(arm.label).items()},
            "unschedulable": ran[0].result.as_json()["unschedulable"] if ran else [],
            "wall_seconds": math.fsum(one.result.wall_seconds for one in ran),
        }


def compare(
    arms: Sequence[ComparedArm],
    *,
    seeds: int = 1,
    processes: int = 1,
    drawn: bool = False,
    stopped: Stopped = lambda: False,
    progress: Progress = lambda done, of: None,
    share: Share = lambda finished: None,
) -> Comparison:
    """Run arms on one trace and one cluster, each with this many seeds, and compare them with the first.

    `drawn`: keep what plots need. `stopped` is polled; what has finished by then is compared. `share` is called with
    the share of the present run that is done, if there is one process.

    Raises:
        ArmFailed: an arm cannot be run, or a policy failed.
    """
    began = time.perf_counter()
    runs = run_arms(
        arms, seeds=seeds, processes=processes, drawn=drawn, stopped=stopped, progress=progress, share=share
    )
    bound, why_not = _bound(runs) if runs.complete else (None, "")
    first = arms[0].scenario.seed
    notes = (*_notes(runs), *([f"no lower bound: {why_not}"] if why_not else []))
    return Comparison(runs, tuple(range(first, first + seeds)), bound, notes, time.perf_counter() - began)


def comparison_of_one(scenario: Scenario, ran: ArmRun) -> Comparison:
    """Return a comparison of a single run, so that it can be reported in the same way."""
    arm = ComparedArm(scenario.queue, scenario)
    runs = Runs((arm,), {arm.label: (ran,)}, complete=ran.result.complete)
    bound, why_not = _bound(runs) if runs.complete else (None, "")
    notes = (*_notes(runs), *([f"no lower bound: {why_not}"] if why_not else []))
    return Comparison(runs, (scenario.seed,), bound, notes, ran.result.wall_seconds)


def _numbers(prefix: str, plain: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield all numbers by name, nested ones as `waits.capacity`."""
    for name, value in plain.items():
        if name in NO_FIGURES:
            continue
        if isinstance(value, Mapping):
            if name not in ("options", "policies", "about", "skipped_rows"):
                yield from _numbers(f"{prefix}{name}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _notes(runs: Runs) -> Iterator[str]:
    """Yield the notes of all arms once, and where arms are not comparable."""
    results = {label: ran[0].result for label, ran in runs.by_arm.items() if ran}
    yield from dict.fromkeys(note for result in results.values() for note in result.notes)
    finished = {label: result.finished for label, result in results.items()}
    if len(set(finished.values())) > 1:
        told = ", ".join(f"{label} {count}" for label, count in finished.items())
        yield f"the arms did not finish the same jobs ({told}), so their averages are not over the same jobs"
    if not runs.complete:
        done = sum(len(ran) for ran in runs.by_arm.values())
        yield f"incomplete: stopped after {done} runs"


def _bound(runs: Runs) -> tuple[Bound | None, str]:
    """Return the lower bound over the jobs that finished in every arm; or why there is none."""
    scenario = runs.arms[0].scenario
    if any(_changes_work(settings_of(arm.scenario.options)) for arm in runs.arms):
        return None, "speed models or failures change the jobs' work"
    firsts: dict[str, ArmRun] = {label: ran[0] for label, ran in runs.by_arm.items()}
    finished = [set(ran.jobs.ids) for ran in firsts.values() if ran.jobs]
    common = set.intersection(*finished)
    cluster = parse_cluster(scenario.cluster)
    overlays = parse_overlays([scenario.overlay] if scenario.overlay else [])
    whole = workload(trace_of(scenario), cluster, overlays, auto_cores=False)
    if whole.snapshot_state:
        return None, "the jobs of a snapshot have already run for a while"
    trace = gpus_only(whole, frozenset(job.id for job in whole.jobs if job.id not in common))
    if not trace.jobs:
        return None, "no job finished in every arm"
    works = (Work(job.submitted_seconds, job.work_seconds, job.spec().gpu_milli / 1000) for job in trace.jobs)
    least = avg_jct_seconds_min(works, cluster.gpus)
    srsf = simulate(trace, pooled(cluster), queue="srsf", placement="count").avg_jct_seconds
    assert least is not None
    assert srsf is not None
    return Bound(least, srsf, len(trace.jobs), {label: _avg(ran, common) for label, ran in firsts.items()}), ""


def _changes_work(settings: Settings) -> bool:
    return bool(settings.speeds) or settings.failures != "none"


def _avg(ran: ArmRun, ids: set[str]) -> float:
    assert ran.jobs
    return math.fsum(
        seconds for job_id, seconds in zip(ran.jobs.ids, ran.jobs.jct_seconds.tolist(), strict=True) if job_id in ids
    ) / len(ids)
