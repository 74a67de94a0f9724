"""Why each waiting job waits, for the event log: from the cycle's refusals, and otherwise by counting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.job_table import Ints, Jobs
from cotenant.core.model.refusal import Code, Refusal, behind, outranked
from cotenant.core.placement.unschedulable import no_place
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.scheduling.admission import Choice
from cotenant.core.scheduling.equivalence import ClassRefusals
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.simulator.free_resources import FreeResources
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.recording.events import EventLog, Reason, capacity_reason, reason_of


@dataclass(frozen=True, slots=True)
class CycleChoice:
    """The choice of a cycle, by the sequences of the jobs, because the table's rows change."""

    ranked: Ints
    starts: Ints
    outrankers: Outrankers | None
    ids: tuple[str, ...]  # by row, as the outrankers name them

    @classmethod
    def of(cls, choice: Choice, jobs: Jobs, ids: Sequence[str]) -> CycleChoice:
        """Return the record of a choice among jobs."""
        return cls(jobs.sequence[choice.ranked], jobs.sequence[choice.starts], choice.outrankers, tuple(ids))

    def outranked(self, sequence: int) -> Refusal:
        """Return the refusal of a waiting job by those ranked before it, now or in earlier cycles."""
        at = int(np.flatnonzero(self.ranked == sequence)[0])
        return self.outrankers.refusal_at(at, self.ids) if self.outrankers else outranked(at + 1, at)


@dataclass(frozen=True, slots=True)
class WaitReasonRecorder:
    """Records in the event log why jobs wait after a cycle.

    `refusals` are those of classes, by code; `over_share` are jobs whose tenant has its fair share.
    """

    event_log: EventLog
    sim_jobs: Mapping[int, SimulatedJob]
    ledger: Ledger
    free: FreeResources
    refusals: ClassRefusals[int]
    over_share: Collection[int]

    def by_job_class(self, waiting: Iterable[JobClass], now: float) -> None:
        """Record that all gangs of one class wait for one reason."""
        self.event_log.record_class_reasons(waiting, self._class_reason, now)

    def by_job(self, refusals: Mapping[str, Refusal], now: float) -> None:
        """Record each job's own reason; gangs that were tried have theirs in `refusals`."""
        known: dict[tuple[int, bool], Reason] = {}  # of all other jobs of a class, within or beyond their share

        def why(sim_job: SimulatedJob) -> Reason:
            if asked := refusals.get(sim_job.job.id):
                return self._with_share(sim_job, reason_of(asked))
            alike = sim_job.job_class.code, sim_job.sequence in self.over_share
            if alike not in known:
                known[alike] = self._with_share(sim_job, self._class_reason(sim_job.job_class))
            return known[alike]

        self.event_log.record_job_reasons(
            [sim_job for sim_job in self.sim_jobs.values() if sim_job.meter], why, Code.CAPACITY, now
        )

    def in_order(
        self, queue: QueuePolicy, refusals: Mapping[str, Refusal], choice: CycleChoice | None, now: float
    ) -> None:
        """Record that most jobs wait because of jobs before them; `choice` is what the cycle chose, if anything."""
        most = Code.OUTRANKED if queue.preemptive else Code.BEHIND
        if choice is None:  # nothing was decided, since too little is free for any waiting job
            self.event_log.record_job_reasons((), lambda sim_job: self._capacity_reason(sim_job.job_class), most, now)
            return
        head = next(
            (sim_job for sim_job in map(self.sim_jobs.__getitem__, choice.starts.tolist()) if sim_job.meter), None
        )
        asked = {
            sim_job.sequence: self._with_share(sim_job, reason_of(refusals[sim_job.job.id]))
            for sim_job in self.sim_jobs.values()
            if sim_job.job.id in refusals
        }
        if queue.strict and head:
            asked.setdefault(head.sequence, self._with_share(head, self._class_reason(head.job_class)))

        def why(sim_job: SimulatedJob) -> Reason:
            if sim_job.sequence in asked:
                return asked[sim_job.sequence]
            if most is Code.BEHIND and head:
                told = Reason((Code.BEHIND,), lambda: behind(head.job.id, asked[head.sequence].words().detail))
            else:
                told = Reason((Code.OUTRANKED,), lambda: choice.outranked(sim_job.sequence))
            return self._with_share(sim_job, told)

        beyond = [sequence for sequence in sorted(self.over_share) if sequence not in asked]
        self.event_log.record_job_reasons([self.sim_jobs[sequence] for sequence in (*asked, *beyond)], why, most, now)

    def _with_share(self, sim_job: SimulatedJob, reason: Reason) -> Reason:
        return reason.over_fair_share() if sim_job.sequence in self.over_share else reason

    def _class_reason(self, job_class: JobClass) -> Reason:
        """Return why a gang of this class has no place, by its refusal or by counting."""
        refusal = self.refusals.uniform.get(job_class.code)
        if refusal and (refusal.code is Code.QUOTA or not self.free.lacks(job_class)):
            return reason_of(refusal)
        return self._capacity_reason(job_class)

    def _capacity_reason(self, job_class: JobClass) -> Reason:
        return capacity_reason(self.free.lacking(job_class), lambda: no_place(job_class.gang("the gang"), self.ledger))
