"""Who sleeps, and for how long, so that a test can tell that nobody waits."""

from __future__ import annotations

import asyncio

import pytest


def heard_sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Note for how long whoever sleeps does, but for those who only give others a turn."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def heard(seconds: float) -> None:
        if seconds > 0:
            slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", heard)
    return slept
