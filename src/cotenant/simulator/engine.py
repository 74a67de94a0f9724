"""The simulator's engine: a virtual clock and the events that move it.

Time jumps from event to event: a submission, a finish, or the end of an order's validity. What happens at one instant
happens together: jobs finish, jobs come, then one cycle decides. Decisions take no time, and a stopped job has
stopped at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from cotenant.core.model.job import JobKind
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.tenancy import NO_TENANTS, Tenancy
from cotenant.core.scheduling.admission import RULES, Rules
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.eligibility import Admission
from cotenant.simulator.job import Life, Shape
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import Arm
from cotenant.simulator.recording.events import Kind, Recorder, Story
from cotenant.simulator.resizing import Figures
from cotenant.simulator.scheduler import Scheduler
from cotenant.simulator.snapshots import Present
from cotenant.simulator.traces import Trace, TraceJob
from cotenant.simulator.traces.trace_job import Ended


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
        self.lives: list[Life] = []  # of the jobs submitted so far, but for those that can never run
        self.unschedulable: list[tuple[TraceJob, Refusal]] = []
        self.world = world or World(cluster, seed=seed)
        self._arm = arm
        self._admission = Admission(cluster, policies, seed, tenancy)
        self._story = Story(recorder) if recorder else None
        self._scheduler = Scheduler(
            cluster,
            policies,
            arm,
            jobs=len(trace),
            seed=seed,
            world=self.world,
            rules=rules,
            tenancy=tenancy,
            story=self._story,
        )
        self._resizing = self._scheduler.resizing
        self._idle = False  # nothing runs, and nobody comes
        self._undrawn = self._scheduler.rng.bit_generator.state
        self.world.eliminating.wanted = any(job.kind is JobKind.CPU for job in trace.jobs)
        self._finishes: list[tuple[float, int, int]] = []  # when, whose, and as it was foretold at which time
        self._retries: list[tuple[float, int]] = []  # when, and whose
        if trace.present:
            self._resume(trace.present)

    @property
    def by_chance(self) -> bool:
        """Whether anything was drawn at random so far: then another seed may give other figures."""
        noisy = self._resizing is not None and self.world.settings.rate_noise > 0
        return self._arm.by_chance or self.world.by_chance or self._admission.drew or self._drew or noisy

    @property
    def sized(self) -> Figures | None:
        """What came of changing the cores of running jobs; None where nobody does."""
        return self._resizing.counted(self.now) if self._resizing else None

    @property
    def _drew(self) -> bool:
        """Whether a policy drew anything at random while it decided."""
        return self._scheduler.rng.bit_generator.state != self._undrawn

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
        if not self.world.quiet:
            self._break_due()
        self._retry_due()
        for life in self._arrivals():
            self._scheduler.submit(life, self.now)
        if self._resizing:
            self._resizing.measure(now)
            if self._resizing.news():
                self._scheduler.size_anew(self._sized_anew, now)
        for life, finish in self._scheduler.decide(now):
            self._expect(life, finish)
        if self._resizing:
            for life, finish in self._resizing.settle(now):
                self._expect(life, finish)
        if not self.world.quiet:
            self._disturb(now)
        return True

    def _sized_anew(self, life: Life) -> Shape | None:
        """Size one that waits by what is remembered of its kind by now; None where that changes nothing."""
        estimate = self._resizing.informed_anew(life) if self._resizing else life.estimate
        if estimate.cores_useful == life.estimate.cores_useful:
            return None
        life.estimate = estimate
        shape = self._admission.shape(life.job, estimate)
        return None if isinstance(shape, Refusal) or shape is (life.shape.first or life.shape) else shape

    def _resume(self, present: Present) -> None:
        """Set in where a snapshot was taken: those who ran run on, the others wait, and it is time to decide."""
        self.now = present.now_seconds
        for life in self._arrivals():
            life.attained_seconds = present.attained.get(life.job.id, 0.0)
            life.rest_seconds -= life.attained_seconds
            if run := present.runs.get(life.job.id):
                life.attained_seconds = run.attained_seconds
                life.rest_seconds -= run.attained_seconds
                self._expect(life, self._scheduler.adopt(life, run.holdings, run.since_seconds, self.now))
            else:
                self._scheduler.submit(life, self.now)
        for node in present.closed:
            self._scheduler.cordon(node)
        self._scheduler.order_expires = self.now

    def _disturb(self, now: float) -> None:
        """Let neighbours that came and went, and the contention policy, change how fast jobs run."""
        for life in self.world.eliminating.judge(now):
            self._scheduler.preempt(life.job.id, (), now, Kind.MIGRATED)
            self._scheduler.order_expires = now
        for life, rate in self.world.changed():
            self._expect(life, life.retime(now, rate))
            self._arm.takes(life.sequence, life.total_seconds(now))
            if self._resizing:
                self._resizing.rate_changed(life, now)
            if self._story:
                self._story.rate_changed(life, now)

    def _expect(self, life: Life, finish: float) -> None:
        heapq.heappush(self._finishes, (finish, life.sequence, life.timing))

    def _next_seconds(self) -> float:
        while self._finishes and self._outdated(self._finishes[0]):
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
        if self._idle and self.finished + self._scheduler.given_up == len(self.lives):
            return expiring
        if self.world.quiet:
            return min(coming, finishing, retrying, expiring)
        judging = self.world.eliminating.next_seconds(self.now, idle=self._idle)
        breaking = self.world.outages.next_seconds(idle=self._idle)
        return min(coming, finishing, retrying, expiring, judging, breaking)

    def _outdated(self, finish: tuple[float, int, int]) -> bool:
        """Tell whether a finish is that of a run that was stopped, or that was foretold anew."""
        life = self.lives[finish[1]]
        return life.timing != finish[2] or not life.running

    def _finish_due(self) -> None:
        while self._finishes and self._finishes[0][0] <= self.now:
            finish = heapq.heappop(self._finishes)
            if not self._outdated(finish):
                self._end(self.lives[finish[1]])

    def _end(self, life: Life) -> None:
        """Let a run end: the job is done, or it fails and may be tried again."""
        self.events += 1
        if life.fate.ended is Ended.FAILED:
            life.failures += 1
        if life.fails_at <= self.now and (retry := self.world.retry(life)).again:
            self._scheduler.fail(life, retry.wait_seconds, self.now)
            life.trial_left_seconds = life.fate.trials_seconds[life.failures]
            heapq.heappush(self._retries, (self.now + retry.wait_seconds, life.sequence))
            return
        self._scheduler.finish(life, self.now)
        self._arm.finished(life.job, life.attained_seconds, self.now, passed=life.fate.ended is Ended.PASSED)
        self.finished += 1

    def _break_due(self) -> None:
        """Let nodes fail and come back."""
        for node, back in self.world.outages.due(self.now, idle=self._idle):
            self.events += 1
            if self._story:
                self._story.node(node, self.now, back=back)
            if back:
                self._scheduler.reopen(node)
            else:
                self._scheduler.close(node, self.now)

    def _retry_due(self) -> None:
        while self._retries and self._retries[0][0] <= self.now:
            _, sequence = heapq.heappop(self._retries)
            self._scheduler.retry(self.lives[sequence], self.now)
            self.events += 1

    def _arrivals(self) -> Iterator[Life]:
        """Give the jobs that are submitted now, or were before; those that can never run are set aside."""
        jobs = self.trace.jobs
        while self.submitted < len(jobs) and jobs[self.submitted].submitted_seconds <= self.now:
            job = jobs[self.submitted]
            self.submitted += 1
            self.events += 1
            sequence = len(self.lives)
            estimate = self._arm.submitted(sequence, job)
            if self._resizing:
                estimate = self._resizing.informed(sequence, job, estimate)
            shape = self._admission.shape(job, estimate)
            if isinstance(shape, Refusal):
                self.unschedulable.append((job, shape))
                if self._story:
                    self._story.unschedulable(job, shape, self.now)
                continue
            fate = self.world.fate(job, self.submitted - 1)
            life = Life(job, sequence, shape, job.work_seconds * fate.work_share, fate, estimate)
            self.world.born(life)
            self.lives.append(life)
            yield life
