"""Indexes of job ids: all jobs, by tenant, by phase."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from cotenant.core.model.job import JobKind
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.job_record import Record


class JobIndex:
    """Ids of jobs; lookups cost time proportional to the result, not to the number of jobs."""

    def __init__(self) -> None:
        self.all: list[str] = []  # sorted; ids increase with time
        self._tenants: dict[str, list[str]] = {}  # each sorted; a job never changes its tenant
        self._phases: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.counts: Counter[tuple[Phase, JobKind, str]] = Counter()  # by phase, kind and tenant

    def add(self, record: Record) -> None:
        """Add a job."""
        insort(self.all, record.id)
        insort(self._tenants.setdefault(record.spec.tenant, []), record.id)
        self.set_phase(record)

    def add_all(self, records: Sequence[Record]) -> None:
        """Add many jobs at once."""
        touched = {id(self.all): self.all}
        for record in records:
            of_tenant = self._tenants.setdefault(record.spec.tenant, [])
            touched[id(of_tenant)] = of_tenant
            self.all.append(record.id)
            of_tenant.append(record.id)
            self.set_phase(record)
        for ids in touched.values():
            ids.sort()

    def set_phase(self, record: Record) -> None:
        """Index a job under its present phase."""
        phase = record.phase
        if record.indexed_phase is phase:
            return
        if record.indexed_phase is not None:
            self._leave(record, record.indexed_phase)
        self._phases[phase][record.id] = None
        self.counts[phase, record.spec.kind, record.spec.tenant] += 1
        record.indexed_phase = phase

    def _leave(self, record: Record, phase: Phase) -> None:
        del self._phases[phase][record.id]
        group = phase, record.spec.kind, record.spec.tenant
        self.counts[group] -= 1
        if not self.counts[group]:
            del self.counts[group]

    def remove(self, record: Record) -> None:
        """Remove a job."""
        tenant = record.spec.tenant
        for ids in (self.all, self._tenants[tenant]):
            del ids[bisect_left(ids, record.id)]
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        if record.indexed_phase is not None:
            self._leave(record, record.indexed_phase)
            record.indexed_phase = None

    def of_tenants(self, selected: Callable[[str], bool]) -> Sequence[Collection[str]]:
        """Return the job ids of each matching tenant, each list sorted."""
        return [ids for tenant, ids in self._tenants.items() if selected(tenant)]

    def of_phases(self, phases: Iterable[Phase]) -> Sequence[Collection[str]]:
        """Return the job ids in each of some phases, unordered."""
        return [self._phases[phase] for phase in frozenset(phases)]
