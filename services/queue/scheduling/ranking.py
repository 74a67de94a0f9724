"""The result of ordering and admission in one cycle, as columns: with very many jobs, lists of ids cost more than the
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from cotenant.core.model.job_table import Flags, Ints
from cotenant.core.policy.protocols import Order, QueuePolicy
from cotenant.core.scheduling.admission import Rules
from cotenant.core.scheduling.cycle import Admission
from cotenant.core.scheduling.fair_share import Standing
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.scheduling.tenant_usage import count_past_use, tenancy_of

NAMED_AT_ONCE = 1_024


class JobIds(Sequence[str]):
    """Job ids by table rows, looked up only on access."""

    def __init__(self, ids: Sequence[str], rows: Ints) -> None:
        self._ids, self._rows = ids, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        ids = self._ids
        for start in range(0, len(self._rows), NAMED_AT_ONCE):
            for row in self._rows[start : start + NAMED_AT_ONCE].tolist():
                yield ids[row]

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> JobIds: ...
    def __getitem__(self, at: int | slice) -> str | JobIds:
        if isinstance(at, slice):
            return JobIds(self._ids, self._rows[at])
        return self._ids[int(self._rows[at])]

    def place(self, job_id: str) -> int | None:
        """Return the position of a job; None if it is missing."""
        try:
            row = self._ids.index(job_id)
        except ValueError:
            return None
        found = np.flatnonzero(self._rows == row)
        return int(found[0]) if len(found) else None


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """A set of job sequence numbers."""

    least: int = 0
    marks: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    @classmethod
    def of(cls, sequence: Ints) -> SequenceSet:
        """Return the set of some sequence numbers."""
        if not len(sequence):
            return cls()
        least = int(sequence.min())
        marks = np.zeros(int(sequence.max()) - least + 1, dtype=np.bool_)
        marks[sequence - least] = True
        return cls(least, marks)

    def __contains__(self, sequence: object) -> bool:
        assert isinstance(sequence, int)
        place = sequence - self.least
        return 0 <= place < len(self.marks) and bool(self.marks[place])


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of one cycle's order and admission."""

    waiting: JobIds
    starts: JobIds
    victims: list[tuple[str, int, int | None]]  # each with the number of starts before it, and its standing
    outranked: JobIds
    over_limit: JobIds
    beyond: SequenceSet  # waiting jobs beyond their tenant's share
    shares: Mapping[str, Standing]  # of tenants at their fair share
    given_up: JobIds
    ids: list[str]  # by row
    order: Order
    valid_seconds: float
    outrankers: Outrankers | None = None  # of jobs that the order leaves out, if it is enforced
    stoppable: tuple[tuple[str, int], ...] = ()  # preemptible jobs, each with the number of waiting jobs before it


def rank(state: State, policy: QueuePolicy, rules: Rules, now: float) -> Ranking:
    """Order the jobs of the table, and choose which should run and which may be preempted."""
    tenancy = tenancy_of(state)
    count_past_use(state, tenancy, now)
    jobs, ids = state.table.jobs(now), list(state.table.ids)
    order = policy.order(jobs, now)
    admission = Admission(jobs, order, policy, state.capacity, now, rules, tenancy)
    choice, beyond, waits = admission.choice, admission.beyond_share, ~jobs.running
    victims = [ids[row] for row in choice.victims.tolist()]
    standings: list[int | None] = [None] * len(victims)
    if choice.standings is not None:
        standings = choice.standings.tolist()
    return Ranking(
        waiting=JobIds(ids, choice.ranked[waits[choice.ranked]]),
        starts=JobIds(ids, choice.starts),
        victims=list(zip(victims, choice.ahead().tolist(), standings, strict=True)),
        outranked=JobIds(ids, choice.outranked),
        outrankers=choice.outrankers,
        over_limit=JobIds(ids, choice.over_limit),
        beyond=SequenceSet() if beyond is None else SequenceSet.of(jobs.sequence[beyond & waits]),
        shares=choice.sharing.standings(jobs.running, state.tenant_ids) if choice.sharing else {},
        given_up=JobIds(ids, admission.given_up),
        ids=ids,
        order=order,
        stoppable=tuple((ids[row], before) for row, before in admission.stoppable),
        valid_seconds=min(rules.next_reservation_seconds(jobs, now), admission.valid_seconds),
    )
