"""An agent without descriptors: what it cannot read is unknown, neither absent nor empty."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from tests.unit.node_agent.conditions import alive, need_groups, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import NODE, shell
from tests.unit.node_agent.placement import Placement
from tests.unit.node_agent.test_restarts import supervisor_pid

from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.orphan_processes import marked_processes
from cotenant.node_agent.supervisor.cgroups import GroupError
from cotenant.v1 import job_pb2


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Keep this process from opening another file; what is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.root
async def test_an_attempt_is_concluded_once_there_are_descriptors_again(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    need_groups("pids")
    placement.assign(shell("orphaned", f"echo $$ > {tmp_path}/pid; sleep 3600 & wait"))
    await placement.running("orphaned")
    job = await until(lambda: written_number(tmp_path / "pid"))
    supervisor = supervisor_pid(agent.config.state_dir, "orphaned")
    with structlog.testing.capture_logs() as logs:
        with no_descriptors():
            os.kill(supervisor, signal.SIGKILL)
            await until(lambda: any(line["event"] == "conclusion_delayed" for line in logs))
            assert placement.end("orphaned") is None
        end = await placement.ended("orphaned")
    assert (end.state, end.message) == (
        job_pb2.ATTEMPT_STATE_FAILED,
        "its supervisor died; the job's remaining processes were killed",
    )
    assert not alive(job)
    node_group = open_node_group(NODE)
    assert node_group is not None
    await until(lambda: not node_group.child("orphaned-1").exists())
    assert not [line for line in logs if line["event"] == "background_task_failed"]


@pytest.mark.root
def test_a_group_whose_processes_cannot_be_read_is_not_empty_and_not_removed() -> None:
    need_groups("pids")
    node_group = open_node_group(f"{NODE}-blind")
    assert node_group is not None
    group = node_group.child("busy-1")
    group.create()
    try:
        group.child("below").create()
        assert group.pids() == set()
        with no_descriptors():
            with pytest.raises(GroupError, match="Too many open files"):
                group.pids()
            assert not group.remove(timeout_seconds=0)
        assert group.exists()
    finally:
        assert group.remove()
        node_group.remove()


def test_an_unreadable_state_is_not_a_missing_one(tmp_path: Path) -> None:
    directory = AttemptDirectory(tmp_path, AttemptKey("job", 1))
    directory.path.mkdir()
    assert directory.status() is None
    (directory.path / "state.json").write_text("{}")
    assert directory.status() is None
    with no_descriptors():
        for read in (directory.status, directory.last_log_line, lambda: marked_processes("A=b")):
            with pytest.raises(OSError, match="Too many open files"):
                read()
