"""What the simulator keeps of each job, and of each shape of gang."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import JobSpec, Locality
from cotenant.core.model.job_table import JobRow
from cotenant.core.model.refusal import Refusal
from cotenant.simulator.physics.failures import PASSES, Fate
from cotenant.simulator.physics.rates import FULL, Rate
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.wait_times import NONE, Meter, Seconds, Stopwatch


@dataclass(slots=True)
class Shape:
    """All gangs that look alike: what one of them can get, all of them can.

    A tenant with limits has shapes of its own. `code` numbers the shapes. `refusal` is why the last of them that asked
    was refused; it holds until something is freed. `impossible` is why none of them could run even on the empty
    cluster.

    Where the placement policy discerns gangs by how long their places have been in fragments while they waited, which
    `fragmented` tells of the shape, those that wait are of this shape from `since_seconds` on, and of the `later` one
    from `until_seconds` on; they begin as one of the `first`. `line` are those that wait, the longest first.
    """

    parts: tuple[Part, ...]
    locality: Locality | None
    sizing: str
    gpu_milli: int
    cores: int
    memory_bytes: int
    replicas: int
    tenant: str = ""  # whose limits its gangs count against; "" where they all have none
    code: int = -1
    meter: Meter = field(default_factory=Meter)
    waiting: int = 0
    refusal: Refusal | None = None
    impossible: Refusal | None = None
    fragmented: Stopwatch = field(default_factory=Stopwatch)
    since_seconds: float = 0.0
    until_seconds: float = math.inf
    first: Shape | None = None
    later: Shape | None = None
    line: dict[int, Life] = field(default_factory=dict)

    def gang(self, job_id: str) -> Gang:
        """Make a gang of this shape, which has waited no longer than any of it."""
        since = self.since_seconds
        return Gang(job_id, self.parts, self.locality, self.sizing, self.tenant, fragmented_seconds=since)

    def relaxes_in(self, now: float) -> float:
        """In how long the first of those who wait will be of another shape, if nothing else happens."""
        if not self.line or not self.fragmented.runs:
            return math.inf
        return self.until_seconds - next(iter(self.line.values())).fragmented_until(now)

    def after_it(self, alike_seconds: float, now: float) -> Shape:
        """Make the shape that gangs of this one have later, and for so long."""
        return replace(
            self,
            code=-1,
            meter=Meter(now),
            waiting=0,
            refusal=None,
            fragmented=Stopwatch(),
            since_seconds=self.until_seconds,
            until_seconds=self.until_seconds + alike_seconds,
            first=self.first or self,
            later=None,
            line={},
        )


def shape_of(gang: Gang, tenant: str = "") -> Shape:
    """Note what gangs like this one need; those of a tenant with limits stand apart."""
    return Shape(
        parts=gang.parts,
        locality=gang.locality,
        sizing=gang.sizing,
        gpu_milli=gang.gpu_milli,
        cores=gang.cores,
        memory_bytes=gang.memory_bytes,
        replicas=sum(part.replicas for part in gang.parts),
        tenant=tenant,
    )


@dataclass(slots=True)
class Life:
    """A job from its submission on. Times are simulated seconds; NaN is not yet.

    `rest_seconds` is the work left at `settled_seconds`, `restart_seconds` what the present run has still to repeat
    then, before it gets on with it; work is counted in seconds at rate 1. `attained_seconds` counts all run time of
    earlier runs, repeated work too. `rate` is work done per second, `pace` that relative to an undisturbed run on the
    same GPUs, `usage` the GPU utilisation at pace 1, and `busy_seconds` GPU utilisation × time so far.

    What came after the last save is lost in a crash; `saved_rest_seconds` is the work that was left then, and
    `lost_seconds` sums up lost work. `trial_left_seconds` is the run time until the job fails.
    """

    job: TraceJob
    sequence: int
    shape: Shape
    rest_seconds: float
    fate: Fate = PASSES
    estimate: Estimate = UNKNOWN
    waiting_since: float = math.nan
    fragmented_mark: float = 0.0  # what its shape's watch would have shown when it began to wait
    restart_seconds: float = 0.0
    attained_seconds: float = 0.0
    running_since: float = math.nan
    finished_seconds: float = math.nan
    given_up_seconds: float = math.nan
    runs: int = 0
    preemptions: int = 0
    migrations: int = 0
    reclaims: int = 0
    reclaimable: bool = False  # what it holds was lent to it
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
    timing: int = 0  # counts the times at which its end was foretold anew
    asked: JobSpec = field(init=False)  # as it was submitted: kept, for a cycle asks so often

    def __post_init__(self) -> None:
        self.asked = self.job.spec()

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return not math.isnan(self.running_since)

    @property
    def finished(self) -> bool:
        """Whether it is done."""
        return not math.isnan(self.finished_seconds)

    @property
    def failure(self) -> str:
        """The class of its failures, if that is known."""
        return self.fate.failure.name if self.fate.failure else ""

    @property
    def given_up(self) -> bool:
        """Whether it is not to run any more, though it is not done."""
        return not math.isnan(self.given_up_seconds)

    @property
    def over(self) -> bool:
        """Whether nothing more will become of it."""
        return self.finished or self.given_up

    def gang(self, now: float, running: Estimate | None = None) -> Gang:
        """Ask for a place as a gang of its shape; or tell of one that is `running`, by what is estimated of it now."""
        shape = self.shape
        return Gang(
            self.job.id,
            shape.parts,
            shape.locality,
            shape.sizing,
            shape.tenant,
            kind=self.job.kind,
            waited_seconds=now - self.waiting_since if running is None else 0.0,
            fragmented_seconds=self.fragmented_until(now),
            spec=self.spec(),
            estimate=self.estimate if running is None else running,
        )

    def spec(self) -> JobSpec:
        """The job as it was submitted, with as many replicas as it has now where their number is open."""
        return self.asked.with_replicas(self.shape.replicas) if self.asked.open else self.asked

    def fragmented_until(self, now: float) -> float:
        """Tell for how long its places have been in fragments, since it last began to wait."""
        return max(self.shape.since_seconds, self.shape.fragmented.read(now) - self.fragmented_mark)

    def begin_to_wait(self, meter: Meter, now: float) -> None:
        """Wait on a meter."""
        self.meter, self.mark = meter, meter.read(now)

    def end_wait(self, now: float) -> None:
        """Wait no longer, and keep what the meter counted."""
        self.waited = self.waited_until(now)
        self.meter = None

    def waited_until(self, now: float) -> Seconds:
        """Sum up all waits, the present one too."""
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
        """Wait on another meter, if it waits at all."""
        if self.meter is not None and self.meter is not meter:
            self.end_wait(now)
            self.begin_to_wait(meter, now)

    def start(self, holdings: tuple[Holding, ...], now: float, rate: Rate = FULL) -> float:
        """Run from now on; returns when the job will finish or fail if nothing changes."""
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
        """Go on at another rate; returns when the job will finish or fail now."""
        self._settle(now)
        self.rate, self.pace = rate
        return self._ends()

    def _ends(self) -> float:
        self.timing += 1
        if not self.rate:
            return self.fails_at  # suspended
        return min(self.settled_seconds + self.restart_seconds + self.rest_seconds / self.rate, self.fails_at)

    def total_seconds(self, now: float) -> float:
        """Foretell the run time of the whole job at its present rate, were it never killed and did it never fail."""
        ran = now - self.running_since if self.running else 0.0
        beyond = self.job.work_seconds * (1 - self.fate.work_share)
        rest = (self.rest_seconds + beyond) / self.rate if self.rate else math.inf
        return self.attained_seconds + ran + self.restart_seconds + rest

    def busy_until(self, now: float) -> float:
        """Sum up GPU utilisation × time, the present run too."""
        return self.busy_seconds + (self._worked(now) * self.busy if self.running else 0.0)

    def stopped(self, migrates: bool, reclaimed: bool) -> None:
        """Count a stop for others."""
        self.migrations += migrates
        self.reclaims += reclaimed
        self.preemptions += not (migrates or reclaimed)

    def stop(self, now: float, restart_seconds: float, *, saved: bool = True) -> None:
        """Stop before the end; the next run repeats `restart_seconds` first, and what was not saved."""
        ran = now - self.running_since
        self._settle(now)
        if not saved:
            self.lost_seconds += self.saved_rest_seconds - self.rest_seconds
            self.rest_seconds = self.saved_rest_seconds
        self.restart_seconds = restart_seconds
        self.trial_left_seconds -= ran
        self._hold_nothing(ran)

    def finish(self, now: float) -> None:
        """Be done."""
        ran = now - self.running_since
        self._settle(now)
        self.rest_seconds = 0.0
        self.finished_seconds = now
        self._hold_nothing(ran)

    def give_up(self, now: float) -> None:
        """Wait no longer, without ever being done."""
        self.end_wait(now)
        self.given_up_seconds = now

    @property
    def busy(self) -> float:
        """GPU utilisation while it works, from 0 to 1."""
        return min(1.0, self.usage * self.pace)

    def _worked(self, now: float) -> float:
        """Tell for how long it has got on with its work since that was last counted."""
        return max(0.0, now - self.settled_seconds - self.restart_seconds)

    def _settle(self, now: float) -> None:
        """Count the work done at the present rate, and what of it was saved."""
        worked = self._worked(now)
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


def row_of(life: Life, tenant: int, tenant_weight: float) -> JobRow:
    """A job as it enters the table, of the tenant with that number."""
    job, shape = life.job, life.shape
    return JobRow(
        job.id,
        arrival_seconds=job.submitted_seconds,
        sequence=life.sequence,
        gpu_milli=shape.gpu_milli,
        cores=shape.cores,
        memory_bytes=shape.memory_bytes,
        replicas=shape.replicas,
        priority=job.priority,
        tenant=tenant,
        tenant_weight=tenant_weight,
        deadline_seconds=math.inf if job.deadline_seconds is None else job.deadline_seconds,
        preemptible=job.preemptible,
    )
