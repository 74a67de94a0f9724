"""CPUs that go offline and come back while the agent runs: offered cores and jobs' CPUs, on trees of files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import need_groups
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, resize_order, shell, task
from tests.unit.node_agent.machines import sysfs, two_sockets, write
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.enforcement.core_changes import Cores, TaskCores, covers, online_only
from cotenant.node_agent.probes.hot_plug import FILE, HotPlug
from cotenant.node_agent.probes.inventory import ProbeOptions
from cotenant.node_agent.runtime.attempt_directory import find_directories
from cotenant.node_agent.supervisor.cgroups import format_cpu_list
from cotenant.v1 import resources_pb2


def watch(root: Path, state_dir: Path, allowed: Iterable[int] = range(16), **wishes: object) -> HotPlug:
    return HotPlug(
        resources_pb2.Inventory(),
        ProbeOptions("n", **wishes),  # type: ignore[arg-type]  # a test's own words
        state_dir,
        report=lambda inventory: None,
        heal=None,
        interval_seconds=0.01,
        sysfs=root,
        allowed=lambda: allowed,
    )


def offered(plug: HotPlug) -> dict[int, list[int]]:
    return {core.id: list(core.cpus) for core in plug._inventory.cores}


def switch(root: Path, online: str, *siblings: tuple[int, str]) -> None:
    """Set the online CPUs, and the siblings that some of them then have."""
    write(root / "devices/system/cpu/online", online)
    for cpu, those in siblings:
        write(root / f"devices/system/cpu/cpu{cpu}/topology/core_cpus_list", those)


def test_a_core_keeps_its_id_when_its_lowest_cpu_goes_and_comes_back(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "sys")
    plug = watch(root, tmp_path)
    assert not plug.refresh()
    switch(root, "0-2,4-15", (11, "11"))
    assert plug.refresh()
    assert offered(plug)[3] == [11]
    switch(root, "0-2,4-10,12-15")
    assert plug.refresh()
    assert 3 not in offered(plug)
    switch(root, "0-15", (11, "3,11"))
    assert plug.refresh()
    assert offered(plug)[3] == [3, 11]


def test_a_core_keeps_its_id_over_a_restart(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "sys")
    watch(root, tmp_path)
    switch(root, "0-2,4-15", (11, "11"))
    assert offered(watch(root, tmp_path))[3] == [11]


def test_ids_of_another_machine_are_not_shared_by_two_cores(tmp_path: Path) -> None:
    watch(two_sockets(tmp_path / "old"), tmp_path)  # there, 0 and 8 are one core
    root = sysfs(tmp_path / "new", cores=[(0, 0, (0,)), (0, 1, (8,))], online="0,8", numa={0: "0,8"})
    assert offered(watch(root, tmp_path)) == {0: [0], 8: [8]}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"1": null}', "null"])
def test_an_invalid_file_of_ids_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert offered(watch(two_sockets(tmp_path / "sys", online="0-1"), tmp_path)) == {0: [0], 1: [1]}


def test_cpus_that_are_not_offered_cause_no_change(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "sys")
    plug = watch(root, tmp_path, cpus=(0, 8))
    switch(root, "0-2,4-15")
    assert not plug.refresh()
    assert offered(plug) == {0: [0, 8]}


async def test_placement_learns_of_a_core_that_goes_offline_and_comes_back(
    placement: Placement, agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sysfs(
        tmp_path / "sys",
        cores=[(0, cpu, (cpu,)) for cpu in CPUS],
        online=format_cpu_list(CPUS),
        numa={0: format_cpu_list(CPUS)},
    )
    await agent.stop()
    monkeypatch.setattr("cotenant.node_agent.control.agent.SYSFS", root)
    await agent.start(health_interval_seconds=0.05)
    hello = await placement.connected(2)
    assert [core.id for core in hello.inventory.cores] == list(CPUS)
    switch(root, format_cpu_list(CPUS[1:]))
    await placement.until(lambda: placement.inventories)
    assert [core.id for core in placement.inventories[-1].cores] == list(CPUS[1:])
    placement.assign(shell("late", "sleep 60", tasks=[task(cpus=CPUS[:1])]))  # by a placement that has not heard yet
    assert "this node does not have" in (await placement.ended("late")).message
    switch(root, format_cpu_list(CPUS))
    await placement.until(lambda: len(placement.inventories) > 1)
    assert [core.id for core in placement.inventories[-1].cores] == list(CPUS)


@pytest.mark.root
async def test_a_running_job_gets_its_cpus_back(
    placement: Placement, agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_groups("cpuset")
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    root = sysfs(tmp_path / "sys", cores=[(0, cpu, (cpu,)) for cpu in CPUS], online=format_cpu_list(CPUS), numa={})
    await agent.stop()
    monkeypatch.setattr("cotenant.node_agent.control.agent.SYSFS", root)
    await agent.start(health_interval_seconds=0.05)
    await placement.connected(2)
    placement.assign(shell("job", "exec sleep 600", tasks=[task(cpus=CPUS[:2])]))
    await placement.running("job")
    (directory,) = find_directories(agent.config.state_dir / "attempts")
    group = directory.recorded_group()
    assert group
    group.child("task-0").set_cpus(CPUS[:1])  # as version 1 leaves it when the other has been off line
    switch(root, format_cpu_list(CPUS[:1]))
    await placement.until(lambda: placement.inventories)
    switch(root, format_cpu_list(CPUS))
    await placement.until(lambda: len(placement.inventories) > 1)
    assert group.child("task-0").cpus(asked_for=True) == list(CPUS[:2])
    placement.send(resizes=[resize_order("job", task(cpus=CPUS[:1]), epoch=11)])
    assert await placement.answered(11) == ""


@pytest.mark.root
def test_an_offline_cpu_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_groups("cpuset")
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    node = open_node_group(f"hot-{tmp_path.name}")
    assert node
    group = node.child("attempt")
    group.create()
    try:
        monkeypatch.setattr("cotenant.node_agent.supervisor.cgroups.online_cpus", lambda: list(CPUS[:1]))
        group.set_cpus(CPUS[:2])
        assert group.cpus(asked_for=True) == list(CPUS[:1])
    finally:
        node.remove()


def test_online_cores_are_known_unless_a_task_has_none() -> None:
    cores = Cores({0: TaskCores(frozenset({1, 2})), 1: TaskCores(frozenset({3}))}, frozenset({1, 2, 3}))
    assert online_only(cores, [0, 1, 3]) == Cores(
        {0: TaskCores(frozenset({1})), 1: TaskCores(frozenset({3}))}, frozenset({1, 3})
    )
    assert online_only(cores, [1, 2]) is None
    assert online_only(cores, []) is None
    assert covers(cores, online_only(cores, [1, 3]) or cores)
    assert not covers(online_only(cores, [1, 3]) or cores, cores)


@pytest.mark.parametrize("kept", ['{"0": Infinity}', '{"0": -1}', '{"0": 99999999999}', '{"a":' * 3000, "\udcff", "[]"])
def test_invalid_core_ids_are_ignored(tmp_path: Path, kept: str) -> None:
    (tmp_path / FILE).write_bytes(kept.encode(errors="surrogateescape"))
    inventory = resources_pb2.Inventory()

    HotPlug(
        inventory,
        ProbeOptions("n"),
        tmp_path,
        report=lambda inventory: None,
        heal=None,
        interval_seconds=1.0,
        sysfs=tmp_path,
        allowed=lambda: [0, 1],
    )
    assert [core.id for core in inventory.cores] == [0, 1]
