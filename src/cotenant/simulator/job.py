"""A job's state in the simulator, and the state of each class of equivalent jobs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import JobSpec, Locality
from cotenant.core.model.job_table import JobRow
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.resources import Resources
from cotenant.simulator.physics.failures import PASSES, Fate
from cotenant.simulator.physics.rates import FULL, Rate
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.wait_times import NONE, Meter, Seconds, Stopwatch


@dataclass(slots=True)
class JobClass:
    """An equivalence class of gangs: resources that one of them can get, all of them can.

    A tenant with limits has classes of its own. `code` numbers the classes. `impossible` is why none of them could run
    even on the empty cluster.

    If the placement policy distinguishes gangs by how long their places have been fragmented while they waited, which
    `fragmented` measures for the class, waiting jobs are in this class from `since_seconds` on, and in the `later` one
    from `until_seconds` on; they begin in the `first`. `line` holds the waiting jobs, the longest wait first.
    """

    parts: tuple[Part, ...]
    locality: Locality | None
    sizing: str
    needs: Resources
    replicas: int
    constraints: tuple[Hashable, ...] = ()
    tenant: str = ""  # whose limits apply to its gangs; "" if there are none
    code: int = -1
    meter: Meter = field(default_factory=Meter)
    waiting: int = 0
    impossible: Refusal | None = None
    fragmented: Stopwatch = field(default_factory=Stopwatch)
    since_seconds: float = 0.0
    until_seconds: float = math.inf
    first: JobClass | None = None
    later: JobClass | None = None
    line: dict[int, SimulatedJob] = field(default_factory=dict)

    @property
    def gpu_milli(self) -> int:
        """GPUs that a gang needs, in thousandths."""
        return self.needs.gpu_milli

    @property
    def cores(self) -> int:
        """Cores that a gang needs."""
        return self.needs.cores

    def gang(self, job_id: str) -> Gang:
        """Return a gang of this class with the shortest wait of the class."""
        since = self.since_seconds
        return Gang(
            job_id,
            self.parts,
            self.locality,
            self.sizing,
            self.tenant,
            fragmented_seconds=since,
            constraints=self.constraints,
        )

    def changes_class_in(self, now: float) -> float:
        """Return the time until the first waiting job changes its class, if nothing else happens."""
        if not self.line or not self.fragmented.runs:
            return math.inf
        return self.until_seconds - next(iter(self.line.values())).fragmented_until(now)

    def later_class(self, equivalence_seconds: float, now: float) -> JobClass:
        """Return the class that gangs of this class change to later, for this long."""
        return replace(
            self,
            code=-1,
            meter=Meter(now),
            waiting=0,
            fragmented=Stopwatch(),
            since_seconds=self.until_seconds,
            until_seconds=self.until_seconds + equivalence_seconds,
            first=self.first or self,
            later=None,
            line={},
        )


def job_class_of(gang: Gang, tenant: str = "") -> JobClass:
    """Return the class of gangs like this one; tenants with limits have their own."""
    return JobClass(
        parts=gang.parts,
        locality=gang.locality,
        sizing=gang.sizing,
        needs=gang.needs,
        replicas=sum(part.replicas for part in gang.parts),
        constraints=gang.constraints,
        tenant=tenant,
    )


@dataclass(slots=True)
class SimulatedJob:
    """A job from its submission on. Times are simulated seconds; NaN means not yet.

    `rest_seconds` is the remaining work at `settled_seconds`, `restart_seconds` what the present run then still has to
    repeat before it makes progress; work is in seconds at rate 1. `attained_seconds` is the run time of all earlier
    runs, including repeated work. `rate` is work done per second, `pace` that relative to an undisturbed run on the
    same GPUs, `usage` the GPU utilization at pace 1, and `busy_seconds` GPU utilization × time so far. Work after the
    last save is lost in a crash; `saved_rest_seconds` is the remaining work at that save, and `lost_seconds` the sum of
    lost work. `trial_left_seconds` is the run time until the job fails.
    """

    job: TraceJob
    sequence: int
    job_class: JobClass
    rest_seconds: float
    fate: Fate = PASSES
    estimate: Estimate = UNKNOWN
    waiting_since: float = math.nan
    fragmented_mark: float = 0.0  # what its class's watch would have shown when it began to wait
    restart_seconds: float = 0.0
    attained_seconds: float = 0.0
    running_since: float = math.nan
    finished_seconds: float = math.nan
    given_up_seconds: float = math.nan
    runs: int = 0
    preemptions: int = 0
    migrations: int = 0
    reclaims: int = 0
    reclaimable: bool = False  # its resources were lent to it
    crashes: int = 0
    failures: int = 0
    holdings: tuple[Holding, ...] = ()
    servers: int = 0  # that it runs on, or last ran on
    waited: Seconds = NONE
    meter: Meter | None = None
    mark: Seconds = NONE
    rate: float = 1.0
    pace: float = 1.0
    usage: float = 1.0
    busy_seconds: float = 0.0
    settled_seconds: float = math.nan
    working_since: float = math.nan
    checkpoint_seconds: float = math.inf
    saved_rest_seconds: float = math.inf
    lost_seconds: float = 0.0
    trial_left_seconds: float = math.inf
    fails_at: float = math.inf
    timing: int = 0  # counts the predictions of its end
    speed: float = 1.0  # of an elastic job with the replicas of its class, relative to the requested number
    resizes: int = 0
    held_milli_seconds: float = 0.0  # GPUs × time of earlier runs of an elastic job
    busy_milli_seconds: float = 0.0  # the same, times their utilization
    asked: JobSpec = field(init=False)  # as submitted; cached, since every cycle needs it

    def __post_init__(self) -> None:
        self.asked = self.job.spec()

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return not math.isnan(self.running_since)

    @property
    def finished(self) -> bool:
        """Whether it has finished."""
        return not math.isnan(self.finished_seconds)

    @property
    def failure(self) -> str:
        """The class of its failures, if known."""
        return self.fate.failure.name if self.fate.failure else ""

    @property
    def given_up(self) -> bool:
        """Whether the queue policy gave it up."""
        return not math.isnan(self.given_up_seconds)

    @property
    def over(self) -> bool:
        """Whether it has finished or was given up."""
        return self.finished or self.given_up

    def gang(self, now: float, running: Estimate | None = None) -> Gang:
        """Return its gang, waiting; or running with the present estimate `running`."""
        job_class = self.job_class
        return Gang(
            self.job.id,
            job_class.parts,
            job_class.locality,
            job_class.sizing,
            job_class.tenant,
            kind=self.job.kind,
            waited_seconds=now - self.waiting_since if running is None else 0.0,
            fragmented_seconds=self.fragmented_until(now),
            spec=self.spec(),
            estimate=self.estimate if running is None else running,
            constraints=job_class.constraints,
        )

    def spec(self) -> JobSpec:
        """Return the job as submitted, with its present number of replicas if that is variable."""
        if self.asked.elastic:
            return self.asked.with_counts(part.replicas for part in self.job_class.parts)
        return self.asked.with_replicas(self.job_class.replicas) if self.asked.open else self.asked

    def fragmented_until(self, now: float) -> float:
        """Return how long its places have been fragmented since it last began to wait."""
        return max(self.job_class.since_seconds, self.job_class.fragmented.read(now) - self.fragmented_mark)

    def begin_to_wait(self, meter: Meter, now: float) -> None:
        """Start waiting on a meter."""
        self.meter, self.mark = meter, meter.read(now)

    def end_wait(self, now: float) -> None:
        """Stop waiting, and add up what the meter counted."""
        self.waited = self.waited_until(now)
        self.meter = None

    def waited_until(self, now: float) -> Seconds:
        """Return all waits including the present one."""
        if self.meter is None:
            return self.waited
        read, mark, waited = self.meter.read(now), self.mark, self.waited
        return (
            waited[0] + read[0] - mark[0],
            waited[1] + read[1] - mark[1],
            waited[2] + read[2] - mark[2],
            waited[3] + read[3] - mark[3],
            waited[4] + read[4] - mark[4],
            waited[5] + read[5] - mark[5],
        )

    def move(self, meter: Meter, now: float) -> None:
        """Move to another meter, if it waits."""
        if self.meter is not None and self.meter is not meter:
            self.end_wait(now)
            self.begin_to_wait(meter, now)

    def start(self, holdings: tuple[Holding, ...], now: float, rate: Rate = FULL) -> float:
        """Start running; returns when the job will finish or fail if nothing changes."""
        self.end_wait(now)
        self.holdings, self.running_since, self.settled_seconds = holdings, now, now
        self.working_since = now + self.restart_seconds
        self.fails_at = now + self.trial_left_seconds
        self.saved_rest_seconds = self.rest_seconds
        self.rate, self.pace = rate
        self.runs += 1
        self.servers = len({holding.node for holding in holdings})
        return self._ends()

    def retime(self, now: float, rate: Rate) -> float:
        """Continue at another rate; returns when the job will now finish or fail."""
        self._settle(now)
        self.rate, self.pace = rate
        return self._ends()

    def _ends(self) -> float:
        self.timing += 1
        if not self.rate:
            return self.fails_at  # suspended
        return min(self.settled_seconds + self.restart_seconds + self.rest_seconds / self.rate, self.fails_at)

    def total_seconds(self, now: float) -> float:
        """Return the total run time of the job at its present rate, if it is never killed and never fails."""
        ran = now - self.running_since if self.running else 0.0
        beyond = self.job.work_seconds * (1 - self.fate.work_share)
        rate = self.rate if self.running else self.speed
        rest = (self.rest_seconds + beyond) / rate if rate else math.inf
        return self.attained_seconds + ran + self.restart_seconds + rest

    def busy_until(self, now: float) -> float:
        """Return GPU utilization × time including the present run."""
        return self.busy_seconds + (self._worked(now) * self.busy if self.running else 0.0)

    def milli_seconds_until(self, now: float) -> tuple[float, float]:
        """Return the GPU time of an elastic job including the present run, in thousandths: held, and used."""
        if not self.running:
            return self.held_milli_seconds, self.busy_milli_seconds
        milli = self.job_class.gpu_milli
        held = self.held_milli_seconds + (now - self.settled_seconds) * milli
        return held, self.busy_milli_seconds + self._worked(now) * self.busy * milli

    def stopped(self, migrates: bool, reclaimed: bool) -> None:
        """Count a stop for another job."""
        self.migrations += migrates
        self.reclaims += reclaimed
        self.preemptions += not (migrates or reclaimed)

    def stop(self, now: float, restart_seconds: float, *, saved: bool = True) -> None:
        """Stop before the end; the next run first repeats `restart_seconds`, and unsaved work."""
        ran = now - self.running_since
        self._settle(now)
        if not saved:
            self.lost_seconds += self.saved_rest_seconds - self.rest_seconds
            self.rest_seconds = self.saved_rest_seconds
        self.restart_seconds = restart_seconds
        self.trial_left_seconds -= ran
        self._hold_nothing(ran)

    def finish(self, now: float) -> None:
        """Finish."""
        ran = now - self.running_since
        self._settle(now)
        self.rest_seconds = 0.0
        self.finished_seconds = now
        self._hold_nothing(ran)

    def give_up(self, now: float) -> None:
        """Stop waiting without having finished."""
        self.end_wait(now)
        self.given_up_seconds = now

    @property
    def busy(self) -> float:
        """GPU utilization while it works, from 0 to 1."""
        return min(1.0, self.usage * self.pace)

    def _worked(self, now: float) -> float:
        """Return for how long it has worked since that was last counted."""
        return max(0.0, now - self.settled_seconds - self.restart_seconds)

    def resize(self, now: float, restart_seconds: float) -> float:
        """End a generation, for the next one to start at this instant; returns the seconds that the restart adds.

        What an earlier restart still lacks is part of the new one. Work is saved.
        """
        ran = now - self.running_since
        self._settle(now)
        more = max(0.0, restart_seconds - self.restart_seconds) if ran else 0.0
        self.restart_seconds += more
        self.trial_left_seconds -= ran
        self.resizes += 1
        self._hold_nothing(ran)
        return more

    def _settle(self, now: float) -> None:
        """Count the work done at the present rate, and how much of it was saved."""
        worked = self._worked(now)
        if self.asked.elastic:
            self.held_milli_seconds += (now - self.settled_seconds) * self.job_class.gpu_milli
            self.busy_milli_seconds += worked * self.busy * self.job_class.gpu_milli
        if worked and self.checkpoint_seconds < math.inf:
            saves = math.floor((now - self.working_since) / self.checkpoint_seconds)
            unsaved = now - (self.working_since + saves * self.checkpoint_seconds)
            if unsaved < worked:
                self.saved_rest_seconds = self.rest_seconds - (worked - unsaved) * self.rate
        self.rest_seconds -= worked * self.rate
        self.busy_seconds += worked * self.busy
        self.restart_seconds = max(0.0, self.restart_seconds - (now - self.settled_seconds))
        self.settled_seconds = now

    def _hold_nothing(self, ran: float) -> None:
        self.attained_seconds += ran
        self.running_since, self.holdings, self.rate, self.pace = math.nan, (), 1.0, 1.0
        self.reclaimable = False


def row_of(sim_job: SimulatedJob, tenant: int, tenant_weight: float) -> JobRow:
    """Return a job's row in the table, with its tenant's number."""
    job, job_class = sim_job.job, sim_job.job_class
    return JobRow(
        job.id,
        arrival_seconds=job.submitted_seconds,
        sequence=sim_job.sequence,
        **job_class.needs._asdict(),
        replicas=job_class.replicas,
        priority=job.priority,
        tenant=tenant,
        tenant_weight=tenant_weight,
        deadline_seconds=math.inf if job.deadline_seconds is None else job.deadline_seconds,
        preemptible=job.preemptible,
    )
