"""The servicer of the public array API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cotenant.codec import errors
from cotenant.services.queue.api.array_pages import list_arrays
from cotenant.services.queue.api.submission import Submission
from cotenant.services.queue.jobs.archived_jobs import ArchivedArray, ArchivedJobs
from cotenant.services.queue.jobs.array_messages import archived_array_message, array_message, array_preview
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.desired_state import cancel_or_suspend, check_array_not_ended, resume, set_wish
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import CREATE_ARRAY, Change, idempotency_key_of
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import array_service_pb2 as pb
from cotenant.v1 import array_service_pb2_grpc, job_pb2


class ArrayServicer(array_service_pb2_grpc.ArrayServiceServicer):
    """Creates, reads and changes arrays as a whole."""

    def __init__(
        self,
        arrays: JobArrays,
        archived_jobs: ArchivedJobs,
        submission: Submission,
        stop_by_wish: Callable[[Record], None],
    ) -> None:
        """`stop_by_wish` stops a running job that is to be cancelled or suspended."""
        self._arrays, self._archived_jobs, self._submission = arrays, archived_jobs, submission
        self._state, self._stop_by_wish = arrays.state, stop_by_wish

    async def CreateArray(self, request: pb.CreateArrayRequest, context: Any) -> pb.CreateArrayResponse:
        """Check an array, commit it, acknowledge it."""
        first = await self._submission.submit(request, CREATE_ARRAY)
        if request.validate_only:
            return pb.CreateArrayResponse(array=array_preview(first))
        assert first.spec.array_task
        view = View(self._state)
        return pb.CreateArrayResponse(array=self._message(view, view.array(first.spec.array_task.array_id)))

    async def GetArray(self, request: pb.GetArrayRequest, context: Any) -> pb.GetArrayResponse:
        """Return one array."""
        view = View(self._state)
        return pb.GetArrayResponse(array=self._message(view, await self._archived_jobs.array(view, request.id)))

    async def ListArrays(self, request: pb.ListArraysRequest, context: Any) -> pb.ListArraysResponse:
        """Return arrays, newest first, page by page."""
        return await list_arrays(self._state, request)

    async def CancelArray(self, request: pb.CancelArrayRequest, context: Any) -> pb.CancelArrayResponse:
        """Cancel all jobs of an array; a running job ends once its attempt has stopped."""
        return pb.CancelArrayResponse(array=await self._wish(request, "CancelArray", job_pb2.JOB_PHASE_CANCELLED))

    async def SuspendArray(self, request: pb.SuspendArrayRequest, context: Any) -> pb.SuspendArrayResponse:
        """Suspend all jobs of an array; a running job is suspended once its attempt has stopped."""
        return pb.SuspendArrayResponse(array=await self._wish(request, "SuspendArray", job_pb2.JOB_PHASE_SUSPENDED))

    async def ResumeArray(self, request: pb.ResumeArrayRequest, context: Any) -> pb.ResumeArrayResponse:
        """Requeue all suspended jobs of an array."""
        return pb.ResumeArrayResponse(array=await self._change(request, "ResumeArray", resume))

    async def _wish(self, request: Any, method: str, wish: job_pb2.JobPhase.ValueType) -> pb.Array:
        return await self._change(
            request,
            method,
            lambda stored: cancel_or_suspend(stored, wish),
            instead=lambda stored: set_wish(stored, wish),
            may_have_ended=wish == job_pb2.JOB_PHASE_CANCELLED,
        )

    async def _change(
        self,
        request: Any,
        method: str,
        change: Change,
        *,
        instead: Change | None = None,
        may_have_ended: bool = False,
    ) -> pb.Array:
        """Change all jobs of an array that have not ended; for `instead` see `JobStore.change`."""
        key = idempotency_key_of(method, request.request_id, request)
        array = await self._archived_jobs.array(View(self._state), request.id)
        if isinstance(array, ArchivedArray):
            if not may_have_ended:
                check_array_not_ended(request.id, 0)
            return self._message(View(self._state), array)
        if not await self._arrays.job_store.find_result(key):
            if request.etag and request.etag != str(array.revision):
                raise errors.conflict("array", array.id)
            if not may_have_ended:
                check_array_not_ended(array.id, array.left)
            await self._arrays.change(array, change, key, instead=instead)
        if instead:
            for job_id in array.ids:
                self._stop_by_wish(self._state.records[job_id])
        return self._message(View(self._state), array)

    def _message(self, view: View, array: Array | ArchivedArray) -> pb.Array:
        """Return an array as this caller sees it.

        Raises:
            Problem: NOT_FOUND if it was deleted in between.
        """
        if isinstance(array, ArchivedArray):
            message = archived_array_message(array)
        elif view.sees_array(array):
            message = array_message(array, self._state.records)
        else:
            raise errors.not_found("array", array.id)
        view.redact(message)
        return message
