"""The simulated world: all its physics behind one interface, for the engine and the scheduler."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from cotenant.core.capacity.ledger import Holding
from cotenant.core.failures.classifier import Failure
from cotenant.core.failures.retry import Retry, RetryRules, Tries, decide
from cotenant.core.model.estimate import Candidate, CandidateEstimate
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.placement.candidate_allocations import standard_candidates
from cotenant.core.placement.unschedulable import shapes_of
from cotenant.core.policy.protocols import ContentionPolicy, NodeWindow
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics import utilisation
from cotenant.simulator.physics.contention_control import ContentionControl
from cotenant.simulator.physics.costs import cost
from cotenant.simulator.physics.failures import Fate, Fates, fate_in_trace
from cotenant.simulator.physics.outages import Outages
from cotenant.simulator.physics.rates import FULL, Rate
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.speeds import Speeds
from cotenant.simulator.traces import Trace, TraceJob

NOISE_STREAM = 5  # a stream of its own, so that measuring changes no other draws


class World:
    """The true properties of jobs and nodes, whatever the scheduler knows."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings | None = None,
        seed: int = 0,
        contention: ContentionPolicy | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        self._cluster, self._seed = cluster, seed
        self.outages = Outages(len(cluster.shapes), seed, settings.node_mtbf_hours, settings.node_repair_hours)
        self.models_utilization = settings.utilisation != "none"
        self._fates = Fates(seed, settings.failed_percent, settings.killed_percent, settings.retries)
        self._retrying = RetryRules(untold_back_off_seconds=settings.retry_backoff_seconds)
        self._models = Speeds(cluster, settings, seed)
        self.shapes = shapes_of(cluster.ledger())
        self._judged: dict[Hashable, list[tuple[Candidate, float]]] = {}
        self._speeds = self._models if settings.speeds else None
        self.contention_control = ContentionControl(contention, self._speeds, settings.contention_interval_seconds)

        self.quiet = (
            self._speeds is None and self.outages.next_seconds() == math.inf
        )  # nothing happens without the scheduler

    @property
    def by_chance(self) -> bool:
        """Whether failures of jobs or nodes, or what a contention policy sees, are drawn at random."""
        noisy = self.contention_control.asked and self.settings.sample_noise > 0
        return noisy or self.settings.failures != "none" or self.settings.node_mtbf_hours is not None

    def fate(self, job: TraceJob, number: int) -> Fate:
        """Return the outcome of the job with this number in the trace."""
        return fate_in_trace(job) if self.settings.failures == "none" else self._fates.draw(job, number)

    def initialize(self, sim_job: SimulatedJob) -> None:
        """Set the world's parameters of a new job."""
        sim_job.checkpoint_seconds = self.settings.checkpoint_interval_seconds or math.inf
        sim_job.trial_left_seconds = next(iter(sim_job.fate.trials_seconds), math.inf)
        if self.models_utilization and sim_job.job_class.gpu_milli:
            sim_job.usage = utilisation.base(sim_job.job_class.gpu_milli / WHOLE_GPU_MILLI, sim_job.fate.ended)

    def started(self, sim_job: SimulatedJob, holdings: Sequence[Holding]) -> Rate:
        """Return a run's rate without neighbors."""
        return _scaled(sim_job, self._speeds.started(sim_job, holdings) if self._speeds else FULL)

    def resized(self, sim_job: SimulatedJob, holdings: Sequence[Holding]) -> Rate:
        """Return a resized run's rate without neighbors."""
        return _scaled(sim_job, self._speeds.resized(sim_job, holdings) if self._speeds else FULL)

    def disturbed(self, sim_job: SimulatedJob) -> bool:
        """Return whether a run's neighbors slow it down."""
        return self._speeds.disturbed(sim_job) if self._speeds else False

    def candidate_estimates(self, job: TraceJob) -> tuple[CandidateEstimate, ...]:
        """Return a job's true rate and run time under the allocations worth judging."""
        alike = job.roles, job.kind, job.model, job.locality, job.spread, job.gpu_type
        if alike not in self._judged:
            some = standard_candidates(job.spec(), self.shapes)
            self._judged[alike] = [(one, self._models.rate_under(job, one)) for one in some]
        return tuple(
            [CandidateEstimate(rate, job.work_seconds / rate, 1.0, None, one) for one, rate in self._judged[alike]]
        )

    def measured(self, sim_job: SimulatedJob, number: int) -> float:
        """Return a run's measured rate in the window with this number: with noise."""
        spread = self.settings.rate_noise
        if not spread:
            return sim_job.rate
        rng = np.random.default_rng([self._seed, NOISE_STREAM, sim_job.sequence, sim_job.runs, number])
        return steady(sim_job.rate * math.exp(spread * float(rng.standard_normal())))

    def gpu_type(self, node: int) -> str:
        """Return the type of a node's GPUs."""
        return self._cluster.shapes[node].gpu_type

    def released(self, sim_job: SimulatedJob) -> None:
        """Remove a run."""
        if self._speeds:
            self._speeds.released(sim_job)

    def changed(self) -> Iterator[tuple[SimulatedJob, Rate]]:
        """Return the runs whose rates were changed by neighbors, with their new rates."""
        changed = self._speeds.changed() if self._speeds else iter(())
        return ((sim_job, _scaled(sim_job, rate)) for sim_job, rate in changed)

    def windows(self, now: float, seconds: float) -> Iterator[NodeWindow]:
        """Yield each node's window of samples for a contention policy; none if neighbors do not matter."""
        return self._speeds.windows(now, seconds) if self._speeds else iter(())

    def preemption_seconds(self, sim_job: SimulatedJob) -> float:
        """Return what a job repeats or waits for when it starts again after a preemption."""
        if self.settings.preemption_cost_seconds == "model":
            price = cost(self._models.model(sim_job.job))
            return price.save_seconds + price.restart_seconds
        return self.settings.preemption_cost_seconds

    def stop_cost_seconds(self, sim_job: SimulatedJob, now: float) -> float:
        """Return what a stop would now cost a job: repeated work, and its restart."""
        unsaved = 0.0
        if not self.settings.preemption_grace:
            unsaved = min(sim_job.checkpoint_seconds, max(0.0, now - sim_job.working_since))
        return self.preemption_seconds(sim_job) + unsaved

    def restart_seconds(self, sim_job: SimulatedJob) -> float:
        """Return what a job waits for when it starts again after a failure; nothing could be saved."""
        if self.settings.preemption_cost_seconds == "model":
            return cost(self._models.model(sim_job.job)).restart_seconds
        return self.settings.preemption_cost_seconds

    def retry(self, sim_job: SimulatedJob) -> Retry:
        """Return what follows from a job's failure, by the live queue's rule for unclassified failures.

        The number of retries is part of the job's outcome.
        """
        tries = Tries(sim_job.failures - 1, len(sim_job.fate.trials_seconds) - 1)
        return decide(Failure(), tries, self._retrying, draw=1.0)

    def with_notes(self, trace: Trace) -> Trace:
        """Return a trace with a note on the number of jobs whose model is unknown."""
        if not self.settings.speeds - {"bandwidth"}:
            return trace
        unknown = sum(self._models.model(job) is None for job in trace.jobs)
        if not unknown:
            return trace
        note = (
            f"{unknown} of {len(trace)} jobs have no known model: cores and GPU types leave "
            "them at speed 1; simulator.model_default sets a model for them"
        )
        return replace(trace, notes=(*trace.notes, note))


def _scaled(sim_job: SimulatedJob, rate: Rate) -> Rate:
    """Return the rate of a run with the present number of replicas, from that with the requested number."""
    return rate if sim_job.speed == 1.0 else Rate(rate.work * sim_job.speed, rate.pace)
