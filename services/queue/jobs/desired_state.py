"""Changes that owners ask for: cancel, suspend, resume. Each changes a job's record; no IO."""

from __future__ import annotations

from cotenant.codec import errors, specs
from cotenant.codec.job_events import EventKind
from cotenant.core.model.lifecycle import JobEvent, Phase
from cotenant.services.queue.jobs.transitions import Record, add_event, apply_event
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2


def check_not_ended(record: Record) -> None:
    """Reject a change to a job that has ended.

    Raises:
        Problem: FAILED_PRECONDITION if it has.
    """
    if record.phase.ended:
        raise errors.failed_precondition("JOB_ENDED", f"job {record.id} has already ended: {record.phase.value}")


def check_array_not_ended(array_id: str, left: int) -> None:
    """Reject a change to an array of which no jobs are `left` that have not ended.

    Raises:
        Problem: FAILED_PRECONDITION.
    """
    if not left:
        raise errors.failed_precondition("ARRAY_ENDED", f"all jobs of array {array_id} have already ended")


def cancel_or_suspend(stored: records_pb2.StoredJob, wish: job_pb2.JobPhase.ValueType) -> bool:
    """Cancel or suspend a job: at once if it holds nothing, else by a wish that takes effect when its attempt ends.

    A wish to cancel is never replaced.
    """
    phase = specs.PHASES.from_wire(stored.job.phase)
    cancel = job_pb2.JOB_PHASE_CANCELLED in (wish, stored.wish)
    if phase.ended or (phase is Phase.SUSPENDED and not cancel):
        return False
    if phase.holds_resources:
        return set_wish(stored, wish)
    apply_event(stored, JobEvent.CANCELLED if cancel else JobEvent.SUSPENDED)
    stored.wish = job_pb2.JOB_PHASE_UNSPECIFIED  # fulfilled, if it was set before this queue started
    add_event(stored, EventKind.CANCELLED if cancel else EventKind.SUSPENDED)
    return True


def set_wish(stored: records_pb2.StoredJob, wish: job_pb2.JobPhase.ValueType) -> bool:
    """Store the phase that a job is to enter when its attempt ends."""
    if stored.wish in (wish, job_pb2.JOB_PHASE_CANCELLED):
        return False
    stored.wish = wish
    add_event(
        stored, EventKind.CANCEL_REQUESTED if wish == job_pb2.JOB_PHASE_CANCELLED else EventKind.SUSPEND_REQUESTED
    )
    return True


def resume(stored: records_pb2.StoredJob) -> bool:
    """Requeue a suspended job.

    Raises:
        Problem: UNAVAILABLE while its attempt is being stopped.
    """
    if stored.wish == job_pb2.JOB_PHASE_CANCELLED:
        return False
    if specs.PHASES.from_wire(stored.job.phase) is not Phase.SUSPENDED:
        if stored.wish == job_pb2.JOB_PHASE_SUSPENDED:
            raise errors.unavailable("the job is still stopping; resume it once it is suspended", 1.0)
        return False
    apply_event(stored, JobEvent.RESUMED)
    stored.wish = job_pb2.JOB_PHASE_UNSPECIFIED
    add_event(stored, EventKind.RESUMED)
    return True
