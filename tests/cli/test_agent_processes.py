"""The processes of agents, before and after they have their settings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cotenant.cli.agent_processes import AgentFailed, AgentProcess, AgentProcesses
from cotenant.node_agent.agent_config import AgentConfig

SECONDS = 60.0


async def test_a_process_whose_parent_ends_before_it_has_its_settings_ends_too() -> None:
    process = AgentProcess("a")
    process.leave()
    async with asyncio.timeout(SECONDS):
        assert await process.answer() == {}
        assert await process.wait() == 0


async def test_an_agent_that_cannot_run_says_why(tmp_path: Path) -> None:
    agents = AgentProcesses(["a"])
    agents.start([AgentConfig("a", tmp_path / "a", "127.0.0.1:1", gpus="fake:lots")], None)
    try:
        with pytest.raises(AgentFailed, match="'auto' or 'fake:N'") as failed:
            await agents.failed(SECONDS)
        assert failed.value.bad_settings
    finally:
        await agents.close()


async def test_processes_that_wait_for_their_settings_end_with_the_others(tmp_path: Path) -> None:
    agents = AgentProcesses(["a", "b"])
    waiting = list(agents._waiting.values())
    await agents.close()
    assert [await process.wait() for process in waiting] == [0, 0]
