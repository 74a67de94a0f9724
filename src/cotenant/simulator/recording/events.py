"""What a simulation tells as it goes: one event for each thing that happened, to whoever listens.

With nobody listening nothing is made. Why a job waits is told when the kind of reason changes: its code, or the
resources that it speaks of. The words and numbers are those of the moment at which it changed; telling each new count
of free GPUs to each job that waits would be most of a recording. Where all gangs of a shape wait for one reason it is
told once for the shape; a job that joins later is told the reason that its shape has then. The latest of either counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.scheduling.cycle import Plan, Start
from cotenant.simulator.job import Life, Shape
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.traces.trace_job import Ended


class Kind(StrEnum):
    """What can happen."""

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


@dataclass(frozen=True, slots=True)
class Place:
    """What a run holds on one node for one role, over all its replicas there."""

    node: int
    role: str
    replicas: int
    gpu_milli: int
    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `at_seconds` counts from the first submission; what says nothing is left out.

    `job_id` says whom it is about; a reason to wait with a `shape` alone is that of each job of the shape that waits.
    `run` numbers a job's runs from 1. `by` names the jobs that a preempted one made room for. `starts` and `stops` are
    a cycle's plan, `waiting` how many were left waiting by it. `rate` is the share of reference speed from now on.
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
    memory_bytes: int | None = None
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
        """Give what it says as plain values, in the order of the fields."""
        said: dict[str, Any] = {"at_seconds": float(self.at_seconds), "kind": self.kind.value}
        for name in _TOLD:
            value = getattr(self, name)
            if value is None or value == () or value == "" or value == {}:
                continue
            said[name] = float(value) if name in _FLOATS else value
        if self.nodes:
            said["nodes"] = [{key: getattr(place, key) for key in _PLACE} for place in self.nodes]
        if self.numbers:
            said["numbers"] = {key: float(self.numbers[key]) for key in sorted(self.numbers)}
        return said

    def as_line(self) -> str:
        """Write it as one line of JSON."""
        return line_of(self.as_dict())


_TOLD = tuple(each.name for each in fields(Event) if each.name not in ("at_seconds", "kind"))
_FLOATS = frozenset(each.name for each in fields(Event) if str(each.type).startswith("float"))
_PLACE = tuple(each.name for each in fields(Place))


def line_of(said: Mapping[str, Any]) -> str:
    """Write plain values as one line of JSON, always in the same way."""
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class Recorder(Protocol):
    """Listens to a simulation."""

    def record(self, event: Event) -> None:
        """Take one event, in the order in which they happen."""


@dataclass(frozen=True, slots=True)
class Several:
    """Lets several listen, in turn."""

    listeners: tuple[Recorder, ...]

    def record(self, event: Event) -> None:
        """Tell each of them."""
        for listener in self.listeners:
            listener.record(event)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why somebody waits, its words made only where they are told."""

    key: tuple[str, ...]  # begins with the code
    words: Callable[[], Refusal]

    def beyond_share(self) -> Reason:
        """The same, of a job whose tenant has what it is due."""
        words = self.words
        return Reason((*self.key, "over_share"), lambda: replace(words(), over_share=True))


def reason_of(refusal: Refusal) -> Reason:
    """Know a reason by its code, its level, and by what its numbers count."""
    return Reason((refusal.code, refusal.locality or "", *sorted(refusal.numbers)), lambda: refusal)


def counted(lacking: Sequence[str], words: Callable[[], Refusal]) -> Reason:
    """Know a reason by what there is too little of in sum."""
    names = (*(f"free_{name}" for name in lacking), *(f"wanted_{name}" for name in lacking))
    return Reason((Code.CAPACITY, "", *sorted(names)), words)


