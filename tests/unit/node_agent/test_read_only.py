"""File systems that turn read-only under a running agent: real mounts in a mount namespace of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import need_groups, until
from tests.unit.node_agent.conftest import end_jobs
from tests.unit.node_agent.jobs import CPUS, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts
from cotenant.v1 import job_pb2

pytestmark = pytest.mark.root

READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'
WRITABLE = 'until umount "$1"; do sleep 0.01; done'  # it is busy while the agent reads a file of it


LOG = "agent.log"


def need_namespaces() -> None:
    if os.getuid() != 0 or not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("needs root, unshare and nsenter")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel or container gives no mount namespace")


@pytest.fixture
async def apart(placement: Placement, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    """An agent whose mounts are its own."""
    need_namespaces()
    logged = ("sh", "-c", 'exec "$@" > "$0" 2>&1', str(tmp_path / LOG))
    agent = AgentProcess(placement, tmp_path / "state", prefix=("unshare", "--mount", *logged))
    await agent.start()
    await placement.connected()
    yield agent
    await agent.end(signal.SIGKILL)
    await end_jobs(tmp_path / "state")


async def mounted(agent: AgentProcess, script: str, path: Path | str) -> None:
    """Run a line of shell among the agent's mounts."""
    assert agent.process
    words = ["nsenter", "--mount", "--root", f"--target={agent.process.pid}", "sh", "-c", script, "sh", str(path)]
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 0, said


async def runs(placement: Placement, job_id: str) -> None:
    placement.assign(shell(job_id, "exec sleep 600", tasks=[task(cpus=CPUS[:1])]))
    await placement.running(job_id)


async def stopped(placement: Placement, job_id: str) -> None:
    placement.send(stops=[stop_order(job_id, grace_seconds=0)])
    assert (await placement.ended(job_id)).message == ""


async def test_a_read_only_state_directory_refuses_jobs_and_loses_none(
    placement: Placement, apart: AgentProcess, tmp_path: Path
) -> None:
    placement.acknowledge_ends = True
    placement.assign(shell("there", "exec sleep 600"))
    await placement.running("there")
    await mounted(apart, READ_ONLY, tmp_path / "state")
    placement.assign(shell("new", "true", tasks=[task(cpus=CPUS[:1])]))
    assert "Read-only file system" in (await placement.ended("new")).message
    assert placement.end("there") is None
    await mounted(apart, WRITABLE, tmp_path / "state")
    await runs(placement, "later")
    await stopped(placement, "later")
    await stopped(placement, "there")


async def test_a_directory_on_a_read_only_disk_is_moved_once_it_is_writable(
    placement: Placement, apart: AgentProcess, tmp_path: Path
) -> None:
    placement.acknowledge_ends = True
    await runs(placement, "there")
    attempts, kept = tmp_path / "state" / "attempts", tmp_path / "state" / "kept"
    await mounted(apart, READ_ONLY, tmp_path / "state")
    placement.send(stops=[stop_order("there", grace_seconds=0)])
    await placement.ended("there")
    await until(lambda: "attempt_retention_failed" in (tmp_path / LOG).read_text())
    assert (attempts / "there-1").is_dir()
    await mounted(apart, WRITABLE, tmp_path / "state")
    await until(lambda: (kept / "there-1").exists() and not (attempts / "there-1").exists())


async def test_read_only_control_groups_refuse_a_job_and_accept_the_next(
    placement: Placement, apart: AgentProcess
) -> None:
    need_groups("cpuset")
    await runs(placement, "there")
    roots = sorted({mount.root for mount in find_mounts()})
    for root in roots:
        await mounted(apart, READ_ONLY, root)
    placement.send(stops=[stop_order("there", grace_seconds=0)])
    await placement.ended("there")  # its supervisor has mounts of its own, or kills what it may not freeze
    placement.assign(shell("new", "true", tasks=[task(cpus=CPUS[:1])]))
    assert "Read-only file system" in (await placement.ended("new")).message
    for root in roots:
        await mounted(apart, WRITABLE, root)
    await runs(placement, "later")
    await stopped(placement, "later")


async def test_an_agent_started_with_read_only_control_groups_reports_it_and_runs_jobs(
    placement: Placement, tmp_path: Path
) -> None:
    need_namespaces()
    need_groups("cpuset")
    roots = " ".join(sorted({mount.root for mount in find_mounts()}))
    script = f'for one in {roots}; do mount --bind $one $one && mount -o remount,bind,ro $one; done; exec "$@"'
    agent = AgentProcess(placement, tmp_path / "state", prefix=("unshare", "--mount", "sh", "-c", script, "sh"))
    await agent.start()
    try:
        hello = await placement.connected()
        assert any("control group" in sentence or "cgroup" in sentence for sentence in hello.inventory.not_enforced)
        await runs(placement, "job")
        await stopped(placement, "job")
    finally:
        await agent.end(signal.SIGKILL)
        await end_jobs(tmp_path / "state")


async def test_an_agent_started_with_a_read_only_directory_continues_its_jobs(
    placement: Placement, tmp_path: Path
) -> None:
    need_namespaces()
    agent = AgentProcess(placement, tmp_path / "state")
    await agent.start()
    await placement.connected()
    await runs(placement, "there")
    await agent.end(signal.SIGKILL)
    attempts = tmp_path / "state" / "attempts"
    (attempts / "unstarted-1").mkdir()
    script = f'set -- {attempts} "$@"; {READ_ONLY}; shift; exec "$@"'
    agent = AgentProcess(placement, tmp_path / "state", prefix=("unshare", "--mount", "sh", "-c", script, "sh"))
    await agent.start()
    try:
        hello = await placement.connected(2)
        assert [(report.job_id, report.state) for report in hello.attempts] == [
            ("there", job_pb2.ATTEMPT_STATE_RUNNING)
        ]
        await stopped(placement, "there")
    finally:
        await agent.end(signal.SIGKILL)
        await end_jobs(tmp_path / "state")
