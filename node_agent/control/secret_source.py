"""Fetches the secrets of a job from the queue for its launch, over the connection to placement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.control.folder_source import FINAL, reason_of
from cotenant.node_agent.control.output_upload import NotConnected
from cotenant.node_agent.runtime.uploaded_folder import CannotFetch, FetchStopped
from cotenant.v1.secret_service_pb2 import ReadSecretsRequest

if TYPE_CHECKING:
    from cotenant.v1.secret_service_pb2_grpc import SecretServiceAsyncStub

log = structlog.get_logger()

PATIENCE_SECONDS = 120.0
CALL_SECONDS = 10.0


class SecretSource:
    """Reads secrets, and tries again while the queue is out of reach; `stub` raises `NotConnected`."""

    def __init__(
        self,
        node_id: str,
        stub: Callable[[], SecretServiceAsyncStub],
        rng: Random,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._node_id, self._stub, self._rng = node_id, stub, rng
        self._patience_seconds = patience_seconds

    async def read(self, assignment: agent_pb2.Assignment, stop_asked: asyncio.Event) -> dict[str, bytes]:
        """Return the values of the secrets that a job names, by name.

        Raises:
            CannotFetch: the queue does not have them, or is out of reach for too long.
            FetchStopped: the attempt was stopped.
        """
        wanted = {use.name for use in assignment.spec.secrets}
        request = ReadSecretsRequest(job_id=assignment.job_id, number=assignment.number, node_id=self._node_id)
        began = time.monotonic()
        backoff = Backoff(first_seconds=0.1, longest_seconds=5.0, rng=self._rng)
        while not stop_asked.is_set():
            try:
                answer = await self._stub().ReadSecrets(request, timeout=CALL_SECONDS)
            except (grpc.aio.AioRpcError, NotConnected) as error:
                reason = reason_of(error)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in FINAL:
                    raise CannotFetch(f"its secrets cannot be fetched: {reason}") from None
                if time.monotonic() - began > self._patience_seconds:
                    waited = f"{self._patience_seconds:.0f} s"
                    raise CannotFetch(f"its secrets could not be fetched for {waited}: {reason}") from None
                log.info("secret_fetch_retried", job=assignment.job_id, why=reason)
                await asyncio.sleep(backoff.next_seconds())
                continue
            found = {one.name: one.value for one in answer.secrets}
            if missing := sorted(wanted - found.keys()):
                raise CannotFetch(f"the queue has not sent its secrets {', '.join(missing)}")
            return found
        raise FetchStopped
