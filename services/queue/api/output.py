"""A job's output and files, relayed from its nodes through placement."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from cotenant.codec import errors
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


class JobOutput:
    """Relays the output of one attempt, or of all attempts in sequence."""

    def __init__(self, state: State, placement: placement_service_pb2_grpc.PlacementServiceAsyncStub) -> None:
        self._state, self._placement = state, placement

    async def read(self, record: Record, request: pb.ReadLogsRequest) -> AsyncIterator[pb.ReadLogsResponse]:
        """Yield a job's output; with `follow` through all of its attempts."""
        first = request.attempt or record.attempt_number
        while attempt := await self._attempt(record, request, first):
            async for piece in self._pieces(record, attempt, request):
                yield pb.ReadLogsResponse(rank=piece.rank, data=piece.data, truncated=piece.truncated)
            if not request.follow or request.attempt:
                return
            first = attempt.number + 1

    async def read_files(self, record: Record, request: pb.ReadFilesRequest) -> AsyncIterator[pb.ReadFilesResponse]:
        """Yield files of an attempt's working directory, from the node of one of its ranks.

        Raises:
            Problem: it has none, or the agent is disconnected.
        """
        if record.spec.working_directory:
            raise errors.failed_precondition(
                "NOT_KEPT_HERE",
                f"{record.id} runs in {record.spec.working_directory}, which belongs to its nodes; copy from there",
            )
        attempts = [one for one in (*record.job.past_attempts, record.job.attempt) if one.number]
        wanted = [one for one in attempts if one.number == request.attempt] if request.attempt else attempts[-1:]
        if not wanted and request.attempt:
            raise errors.not_found("attempt", f"{record.id}/{request.attempt}")
        if not wanted or wanted[0].state == job_pb2.ATTEMPT_STATE_ASSIGNED:
            raise errors.failed_precondition("NO_FILES", f"{record.id} has not started yet, so it has no files")
        call = placement_pb2.ReadAttemptLogsRequest(
            job_id=record.id,
            number=wanted[0].number,
            rank=request.rank,
            node_ids=[_node_of(wanted[0], request.rank)],
            files=request.files,
        )
        try:
            async for piece in self._placement.ReadAttemptLogs(call):
                if piece.HasField("file"):
                    yield pb.ReadFilesResponse(part=piece.file)
        except grpc.aio.AioRpcError as error:
            raise errors.from_error(error) from None

    async def _attempt(self, record: Record, request: pb.ReadLogsRequest, first: int) -> job_pb2.Attempt | None:
        """Return the requested attempt, or the first from a number on; with `follow`, wait until it runs."""
        watcher = self._state.watch(record.id)
        watcher.notify(record.id)
        try:
            async for _ in watcher.changes():
                job = self._state.records[record.id].job if record.id in self._state.records else record.job
                attempts = [one for one in (*job.past_attempts, job.attempt) if one.number >= max(1, first)]
                if request.attempt:
                    attempts = [one for one in attempts if one.number == request.attempt]
                if attempts and attempts[0].state != job_pb2.ATTEMPT_STATE_ASSIGNED:
                    return attempts[0]
                if record.phase.ended or not request.follow:
                    if request.attempt and not attempts:
                        raise errors.not_found("attempt", f"{record.id}/{request.attempt}")
                    return None
        finally:
            self._state.unwatch(watcher)
        return None

    async def _pieces(
        self, record: Record, attempt: job_pb2.Attempt, request: pb.ReadLogsRequest
    ) -> AsyncIterator[placement_pb2.ReadAttemptLogsResponse]:
        call = placement_pb2.ReadAttemptLogsRequest(
            job_id=record.id,
            number=attempt.number,
            follow=request.follow,
            tail_bytes=request.tail_bytes,
            node_ids=[allocation.node_id for allocation in attempt.allocations],
        )
        if request.HasField("rank"):
            call.rank = request.rank
        try:
            async for piece in self._placement.ReadAttemptLogs(call):
                yield piece
        except grpc.aio.AioRpcError as error:
            raise errors.from_error(error) from None


def _node_of(attempt: job_pb2.Attempt, rank: int) -> str:
    """Return the node on which a rank of an attempt runs or ran.

    Raises:
        Problem: it has no such rank.
    """
    for allocation in attempt.allocations:
        if any(task.rank == rank for task in allocation.tasks):
            return allocation.node_id
    raise errors.not_found("rank", str(rank))
