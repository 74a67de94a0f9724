"""Job filters: which jobs a call selects."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal

from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.job_arrays import array_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_service_pb2 as pb

SLICE = 2_000  # jobs checked before other calls get a turn; some milliseconds
ARRAY_WIDE = frozenset({"tenant", "array", "own"})  # conditions that hold for all jobs of an array, or for none

# conditions of a filter that may cease to hold for a job, so that a watch has to tell
CHANGING = ("phases", "name", "labels", "node_id", "ended_since", "ended_before")

Condition = Callable[[Record], bool]


class JobFilter:
    """Conditions that must all hold for jobs that the caller may see."""

    def __init__(self, message: pb.JobFilter, view: View) -> None:
        self._message, self._view = message, view
        self._ids = frozenset(message.ids)
        self._conditions = list(_conditions(message, view))
        self.by_phase_only = {of for of, _ in self._conditions} <= ARRAY_WIDE | {"phase"}
        self.matches_all = not self._conditions
        raw = message.SerializeToString(deterministic=True) + view.key.encode()
        raw += view.caller_name.encode() if message.own_only else b""
        self.may_unmatch = any(field.name in CHANGING for field, _ in message.ListFields())
        self.digest = "" if self.matches_all else hashlib.blake2b(raw, digest_size=8).hexdigest()

    def without_changing(self) -> JobFilter:
        """Return the filter without conditions that may cease to hold for a job."""
        message = pb.JobFilter()
        message.CopyFrom(self._message)
        for field in CHANGING:
            message.ClearField(field)
        return JobFilter(message, self._view)

    def may_have_matched(self, job_id: str, tenant: str) -> bool:
        """Return whether a job of which only id and tenant are still known may have matched."""
        message, array_id = self._message, array_of(job_id)
        return (
            self._tenant_matches(tenant)
            and (not self._ids or job_id in self._ids)
            and message.array_id in ("", array_id)
            and not (message.standalone_only and array_id)
        )

    async def matching_ids(self, state: State) -> Sequence[str]:
        """Return the ids of the matching jobs, sorted. Yields to other calls while it looks."""
        parts, by = self._narrowest(state)
        matching_ids = (
            parts[0] if len(parts) == 1 and isinstance(parts[0], list) else sorted(chain.from_iterable(parts))
        )
        records = state.records
        for of, holds in self._conditions:  # condition by condition over all jobs: there may be very many
            if of == by:
                continue
            kept: list[str] = []
            before, matching_ids = list(matching_ids), kept
            for start in range(0, len(before), SLICE):
                if start:
                    await asyncio.sleep(0)
                for job_id in before[start : start + SLICE]:
                    record = records.get(job_id)  # None: deleted in between
                    if record is not None and holds(record):
                        kept.append(job_id)
        return matching_ids

    def array_ids(self, state: State) -> Collection[str]:
        """Return the ids of all arrays of which jobs may match."""
        arrays, array_id = state.dependency_gate.arrays, self._message.array_id
        if self._message.standalone_only:
            return ()
        if self._ids:
            named = {array_of(job_id) for job_id in self._ids}
            return [one for one in named if one in arrays and array_id in ("", one)]
        if array_id:
            return [array_id] if array_id in arrays else []
        return arrays.keys()

    def matches_array(self, task: Record, counts: Mapping[Phase, int]) -> bool:
        """Return whether jobs of an array may match, by one of them and the counts by phase."""
        if self._message.phases and not any(counts.get(phase) for phase in _phases(self._message)):
            return False
        return all(holds(task) for of, holds in self._conditions if of in ARRAY_WIDE)

    def _narrowest(self, state: State) -> tuple[Sequence[Collection[str]], str]:
        """Return the smallest listed set that contains all matching jobs, and the condition it already satisfies."""
        message, job_index = self._message, state.job_index
        if self._ids:
            return [self._ids & state.records.keys()], "ids"
        if message.array_id:
            array = state.dependency_gate.arrays.get(message.array_id)
            return [array.ids if array else ()], "array"
        ways: list[tuple[Sequence[Collection[str]], str]] = []  # of equally small sets the first is used
        if message.tenant or not self._view.sees_all:
            ways.append((job_index.of_tenants(self._tenant_matches), "tenant"))
        if message.phases:
            ways.append((job_index.of_phases(_phases(message)), "phase"))
        ways.append(([job_index.all], ""))
        return min(ways, key=lambda way: sum(map(len, way[0])))

    def _tenant_matches(self, tenant: str) -> bool:
        return self._message.tenant in ("", tenant) and self._view.sees_tenant(tenant)

    def matches(self, record: Record) -> bool:
        """Return whether a job matches."""
        return all(holds(record) for _, holds in self._conditions)


def _conditions(wanted: pb.JobFilter, view: View) -> Iterator[tuple[str, Condition]]:
    """Yield the conditions with the field that each tests, cheap ones first."""
    if not view.sees_all:
        yield "tenant", view.sees
    if wanted.tenant:
        tenant = wanted.tenant
        yield "tenant", lambda record: record.spec.tenant == tenant
    if wanted.own_only:
        yield "own", lambda record: record.job.submitter == view.caller_name
    if wanted.queue:
        queue = wanted.queue
        yield "queue", lambda record: record.spec.queue == queue
    if wanted.name:
        name = wanted.name
        yield "name", lambda record: record.spec.name == name
    if wanted.ids:
        ids = frozenset(wanted.ids)
        yield "ids", lambda record: record.id in ids
    if wanted.array_id:
        array_id = wanted.array_id
        yield (
            "array",
            lambda record: record.spec.array_task is not None and record.spec.array_task.array_id == array_id,
        )
    if wanted.standalone_only:
        yield "standalone", lambda record: record.spec.array_task is None
    if wanted.phases:
        phases = _phases(wanted)
        yield "phase", lambda record: record.phase in phases
    yield from _time_conditions(wanted)
    if wanted.labels:
        labels = frozenset(wanted.labels.items())
        yield "labels", lambda record: labels.issubset(record.spec.labels)
    if wanted.node_id:
        node_id = wanted.node_id
        yield "node", lambda record: any(part.node_id == node_id for part in record.job.attempt.allocations)


def _time_conditions(wanted: pb.JobFilter) -> Iterator[tuple[str, Condition]]:
    if wanted.HasField("created_since") or wanted.HasField("created_before"):
        since, before = _interval(wanted, "created")
        yield "created", lambda record: since <= record.created_seconds < before
    if wanted.HasField("ended_since") or wanted.HasField("ended_before"):
        first, end = _interval(wanted, "ended")
        yield "ended", lambda record: record.phase.ended and first <= record.ended_seconds < end


def _interval(wanted: pb.JobFilter, what: Literal["created", "ended"]) -> tuple[float, float]:
    """Return the times between which something has to happen, in unix seconds; the second is excluded."""
    since, before = getattr(wanted, f"{what}_since"), getattr(wanted, f"{what}_before")
    return (
        specs.seconds(since) if wanted.HasField(f"{what}_since") else -math.inf,  # type: ignore[arg-type]  # both exist
        specs.seconds(before) if wanted.HasField(f"{what}_before") else math.inf,  # type: ignore[arg-type]  # likewise
    )


def _phases(wanted: pb.JobFilter) -> tuple[Phase, ...]:
    known = specs.PHASES.names
    return tuple(specs.PHASES.from_wire(phase) for phase in wanted.phases if phase in known)
