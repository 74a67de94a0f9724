"""Which jobs a caller means."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State
from cotenant.services.queue.views import View
from cotenant.v1 import job_service_pb2 as pb


class Filter:
    """Conditions that must all hold, of jobs that the caller may see."""

    def __init__(self, message: pb.JobFilter, view: View) -> None:
        self._message, self._view = message, view
        self._phases = frozenset(message.phases)
        self._labels = dict(message.labels)
        self._ids = frozenset(message.ids)
        self.everything = message.ByteSize() == 0 and view.everything
        raw = message.SerializeToString(deterministic=True) + view.key.encode()
        self.digest = "" if self.everything else hashlib.blake2b(raw, digest_size=8).hexdigest()

    def ids(self, state: State) -> Sequence[str]:
        """Ids of the jobs that are meant, sorted."""
        if self._ids:
            return sorted(i for i in self._ids if i in state.records and self.takes(state.records[i]))
        if self._message.array_id:
            array = state.gates.arrays.get(self._message.array_id)
            return sorted(job_id for job_id in (array.ids if array else ()) if self.takes(state.records[job_id]))
        return [job_id for job_id in state.ids if self.takes(state.records[job_id])]

    def takes(self, record: Record) -> bool:
        """Whether a job is meant."""
        job, wanted = record.job, self._message
        return (
            self._view.sees(record)
            and (not self._phases or job.phase in self._phases)
            and (not self._ids or job.id in self._ids)
            and (not wanted.tenant or record.spec.tenant == wanted.tenant)
            and (not wanted.queue or record.spec.queue == wanted.queue)
            and (not wanted.array_id or job.spec.array_task.array_id == wanted.array_id)
            and (not wanted.name or record.spec.name == wanted.name)
            and all(job.spec.labels.get(key) == value for key, value in self._labels.items())
            and (not wanted.node_id or any(part.node_id == wanted.node_id for part in job.attempt.allocations))
        )


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
