"""The simulator's engine: a virtual clock and the events that move it.

Time jumps from event to event: a submission, a finish, or the end of an order's validity. What happens at one instant
happens together: jobs finish, jobs come, then one cycle decides. Decisions take no time, and a stopped job has
stopped at once.
"""

from __future__ import annotations

import heapq
import math

from cotenant.core.refusals import Refusal
from cotenant.simulator.admission import Admission
from cotenant.simulator.arms import Arm
from cotenant.simulator.clusters import Cluster
from cotenant.simulator.lives import Life
from cotenant.simulator.policies import Policies
from cotenant.simulator.recording import Recorder, Story
from cotenant.simulator.scheduler import Scheduler
from cotenant.simulator.traces import Trace, TraceJob


class Simulation:
    """A trace under way on a cluster. `now` is in seconds from the trace's first submission."""

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        policies: Policies,
        arm: Arm,
        *,
        seed: int = 0,
        preemption_cost_seconds: float = 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        self.trace, self.cluster = trace, cluster
        self.now = 0.0
        self.steps = 0
        self.events = 0
        self.finished = 0
        self.submitted = 0
        self.lives: list[Life] = []  # of the jobs submitted so far, but for those that can never run
        self.unschedulable: list[tuple[TraceJob, Refusal]] = []
        self._arm = arm
        self._admission = Admission(cluster, policies, seed)
        self._story = Story(recorder) if recorder else None
        self._scheduler = Scheduler(
            cluster,
            policies,
            arm,
            jobs=len(trace),
            seed=seed,
            preemption_cost_seconds=preemption_cost_seconds,
            story=self._story,
        )
        self._finishes: list[tuple[float, int, int]] = []  # when, whose, and of which of its runs

    def step(self) -> bool:
        """Go to the next instant at which something happens and let it happen; False where nothing ever will.

        Raises:
            PolicyFailed: a policy raised an error, or answered nonsense.
        """
        now = self._next_seconds()
        if now == math.inf:
            return False
        self.now = now
        self.steps += 1
        self.events += now >= self._scheduler.order_expires
        self._finish_due()
        self._submit_due()
        for life, finish in self._scheduler.decide(now):
            heapq.heappush(self._finishes, (finish, life.sequence, life.runs))
        return True

    def _next_seconds(self) -> float:
        while self._finishes and self._outdated(self._finishes[0]):
            heapq.heappop(self._finishes)
        jobs = self.trace.jobs
        coming = jobs[self.submitted].submitted_seconds if self.submitted < len(jobs) else math.inf
        finishing = self._finishes[0][0] if self._finishes else math.inf
        return min(coming, finishing, self._scheduler.order_expires)

    def _outdated(self, finish: tuple[float, int, int]) -> bool:
        """Tell whether a finish is that of a run that was stopped."""
        life = self.lives[finish[1]]
        return life.runs != finish[2] or not life.running

    def _finish_due(self) -> None:
        while self._finishes and self._finishes[0][0] <= self.now:
            finish = heapq.heappop(self._finishes)
            if not self._outdated(finish):
                life = self.lives[finish[1]]
                self._scheduler.finish(life, self.now)
                self._arm.finished(life.job, life.attained_seconds)
                self.finished += 1
                self.events += 1

    def _submit_due(self) -> None:
        jobs = self.trace.jobs
        while self.submitted < len(jobs) and jobs[self.submitted].submitted_seconds <= self.now:
            job = jobs[self.submitted]
            self.submitted += 1
            self.events += 1
            sequence = len(self.lives)
            shape = self._admission.shape(job, self._arm.submitted(sequence, job))
            if isinstance(shape, Refusal):
                self.unschedulable.append((job, shape))
                if self._story:
                    self._story.unschedulable(job, shape, self.now)
                continue
            life = Life(job, sequence, shape, rest_seconds=job.work_seconds)
            self.lives.append(life)
            self._scheduler.submit(life, self.now)
