"""Topology from trees of files: sockets, siblings, offline CPUs, holes, and invalid files."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.node_agent.machines import sysfs, two_sockets, write

from cotenant.node_agent.enforcement.cgroup_mounts import Mount
from cotenant.node_agent.probes.inventory import (
    ProbeOptions,
    probe,
    read_cpus,
    schedulable_cores,
    usable_cpus,
    usable_memory_bytes,
)


def cores_of(root: Path, allowed: range | set[int], *, split: bool = False) -> list[tuple[int, list[int], int, int]]:
    cores = schedulable_cores(read_cpus(root, usable_cpus(root, allowed)), split_siblings=split)
    return [(core.id, list(core.cpus), core.numa_node, core.socket) for core in cores]


def test_a_core_is_a_physical_one_with_its_siblings(tmp_path: Path) -> None:
    cores = cores_of(two_sockets(tmp_path), range(16))
    assert len(cores) == 8
    assert cores[0] == (0, [0, 8], 0, 0)
    assert cores[7] == (7, [7, 15], 1, 1)


def test_split_siblings_makes_each_logical_cpu_a_core(tmp_path: Path) -> None:
    cores = cores_of(two_sockets(tmp_path), range(16), split=True)
    assert len(cores) == 16
    assert cores[12] == (12, [12], 1, 1)


def test_an_offline_cpu_is_not_offered(tmp_path: Path) -> None:
    cores = cores_of(two_sockets(tmp_path, online="0-2,4-15"), range(16))
    assert (11, [11], 0, 0) in cores
    assert all(3 not in cpus for _, cpus, _, _ in cores)


def test_only_cpus_in_the_agents_affinity_are_offered(tmp_path: Path) -> None:
    assert cores_of(two_sockets(tmp_path), {1, 4, 12}) == [(1, [1], 0, 0), (4, [4, 12], 1, 1)]


def test_numbers_may_have_holes(tmp_path: Path) -> None:
    root = sysfs(tmp_path, cores=[(0, 7, (2, 66)), (1, 9, (40,))], online="2,40,66", numa={0: "2,66", 3: "40"})
    assert cores_of(root, {2, 40, 66}) == [(2, [2, 66], 0, 0), (40, [40], 3, 1)]


def test_cpus_without_topology_are_cores_of_their_own(tmp_path: Path) -> None:
    assert cores_of(tmp_path, {0, 1}) == [(0, [0], 0, 0), (1, [1], 0, 0)]


def test_the_siblings_file_of_old_kernels_is_read(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/cpu/online", "0-1")
    for cpu in (0, 1):
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-1")
    assert cores_of(tmp_path, {0, 1}) == [(0, [0, 1], 0, 0)]


@settings(max_examples=examples(25), deadline=None)
@given(garbage=st.binary(max_size=40))
def test_any_file_content_is_accepted(tmp_path_factory: object, garbage: bytes) -> None:
    root = two_sockets(tmp_path_factory.mktemp("sys"))  # type: ignore[attr-defined]  # pytest's, which has no fixture per example
    for path in root.rglob("*"):
        if path.is_file():
            path.write_bytes(garbage)
    cores = cores_of(root, range(16))
    assert sorted(cpu for _, cpus, _, _ in cores for cpu in cpus) == usable_cpus(root, range(16))


def test_memory_is_bounded_by_our_group_by_those_above_and_by_the_operator(tmp_path: Path) -> None:
    own = tmp_path / "slice" / "unit"
    own.mkdir(parents=True)
    mount = Mount(2, (), str(tmp_path), str(own))
    assert usable_memory_bytes(1000, [mount], None) == 1000
    write(own / "memory.max", "max")
    write(own.parent / "memory.max", "700")
    assert usable_memory_bytes(1000, [mount], None) == 700
    assert usable_memory_bytes(1000, [mount], 600) == 600


def test_no_limit_in_version_1_is_no_bound(tmp_path: Path) -> None:
    write(tmp_path / "memory.limit_in_bytes", "9223372036854771712")
    assert usable_memory_bytes(1000, [Mount(1, ("memory",), str(tmp_path), str(tmp_path))], None) == 1000


def test_the_operator_restricts_cpus_and_missing_ones_are_reported(tmp_path: Path) -> None:
    wishes = ProbeOptions("n", gpus="fake:0", cpus=(1, 9, 99))
    inventory = probe(wishes, sysfs=two_sockets(tmp_path), allowed=range(16))
    assert [list(core.cpus) for core in inventory.cores] == [[1, 9]]
    assert inventory.not_enforced == ["CPUs [99] are configured but not usable on this machine"]


def test_fake_gpus_are_declared_named_for_the_node_and_spread(tmp_path: Path) -> None:
    inventory = probe(ProbeOptions("n", gpus="fake:4"), sysfs=two_sockets(tmp_path), allowed=range(16))
    assert [gpu.numa_node for gpu in inventory.gpus] == [0, 0, 1, 1]
    assert all(gpu.declared for gpu in inventory.gpus)
    again = probe(ProbeOptions("n", gpus="fake:4"), sysfs=tmp_path, allowed=range(16))
    other = probe(ProbeOptions("m", gpus="fake:4"), sysfs=tmp_path, allowed=range(16))
    uuids = {gpu.uuid for gpu in inventory.gpus}
    assert uuids == {gpu.uuid for gpu in again.gpus}
    assert len(uuids | {gpu.uuid for gpu in other.gpus}) == 8


def test_this_machine_is_inventoried() -> None:
    inventory = probe(ProbeOptions("here", gpus="fake:0"))
    assert sorted(cpu for core in inventory.cores for cpu in core.cpus) == sorted(os.sched_getaffinity(0))
    assert inventory.memory_bytes > 0
