"""What goes on beside its caller is told of where it fails, unless that was for the caller alone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from cotenant.rpc import errors
from cotenant.rpc.background import Background
from cotenant.store.port import StoreUnavailable


class Refusal(Exception):
    """One of a service's own."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreUnavailable("etcd is away"), False),
        (errors.not_found("node", "n1"), False),
        (Refusal(), False),
        (KeyError("a fault"), True),
    ],
)
async def test_of_work_whose_caller_has_gone_only_faults_are_told(error: Exception, told: bool) -> None:
    background, may_fail, failed = Background(Refusal), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_fail.wait()
        asyncio.get_running_loop().call_later(0.01, failed.set)  # after those who watch the task
        raise error

    caller = asyncio.create_task(background.finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with suppress(asyncio.CancelledError):
        await caller
    with capture_logs() as logs:
        may_fail.set()
        await failed.wait()
    assert [line["event"] for line in logs] == ["background_failed"] * told
