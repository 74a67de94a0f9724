"""What each waiting job waits for: meters of classes and of causes, and which jobs are on which meter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.core.model.refusal import Refusal, Wait
from cotenant.simulator.free_resources import FreeResources
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.wait_times import CAUSE_OF, CAUSES, Cause, Meter, cause_of


class WaitLabels:
    """Keeps waiting jobs on meters.

    `by_job_class`: most gangs of a class wait for the same reason, which their class's meter records. Otherwise most
    jobs wait for capacity.
    """

    def __init__(self, *, by_job_class: bool) -> None:
        self._by_job_class = by_job_class
        self._meters = {cause: Meter(cause=cause) for cause in CAUSES}
        self._individual: dict[int, SimulatedJob] = {}  # jobs on an individual meter, by sequence

    def begin(self, sim_job: SimulatedJob, now: float) -> None:
        """Put a job that begins to wait on the default meter."""
        sim_job.begin_to_wait(self._default_meter(sim_job), now)

    def begin_individually(self, sim_job: SimulatedJob, wait: Wait, now: float) -> None:
        """Put a job that is out of the queue for a while on the meter of its own cause."""
        sim_job.begin_to_wait(self._meters[CAUSE_OF[wait]], now)

    def _default_meter(self, sim_job: SimulatedJob) -> Meter:
        return sim_job.job_class.meter if self._by_job_class else self._meters[CAUSE_OF[Wait.CAPACITY]]

    def follow(self, sim_job: SimulatedJob, now: float) -> None:
        """Move a waiting job that has changed its class to the default meter, unless it has an individual one."""
        if sim_job.sequence not in self._individual:
            sim_job.move(self._default_meter(sim_job), now)

    def switch(
        self, job_classes: Iterable[JobClass], refusals: Mapping[int, Refusal], free: FreeResources, now: float
    ) -> None:
        """Set what the gangs of each waiting class wait for from now on, by refusals of classes and what is free."""
        if self._by_job_class:
            for job_class in job_classes:
                refusal = None if free.lacks(job_class) else refusals.get(job_class.code)
                job_class.meter.switch(cause_of(refusal) if refusal else CAUSE_OF[Wait.CAPACITY], now)

    def set_individual(self, waits: Mapping[int, tuple[SimulatedJob, Cause]], now: float) -> None:
        """Set the jobs with individual causes from now on; all others return to the default meter."""
        for sequence, sim_job in self._individual.items():
            if sequence not in waits:
                sim_job.move(self._default_meter(sim_job), now)
        for sim_job, cause in waits.values():
            sim_job.move(self._meters[cause], now)
        self._individual = {sequence: sim_job for sequence, (sim_job, _) in waits.items()}
