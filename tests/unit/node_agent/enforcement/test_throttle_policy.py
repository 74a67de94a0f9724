"""Who may be held back and how, and what the kernel makes of it."""

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
from cotenant.node_agent.enforcement.throttle_policy import FREE, Hold, HoldRefused, found_hold, hold_back, weight_of
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

ALLOCATION = resources_pb2.NodeAllocation(tasks=[task(0, cpus=[0, 1]), task(1)])
WEIGHT = weight_of(2) + weight_of(0)
HELD = [Hold(idle=True), Hold(cpu_limit_cores=0.5), Hold(suspended=True), Hold(True, 0.25, True)]


@pytest.fixture
def busy(request: pytest.FixtureRequest) -> Iterator[tuple[Group, int]]:
    """A real group with a process in it that never rests."""
    need_groups("cpu", "freezer")
    node, _ = open_node_group(f"test-holding-{request.node.name[-40:].strip('[]')}")
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


@pytest.mark.parametrize("hold", [Hold(idle=True), Hold(cpu_limit_cores=1), Hold(True, 0.5, True)])
def test_time_is_never_taken_from_a_job_that_is_not_best_effort(tmp_path: Path, hold: Hold) -> None:
    write(tmp_path / "cpu.idle", "0")
    write(tmp_path / "cpu.max", "max 100000")
    write(tmp_path / "cgroup.freeze", "0")
    group = Group(2, {"unified": str(tmp_path)}, ("cpu",))
    with pytest.raises(HoldRefused, match="not a best-effort job"):
        hold_back(group, hold, best_effort=False, allocation=ALLOCATION)
    assert [(tmp_path / name).read_text() for name in ("cpu.idle", "cpu.max", "cgroup.freeze")] == [
        "0\n",
        "max 100000\n",
        "0\n",
    ]


def test_without_a_group_nothing_is_held_and_letting_go_is_no_error() -> None:
    hold_back(None, FREE, best_effort=True, allocation=ALLOCATION)
    with pytest.raises(HoldRefused, match="no control group"):
        hold_back(None, Hold(suspended=True), best_effort=True, allocation=ALLOCATION)
    with pytest.raises(HoldRefused, match="-1"):
        hold_back(None, Hold(cpu_limit_cores=-1), best_effort=True, allocation=ALLOCATION)


@pytest.mark.root
@pytest.mark.parametrize("hold", HELD, ids=["idle", "limit", "suspended", "all"])
def test_the_kernel_holds_and_lets_go(busy: tuple[Group, int], hold: Hold) -> None:
    group, _ = busy
    for _ in range(2):  # the second time nothing differs
        hold_back(group, hold, best_effort=True, allocation=ALLOCATION)
        assert found_hold(group) == hold
    hold_back(group, FREE, best_effort=True, allocation=ALLOCATION)
    assert found_hold(group) == FREE
    version_2 = group.version == 2
    given = Path(group.directories["unified" if version_2 else "cpu"], "cpu.weight" if version_2 else "cpu.shares")
    assert int(given.read_text()) == (WEIGHT if version_2 else WEIGHT * 1024 // 100)


@pytest.mark.root
def test_a_suspended_process_uses_no_time_and_goes_on(busy: tuple[Group, int]) -> None:
    group, _ = busy
    hold_back(group, Hold(suspended=True), best_effort=False, allocation=ALLOCATION)
    stood = group.cpu_seconds()
    time.sleep(0.05)
    assert group.cpu_seconds() == stood
    hold_back(group, FREE, best_effort=False, allocation=ALLOCATION)
    deadline = time.monotonic() + 20
    while group.cpu_seconds() == stood:
        assert time.monotonic() < deadline


@pytest.mark.root
def test_what_is_suspended_can_be_killed(busy: tuple[Group, int]) -> None:
    group, pid = busy
    group.freeze(True)
    group.kill()
    deadline = time.monotonic() + 20
    while group.pids():
        assert time.monotonic() < deadline, pid


@pytest.mark.root
def test_an_idle_group_keeps_no_weight_and_is_not_given_one(busy: tuple[Group, int]) -> None:
    group, _ = busy
    group.set_idle(True)
    group.set_weight(50)
    assert group.is_idle()
    group.set_idle(False)
    group.set_weight(50)
    assert not group.is_idle()


@pytest.mark.root
def test_a_kernel_that_refuses_leaves_it_as_it_was(busy: tuple[Group, int], monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = busy

    def refuse(self: Group, frozen: bool, patience_seconds: float = 0) -> None:
        if frozen:
            raise GroupError("no")

    monkeypatch.setattr(Group, "freeze", refuse)
    with pytest.raises(HoldRefused, match="no"):
        hold_back(group, Hold(True, 0.5, True), best_effort=True, allocation=ALLOCATION)
    assert found_hold(group) == FREE


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_that_takes_something_else_is_an_error(tmp_path: Path, version: int) -> None:
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
def test_weights_divide_a_cpu_as_cores_were_given(busy: tuple[Group, int]) -> None:
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
