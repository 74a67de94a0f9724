"""Asks the queue to move attempts away from where they hurt others; what fails is asked again with the next window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from cotenant.core.policy.protocols import NodeWindow
from cotenant.rpc.task_group import Background
from cotenant.v1 import job_service_pb2, job_service_pb2_grpc

log = structlog.get_logger()

AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
)

Attempt = tuple[str, int]  # job, number
Tell = Callable[[str, Attempt, str], None]  # the node, and what came of it in a sentence


class Moves:
    """Moves that were asked for, until the queue has answered or the attempt is gone."""

    def __init__(self, queue: grpc.aio.Channel | None, tell: Tell) -> None:
        self._jobs: Any = job_service_pb2_grpc.JobServiceStub(queue) if queue is not None else None
        self._tell = tell
        self._wanted: dict[str, dict[Attempt, str]] = {}  # by node, with the reason
        self._asked: set[Attempt] = set()
        self._background = Background()

    def want(self, node_id: str, attempt: Attempt, reason: str) -> None:
        """Have an attempt moved away from a node."""
        if self._jobs is None:
            log.warning("move_not_possible", job=attempt[0], why="contention knows of no queue")
            self._tell(node_id, attempt, "could not be moved: contention knows of no queue")
        else:
            self._wanted.setdefault(node_id, {})[attempt] = reason

    def see(self, window: NodeWindow) -> None:
        """Ask for what is still there, and forget what has gone."""
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
            log.warning("move_failed", job=job_id, code=error.code().name, details=error.details())
            if error.code() in AGAIN:
                return
            self._tell(node_id, attempt, f"could not be moved: {error.details()}")
        else:
            log.info("move_asked", job=job_id, number=number, reason=reason)
            self._tell(node_id, attempt, "the queue moves it away")
        finally:
            self._asked.discard(attempt)
        self._wanted.get(node_id, {}).pop(attempt, None)

    async def close(self) -> None:
        """Ask no more."""
        await self._background.close()
