from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.fake_driver import FakeDriver, compiled
from tests.unit.node_agent.jobs import NODE
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control.agent import Agent, AgentConfig
from cotenant.node_agent.runtime.attempt_directory import find_directories


@pytest.fixture
async def placement() -> AsyncIterator[Placement]:
    standing = Placement()
    await standing.start()
    yield standing
    await standing.stop()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver for this process's children; the agent's own process never loads it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library))
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "driver"))
    monkeypatch.delenv("FAKE_NVML", raising=False)
    return FakeDriver(tmp_path / "driver")


class RunningAgent:
    """An agent in this process that a test may stop and restart on the same state."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, **changes: Any) -> None:
        self.config = replace(self.config, **changes)
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(Agent(self.config).run(self._stop))

    async def stop(self) -> None:
        if self._task:
            self._stop.set()
            await self._task
            self._task = None


@pytest.fixture
async def agent(placement: Placement, tmp_path: Path) -> AsyncIterator[RunningAgent]:
    running = RunningAgent(
        AgentConfig(
            node_id=NODE,
            state_dir=tmp_path / "state",
            placement_endpoint=placement.endpoint,
            gpus="fake:2",
            sample_interval_seconds=0.2,
        )
    )
    await running.start()
    await placement.connected()
    yield running
    await running.stop()
    await end_jobs(running.config.state_dir)


@pytest.fixture
async def new_process(placement: Placement, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    """An agent in a process of its own, not started yet."""
    agent = AgentProcess(placement, tmp_path / "state")
    yield agent
    if agent.process and agent.process.returncode is None:
        await agent.end(signal.SIGKILL)
    await end_jobs(tmp_path / "state")


@pytest.fixture
async def agent_process(placement: Placement, new_process: AgentProcess) -> AgentProcess:
    await new_process.start()
    await placement.connected()
    return new_process


async def end_jobs(state_dir: Path) -> None:
    """Stop jobs that a test left running: agents do not."""
    for directory in find_directories(state_dir / "attempts"):
        status = directory.status()
        if status and directory.supervised():
            directory.write_stop_order(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.pid, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                await asyncio.to_thread(os.waitpid, status.pid, 0)  # ours, with no agent left to reap it
            await until(lambda lock=directory: not lock.supervised())  # type: ignore[misc]  # binds the loop's own
