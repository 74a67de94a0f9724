"""The order in which jobs are listed: all of them, those of a tenant, those in a phase."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence

from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.job_record import Record


class Listing:
    """Ids of jobs, found in a time that grows with how many are meant and not with how many there are."""

    def __init__(self) -> None:
        self.all: list[str] = []  # sorted; ids rise with time
        self._tenants: dict[str, list[str]] = {}  # each sorted; a job stays with its tenant
        self._phases: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}

    def add(self, record: Record) -> None:
        """Take in a job."""
        insort(self.all, record.id)
        insort(self._tenants.setdefault(record.spec.tenant, []), record.id)
        self.place(record)

    def add_all(self, records: Sequence[Record]) -> None:
        """Take in many jobs at once."""
        touched = {id(self.all): self.all}
        for record in records:
            of_tenant = self._tenants.setdefault(record.spec.tenant, [])
            touched[id(of_tenant)] = of_tenant
            self.all.append(record.id)
            of_tenant.append(record.id)
            self.place(record)
        for ids in touched.values():
            ids.sort()

    def place(self, record: Record) -> None:
        """Note which phase a job is in by now."""
        phase = record.phase
        if record.listed is phase:
            return
        if record.listed is not None:
            del self._phases[record.listed][record.id]
        self._phases[phase][record.id] = None
        record.listed = phase

    def remove(self, record: Record) -> None:
        """Forget a job."""
        tenant = record.spec.tenant
        for ids in (self.all, self._tenants[tenant]):
            del ids[bisect_left(ids, record.id)]
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        if record.listed is not None:
            del self._phases[record.listed][record.id]
            record.listed = None

    def of_tenants(self, meant: Callable[[str], bool]) -> Sequence[Collection[str]]:
        """Ids of the jobs of each tenant that is meant, each sorted."""
        return [ids for tenant, ids in self._tenants.items() if meant(tenant)]

    def of_phases(self, phases: Iterable[Phase]) -> Sequence[Collection[str]]:
        """Ids of the jobs in each of some phases, in no order."""
        return [self._phases[phase] for phase in frozenset(phases)]
