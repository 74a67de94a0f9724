"""A server reports names that its process cannot resolve, for as long as a channel uses them."""

from __future__ import annotations

import asyncio

import pytest

from cotenant import name_resolution
from cotenant.name_resolution import NAMES
from cotenant.rpc.channel import connect
from cotenant.rpc.server import Server

PATIENCE_SECONDS = 30.0


async def test_a_server_reports_names_that_its_process_cannot_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_resolution, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(name_resolution, "SUSTAINED_SECONDS", 0.3)
    server = Server()
    await server.start()
    channel = connect("nowhere.invalid:7070")
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any("it cannot resolve nowhere.invalid: " in one.reason for one in server.problems()):  # noqa: ASYNC110  # a thread sets no event
                await asyncio.sleep(0.02)
        assert all(one.remedy for one in server.problems())
    finally:
        await channel.close()
        await server.stop()
    assert "nowhere.invalid" not in NAMES.hosts()
    assert not any("nowhere.invalid" in one.reason for one in server.problems())
