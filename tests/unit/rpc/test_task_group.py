"""Failures of background tasks are logged, unless they are refusals for the caller."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from cotenant.codec import errors
from cotenant.rpc import task_cancellation
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.store.port import StoreUnavailable


class Refusal(Exception):
    """A service's own refusal."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreUnavailable("etcd is away"), False),
        (errors.not_found("node", "n1"), False),
        (Refusal(), False),
        (KeyError("a fault"), True),
    ],
)
async def test_only_faults_of_work_whose_caller_left_are_logged(error: Exception, told: bool) -> None:
    background, may_fail, failed = BackgroundTasks(Refusal), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_fail.wait()
        asyncio.get_running_loop().call_later(0.01, failed.set)  # after the task's callbacks
        raise error

    caller = asyncio.create_task(background.finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with suppress(asyncio.CancelledError):
        await caller
    with capture_logs() as logs:
        may_fail.set()
        await failed.wait()
    assert [line["event"] for line in logs] == ["background_task_failed"] * told


@pytest.mark.parametrize("deaf", [0, 1, 3])
async def test_a_task_that_ignores_its_cancellation_is_logged_and_cancelled_again(
    deaf: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_cancellation, "CANCEL_RETRY_SECONDS", 0.01)
    background, heard = BackgroundTasks(), 0

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
    assert [(line["event"], line["task"]) for line in logs] == [("task_ignored_cancellation", "deaf")] * deaf


async def test_a_task_that_never_ends_is_abandoned_and_its_location_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_cancellation, "CANCEL_RETRY_SECONDS", 0.01)
    over = False

    async def never() -> None:
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    background = BackgroundTasks()
    task = background.start(never())
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await background.close()
    assert not task.done()
    assert logs[-1]["event"] == "task_abandoned"
    assert "never" in logs[-1]["at"]
    over = True
    task.cancel()
    await asyncio.wait([task])
