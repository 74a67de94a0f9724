"""Jobs that go on elsewhere because somebody says so: an operator, or whoever saw them in another job's way."""

from __future__ import annotations

import time

import structlog

from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import StopReason
from cotenant.core.model.validation import Violation
from cotenant.services.queue.attempts.attempt_watcher import Follower
from cotenant.services.queue.jobs.desired_state import check_alive
from cotenant.services.queue.jobs.job_store import Keeper, Request
from cotenant.services.queue.jobs.node_avoidance import AVOID_SECONDS, avoid, nodes_of
from cotenant.services.queue.jobs.transitions import Record, note
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import records_pb2

log = structlog.get_logger()

REASON_LENGTH_MAX = 1_000
AVOID_SECONDS_MAX = 30 * 86_400.0


async def move(keeper: Keeper, follower: Follower, record: Record, request: pb.MoveJobRequest, once: Request) -> None:
    """Keep a job away from where it is, durably, and order its stop; where that fails, a repeat of the call orders it.

    Raises:
        Problem: the request is bad, or the attempt that it means is over.
        AioRpcError: placement is away.
        StoreUnavailable: nothing was changed.
    """
    seconds = _avoid_seconds(request)
    if not await keeper.repeated(once):
        _check_attempt(record, request.number)

        def change(stored: records_pb2.StoredJob) -> None:
            _check_attempt(record, request.number)  # it may have ended while others changed it
            avoid(stored.job, nodes_of(stored.job.attempt), seconds, request.reason or "it was moved", time.time())
            note(stored, "move wanted", request.reason)

        await keeper.change(record, change, request=once)
        log.info("job_moved", job=record.id, attempt=request.number, reason=request.reason)
    if record.phase.holds_resources and record.attempt_number == request.number:
        await follower.order_stop(record, request.number, StopReason.CONTENTION, request.reason)


def _avoid_seconds(request: pb.MoveJobRequest) -> float:
    """Read for how long the job is to keep away.

    Raises:
        Problem: INVALID_ARGUMENT naming each bad field.
    """
    seconds = specs.seconds(request.avoid) if request.HasField("avoid") else AVOID_SECONDS
    wrong = []
    if request.number < 1:
        wrong.append(Violation("number", f"must be that of the attempt which is meant, from 1, not {request.number}"))
    if not 0 <= seconds <= AVOID_SECONDS_MAX:
        wrong.append(Violation("avoid", f"must be from 0 s to {AVOID_SECONDS_MAX:g} s, not {seconds:g} s"))
    if len(request.reason) > REASON_LENGTH_MAX or not request.reason.isprintable():
        wrong.append(Violation("reason", f"must be printable, with at most {REASON_LENGTH_MAX} characters"))
    if wrong:
        raise errors.invalid(wrong)
    return seconds


def _check_attempt(record: Record, number: int) -> None:
    """Refuse what is meant for an attempt that is over.

    Raises:
        Problem: FAILED_PRECONDITION, where the job has ended, or holds nothing by that attempt.
    """
    check_alive(record)
    if record.phase.holds_resources and record.attempt_number == number:
        return
    stands = f"is {record.phase.value}" + (f", attempt {record.attempt_number}" if record.attempt_number else "")
    told = f"attempt {number} of job {record.id} holds nothing that it could be moved from; the job {stands}"
    raise errors.failed_precondition("ATTEMPT_OVER", told)
