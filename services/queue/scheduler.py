"""The scheduling cycle, live: woken by events, it asks the predictor, orders, and lets placement place.

1. Snapshot: the table as it is now.
2. Estimates for jobs that have none, in one call.
3. Order, by the queue policy; who should run and who may have to make room, by counting.
4. Placement: page after page of candidates, until nothing more fits. Jobs of a shape that was refused are not asked
   for again in this cycle.
5. Each job left waiting has its reason.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import structlog

from cotenant import telemetry
from cotenant.core.cycle import Capacity, choose
from cotenant.core.lifecycle import Phase
from cotenant.core.policy import QueuePolicy
from cotenant.core.refusals import Code, Refusal, gpus, outranked
from cotenant.rpc import errors, translate
from cotenant.services.queue.follower import Follower
from cotenant.services.queue.records import Record
from cotenant.services.queue.state import State
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import placement_service_pb2_grpc, predictor_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

PAGE_MIN, PAGE_MAX = 32, 256
ESTIMATES_MAX = 1000
ESTIMATE_DEADLINE_SECONDS = 2.0
PLAN_DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How the cycle runs. `run_seconds_min` protects a job that has just started from preemption."""

    policy: QueuePolicy
    debounce_seconds: float = 0.003
    run_seconds_min: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Ranking:
    waiting: list[str]
    starts: list[str]
    victims: list[tuple[str, int]]  # each with how many of the starts come before it
    began: float
    estimated: float
    ordered: float
    valid_seconds: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """A candidate, and its place among all that should start."""

    place: int
    record: Record


