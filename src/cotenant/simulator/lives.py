"""What the simulator keeps of each job, and of each shape of gang."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cotenant.core.jobs import Gang, Locality, Part
from cotenant.core.ledger import Holding
from cotenant.core.refusals import Refusal
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.waits import NONE, Meter, Seconds


@dataclass(slots=True)
class Shape:
    """All gangs that look alike: what one of them can get, all of them can.

    `code` numbers the shapes. `refusal` is why the last of them that asked was refused; it holds until something is
    freed. `impossible` is why none of them could run even on the empty cluster.
    """

    parts: tuple[Part, ...]
    locality: Locality | None
    sizing: str
    gpu_milli: int
    cores: int
    memory_bytes: int
    replicas: int
    code: int = -1
    meter: Meter = field(default_factory=Meter)
    waiting: int = 0
    refusal: Refusal | None = None
    impossible: Refusal | None = None

    def gang(self, job_id: str) -> Gang:
        """Make a gang of this shape."""
        return Gang(job_id, self.parts, self.locality, self.sizing)


def shape_of(gang: Gang) -> Shape:
    """Note what gangs like this one need."""
    return Shape(
        parts=gang.parts,
        locality=gang.locality,
        sizing=gang.sizing,
        gpu_milli=gang.gpu_milli,
        cores=gang.cores,
        memory_bytes=gang.memory_bytes,
        replicas=sum(part.replicas for part in gang.parts),
    )


@dataclass(slots=True)
class Life:
    """A job from its submission on. Times are simulated seconds; NaN is not yet.

    `rest_seconds` is the work left when the present run began, `restart_seconds` what that run repeats before it gets
    on with it. `attained_seconds` counts all run time, repeated work too.
    """

    job: TraceJob
    sequence: int
    shape: Shape
    rest_seconds: float
    restart_seconds: float = 0.0
    attained_seconds: float = 0.0
    running_since: float = math.nan
    finished_seconds: float = math.nan
    runs: int = 0
    preemptions: int = 0
    holdings: tuple[Holding, ...] = ()
    waited: Seconds = NONE
    meter: Meter | None = None
    mark: Seconds = NONE

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return not math.isnan(self.running_since)

    @property
    def finished(self) -> bool:
        """Whether it is done."""
        return not math.isnan(self.finished_seconds)

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
        return waited[0] + read[0] - mark[0], waited[1] + read[1] - mark[1], waited[2] + read[2] - mark[2]

    def move(self, meter: Meter, now: float) -> None:
        """Wait on another meter, if it waits at all."""
        if self.meter is not None and self.meter is not meter:
            self.end_wait(now)
            self.begin_to_wait(meter, now)

    def start(self, holdings: tuple[Holding, ...], now: float) -> float:
        """Run from now on; returns when the job will finish if nobody stops it."""
        self.end_wait(now)
        self.holdings, self.running_since = holdings, now
        self.runs += 1
        return now + self.restart_seconds + self.rest_seconds

    def stop(self, now: float, restart_seconds: float) -> None:
        """Stop before the end; the next run repeats `restart_seconds` first."""
        ran = now - self.running_since
        self.rest_seconds -= max(0.0, ran - self.restart_seconds)
        self.restart_seconds = restart_seconds
        self.preemptions += 1
        self._hold_nothing(ran)

    def finish(self, now: float) -> None:
        """Be done."""
        ran = now - self.running_since
        self.rest_seconds = 0.0
        self.finished_seconds = now
        self._hold_nothing(ran)

    def _hold_nothing(self, ran: float) -> None:
        self.attained_seconds += ran
        self.running_since, self.holdings = math.nan, ()
