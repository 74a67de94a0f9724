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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import grpc
import structlog

from cotenant import fail_points, telemetry
from cotenant.codec import errors, refusals, specs
from cotenant.core.model.job_table import Capacity
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.limits import PLAN_CANDIDATES_MAX
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.scheduling.admission import RULES, Rules
from cotenant.core.scheduling.reservations import has_reservation
from cotenant.rpc.slices import Slices
from cotenant.services.queue.attempts.attempt_watcher import Follower
from cotenant.services.queue.attempts.policy_feedback import Endings
from cotenant.services.queue.estimates.job_estimates import Estimating
from cotenant.services.queue.jobs import node_avoidance
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record, held_by
from cotenant.services.queue.jobs.wait_reasons import Reasons
from cotenant.services.queue.scheduling.candidates import candidate_of
from cotenant.services.queue.scheduling.ranking import Ranking, rank
from cotenant.services.queue.scheduling.tenant_usage import asked_by, headroom_of, limited, to_tell
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import placement_service_pb2_grpc, predictor_service_pb2_grpc

log = structlog.get_logger()

SHARED = (Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES, Code.RESERVED)  # reasons of all jobs of a shape
PAGE_MIN, PAGE_MAX = 32, 256
PAGE_BYTES_MAX = 2 * 2**20  # of the specs of a page; placement takes messages of 4 MiB
PAUSE_SHARE, PAUSE_SECONDS_MAX = 0.5, 0.25  # of a cycle's time, before the next: others need the queue too
MOVED = -1  # the place of those who come before all others, for they were moved
PLAN_DEADLINE_SECONDS = 30.0
HOLDS_SECONDS_MIN = 0.01  # no cycle sooner for the time's sake alone, so that rounding makes no haste

