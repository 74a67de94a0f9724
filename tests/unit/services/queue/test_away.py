"""The queue keeps retrying while placement is unavailable, and logs it once in a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from structlog.testing import capture_logs
from tests.unit.services.mesh import until

from cotenant.internal.v1 import placement_service_pb2 as pb
from cotenant.services.queue.attempts import attempt_watcher as module
from cotenant.services.queue.attempts.attempt_watcher import AttemptWatcher


class Placement:
    """Unavailable except for one answer."""

    def __init__(self) -> None:
        self.calls, self.heard_at = 0, 0

    async def WatchAttempts(self, request: pb.WatchAttemptsRequest) -> AsyncIterator[pb.WatchAttemptsResponse]:
        self.calls += 1
        if self.calls == self.heard_at:
            yield pb.WatchAttemptsResponse(revision=1)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away")


async def test_an_unavailable_placement_is_logged_once_per_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    placement, nothing = Placement(), Mock()
    stub: Any = placement
    attempt_watcher = AttemptWatcher(nothing, nothing, stub, nothing, nothing, nothing)
    with capture_logs() as logs:
        following = asyncio.create_task(attempt_watcher.run())
        await until(lambda: placement.calls >= 15)
        assert [entry["event"] for entry in logs] == ["placement_disconnected"]
        placement.heard_at = placement.calls + 1
        await until(lambda: placement.calls >= placement.heard_at + 15)
        following.cancel()
    assert [entry["event"] for entry in logs] == ["placement_disconnected"] * 2
    assert attempt_watcher.connections == 1
