"""The result of ordering and admission in one cycle, as columns: with very many jobs, lists of ids cost more than the
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from cotenant.core.model.job_table import Ints
from cotenant.core.policy.protocols import Order, QueuePolicy
from cotenant.core.scheduling.admission import Rules
from cotenant.core.scheduling.cycle import Admission
from cotenant.core.scheduling.fair_share import Standing
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.sequence_set import SequenceSet
from cotenant.services.queue.jobs.transitions import EquivalenceKey
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
class Ranking:
    """The result of one cycle's order and admission."""

    waiting: JobIds
    starts: JobIds
    victims: list[tuple[str, int, int | None]]  # each with the number of starts before it, and its standing
    outranked: tuple[
        Ints, Ints
    ]  # sequence numbers of the jobs that the order leaves out, and their places in `waiting`
    over_limit: JobIds
    beyond: SequenceSet  # waiting jobs beyond their tenant's share
    shares: Mapping[str, Standing]  # of tenants at their fair share
    given_up: JobIds
    ids: list[str]  # by row
    order: Order
    valid_seconds: float
    outrankers: Outrankers | None = None  # of jobs that the order leaves out, if it is enforced
    codes: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the starts' equivalence classes
    keys: Sequence[EquivalenceKey | None] = ()  # by code; jobs with a higher code are in a class of their own
    stoppable: tuple[tuple[str, int], ...] = ()  # preemptible jobs, each with the number of waiting jobs before it


def rank(state: State, policy: QueuePolicy, rules: Rules, now: float) -> Ranking:
    """Order the jobs of the table, and choose which should run and which may be preempted."""
    tenancy = tenancy_of(state)
    count_past_use(state, tenancy, now)
    jobs, ids = state.table.jobs(now), list(state.table.ids)
    order = policy.order(jobs, now)
    admission = Admission(jobs, order, policy, state.capacity, now, rules, tenancy)
    choice, beyond, waits = admission.choice, admission.beyond_share, ~jobs.running
    waiting = choice.ranked[waits[choice.ranked]]
    places = np.empty(len(jobs), dtype=np.int64)
    places[waiting] = np.arange(len(waiting))
    victims = [ids[row] for row in choice.victims.tolist()]
    standings: list[int | None] = [None] * len(victims)
    if choice.standings is not None:
        standings = choice.standings.tolist()
    return Ranking(
        waiting=JobIds(ids, waiting),
        starts=JobIds(ids, choice.starts),
        victims=list(zip(victims, choice.ahead().tolist(), standings, strict=True)),
        outranked=(jobs.sequence[choice.outranked], places[choice.outranked]),
        outrankers=choice.outrankers,
        over_limit=JobIds(ids, choice.over_limit),
        beyond=SequenceSet() if beyond is None else SequenceSet.of(jobs.sequence[beyond & waits]),
        shares=choice.sharing.standings(jobs.running, state.tenant_ids) if choice.sharing else {},
        given_up=JobIds(ids, admission.given_up),
        ids=ids,
        order=order,
        codes=_codes(state)[choice.starts],
        keys=list(state.startable.keys),
        stoppable=tuple((ids[row], before) for row, before in admission.stoppable),
        valid_seconds=min(rules.next_reservation_seconds(jobs, now), admission.valid_seconds),
    )


def _codes(state: State) -> Ints:
    """Return the codes of equivalence classes by row; a job that avoids nodes is a class of its own."""
    codes = state.table.codes().copy()
    avoiding = [state.table.row(job_id) for job_id in state.startable.avoiding if job_id in state.table]
    codes[avoiding] = np.arange(len(avoiding)) + len(state.startable.keys)
    return codes
