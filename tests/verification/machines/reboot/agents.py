"""An agent whose state is on a disk that outlives the machine."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import NODE
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control.agent import AgentConfig

DISK = Path(os.environ.get("COTENANT_PERSISTENT", "/nonexistent"))
STARTS = DISK / "starts"  # a line for each start of a job, in a file of its name
ENDED, RUNNING = "ended", "running"


def agent_on_disk(placement: Placement) -> RunningAgent:
    return RunningAgent(AgentConfig(NODE, DISK / "state", placement.endpoint, gpus="fake:2"))
