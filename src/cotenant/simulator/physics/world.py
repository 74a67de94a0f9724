"""The simulated world: all its physics behind one door, for the engine and the scheduler."""

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
from cotenant.core.placement.candidate_allocations import standard
from cotenant.core.placement.unschedulable import shapes_of
from cotenant.core.policy.protocols import ContentionPolicy, NodeWindow
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.job import Life
from cotenant.simulator.physics import utilisation
from cotenant.simulator.physics.contention_control import Eliminating
from cotenant.simulator.physics.costs import cost
from cotenant.simulator.physics.failures import Fate, Fates, told
from cotenant.simulator.physics.outages import Outages
from cotenant.simulator.physics.rates import FULL, Rate
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.speeds import Speeds
from cotenant.simulator.traces import Trace, TraceJob

NOISE_STREAM = 5  # of its own, so that measuring changes nothing else that is drawn


class World:
    """What is true of jobs and nodes, whatever the scheduler knows of it."""

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
        self.usage_is_modelled = settings.utilisation != "none"
        self._fates = Fates(seed, settings.failed_percent, settings.killed_percent, settings.retries)
        self._retrying = RetryRules(untold_back_off_seconds=settings.retry_backoff_seconds)
        self._models = Speeds(cluster, settings, seed)
        self.shapes = shapes_of(cluster.ledger())
        self._judged: dict[Hashable, list[tuple[Candidate, float]]] = {}
        self._speeds = self._models if settings.speeds else None
        self.eliminating = Eliminating(contention, self._speeds, settings.contention_interval_seconds)

        self.quiet = self._speeds is None and self.outages.next_seconds() == math.inf  # nothing happens by itself

    @property
    def by_chance(self) -> bool:
        """Whether failures of jobs or nodes, or what a contention policy sees, are drawn at random."""
        noisy = self.eliminating.asked and self.settings.sample_noise > 0
        return noisy or self.settings.failures != "none" or self.settings.node_mtbf_hours is not None

    def fate(self, job: TraceJob, number: int) -> Fate:
        """Decide what becomes of the job with this number in the trace."""
        return told(job) if self.settings.failures == "none" else self._fates.draw(job, number)

    def born(self, life: Life) -> None:
        """Set what a new life needs to know of the world."""
        life.checkpoint_seconds = self.settings.checkpoint_interval_seconds or math.inf
        life.trial_left_seconds = next(iter(life.fate.trials_seconds), math.inf)
        if self.usage_is_modelled and life.shape.gpu_milli:
            life.usage = utilisation.base(life.shape.gpu_milli / WHOLE_GPU_MILLI, life.fate.ended)

    def started(self, life: Life, holdings: Sequence[Holding]) -> Rate:
        """Tell a run's rate, but for what its neighbours do to it."""
        return self._speeds.started(life, holdings) if self._speeds else FULL

    def resized(self, life: Life, holdings: Sequence[Holding]) -> Rate:
        """Tell the rate of a run that has other cores now, but for what its neighbours do to it."""
        return self._speeds.resized(life, holdings) if self._speeds else FULL

    def disturbed(self, life: Life) -> bool:
        """Tell whether a run's neighbours slow it down."""
        return self._speeds.disturbed(life) if self._speeds else False

    def judged(self, job: TraceJob) -> tuple[CandidateEstimate, ...]:
        """Tell a job's true rate, and so how long it takes, under the allocations that are worth judging."""
        alike = job.roles, job.kind, job.model, job.locality
        if alike not in self._judged:
            some = standard(job.spec(), self.shapes)
            self._judged[alike] = [(one, self._models.judged(job, one)) for one in some]
        return tuple(
            [CandidateEstimate(rate, job.work_seconds / rate, 1.0, None, one) for one, rate in self._judged[alike]]
        )

    def measured(self, life: Life, number: int) -> float:
        """Give a run's rate as it is measured in its window of this number: with noise."""
        spread = self.settings.rate_noise
        if not spread:
            return life.rate
        rng = np.random.default_rng([self._seed, NOISE_STREAM, life.sequence, life.runs, number])
        return steady(life.rate * math.exp(spread * float(rng.standard_normal())))

    def gpu_type(self, node: int) -> str:
        """Name the type of a node's GPUs."""
        return self._cluster.shapes[node].gpu_type

    def released(self, life: Life) -> None:
        """Note that a run has given back what it held."""
        if self._speeds:
            self._speeds.released(life)

    def changed(self) -> Iterator[tuple[Life, Rate]]:
        """Give the runs whose neighbours came or went, with their new rates."""
        return self._speeds.changed() if self._speeds else iter(())

    def windows(self, now: float, seconds: float) -> Iterator[NodeWindow]:
        """Give what a contention policy judges: each node's window of samples; none where neighbours do not count."""
        return self._speeds.windows(now, seconds) if self._speeds else iter(())

    def preemption_seconds(self, life: Life) -> float:
        """Tell what a job repeats or waits for when it starts again after a preemption."""
        if self.settings.preemption_cost_seconds == "model":
            price = cost(self._models.model(life.job))
            return price.save_seconds + price.restart_seconds
        return self.settings.preemption_cost_seconds

    def stop_cost_seconds(self, life: Life, now: float) -> float:
        """Tell what a stop would cost a job now: what it would do again, and its restart."""
        unsaved = 0.0
        if not self.settings.preemption_grace:
            unsaved = min(life.checkpoint_seconds, max(0.0, now - life.working_since))
        return self.preemption_seconds(life) + unsaved

    def restart_seconds(self, life: Life) -> float:
        """Tell what a job waits for when it starts again after a failure; nothing could be saved."""
        if self.settings.preemption_cost_seconds == "model":
            return cost(self._models.model(life.job)).restart_seconds
        return self.settings.preemption_cost_seconds

    def retry(self, life: Life) -> Retry:
        """Tell what follows from a job's failure, by the rule of the live queue for what nobody can tell the kind of.

        How often a job is tried again is part of its fate.
        """
        tries = Tries(life.failures - 1, len(life.fate.trials_seconds) - 1)
        return decide(Failure(), tries, self._retrying, draw=1.0)

    def noted(self, trace: Trace) -> Trace:
        """Tell in the trace's notes for how many jobs the speed models know nothing."""
        if not self.settings.speeds - {"bandwidth"}:
            return trace
        unknown = sum(self._models.model(job) is None for job in trace.jobs)
        if not unknown:
            return trace
        note = (
            f"{unknown} of {len(trace)} jobs are of no model that is known: cores and the type of their GPUs leave "
            "them at speed 1; simulator.model_default names one for them"
        )
        return replace(trace, notes=(*trace.notes, note))