class Story:
    """Turns what the scheduler does into events."""

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.record
        self._told: dict[int, tuple[str, ...]] = {}  # each waiting job's reason, by sequence
        self._of_shape: dict[int, tuple[str, ...]] = {}  # the same for shapes, by code
        self._apart: set[int] = set()  # back off, by sequence: what is told of their shape is not of them
        self._came_as: dict[int, int] = {}  # the code of each one's shape as it was told when it came, by sequence
        self._new: list[Life] = []  # began to wait since reasons were last told
        self._special: dict[int, Life] = {}  # those whose reason is not that of most

    def unschedulable(self, job: TraceJob, refusal: Refusal, now: float) -> None:
        """A job came that can never run."""
        told = _words(refusal)
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

    def submitted(self, life: Life, now: float) -> None:
        """A job came."""
        shape, self._came_as[life.sequence] = life.shape, life.shape.code
        self._record(
            Event(
                now,
                Kind.SUBMITTED,
                life.job.id,
                shape=shape.code,
                job_kind=life.job.kind.value,
                tenant=life.job.tenant,
                model=life.job.model,
                gpu_milli=shape.gpu_milli,
                cores=shape.cores,
                memory_bytes=shape.memory_bytes,
                sizing=shape.sizing,
                work_seconds=life.job.work_seconds,
            )
        )

    def waits(self, life: Life, *, anew: bool = False) -> None:
        """A job begins to wait; why, is told at the end of the instant: to itself if it is of another shape."""
        self._new.append(life)
        if anew or life.shape.code != self._came_as[life.sequence]:
            self._apart.add(life.sequence)

    def planned(self, plan: Plan, waiting: int, now: float) -> None:
        """A cycle decided, over so many who waited."""
        starts = tuple(start.gang.job_id for start in plan.starts)
        stops = plan.stops + plan.reclaimed
        left = waiting - len(starts) + len(stops)
        self._record(Event(now, Kind.PLANNED, starts=starts, stops=stops, waiting=left))

    def preempted(self, life: Life, starts: Iterable[Start], now: float, kind: Kind = Kind.PREEMPTED) -> None:
        """A job is about to make room for those starts that need it and that take a place on one of its nodes.

        Where it is its tenant's limit that it makes room under, that is for starts of its tenant, wherever they are.
        One that migrates starts again elsewhere, for the sake of those that name it.
        """
        left = {holding.node for holding in life.holdings}
        if kind is Kind.MIGRATED:
            by = [start.gang.job_id for start in starts if life.job.id in start.moves]
        else:
            taking = [start for start in starts if start.needs_room]
            there = [start for start in taking if any(holding.node in left for holding in start.holdings)]
            of_tenant = [start for start in taking if start.gang.tenant == life.shape.tenant != ""]
            by = [start.gang.job_id for start in there or of_tenant]
        ran = now - life.running_since
        self._record(Event(now, kind, life.job.id, run=life.runs, by=tuple(by), ran_seconds=ran))

    def adopted(self, life: Life, now: float) -> None:
        """A job was running when the simulation set in; which of its roles is where, nobody tells."""
        self.submitted(life, now)
        self._begun(life, tuple(_holds(life)), now, needs_room=False)

    def started(self, life: Life, start: Start, now: float) -> None:
        """A job runs."""
        self._begun(life, tuple(places_of(start)), now, needs_room=start.needs_room)

    def _begun(self, life: Life, places: tuple[Place, ...], now: float, *, needs_room: bool) -> None:
        self._told.pop(life.sequence, None)
        self._special.pop(life.sequence, None)
        self._record(
            Event(
                now,
                Kind.STARTED,
                life.job.id,
                run=life.runs,
                gpu_milli=life.shape.gpu_milli,
                cores=life.shape.cores,
                memory_bytes=life.shape.memory_bytes,
                nodes=places,
                needs_room=needs_room,
                sizing=life.shape.sizing,
                queue_seconds=sum(life.waited),
                rate=None if life.rate == 1 else life.rate,
            )
        )

    def finished(self, life: Life, ran_seconds: float, now: float) -> None:
        """A job is done; its last run took so long."""
        self._record(
            Event(
                now,
                Kind.FINISHED,
                life.job.id,
                run=life.runs,
                ran_seconds=ran_seconds,
                queue_seconds=sum(life.waited),
                jct_seconds=now - life.job.submitted_seconds,
                code=life.failure or ("" if life.fate.ended is Ended.PASSED else life.fate.ended.value),
            )
        )

    def attempt_failed(self, life: Life, code: str, now: float, node: int | None = None) -> None:
        """A run is about to end before its work was done; the job will run again."""
        ran = now - life.running_since
        self._record(Event(now, Kind.ATTEMPT_FAILED, life.job.id, run=life.runs, node=node, code=code, ran_seconds=ran))

    def backs_off(self, life: Life, seconds: float, now: float) -> None:
        """A failed job waits, outside the queue, until it is tried again."""
        self._told.pop(life.sequence, None)
        self._apart.add(life.sequence)
        detail = f"failed {plural(life.failures, 'time')}; it is tried again after {seconds:g} s"
        self._record(Event(now, Kind.WAITING, life.job.id, **_words(Refusal(Code.BACK_OFF, detail, "the time passes"))))

    def node(self, node: int, now: float, *, back: bool) -> None:
        """A node failed, or is back."""
        self._record(Event(now, Kind.NODE_UP if back else Kind.NODE_DOWN, node=node))

    def rate_changed(self, life: Life, now: float) -> None:
        """A job goes on at another rate."""
        self._record(Event(now, Kind.RATE_CHANGED, life.job.id, run=life.runs, rate=life.rate))

    def resized(self, life: Life, places: tuple[Place, ...], lent: int, sizing: str, now: float) -> None:
        """A running job has other cores, some of which are only lent to it."""
        self._record(
            Event(
                now,
                Kind.RESIZED,
                life.job.id,
                run=life.runs,
                cores=sum(place.cores for place in places),
                nodes=places,
                sizing=sizing,
                numbers={"lent_cores": float(lent)} if lent else {},
                rate=life.rate,
            )
        )

    def given_up(self, life: Life, refusal: Refusal, now: float) -> None:
        """A waiting job will never run."""
        self._told.pop(life.sequence, None)
        self._special.pop(life.sequence, None)
        queued = sum(life.waited_until(now))
        self._record(Event(now, Kind.GIVEN_UP, life.job.id, queue_seconds=queued, **_words(refusal)))

    def reasons_of_shapes(self, shapes: Iterable[Shape], why: Callable[[Shape], Reason], now: float) -> None:
        """Tell why the gangs of each waiting shape wait, where that is new; and those who joined one, why it waits."""
        before, self._of_shape = self._of_shape, {}
        for shape in shapes:
            reason = why(shape)
            self._of_shape[shape.code] = reason.key
            if before.get(shape.code) != reason.key:
                self._record(Event(now, Kind.WAITING, shape=shape.code, **_words(reason.words())))
        for life in self._new:
            code = life.shape.code
            if life.meter is not None and (life.sequence in self._apart or before.get(code) == self._of_shape[code]):
                told = _words(why(life.shape).words())
                self._record(Event(now, Kind.WAITING, life.job.id, shape=code, **told))
        self._apart.difference_update(life.sequence for life in self._new)
        self._new.clear()

    def reasons_of_jobs(self, special: Iterable[Life], why: Callable[[Life], Reason], most: Code, now: float) -> None:
        """Tell why jobs wait, where that is new: asked are new ones, the special, and those who were special.

        All others wait for the reason with code `most`, as they did.
        """
        asked = {life.sequence: life for life in (*self._special.values(), *self._new, *special)}
        self._new.clear()
        self._special.clear()
        for sequence, life in asked.items():
            if life.meter is None:
                continue  # it was started at this instant
            reason = why(life)
            if reason.key != (most,):  # one of another code, or one whose tenant has what it is due
                self._special[sequence] = life
            if self._told.get(sequence) != reason.key:
                self._told[sequence] = reason.key
                self._record(Event(now, Kind.WAITING, life.job.id, **_words(reason.words())))


def _words(refusal: Refusal) -> dict[str, Any]:
    return {
        "code": refusal.code.value,
        "wait": refusal.wait.value,
        "detail": refusal.told,
        "remedy": refusal.remedy,
        "numbers": refusal.numbers,
    }


def _holds(life: Life) -> Iterator[Place]:
    for holding in life.holdings:
        milli = sum(part for _, part in holding.shares) or holding.gpus * WHOLE_GPU_MILLI
        yield Place(holding.node, "", 0, milli, holding.cores, holding.memory_bytes)


def places_of(start: Start) -> Iterator[Place]:
    """Tell what a start will hold, node by node and role by role."""
    for share in start.offer:
        part = start.gang.parts[share.part]
        count, demand = int(share.replicas), part.demand
        yield Place(
            int(share.node),
            part.role,
            count,
            count * demand.gpu_milli,
            count * demand.cores,
            count * demand.memory_bytes,
        )
