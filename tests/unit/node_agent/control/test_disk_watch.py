"""No job fills its node's disk: an attempt that writes too much is evicted with a reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, shell, task
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control.disk_watch import DiskSpace, DiskWatch, Evictions, used_bytes
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.store.port import Put
from cotenant.store.sqlite import SqliteStore
from cotenant.v1 import job_pb2

FAILED = job_pb2.ATTEMPT_STATE_FAILED
MIB = 1024**2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.root
async def test_a_job_that_fills_the_stores_disk_is_evicted_with_a_reason(
    small_disk: Path, placement: Placement, agent: RunningAgent
) -> None:
    await agent.stop()
    store = SqliteStore(small_disk / "cotenant.sqlite", reserve_bytes=8 * MIB)
    await store.hold_ballast()
    await store.transact([], [Put("acknowledged", b"1")])
    await agent.start(state_dir=small_disk / "state", disk_reserve_bytes=8 * MIB)
    await placement.connected(2)
    placement.assign(shell("innocent", "exec sleep 60", tasks=[task(cpus=CPUS[1:])]))
    await placement.running("innocent")
    placement.assign(shell("greedy", "dd if=/dev/zero of=full bs=1M; exec sleep 60", tasks=[task(cpus=CPUS[:1])]))
    ended = await placement.ended("greedy")
    assert ended.state == FAILED
    assert ended.message.startswith("disk reserve used: only ")
    assert "its working directory was removed" in ended.message
    await until(lambda: not DiskSpace.of(small_disk, 8 * MIB).reserve_used)
    assert await store.get("acknowledged")
    await store.transact([], [Put("after", b"1")])
    assert not (await store.capacity()).why_stopped()
    await store.hold_ballast()
    assert (small_disk / "cotenant.sqlite-ballast").stat().st_size > MIB
    assert not placement.end("innocent")
    await store.close()


async def test_an_attempt_is_evicted_when_its_directory_exceeds_the_limit(
    placement: Placement, agent: RunningAgent
) -> None:
    await agent.stop()
    await agent.start(work_bytes_max=2_000_000)
    await placement.connected(2)
    placement.assign(shell("modest", "head -c 1000000 /dev/zero > some; exec sleep 60", tasks=[task(cpus=CPUS[1:])]))
    placement.assign(
        shell("greedy", "mkdir -p a/b; head -c 5000000 /dev/zero > a/b/c; exec sleep 60", tasks=[task(cpus=CPUS[:1])])
    )
    ended = await placement.ended("greedy")
    assert (ended.state, ended.message) == (FAILED, "disk limit exceeded: 5.0 MB of 2.0 MB")
    assert not placement.end("modest")


def test_files_in_subdirectories_count_and_holes_do_not(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "full").write_bytes(b"x" * MIB)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(100 * MIB)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert MIB <= used_bytes(tmp_path) < 2 * MIB
    assert used_bytes(tmp_path / "not there") == 0


def test_space_is_checked_more_often_the_less_is_left() -> None:
    free = [DiskSpace(free, 2**40, 2**27).pause_seconds for free in (2**40, 2**31, 2**28, 2**27)]
    assert free == sorted(free, reverse=True)
    assert (free[0], free[-1]) == (2.0, 0.05)


async def test_files_of_ended_attempts_are_removed_before_a_running_attempt_is_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "kept" / "a-1" / "work"
    old.mkdir(parents=True)
    (old / "checkpoint").write_bytes(b"x" * MIB)
    running = tmp_path / "attempts" / "b-1"
    running.mkdir(parents=True)
    (running / "data").write_bytes(b"x" * 4 * MIB)
    key = AttemptKey("b", 1)
    monkeypatch.setattr(DiskSpace, "of", lambda path, reserve: DiskSpace(0 if old.exists() else 10**9, 10**10, 10**8))
    stopped: list[AttemptKey] = []
    ends = Evictions(lambda key, grace: stopped.append(key))
    known = {key: Known(Status(key, 1, "RUNNING", 0.0))}
    await DiskWatch(tmp_path, known, lambda key: running, ends, reserve_bytes=10**8).check()
    assert not old.exists()
    assert not stopped


class Known:
    """An attempt as the watch sees it."""

    def __init__(self, status: Status) -> None:
        self.status = status


def test_an_eviction_keeps_its_reason_and_a_success_stays_a_success() -> None:
    key = AttemptKey("a", 1)
    ends = Evictions(lambda key, grace: None)
    ends.end(key, "disk limit exceeded: 2.0 GB of 1.0 GB")
    assert ends.with_reason(Status(key, 1, "STOPPING", 0.0)).message == ""
    told = ends.with_reason(Status(key, 1, "STOPPED", 0.0, stop_reason="DISCONNECTED"))
    assert (told.state, told.message, told.stop_reason) == ("FAILED", "disk limit exceeded: 2.0 GB of 1.0 GB", "")
    assert ends.with_reason(Status(key, 1, "SUCCEEDED", 0.0)).state == "SUCCEEDED"
    ends.forget({})
    assert key not in ends
