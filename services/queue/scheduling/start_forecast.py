"""Start forecasts of waiting jobs: placement plays the schedule forward in the queue's order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc
import structlog

from cotenant.codec import errors, specs
from cotenant.core.forecast.start_forecast import DRAWS, WAITING_MAX
from cotenant.core.model.estimate import as_of
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import about, format_duration_range, plural
from cotenant.core.placement.unschedulable import request_in_words
from cotenant.core.prediction.remaining_time import RUN_SECONDS_UNKNOWN, RemainingTime, remaining_time_of
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.security import metering
from cotenant.services.queue.jobs.prediction_trust import trusted_estimate
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.retry_backoff import begins_in_seconds
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.scheduling.backlog import backlog, in_order
from cotenant.services.queue.scheduling.candidates import candidate_of
from cotenant.services.queue.scheduling.scheduler import SchedulerConfig
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

log = structlog.get_logger()

BUDGET_SECONDS = 1.0  # for playing the schedule forward
NAMED_MAX = 5
SLICE = 64  # jobs encoded at a time
LATER_SECONDS_MIN = 1.0  # smaller delays are not reported
OF_UNKNOWN = "start time unknown: it depends on jobs of unknown length"

Forecasts = Mapping[str, job_pb2.StartForecast]


@dataclass(frozen=True, slots=True)
class ForecastQuery:
    """Waiting jobs in order, and the ids to forecast (None: all).

    `stoppable` are jobs that may be preempted, each with the number of waiting jobs before it; None: those of the last
    cycle.
    """

    waiting: Sequence[Record]
    wanted: Sequence[str] | None = None
    draws: int = DRAWS
    stoppable: Sequence[tuple[str, int]] | None = None


async def forecast_starts(
    state: State,
    config: SchedulerConfig,
    placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
    question: ForecastQuery,
) -> Forecasts:
    """Return placement's forecasts: none for jobs behind the first `WAITING_MAX`, none if placement is unavailable."""
    request = await _request(state, config, question)
    if question.wanted is not None and not request.wanted_job_ids:
        return {}
    try:
        response = await placement.ForecastStarts(request)
        metering.charge(specs.seconds(response.processing))
    except grpc.aio.AioRpcError as error:
        log.info("forecast_failed", error=errors.from_error(error).message)
        return {}
    return {one.job_id: one for one in response.forecasts}


async def _request(
    state: State, config: SchedulerConfig, question: ForecastQuery
) -> placement_pb2.ForecastStartsRequest:
    now = time.time()
    waiting = question.waiting[:WAITING_MAX]
    names = {record.id for record in waiting}
    request = placement_pb2.ForecastStartsRequest(
        strict=config.policy.strict,
        seed=config.seed,
        draws=question.draws,
        budget=specs.duration(BUDGET_SECONDS),
        tenants=[tenant for tenant, _ in state.tenants.values()],
        wanted_job_ids=[job_id for job_id in question.wanted or () if job_id in names],
    )
    if reserving := config.rules.reserving:
        request.reserve_after.CopyFrom(specs.duration(reserving.after_seconds))
        request.reservations = reserving.most
    for job_id, before in state.stoppable if question.stoppable is None else question.stoppable:
        if runs := state.held.get(job_id):
            request.stoppable.add(job_id=job_id, number=runs.attempt_number, ahead=before)
    usual = _usual_seconds([*state.held.values(), *waiting], now)
    for number, record in enumerate(waiting):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)  # other calls get a turn
        request.candidates.append(candidate_of(record, now, whole=True, brief=True))
        _set_quantiles(request.runs.add(job_id=record.id), _occupied(state, record, now, usual))
    for record in list(state.held.values()):
        _set_quantiles(
            request.runs.add(job_id=record.id, number=record.attempt_number), _occupied(state, record, now, usual)
        )
    return request


def _occupied(state: State, record: Record, now: float, usual_seconds: float) -> RemainingTime:
    """Return for how long a job's place stays occupied: by its run, and by the turnover around it."""
    rest, beside = _rest(state, record, now, usual_seconds), state.turnover.seconds
    return RemainingTime(rest.seconds + beside, rest.p10_seconds + beside, rest.p90_seconds + beside, rest.known)


