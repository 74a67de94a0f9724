"""The live scheduling cycle: woken by events, it gets estimates, orders jobs, and has placement place them.

1. Snapshot: the table as it is now.
2. Estimates for jobs without one, in one call.
3. Order, by the queue policy; then admission: which jobs should run and which may be preempted, by counting.
4. Placement: page after page of candidates, until nothing more fits. Of an equivalence class that finds no room, one
   job is asked about.
5. Refusals: each job left waiting has its reason.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import grpc
import structlog

from cotenant import fail_points, telemetry
from cotenant.codec import errors, refusals, specs
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.limits import PLAN_CANDIDATES_MAX
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.resources import Resources
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.protocols import CpuAllocator, QueuePolicy
from cotenant.core.scheduling.admission import RULES, Rules
from cotenant.core.scheduling.equivalence import SHARED
from cotenant.core.scheduling.reservations import has_reservation
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.services.queue.attempts.attempt_watcher import AttemptWatcher
from cotenant.services.queue.attempts.policy_feedback import PolicyFeedback
from cotenant.services.queue.estimates.job_estimates import JobEstimates
from cotenant.services.queue.jobs import node_avoidance
from cotenant.services.queue.jobs.outranked_jobs import OutrankedJobs
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, held_by
from cotenant.services.queue.jobs.wait_reasons import WaitReasons
from cotenant.services.queue.scheduling.candidate_pages import MOVED, CandidatePages, Entry
from cotenant.services.queue.scheduling.candidates import candidate_of
from cotenant.services.queue.scheduling.ranking import Ranking, rank
from cotenant.services.queue.scheduling.replica_resizing import ReplicaResizing
from cotenant.services.queue.scheduling.tenant_usage import (
    OwnVictims,
    headroom_of,
    limited_tenants,
    placement_limits,
    requested_by,
)
from cotenant.v1 import predictor_service_pb2_grpc

log = structlog.get_logger()

# refusals that do not stop a strict queue; a job whose place is being freed is as good as started
PASSED_BY = (Code.NEVER_FITS, Code.QUOTA, Code.MAKING_ROOM)
PAGE_MIN, PAGE_MAX = 32, 256  # of the jobs on a page that may start, from the first page on, and of all jobs on one
# of a cycle's time, as a pause before the next: other calls need the queue too
PAUSE_SHARE, PAUSE_SECONDS_MAX = 0.5, 0.25
PLAN_DEADLINE_SECONDS = 30.0
NONE: Mapping[str, int] = MappingProxyType({})
HOLDS_SECONDS_MIN = 0.01  # least time between cycles that only time causes, so that rounding does not make them busy

CYCLE_SECONDS = telemetry.histogram("cotenant.queue.cycle", "s", "Duration of a scheduling cycle.")
ASSIGNED_SECONDS = telemetry.histogram("cotenant.queue.assigned", "s", "Time from a job's submission to its attempt.")
REFUSED = telemetry.counter("cotenant.queue.refused", "{job}", "Jobs that a cycle refused, by reason.")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Configuration of the cycle."""

    policy: QueuePolicy
    debounce_seconds: float = 0.003
    rules: Rules = RULES
    seed: int = 0
    allocator: CpuAllocator | None = None  # which may resize elastic jobs
    term: int = 0  # the term as leader; 0 without leader election


@dataclass(frozen=True, slots=True)
class _Times:
    """When the steps of a cycle ended, in unix seconds."""

    began: float
    estimated: float
    ordered: float


