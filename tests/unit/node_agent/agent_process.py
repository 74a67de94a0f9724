"""An agent in a process of its own that can be killed at any moment."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.node_agent.jobs import NODE
from tests.unit.node_agent.placement import Placement

AGENT = """
import asyncio, json, os, pathlib, signal, sys
from cotenant import file_descriptors
from cotenant.node_agent.__main__ import serve
from cotenant.node_agent.control import attempt_manager
from cotenant.node_agent.control.agent import AgentConfig
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.runtime import attempt_cores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
moments = {
    "change": (attempt_cores, "change"),
    "replace_assignment": (AttemptDirectory, "replace_assignment"),
    "answer": (AttemptManager, "_answer"),
}
if sys.argv[2]:
    setattr(*moments[sys.argv[2]], die)
if sys.argv[3]:
    cgroup_mounts.open_node_group = lambda _: None
if sys.argv[4] != "0":
    file_descriptors.raise_limit(int(sys.argv[4]))
fields = json.loads(sys.argv[1])
fields["state_dir"] = pathlib.Path(fields["state_dir"])
asyncio.run(serve(AgentConfig(**fields)))
"""


class AgentProcess:
    """An agent process that can be restarted on the same state, or be made to die at a given moment of a resize.

    `prefix` is a command that runs the agent's command, perhaps as another user.
    """

    def __init__(self, placement: Placement, state_dir: Path, *, prefix: Sequence[str] = (), **more: Any) -> None:
        self._prefix = prefix
        self._fields: dict[str, Any] = {
            "node_id": NODE,
            "state_dir": str(state_dir),
            "placement_endpoint": placement.endpoint,
            "gpus": "fake:1",
            **more,
        }
        self.process: asyncio.subprocess.Process | None = None
        self.descriptors_max = 0  # what jobs get, where the agent is to raise its own limit

    async def start(self, dies_at: str = "", *, without_groups: bool = False) -> None:
        words = [json.dumps(self._fields), dies_at, "without groups" if without_groups else ""]
        words.append(str(self.descriptors_max))
        self.process = await asyncio.create_subprocess_exec(*self._prefix, sys.executable, "-c", AGENT, *words)

    async def restart(self, dies_at: str = "", *, without_groups: bool = False) -> None:
        await self.end(signal.SIGTERM)
        await self.start(dies_at, without_groups=without_groups)

    async def ended(self) -> int:
        assert self.process
        return await self.process.wait()

    async def end(self, how: signal.Signals) -> int:
        assert self.process
        self.process.send_signal(how)
        return await self.process.wait()
