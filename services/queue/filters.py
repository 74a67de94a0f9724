"""Which jobs a caller means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

from cotenant.rpc import translate
from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State
from cotenant.services.queue.views import View
from cotenant.v1 import job_service_pb2 as pb

Holds = Callable[[Record], bool]


class Filter:
    """Conditions that must all hold, of jobs that the caller may see."""

    def __init__(self, message: pb.JobFilter, view: View) -> None:
        self._array_id = message.array_id
        self._ids = frozenset(message.ids)
        self._conditions = list(_conditions(message, view))
        self.everything = not self._conditions
        raw = message.SerializeToString(deterministic=True) + view.key.encode()
        self.digest = "" if self.everything else hashlib.blake2b(raw, digest_size=8).hexdigest()

    def ids(self, state: State) -> Sequence[str]:
        """Ids of the jobs that are meant, sorted."""
        found: Sequence[str] = state.ids
        if self._ids:
            found = sorted(self._ids & state.records.keys())
        elif self._array_id:
            array = state.gates.arrays.get(self._array_id)
            found = sorted(array.ids if array else ())
        records = state.records
        for holds in self._conditions:  # one after the other over all jobs, which may be very many
            found = [job_id for job_id in found if holds(records[job_id])]
        return found

    def takes(self, record: Record) -> bool:
        """Whether a job is meant."""
        return all(holds(record) for holds in self._conditions)


def _conditions(wanted: pb.JobFilter, view: View) -> Iterator[Holds]:
    """Give the conditions that there are, the cheap ones first."""
    if not view.everything:
        yield view.sees
    if wanted.tenant:
        tenant = wanted.tenant
        yield lambda record: record.spec.tenant == tenant
    if wanted.queue:
        queue = wanted.queue
        yield lambda record: record.spec.queue == queue
    if wanted.name:
        name = wanted.name
        yield lambda record: record.spec.name == name
    if wanted.ids:
        ids = frozenset(wanted.ids)
        yield lambda record: record.id in ids
    if wanted.array_id:
        array_id = wanted.array_id
        yield lambda record: record.spec.array_task is not None and record.spec.array_task.array_id == array_id
    if wanted.phases:
        known = translate.PHASES.names
        phases = tuple(translate.PHASES.from_wire(phase) for phase in wanted.phases if phase in known)
        yield lambda record: record.phase in phases
    if wanted.labels:
        labels = frozenset(wanted.labels.items())
        yield lambda record: labels.issubset(record.spec.labels)
    if wanted.node_id:
        node_id = wanted.node_id
        yield lambda record: any(part.node_id == node_id for part in record.job.attempt.allocations)


def folded(ids: Sequence[str], state: State) -> Sequence[str]:
    """Keep one job of each array, and all that are of none."""
    seen: set[str] = set()
    kept = []
    for job_id in ids:
        task = state.records[job_id].spec.array_task
        if task is None or task.array_id not in seen:
            kept.append(job_id)
        if task:
            seen.add(task.array_id)
    return kept
