"""The simulator's scheduler: the jobs, the free resources, and the same cycle that the live mesh runs.

Decisions come from `cotenant.core.scheduling.cycle` and the policies only. This module skips queries whose answers are
known:

- without waiting jobs there is nothing to decide;
- a refusal holds for all gangs of a class until something is released, and so does a need for more than is free in
  total. If no job may be stopped for others, such gangs are not tried, and if there is no other gang there is no cycle;
- a strict queue tries its gangs one by one, up to the first that does not fit.

This is correct for every policy whose refusals depend on the gang's class and on the free resources. If they also
depend on the wait (`policy.Discerns`), a waiting gang moves to a later class when that makes a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cotenant.core.capacity.ledger import Holding, Overcommitted
from cotenant.core.forecast.forecast_state import QueueSnapshot, RunningEntry, WaitingEntry
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.job_table import Ints, Jobs, JobTable
from cotenant.core.model.refusal import Refusal, Wait, given_up
from cotenant.core.model.resources import UNITS, Resources, added
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy
from cotenant.core.placement.gpu_types import effective_gpus
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.protocols import EndedJob, FixedWhileWaiting
from cotenant.core.prediction.remaining_time import RemainingTime
from cotenant.core.scheduling import cycle
from cotenant.core.scheduling.admission import RULES, FairShare, Rules
from cotenant.core.scheduling.ordering import rank
from cotenant.core.scheduling.usage_ledger import UsageLedger
from cotenant.core.scheduling.waiting_order import WaitingOrder
from cotenant.core.sizing.elastic import ResizesReplicas
from cotenant.core.sizing.resize import Resizes
from cotenant.simulator import service_scaling
from cotenant.simulator.cluster_view import RunningJobs, SimulatedClusterView
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.cycle_candidates import CycleCandidates, victims_of
from cotenant.simulator.free_resources import FreeResources
from cotenant.simulator.job import JobClass, SimulatedJob, row_of
from cotenant.simulator.physics.rates import FULL
from cotenant.simulator.physics.scaling import speed
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import (
    CheckedPlacement,
    Policies,
    PolicyFailed,
    checked_order,
    report_ended,
    report_finished,
)
from cotenant.simulator.prediction_arms import Arm, predict, update_total
from cotenant.simulator.recording.events import EventLog, Kind
from cotenant.simulator.replica_resizing import ReplicaResizing, elastic_of
from cotenant.simulator.resizing import Resizing
from cotenant.simulator.wait_labels import WaitLabels
from cotenant.simulator.wait_reasons import CycleChoice, WaitReasonRecorder
from cotenant.simulator.wait_times import CAUSE_OF, Cause, cause_of
from cotenant.simulator.waiting_jobs import WaitingJobs

VALID_SECONDS_MIN = 0.001  # minimum validity of an order, so that rounding cannot stop the clock


class Scheduler:
    """The running and waiting jobs, and the free resources. `order_expires` is when the order may change by itself."""

    def __init__(
        self,
        cluster: Cluster,
        policies: Policies,
        arm: Arm,
        *,
        jobs: int,
        elastic: bool,
        seed: int,
        world: World,
        rules: Rules = RULES,
        tenancy: Tenancy = NO_TENANTS,
        event_log: EventLog | None = None,
    ) -> None:
        self.order_expires, self.given_up = math.inf, 0
        self._queue = policies.queue
        self._placement = CheckedPlacement(policies.placement)
        self._gives_up = False  # whether the queue policy gives jobs up
        self._rules, self._tenancy = rules, tenancy
        self._tenants = {tenant.id: number for number, tenant in enumerate(tenancy.tenants)}
        self._enforced = rules.enforces(policies.queue)
        self._stops = self._enforced or rules.claims(policies.queue, tenancy)
        self._reserves = bool(rules.reserving)  # then gangs of one class may get different answers
        self._shares = tenancy.guarantees or tenancy.limits  # whether a tenant's share may be why a job waits
        self._by_job_class = not (
            self._enforced or policies.queue.strict
        )  # most gangs of one class wait for one reason
        self._alike = self._by_job_class and not (self._stops or self._shares or self._reserves)  # all do
        self._labels = WaitLabels(by_job_class=self._by_job_class)
        self._arm, self._event_log, self._world = arm, event_log, world
        self._choice: CycleChoice | None = None  # of the present cycle, if there is an event log
        self.rng = np.random.default_rng(seed)
        counts = elastic and isinstance(policies.allocator, ResizesReplicas) and policies.allocator
        self.replica_resizing = ReplicaResizing(counts, arm, world.settings.resize_cost_seconds) if counts else None
        self._ledger = cluster.ledger()
        self._table = JobTable()
        self._capacity = self._table.capacity = added(shape.resources for shape in cluster.shapes)
        self._free = FreeResources(self._capacity)
        self._sim_jobs, self._by_id = dict[int, SimulatedJob](), dict[str, SimulatedJob]()
        self._occupancy = RunningJobs()
        self._waiting, self._headroom = (
            WaitingJobs(self._placement, jobs, WaitingOrder() if self._by_front(tenancy) else None),
            Headroom(()),
        )  # the headroom is that of the present cycle
        self._asked_all = self._asked_placeable = False  # whether the present cycle tries all, or all placeable gangs
        changes = isinstance(policies.allocator, Resizes) and policies.allocator
        shown = self._ledger, arm, world, tenancy, self._table, self._moved, event_log
        self.resizing = Resizing(changes, *shown) if changes else None
        counts_use = rules.fair_share.shares and rules.usage_half_life_seconds
        self._usage = UsageLedger(rules.usage_half_life_seconds) if counts_use else None
        self._counts_worth = rules.fair_share is FairShare.THROUGHPUT and len(self._ledger.gpu_types) > 1
        self._over_share: frozenset[int] = frozenset()  # waiting jobs beyond their tenant's share, by sequence

    def _by_front(self, tenancy: Tenancy) -> bool:
        """Return whether a cycle needs only the running jobs and the first waiting jobs of each class.

        Not if it gives each waiting job a reason of its own, in the event log or by its tenant's share, or a turn of
        its own to claim or to reserve resources.
        """
        fixed = capability_of(self._queue, FixedWhileWaiting)
        if fixed is None or not fixed.fixed_while_waiting or self._event_log or self.replica_resizing:
            return False
        shares = self._shares or self._rules.fair_share.shares
        return not (shares or self._reserves) and (self._enforced or not self._stops)

    def submit(self, sim_job: SimulatedJob, now: float, *, borrowed: bool = False) -> None:
        """Add a job, which waits; `borrowed`: its last run, before the snapshot, was on lent resources."""
        self._enter(sim_job)
        if borrowed:
            self._table.update(sim_job.job.id, borrows=True)
        if sim_job.attained_seconds:  # it ran before the snapshot from which the simulation continues
            self._table.attain(sim_job.job.id, sim_job.attained_seconds)
        if self._event_log:
            self._event_log.submitted(sim_job, now)
        self._wait(sim_job, now)

    def learn(self, ended: EndedJob) -> None:
        """Let a queue policy that learns know a job that ended before the simulation began."""
        report_ended(self._queue, ended, "a job before the snapshot")

    def adopt(self, sim_job: SimulatedJob, holdings: tuple[Holding, ...], since: float, now: float) -> float:
        """Add a job that is already running since some time; returns when it will finish if it is not stopped."""
        self._enter(sim_job)
        self._table.attain(sim_job.job.id, sim_job.attained_seconds)
        finish = self._run(sim_job, holdings, since)
        if self._event_log:
            self._event_log.adopted(sim_job, now)
        return finish

    def cordon(self, node: int) -> None:
        """Cordon a node: running jobs stay, no new ones start there."""
        self._ledger.open[node] = False
        self._resize(Resources(*(self._ledger.free[:, node] * UNITS).tolist()), -1)

    def _enter(self, sim_job: SimulatedJob) -> None:
        job, job_class = sim_job.job, sim_job.job_class
        self._note_change()
        self._waiting.assign(sim_job, job_class)
        self._sim_jobs[sim_job.sequence] = sim_job
        self._by_id[job.id] = sim_job
        tenant = self._tenants.setdefault(job.tenant, len(self._tenants))
        self._table.add(row_of(sim_job, tenant, self._tenancy.weight(tenant)))
        predict(self._arm, sim_job, self._table)

    def update_total(self, sim_job: SimulatedJob, now: float) -> None:
        """Update what is expected of a job that has to repeat work, or whose rate changed."""
        update_total(self._arm, sim_job, self._table, now)

    def finish(self, sim_job: SimulatedJob, now: float) -> None:
        """Remove a finished job, and report it to a queue policy that learns."""
        self._release(sim_job, now)
        ran_seconds = now - sim_job.running_since
        sim_job.finish(now)
        if self._event_log:
            self._event_log.finished(sim_job, ran_seconds, now)
        self._leave(sim_job)
        total_seconds, confidence = self._arm.expected(sim_job.sequence)
        report_finished(self._queue, sim_job, None if math.isnan(total_seconds) else total_seconds, confidence)

    def _note_change(self) -> None:
        if self.replica_resizing:
            self.replica_resizing.changed = True

    def _leave(self, sim_job: SimulatedJob) -> None:
        self._note_change()
        self._table.remove(sim_job.job.id)
        del self._sim_jobs[sim_job.sequence], self._by_id[sim_job.job.id]

    def fail(self, sim_job: SimulatedJob, wait_seconds: float, now: float) -> None:
        """Remove a job whose attempt failed until it is retried; meanwhile it waits."""
        if self._event_log:
            self._event_log.attempt_failed(sim_job, sim_job.failure, now)
            self._event_log.backed_off(sim_job, wait_seconds, now)
        self._release(sim_job, now)
        sim_job.stop(now, self._world.restart_seconds(sim_job), saved=False)
        self._leave(sim_job)
        self._labels.begin_individually(sim_job, Wait.DEPENDENCY, now)

    def retry(self, sim_job: SimulatedJob, now: float) -> None:
        """Add a failed job again, with its attained run time."""
        sim_job.end_wait(now)
        self._enter(sim_job)
        self._table.attain(sim_job.job.id, sim_job.attained_seconds)
        self._table.update(sim_job.job.id, waiting_since=now)
        self.update_total(sim_job, now)
        self._wait(sim_job, now)

    def close(self, node: int, now: float) -> None:
        """Take a failed node out of service; its jobs wait again."""
        lost = [
            sim_job for sim_job in self._sim_jobs.values() if any(holding.node == node for holding in sim_job.holdings)
        ]
        for sim_job in lost:
            if self._event_log:
                self._event_log.attempt_failed(sim_job, "node_down", now, node)
            sim_job.crashes += 1
            self._requeue(sim_job, now, self._world.restart_seconds(sim_job), saved=False)
        self._ledger.open[node] = False
        self._resize(self._ledger.shapes[node].resources, -1)

    def reopen(self, node: int) -> None:
        """Return a node to service."""
        self._ledger.open[node] = True
        self._resize(self._ledger.shapes[node].resources, +1)
        self._waiting.clear_refusals()

    def _resize(self, by: Resources, times: int) -> None:
        self._free.now += by * times
        self._capacity = self._table.capacity = self._capacity + by * times

    def resize_replicas(self, now: float, *, waiting: bool) -> Iterator[tuple[SimulatedJob, float]]:
        """Resize elastic jobs as the allocator decides; yields each resized job, and when it will finish.

        Those that shrink come first. With `waiting`, waiting jobs get the number with which they would start.

        Raises:
            PolicyFailed: the allocator raised an error, or returned an invalid answer.
        """
        resizing = self.replica_resizing
        if resizing is None or not (resizing.wanted(now) or not waiting):
            return
        every = [one for one in self._sim_jobs.values() if one.asked.elastic and (waiting or one.running)]
        if not every:
            resizing.schedule(every, now)
            return
        targets = resizing.targets(every, self._free.now, self._rigid_needs(now), now)
        running = [(one, targets[one.job.id] - _replicas(one)) for one in every if one.running]
        for sim_job, _ in sorted(running, key=lambda pair: (pair[1], pair[0].sequence)):
            finish = self._rescale(sim_job, targets[sim_job.job.id], now)
            if finish is not None:
                yield sim_job, finish
        if waiting:
            self.resize_waiting(lambda one: self._starting_class(one, targets.get(one.job.id, 0)), now)
        resizing.schedule(every, now)

    def _rigid_needs(self, now: float) -> Iterator[Resources]:
        """Yield what waiting jobs that are not elastic need, in the queue's order."""
        if all(one.running or one.asked.elastic for one in self._sim_jobs.values()):
            return
        admission = self._ordered(now, None, self._rules)
        jobs, running_first = admission.jobs, self._queue.running_first
        for sequence in jobs.sequence[rank(jobs, admission.order, running_first=running_first)].tolist():
            sim_job = self._sim_jobs[sequence]
            if not (sim_job.running or sim_job.asked.elastic):
                yield sim_job.job_class.needs

    def _starting_class(self, sim_job: SimulatedJob, target: int) -> JobClass | None:
        """Return the class with which a waiting elastic job would start; None if it is in that class."""
        if not sim_job.asked.elastic or self.replica_resizing is None:
            return None
        number, role = elastic_of(sim_job)
        count = target or (role.elastic.least if role.elastic else role.replicas)
        if sim_job.job_class.parts[number].replicas == count:
            return None
        sim_job.speed = speed(count) / speed(role.replicas)
        return self.replica_resizing.resized_class(sim_job, count)

    def _rescale(self, sim_job: SimulatedJob, count: int, now: float) -> float | None:
        """Begin a generation of a running elastic job; returns when it will finish, None if it stays as it is."""
        if self.replica_resizing is None or count == _replicas(sim_job):
            return None
        before, job_class = sim_job.job_class, self.replica_resizing.resized_class(sim_job, count)
        sim_job.job_class = job_class
        gang = sim_job.gang(now, sim_job.estimate)
        sim_job.job_class = before
        plan = cycle.place([gang], self._ledger, self._placement, self.rng, leaving=sim_job.holdings)
        if not plan.starts:
            return None
        if self._event_log:
            self._event_log.rescaled(sim_job, now)
        reclaimable = sim_job.reclaimable
        self._release(sim_job, now)
        self._table.stop(sim_job.job.id, now)
        lost_seconds = sim_job.resize(now, self.replica_resizing.restart_seconds)
        self._waiting.assign(sim_job, job_class)
        service_scaling.count(sim_job, self._table)
        _, role = elastic_of(sim_job)
        sim_job.speed, sim_job.reclaimable = speed(count) / speed(role.replicas), reclaimable
        finish = self._run(sim_job, plan.starts[0].holdings, now)
        self.replica_resizing.figures.resizes += 1
        self.replica_resizing.figures.lost_gpu_seconds += lost_seconds * job_class.gpu_milli / WHOLE_GPU_MILLI
        if self._event_log:
            self._event_log.started(sim_job, plan.starts[0], now)
        self.update_total(sim_job, now)
        return finish

    def decide(self, now: float) -> list[tuple[SimulatedJob, float]]:
        """Run a cycle; returns the started jobs and when each will finish if it is not stopped.

        Raises:
            PolicyFailed: a policy raised an error, or answered nonsense.
        """
        refusals: Mapping[str, Refusal] = {}
        started: list[tuple[SimulatedJob, float]] = []
        if self._placement.discerns:
            for sim_job in self._waiting.advance_classes(now):
                self._reclassified(sim_job, now)
            self._waiting.expire_refusals(now)
        if not self._may_start(now):
            self.order_expires = math.inf
            self._asked_all, self._over_share = False, frozenset()
        else:
            admission = self._admit(now)
            while self._give_up(admission):
                admission = self._admit(now)
            plan = self._place(admission)
            started, refusals = self._carry_out(plan, admission.jobs, now), plan.refusals
            while (
                plan.moves or plan.reclaimed or (plan.stops and not self._enforced)
            ):  # the remaining gangs may find room
                admission = self._admit(now, self._rules.without_preemption)
                plan = self._place(admission)
                started, refusals = started + self._carry_out(plan, admission.jobs, now), {**refusals, **plan.refusals}
            if (plan.starts and self._waiting) or admission.rules is not self._rules:
                # the started jobs may change the order sooner than those that ran before
                running = self._table.running_rows() if self._waiting.order else None
                admission = self._ordered(now, running, self._rules)
            self._note_shares(admission)
            self.order_expires = now + max(min(admission.valid_seconds, plan.keeps_seconds), VALID_SECONDS_MIN)
        if self._placement.discerns:
            relaxes_at = now + max(self._waiting.track_fragmentation(refusals, self._free, now), VALID_SECONDS_MIN)
            self.order_expires = min(self.order_expires, relaxes_at, self._waiting.next_expiry(refusals.values(), now))
        self._label(refusals, now)
        if self._event_log:
            self._record_wait_reasons(self._event_log, refusals, now)
        return started

    def _record_wait_reasons(self, event_log: EventLog, refusals: Mapping[str, Refusal], now: float) -> None:
        reasons = WaitReasonRecorder(
            event_log, self._sim_jobs, self._ledger, self._free, self._waiting.refusals, self._over_share
        )
        if self._alike:
            reasons.by_job_class(self._waiting.job_classes, now)
        elif self._by_job_class:
            reasons.by_job(refusals if self._asked_all else {}, now)
        else:
            reasons.in_order(self._queue, refusals, self._choice, now)
        self._choice = None

    def _carry_out(self, plan: cycle.Plan, jobs: Jobs, now: float) -> list[tuple[SimulatedJob, float]]:
        """Stop and start jobs; returns the started jobs and when each will finish."""
        if self._event_log:
            self._event_log.planned(plan, int((~jobs.running).sum()), now)
        stops = [*((one, Kind.PREEMPTED) for one in plan.stops), *((one, Kind.RECLAIMED) for one in plan.reclaimed)]
        for job_id, kind in (*stops, *((move.gang.job_id, Kind.MIGRATED) for move in plan.moves)):
            self.preempt(job_id, plan.starts, now, kind)
        return [self._start(start, now) for start in (*plan.starts, *plan.moves)]

    def _may_start(self, now: float) -> bool:
        """Return whether any waiting gang might get a place, as far as can be known without trying."""
        if self._stops or self._shares or self._gives_up or self._reserves:
            return bool(self._waiting)
        if self._queue.strict and (order := self._waiting.order):
            first = order.first_class(self._table, lambda rows: self._ordered(now, rows, self._rules))
            return first is not None and not self._free.lacks(self._waiting.known[first])
        if self._queue.strict:
            return any(not self._free.lacks(job_class) for job_class in self._waiting.job_classes)
        return self._waiting.any_placeable(self._free)

    def _admit(self, now: float, rules: Rules | None = None) -> cycle.Admission:
        """Order the jobs; what follows from the order is counted when it is asked for."""
        waiting = self._waiting.order
        if waiting is None or rules is not None:  # without preemption, each waiting job is tried
            return self._ordered(now, None, rules or self._rules)
        enough = {job_class.code: 1 + self._free.times(job_class) for job_class in self._waiting.job_classes}
        return waiting.admit(self._table, enough, lambda rows: self._ordered(now, rows, self._rules))

    def _ordered(self, now: float, rows: Ints | None, rules: Rules) -> cycle.Admission:
        if self._usage:
            self._table.past_use = self._usage.averages(list(self._tenants), now)
        jobs = self._table.jobs(now, rows)
        order = checked_order(self._queue, jobs, now)
        return cycle.Admission(jobs, order, self._queue, self._capacity, now, rules, self._tenancy)

    def queue_snapshot(self, now: float, rest_of: Callable[[str], RemainingTime]) -> QueueSnapshot:
        """Return the state from which a start forecast begins, with the waiting jobs in the queue's order.

        `rest_of` gives the remaining run time of a job. The snapshot shares the scheduler's ledger.
        """
        admission = self._ordered(now, None, self._rules)
        jobs = admission.jobs
        view = SimulatedClusterView(self._sim_jobs, self._occupancy, jobs, self._world.stop_cost_seconds, now)
        ranked = [self._sim_jobs[sequence] for sequence in jobs.sequence[admission.choice.ranked].tolist()]
        running = [(job_id, sim_job) for job_id, sim_job in self._by_id.items() if sim_job.running]
        return QueueSnapshot(
            self._ledger,
            [
                RunningEntry(job_id, one.holdings, rest_of(job_id), one.job.tenant, view.running_job(job_id))
                for job_id, one in running
            ],
            [WaitingEntry(one.gang(now), rest_of(one.job.id)) for one in ranked if not one.running],
            self._queue.strict,
            self._tenancy.headroom(jobs, jobs.running),
            self._rules.reserving,
            {self._sim_jobs[int(jobs.sequence[row])].job.id: before for row, before in admission.stoppable},
            now,
        )

    def _give_up(self, admission: cycle.Admission) -> bool:
        """Remove the jobs that the order gives up; returns whether there were any, for the order to be repeated."""
        self._gives_up = admission.order.given_up is not None
        now, sequences = admission.now, admission.jobs.sequence[admission.given_up].tolist()
        for sequence in sequences:
            sim_job = self._sim_jobs[sequence]
            if self._event_log:
                self._event_log.given_up(sim_job, given_up(self._queue.name), now)
            sim_job.give_up(now)
            self.given_up += 1
            self._waiting.remove(sim_job)
            self._leave(sim_job)
        return bool(sequences)

    def _place(self, admission: cycle.Admission) -> cycle.Plan:
        jobs, choice, now = admission.jobs, admission.choice, admission.now
        self._headroom = self._tenancy.headroom(jobs, jobs.running)
        self._asked_placeable = self._reserves and not (self._enforced or len(choice.victims))
        self._asked_all = self._asked_placeable or self._enforced or len(choice.victims) > 0
        if self._event_log:
            self._choice = CycleChoice.of(choice, jobs, self._table.ids)
        try:
            return cycle.place(
                self._gangs(jobs.sequence[choice.starts], now),
                self._ledger,
                self._placement,
                self.rng,
                victims=victims_of(self._sim_jobs, jobs, choice, self._world.stop_cost_seconds, now),
                strict=self._queue.strict,
                headroom=self._headroom,
                cluster_view=SimulatedClusterView(
                    self._sim_jobs, self._occupancy, jobs, self._world.stop_cost_seconds, now
                ),
                reserving=admission.rules.reserving,
            )
        except (Overcommitted, cycle.InvalidOffer) as error:
            why = f"it made an invalid offer: {error}"
            raise PolicyFailed("placement", self._placement, f"the cycle at {now:.3f} s", why) from error

    def _gangs(self, sequences: Ints, now: float) -> Iterator[Gang]:
        """Yield gangs in order, on demand, without those whose answer is known."""
        if self._asked_all and not self._asked_placeable:
            return (self._sim_jobs[sequence].gang(now) for sequence in sequences.tolist())
        some = CycleCandidates(self._sim_jobs, self._waiting, self._placement, self._free, self._headroom, now)
        if self._asked_placeable:
            return some.placeable_or_starving(sequences, self._rules.reserving)
        if self._queue.strict:
            return some.until_first_refusal(sequences)
        return some.placeable(sequences)

    def _start(self, start: cycle.Start, now: float) -> tuple[SimulatedJob, float]:
        sim_job = self._by_id[start.gang.job_id]
        self._waiting.remove(sim_job)
        sim_job.reclaimable = start.reclaimable
        service_scaling.scale(sim_job, start.gang, self._table)
        finish = self._run(sim_job, start.holdings, now)
        if self.resizing:
            self.resizing.started(sim_job, start, now)
        if self._event_log:
            self._event_log.started(sim_job, start, now)
        return sim_job, finish

    def _run(self, sim_job: SimulatedJob, holdings: tuple[Holding, ...], since: float) -> float:
        for holding in holdings:
            self._ledger.hold(holding)
        self._free.take(sim_job.job_class, not sim_job.reclaimable)
        self._table.start(sim_job.job.id, since, borrows=sim_job.reclaimable)
        if self._counts_worth:
            self._table.update(sim_job.job.id, gpu_worth=self._gpu_worth(sim_job, holdings))
        rate = self._world.started(sim_job, holdings)
        finish = sim_job.start(holdings, since, rate)
        self._occupancy.enter(sim_job)
        if self._usage:
            who = sim_job.job.tenant, sim_job.job.user
            self._usage.start(sim_job.job.id, *who, sim_job.job_class.needs, since=since, now=since)
        if rate is not FULL:
            self.update_total(sim_job, since)
        return finish

    def _gpu_worth(self, sim_job: SimulatedJob, holdings: Sequence[Holding]) -> float:
        """Return what a run's GPUs are worth to it; 1 if they are of several types."""
        types = {self._ledger.shapes[one.node].gpu_type for one in holdings if one.gpus or one.shares}
        wanted = [role.request.gpu_type for role in sim_job.job.roles if role.request.gpu_milli]
        if len(types) != 1:
            return 1.0
        return effective_gpus(sim_job.estimate, types.pop(), self._world.shapes, wanted[0] if wanted else "")

    def preempt(self, job_id: str, starts: Sequence[cycle.Start], now: float, kind: Kind) -> None:
        """Stop a job for others, which waits again; a migrated job starts again at this instant if it can."""
        sim_job = self._by_id[job_id]
        if self._event_log:
            self._event_log.preempted(sim_job, starts, now, kind)
        sim_job.stopped(kind is Kind.MIGRATED, kind is Kind.RECLAIMED)
        self._requeue(
            sim_job, now, self._world.preemption_seconds(sim_job), saved=self._world.settings.preemption_grace
        )

    def _requeue(self, sim_job: SimulatedJob, now: float, restart_seconds: float, *, saved: bool) -> None:
        self._release(sim_job, now)
        self._table.stop(sim_job.job.id, now)
        sim_job.stop(now, restart_seconds, saved=saved)
        self.update_total(sim_job, now)
        self._wait(sim_job, now)

    def _release(self, sim_job: SimulatedJob, now: float) -> None:
        if self.resizing and (cores := self.resizing.released(sim_job, now)):
            self._free.now += Resources(cores=cores)
            self._table.update(sim_job.job.id, cores=sim_job.job_class.cores)
        if self._usage:
            self._usage.stop(sim_job.job.id, until=now, now=now)
        self._world.released(sim_job)
        self._occupancy.leave(sim_job)
        for holding in sim_job.holdings:
            self._ledger.release(holding)
        self._free.take(sim_job.job_class, -(not sim_job.reclaimable))
        self._waiting.clear_refusals()

    def _moved(self, sim_job: SimulatedJob, cores: int, now: float) -> None:
        """Count cores that a running job was given or gave back."""
        self._occupancy.enter(sim_job)
        self._free.now -= Resources(cores=cores)
        held = sum(holding.cores for holding in sim_job.holdings)
        self._table.update(sim_job.job.id, cores=held)
        if self._usage:
            needs = sim_job.job_class.needs._replace(cores=held)
            self._usage.change(sim_job.job.id, needs, at=now, now=now)
        if cores < 0:
            self._waiting.clear_refusals()

    def _wait(self, sim_job: SimulatedJob, now: float) -> None:
        if again := sim_job.job_class.first:
            self._waiting.assign(sim_job, again)
            service_scaling.count(sim_job, self._table)
        sim_job.waiting_since, sim_job.fragmented_mark = now, sim_job.job_class.fragmented.read(now)
        self._labels.begin(sim_job, now)
        self._waiting.add(sim_job)
        if self._event_log:
            self._event_log.waits(sim_job)

    def resize_waiting(self, size: Callable[[SimulatedJob], JobClass | None], now: float) -> None:
        """Change the class of waiting jobs that would now be sized differently; None leaves a job as it is."""
        for sim_job in self._waiting.resize_waiting(self._sim_jobs.values(), size, now):
            service_scaling.count(sim_job, self._table)
            if sim_job.asked.elastic:
                self.update_total(sim_job, now)
            self._reclassified(sim_job, now)

    def _reclassified(self, sim_job: SimulatedJob, now: float) -> None:
        self._labels.follow(sim_job, now)
        if self._event_log:
            self._event_log.waits(sim_job, reclassified=True)

    def _note_shares(self, admission: cycle.Admission) -> None:
        """Note which waiting jobs are beyond their tenants' shares, if shares are known."""
        jobs, beyond = admission.jobs, admission.beyond_share
        if beyond is not None:
            self._shares, self._alike = True, False
        self._over_share = frozenset(() if beyond is None else jobs.sequence[beyond & ~jobs.running].tolist())

    def _label(self, refusals: Mapping[str, Refusal], now: float) -> None:
        """Set what each waiting job waits for from now on."""
        self._labels.switch(self._waiting.job_classes, self._waiting.refusals.uniform, self._free, now)
        apart: dict[int, tuple[SimulatedJob, Cause]] = {}
        if self._asked_all or not self._by_job_class:
            for sim_job, refusal in ((self._by_id[job_id], refusal) for job_id, refusal in refusals.items()):
                if self._by_job_class or refusal.wait is not Wait.CAPACITY:
                    apart[sim_job.sequence] = sim_job, cause_of(refusal)
        for sequence in sorted(self._over_share):
            apart[sequence] = self._sim_jobs[sequence], CAUSE_OF[Wait.FAIR_SHARE]
        self._labels.set_individual(apart, now)


def _replicas(sim_job: SimulatedJob) -> int:
    """Return the present number of replicas of an elastic job's elastic role."""
    number, _ = elastic_of(sim_job)
    return sim_job.job_class.parts[number].replicas
