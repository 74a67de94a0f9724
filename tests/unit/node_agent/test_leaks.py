"""Many short jobs leave nothing behind but retained output."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import NODE, shell
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.runtime.socket_paths import socket_directory

JOBS = 30  # a thousand in benchmarks/agent.py


async def test_short_jobs_leave_no_groups_descriptors_processes_or_files(
    placement: Placement, agent: RunningAgent
) -> None:
    await agent.stop()
    await agent.start(kept_max=5)
    await placement.connected(2)
    placement.acknowledge_ends = True
    placement.assign(shell("warm-up", "true"))
    await placement.ended("warm-up")
    await until(lambda: not list((agent.config.state_dir / "attempts").iterdir()))
    descriptors, children = psutil.Process().num_fds(), set(psutil.Process().children())
    for number in range(JOBS):
        placement.assign(shell(f"short-{number}", "echo x"))
    for number in range(JOBS):
        await placement.ended(f"short-{number}")
    await until(lambda: not list((agent.config.state_dir / "attempts").iterdir()))
    await until(lambda: len(list((agent.config.state_dir / "kept").iterdir())) == 5)
    await until(lambda: set(psutil.Process().children()) <= children)
    assert psutil.Process().num_fds() <= descriptors
    assert [path.name for path in socket_directory(agent.config.state_dir).iterdir()] == ["notify"]
    group = open_node_group(NODE)
    if group is not None:
        assert not [name for path in group.paths() for name in os.listdir(path) if (Path(path) / name).is_dir()]
