"""Migration of running jobs, on request of an operator or of the contention service."""

from __future__ import annotations

import time

import structlog

from cotenant.codec import errors, specs
from cotenant.codec.job_events import EventKind
from cotenant.core.model.lifecycle import StopReason
from cotenant.core.model.validation import Violation
from cotenant.services.queue.attempts.attempt_watcher import AttemptWatcher
from cotenant.services.queue.jobs.desired_state import check_not_ended
from cotenant.services.queue.jobs.job_store import IdempotencyKey, JobStore
from cotenant.services.queue.jobs.node_avoidance import AVOID_SECONDS, avoid, nodes_of
from cotenant.services.queue.jobs.transitions import Record, add_event
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_service_pb2 as pb

log = structlog.get_logger()

REASON_LENGTH_MAX = 1_000
AVOID_SECONDS_MAX = 30 * 86_400.0


async def migrate(
    job_store: JobStore,
    attempt_watcher: AttemptWatcher,
    record: Record,
    request: pb.MoveJobRequest,
    key: IdempotencyKey,
) -> None:
    """Store that a job avoids its current nodes, then order its stop; a retry of the call repeats a failed order.

    Raises:
        Problem: the request is invalid, or its attempt has ended.
        AioRpcError: placement is unavailable.
        StoreUnavailable: nothing was changed.
    """
    seconds = _avoid_seconds(request)
    if not await job_store.find_result(key):
        _check_attempt(record, request.number)

        def change(stored: records_pb2.StoredJob) -> None:
            _check_attempt(record, request.number)  # it may have ended while the change waited
            avoid(
                stored.job, nodes_of(stored.job.attempt), seconds, request.reason or "the job was migrated", time.time()
            )
            add_event(stored, EventKind.MIGRATION_REQUESTED, request.reason)

        await job_store.change(record, change, request=key)
        log.info("job_migrated", job=record.id, attempt=request.number, reason=request.reason)
    if record.phase.holds_resources and record.attempt_number == request.number:
        await attempt_watcher.order_stop(record, request.number, StopReason.CONTENTION, request.reason)


def _avoid_seconds(request: pb.MoveJobRequest) -> float:
    """Return for how long the job is to avoid its nodes.

    Raises:
        Problem: INVALID_ARGUMENT naming each bad field.
    """
    seconds = specs.seconds(request.avoid) if request.HasField("avoid") else AVOID_SECONDS
    wrong = []
    if request.number < 1:
        wrong.append(
            Violation("number", f"must be the number of the attempt to migrate, at least 1, not {request.number}")
        )
    if not 0 <= seconds <= AVOID_SECONDS_MAX:
        wrong.append(Violation("avoid", f"must be from 0 s to {AVOID_SECONDS_MAX:g} s, not {seconds:g} s"))
    if len(request.reason) > REASON_LENGTH_MAX or not request.reason.isprintable():
        wrong.append(Violation("reason", f"must be printable, with at most {REASON_LENGTH_MAX} characters"))
    if wrong:
        raise errors.invalid(wrong)
    return seconds


def _check_attempt(record: Record, number: int) -> None:
    """Reject a request for an attempt that has ended.

    Raises:
        Problem: FAILED_PRECONDITION if the job has ended, or that attempt holds nothing.
    """
    check_not_ended(record)
    if record.phase.holds_resources and record.attempt_number == number:
        return
    state = f"is {record.phase.value}" + (f", attempt {record.attempt_number}" if record.attempt_number else "")
    message = f"attempt {number} of job {record.id} holds no resources; the job {state}"
    raise errors.failed_precondition("ATTEMPT_OVER", message)
