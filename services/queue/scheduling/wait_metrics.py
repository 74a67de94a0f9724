"""For what jobs wait, and for how long, as metrics: by kind of wait and by tenant."""

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

JOBS = telemetry.gauge("cotenant.queue.jobs", "{job}", "Jobs that have not ended, by phase and kind.")
WAITING = telemetry.gauge("cotenant.queue.waiting", "{job}", "Jobs that wait, by kind of wait and tenant.")
WAITED = telemetry.counter("cotenant.queue.waited", "s", "Time that jobs waited, by kind of wait and tenant.")


class Waits:
    """Counts those who wait, every few seconds; a job that is held back waits too."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._told: Counter[tuple[str, str]] = Counter()
        self._phases: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Count for ever; others go on meanwhile, for there may be very many.

        At the end none are left: what a process told last is told on, and another one counts from now on.
        """
        try:
            while True:
                await asyncio.sleep(TELL_SECONDS)
                await self._count()
        finally:
            self._tell_waits(Counter(), 0.0)
            self._tell_phases(Counter())

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
        self._tell_waits(waits, TELL_SECONDS)
        self._tell_phases(phases)

    def tell(self, seconds: float) -> Counter[tuple[str, str]]:
        """Tell who waits now; they have done so for that long since they were last counted."""
        return self._tell_waits(self._count_waits(self._state.records.values()), seconds)

    def tell_phases(self) -> Counter[tuple[str, str]]:
        """Tell how many jobs there are that have not ended."""
        return self._tell_phases(_count_phases(self._state.records.values()))

    def _count_waits(self, records: Iterable[Record]) -> Counter[tuple[str, str]]:
        return Counter((wait.value, record.spec.tenant) for record in records if (wait := wait_of(self._state, record)))

    def _tell_waits(self, counts: Counter[tuple[str, str]], seconds: float) -> Counter[tuple[str, str]]:
        for kind, tenant in sorted(counts.keys() | self._told.keys()):
            WAITING.set(counts[kind, tenant], wait=kind, tenant=tenant)
            if counts[kind, tenant]:
                WAITED.add(counts[kind, tenant] * seconds, wait=kind, tenant=tenant)
        self._told = counts
        return counts

    def _tell_phases(self, counts: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
        for phase, kind in sorted(counts.keys() | self._phases.keys()):
            JOBS.set(counts[phase, kind], phase=phase, kind=kind)
        self._phases = counts
        return counts


def _count_phases(records: Iterable[Record]) -> Counter[tuple[str, str]]:
    return Counter((record.phase.value, record.spec.kind.value) for record in records if not record.phase.ended)


def wait_of(state: State, record: Record) -> Wait | None:
    """Name the kind of a job's wait; None where it does not wait."""
    phase = record.phase
    if phase is Phase.SUSPENDED:
        return Wait.DEPENDENCY
    return state.wait(record) if phase is Phase.QUEUED else None
