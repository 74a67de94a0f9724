from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node_agent.jobs import NODE
from tests.node_agent.placement import Placement

from cotenant.node_agent.agent import Agent, AgentConfig


@pytest.fixture
async def placement() -> AsyncIterator[Placement]:
    standing = Placement()
    await standing.start()
    yield standing
    await standing.stop()


class RunningAgent:
    """An agent in this process that a test may stop and start again on the same state."""

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