class Scheduler:
    """Runs cycles whenever something has happened, one at a time."""

    def __init__(
        self,
        state: State,
        follower: Follower,
        config: SchedulerConfig,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
    ) -> None:
        self.state, self.follower, self.config = state, follower, config
        self.placement, self.predictor = placement, predictor
        self.cycles = 0
        self._woken = asyncio.Event()
        self._predictor_away = False

    def wake(self) -> None:
        """Something has happened."""
        self._woken.set()

    async def run(self) -> None:
        """Cycle for ever."""
        valid_seconds = math.inf
        while True:
            try:
                await asyncio.wait_for(self._woken.wait(), None if math.isinf(valid_seconds) else valid_seconds)
                await asyncio.sleep(self.config.debounce_seconds)
            except TimeoutError:
                log.debug("order_expired")
            self._woken.clear()
            await self.follower.synced.wait()
            try:
                valid_seconds = await self.cycle()
            except grpc.aio.AioRpcError as error:
                log.warning("cycle_failed", error=errors.from_error(error).message)
                valid_seconds = 0.5
            except Exception:  # a policy's bug must not end scheduling for good
                log.exception("cycle_failed", policy=self.config.policy.name)
                valid_seconds = 5.0

    async def cycle(self) -> float:
        """Run one cycle; returns for how many seconds its order holds if nothing happens."""
        if not any(self.state.waiting()):
            return math.inf
        self.cycles += 1
        ranking = await self._rank()
        await self._place(ranking)
        return ranking.valid_seconds

    async def _rank(self) -> _Ranking:
        began = time.time()
        await self._estimate()
        estimated = time.time()
        table, policy = self.state.table, self.config.policy
        jobs, ids = table.jobs(estimated), list(table.ids)
        order = policy.order(jobs, estimated)
        choice = choose(
            jobs, policy, order, self.state.capacity, now=estimated, run_seconds_min=self.config.run_seconds_min
        )
        running = jobs.running
        waiting = [ids[row] for row in choice.ranked.tolist() if not running[row]]
        self.state.ranked = waiting
        self.state.last_order = (ids, order)
        self.state.head = None
        self.state.refused_shapes = {}
        if len(choice.outranked):
            place_of = {job_id: place for place, job_id in enumerate(waiting)}
            for row in choice.outranked.tolist():
                self.state.refuse(ids[row], outranked(place_of[ids[row]] + 1, place_of[ids[row]]))
        return _Ranking(
            waiting,
            [ids[row] for row in choice.starts.tolist()],
            [(ids[row], ahead) for row, ahead in zip(choice.victims.tolist(), choice.ahead().tolist(), strict=True)],
            began,
            estimated,
            time.time(),
            order.valid_seconds,
        )

    async def _estimate(self) -> None:
        """Ask the predictor about jobs of which nothing was asked yet. Without an answer they are unpredictable."""
        unknown = self.state.take_unestimated(ESTIMATES_MAX)
        if not unknown:
            return
        request = predictor_pb2.EstimateRequest(queries=[self._query(record) for record in unknown])
        try:
            response = await self.predictor.Estimate(request, timeout=ESTIMATE_DEADLINE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if not self._predictor_away:
                log.warning("predictor_away", error=errors.from_error(error).message)
            self._predictor_away = True
            self.state.unestimated.update(dict.fromkeys(record.id for record in unknown))
            return
        self._predictor_away = False
        for record, estimate in zip(unknown, response.estimates, strict=True):
            record.estimate = estimate
            if estimate.predictable and record.id in self.state.table:
                self.state.table.update(
                    record.id,
                    remaining_seconds=translate.seconds(estimate.remaining),
                    confidence=estimate.confidence,
                )

    @staticmethod
    def _query(record: Record) -> predictor_pb2.EstimateQuery:
        return predictor_pb2.EstimateQuery(
            job_id=record.id,
            spec=record.job.spec,
            attained_gpu_seconds=record.job.attained_gpu_seconds,
            progress=record.job.progress,
        )

    async def _place(self, ranking: _Ranking) -> None:
        victims = [(self.state.records[job_id], ahead) for job_id, ahead in ranking.victims]
        index, size = 0, len(ranking.starts) if victims else PAGE_MIN
        over = Quotas(self.state)
        while index < len(ranking.starts) and self.state.head is None:
            page, index = self._page(ranking.starts, index, size, over)
            if not page:
                return
            response = await self._plan(page, victims)
            self._take(ranking, page, response)
            preempted = {victim.job_id for victim in response.preempted}
            victims = [(victim, ahead) for victim, ahead in victims if victim.id not in preempted]
            size = min(PAGE_MAX, size * 2)

    def _page(self, starts: Sequence[str], index: int, size: int, over: Quotas) -> tuple[list[_Entry], int]:
        page: list[_Entry] = []
        while index < len(starts) and len(page) < size:
            record = self.state.records.get(starts[index])
            index += 1
            if record is None or record.phase is not Phase.QUEUED:
                continue
            if refusal := over.refuse(record):
                self.state.refuse(record.id, refusal)
            elif record.shape not in self.state.refused_shapes:
                page.append(_Entry(index - 1, record))
        return page, index

    async def _plan(
        self, page: Sequence[_Entry], victims: Sequence[tuple[Record, int]]
    ) -> placement_pb2.PlanPlacementResponse:
        now = time.time()
        request = placement_pb2.PlanPlacementRequest(strict=self.config.policy.strict, seed=self.config.seed)
        for entry in page:
            request.candidates.append(candidate_of(entry.record, now))
        for victim, ahead in victims:
            before = sum(entry.place < ahead for entry in page)
            request.victims.add(job_id=victim.id, number=victim.attempt_number, ahead=before)
        response: placement_pb2.PlanPlacementResponse = await self.placement.PlanPlacement(
            request, timeout=PLAN_DEADLINE_SECONDS
        )
        return response

    def _take(self, ranking: _Ranking, page: Sequence[_Entry], response: placement_pb2.PlanPlacementResponse) -> None:
        total = response.capacity
        self.state.capacity = Capacity(total.total_gpu_milli, total.total_cores, total.total_memory_bytes)
        for placed in response.placed:
            record = self.state.records[placed.attempt.job_id]
            record.sizing = placed.sizing
            parent = record.job.trace_parent
            telemetry.record("estimate", parent, ranking.began, ranking.estimated, job=record.id)
            telemetry.record("order", parent, ranking.estimated, ranking.ordered, job=record.id)
            self.follower.take_attempt(placed.attempt)
        by_id = {entry.record.id: entry.record for entry in page}
        for refused in response.refused:
            refusal, record = translate.refusal_from_wire(refused.refusal), by_id[refused.job_id]
            self.state.refuse(record.id, refusal)
            if refusal.code in (Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES):
                self.state.refused_shapes[record.shape] = refusal
            if self.config.policy.strict and self.state.head is None and refusal.code is not Code.NEVER_FITS:
                self.state.head = (record.id, refusal)


def candidate_of(record: Record, now: float) -> placement_pb2.Candidate:
    """A waiting job as placement is asked about it."""
    candidate = placement_pb2.Candidate(
        job_id=record.id,
        number=record.attempt_number + 1,
        spec=record.job.spec,
        trace_parent=record.job.trace_parent,
    )
    if record.estimate:
        candidate.estimate.CopyFrom(record.estimate)
    candidate.waited.FromNanoseconds(int(max(0.0, now - translate.seconds(record.job.create_time)) * 1e9))
    return candidate


class Quotas:
    """What tenants with limits hold, counted anew in each cycle: usage is derived, never kept."""

    def __init__(self, state: State) -> None:
        self._limits = {
            tenant_id: tenant
            for tenant_id, (tenant, _) in state.tenants.items()
            if tenant.HasField("limit_gpu_milli") or tenant.HasField("limit_cores")
        }
        self._gpus = dict.fromkeys(self._limits, 0)
        self._cores = dict.fromkeys(self._limits, 0)
        if self._limits:
            for record in state.holding():
                if record.spec.tenant in self._limits:
                    self._gpus[record.spec.tenant] += record.spec.gpu_milli
                    self._cores[record.spec.tenant] += held_cores(record)

    def refuse(self, record: Record) -> Refusal | None:
        """Say whether a job would take its tenant over its limit; counts it as started otherwise."""
        tenant_id = record.spec.tenant
        tenant = self._limits.get(tenant_id)
        if tenant is None:
            return None
        milli = self._gpus[tenant_id] + record.spec.gpu_milli
        cores = self._cores[tenant_id] + asked_cores(record)
        over = []
        if tenant.HasField("limit_gpu_milli") and milli > tenant.limit_gpu_milli:
            over.append(f"{gpus(milli)} of at most {tenant.limit_gpu_milli / 1000:g}")
        if tenant.HasField("limit_cores") and cores > tenant.limit_cores:
            over.append(f"{cores} cores of at most {tenant.limit_cores}")
        if over:
            return Refusal(
                Code.QUOTA,
                f"tenant {tenant_id} would hold {' and '.join(over)}",
                "jobs of the tenant finish, or its limit is raised",
            )
        self._gpus[tenant_id], self._cores[tenant_id] = milli, cores
        return None


def asked_cores(record: Record) -> int:
    """The cores that a job asks for; `auto` counts as one per replica."""
    return sum(role.replicas * (role.request.cores or 1) for role in record.spec.roles)


def held_cores(record: Record) -> int:
    """The cores that a job's attempt holds."""
    return sum(len(task.core_ids) for part in record.job.attempt.allocations for task in part.tasks)
