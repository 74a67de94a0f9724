"""Full disks and unwritable files: a clear status, and nothing half done."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import need_groups
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import job_pb2

NOT_LAUNCHED = job_pb2.ATTEMPT_STATE_NOT_LAUNCHED
FAILED, SUCCEEDED = job_pb2.ATTEMPT_STATE_FAILED, job_pb2.ATTEMPT_STATE_SUCCEEDED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take all blocks that are left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return filler


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Mount a disk over itself, so that whatever is opened there from now on cannot be written."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


async def on(disk: Path, placement: Placement, agent: RunningAgent) -> None:
    await agent.stop()
    await agent.start(state_dir=disk / "state")
    await placement.connected(2)


@pytest.mark.root
async def test_a_full_disk_refuses_jobs_until_it_has_space_again(
    small_disk: Path, placement: Placement, agent: RunningAgent
) -> None:
    await on(small_disk, placement, agent)
    placement.assign(shell("before", "exec sleep 60", tasks=[task(cpus=CPUS[1:])]))
    await placement.running("before")
    filler = fill(small_disk)
    for number in range(3):  # each would hold the core that the one before was refused
        placement.assign(shell(f"full-{number}", "true", tasks=[task(cpus=CPUS[:1])]))
        assert "No space left on device" in (await placement.ended(f"full-{number}")).message
    placement.assign(shell("odd", "true", tasks=[task(cpus=[10**6])]))
    assert "CPUs that this node does not have" in (await placement.ended("odd")).message
    placement.send(stops=[stop_order("before", grace_seconds=0)])
    assert (await placement.ended("before")).state == job_pb2.ATTEMPT_STATE_STOPPED
    filler.unlink()
    placement.assign(shell("after", "exit 0", tasks=[task(cpus=CPUS[:1])]))
    assert (await placement.ended("after")).state == SUCCEEDED
    await agent.stop()


@pytest.mark.root
async def test_a_job_stopped_on_a_read_only_disk_has_not_failed(
    small_disk: Path, placement: Placement, agent: RunningAgent
) -> None:
    await on(small_disk, placement, agent)
    placement.assign(shell("stopped", "exec sleep 60"))
    await placement.running("stopped")
    with read_only(small_disk):
        placement.send(stops=[stop_order("stopped", grace_seconds=0)])
        end = await placement.ended("stopped")
    assert (end.state, end.message) == (job_pb2.ATTEMPT_STATE_STOPPED, "")
    await agent.stop()


@pytest.mark.root
async def test_an_epoch_that_cannot_be_recorded_refuses_its_job(
    small_disk: Path, placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    await on(small_disk, placement, agent)
    placement.assign(shell("before", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 7"))
    await placement.running("before")
    fence = small_disk / "state" / "fence.jsonl"
    fence.unlink()
    fence.mkdir()  # it cannot be written; a mount with open files cannot be made read-only
    placement.assign(shell("refused", "true", epoch=11))
    end = await placement.ended("refused")
    assert "cannot record its epoch: Is a directory" in end.message
    assert (end.state, end.launch_cause) == (NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_DISK)
    (tmp_path / "go").touch()
    assert (await placement.ended("before")).exit.code == 7
    fence.rmdir()
    placement.assign(shell("after", "exit 0", epoch=12))
    assert (await placement.ended("after")).state == SUCCEEDED
    await agent.stop()


@pytest.mark.root
async def test_unwritable_control_groups_refuse_jobs_and_hold_nothing(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_groups("cpuset")
    placement.assign(shell("before", "exec sleep 60"))
    await placement.running("before")

    def refuse(self: Group) -> None:
        raise GroupError(f"cannot create the control group {self.paths()[0]}: Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Group, "create", refuse)
        for number in range(2):
            placement.assign(shell(f"refused-{number}", "true", tasks=[task(cpus=CPUS[:1])]))
            end = await placement.ended(f"refused-{number}")
            assert "Read-only file system" in end.message
            assert (end.state, end.launch_cause) == (NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_CGROUP)
    placement.assign(shell("after", "exit 0", tasks=[task(cpus=CPUS[:1])]))
    assert (await placement.ended("after")).state == SUCCEEDED
    placement.send(stops=[stop_order("before", grace_seconds=0)])
    await placement.ended("before")
    group = cgroup_mounts.open_node_group(NODE)
    assert group is not None
    assert not any(group.child(f"{name}-1").exists() for name in ("refused-0", "refused-1", "after", "before"))
