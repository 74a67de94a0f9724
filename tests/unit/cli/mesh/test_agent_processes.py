"""Agent processes before and after they receive their settings."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.cli.mesh.agent_processes import AgentFailed, AgentProcess, AgentProcesses
from cotenant.node_agent.control.agent_config import AgentConfig

SECONDS = 60.0


async def test_a_process_exits_if_its_parent_exits_before_sending_settings() -> None:
    process = AgentProcess("a")
    process.close_input()
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


async def test_processes_waiting_for_settings_are_closed_with_the_others(tmp_path: Path) -> None:
    agents = AgentProcesses(["a", "b"])
    waiting = list(agents._waiting.values())
    await agents.close()
    assert [await process.wait() for process in waiting] == [0, 0]


def printing(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_output_before_the_answer_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('found 2 GPUs'); print('x' * 70_000); print('[]'); print('{\"ready\": true}')"
    process = AgentProcess("a")
    await process.end()
    monkeypatch.setattr(process, "_process", printing(script))
    async with asyncio.timeout(SECONDS):
        assert await process.answer() == {"ready": True}
        await process.end()


async def test_settings_of_another_release_are_rejected_with_a_hint() -> None:
    process = AgentProcess("a")
    process.send(b'{"config": "{\\"node_id\\": \\"a\\"}", "tls": null, "descriptors_max": 1024}\n')
    async with asyncio.timeout(SECONDS):
        answer = await process.answer()
        assert "restart `cotenant up`" in answer["error"]
        assert answer["bad_settings"]
        assert await process.wait() == 1