def _rest(state: State, record: Record, now: float, usual_seconds: float) -> RemainingTime:
    if record.in_pre_run and record.phase.holds_resources:
        since = specs.seconds(record.job.attempt.start_time)
        left = min(record.spec.pre_run_seconds or 0.0, max(0.0, since + (record.spec.pre_run_seconds or 0.0) - now))
        return RemainingTime(left, 0.0, left)
    ran = record.ran_seconds(now)
    rest = remaining_time_of(
        as_of(trusted_estimate(record, state.judged), ran - record.ran_before_estimate_seconds),
        ran,
        expected_seconds=record.spec.expected_seconds,
        usual_seconds=usual_seconds,
    )
    limit_seconds = record.spec.time_limit_seconds
    return rest if limit_seconds is None else rest.at_most(limit_seconds - _attempt_seconds(record, now))


def _attempt_seconds(record: Record, now: float) -> float:
    """Return how long the present attempt of a job has run."""
    if not record.phase.holds_resources or not record.job.attempt.HasField("start_time"):
        return 0.0
    return max(0.0, now - specs.seconds(record.job.attempt.start_time))


def _usual_seconds(records: Iterable[Record], now: float) -> float:
    """Return the median run time of jobs with a known one."""
    totals = []
    for record in records:
        estimate = record.estimate
        if estimate and estimate.predictable:
            totals.append(record.ran_before_estimate_seconds + specs.seconds(estimate.remaining))
        elif record.spec.expected_seconds is not None:
            totals.append(record.spec.expected_seconds)
    return sorted(totals)[len(totals) // 2] if totals else RUN_SECONDS_UNKNOWN


def _set_quantiles(left: placement_pb2.RunLeft, rest: RemainingTime) -> None:
    for field, seconds in ((left.median, rest.seconds), (left.p10, rest.p10_seconds), (left.p90, rest.p90_seconds)):
        field.CopyFrom(specs.duration(min(seconds, specs.DURATION_SECONDS_MAX)))
    left.unknown = not rest.known


def at_begin_time(left_seconds: float) -> str:
    """Return the outlook of a job whose begin time is still to come.

    >>> at_begin_time(7200.0)
    'starts in 2 h at the earliest, at its begin time'
    """
    return f"starts in {about(left_seconds)} at the earliest, at its begin time"


async def add_forecast(
    state: State,
    config: SchedulerConfig,
    placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
    record: Record,
    answer: pb.ExplainJobResponse,
) -> None:
    """Add to an explanation when the job will probably start, and which jobs it waits for."""
    if not answer.position:
        if record.phase is not Phase.QUEUED:
            return
        if left_seconds := begins_in_seconds(record):
            answer.outlook = at_begin_time(left_seconds)
        elif state.open(record) and not state.backing_off(record):
            answer.outlook = "start time unknown until the next scheduling cycle"
        return
    fair = config.rules.fair_share.shares
    waiting = list(islice(in_order(state, state.ranked, WAITING_MAX, fair=fair), WAITING_MAX))
    place = next((place for place, one in enumerate(waiting) if one is record), None)
    answer.ahead.extend(
        ahead(state, one.id) for one in waiting[: NAMED_MAX if place is None else min(place, NAMED_MAX)]
    )
    answer.ahead_count = answer.position - 1 if place is None else place
    if place is None:
        await _forecast_by_backlog(state, record, answer, fair=fair)
        return
    forecast = (await forecast_starts(state, config, placement, ForecastQuery(waiting, [record.id]))).get(record.id)
    if forecast:
        answer.forecast.CopyFrom(forecast)
        answer.outlook = in_words(forecast, state) + ("; its pre-run starts earlier" if record.in_pre_run else "")
        answer.ending.extend(ahead(state, job_id) for job_id in forecast.ending_job_ids)


async def _forecast_by_backlog(state: State, record: Record, answer: pb.ExplainJobResponse, *, fair: bool) -> None:
    """Forecast the start from the backlog, for a job with too many jobs ahead to play the schedule forward."""
    now = time.time()
    usual = _usual_seconds(list(state.held.values()), now)
    found = await backlog(state, record, fair=fair, remaining_time_of=lambda one: _occupied(state, one, now, usual))
    if found is None:
        answer.outlook = f"start time unknown: starts are forecast only for the first {WAITING_MAX} waiting jobs"
        return
    answer.ahead_count = found.jobs
    answer.forecast.job_id = record.id
    if not found.known:
        answer.forecast.of_unknown = True
        answer.outlook = f"{OF_UNKNOWN}, the {found.jobs:,} ahead of it and the running jobs"
        return
    for field, seconds in (
        (answer.forecast.start, found.seconds),
        (answer.forecast.start_p10, found.p10_seconds),
        (answer.forecast.start_p90, found.p90_seconds),
    ):
        field.CopyFrom(specs.duration(min(seconds, specs.DURATION_SECONDS_MAX)))
    shown = format_duration_range(found.p10_seconds, found.p90_seconds)
    spread = "" if found.p10_seconds == found.p90_seconds else f" ({shown})"
    answer.outlook = (
        f"starts in about {about(found.seconds)}{spread}, estimated from the {found.jobs:,} jobs ahead of it and "
        "the running jobs"
    )


# Text ----------------------------------------------------------------------------------------------------------


def ahead(state: State, job_id: str, next_look_seconds: float | None = None) -> pb.JobAhead:
    """Describe a job that others wait for, and what it requests."""
    message = pb.JobAhead(job_id=job_id)
    if record := state.records.get(job_id):
        message.name, message.needs = record.spec.name, needs_in_words(record)
        message.running = record.phase.holds_resources
    if next_look_seconds is not None:
        message.later.CopyFrom(specs.duration(next_look_seconds))
    return message


def needs_in_words(record: Record) -> str:
    """Describe what a job requests, as in "2 replicas of 4 GPUs and 16 cores"."""
    return " with ".join(
        (f"{plural(role.replicas, 'replica')} of " if role.replicas > 1 else "") + request_in_words(role.request)
        for role in record.requested_spec.roles
    )


def in_words(forecast: job_pb2.StartForecast, state: State) -> str:
    """Describe in one sentence when a job will start and what it waits for."""
    if forecast.of_unknown:
        return OF_UNKNOWN + _why(forecast, state)
    if not forecast.HasField("start"):
        reached = specs.seconds(forecast.reached)
        return f"does not start within the {about(reached)} of the forecast" if reached else "start time unknown"
    start = specs.seconds(forecast.start)
    if not start:
        return "starts in the next cycle"
    low = specs.seconds(forecast.start_p10)
    high = specs.seconds(forecast.start_p90) if forecast.HasField("start_p90") else None
    spread = "" if low == start == high else f" ({format_duration_range(low, high)})"
    when = f"about {about(start)}" if start >= 1 else "less than 1 s"
    return f"starts in {when}{spread}" + _why(forecast, state)


def _why(forecast: job_pb2.StartForecast, state: State) -> str:
    if not forecast.ending_count:
        return ", once its replicas may be farther apart"
    first = ahead(state, forecast.ending_job_ids[0])
    name = f"{first.job_id} ({first.name})" if first.name else first.job_id
    close = "," if not first.running else ""
    begun = ", itself waiting" if close else ""
    if others := forecast.ending_count - 1:
        return f", once {name}{begun}{close} and {plural(others, 'other job')} have ended"
    return f", once {name}{begun}{close} has ended"


def delayed(state: State, before: Forecasts, after: Forecasts) -> list[pb.JobAhead]:
    """Return the jobs that start later than before, the most delayed first; before them, those with unknown delays."""
    later = [
        (specs.seconds(after[job_id].start) - specs.seconds(forecast.start), job_id)
        for job_id, forecast in before.items()
        if forecast.HasField("start") and job_id in after and after[job_id].HasField("start")
    ]
    unknown = [
        ahead(state, job_id)
        for job_id, forecast in sorted(before.items())
        if forecast.HasField("start") and job_id in after and after[job_id].of_unknown
    ]
    return unknown + [
        ahead(state, job_id, seconds)
        for seconds, job_id in sorted(later, key=lambda one: (-one[0], one[1]))
        if seconds >= LATER_SECONDS_MIN
    ]
