"""What would become of a job that was not submitted: one cycle with it, of which nothing remains."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cotenant.core.lifecycle import Phase
from cotenant.core.refusals import Refusal, outranked
from cotenant.rpc import refusals
from cotenant.services.queue.quotas import asked_by, headroom_of
from cotenant.services.queue.records import Record
from cotenant.services.queue.scheduler import Ranking, Scheduler, candidate_of
from cotenant.services.queue.state import State
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import placement_service_pb2 as placement_pb2

AHEAD_MAX = 1_000  # jobs before it that placement is asked about too


async def simulate(state: State, scheduler: Scheduler, record: Record) -> pb.SimulateJobResponse:
    """Order a job among those that wait, and ask placement about it and those before it."""
    await scheduler.estimate(record)
    ranking = _rank_with(state, scheduler, record)
    position = ranking.waiting.index(record.id)
    answer = pb.SimulateJobResponse(position=position + 1)
    asked = asked_by(record)
    if unmet := state.gates.unmet(record.spec):
        answer.refusal.CopyFrom(_told(unmet))
    elif over := headroom_of(state).refuse(record.spec.tenant, asked.gpu_milli, asked.cores):
        answer.refusal.CopyFrom(_told(over))
    elif record.id not in ranking.starts:
        answer.refusal.CopyFrom(_told(outranked(position + 1, position)))
    else:
        plan = _plan(state, scheduler, ranking, record)
        _read(answer, record, await scheduler.placement.PlanPlacement(plan))
    return answer


def _rank_with(state: State, scheduler: Scheduler, record: Record) -> Ranking:
    """Order the table with one more row. Nothing is awaited meanwhile, so nobody sees it."""
    state.table.add(state.row(record))
    try:
        state.estimate(record)
        return scheduler.rank(time.time())
    finally:
        state.table.remove(record.id)


def _plan(state: State, scheduler: Scheduler, ranking: Ranking, record: Record) -> placement_pb2.PlanPlacementRequest:
    now = time.time()
    config = scheduler.config
    plan = placement_pb2.PlanPlacementRequest(validate_only=True, strict=config.policy.strict, seed=config.seed)
    before = 0
    ahead_of: list[int] = []  # by place among the starts, candidates before it
    for other in _before(state, ranking, record):
        ahead_of.append(before)
        if other is not None:
            plan.candidates.append(candidate_of(other, now))
            before += 1
    plan.candidates.append(candidate_of(record, now))
    for job_id, ahead in ranking.victims:
        first = ahead_of[ahead] if ahead < len(ahead_of) else before + (ahead > len(ahead_of))
        plan.victims.add(job_id=job_id, number=state.records[job_id].attempt_number, ahead=first)
    return plan


def _before(state: State, ranking: Ranking, record: Record) -> Iterator[Record | None]:
    """Give the jobs that should start before this one; None for one that is not asked about."""
    room = headroom_of(state)
    for place, job_id in enumerate(ranking.starts):
        if job_id == record.id:
            return
        other = state.records.get(job_id)
        waits = other is not None and other.phase is Phase.QUEUED and place < AHEAD_MAX
        if other is None or not waits:
            yield None
            continue
        asked = asked_by(other)
        allowed = room.allows(other.spec.tenant, asked.gpu_milli, asked.cores)
        if allowed:
            room.take(other.spec.tenant, asked.gpu_milli, asked.cores)
        yield other if allowed else None


def _read(answer: pb.SimulateJobResponse, record: Record, response: placement_pb2.PlanPlacementResponse) -> None:
    for placed in response.placed:
        if placed.attempt.job_id == record.id:
            answer.starts_now = True
            answer.allocations.extend(placed.attempt.allocations)
    for refused in response.refused:
        if refused.job_id == record.id:
            answer.refusal.CopyFrom(_told(refusals.from_wire(refused.refusal)))
    answer.preempted_job_ids.extend(victim.job_id for victim in response.preempted)


def _told(refusal: Refusal) -> job_pb2.Refusal:
    return refusals.to_people(refusal)
