"""What goes on beside its caller is told of where it fails, unless that was for the caller alone."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from cotenant.codec import errors
from cotenant.rpc import task_cancellation
from cotenant.rpc.task_group import Background
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


@pytest.mark.parametrize("deaf", [0, 1, 3])
async def test_a_task_that_loses_its_cancel_is_told_of_and_cancelled_again(
    deaf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_cancellation, "AGAIN_SECONDS", 0.01)
    background, heard = Background(), 0

    async def work() -> None:
        nonlocal heard
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                heard += 1
                if heard > deaf:
                    raise

    background.forever("deaf", work)
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await background.close()
    assert heard == deaf + 1
    assert [(line["event"], line["task"]) for line in logs] == [("task_goes_on", "deaf")] * deaf


async def test_a_task_that_never_ends_is_left_behind_and_its_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_cancellation, "AGAIN_SECONDS", 0.01)
    over = False

    async def never() -> None:
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    background = Background()
    task = background.start(never())
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await background.close()
    assert not task.done()
    assert logs[-1]["event"] == "task_left_behind"
    assert "never" in logs[-1]["at"]
    over = True
    task.cancel()
    await asyncio.wait([task])