class Scheduler:
    """Runs cycles after events, one at a time."""

    def __init__(
        self,
        state: State,
        attempt_watcher: AttemptWatcher,
        config: SchedulerConfig,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
        predictor: predictor_service_pb2_grpc.PredictorServiceAsyncStub,
        policy_feedback: PolicyFeedback,
    ) -> None:
        self.state, self.config = state, config
        self.attempt_watcher, self.policy_feedback = attempt_watcher, policy_feedback
        self.placement, self.job_estimates = placement, JobEstimates(state, predictor)
        self.replica_resizing = ReplicaResizing(
            state, attempt_watcher, config.allocator, placement, config.seed, config.term
        )
        self.cycles = 0
        # the limits that placement knows, and the connection they were sent on
        self._sent_limits: tuple[int, list[bytes]] = (0, [])
        self._woken = asyncio.Event()
        state.events.changed.subscribe(self.wake)

    def wake(self) -> None:
        """Request a cycle."""
        self._woken.set()

    async def run(self) -> None:
        """Run cycles forever."""
        valid_seconds, pause_seconds = math.inf, 0.0
        while True:
            try:
                async with asyncio.timeout(None if math.isinf(valid_seconds) else valid_seconds):
                    await self._woken.wait()
                await asyncio.sleep(max(self.config.debounce_seconds, pause_seconds))
            except TimeoutError:
                log.debug("order_expired")
            self._woken.clear()
            await self.attempt_watcher.synced.wait()
            began = asyncio.get_running_loop().time()
            try:
                valid_seconds = await self.cycle()
            except grpc.aio.AioRpcError as error:
                log.warning("cycle_failed", error=errors.from_error(error).message)
                valid_seconds = 0.5
            except Exception:  # a bug in a policy must not end scheduling for good
                log.exception("cycle_failed", policy=self.config.policy.name)
                valid_seconds = 5.0
            took_seconds = asyncio.get_running_loop().time() - began
            pause_seconds = min(PAUSE_SECONDS_MAX, PAUSE_SHARE * took_seconds)
            self.state.turnover.cycle_seconds = took_seconds + max(self.config.debounce_seconds, pause_seconds)

    async def cycle(self) -> float:
        """Run one cycle; returns for how many seconds it is valid if nothing happens."""
        if self.state.table.waits():
            self.cycles += 1
            return await self._cycle()
        # no job waits, so no other plan carries the limits
        if placement_limits(self.state, self.attempt_watcher.connections) != self._sent_limits:
            await self._plan((), (), time.time())
        return await self.replica_resizing.settle(self.rank, time.time())

    async def _cycle(self) -> float:
        state, began = self.state, time.time()
        await self.job_estimates.request_missing()
        estimated = time.time()
        self.state.age(estimated)
        sizes_valid_seconds = await self.replica_resizing.settle(self.rank, estimated)
        ranking = self.rank(estimated)
        times = _Times(began, estimated, time.time())
        reasons = WaitReasons(estimated)
        state.ranked, state.last_order = ranking.waiting, (ranking.ids, ranking.order)
        state.beyond, state.shares, state.stoppable = ranking.beyond, ranking.shares, ranking.stoppable
        self.policy_feedback.give_up(ranking.given_up)
        if len(ranking.outranked[0]):
            reasons.outrankers, reasons.ids = ranking.outrankers, ranking.ids
            reasons.outranked = OutrankedJobs.of(*ranking.outranked, reasons.now, state.reasons.outranked)
        await self._place(ranking, reasons, times)
        state.reasons = reasons
        CYCLE_SECONDS.record(time.time() - began)
        return min(sizes_valid_seconds, ranking.valid_seconds, max(reasons.holds_seconds, HOLDS_SECONDS_MIN))

    def rank(self, now: float) -> Ranking:
        """Order the jobs of the table, and choose which should run and which may be preempted."""
        return rank(self.state, self.config.policy, self.config.rules, now)

    async def _place(self, ranking: Ranking, reasons: WaitReasons, times: _Times) -> None:
        victims = [(self.state.records[job_id], ahead, standing) for job_id, ahead, standing in ranking.victims]
        size = max(PAGE_MIN, max((ahead for _, ahead, _ in victims), default=0))  # all that may use victims' resources
        size = min(size, PLAN_CANDIDATES_MAX)
        pages = self._pages(ranking)
        headroom = headroom_of(self.state)
        self._refuse_over_limit(ranking.over_limit, headroom, reasons)
        every = self.config.policy.strict or bool(self.config.rules.reserving)
        started: list[str] = []
        with_places: list[Entry] = []  # repeated on later pages, so that no later candidate takes their places
        while reasons.head is None:
            own_victims = OwnVictims(record for record, _, _ in victims) if headroom else OwnVictims(())
            pages.send_whole(reasons.classes.divided)
            page = await pages.page(
                size,
                max(size, PAGE_MAX),
                reasons.classes.uniform.keys(),
                partial(self._asks, headroom=headroom, own_victims=own_victims, reasons=reasons),
                whole=every or bool(victims),
            )
            if not page.entries:  # if all of them changed in between, another cycle follows at once
                return
            asked = [*with_places, *page.entries]
            response = await self._plan(asked, victims, reasons.now, page.indexes(len(with_places)), started)
            self._apply_response(asked, response, headroom, reasons, times)
            started += [one.attempt.job_id for one in response.placed]
            answers = {*(one.attempt.job_id for one in response.placed), *(one.job_id for one in response.refused)}
            pages.answered(page, answers, reasons.classes.uniform.keys())
            with_places = [entry for entry in asked if reasons.has_place(entry.record)]
            preempted, next_place = {victim.job_id for victim in response.preempted}, page.entries[-1].place + 1
            victims = [one for one in victims if one[0].id not in preempted and one[1] > next_place]
            size = min(PAGE_MAX, size * 2)

    def _pages(self, ranking: Ranking) -> CandidatePages:
        """Return the pages of a cycle; classes whose jobs got different answers in the last one are sent whole."""
        state, before = self.state, self.state.reasons
        pages = CandidatePages(state, ranking, self.policy_feedback.ending)
        pages.send_whole(before.classes.divided)
        pages.send_whole({state.records[job_id].equivalence_key for job_id in before.own if job_id in state.records})
        return pages

    def _refuse_over_limit(self, job_ids: Iterable[str], headroom: Headroom, reasons: WaitReasons) -> None:
        for record in (self.state.records[job_id] for job_id in job_ids):
            tenant, asked = record.spec.tenant, requested_by(record)
            refusal = headroom.refuse(tenant, asked.gpu_milli, asked.cores)
            reasons.refuse(
                record, refusal or Refusal(Code.QUOTA, f"tenant {tenant} is at its limit"), self.state.reasons
            )

    def _asks(self, entry: Entry, *, headroom: Headroom, own_victims: OwnVictims, reasons: WaitReasons) -> bool:
        """Return whether to ask placement about a job that waits; otherwise its reason is known.

        A job that exceeds a limit only because of other jobs on the page, or unless victims of its own tenant stop, is
        left to placement.
        """
        record = entry.record
        if record.phase is not Phase.QUEUED or record.id in self.attempt_watcher.ending:
            return False  # what has ended may have succeeded
        # its refusal counts the avoided nodes, unlike those of its class
        avoids = record.avoids and node_avoidance.active(record.job, reasons.now)
        if entry.place != MOVED and not avoids and reasons.known(record):
            return False
        tenant, asked = record.spec.tenant, requested_by(record)
        refusal = headroom.refuse(tenant, asked.gpu_milli, asked.cores)
        if refusal is None or own_victims.make_room(headroom, tenant, asked):
            return True
        self.state.migrating.pop(record.id, None)
        reasons.refuse(record, refusal, self.state.reasons)
        return False

    async def _plan(
        self,
        page: Sequence[Entry],
        victims: Sequence[tuple[Record, int, int | None]],
        now: float,
        next_of_class: Mapping[str, int] = NONE,
        started: Iterable[str] = (),
    ) -> placement_pb2.PlanPlacementResponse:
        request, limits = new_request(self.config), placement_limits(self.state, self.attempt_watcher.connections)
        request.tenants.extend(limited_tenants(self.state))
        request.started_job_ids.extend(started)
        for entry in page:
            candidate = candidate_of(entry.record, now)
            if (index := next_of_class.get(entry.record.id)) is not None:
                candidate.next_of_class = index
            request.candidates.append(candidate)
        for victim, ahead, standing in victims:
            before = sum(entry.place < ahead for entry in page)
            request.victims.add(job_id=victim.id, number=victim.attempt_number, ahead=before, standing=standing)
        changes = self.attempt_watcher.capacity_changes
        await fail_points.reach("queue.planning")
        response: placement_pb2.PlanPlacementResponse = await self.placement.PlanPlacement(
            request, timeout=PLAN_DEADLINE_SECONDS
        )
        await fail_points.reach("queue.planned")
        self._sent_limits = limits
        if changes == self.attempt_watcher.capacity_changes:  # otherwise it may be older than the known capacity
            self.state.capacity = Resources.of(response.capacity, "total_")
        return response

    def _apply_response(
        self,
        page: Sequence[Entry],
        response: placement_pb2.PlanPlacementResponse,
        headroom: Headroom,
        reasons: WaitReasons,
        times: _Times,
    ) -> None:
        by_id = {entry.record.id: entry.record for entry in page}
        for placed in response.placed:
            record = by_id[placed.attempt.job_id]
            if parent := record.job.trace_parent:
                telemetry.record("estimate", parent, times.began, times.estimated, job=record.id)
                telemetry.record("order", parent, times.estimated, times.ordered, job=record.id)
            self.attempt_watcher.apply_attempt(placed.attempt, placed.evidence)
            use = held_by(record)
            headroom.take(record.spec.tenant, use.gpu_milli, use.cores)
            ASSIGNED_SECONDS.record(max(0.0, time.time() - specs.seconds(record.job.create_time)))
        for refused in response.refused:
            self._refuse(by_id[refused.job_id], refusals.from_wire(refused.refusal), reasons)

    def _refuse(self, record: Record, refusal: Refusal, reasons: WaitReasons) -> None:
        before = self.state.reasons
        if refusal.code is not Code.MAKING_ROOM and record.id in self.state.migrating:
            del self.state.migrating[record.id]
            self.wake()  # its reservation is gone, and it takes its regular turn
        REFUSED.add(code=refusal.code.value)
        if record.spec.elastic and refusal.code in (*SHARED, Code.QUOTA) and self.replica_resizing.refused(record):
            self.wake()  # it may start with fewer replicas
        reasons.expire_within(node_avoidance.expires_seconds(record.job, reasons.now))
        avoids = node_avoidance.active(record.job, reasons.now)
        if refusal.code in SHARED and not has_reservation(refusal) and not avoids:
            reasons.refuse_class(record, refusal, before)
        else:
            reasons.refuse(record, refusal, before)
        if self.config.policy.strict and reasons.head is None and refusal.code not in PASSED_BY:
            reasons.refuse(record, refusal, before)
            reasons.block_behind(record, refusal, before)


def new_request(config: SchedulerConfig) -> placement_pb2.PlanPlacementRequest:
    """Return a plan request without candidates."""
    request = placement_pb2.PlanPlacementRequest(strict=config.policy.strict, seed=config.seed, term=config.term)
    if reserving := config.rules.reserving:
        request.reserve_after.CopyFrom(specs.duration(reserving.after_seconds))
        request.reservations = reserving.most
    return request
