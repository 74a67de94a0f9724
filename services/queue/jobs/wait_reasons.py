"""Why jobs wait, as the last complete cycle found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cotenant.codec import estimates
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import Code, Refusal, behind, outranked
from cotenant.core.scheduling.earliest_start import ends_within_seconds
from cotenant.core.scheduling.equivalence import ClassRefusals
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.core.scheduling.reservations import has_reservation
from cotenant.services.queue.jobs.outranked_jobs import OutrankedJobs
from cotenant.services.queue.jobs.transitions import EquivalenceKey, Record

RefusalSince = tuple[Refusal, float]


@dataclass(slots=True)
class WaitReasons:
    """The refusals of one cycle, each with the time since when it has been the reason.

    Most waiting jobs are refused together: all of an equivalence class, all behind the head of a strict queue, all
    that the order leaves out. Each such reason is stored once, so that a cycle is cheap no matter how many jobs wait.
    """

    now: float = 0.0
    own: dict[str, RefusalSince] = field(default_factory=dict)
    classes: ClassRefusals[EquivalenceKey] = field(default_factory=ClassRefusals)
    classes_since: dict[tuple[EquivalenceKey, Code], float] = field(default_factory=dict)
    holds_seconds: float = math.inf  # no reason changes earlier by time alone
    aged_until: float = 0.0  # until when the time since this cycle was counted for classes
    head: tuple[str, Refusal, float] | None = None  # where a strict queue stopped
    outranked: OutrankedJobs = field(default_factory=OutrankedJobs)
    outrankers: Outrankers | None = None  # None if what they leave is not counted
    ids: list[str] = field(default_factory=list)  # by row, as the outrankers refer to them

    def refuse(self, record: Record, refusal: Refusal, before: WaitReasons) -> None:
        """Store why a job waits; an unchanged reason keeps its time."""
        self.limit_validity(refusal)
        known = before._of(record)  # it may have been shared, such as that of all jobs behind the head
        self.own[record.id] = refusal, known[1] if known and known[0].code is refusal.code else self.now

    def refuse_class(self, record: Record, refusal: Refusal, before: WaitReasons) -> None:
        """Store why the jobs of an equivalence class wait."""
        reason = record.equivalence_key, refusal.code
        self.classes_since[reason] = before.classes_since.get(reason, self.now)
        self.classes.add(record.equivalence_key, refusal, record.fragmented_seconds, ends_within(record))
        self.limit_validity(refusal)

    def age(self, record: Record, now: float) -> None:
        """Count the time since this cycle for a job that was refused for fragmentation."""
        shared = not self.head and record.id not in self.own
        refusal = self.classes.uniform.get(record.equivalence_key) if shared else None
        if refusal is None and (found := self._of(record)):
            refusal = found[0]
        record.age(now, fragmented=refusal is not None and refusal.code is Code.FRAGMENTED, since=self.now)

    def age_classes(self, now: float) -> None:
        """Count the time since this cycle for classes of which all jobs were refused for fragmentation."""
        seconds = max(0.0, now - max(self.now, self.aged_until))
        self.aged_until = max(self.aged_until, now)
        for key, refusal in self.classes.uniform.items() if self.head is None else ():
            if refusal.code is Code.FRAGMENTED:
                key.fragmented_seconds += seconds

    def has_place(self, record: Record) -> bool:
        """Return whether a job waits for a place that is chosen already: reserved for it, or being freed for it."""
        own = self.own.get(record.id)
        if own is None or record.phase is not Phase.QUEUED:
            return False
        return own[0].code is Code.MAKING_ROOM or has_reservation(own[0])

    def known(self, record: Record) -> bool:
        """Return whether a refusal of its equivalence class applies to a job."""
        if record.equivalence_key in self.classes.uniform:
            return True
        if refusal := self._of_class(record):
            self.limit_validity(refusal)
        return refusal is not None

    def limit_validity(self, refusal: Refusal) -> None:
        """Bound the validity of this cycle by the time at which a refusal changes."""
        self.expire_within(refusal.holds_seconds)

    def expire_within(self, seconds: float) -> None:
        """Bound the validity of this cycle."""
        self.holds_seconds = min(self.holds_seconds, seconds)

    def _of_class(self, record: Record) -> Refusal | None:
        bound = ends_within(record) if self.classes.any_reserved else None  # reservations bind the jobs that end late
        return self.classes.get(record.equivalence_key, record.fragmented_seconds, bound)

    def block_behind(self, record: Record, refusal: Refusal, before: WaitReasons) -> None:
        """Store the job at which a strict queue stopped."""
        same = before.head and before.head[0] == record.id
        self.head = record.id, refusal, before.head[2] if before.head and same else self.now

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
        if refusal := self._of_class(record):
            return refusal.code
        return Code.OUTRANKED if record.sequence in self.outranked else Code.NOT_YET_CONSIDERED

    def _of(self, record: Record) -> RefusalSince | None:
        if own := self.own.get(record.id):
            return own
        if self.head and self.head[0] != record.id:
            return behind(self.head[0], self.head[1].detail), self.head[2]
        if refusal := self._of_class(record):
            return refusal, self.classes_since[record.equivalence_key, refusal.code]
        if left_out := self.outranked.get(record.sequence):
            place, since = left_out
            found = self.outrankers.refusal(place, self.ids) if self.outrankers else outranked(place + 1, place)
            return found, since
        return None


def ends_within(record: Record) -> float:
    """Return the seconds within which a job ends if it starts now, by its estimate."""
    if record.estimate is None:
        return math.inf
    if record.ends_within_seconds is None:  # cached: each cycle needs it for all waiting jobs
        record.ends_within_seconds = ends_within_seconds(estimates.estimate_from_wire(record.estimate))
    return record.ends_within_seconds


NOT_YET = Refusal(Code.NOT_YET_CONSIDERED, "the next scheduling cycle will consider it")
