"""The result of a simulation: the figures, and the outcome of each job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cotenant.core.model.job import TENANT_DEFAULT, WHOLE_GPU_MILLI, JobKind
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.objective import JobFacts, ObjectiveState, statuses
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Tenancy
from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.resizing import ResizeFigures
from cotenant.simulator.starvation import GANG_SIZES, starvation_of
from cotenant.simulator.traces.trace_job import Ended
from cotenant.simulator.wait_times import LEVELS, WAITS, by_level, by_wait, dominant

ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "jobs": "jobs of the trace that were submitted, including unschedulable ones",
        "jct": "finish - submission, of finished jobs, also killed and failed ones; percentiles interpolate linearly",
        "makespan_seconds": "last finish - first submission",
        "given_up": "jobs that the queue policy gave up; they are neither finished nor unschedulable",
        "avg_queue_seconds": "mean time that a finished job spent waiting, including waits after preemptions",
        "gpu_utilisation": "mean GPU utilization over all GPU time of the cluster until the makespan, from 0 to 1, as "
        "simulator.utilisation models it; if that is none, held GPUs count as fully used: gpu_occupancy",
        "gpu_occupancy": "GPU time held by jobs / GPU time of the cluster over the makespan, from 0 to 1",
        "cpu_utilisation": "the same for cores; held cores count as used",
        "sizing": "only if the allocator resizes running jobs: `resizes`, the number of changes; mean "
        "cores, over the makespan, that jobs had given back of their GPUs' share (`slimmed_cores`) and that were lent "
        "to them in addition to their own (`lent_cores`)",
        "elasticity": "only if there are elastic jobs and the allocator resizes them: `resizes`, the number of "
        "changes, and the GPU time that their restarts took (`lost_gpu_seconds`)",
        "cpu_jobs_avg_queue_seconds": "avg_queue_seconds of jobs without GPUs; null if there are none",
        "tenants": "by tenant: its jobs; the mean JCT and time spent waiting of finished jobs; the GPU time that it "
        "held, and its share of the GPU time of all tenants",
        "objectives": "deadlines by outcome: met, missed, or unknown; the last are those of jobs killed by their "
        "users, and of jobs that had time left when the simulation was stopped early",
        "qos_guarantee_percent": "jobs that met their deadline, of those that have one; failed and unfinished "
        "jobs count as missed, jobs killed by their users are left out; null if no job has a deadline",
        "migrations": "runs that were stopped to continue elsewhere, so that a gang could start or contention ends",
        "reclaims": "runs that were stopped because their resources were reserved for another job",
        "outcomes": "finished jobs by outcome",
        "outcomes_gpu_time": "shares of the GPU time held by finished jobs, by outcome; null for none",
        "failures": "attempts that failed because of the job itself, by class",
        "crashes": "runs that ended because a node failed",
        "lost_work_seconds": "work, at reference speed, that was lost in failures because it was not saved",
        "waits": "jobs by the kind of wait that took most of their time; jobs that never waited are in none",
        "waits_seconds": "seconds of waiting by kind, summed over all jobs",
        "waits_by_gpus": "waits by the GPUs that a job requests, as in Philly's table",
        "fragmentation_seconds": "of waits_seconds, the waits for a place that is not fragmented, by the level "
        "that was wanted: all on one server, all in one rack, or anywhere",
        "starvation": "by the GPUs that a job requests, and for jobs that request more than any server has: jobs, the "
        "longest and mean time spent waiting, and the percentage that waited for over an hour; also unfinished jobs",
        "events": "submissions, finishes, failures, retries, preemptions, migrations, failures and repairs of nodes, "
        "and expiries of an order",
        "overlay": "what was added to the trace, and its seed; empty if nothing was",
        "wall_seconds": "time that the simulation took; the only figure that differs from run to run",
        "by_chance": "whether anything was drawn at random, so that another seed may give other figures",
        "unschedulable": "jobs that can never run, with the reason; they are in no other figure but jobs",
    }
)


LEFT_WAITING = Refusal(
    Code.NOT_YET_CONSIDERED,
    "was still waiting when no job was running or still to come: the policies found no place for it",
    "another policy, or a larger cluster",
)


class Outcome(NamedTuple):
    """The outcome of one job. Times count from the first submission; None: it did not finish, was not given up."""

    id: str
    kind: JobKind
    gpu_milli: int
    submitted_seconds: float
    work_seconds: float
    finished_seconds: float | None
    run_seconds: float
    waits_seconds: tuple[float, ...]  # by kind
    preemptions: int
    ended: Ended = Ended.PASSED  # if it finished
    failures: int = 0
    failure: str = ""
    crashes: int = 0
    lost_work_seconds: float = 0.0
    busy_seconds: float = 0.0  # GPU utilisation × run time
    deadline_seconds: float | None = None
    given_up_seconds: float | None = None
    tenant: str = TENANT_DEFAULT
    fragmentation_seconds: tuple[float, ...] = ()  # by level; they add up to the waits of that kind
    servers: int = 0  # of its last run
    elastic_milli_seconds: tuple[float, float] | None = None  # GPUs × time of an elastic job: held, and used

    @property
    def jct_seconds(self) -> float | None:
        """Time from submission to finish."""
        return None if self.finished_seconds is None else self.finished_seconds - self.submitted_seconds

    @property
    def queue_seconds(self) -> float:
        """Total time spent waiting."""
        return sum(self.waits_seconds)

    @property
    def gpu_seconds(self) -> float:
        """GPU time held."""
        return self.held_milli_seconds / WHOLE_GPU_MILLI

    @property
    def held_milli_seconds(self) -> float:
        """GPU time held, in thousandths."""
        return self.elastic_milli_seconds[0] if self.elastic_milli_seconds else self.gpu_milli * self.run_seconds

    @property
    def busy_milli_seconds(self) -> float:
        """GPU time used, in thousandths."""
        return self.elastic_milli_seconds[1] if self.elastic_milli_seconds else self.gpu_milli * self.busy_seconds


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one simulation; None if a figure has no data. `ABOUT` explains each."""

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
    elasticity: Mapping[str, float] | None
    objectives: Mapping[str, int]
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
        """Return all figures as plain values; `about` explains each. The jobs' outcomes are left out."""
        names = (name for name in self.__dataclass_fields__ if name not in ("outcomes", "ends", "ends_gpu_time"))
        plain = {name: getattr(self, name) for name in names}
        about = dict(ABOUT)
        for name in ("sizing", "elasticity"):
            if getattr(self, name) is None:
                del plain[name], about[name]
        return {
            **plain,
            "objectives": dict(self.objectives),
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
    """Return the figures of a simulation in its present state."""
    trace, cluster = simulation.trace, simulation.cluster
    outcomes = tuple(_outcome(sim_job, simulation.now) for sim_job in simulation.sim_jobs)
    done = [outcome for outcome in outcomes if outcome.finished_seconds is not None]
    jcts = np.array([outcome.jct_seconds for outcome in done], dtype=np.float64)
    makespan = max((outcome.finished_seconds or 0.0 for outcome in done), default=None)
    span = (makespan if complete else simulation.now) or 0.0
    occupancy = _share([one.held_milli_seconds for one in outcomes], cluster.gpus * 1000, span)
    busy = _share([one.busy_milli_seconds for one in outcomes], cluster.gpus * 1000, span)
    held_cores = [job.job_class.cores * one.run_seconds for job, one in zip(simulation.sim_jobs, outcomes, strict=True)]
    held_cores += [simulation.sized.beyond_core_seconds] if simulation.sized else []
    return Result(
        jobs=simulation.submitted,
        finished=len(done),
        given_up=sum(sim_job.given_up for sim_job in simulation.sim_jobs),
        avg_jct_seconds=_mean(jcts.tolist()),
        median_jct_seconds=_percentile(jcts, 50),
        p95_jct_seconds=_percentile(jcts, 95),
        p99_jct_seconds=_percentile(jcts, 99),
        makespan_seconds=makespan,
        avg_queue_seconds=_mean([outcome.queue_seconds for outcome in done]),
        preemptions=(preemptions := sum(outcome.preemptions for outcome in outcomes)),
        migrations=(moves := sum(sim_job.migrations for sim_job in simulation.sim_jobs)),
        reclaims=(reclaims := sum(sim_job.reclaims for sim_job in simulation.sim_jobs)),
        gpu_utilisation=busy if simulation.world.models_utilization else occupancy,
        gpu_occupancy=occupancy,
        cpu_utilisation=_share(held_cores, cluster.cores, span),
        sizing=_sizing(simulation.sized, span) if simulation.sized else None,
        elasticity=asdict(simulation.rescaled) if simulation.rescaled else None,
        cpu_jobs_avg_queue_seconds=_mean([one.queue_seconds for one in done if not one.gpu_milli]),
        objectives=(deadlines := _deadlines(simulation, outcomes, complete=complete)),
        qos_guarantee_percent=_qos_percent(deadlines),
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
    left = [(sim_job.job.id, LEFT_WAITING) for sim_job in simulation.sim_jobs if complete and not sim_job.over]
    return (*((job.id, refusal) for job, refusal in simulation.unschedulable), *left)


def _outcome(sim_job: SimulatedJob, now: float) -> Outcome:
    job, waited = sim_job.job, sim_job.waited_until(now)
    return Outcome(
        id=job.id,
        kind=job.kind,
        gpu_milli=job.spec().gpu_milli if sim_job.asked.elastic else sim_job.job_class.gpu_milli,
        submitted_seconds=job.submitted_seconds,
        work_seconds=job.work_seconds,
        finished_seconds=sim_job.finished_seconds if sim_job.finished else None,
        run_seconds=sim_job.attained_seconds + (now - sim_job.running_since if sim_job.running else 0.0),
        waits_seconds=by_wait(waited),
        preemptions=sim_job.preemptions,
        ended=sim_job.fate.ended,
        failures=sim_job.failures,
        failure=sim_job.failure,
        crashes=sim_job.crashes,
        lost_work_seconds=sim_job.lost_seconds,
        busy_seconds=sim_job.busy_until(now),
        deadline_seconds=job.deadline_seconds,
        given_up_seconds=sim_job.given_up_seconds if sim_job.given_up else None,
        tenant=job.tenant,
        fragmentation_seconds=by_level(waited),
        servers=sim_job.servers,
        elastic_milli_seconds=sim_job.milli_seconds_until(now) if sim_job.asked.elastic else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None


def _percentile(values: np.ndarray, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _share(held: Sequence[float], total: int, span_seconds: float) -> float | None:
    """Return the integral of what was held as a share of the total."""
    return math.fsum(held) / (total * span_seconds) if total and span_seconds else None


def _sizing(figures: ResizeFigures, span_seconds: float) -> dict[str, float | None]:
    def mean(core_seconds: float) -> float | None:
        return core_seconds / span_seconds if span_seconds else None

    return {
        "resizes": figures.resizes,
        "slimmed_cores": mean(figures.slimmed_core_seconds),
        "lent_cores": mean(figures.lent_core_seconds),
    }


def _deadlines(simulation: Simulation, outcomes: Sequence[Outcome], *, complete: bool) -> dict[str, int]:
    """Return the number of deadlines by outcome: met, missed or unknown."""
    counts = Counter[ObjectiveState]()
    counts[ObjectiveState.MISSED] += sum(job.deadline_seconds is not None for job, _ in simulation.unschedulable)
    for one in outcomes:
        facts = _deadline_facts(one, simulation.now, complete=complete)
        counts.update(status.state for status in statuses(facts, simulation.now))
    return {state.value: counts[state] for state in (ObjectiveState.MET, ObjectiveState.MISSED, ObjectiveState.UNKNOWN)}


_PHASES: Mapping[Ended, Phase] = MappingProxyType(
    {Ended.PASSED: Phase.SUCCEEDED, Ended.KILLED: Phase.CANCELLED, Ended.FAILED: Phase.FAILED}
)


def _deadline_facts(outcome: Outcome, now: float, *, complete: bool) -> JobFacts:
    """Return what a job's deadline is judged by; a job that never finishes has failed."""
    ended = outcome.given_up_seconds if outcome.finished_seconds is None else outcome.finished_seconds
    phase = Phase.QUEUED
    if outcome.finished_seconds is not None:
        phase = _PHASES[outcome.ended]
    elif complete or outcome.given_up_seconds is not None:
        phase = Phase.FAILED
    return JobFacts(phase, outcome.deadline_seconds, ended_seconds=now if ended is None else ended)


def _qos_percent(deadlines: Mapping[str, int]) -> float | None:
    """Return the percentage of jobs that met their deadline, of those for which it is known."""
    met, missed = deadlines[ObjectiveState.MET.value], deadlines[ObjectiveState.MISSED.value]
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
    """Return figures by tenant: configured tenants first, then the others by name."""
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
