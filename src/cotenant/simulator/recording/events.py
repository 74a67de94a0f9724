"""Events of a simulation: one for each thing that happens, for any recorder.

Without a recorder no event is created. The reason why a job waits is recorded when its key changes: its code, or the
resources that it names. Texts and numbers are those of the moment of the change; recording each new number of free GPUs
for each waiting job would be most of a recording. If all gangs of a class wait for one reason it is recorded once for
the class; a job that joins later gets an event with the reason that its class has then. The latest of either counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.model.resources import OPTIONAL, Amounts, KnownAmounts, amounts_of, amounts_times, as_map
from cotenant.core.scheduling.cycle import Plan, Start
from cotenant.simulator.job import JobClass, SimulatedJob
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.traces.trace_job import Ended


class Kind(StrEnum):
    """The kinds of events."""

    SUBMITTED = "submitted"
    UNSCHEDULABLE = "unschedulable"
    PLANNED = "planned"
    PREEMPTED = "preempted"
    MIGRATED = "migrated"
    RECLAIMED = "reclaimed"
    STARTED = "started"
    WAITING = "waiting"
    FINISHED = "finished"
    GIVEN_UP = "given_up"
    ATTEMPT_FAILED = "attempt_failed"
    NODE_DOWN = "node_down"
    NODE_UP = "node_up"
    RATE_CHANGED = "rate_changed"
    RESIZED = "resized"
    RESCALED = "rescaled"


@dataclass(frozen=True, slots=True)
class Place(Amounts):
    """What a run holds on one node for one role, over all its replicas there."""

    node: int
    role: str
    replicas: int
    gpu_milli: int
    cores: int


@dataclass(frozen=True, slots=True)
class Event(KnownAmounts):
    """One event. `at_seconds` counts from the first submission; empty fields are left out.

    `job_id` is the job; a reason to wait with a `shape` alone applies to each waiting job of that class. `run` numbers
    a job's runs from 1. `by` are the jobs that a preempted job made room for. `starts` and `stops` are a cycle's plan,
    `waiting` is how many jobs it left waiting. `rate` is the share of reference speed from now on.
    """

    at_seconds: float
    kind: Kind
    job_id: str = ""
    shape: int | None = None
    job_kind: str = ""
    tenant: str = ""
    model: str = ""
    node: int | None = None
    run: int | None = None
    gpu_milli: int | None = None
    cores: int | None = None
    nodes: tuple[Place, ...] = ()
    needs_room: bool | None = None
    sizing: str = ""
    by: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    waiting: int | None = None
    code: str = ""
    wait: str = ""
    detail: str = ""
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    work_seconds: float | None = None
    ran_seconds: float | None = None
    queue_seconds: float | None = None
    jct_seconds: float | None = None
    rate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the set fields as plain values, in order."""
        said: dict[str, Any] = {"at_seconds": float(self.at_seconds), "kind": self.kind.value}
        for name in _OPTIONAL:
            value = getattr(self, name)
            if value is None or value == () or value == "" or value == {} or (value == 0 and name in OPTIONAL):
                continue
            said[name] = float(value) if name in _FLOATS else value
        if self.nodes:
            said["nodes"] = [as_map((name, getattr(place, name)) for name in PLACE_FIELDS) for place in self.nodes]
        if self.numbers:
            said["numbers"] = {key: float(self.numbers[key]) for key in sorted(self.numbers)}
        return said

    def as_line(self) -> str:
        """Return it as one line of JSON."""
        return line_of(self.as_dict())


EVENT_FIELDS = tuple(as_map((each.name, True) for each in fields(Event)))  # in the order in which they are written
PLACE_FIELDS = tuple(as_map((each.name, True) for each in fields(Place)))
_OPTIONAL = tuple(name for name in EVENT_FIELDS if name not in ("at_seconds", "kind"))
_FLOATS = frozenset(each.name for each in fields(Event) if str(each.type).startswith("float"))


