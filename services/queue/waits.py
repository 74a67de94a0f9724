"""For what jobs wait, and for how long, as metrics: by kind of wait and by tenant."""

from __future__ import annotations

import asyncio
from collections import Counter

from cotenant import telemetry
from cotenant.core.lifecycle import Phase
from cotenant.core.refusals import Wait
from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State

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
        """Count for ever."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self.tell(TELL_SECONDS)
            self.tell_phases()

    def tell(self, seconds: float) -> Counter[tuple[str, str]]:
        """Tell who waits now; they have done so for that long since they were last counted."""
        counts: Counter[tuple[str, str]] = Counter()
        for record in self._state.records.values():
            if wait := wait_of(self._state, record):
                counts[wait.value, record.spec.tenant] += 1
        for kind, tenant in sorted(counts.keys() | self._told.keys()):
            WAITING.set(counts[kind, tenant], wait=kind, tenant=tenant)
            if counts[kind, tenant]:
                WAITED.add(counts[kind, tenant] * seconds, wait=kind, tenant=tenant)
        self._told = counts
        return counts

    def tell_phases(self) -> Counter[tuple[str, str]]:
        """Tell how many jobs there are that have not ended."""
        counts = Counter(
            (record.phase.value, record.spec.kind.value)
            for record in self._state.records.values()
            if not record.phase.ended
        )
        for phase, kind in sorted(counts.keys() | self._phases.keys()):
            JOBS.set(counts[phase, kind], phase=phase, kind=kind)
        self._phases = counts
        return counts


def wait_of(state: State, record: Record) -> Wait | None:
    """Name the kind of a job's wait; None where it does not wait."""
    if record.phase is Phase.SUSPENDED:
        return Wait.DEPENDENCY
    if record.phase is Phase.QUEUED and not state.gates.open(record):
        return Wait.DEPENDENCY
    return state.refusal(record)[0].wait if record.phase is Phase.QUEUED else None
