"""What came out of a simulation: the figures, and each job's fate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cotenant.core.model.job import TENANT_DEFAULT, WHOLE_GPU_MILLI, JobKind
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Tenancy
from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import Life
from cotenant.simulator.resizing import Figures
from cotenant.simulator.starvation import GANG_SIZES, starvation_of
from cotenant.simulator.traces.trace_job import Ended
from cotenant.simulator.wait_times import LEVELS, WAITS, by_level, by_wait, dominant

ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "jobs": "jobs of the trace that were submitted, unschedulable ones too",
        "jct": "finish - submission, of finished jobs, killed and failed ones too; percentiles interpolate linearly",
        "makespan_seconds": "last finish - first submission",
        "given_up": "jobs that the queue policy gave up; they are neither finished nor unschedulable",
        "avg_queue_seconds": "mean time that a finished job spent waiting, first and after preemptions",
        "gpu_utilisation": "mean GPU utilisation over all GPU time of the cluster until the makespan, from 0 to 1, as "
        "simulator.utilisation models it; where that is none, held GPUs count as fully used: gpu_occupancy",
        "gpu_occupancy": "GPU time held by jobs / GPU time of the cluster over the makespan, from 0 to 1",
        "cpu_utilisation": "the same for cores, held ones counting as used",
        "sizing": "only where the allocator changes the cores of running jobs: `resizes`, how often it did; mean "
        "cores, over the makespan, that jobs had given back of their GPUs' share (`slimmed_cores`) and that were lent "
        "to them beside what they held for good (`lent_cores`)",
        "cpu_jobs_avg_queue_seconds": "avg_queue_seconds of jobs without GPUs; null where there are none",
        "tenants": "by tenant: its jobs; of finished ones the mean JCT and time spent waiting; the GPU time that it "
        "held, and its share of that of all tenants",
        "qos_guarantee_percent": "jobs that were done by their deadline, of those that have one; failed and unfinished "
        "ones count as missed, those that their users killed are left out; null where no job has one",
        "migrations": "runs that were stopped to go on elsewhere, so that a gang could start or a job is hurt no more",
        "reclaims": "runs that were stopped because they were on resources that were reserved for another job",
        "outcomes": "finished jobs by what became of them",
        "outcomes_gpu_time": "shares of the GPU time held by finished jobs, by what became of them; null for none",
        "failures": "attempts that failed by the job's own doing, by class",
        "crashes": "runs that ended because a node failed",
        "lost_work_seconds": "work, at reference speed, that was done and lost in failures, for it was not saved",
        "waits": "jobs by the kind of wait that cost them most seconds; jobs that never waited are in none",
        "waits_seconds": "seconds of waiting by kind, summed over all jobs",
        "waits_by_gpus": "waits by the GPUs that a job asks for, as Philly's table has them",
        "fragmentation_seconds": "of waits_seconds, those for a place that is not in fragments, by the level that was "
        "wanted: all on one server, all in one rack, or anywhere",
        "starvation": "by the GPUs that a job asks for, and for those that ask for more than any server has: jobs, the "
        "longest and mean time spent waiting, and the percentage that waited for over an hour; unfinished ones too",
        "events": "submissions, finishes, failures, retries, preemptions, migrations, nodes that fail or are back, and "
        "ends of an order's validity",
        "overlay": "what was added that the trace does not tell, and its seed; empty where nothing was",
        "wall_seconds": "time that the simulation took; the only figure that differs from run to run",
        "by_chance": "whether anything was drawn at random, so that another seed may give other figures",
        "unschedulable": "jobs that can never run, with the reason; they are in no other figure but jobs",
    }
)


LEFT_WAITING = Refusal(
    Code.NOT_YET_CONSIDERED,
    "was still waiting when nothing ran any more and nothing was to come: the policies found no place for it",
    "another policy, or a larger cluster",
)


class Outcome(NamedTuple):
    """What became of one job. Times count from the first submission; None: it did not finish, was not given up."""

    id: str
    kind: JobKind
    gpu_milli: int
    submitted_seconds: float
    work_seconds: float
    finished_seconds: float | None
    run_seconds: float
    waits_seconds: tuple[float, ...]  # by kind
    preemptions: int
    ended: Ended = Ended.PASSED  # once it finished
    failures: int = 0
    failure: str = ""
    crashes: int = 0
    lost_work_seconds: float = 0.0
    busy_seconds: float = 0.0  # GPU utilisation × run time
    deadline_seconds: float | None = None
    given_up_seconds: float | None = None
    tenant: str = TENANT_DEFAULT
    fragmentation_seconds: tuple[float, ...] = ()  # by level; together, those of that kind
    servers: int = 0  # on which its last run was

    @property
    def jct_seconds(self) -> float | None:
        """From submission to finish."""
        return None if self.finished_seconds is None else self.finished_seconds - self.submitted_seconds

    @property
    def queue_seconds(self) -> float:
        """All time spent waiting."""
        return sum(self.waits_seconds)

    @property
    def gpu_seconds(self) -> float:
        """GPU time held."""
        return self.run_seconds * self.gpu_milli / WHOLE_GPU_MILLI


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one simulation; None where there is nothing to take a figure of. `ABOUT` says what each means."""

    jobs: int
    finished: int
    given_up: int
    avg_jct_seconds: float | None
    median_jct_seconds: float | None
    p95_jct_seconds: float | None
    p99_jct_seconds: float | None
    makespan_seconds: float | None
    avg_queue_seconds: float | None
    preemptions: int
    migrations: int
    reclaims: int
    gpu_utilisation: float | None
    gpu_occupancy: float | None
    cpu_utilisation: float | None
    cpu_jobs_avg_queue_seconds: float | None
    sizing: Mapping[str, float | None] | None
    qos_guarantee_percent: float | None
    ends: Mapping[str, int]
    ends_gpu_time: Mapping[str, float | None]
    failures: Mapping[str, int]
    crashes: int
    lost_work_seconds: float
    tenants: Mapping[str, Mapping[str, float | None]]
    waits: Mapping[str, int]
    waits_seconds: Mapping[str, float]
    waits_by_gpus: Mapping[str, Mapping[str, int]]
    fragmentation_seconds: Mapping[str, float]
    starvation: Mapping[str, Mapping[str, float | None]]
    events: int
    wall_seconds: float
    seed: int
    by_chance: bool
    policies: Mapping[str, str]
    options: Mapping[str, Mapping[str, str]]
    trace: str
    format: str
    overlay: Mapping[str, str]
    cluster: str
    complete: bool  # False: it was stopped at `simulated_seconds`, before the last event
    simulated_seconds: float
    unschedulable: tuple[tuple[str, Refusal], ...]
    skipped_rows: tuple[str, ...]
    notes: tuple[str, ...]
    outcomes: tuple[Outcome, ...]

    def as_json(self) -> dict[str, Any]:
        """Give all figures as plain values; `about` says what each means. The jobs' outcomes are left out."""
        names = (name for name in self.__dataclass_fields__ if name not in ("outcomes", "ends", "ends_gpu_time"))
        plain = {name: getattr(self, name) for name in names}
        about = dict(ABOUT)
        if self.sizing is None:
            del plain["sizing"], about["sizing"]
        return {
            **plain,
            "outcomes": dict(self.ends),
            "outcomes_gpu_time": dict(self.ends_gpu_time),
            "failures": dict(self.failures),
            "tenants": {tenant: dict(figures) for tenant, figures in self.tenants.items()},
            "waits": dict(self.waits),
            "waits_seconds": dict(self.waits_seconds),
            "waits_by_gpus": {size: dict(counts) for size, counts in self.waits_by_gpus.items()},
            "fragmentation_seconds": dict(self.fragmentation_seconds),
            "starvation": {size: dict(figures) for size, figures in self.starvation.items()},
            "overlay": dict(self.overlay),
            "policies": dict(self.policies),
            "options": {group: dict(given) for group, given in self.options.items()},
            "unschedulable": [
                {"job_id": job_id, "code": refusal.code.value, "reason": refusal.detail, "remedy": refusal.remedy}
                for job_id, refusal in self.unschedulable
            ],
            "skipped_rows": {"count": len(self.skipped_rows), "rows": list(self.skipped_rows)},
            "notes": list(self.notes),
            "about": about,
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
    occupancy = _share([one.gpu_milli * one.run_seconds for one in outcomes], cluster.gpus * 1000, span)
    busy = _share([one.gpu_milli * one.busy_seconds for one in outcomes], cluster.gpus * 1000, span)
    held_cores = [life.shape.cores * one.run_seconds for life, one in zip(simulation.lives, outcomes, strict=True)]
    held_cores += [simulation.sized.beyond_core_seconds] if simulation.sized else []
    return Result(
        jobs=simulation.submitted,
        finished=len(done),
        given_up=sum(life.given_up for life in simulation.lives),
        avg_jct_seconds=_mean(jcts.tolist()),
        median_jct_seconds=_percentile(jcts, 50),
        p95_jct_seconds=_percentile(jcts, 95),
        p99_jct_seconds=_percentile(jcts, 99),
        makespan_seconds=makespan,
        avg_queue_seconds=_mean([outcome.queue_seconds for outcome in done]),
        preemptions=preemptions,
        migrations=(moves := sum(life.migrations for life in simulation.lives)),
        reclaims=(reclaims := sum(life.reclaims for life in simulation.lives)),
        gpu_utilisation=busy if simulation.world.usage_is_modelled else occupancy,
        gpu_occupancy=occupancy,
        cpu_utilisation=_share(held_cores, cluster.cores, span),
        sizing=_sizing(simulation.sized, span) if simulation.sized else None,
        cpu_jobs_avg_queue_seconds=_mean([one.queue_seconds for one in done if not one.gpu_milli]),
        qos_guarantee_percent=_qos_percent(simulation, outcomes, complete=complete),
        ends={ended.value: sum(one.ended is ended for one in done) for ended in Ended},
        ends_gpu_time=_gpu_time_by_end(done),
        failures=dict(sorted(_failures(outcomes).items())),
        crashes=sum(one.crashes for one in outcomes),
        lost_work_seconds=math.fsum(one.lost_work_seconds for one in outcomes),
        tenants=_by_tenant(simulation.tenancy, outcomes),
        waits=_jobs_by_wait(outcomes),
        waits_seconds=_seconds_by_wait(outcomes),
        waits_by_gpus=_jobs_by_wait_and_gpus(outcomes),
        fragmentation_seconds=_seconds_by_level(outcomes),
        starvation=starvation_of([(one.gpu_milli, one.queue_seconds) for one in outcomes], cluster.server_gpus),
        events=simulation.events + preemptions + moves + reclaims,
        wall_seconds=wall_seconds,
        seed=seed,
        by_chance=simulation.by_chance,
        policies=policies,
        options=options,
        trace=trace.source,
        format=trace.format,
        overlay=dict(trace.overlay),
        cluster=cluster.name,
        complete=complete,
        simulated_seconds=simulation.now,
        unschedulable=_unschedulable(simulation, complete=complete),
        skipped_rows=tuple(str(row) for row in trace.skipped),
        notes=trace.notes,
        outcomes=outcomes,
    )


def _unschedulable(simulation: Simulation, *, complete: bool) -> tuple[tuple[str, Refusal], ...]:
    left = [(life.job.id, LEFT_WAITING) for life in simulation.lives if complete and not life.over]
    return (*((job.id, refusal) for job, refusal in simulation.unschedulable), *left)


def _outcome(life: Life, now: float) -> Outcome:
    job, waited = life.job, life.waited_until(now)
    return Outcome(
        id=job.id,
        kind=job.kind,
        gpu_milli=life.shape.gpu_milli,
        submitted_seconds=job.submitted_seconds,
        work_seconds=job.work_seconds,
        finished_seconds=life.finished_seconds if life.finished else None,
        run_seconds=life.attained_seconds + (now - life.running_since if life.running else 0.0),
        waits_seconds=by_wait(waited),
        preemptions=life.preemptions,
        ended=life.fate.ended,
        failures=life.failures,
        failure=life.failure,
        crashes=life.crashes,
        lost_work_seconds=life.lost_seconds,
        busy_seconds=life.busy_until(now),
        deadline_seconds=job.deadline_seconds,
        given_up_seconds=life.given_up_seconds if life.given_up else None,
        tenant=job.tenant,
        fragmentation_seconds=by_level(waited),
        servers=life.servers,
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None


def _percentile(values: np.ndarray, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _share(held: Sequence[float], total: int, span_seconds: float) -> float | None:
    """Sum up what was held, times seconds, as a share of all there is."""
    return math.fsum(held) / (total * span_seconds) if total and span_seconds else None


def _sizing(figures: Figures, span_seconds: float) -> dict[str, float | None]:
    def mean(core_seconds: float) -> float | None:
        return core_seconds / span_seconds if span_seconds else None

    return {
        "resizes": figures.resizes,
        "slimmed_cores": mean(figures.slimmed_core_seconds),
        "lent_cores": mean(figures.lent_core_seconds),
    }


def _qos_percent(simulation: Simulation, outcomes: Sequence[Outcome], *, complete: bool) -> float | None:
    """Tell the share of jobs that were done by their deadline, of those of which that is known."""
    met, missed = 0, sum(job.deadline_seconds is not None for job, _ in simulation.unschedulable)
    for one in outcomes:
        if one.deadline_seconds is None or (one.finished_seconds is not None and one.ended is Ended.KILLED):
            continue
        if one.finished_seconds is not None:
            in_time = one.ended is Ended.PASSED and one.finished_seconds <= one.deadline_seconds
            met, missed = met + in_time, missed + (not in_time)
        elif complete or one.given_up_seconds is not None or one.deadline_seconds < simulation.now:
            missed += 1
    return 100 * met / (met + missed) if met + missed else None


def _gpu_time_by_end(done: Sequence[Outcome]) -> dict[str, float | None]:
    total = math.fsum(one.gpu_seconds for one in done)
    return {
        ended.value: math.fsum(one.gpu_seconds for one in done if one.ended is ended) / total if total else None
        for ended in Ended
    }


def _failures(outcomes: Sequence[Outcome]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for one in outcomes:
        if one.failures:
            counts[one.failure or "unknown"] += one.failures
    return counts


def _by_tenant(tenancy: Tenancy, outcomes: Iterable[Outcome]) -> dict[str, dict[str, float | None]]:
    """Sum up by tenant: those that were told of first, then the others by name."""
    of: dict[str, list[Outcome]] = {tenant.id: [] for tenant in tenancy.tenants}
    for outcome in outcomes:
        of.setdefault(outcome.tenant, []).append(outcome)
    told = list(of)[: len(tenancy.tenants)]
    held = {tenant: math.fsum(one.gpu_seconds for one in theirs) for tenant, theirs in of.items()}
    total = math.fsum(held.values())
    figures: dict[str, dict[str, float | None]] = {}
    for tenant in (*told, *sorted(of.keys() - set(told))):
        done = [one for one in of[tenant] if one.finished_seconds is not None]
        figures[tenant] = {
            "jobs": len(of[tenant]),
            "finished": len(done),
            "avg_jct_seconds": _mean([jct for one in done if (jct := one.jct_seconds) is not None]),
            "avg_queue_seconds": _mean([one.queue_seconds for one in done]),
            "gpu_seconds": held[tenant],
            "gpu_share": held[tenant] / total if total else None,
        }
    return figures


def _jobs_by_wait(outcomes: Iterable[Outcome]) -> dict[str, int]:
    counts = {wait.value: 0 for wait in WAITS}
    for outcome in outcomes:
        if wait := dominant(outcome.waits_seconds):
            counts[wait.value] += 1
    return counts


def _jobs_by_wait_and_gpus(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    return {
        size: _jobs_by_wait(one for one in outcomes if least <= one.gpu_milli < above)
        for size, (least, above) in GANG_SIZES.items()
    }


def _seconds_by_level(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        level.value: math.fsum(one.fragmentation_seconds[number] for one in outcomes)
        for number, level in enumerate(LEVELS)
    }


def _seconds_by_wait(outcomes: tuple[Outcome, ...]) -> dict[str, float]:
    return {
        wait.value: math.fsum(outcome.waits_seconds[number] for outcome in outcomes)
        for number, wait in enumerate(WAITS)
    }
