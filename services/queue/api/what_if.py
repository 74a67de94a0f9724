"""What-if: one scheduling cycle and a start forecast with jobs that are not submitted. Leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from cotenant.codec import refusals, specs
from cotenant.core.forecast.start_forecast import WAITING_MAX
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.pre_run import in_words
from cotenant.core.model.refusal import Code, Refusal, about, begins_later, outranked
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.queue.jobs.objective_status import ExpectedStart, expected_start, status_with_remedy
from cotenant.services.queue.jobs.prediction_trust import trusted_message
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.retry_backoff import begins_in_seconds
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.scheduling import start_forecast
from cotenant.services.queue.scheduling.backlog import in_order
from cotenant.services.queue.scheduling.candidates import candidate_of
from cotenant.services.queue.scheduling.ranking import Ranking
from cotenant.services.queue.scheduling.scheduler import Scheduler, new_request
from cotenant.services.queue.scheduling.tenant_usage import headroom_of, limited_tenants, requested_by
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

AHEAD_MAX = 1_000  # jobs ahead of the hypothetical ones that placement plans too


async def simulate(state: State, scheduler: Scheduler, asked: Sequence[Record]) -> pb.SimulateJobResponse:
    """Rank hypothetical jobs among waiting jobs, plan them and the jobs ahead of them, and forecast their starts."""
    for record in asked:
        await scheduler.job_estimates.request_estimate(record)
    ranking = _rank_with(state, scheduler, asked)
    answers = {
        record.id: pb.SimulateJobResponse(position=(ranking.waiting.place(record.id) or 0) + 1) for record in asked
    }
    ready: list[Record] = []
    for record in asked:
        if awaited_jobs := state.dependency_gate.awaited_jobs(record.spec):
            answers[record.id].refusal.CopyFrom(_to_wire(awaited_jobs))
        elif left_seconds := begins_in_seconds(record):
            answers[record.id].refusal.CopyFrom(_to_wire(begins_later(record.spec.begin_seconds or 0.0)))
            answers[record.id].outlook = start_forecast.at_begin_time(left_seconds)
        elif lacking := state.secrets.refusal(record.spec):
            answers[record.id].refusal.CopyFrom(_to_wire(lacking))
        else:
            ready.append(record)
    plan = _plan(state, scheduler, ranking, ready, answers)
    if plan.candidates:
        _apply_plan(answers, await scheduler.placement.PlanPlacement(plan))
    await _add_forecasts(state, scheduler, ranking, ready, answers)
    now = time.time()
    for record in asked:
        answer = answers[record.id]
        if answer.refusal.code == Code.BEGIN_TIME and record.spec.deadline_seconds is not None:
            start = await _expected_start(state, scheduler, record)
        else:
            start = expected_start(answer.forecast, now) if answer.HasField("forecast") else None
        answer.objectives.extend(status_with_remedy(record, now, state.judged, start))
        if estimate := trusted_message(record, state.judged):
            answer.estimate.CopyFrom(estimate)
    first, *more = (answers[record.id] for record in asked)
    first.more.extend(more)
    return first


async def judge_objectives(state: State, scheduler: Scheduler, record: Record) -> list[job_pb2.ObjectiveStatus]:
    """Return what is expected of a job's objectives if it is submitted now, with what would help.

    Only a deadline needs a start forecast; without one the answer for it is unknown.
    """
    await scheduler.job_estimates.request_estimate(record)
    start = None
    if record.spec.deadline_seconds is not None and not state.dependency_gate.awaited_jobs(record.spec):
        start = await _expected_start(state, scheduler, record)
    return status_with_remedy(record, time.time(), state.judged, start)


async def _expected_start(state: State, scheduler: Scheduler, record: Record) -> ExpectedStart | None:
    """Forecast the start of a hypothetical job among the jobs that wait now; not before its begin time."""
    ranking = _rank_with(state, scheduler, [record])
    forecasts = await start_forecast.forecast_starts(
        state, scheduler.config, scheduler.placement, _question(state, scheduler, ranking, {record.id: record})
    )
    if record.id not in forecasts:
        return None
    return expected_start(forecasts[record.id], time.time(), not_before=record.spec.begin_seconds or 0.0)


def _question(
    state: State, scheduler: Scheduler, ranking: Ranking, mine: dict[str, Record]
) -> start_forecast.ForecastQuery:
    """Return the query for the starts of hypothetical jobs among the waiting jobs."""
    fair = scheduler.config.rules.fair_share.shares
    coming = in_order(state, ranking.waiting, WAITING_MAX, fair=fair, more=mine)
    waiting = list(islice(coming, WAITING_MAX + len(mine)))
    return start_forecast.ForecastQuery(waiting, list(mine), stoppable=ranking.stoppable)


def _rank_with(state: State, scheduler: Scheduler, asked: Sequence[Record]) -> Ranking:
    """Rank the job table with a few extra rows. There is no await in between, so nothing else sees them."""
    added: list[Record] = []
    try:
        for record in asked:
            state.table.add(state.row(record))
            added.append(record)
            state.estimate(record)
        return scheduler.rank(time.time())
    finally:
        for record in added:
            state.table.remove(record.id)


def _plan(
    state: State,
    scheduler: Scheduler,
    ranking: Ranking,
    asked: Sequence[Record],
    answers: dict[str, pb.SimulateJobResponse],
) -> placement_pb2.PlanPlacementRequest:
    """Return the plan request that a cycle would send; refuse here the jobs that a cycle would not send."""
    now, config = time.time(), scheduler.config
    plan = new_request(config)
    plan.validate_only = True
    plan.tenants.extend(limited_tenants(state))
    before = 0
    ahead_of: list[int] = []  # by place in the starts: number of candidates before it
    for one in _starts_up_to_last(state, ranking, asked):
        ahead_of.append(before)
        if one is not None:
            plan.candidates.append(candidate_of(one, now, brief=True))
            before += 1
    for job_id, ahead, standing in ranking.victims:
        first = ahead_of[ahead] if ahead < len(ahead_of) else before
        number = state.records[job_id].attempt_number
        plan.victims.add(job_id=job_id, number=number, ahead=first, standing=standing)
    for record in asked:
        position = answers[record.id].position - 1
        if ranking.starts.place(record.id) is None and not answers[record.id].HasField("refusal"):
            answers[record.id].refusal.CopyFrom(_to_wire(_refusal_by_order(state, ranking, record, position)))
    return plan


def _refusal_by_order(state: State, ranking: Ranking, record: Record, position: int) -> Refusal:
    """Return why the order does not start a job."""
    asked = requested_by(record)
    over = headroom_of(state).refuse(record.spec.tenant, asked.gpu_milli, asked.cores)
    if over:
        return over
    before = ranking.outrankers
    return before.refusal(position, ranking.ids) if before else outranked(position + 1, position)


def _starts_up_to_last(state: State, ranking: Ranking, asked: Sequence[Record]) -> Iterator[Record | None]:
    """Yield the jobs that should start, up to the last hypothetical one; None for a job that placement is not asked
    about. Placement counts tenants' limits.
    """
    mine = {record.id: record for record in asked}
    places = [place for job_id in mine if (place := ranking.starts.place(job_id)) is not None]
    last = max(places, default=-1)
    for place, job_id in enumerate(ranking.starts[: last + 1]):
        one = mine.get(job_id) or (state.records.get(job_id) if place < AHEAD_MAX else None)
        yield one if one is not None and one.phase is Phase.QUEUED else None


def _apply_plan(answers: dict[str, pb.SimulateJobResponse], response: placement_pb2.PlanPlacementResponse) -> None:
    for placed in response.placed:
        if answer := answers.get(placed.attempt.job_id):
            answer.starts_now = True
            answer.allocations.extend(placed.attempt.allocations)
    for refused in response.refused:
        if answer := answers.get(refused.job_id):
            answer.refusal.CopyFrom(_to_wire(refusals.from_wire(refused.refusal)))
    for answer in answers.values():
        answer.preempted_job_ids.extend(victim.job_id for victim in response.preempted)


async def _add_forecasts(
    state: State,
    scheduler: Scheduler,
    ranking: Ranking,
    asked: Sequence[Record],
    answers: dict[str, pb.SimulateJobResponse],
) -> None:
    """Add when each job would start and finish, and which other jobs all of them together would delay."""
    mine = {record.id: record for record in asked}
    question = _question(state, scheduler, ranking, mine)
    with_them = question.waiting
    forecasts = await start_forecast.forecast_starts(state, scheduler.config, scheduler.placement, question)
    for job_id, answer in answers.items():
        if job_id not in forecasts:
            continue
        answer.forecast.CopyFrom(forecasts[job_id])
        answer.ending.extend(start_forecast.ahead(state, one) for one in forecasts[job_id].ending_job_ids)
        answer.outlook = _outlook(answer, state, mine[job_id])
    without = [one for one in with_them if one.id not in mine]
    if not without:
        return
    after = await _forecast_medians(state, scheduler, with_them, ranking)
    delayed = start_forecast.delayed(
        state, await _forecast_medians(state, scheduler, without, scheduler.rank(time.time())), after
    )
    for answer in answers.values():
        answer.delayed.extend(delayed[: start_forecast.NAMED_MAX])
        answer.delayed_count = len(delayed)


async def _forecast_medians(
    state: State, scheduler: Scheduler, waiting: Sequence[Record], ranking: Ranking
) -> start_forecast.Forecasts:
    """Forecast all starts from median run times alone."""
    question = start_forecast.ForecastQuery(waiting, draws=0, stoppable=ranking.stoppable)
    return await start_forecast.forecast_starts(state, scheduler.config, scheduler.placement, question)


def _outlook(answer: pb.SimulateJobResponse, state: State, record: Record) -> str:
    """Return when a job starts and ends. A pre-run that passes quickly is not part of the forecast."""
    pre_run = in_words(record.spec.pre_run_seconds) if record.spec.pre_run_seconds is not None else ""
    if answer.refusal.code == Code.NEVER_FITS:
        return "never starts on this cluster"
    if answer.refusal.code == Code.MAKING_ROOM:
        starts = "starts as soon as its resources are freed"
    elif answer.starts_now:
        starts = f"starts now with {pre_run}" if pre_run else "starts now"
        pre_run = ""
    else:
        starts = start_forecast.in_words(answer.forecast, state)
    if pre_run:
        starts += f"; preceded by {pre_run}"
    if not answer.forecast.HasField("finish"):
        return starts
    return f"{starts}; finishes in about {about(specs.seconds(answer.forecast.finish))}"


def _to_wire(refusal: Refusal) -> job_pb2.Refusal:
    return refusals.to_text(refusal)
