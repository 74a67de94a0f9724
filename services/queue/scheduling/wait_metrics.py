"""Metrics of waiting jobs and waiting time, by wait category and tenant."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from cotenant import telemetry
from cotenant.core.model.job_table import Ints
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import Code, Wait
from cotenant.core.model.refusal import wait_of as wait_of_refusal
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record

TELL_SECONDS = 5.0
WAITS = tuple(Wait)

JOBS = telemetry.gauge("cotenant.queue.jobs", "{job}", "Unfinished jobs, by phase and kind.")
WAITING = telemetry.gauge("cotenant.queue.waiting", "{job}", "Waiting jobs, by wait category and tenant.")
WAITED = telemetry.counter("cotenant.queue.waited", "s", "Waiting time of jobs, by wait category and tenant.")


class WaitMetrics:
    """Counts waiting jobs periodically; suspended jobs count too."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._reported: Counter[tuple[str, str]] = Counter()
        self._phases: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Count forever.

        At the end all gauges are set to zero: otherwise their last values would stay exported, beside those of the
        next leader.
        """
        try:
            while True:
                await asyncio.sleep(TELL_SECONDS)
                self.report(TELL_SECONDS)
                self.report_phases()
        finally:
            self._report_waits(Counter(), 0.0)
            self._report_phases(Counter())

    def report(self, seconds: float) -> Counter[tuple[str, str]]:
        """Export the waiting jobs; they have waited for `seconds` since the last count."""
        return self._report_waits(count_waits(self._state), seconds)

    def report_phases(self) -> Counter[tuple[str, str]]:
        """Export the number of unfinished jobs by phase."""
        return self._report_phases(count_phases(self._state))

    def _report_waits(self, counts: Counter[tuple[str, str]], seconds: float) -> Counter[tuple[str, str]]:
        for kind, tenant in sorted(counts.keys() | self._reported.keys()):
            WAITING.set(counts[kind, tenant], wait=kind, tenant=tenant)
            if counts[kind, tenant]:
                WAITED.add(counts[kind, tenant] * seconds, wait=kind, tenant=tenant)
        self._reported = counts
        return counts

    def _report_phases(self, counts: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
        for phase, kind in sorted(counts.keys() | self._phases.keys()):
            JOBS.set(counts[phase, kind], phase=phase, kind=kind)
        self._phases = counts
        return counts


def count_phases(state: State) -> Counter[tuple[str, str]]:
    """Return the numbers of unfinished jobs, by phase and kind."""
    counts: Counter[tuple[str, str]] = Counter()
    for (phase, kind, _), count in state.job_index.counts.items():
        if not phase.ended:
            counts[phase.value, kind.value] += count
    return counts


def count_waits(state: State) -> Counter[tuple[str, str]]:
    """Return the numbers of waiting jobs, by wait category and tenant.

    Jobs that the cycle may start wait for what their equivalence class waits for, and are counted as columns; those
    with a reason of their own are counted again, one by one. All others wait for an external condition.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for (phase, _, tenant), count in state.job_index.counts.items():
        if phase in (Phase.QUEUED, Phase.SUSPENDED):
            counts[Wait.DEPENDENCY.value, tenant] += count
    jobs, tenant_ids = state.table.jobs(0.0), state.tenant_ids
    rows = np.flatnonzero(~jobs.running)
    tenants, beyond = jobs.tenant[rows], state.beyond.marked(jobs.sequence[rows])
    for number, count in zip(*np.unique(tenants, return_counts=True), strict=True):
        counts[Wait.DEPENDENCY.value, tenant_ids[number]] -= int(count)
    of_rows = _waits_by_code(state)[beyond.astype(np.int64), state.table.codes()[rows]]
    own = np.isin(rows, state.rows_apart())
    groups = tenants[~own] * len(WAITS) + of_rows[~own]
    for group, count in zip(*np.unique(groups, return_counts=True), strict=True):
        counts[WAITS[group % len(WAITS)].value, tenant_ids[group // len(WAITS)]] += int(count)
    for row in rows[own].tolist():
        record = state.records[state.table.ids[row]]
        counts[state.wait(record).value, record.spec.tenant] += 1
    return +counts


def _waits_by_code(state: State) -> Ints:
    """Return what jobs of each class wait for, as indexes of `WAITS`: within their tenant's share, and beyond it."""
    head, refused = state.reasons.head, state.reasons.classes.uniform
    codes = [
        Code.BEHIND if head else refused[key].code if key is not None and key in refused else Code.NOT_YET_CONSIDERED
        for key in state.startable.keys
    ]
    waits = [[WAITS.index(wait_of_refusal(code, over_share=over)) for code in codes] for over in (False, True)]
    return np.array(waits, dtype=np.int64)


def wait_of(state: State, record: Record) -> Wait | None:
    """Return the category of a job's wait; None if it does not wait."""
    phase = record.phase
    if phase is Phase.SUSPENDED:
        return Wait.DEPENDENCY
    return state.wait(record) if phase is Phase.QUEUED else None
