"""What owners want of their jobs: that they end, wait or go on. Each is a change to a job's record; no IO."""

from __future__ import annotations

from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import JobEvent, Phase
from cotenant.core.model.validation import Violation
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.transitions import Record, move, note
from cotenant.v1 import job_pb2, records_pb2


def check_alive(record: Record) -> None:
    """Refuse what makes no sense of a job that has ended.

    Raises:
        Problem: FAILED_PRECONDITION, where it has.
    """
    if record.phase.ended:
        raise errors.failed_precondition("JOB_ENDED", f"job {record.id} has {record.phase.value} already")


def check_array_alive(array: Array, etag: str) -> None:
    """Refuse what makes no sense of an array.

    Raises:
        Problem: FAILED_PRECONDITION where all of its jobs have ended; INVALID_ARGUMENT for an etag, which it has not.
    """
    if etag:
        raise errors.invalid([Violation("etag", "is of a job; an array has none")])
    if not array.standing[0]:
        raise errors.failed_precondition("JOB_ENDED", f"all {array.count} jobs of array {array.id} have ended already")


def hold_back(stored: records_pb2.StoredJob, wish: job_pb2.JobPhase.ValueType) -> bool:
    """Cancel or suspend a job: at once where it holds nothing, else by a wish that its attempt's end fulfils.

    One that is to be cancelled already stays so, whatever else is wanted.
    """
    phase = specs.PHASES.from_wire(stored.job.phase)
    cancel = job_pb2.JOB_PHASE_CANCELLED in (wish, stored.wish)
    if phase.ended or (phase is Phase.SUSPENDED and not cancel):
        return False
    if phase.holds_resources:
        return want(stored, wish)
    move(stored, JobEvent.CANCELLED if cancel else JobEvent.SUSPENDED)
    stored.wish = job_pb2.JOB_PHASE_UNSPECIFIED  # which is fulfilled, where it was wanted before this queue began
    note(stored, "cancelled" if cancel else "suspended")
    return True


def want(stored: records_pb2.StoredJob, wish: job_pb2.JobPhase.ValueType) -> bool:
    """Keep what is to become of a job as soon as its attempt is over."""
    if stored.wish in (wish, job_pb2.JOB_PHASE_CANCELLED):
        return False
    stored.wish = wish
    note(stored, "cancel wanted" if wish == job_pb2.JOB_PHASE_CANCELLED else "suspend wanted")
    return True


def resume(stored: records_pb2.StoredJob) -> bool:
    """Let a suspended job queue again.

    Raises:
        Problem: UNAVAILABLE while it is still being stopped.
    """
    if stored.wish == job_pb2.JOB_PHASE_CANCELLED:
        return False
    if specs.PHASES.from_wire(stored.job.phase) is not Phase.SUSPENDED:
        if stored.wish == job_pb2.JOB_PHASE_SUSPENDED:
            raise errors.unavailable("the job is still being stopped; it can be resumed once it is suspended", 1.0)
        return False
    move(stored, JobEvent.RESUMED)
    stored.wish = job_pb2.JOB_PHASE_UNSPECIFIED
    note(stored, "resumed")
    return True
