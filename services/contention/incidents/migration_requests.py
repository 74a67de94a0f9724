"""Migration requests to the queue for attempts that slow others down; failed ones are retried with the next window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from cotenant.core.policy.protocols import NodeWindow
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.v1 import job_service_pb2, job_service_pb2_grpc

log = structlog.get_logger()

RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
)

Attempt = tuple[str, int]  # job, number
ReportOutcome = Callable[[str, Attempt, str], None]  # called with the node id, the attempt and the outcome as text


class MigrationRequests:
    """Pending migration requests, until the queue has answered or the attempt is gone."""

    def __init__(self, queue: grpc.aio.Channel | None, report: ReportOutcome) -> None:
        self._jobs: Any = job_service_pb2_grpc.JobServiceStub(queue) if queue is not None else None
        self._report = report
        self._wanted: dict[str, dict[Attempt, str]] = {}  # by node, with the reason
        self._asked: set[Attempt] = set()
        self._background = BackgroundTasks()

    def add(self, node_id: str, attempt: Attempt, reason: str) -> None:
        """Request the migration of an attempt away from a node."""
        if self._jobs is None:
            log.warning("migration_unavailable", job=attempt[0], why="contention has no queue")
            self._report(node_id, attempt, "could not be moved: contention has no queue")
        else:
            self._wanted.setdefault(node_id, {})[attempt] = reason

    def send_pending(self, window: NodeWindow) -> None:
        """Send the requests of attempts that are still on the node, and drop the others."""
        wanted = self._wanted.pop(window.node_id, {})
        present = {(at.job_id, at.number) for at in window.attempts}
        if wanted := {attempt: reason for attempt, reason in wanted.items() if attempt in present}:
            self._wanted[window.node_id] = wanted
        for attempt, reason in wanted.items():
            if attempt not in self._asked:
                self._asked.add(attempt)
                self._background.start(self._ask(window.node_id, attempt, reason))

    async def _ask(self, node_id: str, attempt: Attempt, reason: str) -> None:
        job_id, number = attempt
        request = job_service_pb2.MoveJobRequest(id=job_id, number=number, reason=reason)
        try:
            await self._jobs.MoveJob(request)
        except grpc.aio.AioRpcError as error:
            log.warning("migration_request_failed", job=job_id, code=error.code().name, details=error.details())
            if error.code() in RETRYABLE:
                return
            self._report(node_id, attempt, f"could not be moved: {error.details()}")
        else:
            log.info("migration_requested", job=job_id, number=number, reason=reason)
            self._report(node_id, attempt, "the queue moves it away")
        finally:
            self._asked.discard(attempt)
        self._wanted.get(node_id, {}).pop(attempt, None)

    async def close(self) -> None:
        """Cancel requests in flight."""
        await self._background.close()
