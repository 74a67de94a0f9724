"""Why jobs wait, as the last complete cycle found."""

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
from cotenant.services.queue.jobs.transitions import EquivalenceKey, Record

RefusalSince = tuple[Refusal, float]


@dataclass(frozen=True, slots=True)
class SharedRefusal:
    """A refusal of an equivalence class: since when it holds, and the fragmented time of the job that got it."""

    refusal: Refusal
    since: float
    fragmented_seconds: float
    ends_seconds: float = math.inf  # the job would end within this time; reservations depend on it

    def of(self, record: Record) -> Refusal | None:
        """Return the refusal for another job of the class; None if it does not apply to that job's wait."""
        if self.refusal.code is Code.RESERVED and ends_within(record) != self.ends_seconds:
            return None
        longer = record.fragmented_seconds - self.fragmented_seconds
        if -self.refusal.held_seconds <= longer < self.refusal.holds_seconds:
            return self.refusal.after(longer)
        return None


@dataclass(slots=True)
class WaitReasons:
    """The refusals of one cycle, each with the time since when it has been the reason.

    Most waiting jobs are refused together: all of an equivalence class, all behind the head of a strict queue, all
    that the order leaves out. Each such reason is stored once, so that a cycle is cheap no matter how many jobs wait.
    """

    now: float = 0.0
    own: dict[str, RefusalSince] = field(default_factory=dict)
    # by length of wait, where it matters
    classes: dict[EquivalenceKey, list[SharedRefusal]] = field(default_factory=dict)
    # classes with one refusal for all jobs; True if for fragmentation
    uniform: dict[EquivalenceKey, bool] = field(default_factory=dict)
    holds_seconds: float = math.inf  # no reason changes earlier by time alone
    head: tuple[str, Refusal, float] | None = None  # where a strict queue stopped
    outranked: Mapping[str, int] = field(default_factory=dict)  # positions in the order, from 0
    outrankers: Outrankers | None = None  # None if what they leave is not counted
    ids: list[str] = field(default_factory=list)  # by row, as the outrankers refer to them
    outranked_since: Mapping[str, float] = field(default_factory=dict)

    def refuse(self, record: Record, refusal: Refusal, before: WaitReasons) -> None:
        """Store why a job waits; an unchanged reason keeps its time."""
        self.limit_validity(refusal)
        known = before._of(record)  # it may have been shared, such as that of all jobs behind the head
        self.own[record.id] = refusal, known[1] if known and known[0].code is refusal.code else self.now

    def refuse_class(self, record: Record, refusal: Refusal, before: WaitReasons) -> None:
        """Store why the jobs of an equivalence class wait."""
        known = next(
            (
                shared
                for shared in before.classes.get(record.equivalence_key, ())
                if shared.refusal.code is refusal.code
            ),
            None,
        )
        since = known.since if known else self.now
        refusals = self.classes.setdefault(record.equivalence_key, [])
        timeless = math.isinf(refusal.holds_seconds) and math.isinf(refusal.held_seconds)
        if not refusals and timeless and refusal.code is not Code.RESERVED:
            self.uniform[record.equivalence_key] = refusal.code is Code.FRAGMENTED
        refusals.append(SharedRefusal(refusal, since, record.fragmented_seconds, ends_within(record)))
        self.limit_validity(refusal)

    def age(self, record: Record, now: float) -> None:
        """Count the time since this cycle for a job that was refused for fragmentation."""
        fragmented = self.uniform.get(record.equivalence_key) if not self.head and record.id not in self.own else None
        if fragmented is None:
            found = self._of(record)
            fragmented = found is not None and found[0].code is Code.FRAGMENTED
        record.age(now, fragmented=fragmented, since=self.now)

    @property
    def any_fragmented(self) -> bool:
        """Whether any job was refused for fragmentation, or for a reason that changes with time."""
        if any(self.uniform.values()) or self.classes.keys() - self.uniform.keys():
            return True
        return any(refusal.code is Code.FRAGMENTED for refusal, _ in self.own.values())

    def has_place(self, record: Record) -> bool:
        """Return whether a job waits for a place that is chosen already: reserved for it, or being freed for it."""
        own = self.own.get(record.id)
        if own is None or record.phase is not Phase.QUEUED:
            return False
        return own[0].code is Code.MAKING_ROOM or has_reservation(own[0])

    def known(self, record: Record) -> bool:
        """Return whether a refusal of its equivalence class applies to a job."""
        if record.equivalence_key in self.uniform:
            return True
        shape = self._of_shape(record)
        if shape:
            self.limit_validity(shape[0])
        return shape is not None

    def limit_validity(self, refusal: Refusal) -> None:
        """Bound the validity of this cycle by the time at which a refusal changes."""
        self.expire_within(refusal.holds_seconds)

    def expire_within(self, seconds: float) -> None:
        """Bound the validity of this cycle."""
        self.holds_seconds = min(self.holds_seconds, seconds)

    def _of_shape(self, record: Record) -> RefusalSince | None:
        for shared in self.classes.get(record.equivalence_key, ()):
            if (refusal := shared.of(record)) is not None:
                return refusal, shared.since
        return None

    def block_behind(self, record: Record, refusal: Refusal, before: WaitReasons) -> None:
        """Store the job at which a strict queue stopped."""
        same = before.head and before.head[0] == record.id
        self.head = record.id, refusal, before.head[2] if before.head and same else self.now

    def outrank(self, places: Mapping[str, int], before: WaitReasons) -> None:
        """Store the jobs that the order leaves out."""
        since = before.outranked_since
        self.outranked, self.outranked_since = places, {job_id: since.get(job_id, self.now) for job_id in places}

    def of(self, record: Record, now: float) -> RefusalSince | None:
        """Return why a job waits, and since when; None if no cycle has considered it."""
        if found := self._of(record):
            return found[0].after(now - self.now), found[1]
        return None

    def code(self, record: Record) -> Code:
        """Return the code of a job's refusal, without composing its text."""
        if own := self.own.get(record.id):
            return own[0].code
        if self.head and self.head[0] != record.id:
            return Code.BEHIND
        if record.equivalence_key in self.uniform:
            return self.classes[record.equivalence_key][0].refusal.code
        if shape := self._of_shape(record):
            return shape[0].code
        return Code.OUTRANKED if record.id in self.outranked else Code.NOT_YET_CONSIDERED

    def _of(self, record: Record) -> RefusalSince | None:
        if own := self.own.get(record.id):
            return own
        if self.head and self.head[0] != record.id:
            return behind(self.head[0], self.head[1].detail), self.head[2]
        if shape := self._of_shape(record):
            return shape
        if (place := self.outranked.get(record.id)) is not None:
            found = self.outrankers.refusal(place, self.ids) if self.outrankers else outranked(place + 1, place)
            return found, self.outranked_since[record.id]
        return None


def ends_within(record: Record) -> float:
    """Return the seconds within which a job ends if it starts now, by its estimate."""
    if record.estimate is None:
        return math.inf
    if record.ends_within_seconds is None:  # cached: each cycle needs it for all waiting jobs
        record.ends_within_seconds = ends_within_seconds(estimates.estimate_from_wire(record.estimate))
    return record.ends_within_seconds


NOT_YET = Refusal(Code.NOT_YET_CONSIDERED, "the next scheduling cycle will consider it")
