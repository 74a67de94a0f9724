"""Why each waiting job waits, for whoever listens: made of what the cycle was told, and else by counting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.job_table import Ints, Jobs
from cotenant.core.model.refusal import Code, Refusal, behind, outranked
from cotenant.core.placement.unschedulable import no_place
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.scheduling.admission import Choice
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.simulator.free_resources import Free
from cotenant.simulator.job import Life, Shape
from cotenant.simulator.recording.events import Reason, Story, counted, reason_of


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a cycle chose, by the sequences of the jobs, for the rows of the table change."""

    ranked: Ints
    starts: Ints
    outrankers: Outrankers | None
    ids: tuple[str, ...]  # by row, as the outrankers name them

    @classmethod
    def of(cls, choice: Choice, jobs: Jobs, ids: Sequence[str]) -> Chosen:
        """Take note of a choice among jobs."""
        return cls(jobs.sequence[choice.ranked], jobs.sequence[choice.starts], choice.outrankers, tuple(ids))

    def outranked(self, sequence: int) -> Refusal:
        """Say who goes before a job that waits, since this cycle or before."""
        at = int(np.flatnonzero(self.ranked == sequence)[0])
        return self.outrankers.refusal_at(at, self.ids) if self.outrankers else outranked(at + 1, at)


@dataclass(frozen=True, slots=True)
class Listening:
    """Tells a story why jobs wait after a cycle. `over_share` are those whose tenant has what it is due."""

    story: Story
    lives: Mapping[int, Life]
    ledger: Ledger
    free: Free
    over_share: Collection[int]

    def by_shape(self, waiting: Iterable[Shape], now: float) -> None:
        """All gangs of one shape wait for one reason."""
        self.story.reasons_of_shapes(waiting, self._why_shape, now)

    def by_job(self, refusals: Mapping[str, Refusal], now: float) -> None:
        """Gangs of one shape may wait for different reasons; those that were told one each have it in `refusals`."""
        known: dict[tuple[int, bool], Reason] = {}  # of all others of one shape, within their share or beyond it

        def why(life: Life) -> Reason:
            if asked := refusals.get(life.job.id):
                return self._of(life, reason_of(asked))
            alike = life.shape.code, life.sequence in self.over_share
            if alike not in known:
                known[alike] = self._of(life, self._why_shape(life.shape))
            return known[alike]

        self.story.reasons_of_jobs([life for life in self.lives.values() if life.meter], why, Code.CAPACITY, now)

    def in_order(self, queue: QueuePolicy, refusals: Mapping[str, Refusal], choice: Chosen | None, now: float) -> None:
        """Most jobs wait because of others before them; `choice` is what was chosen, if anything was."""
        most = Code.OUTRANKED if queue.preemptive else Code.BEHIND
        if choice is None:  # nothing was decided, for what is free suffices for none of those who wait
            self.story.reasons_of_jobs((), lambda life: self._too_little(life.shape), most, now)
            return
        head = next((life for life in map(self.lives.__getitem__, choice.starts.tolist()) if life.meter), None)
        asked = {
            life.sequence: self._of(life, reason_of(refusals[life.job.id]))
            for life in self.lives.values()
            if life.job.id in refusals
        }
        if queue.strict and head:
            asked.setdefault(head.sequence, self._of(head, self._why_shape(head.shape)))

        def why(life: Life) -> Reason:
            if life.sequence in asked:
                return asked[life.sequence]
            if most is Code.BEHIND and head:
                told = Reason((Code.BEHIND,), lambda: behind(head.job.id, asked[head.sequence].words().detail))
            else:
                told = Reason((Code.OUTRANKED,), lambda: choice.outranked(life.sequence))
            return self._of(life, told)

        beyond = [sequence for sequence in sorted(self.over_share) if sequence not in asked]
        self.story.reasons_of_jobs([self.lives[sequence] for sequence in (*asked, *beyond)], why, most, now)

    def _of(self, life: Life, reason: Reason) -> Reason:
        return reason.beyond_share() if life.sequence in self.over_share else reason

    def _why_shape(self, shape: Shape) -> Reason:
        """Say why a gang of this shape has no place, by what it was told or by counting."""
        if shape.refusal and (shape.refusal.code is Code.QUOTA or not self.free.lacks(shape)):
            return reason_of(shape.refusal)
        return self._too_little(shape)

    def _too_little(self, shape: Shape) -> Reason:
        return counted(self.free.lacking(shape), lambda: no_place(shape.gang("the gang"), self.ledger))
