"""The simulator's engine: a virtual clock and the events that advance it.

Time jumps from event to event: a submission, a finish, or the expiry of the order. Everything at one instant happens
together: jobs finish, jobs arrive, then one cycle decides. Decisions take no time, and a stopped job stops at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from cotenant.core.forecast.forecast_state import QueueSnapshot
from cotenant.core.model.job import JobKind
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.tenancy import NO_TENANTS, Tenancy
from cotenant.core.prediction.remaining_time import RemainingTime
from cotenant.core.scheduling.admission import RULES, Rules
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.eligibility import Eligibility
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import Arm
from cotenant.simulator.recording.events import EventLog, Kind, Recorder
from cotenant.simulator.replica_resizing import ReplicaFigures, elastic_of
from cotenant.simulator.resizing import ResizeFigures
from cotenant.simulator.scheduler import Scheduler
from cotenant.simulator.snapshots import SnapshotState
from cotenant.simulator.traces import Trace, TraceJob
from cotenant.simulator.traces.trace_job import Ended


class Simulation:
    """A trace being simulated on a cluster. `now` is in seconds since the trace's first submission."""

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        policies: Policies,
        arm: Arm,
        *,
        seed: int = 0,
        world: World | None = None,
        rules: Rules = RULES,
        tenancy: Tenancy = NO_TENANTS,
        recorder: Recorder | None = None,
    ) -> None:
        self.trace, self.cluster, self.tenancy = trace, cluster, tenancy
        self.now = 0.0
        self.steps = 0
        self.events = 0
        self.finished = 0
        self.submitted = 0
        self.sim_jobs: list[SimulatedJob] = []  # of the jobs submitted so far, except those that can never run
        self.unschedulable: list[tuple[TraceJob, Refusal]] = []
        self.world = world or World(cluster, seed=seed)
        self._arm = arm
        self._eligibility = Eligibility(cluster, policies, seed, tenancy)
        self._event_log = EventLog(recorder) if recorder else None
        self._scheduler = Scheduler(
            cluster,
            policies,
            arm,
            jobs=len(trace),
            elastic=any(role.elastic for job in trace.jobs for role in job.roles),
            seed=seed,
            world=self.world,
            rules=rules,
            tenancy=tenancy,
            event_log=self._event_log,
        )
        self._resizing = self._scheduler.resizing
        self._replica_resizing = self._scheduler.replica_resizing
        if self._replica_resizing:
            self._replica_resizing.class_of = self._class_with
        self._idle = False  # no job runs or is still to come
        self._initial_rng_state = self._scheduler.rng.bit_generator.state
        self.world.contention_control.wanted = any(job.kind is JobKind.CPU for job in trace.jobs)
        self._finishes: list[tuple[float, int, int]] = []  # time, sequence, and timing counter at prediction
        self._retries: list[tuple[float, int]] = []  # time and sequence
        if trace.snapshot_state:
            self._resume(trace.snapshot_state)

    @property
    def by_chance(self) -> bool:
        """Whether anything was drawn at random so far: then another seed may give other figures."""
        noisy = self._resizing is not None and self.world.settings.rate_noise > 0
        return (
            self._arm.by_chance
            or self.world.by_chance
            or self._eligibility.used_randomness
            or self._policy_used_randomness
            or noisy
        )

    @property
    def sized(self) -> ResizeFigures | None:
        """The effect of resizing running jobs; None if the allocator does not resize."""
        return self._resizing.counted(self.now) if self._resizing else None

    @property
    def rescaled(self) -> ReplicaFigures | None:
        """The resizes of elastic jobs; None if the allocator resizes none."""
        return self._replica_resizing.figures if self._replica_resizing else None

    @property
    def _policy_used_randomness(self) -> bool:
        """Whether a policy drew anything at random while deciding."""
        return self._scheduler.rng.bit_generator.state != self._initial_rng_state

    def queue_snapshot(self, rest_of: Callable[[str], RemainingTime]) -> QueueSnapshot:
        """Return the present state for a start forecast; `rest_of` gives the remaining run time of a job."""
        return self._scheduler.queue_snapshot(self.now, rest_of)

    def step(self) -> bool:
        """Advance to the next event and process it; False if there is none.

        Raises:
            PolicyFailed: a policy raised an error, or returned an invalid answer.
        """
        now = self._next_seconds()
        if now == math.inf:
            return False
        self.now = now
        self.steps += 1
        self.events += now >= self._scheduler.order_expires
        self._process_finishes()
        if not self.world.quiet:
            self._process_outages()
        self._process_retries()
        for sim_job in self._arrivals():
            self._scheduler.submit(sim_job, self.now)
        if self._resizing:
            self._resizing.measure(now)
            if self._resizing.sizing_changed():
                self._scheduler.resize_waiting(self._resized_class, now)
        if self._replica_resizing:
            self._resize_replicas(now)
        else:
            self._decide(now)
        if self._resizing:
            for sim_job, finish in self._resizing.rebalance(now):
                self._schedule_finish(sim_job, finish)
        if not self.world.quiet:
            self._update_rates(now)
        return True

    def _decide(self, now: float) -> None:
        for sim_job, finish in self._scheduler.decide(now):
            self._schedule_finish(sim_job, finish)

    def _resize_replicas(self, now: float) -> None:
        """Run a cycle between two looks at the sizes of elastic jobs."""
        for sim_job, finish in self._scheduler.resize_replicas(now, waiting=True):
            self._schedule_finish(sim_job, finish)
        self._decide(now)
        for sim_job, finish in self._scheduler.resize_replicas(now, waiting=False):
            self._schedule_finish(sim_job, finish)

    def _class_with(self, sim_job: SimulatedJob, count: int) -> JobClass | Refusal:
        """Return the class of an elastic job with another number of replicas, or why it could never run."""
        number, role = elastic_of(sim_job)
        roles = list(sim_job.job.roles)
        roles[number] = replace(role, replicas=count)
        return self._eligibility.job_class(replace(sim_job.job, roles=tuple(roles)), sim_job.estimate)

    def _resized_class(self, sim_job: SimulatedJob) -> JobClass | None:
        """Return the class of a waiting job by what is now known of its job class; None if that changes nothing."""
        estimate = self._resizing.reestimated(sim_job) if self._resizing else sim_job.estimate
        if estimate.cores_useful == sim_job.estimate.cores_useful:
            return None
        sim_job.estimate = estimate
        job_class = self._eligibility.job_class(sim_job.job, estimate)
        return (
            None
            if isinstance(job_class, Refusal) or job_class is (sim_job.job_class.first or sim_job.job_class)
            else job_class
        )

    def _resume(self, snapshot_state: SnapshotState) -> None:
        """Resume where a snapshot was taken: running jobs continue, the others wait, and a cycle is due."""
        self.now = snapshot_state.now_seconds
        for ended in snapshot_state.ended:
            self._scheduler.learn(ended)
        for sim_job in self._arrivals():
            sim_job.attained_seconds = snapshot_state.attained.get(sim_job.job.id, 0.0)
            sim_job.rest_seconds -= sim_job.attained_seconds
            borrows = sim_job.job.id in snapshot_state.borrowing
            if run := snapshot_state.runs.get(sim_job.job.id):
                sim_job.attained_seconds = run.attained_seconds
                sim_job.rest_seconds -= run.attained_seconds
                sim_job.reclaimable = borrows
                self._schedule_finish(
                    sim_job, self._scheduler.adopt(sim_job, run.holdings, run.since_seconds, self.now)
                )
            else:
                self._scheduler.submit(sim_job, self.now, borrowed=borrows)
        for node in snapshot_state.closed:
            self._scheduler.cordon(node)
        self._scheduler.order_expires = self.now

    def _update_rates(self, now: float) -> None:
        """Update rates after neighbors started or stopped, and apply the contention policy's directives."""
        for sim_job in self.world.contention_control.judge(now):
            self._scheduler.preempt(sim_job.job.id, (), now, Kind.MIGRATED)
            self._scheduler.order_expires = now
        for sim_job, rate in self.world.changed():
            self._schedule_finish(sim_job, sim_job.retime(now, rate))
            self._scheduler.update_total(sim_job, now)
            if self._resizing:
                self._resizing.rate_changed(sim_job, now)
            if self._event_log:
                self._event_log.rate_changed(sim_job, now)

    def _schedule_finish(self, sim_job: SimulatedJob, finish: float) -> None:
        heapq.heappush(self._finishes, (finish, sim_job.sequence, sim_job.timing))

    def _next_seconds(self) -> float:
        while self._finishes and self._is_stale(self._finishes[0]):
            heapq.heappop(self._finishes)
        jobs = self.trace.jobs
        coming = jobs[self.submitted].submitted_seconds if self.submitted < len(jobs) else math.inf
        finishing = self._finishes[0][0] if self._finishes else math.inf
        retrying = self._retries[0][0] if self._retries else math.inf
        expiring = self._scheduler.order_expires
        self._idle = coming == finishing == retrying == math.inf
        if self._resizing:
            if self._resizing.freed:
                return self.now
            expiring = min(expiring, self._resizing.next_seconds())
        if self._replica_resizing:
            expiring = min(expiring, self._replica_resizing.next_seconds())
        if self._idle and self.finished + self._scheduler.given_up == len(self.sim_jobs):
            return expiring
        if self.world.quiet:
            return min(coming, finishing, retrying, expiring)
        judging = self.world.contention_control.next_seconds(self.now, idle=self._idle)
        breaking = self.world.outages.next_seconds(idle=self._idle)
        return min(coming, finishing, retrying, expiring, judging, breaking)

    def _is_stale(self, finish: tuple[float, int, int]) -> bool:
        """Return whether a finish belongs to a stopped run, or was superseded by a later prediction."""
        sim_job = self.sim_jobs[finish[1]]
        return sim_job.timing != finish[2] or not sim_job.running

    def _process_finishes(self) -> None:
        while self._finishes and self._finishes[0][0] <= self.now:
            finish = heapq.heappop(self._finishes)
            if not self._is_stale(finish):
                self._end_run(self.sim_jobs[finish[1]])

    def _end_run(self, sim_job: SimulatedJob) -> None:
        """End a run: the job is done, or it fails and may be retried."""
        self.events += 1
        if sim_job.fate.ended is Ended.FAILED:
            sim_job.failures += 1
        if sim_job.fails_at <= self.now and (retry := self.world.retry(sim_job)).again:
            self._scheduler.fail(sim_job, retry.wait_seconds, self.now)
            sim_job.trial_left_seconds = sim_job.fate.trials_seconds[sim_job.failures]
            heapq.heappush(self._retries, (self.now + retry.wait_seconds, sim_job.sequence))
            return
        self._scheduler.finish(sim_job, self.now)
        self._arm.finished(sim_job.job, sim_job.attained_seconds, self.now, passed=sim_job.fate.ended is Ended.PASSED)
        self.finished += 1

    def _process_outages(self) -> None:
        """Process failures and repairs of nodes."""
        for node, back in self.world.outages.due(self.now, idle=self._idle):
            self.events += 1
            if self._event_log:
                self._event_log.node(node, self.now, back=back)
            if back:
                self._scheduler.reopen(node)
            else:
                self._scheduler.close(node, self.now)

    def _process_retries(self) -> None:
        while self._retries and self._retries[0][0] <= self.now:
            _, sequence = heapq.heappop(self._retries)
            self._scheduler.retry(self.sim_jobs[sequence], self.now)
            self.events += 1

    def _arrivals(self) -> Iterator[SimulatedJob]:
        """Yield the jobs submitted by now; those that can never run are set aside."""
        jobs = self.trace.jobs
        while self.submitted < len(jobs) and jobs[self.submitted].submitted_seconds <= self.now:
            job = jobs[self.submitted]
            self.submitted += 1
            self.events += 1
            sequence = len(self.sim_jobs)
            estimate = self._arm.submitted(sequence, job)
            if self._resizing:
                estimate = self._resizing.informed(sequence, job, estimate)
            job_class = self._eligibility.job_class(job, estimate)
            if isinstance(job_class, Refusal):
                self.unschedulable.append((job, job_class))
                if self._event_log:
                    self._event_log.unschedulable(job, job_class, self.now)
                continue
            fate = self.world.fate(job, self.submitted - 1)
            sim_job = SimulatedJob(job, sequence, job_class, job.work_seconds * fate.work_share, fate, estimate)
            self.world.initialize(sim_job)
            self.sim_jobs.append(sim_job)
            yield sim_job
