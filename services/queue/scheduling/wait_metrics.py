"""Metrics of waiting jobs and waiting time, by wait category and tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from cotenant import telemetry
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import Wait
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record

TELL_SECONDS = 5.0

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
        """Count forever; yields to other tasks, for there may be very many jobs.

        At the end all gauges are set to zero: otherwise their last values would stay exported, beside those of the
        next leader.
        """
        try:
            while True:
                await asyncio.sleep(TELL_SECONDS)
                await self._count()
        finally:
            self._report_waits(Counter(), 0.0)
            self._report_phases(Counter())

    async def _count(self) -> None:
        waits: Counter[tuple[str, str]] = Counter()
        phases: Counter[tuple[str, str]] = Counter()
        slices = Slices()
        for record in list(self._state.records.values()):
            phase = record.phase
            if not phase.ended:
                phases[phase.value, record.spec.kind.value] += 1
                if wait := wait_of(self._state, record):
                    waits[wait.value, record.spec.tenant] += 1
            if slices.due():
                await asyncio.sleep(0)
        self._report_waits(waits, TELL_SECONDS)
        self._report_phases(phases)

    def report(self, seconds: float) -> Counter[tuple[str, str]]:
        """Export the waiting jobs; they have waited for `seconds` since the last count."""
        return self._report_waits(self._count_waits(self._state.records.values()), seconds)

    def report_phases(self) -> Counter[tuple[str, str]]:
        """Export the number of unfinished jobs by phase."""
        return self._report_phases(_count_phases(self._state.records.values()))

    def _count_waits(self, records: Iterable[Record]) -> Counter[tuple[str, str]]:
        return Counter((wait.value, record.spec.tenant) for record in records if (wait := wait_of(self._state, record)))

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


def _count_phases(records: Iterable[Record]) -> Counter[tuple[str, str]]:
    return Counter((record.phase.value, record.spec.kind.value) for record in records if not record.phase.ended)


def wait_of(state: State, record: Record) -> Wait | None:
    """Return the category of a job's wait; None if it does not wait."""
    phase = record.phase
    if phase is Phase.SUSPENDED:
        return Wait.DEPENDENCY
    return state.wait(record) if phase is Phase.QUEUED else None
