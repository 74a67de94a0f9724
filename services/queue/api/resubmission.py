"""Notification targets of an earlier job, which clients see redacted, for a job that repeats it."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.core.model.notification import REDACTED, redacted
from cotenant.core.model.validation import Violation
from cotenant.services.queue.jobs.archived_jobs import ArchivedArray, ArchivedJobs
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.notification_records import NOTIFICATIONS, load_notifications
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2

IS_ARRAY = "IS_ARRAY"


async def with_secrets(
    job_store: JobStore, archived_jobs: ArchivedJobs, spec: job_pb2.JobSpec, like: str
) -> job_pb2.JobSpec:
    """Return the spec with redacted notification targets replaced by those of the job or array `like`; "": none.

    Raises:
        StoreUnavailable: the store is unavailable.
        Problem: NOT_FOUND if the caller sees no such job; INVALID_ARGUMENT naming each target that is not known, or not
            for this caller.
    """
    if not like:
        return spec
    view = View(job_store.state)
    earlier = await _earlier(job_store.state, archived_jobs, view, like)
    if not any(REDACTED in target for target in spec.notify):
        return spec
    own = view.sees_all or earlier.job.submitter == view.caller_name
    known = {redacted(target): target for target in await _targets(job_store, earlier)} if own else {}
    why = "is no longer known" if own else f"is known only to {earlier.job.submitter}"
    if wrong := [
        Violation(f"spec.notify[{index}]", f"is redacted, and the whole URL or address of {like} {why}; write it again")
        for index, target in enumerate(spec.notify)
        if REDACTED in target and target not in known
    ]:
        raise errors.invalid(wrong)
    whole = job_pb2.JobSpec()
    whole.CopyFrom(spec)
    whole.notify[:] = [known.get(target, target) for target in spec.notify]
    return whole


async def _earlier(state: State, archived_jobs: ArchivedJobs, view: View, like: str) -> Record:
    """Return the earlier job, or one of an array."""
    try:
        return await archived_jobs.get(view, like)
    except Problem as problem:
        if problem.reason != IS_ARRAY:
            raise
    array = await archived_jobs.array(view, like)
    return array.first if isinstance(array, ArchivedArray) else state.records[next(iter(array.ids))]


async def _targets(job_store: JobStore, earlier: Record) -> Sequence[str]:
    """Return the whole targets of a job, or of its array, if they are still kept."""
    task = earlier.spec.array_task
    entry = await job_store.store.get(NOTIFICATIONS + (task.array_id if task else earlier.id))
    return load_notifications(entry).targets if entry else ()
