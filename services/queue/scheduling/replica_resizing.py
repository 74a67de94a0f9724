"""Elastic jobs in the live queue: how many replicas the allocator gives them, as in simulations.

Before each cycle the allocator is asked about all elastic jobs, running and waiting. A waiting job waits with the
number with which it would start. A running job whose number changes is stopped by placement once it has places for it,
and goes on from its checkpoint: `services.placement.planning.replica_resizes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import grpc
import structlog

from cotenant import fail_points, telemetry
from cotenant.codec import errors, refusals
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.limits import REPLICA_RESIZES_MAX
from cotenant.core.model.resources import NOTHING, Resources, added
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement import unschedulable
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.sizing.elastic import ElasticJob, ResizesReplicas, TargetsFailed, ask_targets
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.services.queue.attempts.attempt_watcher import AttemptWatcher
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.scheduling.candidates import candidate_of, with_elastic_replicas
from cotenant.services.queue.scheduling.ranking import Ranking
from cotenant.services.queue.scheduling.replica_figures import elastic_job, kept_because, replicas_in_words
from cotenant.services.queue.scheduling.tenant_usage import headroom_of
from cotenant.v1 import job_pb2

log = structlog.get_logger()

WAITING_MAX = 500  # waiting elastic jobs that share the room, the first in the queue's order
RIGID_MAX = 1_000  # waiting jobs that are not elastic whose needs are taken out of the room
LOOK_SECONDS_MIN = 1.0  # between two questions that only time causes
FAILED_SECONDS = 5.0  # until an allocator that failed is asked again
CALL_SECONDS = 10.0

RESIZES = telemetry.counter("cotenant.queue.replica_resizes", "{job}", "Elastic jobs resized, by direction.")
KEPT = telemetry.counter("cotenant.queue.replica_resizes_refused", "{job}", "Resizes that found no place, by reason.")
FAILED = telemetry.counter(
    "cotenant.queue.targets_failed", "{cycle}", "Cycles in which the allocator's numbers of replicas were unusable."
)


@dataclass(slots=True)
class _Members:
    """The elastic jobs of one question: those that run, those that wait, and what the next generations will hold."""

    running: list[Record] = field(default_factory=list)
    waiting: list[Record] = field(default_factory=list)
    coming: list[Resources] = field(default_factory=list)


class ReplicaResizing:
    """Asks the allocator for the replicas of elastic jobs, and has placement resize those that run."""

    def __init__(
        self,
        state: State,
        attempt_watcher: AttemptWatcher,
        allocator: CpuAllocator | None,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        seed: int = 0,
        term: int = 0,
    ) -> None:
        self.allocator = allocator if isinstance(allocator, ResizesReplicas) else None
        self._name = allocator.name if allocator else ""
        self._state, self._watcher, self._placement, self._seed, self._term = (
            state, attempt_watcher, placement, seed, term
        )  # fmt: skip
        self._ordered: dict[str, tuple[int, int]] = {}  # attempts that placement was told to stop, with the new number
        self._connections = 0  # of the watch of attempts, for which that is known
        self._largest: dict[str, tuple[object, int]] = {}  # by job: shapes, and what could ever run on them
        if self.allocator is None:
            state.keeps_replicas = f"the allocator {self._name or 'of this mesh'} resizes no running jobs"

    async def settle(self, rank: Callable[[float], Ranking], now: float) -> float:
        """Set the number of replicas of all elastic jobs; returns for how many seconds it is valid by itself."""
        if self.allocator is None or not self._state.resizable:
            return math.inf
        ranking = rank(now) if self._state.table.waits() else None
        members = self._members(ranking)
        headroom = headroom_of(self._state)
        jobs = {
            record.id: elastic_job(
                record, self._most(record, headroom), self._state.resize_meter.expected(record.spec), now
            )
            for record in (*members.running, *members.waiting)
        }
        free = self._state.capacity - self._state.table.held() - added([NOTHING, *members.coming])
        rigid = list(self._rigid_needs(ranking))
        try:
            targets = ask_targets(self.allocator, list(jobs.values()), free, rigid, now)
        except TargetsFailed as error:
            log.error("targets_failed", policy=self._name, jobs=len(jobs), error=str(error))
            FAILED.add(policy=self._name)
            return FAILED_SECONDS
        for record in members.waiting:
            self._state.choose_replicas(record, targets[record.id] or jobs[record.id].range.least)
        self._explain(members.running, jobs, free)
        await self._resize(members.running, jobs, targets, now)
        return self._valid_seconds(jobs.values()) if jobs else math.inf

    def refused(self, record: Record) -> bool:
        """Let a waiting job that found no room ask for fewer replicas; returns whether it may."""
        if self.allocator is None or record.replicas_chosen is None:
            return False
        role = record.spec.roles[record.spec.elastic_role or 0]
        least = role.elastic.least if role.elastic else role.replicas
        if record.replicas_chosen <= least:
            return False
        record.replicas_most = (record.replicas_chosen + least) // 2
        return True

    # What the allocator is shown -----------------------------------------------------------------------------

    def _members(self, ranking: Ranking | None) -> _Members:
        if self._connections != self._watcher.connections:
            self._connections = self._watcher.connections
            self._ordered.clear()  # the snapshot says which attempts are stopping
        members, places = _Members(), {}
        if ranking:
            left_out = set(ranking.over_limit)
            places = {job_id: place for place, job_id in enumerate(ranking.waiting) if job_id not in left_out}
        waiting: list[tuple[int, Record]] = []
        for record in self._state.resizable.values():
            if record.id in self._watcher.ending or record.wish or record.in_pre_run:
                continue
            if (coming := self._next_replicas(record)) is not None:
                members.coming.append(_needs(record) * coming)
            elif record.phase is Phase.RUNNING:
                if why := kept_because(record):
                    record.resize_note = why
                else:
                    members.running.append(record)
            elif record.id in places:
                waiting.append((places[record.id], record))
        members.waiting = [record for _, record in islice(sorted(waiting, key=lambda one: one[0]), WAITING_MAX)]
        return members

    def _next_replicas(self, record: Record) -> int | None:
        """Return the replicas that a job in a resize will hold, less those that are counted; None without a resize."""
        ordered = self._ordered.get(record.id)
        if ordered and record.phase is Phase.RUNNING and record.attempt_number == ordered[0]:
            return ordered[1] - record.elastic_replicas
        self._ordered.pop(record.id, None)
        attempt = record.job.attempt
        if attempt.stop_reason != job_pb2.STOP_REASON_RESIZED:
            return None
        if record.phase is Phase.STOPPING:
            return attempt.next_replicas
        if record.phase is Phase.QUEUED and record.replicas_chosen is None and record.id in self._state.migrating:
            return attempt.next_replicas
        return None

    def _most(self, record: Record, headroom: Headroom) -> int:
        """Return the largest number of replicas that nodes and the tenant's limits allow."""
        role = record.spec.roles[record.spec.elastic_role or 0]
        assert role.elastic
        most = self._largest_ever(record)
        if record.replicas_most is not None and record.phase is Phase.QUEUED:
            most = min(most, record.replicas_most)
        have = record.elastic_replicas if record.phase is Phase.RUNNING else 0
        rigid = [one for one in record.spec.roles if one is not role]
        others = 0 if have else sum(one.request.gpu_milli * one.replicas for one in rigid)
        needs = role.request.resources(auto=1)
        while most > role.elastic.least and not headroom.allows(
            record.spec.tenant, others + needs.gpu_milli * (most - have), needs.cores * (most - have)
        ):
            most -= 1
        return most

    def _largest_ever(self, record: Record) -> int:
        shapes, role = self._state.shapes, record.spec.roles[record.spec.elastic_role or 0]
        assert role.elastic
        known = self._largest.get(record.id)
        if known is None or known[0] is not shapes:
            counts = range(role.elastic.most, role.elastic.least, -1)
            fits = (
                count
                for count in counts
                if not unschedulable.never_fits(
                    record.spec.with_elastic_replicas(count), shapes, elastic=self._state.elastic
                )
            )
            known = self._largest[record.id] = shapes, next(fits, role.elastic.least)
            for job_id in [one for one in self._largest if one not in self._state.resizable]:
                del self._largest[job_id]
        return known[1]

    def _rigid_needs(self, ranking: Ranking | None) -> Iterator[Resources]:
        """Yield what waiting jobs that are not elastic need, in the queue's order, without those over a limit."""
        if ranking is None:
            return
        left_out, records = set(ranking.over_limit), self._state.records
        every = (records[job_id] for job_id in ranking.waiting if job_id not in left_out and job_id in records)
        rigid = (record for record in every if not record.spec.elastic)
        for record in islice(rigid, RIGID_MAX):
            yield record.requested_spec.resources(auto=1)

    def _valid_seconds(self, jobs: Iterable[ElasticJob]) -> float:
        """Return when the first running job may change again, or else when all may."""
        assert self.allocator
        interval = self.allocator.resize_interval_seconds
        left = [interval - job.settled_seconds for job in jobs if job.replicas and job.settled_seconds < interval]
        return max(LOOK_SECONDS_MIN, min(left, default=interval))

    def _explain(self, running: Sequence[Record], jobs: Mapping[str, ElasticJob], free: Resources) -> None:
        for record in running:
            role = record.spec.roles[record.spec.elastic_role or 0]
            assert role.elastic
            job = jobs[record.id]
            note = replicas_in_words(
                job,
                role.elastic,
                fits=job.needs.fits(free),
                interval_seconds=self.allocator.resize_interval_seconds if self.allocator else 0.0,
            )
            record.resize_note = f"{note}; {self._state.resize_meter.expected(record.spec)}"

    # Resizes -------------------------------------------------------------------------------------------------

    async def _resize(
        self, running: Sequence[Record], jobs: Mapping[str, ElasticJob], targets: Mapping[str, int], now: float
    ) -> None:
        """Have placement resize the running jobs whose number changes, those that shrink first."""
        changes = {one.id: targets[one.id] - jobs[one.id].replicas for one in running}
        changed = sorted((one for one in running if changes[one.id]), key=lambda one: (changes[one.id], one.sequence))
        if not (changed := changed[:REPLICA_RESIZES_MAX]):
            return
        request = placement_pb2.ResizeReplicasRequest(seed=self._seed, term=self._term)
        for record in changed:
            request.resizes.append(_resize_of(record, jobs[record.id], targets[record.id], now))
        await fail_points.reach("queue.resizing")
        try:
            response: placement_pb2.ResizeReplicasResponse = await self._placement.ResizeReplicas(
                request, timeout=CALL_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            log.info("replica_resizes_delayed", jobs=len(changed), error=errors.from_error(error).message)
            return
        await fail_points.reach("queue.resized")
        for attempt in response.attempts:
            self._ordered[attempt.job_id] = attempt.number, targets[attempt.job_id]
            RESIZES.add(direction="grow" if changes[attempt.job_id] > 0 else "shrink")
            log.info(
                "job_resized", job=attempt.job_id, attempt=attempt.number,
                before=jobs[attempt.job_id].replicas, replicas=targets[attempt.job_id],
            )  # fmt: skip
        for refused in response.refused:
            refusal = refusals.from_wire(refused.refusal)
            KEPT.add(code=refusal.code.value)
            if (kept := self._state.records.get(refused.job_id)) is not None:
                kept.resize_note = f"{kept.resize_note}; not resized to {targets[kept.id]}: {refusal}"


def _needs(record: Record) -> Resources:
    return record.spec.roles[record.spec.elastic_role or 0].request.resources(auto=1)


def _resize_of(record: Record, job: ElasticJob, count: int, now: float) -> placement_pb2.ReplicaResize:
    candidate = candidate_of(record, now, brief=True)
    candidate.spec.CopyFrom(with_elastic_replicas(candidate.spec, count))
    times = job.rate(count) / job.rate(job.replicas)
    if count > job.replicas:
        why = f"it is {times:.2f} times as fast with them"
    else:
        why = f"others need what it gives up; it is {times:.2f} times as fast without them"
    return placement_pb2.ReplicaResize(next=candidate, replicas=count, reason=why)
