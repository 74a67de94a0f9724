"""One call of `WatchJobs`.

Theory of operation. A watch sends states, not events: what it holds of a change is the job's id, and when the id's turn
comes, the job's present state is sent. So a slow reader costs ids only, and sees the last of several changes. Ids are
taken in batches, and sent in messages of many jobs: a message costs more than a job. Together with a batch the complete
revision is taken (see `complete_revision`): every change up to it is in this batch or was in an earlier one, so the
batch's last message carries it.

A watch that resumes from a revision cannot know what was sent before. Jobs that have ended and jobs that were removed
are in the store with their revisions: those that are newer are sent. Phases in which a job holds resources, reasons and
progress are not stored: so every matching job that has not ended is sent. Of jobs that do not match (any more), those
that may have matched before are reported as removed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from cotenant.codec import errors
from cotenant.rpc.slices import Slices
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.job_views import is_basic, view_violations
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

Change = job_pb2.Job | str  # a job's present state, or the id of a removed job

MESSAGE_BYTES = 128 * 1024  # a message that has reached this size is sent
REVISION_SECONDS = 10.0  # how often a watch in which nothing happens is told a newer revision, if there is one


class JobWatch:
    """A watch of the jobs that match a filter.

    Raises:
        Problem: INVALID_ARGUMENT, FAILED_PRECONDITION or OUT_OF_RANGE, see `CompleteRevision.parse`.
    """

    def __init__(
        self, state: State, job_store: JobStore, archived_jobs: ArchivedJobs, request: pb.WatchJobsRequest
    ) -> None:
        if found := view_violations(request.view):
            raise errors.invalid(found)
        self._state, self._archived_jobs, self._request = state, archived_jobs, request
        self._revisions, self._removals = job_store.revisions, job_store.removals
        self._view, self._basic = View(state), is_basic(request.view)
        self._filter = JobFilter(request.filter, self._view)
        self._resumes = bool(request.after_revision)
        self._after = self._revisions.parse(request.after_revision, self._removals.floor) if self._resumes else 0
        self._synced = False
        self._open: set[str] = set()  # jobs that `until_ended` waits for
        # Only of filters that jobs may cease to match:
        self._sent: set[str] = set()
        self._reported: set[str] = set()  # as removed, after a resume

    async def responses(self) -> AsyncGenerator[pb.WatchJobsResponse, None]:
        """Yield the initial state, then changes, until all jobs have ended if that was asked for."""
        watcher = self._state.watch(concerned=self._concerns)
        try:
            told, told_at = self._revisions.text, time.monotonic()
            async for message in self._messages(self._resumed() if self._resumes else self._begun(), told):
                yield message
            while self._open or not self._request.until_ended:
                batch = await watcher.take()
                revision = self._revisions.text  # with no turn of the loop since the batch was taken
                async for message in self._messages(self._changes(batch), revision):
                    due = revision != told and time.monotonic() >= told_at + REVISION_SECONDS
                    if message.jobs or message.removed_job_ids or due:
                        yield message
                        told, told_at = message.revision or told, time.monotonic()
        finally:
            self._state.unwatch(watcher)

    async def _messages(self, changes: AsyncIterator[Change], revision: str) -> AsyncIterator[pb.WatchJobsResponse]:
        """Yield changes in messages; the last one, which may be empty, has the revision."""
        message, size_bytes, slices = pb.WatchJobsResponse(), 0, Slices()
        async for change in changes:
            await slices.step()
            if size_bytes >= MESSAGE_BYTES:
                yield message
                message, size_bytes = pb.WatchJobsResponse(), 0
            if isinstance(change, str):
                message.removed_job_ids.append(change)
                size_bytes += len(change)
            else:
                message.jobs.append(change)
                size_bytes += change.ByteSize()
        message.revision = revision
        message.synced, self._synced = not self._synced, True
        yield message

    # Initial state -------------------------------------------------------------------------------------------

    async def _begun(self) -> AsyncIterator[Change]:
        """Yield all matching jobs."""
        missing = dict.fromkeys(self._request.filter.ids)
        for job_id in list(await self._filter.matching_ids(self._state)):
            if record := self._state.records.get(job_id):
                missing.pop(job_id, None)
                yield self._job(record)
        for record in await self._archived_jobs.list(self._view, missing):
            if self._filter.matches(record):
                yield self._job(record)

    async def _resumed(self) -> AsyncIterator[Change]:
        """Yield what has changed since the revision."""
        removed, slices, records = dict(self._removals.since(self._after)), Slices(), self._state.records
        for job_id in list(await self._filter.matching_ids(self._state)):
            await slices.step()
            if record := records.get(job_id):
                if not record.phase.ended or record.revision > self._after:
                    yield self._job(record)
                else:
                    self._note_sent(job_id)
        if self._filter.may_unmatch:
            for job_id in list(await self._filter.without_changing().matching_ids(self._state)):
                await slices.step()
                if (record := records.get(job_id)) and self._may_have_ceased_to_match(record):
                    yield self._removed(job_id)
        missing = [job_id for job_id in self._request.filter.ids if job_id in removed]
        for record in await self._archived_jobs.list(self._view, missing):
            yield self._job(record)
        for job_id, tenant in removed.items():
            await slices.step()
            if self._filter.may_have_matched(job_id, tenant):
                yield self._removed(job_id)

    def _may_have_ceased_to_match(self, record: Record) -> bool:
        """Return whether a job does not match, and may have changed since the revision."""
        changed = record.revision > self._after or record.phase.holds_resources
        return changed and not self._filter.matches(record)

    # Changes -------------------------------------------------------------------------------------------------

    async def _changes(self, batch: Mapping[str, str | None]) -> AsyncIterator[Change]:
        slices = Slices()
        for job_id, tenant in batch.items():
            await slices.step()
            if (change := self._change(job_id, tenant)) is not None:
                yield change

    def _change(self, job_id: str, tenant: str | None) -> Change | None:
        """Return what to tell of a job that has changed, or was removed: then `tenant` is its tenant."""
        record = self._state.records.get(job_id)
        if record is None:
            self._open.discard(job_id)
            if tenant is not None and self._filter.may_have_matched(job_id, tenant) and self._may_be_known(job_id):
                return self._removed(job_id)
        elif self._filter.matches(record) or (
            self._request.until_ended and job_id in self._open and self._view.sees(record)
        ):
            return self._job(record)
        elif self._filter.may_unmatch and self._view.sees(record) and self._may_be_known(job_id):
            self._open.discard(job_id)
            return self._removed(job_id)
        return None

    def _concerns(self, record: Record) -> bool:
        """Return whether the removal of a job is to be told."""
        return self._filter.may_unmatch or self._filter.matches(record)

    def _may_be_known(self, job_id: str) -> bool:
        """Return whether the caller may know a job, as one that matches."""
        if not self._filter.may_unmatch or job_id in self._sent:
            return True
        return self._resumes and job_id not in self._reported

    # What is told --------------------------------------------------------------------------------------------

    def _job(self, record: Record) -> job_pb2.Job:
        if record.phase.ended:
            self._open.discard(record.id)
        elif self._request.until_ended and not self._synced:
            self._open.add(record.id)
        self._note_sent(record.id)
        return self._view.message(record, basic=self._basic)

    def _note_sent(self, job_id: str) -> None:
        if self._filter.may_unmatch:
            self._sent.add(job_id)
            self._reported.discard(job_id)

    def _removed(self, job_id: str) -> str:
        if self._filter.may_unmatch:
            self._sent.discard(job_id)
            if self._resumes:
                self._reported.add(job_id)
        return job_id