CYCLE_SECONDS = telemetry.histogram("cotenant.queue.cycle", "s", "Time of one scheduling cycle.")
ASSIGNED_SECONDS = telemetry.histogram("cotenant.queue.assigned", "s", "Time from a job's submission to its attempt.")
REFUSED = telemetry.counter("cotenant.queue.refused", "{job}", "Jobs that a cycle refused, by reason.")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How the cycle runs."""

    policy: QueuePolicy
    debounce_seconds: float = 0.003
    rules: Rules = RULES
    seed: int = 0
    term: int = 0  # under which this queue leads; 0 where it has no others beside it


@dataclass(frozen=True, slots=True)
class _Times:
    """When the steps of a cycle ended, in unix seconds."""

    began: float
    estimated: float
    ordered: float


class _Entry(NamedTuple):
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
        endings: Endings,
    ) -> None:
        self.state, self.follower, self.config, self.endings = state, follower, config, endings
        self.placement, self.estimating = placement, Estimating(state, predictor)
        self.cycles = 0
        self._told: tuple[int, list[bytes]] = (0, [])  # the limits that placement knows, and since which connection
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Something has happened."""
        self._woken.set()

    async def run(self) -> None:
        """Cycle for ever."""
        valid_seconds, pause_seconds = math.inf, 0.0
        while True:
            try:
                async with asyncio.timeout(None if math.isinf(valid_seconds) else valid_seconds):
                    await self._woken.wait()
                await asyncio.sleep(max(self.config.debounce_seconds, pause_seconds))
            except TimeoutError:
                log.debug("order_expired")
            self._woken.clear()
            await self.follower.synced.wait()
            began = asyncio.get_running_loop().time()
            try:
                valid_seconds = await self.cycle()
            except grpc.aio.AioRpcError as error:
                log.warning("cycle_failed", error=errors.from_error(error).message)
                valid_seconds = 0.5
            except Exception:  # a policy's bug must not end scheduling for good
                log.exception("cycle_failed", policy=self.config.policy.name)
                valid_seconds = 5.0
            took_seconds = asyncio.get_running_loop().time() - began
            pause_seconds = min(PAUSE_SECONDS_MAX, PAUSE_SHARE * took_seconds)
            self.state.turnover.cycle_seconds = took_seconds + max(self.config.debounce_seconds, pause_seconds)

    async def cycle(self) -> float:
        """Run one cycle; returns for how many seconds its order holds if nothing happens."""
        if self.state.table.waits():
            self.cycles += 1
            return await self._cycle()
        if to_tell(self.state, self.follower.connections) != self._told:  # nobody waits: no other plan tells them
            await self._plan((), (), time.time())
        return math.inf

    async def _cycle(self) -> float:
        state, began = self.state, time.time()
        await self.estimating.ask_unknown()
        estimated = time.time()
        ranking = self.rank(estimated)
        times = _Times(began, estimated, time.time())
        reasons = Reasons(estimated)
        state.ranked, state.last_order = ranking.waiting, (ranking.ids, ranking.order)
        state.beyond, state.shares, state.stoppable = ranking.beyond, ranking.shares, ranking.stoppable
        self.endings.give_up(ranking.given_up)
        if len(ranking.outranked):
            reasons.outrankers, reasons.ids = ranking.outrankers, ranking.ids
            await self._outrank(ranking, reasons)
        await self._place(ranking, reasons, times)
        state.reasons = reasons
        CYCLE_SECONDS.record(time.time() - began)
        return min(ranking.valid_seconds, max(reasons.holds_seconds, HOLDS_SECONDS_MIN))

    def rank(self, now: float) -> Ranking:
        """Order the jobs of the table, and say who should run and who may have to make room."""
        return rank(self.state, self.config.policy, self.config.rules, now)

    async def _outrank(self, ranking: Ranking, reasons: Reasons) -> None:
        """Note the jobs that the order leaves out, with their places."""
        left_out, places, slices = set(ranking.outranked), dict[str, int](), Slices()
        for place, job_id in enumerate(ranking.waiting):
            if job_id in left_out:
                places[job_id] = place
            await slices.step()
        reasons.outrank(places, self.state.reasons)

    async def _place(self, ranking: Ranking, reasons: Reasons, times: _Times) -> None:
        victims = [(self.state.records[job_id], ahead, standing) for job_id, ahead, standing in ranking.victims]
        size = max(PAGE_MIN, max((ahead for _, ahead, _ in victims), default=0))  # those who may have victims' room
        size = min(size, PLAN_CANDIDATES_MAX)
        left = self._entries(ranking.starts)
        room = headroom_of(self.state)
        self._refuse_over_limit(ranking.over_limit, room, reasons)
        reserved: list[_Entry] = []  # whose places nobody on a later page may take: they are asked about there again
        while reasons.head is None:
            page, postponed = await self._page(left, size, room, reasons)
            if not page:  # where all that were found have changed meanwhile, another cycle comes at once
                return
            if postponed:
                left = chain(postponed, left)
            asked = [*reserved, *page]
            response = await self._plan(asked, victims, reasons.now)
            self._take(asked, response, room, reasons, times)
            reserved = [entry for entry in asked if reasons.reserved(entry.record)]
            preempted, next_place = {victim.job_id for victim in response.preempted}, page[-1].place + 1
            victims = [one for one in victims if one[0].id not in preempted and one[1] > next_place]
            size = min(PAGE_MAX, size * 2)

    def _entries(self, starts: Iterable[str]) -> Iterator[_Entry]:
        """Give those who should start; first those who were moved, for their places are kept, but not for long."""
        records, ending, moving = self.state.records, self.endings.ending, dict(self.state.moving)
        others = ((place, job_id) for place, job_id in enumerate(starts) if job_id not in moving)
        return (
            _Entry(place, records[job_id])
            for place, job_id in chain(((MOVED, job_id) for job_id in moving), others)
            if job_id in records and job_id not in ending
        )

    def _refuse_over_limit(self, job_ids: Iterable[str], room: Headroom, reasons: Reasons) -> None:
        for record in (self.state.records[job_id] for job_id in job_ids):
            tenant, asked = record.spec.tenant, asked_by(record)
            refusal = room.refuse(tenant, asked.gpu_milli, asked.cores)
            reasons.refuse(
                record, refusal or Refusal(Code.QUOTA, f"tenant {tenant} is at its limit"), self.state.reasons
            )

    async def _page(
        self, entries: Iterator[_Entry], size: int, room: Headroom, reasons: Reasons
    ) -> tuple[list[_Entry], list[_Entry]]:
        """Gather the next candidates; those that have to wait for the answer about these come apart.

        A job that would be over a limit only because of others that are asked about may be within it yet, for they may
        find no place.
        """
        page: list[_Entry] = []
        postponed: list[_Entry] = []
        if self._all_known(room, reasons):
            return page, postponed
        asked_for, room_bytes, slices = room.copy(), PAGE_BYTES_MAX, Slices()
        for entry in entries:
            await slices.step()
            record = entry.record
            if record.phase is not Phase.QUEUED or record.id in self.follower.ending:
                continue  # what has ended may be done
            self.state.reasons.age(record, reasons.now)
            avoids = record.avoids and node_avoidance.live(
                record.job, reasons.now
            )  # its reason counts them, no other job's
            if entry.place != MOVED and not avoids and reasons.known(record):
                continue
            tenant, asked = record.spec.tenant, asked_by(record)
            if refusal := room.refuse(tenant, asked.gpu_milli, asked.cores):
                self.state.moving.pop(record.id, None)
                reasons.refuse(record, refusal, self.state.reasons)
            elif asked_for.allows(tenant, asked.gpu_milli, asked.cores):
                asked_for.take(tenant, asked.gpu_milli, asked.cores)
                page.append(entry)
            else:
                postponed.append(entry)
            room_bytes -= record.job.spec.ByteSize()
            if len(page) == size or room_bytes < 0:
                break
        return [entry for entry in page if entry.record.phase is Phase.QUEUED], postponed

    def _all_known(self, room: Headroom, reasons: Reasons) -> bool:
        """Whether the answer is known for every job that waits: all of its shape are refused, and it has no other.

        Then nobody has to look at each of them, of whom there may be very many.
        """
        state = self.state
        if room or state.moving or state.startable.avoiding or reasons.in_fragments or state.reasons.in_fragments:
            return False
        return bool(reasons.plain) and state.startable.shapes.keys() <= reasons.plain.keys()

    async def _plan(
        self, page: Sequence[_Entry], victims: Sequence[tuple[Record, int, int | None]], now: float
    ) -> placement_pb2.PlanPlacementResponse:
        request, told = new_request(self.config), to_tell(self.state, self.follower.connections)
        request.tenants.extend(limited(self.state))
        for entry in page:
            request.candidates.append(candidate_of(entry.record, now))
        for victim, ahead, standing in victims:
            before = sum(entry.place < ahead for entry in page)
            request.victims.add(job_id=victim.id, number=victim.attempt_number, ahead=before, standing=standing)
        changes = self.follower.capacity_changes
        await fail_points.reach("queue.planning")
        response: placement_pb2.PlanPlacementResponse = await self.placement.PlanPlacement(
            request, timeout=PLAN_DEADLINE_SECONDS
        )
        await fail_points.reach("queue.planned")
        self._told = told
        if changes == self.follower.capacity_changes:  # else it may be older than what is known by now
            total = response.capacity
            self.state.capacity = Capacity(total.total_gpu_milli, total.total_cores, total.total_memory_bytes)
        return response

    def _take(
        self,
        page: Sequence[_Entry],
        response: placement_pb2.PlanPlacementResponse,
        room: Headroom,
        reasons: Reasons,
        times: _Times,
    ) -> None:
        by_id = {entry.record.id: entry.record for entry in page}
        for placed in response.placed:
            record = by_id[placed.attempt.job_id]
            if parent := record.job.trace_parent:
                telemetry.record("estimate", parent, times.began, times.estimated, job=record.id)
                telemetry.record("order", parent, times.estimated, times.ordered, job=record.id)
            self.follower.take_attempt(placed.attempt)
            use = held_by(record)
            room.take(record.spec.tenant, use.gpu_milli, use.cores)
            ASSIGNED_SECONDS.record(max(0.0, time.time() - specs.seconds(record.job.create_time)))
        for refused in response.refused:
            self._refuse(by_id[refused.job_id], refusals.from_wire(refused.refusal), reasons)

    def _refuse(self, record: Record, refusal: Refusal, reasons: Reasons) -> None:
        before = self.state.reasons
        if refusal.code is not Code.MAKING_ROOM and record.id in self.state.moving:
            del self.state.moving[record.id]
            self.wake()  # nothing is kept for it any more, and it takes its turn
        REFUSED.add(code=refusal.code.value)
        reasons.hold_for(node_avoidance.expires_seconds(record.job, reasons.now))
        avoids = node_avoidance.live(record.job, reasons.now)
        if refusal.code in SHARED and not has_reservation(refusal) and not avoids:
            reasons.refuse_shape(record, refusal, before)
        else:
            reasons.refuse(record, refusal, before)
        if self.config.policy.strict and reasons.head is None and refusal.code not in (Code.NEVER_FITS, Code.QUOTA):
            reasons.refuse(record, refusal, before)
            reasons.stop_at(record, refusal, before)


def new_request(config: SchedulerConfig) -> placement_pb2.PlanPlacementRequest:
    """A question to placement that names nobody yet."""
    request = placement_pb2.PlanPlacementRequest(strict=config.policy.strict, seed=config.seed, term=config.term)
    if reserving := config.rules.reserving:
        request.reserve_after.CopyFrom(specs.duration(reserving.after_seconds))
        request.reservations = reserving.most
    return request
