"""Sessions in running jobs, relayed through placement to the node of a replica."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from cotenant.codec import errors
from cotenant.codec.errors import Violation
from cotenant.codec.session_checks import start_violations
from cotenant.codec.specs import PHASES
from cotenant.core.model.refusal import plural
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1 import placement_service_pb2_grpc
from cotenant.security import audit
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.session_pb2 import SessionStart

NOT_RUNNING = "JOB_NOT_RUNNING"


class JobSessions:
    """Opens sessions for callers who may change the job."""

    def __init__(
        self,
        state: State,
        archived_jobs: ArchivedJobs,
        placement: placement_service_pb2_grpc.PlacementServiceAsyncStub,
    ) -> None:
        self._state, self._archived_jobs, self._placement = state, archived_jobs, placement

    async def open(
        self, requests: AsyncIterator[pb.OpenSessionRequest]
    ) -> AsyncGenerator[pb.OpenSessionResponse, None]:
        """Carry a session: its first request says what it is to do; yield its frames.

        Raises:
            Problem: the caller may not, the job is not running, or the session cannot be opened or was cut off.
        """
        first = await anext(aiter(requests), None)
        start = first.start if first else SessionStart()
        audit.note_target(_target(start))
        if wrong := start_violations(start):
            raise errors.invalid(wrong)
        record = await self._archived_jobs.get(View(self._state), start.id)
        number, node_id = _place(record, start)
        await audit.log_stream(by_servicer=True)

        async def passed_on() -> AsyncIterator[placement_pb2.OpenAttemptSessionRequest]:
            yield placement_pb2.OpenAttemptSessionRequest(start=start, number=number, node_id=node_id)
            async for request in requests:
                yield placement_pb2.OpenAttemptSessionRequest(frame=request.frame)

        call = self._placement.OpenAttemptSession(passed_on())
        try:
            async for response in call:
                yield pb.OpenSessionResponse(frame=response.frame)
        except grpc.aio.AioRpcError as error:
            raise errors.from_error(error) from None
        finally:
            call.cancel()


def _place(record: Record, start: SessionStart) -> tuple[int, str]:
    """Return the attempt and the node of the replica that a session joins; fill in its rank.

    Raises:
        Problem: the job is not running, or has no such replica.
    """
    attempt = record.job.attempt
    if record.phase.ended or attempt.state != job_pb2.ATTEMPT_STATE_RUNNING:
        phase = PHASES.from_wire(record.job.phase).value.lower()
        how = f"has ended: it {phase}" if phase in ("succeeded", "failed") else f"is not running: it is {phase}"
        raise errors.failed_precondition(NOT_RUNNING, f"job {record.id} {how}")
    nodes = {task.rank: part.node_id for part in attempt.allocations for task in part.tasks}
    rank = start.rank if start.HasField("rank") else min(nodes, default=0)
    if rank not in nodes:
        has = f"job {record.id} has {plural(len(nodes), 'replica')}, with ranks from 0"
        raise errors.invalid([Violation("rank", f"is {rank}, but {has}")])
    start.rank = rank
    return attempt.number, nodes[rank]


def _target(start: SessionStart) -> dict[str, object]:
    """Return what the audit log says about a session."""
    told: dict[str, object] = {"id": start.id}
    if start.HasField("rank"):
        told["rank"] = start.rank
    if start.HasField("exec"):
        told["command"] = " ".join(start.exec.command)
    elif start.HasField("forward"):
        told["port"] = start.forward.port
    return told
