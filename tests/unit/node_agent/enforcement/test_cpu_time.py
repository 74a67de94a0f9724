"""Which jobs may be throttled and how, and what the kernel does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import need_groups
from tests.unit.node_agent.jobs import CPUS, task
from tests.unit.node_agent.machines import write

from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.enforcement.cpu_time import (
    FREE,
    CpuThrottle,
    ThrottleRefused,
    apply_cpu_throttle,
    current_cpu_throttle,
    weight_of,
)
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

ALLOCATION = resources_pb2.NodeAllocation(tasks=[task(0, cpus=[0, 1]), task(1)])
WEIGHT = weight_of(2) + weight_of(0)
HELD = [
    CpuThrottle(idle=True),
    CpuThrottle(cpu_limit_cores=0.5),
    CpuThrottle(suspended=True),
    CpuThrottle(True, 0.25, True),
]


@pytest.fixture
def busy(request: pytest.FixtureRequest) -> Iterator[tuple[Group, int]]:
    """A real group with a process in it that never rests."""
    need_groups("cpu", "freezer")
    node = open_node_group(f"test-holding-{request.node.name[-40:].strip('[]')}")
    assert node is not None
    group = node.child("attempt")
    group.create()
    process = subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"])
    group.attach(process.pid)
    group.set_weight(WEIGHT)
    yield group, process.pid
    group.kill()
    process.wait()
    assert group.remove()
    assert node.remove()


@pytest.mark.parametrize("hold", [CpuThrottle(idle=True), CpuThrottle(cpu_limit_cores=1), CpuThrottle(True, 0.5, True)])
def test_only_best_effort_jobs_lose_cpu_time(tmp_path: Path, hold: CpuThrottle) -> None:
    write(tmp_path / "cpu.idle", "0")
    write(tmp_path / "cpu.max", "max 100000")
    write(tmp_path / "cgroup.freeze", "0")
    group = Group(2, {"unified": str(tmp_path)}, ("cpu",))
    with pytest.raises(ThrottleRefused, match="not a best-effort job"):
        apply_cpu_throttle(group, hold, best_effort=False, allocation=ALLOCATION)
    assert [(tmp_path / name).read_text() for name in ("cpu.idle", "cpu.max", "cgroup.freeze")] == [
        "0\n",
        "max 100000\n",
        "0\n",
    ]


def test_without_a_group_a_throttle_fails_and_a_release_does_not() -> None:
    apply_cpu_throttle(None, FREE, best_effort=True, allocation=ALLOCATION)
    with pytest.raises(ThrottleRefused, match="no writable control group"):
        apply_cpu_throttle(None, CpuThrottle(suspended=True), best_effort=True, allocation=ALLOCATION)
    with pytest.raises(ThrottleRefused, match="-1"):
        apply_cpu_throttle(None, CpuThrottle(cpu_limit_cores=-1), best_effort=True, allocation=ALLOCATION)


@pytest.mark.root
@pytest.mark.parametrize("hold", HELD, ids=["idle", "limit", "suspended", "all"])
def test_the_kernel_applies_and_releases_throttles(busy: tuple[Group, int], hold: CpuThrottle) -> None:
    group, _ = busy
    for _ in range(2):  # the second time nothing differs
        apply_cpu_throttle(group, hold, best_effort=True, allocation=ALLOCATION)
        assert current_cpu_throttle(group) == hold
    apply_cpu_throttle(group, FREE, best_effort=True, allocation=ALLOCATION)
    assert current_cpu_throttle(group) == FREE
    version_2 = group.version == 2
    given = Path(group.directories["unified" if version_2 else "cpu"], "cpu.weight" if version_2 else "cpu.shares")
    assert int(given.read_text()) == (WEIGHT if version_2 else WEIGHT * 1024 // 100)


@pytest.mark.root
def test_a_suspended_process_uses_no_cpu_time_and_resumes(busy: tuple[Group, int]) -> None:
    group, _ = busy
    apply_cpu_throttle(group, CpuThrottle(suspended=True), best_effort=False, allocation=ALLOCATION)
    stood = group.cpu_seconds()
    time.sleep(0.05)
    assert group.cpu_seconds() == stood
    apply_cpu_throttle(group, FREE, best_effort=False, allocation=ALLOCATION)
    deadline = time.monotonic() + 20
    while group.cpu_seconds() == stood:
        assert time.monotonic() < deadline


@pytest.mark.root
def test_a_suspended_process_can_be_killed(busy: tuple[Group, int]) -> None:
    group, pid = busy
    group.freeze(True)
    group.kill()
    deadline = time.monotonic() + 20
    while group.pids():
        assert time.monotonic() < deadline, pid


@pytest.mark.root
def test_an_idle_group_has_no_weight(busy: tuple[Group, int]) -> None:
    group, _ = busy
    group.set_idle(True)
    group.set_weight(50)
    assert group.is_idle()
    group.set_idle(False)
    group.set_weight(50)
    assert not group.is_idle()


@pytest.mark.root
def test_a_refused_throttle_is_rolled_back(busy: tuple[Group, int], monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = busy

    def refuse(self: Group, frozen: bool, timeout_seconds: float = 0) -> None:
        if frozen:
            raise GroupError("no")

    monkeypatch.setattr(Group, "freeze", refuse)
    with pytest.raises(ThrottleRefused, match="no"):
        apply_cpu_throttle(group, CpuThrottle(True, 0.5, True), best_effort=True, allocation=ALLOCATION)
    assert current_cpu_throttle(group) == FREE


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_with_another_value_than_written_is_an_error(tmp_path: Path, version: int) -> None:
    directories = {"unified": str(tmp_path)} if version == 2 else {"cpu": str(tmp_path), "pids": str(tmp_path)}
    group = Group(version, directories, ("cpu", "pids"))
    for name in ("cpu.shares", "cpu.weight", "cpu.idle", "pids.max"):
        (tmp_path / name).symlink_to("/dev/null")
    changes: list[Callable[[], None]] = [
        lambda: group.set_weight(5),
        lambda: group.set_idle(True),
        lambda: group.limit_processes(5),
    ]
    for change in changes:
        with pytest.raises(GroupError, match="the kernel gives ''"):
            change()


@pytest.mark.root
def test_weights_divide_a_cpu_in_proportion_to_cores(busy: tuple[Group, int]) -> None:
    group, _ = busy
    group.set_weight(weight_of(9))
    other = Group(group.version, {key: f"{path}-other" for key, path in group.directories.items()}, group.enforces)
    other.create()
    process = subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"])
    try:
        other.set_weight(weight_of(1))
        other.attach(process.pid)
        for each in (group, other):
            each.set_cpus(CPUS[-1:])
        began = (group.cpu_seconds(), other.cpu_seconds())
        deadline = time.monotonic() + 20
        while group.cpu_seconds() - began[0] < 0.3 and time.monotonic() < deadline:
            time.sleep(0.01)
        ratio = (group.cpu_seconds() - began[0]) / max(0.001, other.cpu_seconds() - began[1])
        assert ratio > 3, ratio
    finally:
        other.kill()
        process.wait()
        assert other.remove()
