"""Records sleeps, so that a test can check that nothing waits."""

from __future__ import annotations

import asyncio

import pytest


def record_sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the recorded durations of all sleeps, except `sleep(0)`."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def heard(seconds: float) -> None:
        if seconds > 0:
            slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", heard)
    return slept