def line_of(said: Mapping[str, Any]) -> str:
    """Return plain values as one line of JSON, in a canonical form."""
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class Recorder(Protocol):
    """Receives the events of a simulation."""

    def record(self, event: Event) -> None:
        """Record an event; events come in order."""


@dataclass(frozen=True, slots=True)
class MultiRecorder:
    """Passes events to several recorders, in order."""

    listeners: tuple[Recorder, ...]

    def record(self, event: Event) -> None:
        """Pass an event to each recorder."""
        for listener in self.listeners:
            listener.record(event)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job waits; its text is created only if recorded."""

    key: tuple[str, ...]  # begins with the code
    words: Callable[[], Refusal]

    def over_fair_share(self) -> Reason:
        """Return the reason for a job whose tenant has its fair share."""
        words = self.words
        return Reason((*self.key, "over_share"), lambda: replace(words(), over_share=True))


def reason_of(refusal: Refusal) -> Reason:
    """Return the reason of a refusal, keyed by its code, its level, and the names of its numbers."""
    return Reason((refusal.code, refusal.locality or "", *sorted(refusal.numbers)), lambda: refusal)


def capacity_reason(lacking: Sequence[str], words: Callable[[], Refusal]) -> Reason:
    """Return the reason of a shortage, keyed by the lacking resources."""
    names = (*(f"free_{name}" for name in lacking), *(f"wanted_{name}" for name in lacking))
    return Reason((Code.CAPACITY, "", *sorted(names)), words)


class EventLog:
    """Creates events from the scheduler's actions."""

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.record
        self._last_reason: dict[int, tuple[str, ...]] = {}  # each waiting job's last recorded reason, by sequence
        self._class_reason: dict[int, tuple[str, ...]] = {}  # the same for classes, by code
        self._individual: set[int] = (
            set()
        )  # jobs in back-off or with an individual reason, by sequence: their class's reason does not apply
        self._submitted_class: dict[int, int] = {}  # the code of each job's class when it was submitted, by sequence
        self._new: list[SimulatedJob] = []  # began to wait since reasons were last recorded
        self._special: dict[int, SimulatedJob] = {}  # jobs whose reason is not that of most

    def unschedulable(self, job: TraceJob, refusal: Refusal, now: float) -> None:
        """Record a job that can never run."""
        told = _refusal_fields(refusal)
        self._record(
            Event(
                now,
                Kind.UNSCHEDULABLE,
                job.id,
                job_kind=job.kind.value,
                tenant=job.tenant,
                model=job.model,
                gpu_milli=job.spec().gpu_milli,
                work_seconds=job.work_seconds,
                **told,
            )
        )

    def submitted(self, sim_job: SimulatedJob, now: float) -> None:
        """Record a submission."""
        job_class, self._submitted_class[sim_job.sequence] = sim_job.job_class, sim_job.job_class.code
        self._record(
            Event(
                now,
                Kind.SUBMITTED,
                sim_job.job.id,
                shape=job_class.code,
                job_kind=sim_job.job.kind.value,
                tenant=sim_job.job.tenant,
                model=sim_job.job.model,
                **job_class.needs._asdict(),
                sizing=job_class.sizing,
                work_seconds=sim_job.job.work_seconds,
            )
        )

    def waits(self, sim_job: SimulatedJob, *, reclassified: bool = False) -> None:
        """Note a job that begins to wait; its reason is recorded at the end of the instant."""
        self._new.append(sim_job)
        if reclassified or sim_job.job_class.code != self._submitted_class[sim_job.sequence]:
            self._individual.add(sim_job.sequence)

    def planned(self, plan: Plan, waiting: int, now: float) -> None:
        """Record a cycle's plan, with the number of waiting jobs."""
        starts = tuple(start.gang.job_id for start in plan.starts)
        stops = plan.stops + plan.reclaimed
        left = waiting - len(starts) + len(stops)
        self._record(Event(now, Kind.PLANNED, starts=starts, stops=stops, waiting=left))

    def preempted(
        self, sim_job: SimulatedJob, starts: Iterable[Start], now: float, kind: Kind = Kind.PREEMPTED
    ) -> None:
        """Record a preemption, for the starts that stopped the job, had it moved, or took back what it borrowed."""
        by = tuple(start.gang.job_id for start in starts if sim_job.job.id in _gone_for(start, kind))
        ran = now - sim_job.running_since
        self._record(Event(now, kind, sim_job.job.id, run=sim_job.runs, by=by, ran_seconds=ran))

    def adopted(self, sim_job: SimulatedJob, now: float) -> None:
        """Record a job that was running at the start of the simulation; its roles' places are unknown."""
        self.submitted(sim_job, now)
        self._record_start(sim_job, tuple(_places_held(sim_job)), now, needs_room=False)

    def started(self, sim_job: SimulatedJob, start: Start, now: float) -> None:
        """Record a start."""
        self._record_start(sim_job, tuple(places_of(start)), now, needs_room=start.needs_room)

    def _record_start(self, sim_job: SimulatedJob, places: tuple[Place, ...], now: float, *, needs_room: bool) -> None:
        self._last_reason.pop(sim_job.sequence, None)
        self._special.pop(sim_job.sequence, None)
        self._record(
            Event(
                now,
                Kind.STARTED,
                sim_job.job.id,
                run=sim_job.runs,
                **sim_job.job_class.needs._asdict(),
                nodes=places,
                needs_room=needs_room,
                sizing=sim_job.job_class.sizing,
                queue_seconds=sum(sim_job.waited),
                rate=None if sim_job.rate == 1 else sim_job.rate,
            )
        )

    def finished(self, sim_job: SimulatedJob, ran_seconds: float, now: float) -> None:
        """Record a finish, with the duration of the last run."""
        self._record(
            Event(
                now,
                Kind.FINISHED,
                sim_job.job.id,
                run=sim_job.runs,
                ran_seconds=ran_seconds,
                queue_seconds=sum(sim_job.waited),
                jct_seconds=now - sim_job.job.submitted_seconds,
                code=sim_job.failure or ("" if sim_job.fate.ended is Ended.PASSED else sim_job.fate.ended.value),
            )
        )

    def attempt_failed(self, sim_job: SimulatedJob, code: str, now: float, node: int | None = None) -> None:
        """Record that a run ends before its work was done; the job will run again."""
        ran = now - sim_job.running_since
        self._record(
            Event(now, Kind.ATTEMPT_FAILED, sim_job.job.id, run=sim_job.runs, node=node, code=code, ran_seconds=ran)
        )

    def backed_off(self, sim_job: SimulatedJob, seconds: float, now: float) -> None:
        """Record that a failed job waits, outside the queue, until it is retried."""
        self._last_reason.pop(sim_job.sequence, None)
        self._individual.add(sim_job.sequence)
        detail = f"failed {plural(sim_job.failures, 'time')}; it is retried after {seconds:g} s"
        self._record(
            Event(
                now, Kind.WAITING, sim_job.job.id, **_refusal_fields(Refusal(Code.BACK_OFF, detail, "the time passes"))
            )
        )

    def node(self, node: int, now: float, *, back: bool) -> None:
        """Record a failure or repair of a node."""
        self._record(Event(now, Kind.NODE_UP if back else Kind.NODE_DOWN, node=node))

    def rate_changed(self, sim_job: SimulatedJob, now: float) -> None:
        """Record a new rate of a job."""
        self._record(Event(now, Kind.RATE_CHANGED, sim_job.job.id, run=sim_job.runs, rate=sim_job.rate))

    def resized(self, sim_job: SimulatedJob, places: tuple[Place, ...], lent: int, sizing: str, now: float) -> None:
        """Record a running job's new cores, some of which may be lent."""
        self._record(
            Event(
                now,
                Kind.RESIZED,
                sim_job.job.id,
                run=sim_job.runs,
                cores=sum(place.cores for place in places),
                nodes=places,
                sizing=sizing,
                numbers={"lent_cores": float(lent)} if lent else {},
                rate=sim_job.rate,
            )
        )

    def rescaled(self, sim_job: SimulatedJob, now: float) -> None:
        """Record that an elastic job stops, to start again at this instant with another number of replicas."""
        ran = now - sim_job.running_since
        self._record(Event(now, Kind.RESCALED, sim_job.job.id, run=sim_job.runs, ran_seconds=ran))

    def given_up(self, sim_job: SimulatedJob, refusal: Refusal, now: float) -> None:
        """Record that a waiting job was given up."""
        self._last_reason.pop(sim_job.sequence, None)
        self._special.pop(sim_job.sequence, None)
        queued = sum(sim_job.waited_until(now))
        self._record(Event(now, Kind.GIVEN_UP, sim_job.job.id, queue_seconds=queued, **_refusal_fields(refusal)))

    def record_class_reasons(
        self, job_classes: Iterable[JobClass], why: Callable[[JobClass], Reason], now: float
    ) -> None:
        """Record why each class's gangs wait, if that is new; and the reasons of jobs that joined a class."""
        before, self._class_reason = self._class_reason, {}
        for job_class in job_classes:
            reason = why(job_class)
            self._class_reason[job_class.code] = reason.key
            if before.get(job_class.code) != reason.key:
                self._record(Event(now, Kind.WAITING, shape=job_class.code, **_refusal_fields(reason.words())))
        for sim_job in self._new:
            code = sim_job.job_class.code
            if sim_job.meter is not None and (
                sim_job.sequence in self._individual or before.get(code) == self._class_reason[code]
            ):
                told = _refusal_fields(why(sim_job.job_class).words())
                self._record(Event(now, Kind.WAITING, sim_job.job.id, shape=code, **told))
        self._individual.difference_update(sim_job.sequence for sim_job in self._new)
        self._new.clear()

    def record_job_reasons(
        self, special: Iterable[SimulatedJob], why: Callable[[SimulatedJob], Reason], most: Code, now: float
    ) -> None:
        """Record why jobs wait, if that is new: new jobs, special jobs, and formerly special jobs are checked.

        All others wait for the reason with code `most`, as before.
        """
        asked = {sim_job.sequence: sim_job for sim_job in (*self._special.values(), *self._new, *special)}
        self._new.clear()
        self._special.clear()
        for sequence, sim_job in asked.items():
            if sim_job.meter is None:
                continue  # it was started at this instant
            reason = why(sim_job)
            if reason.key != (most,):  # another code, or a job whose tenant has its fair share
                self._special[sequence] = sim_job
            if self._last_reason.get(sequence) != reason.key:
                self._last_reason[sequence] = reason.key
                self._record(Event(now, Kind.WAITING, sim_job.job.id, **_refusal_fields(reason.words())))


def _refusal_fields(refusal: Refusal) -> dict[str, Any]:
    return {
        "code": refusal.code.value,
        "wait": refusal.wait.value,
        "detail": refusal.full_detail,
        "remedy": refusal.remedy,
        "numbers": refusal.numbers,
    }


def _places_held(sim_job: SimulatedJob) -> Iterator[Place]:
    for holding in sim_job.holdings:
        milli = sum(part for _, part in holding.shares) or holding.gpus * WHOLE_GPU_MILLI
        yield Place(holding.node, "", 0, milli, holding.cores, **amounts_of(holding))


def _gone_for(start: Start, kind: Kind) -> tuple[str, ...]:
    """Return the running jobs that leave in this way for a start."""
    return {Kind.MIGRATED: start.moves, Kind.RECLAIMED: start.reclaims}.get(kind, start.stops)


def places_of(start: Start) -> Iterator[Place]:
    """Yield what a start will hold, node by node and role by role."""
    for share in start.offer:
        part = start.gang.parts[share.part]
        count, demand = int(share.replicas), part.demand
        yield Place(
            int(share.node),
            part.role,
            count,
            count * demand.gpu_milli,
            count * demand.cores,
            **amounts_times(demand, count),
        )
