"""Why jobs wait, as the last whole cycle found it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.codec import estimates
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import Code, Refusal, behind, outranked
from cotenant.core.scheduling.earliest_start import ends_within_seconds
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.core.scheduling.reservations import has_reservation
from cotenant.services.queue.jobs.transitions import Record, ShapeKey

Since = tuple[Refusal, float]


@dataclass(frozen=True, slots=True)
class Said:
    """What a cycle said of a job, since when that is the reason, and for how long its places were in fragments."""

    refusal: Refusal
    since: float
    fragmented_seconds: float
    ends_seconds: float = math.inf  # within so long the job would end, on which it depends whom reservations hold back

    def of(self, record: Record) -> Refusal | None:
        """Say it of another job with the same needs; None where its wait is one of which this tells nothing."""
        if self.refusal.code is Code.RESERVED and ends_within(record) != self.ends_seconds:
            return None
        longer = record.fragmented_seconds - self.fragmented_seconds
        if -self.refusal.held_seconds <= longer < self.refusal.holds_seconds:
            return self.refusal.after(longer)
        return None


@dataclass(slots=True)
class Reasons:
    """One cycle's refusals, each with the time since when it has been the reason.

    Most jobs that wait are refused together: all of one shape, all that a strict queue holds back, all that the order
    leaves out. Those are written down once, so that a cycle costs little however many jobs wait.
    """

    now: float = 0.0
    own: dict[str, Since] = field(default_factory=dict)
    shapes: dict[ShapeKey, list[Said]] = field(default_factory=dict)  # by how long jobs wait, where that matters
    plain: dict[ShapeKey, bool] = field(default_factory=dict)  # those with one reason for all; whether it is fragments
    holds_seconds: float = math.inf  # for so long nobody's reason changes with time alone
    head: tuple[str, Refusal, float] | None = None  # what a strict queue stopped at
    outranked: Mapping[str, int] = field(default_factory=dict)  # places in the order, from 0
    outrankers: Outrankers | None = None  # None where nobody counts what they leave
    ids: list[str] = field(default_factory=list)  # by row, as the outrankers name them
    outranked_since: Mapping[str, float] = field(default_factory=dict)

    def refuse(self, record: Record, refusal: Refusal, before: Reasons) -> None:
        """Note why a job waits; the time stays where the reason does."""
        self.hold(refusal)
        self.own[record.id] = refusal, _since(refusal, before.own.get(record.id), self.now)

    def refuse_shape(self, record: Record, refusal: Refusal, before: Reasons) -> None:
        """Note why all jobs of a shape wait, those for whose waits it holds."""
        known = next((said for said in before.shapes.get(record.shape, ()) if said.refusal.code is refusal.code), None)
        since = known.since if known else self.now
        told = self.shapes.setdefault(record.shape, [])
        timeless = math.isinf(refusal.holds_seconds) and math.isinf(refusal.held_seconds)
        if not told and timeless and refusal.code is not Code.RESERVED:
            self.plain[record.shape] = refusal.code is Code.FRAGMENTED
        told.append(Said(refusal, since, record.fragmented_seconds, ends_within(record)))
        self.hold(refusal)

    def age(self, record: Record, now: float) -> None:
        """Count the time since this cycle for a job that it refused for fragments."""
        fragmented = self.plain.get(record.shape) if not self.head and record.id not in self.own else None
        if fragmented is None:
            told = self._of(record)
            fragmented = told is not None and told[0].code is Code.FRAGMENTED
        record.age(now, fragmented=fragmented, since=self.now)

    @property
    def in_fragments(self) -> bool:
        """Whether any job was refused for places in fragments, or for a reason that time changes."""
        if any(self.plain.values()) or self.shapes.keys() - self.plain.keys():
            return True
        return any(refusal.code is Code.FRAGMENTED for refusal, _ in self.own.values())

    def reserved(self, record: Record) -> bool:
        """Tell whether a job waits with a reservation."""
        own = self.own.get(record.id)
        return own is not None and record.phase is Phase.QUEUED and has_reservation(own[0])

    def known(self, record: Record) -> bool:
        """Tell whether another job of its shape was refused for a reason that is its own too."""
        if record.shape in self.plain:
            return True
        shape = self._of_shape(record)
        if shape:
            self.hold(shape[0])
        return shape is not None

    def hold(self, refusal: Refusal) -> None:
        """Note when a job's reason will change with time alone."""
        self.hold_for(refusal.holds_seconds)

    def hold_for(self, seconds: float) -> None:
        """Note that the next cycle is to come by then."""
        self.holds_seconds = min(self.holds_seconds, seconds)

    def _of_shape(self, record: Record) -> Since | None:
        for said in self.shapes.get(record.shape, ()):
            if (refusal := said.of(record)) is not None:
                return refusal, said.since
        return None

    def stop_at(self, record: Record, refusal: Refusal, before: Reasons) -> None:
        """Note that a strict queue goes no further."""
        same = before.head and before.head[0] == record.id
        self.head = record.id, refusal, before.head[2] if before.head and same else self.now

    def outrank(self, places: Mapping[str, int], before: Reasons) -> None:
        """Note the jobs that the order leaves out."""
        since = before.outranked_since
        self.outranked, self.outranked_since = places, {job_id: since.get(job_id, self.now) for job_id in places}

    def of(self, record: Record, now: float) -> Since | None:
        """Why a job waits, and since when; None where no cycle has considered it."""
        if told := self._of(record):
            return told[0].after(now - self.now), told[1]
        return None

    def code(self, record: Record) -> Code:
        """The code of the reason why a job waits, without its words."""
        if own := self.own.get(record.id):
            return own[0].code
        if self.head and self.head[0] != record.id:
            return Code.BEHIND
        if record.shape in self.plain:
            return self.shapes[record.shape][0].refusal.code
        if shape := self._of_shape(record):
            return shape[0].code
        return Code.OUTRANKED if record.id in self.outranked else Code.NOT_YET_CONSIDERED

    def _of(self, record: Record) -> Since | None:
        if own := self.own.get(record.id):
            return own
        if self.head and self.head[0] != record.id:
            return behind(self.head[0], self.head[1].detail), self.head[2]
        if shape := self._of_shape(record):
            return shape
        if (place := self.outranked.get(record.id)) is not None:
            told = self.outrankers.refusal(place, self.ids) if self.outrankers else outranked(place + 1, place)
            return told, self.outranked_since[record.id]
        return None


def ends_within(record: Record) -> float:
    """Say within how long a job ends if it starts now, as far as anybody knows."""
    if record.estimate is None:
        return math.inf
    if record.ends_within_seconds is None:  # each cycle asks of all that wait
        record.ends_within_seconds = ends_within_seconds(estimates.estimate_from_wire(record.estimate))
    return record.ends_within_seconds


NOT_YET = Refusal(Code.NOT_YET_CONSIDERED, "the next scheduling cycle will consider it")


def _since(refusal: Refusal, before: Since | None, now: float) -> float:
    return before[1] if before and before[0].code is refusal.code else now
