"""The composition root of `cotenant serve agent`.

A service manager must end this process alone, not all that it has started: with systemd, `KillMode=process`, and
`Delegate=yes` where the agent is to stay within its unit's limits.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from cotenant.node_agent.agent import Agent, AgentConfig


async def serve(config: AgentConfig, on_start: Callable[[], None] = lambda: None) -> None:
    """Run an agent until SIGTERM or SIGINT; jobs run on. `on_start` is told once it knows what runs on the node.

    Raises:
        AnotherAgent: the state directory is in use.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for caught in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(caught, stop.set)
    await Agent(config, on_start=on_start).run(stop)
