"""Control groups: on trees of files for both versions, and on the kernel's own if permitted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import PATIENCE_SECONDS, need_groups
from tests.unit.node_agent.jobs import CPUS
from tests.unit.node_agent.machines import write

from cotenant.node_agent.enforcement.cgroup_mounts import Mount, find_mounts, open_node_group
from cotenant.node_agent.enforcement.hook import EnforcedNode
from cotenant.node_agent.enforcement.hooks import make_hooks, open_hooks
from cotenant.node_agent.supervisor import cgroups
from cotenant.node_agent.supervisor.cgroups import Group, GroupError, format_cpu_list, parse_cpu_list

MEBIBYTE = 1 << 20


def version_2(root: Path, *, controllers: str = "cpuset cpu memory pids", own: str = "") -> Mount:
    """A hierarchy of version 2 whose groups the test has made already, since files do not appear by themselves."""
    for path in (
        root,
        root / own,
        root / "cotenant",
        root / own / "cotenant",
        root / "cotenant/n",
        root / own / "cotenant/n",
    ):
        write(path / "cgroup.controllers", controllers)
        write(path / "cgroup.subtree_control", "")
        write(path / "cpuset.cpus.effective", "0-7")
        write(path / "cgroup.procs", "")
        write(path / "cgroup.freeze", "0")
        write(path / "cpu.weight", "100")
    return Mount(2, (), str(root), str((root / own).resolve()))


def test_cpu_lists_survive_a_round_trip() -> None:
    assert parse_cpu_list(format_cpu_list([3, 1, 2, 9])) == [1, 2, 3, 9]
    assert parse_cpu_list("0-1,x,7-\n") == [0, 1]


def test_mounts_are_read_with_the_agents_own_group(tmp_path: Path) -> None:
    write(tmp_path / "cgroup", "4:memory:/api/me\n3:cpuset:/\n2:cpu,cpuacct:/a\n0::/user/me")
    write(
        tmp_path / "mountinfo",
        "33 31 0:30 / /cg/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
        "34 31 0:31 / /cg/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
        "35 31 0:32 /api /cg/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /cg/named rw - cgroup cgroup rw,name=systemd\n"
        "41 31 0:38 / /cg/unified rw,relatime - cgroup2 cgroup2 rw\nodd line",
    )
    assert find_mounts(tmp_path) == [
        Mount(2, (), "/cg/unified", "/cg/unified/user/me"),
        Mount(1, ("cpu", "cpuacct"), "/cg/cpu", "/cg/cpu/a"),
        Mount(1, ("cpuset",), "/cg/cpuset", "/cg/cpuset"),
        Mount(1, ("memory",), "/cg/memory", "/cg/memory/me"),
    ]


def not_enforced(group: Group | None) -> list[str]:
    """Return what the hooks cannot enforce in this group of a node."""
    return open_hooks(make_hooks(), EnforcedNode(group))


def test_version_2_opens_below_the_root_without_bounds(tmp_path: Path) -> None:
    group = open_node_group("n", [version_2(tmp_path, own="user/me")])
    assert group is not None
    assert group.paths() == [str(tmp_path / "cotenant/n")]
    assert (group.version, group.enforces, not_enforced(group)) == (2, ("cpuset", "cpu", "memory", "pids"), [])
    assert (tmp_path / "cgroup.subtree_control").read_text().startswith("+")


def test_version_2_opens_below_the_agents_group_if_it_is_bounded(tmp_path: Path) -> None:
    mount = version_2(tmp_path, own="unit")
    write(tmp_path / "unit/memory.max", "1000000")
    group = open_node_group("n", [mount])
    assert group is not None
    assert group.paths() == [str(tmp_path / "unit/cotenant/n")]


def test_a_group_may_be_removed_while_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = open_node_group("n", [version_2(tmp_path)])
    assert group is not None
    killer = tmp_path / "cotenant/n/cgroup.kill"

    def refuse(path: str, text: str) -> None:
        raise GroupError(f"cannot write {text!r} to {path}")

    def remove_and_refuse(path: str, text: str) -> None:
        killer.unlink()
        refuse(path, text)

    write(killer, "")
    monkeypatch.setattr(cgroups, "write_text", remove_and_refuse)
    group.kill()
    write(killer, "")
    monkeypatch.setattr(cgroups, "write_text", refuse)
    with pytest.raises(GroupError):
        group.kill()


def test_processes_move_aside_to_make_room_for_children(tmp_path: Path) -> None:
    mount = version_2(tmp_path, own="unit")
    write(tmp_path / "unit/memory.max", "1000000")
    write(tmp_path / "unit/cgroup.type", "domain")
    write(tmp_path / "unit/cgroup.procs", "41\n42")
    write(tmp_path / "unit/cotenant-agent/cgroup.procs", "")
    group = open_node_group("n", [mount])
    assert group is not None
    assert group.paths() == [str(tmp_path / "unit/cotenant/n")]
    assert (tmp_path / "unit/cotenant-agent/cgroup.procs").read_text().startswith("42")


def test_an_agent_started_in_the_aside_group_stays_there(tmp_path: Path) -> None:
    write(tmp_path / "mountinfo", "1 2 0:1 / /cg rw - cgroup2 cgroup2 rw")
    for own, place in (("/unit/cotenant-agent", "/cg/unit"), ("/cotenant-agent", "/cg"), ("/my-cotenant-agent", None)):
        write(tmp_path / "cgroup", f"0::{own}")
        assert [mount.own for mount in find_mounts(tmp_path)] == [place or f"/cg{own}"]


def test_missing_controllers_are_reported(tmp_path: Path) -> None:
    group = open_node_group("n", [version_2(tmp_path, controllers="cpu memory pids")])
    notes = not_enforced(group)
    assert group is not None
    assert len(notes) == 1
    assert "cores are only advisory" in notes[0]


def test_without_permissions_every_limit_is_reported_as_not_enforced(tmp_path: Path) -> None:
    assert open_node_group("n", []) is None
    assert len(not_enforced(None)) == 5
    unwritable = Mount(1, ("memory",), str(tmp_path / "absent"), str(tmp_path / "absent"))
    assert open_node_group("n", [unwritable]) is None


def test_version_1_is_used_if_version_2_has_no_controllers(tmp_path: Path) -> None:
    empty = version_2(tmp_path / "unified", controllers="hugetlb")
    for path in ("memory", "memory/cotenant", "memory/cotenant/n"):
        write(tmp_path / path / "memory.limit_in_bytes", "9223372036854771712")
    memory = Mount(1, ("memory",), str(tmp_path / "memory"), str(tmp_path / "memory"))
    group = open_node_group("n", [empty, memory])
    assert group is not None
    assert (group.version, group.directories) == (1, {"memory": str(tmp_path / "memory/cotenant/n")})
    assert [note.rpartition("no writable ")[2] for note in not_enforced(group)] == [
        f"{name} control group" for name in ("cpuset", "cpu", "freezer", "pids")
    ]


def test_version_2_writes_limits_in_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.node_agent.supervisor.cgroups.online_cpus", lambda: [0, 1, 2, 3])
    for name, text in (
        ("memory.max", "max"),
        ("memory.swap.max", "max"),
        ("memory.oom.group", "0"),
        ("cpuset.cpus", ""),
        ("cpuset.cpus.effective", "1,3"),
    ):
        write(tmp_path / name, text)
    group = Group(2, {"unified": str(tmp_path)}, ("cpuset", "memory"))
    group.set_cpus([3, 1])
    (tmp_path / "memory.max").write_text("")
    group.limit_memory(64 * MEBIBYTE)
    assert (tmp_path / "cpuset.cpus").read_text().startswith("1,3")
    assert (tmp_path / "memory.max").read_text() == str(64 * MEBIBYTE)
    assert (tmp_path / "memory.swap.max").read_text().startswith("0")
    assert (tmp_path / "memory.oom.group").read_text().startswith("1")


def test_version_2_reads_usage(tmp_path: Path) -> None:
    write(tmp_path / "cpu.stat", "usage_usec 2500000\nuser_usec 1")
    write(tmp_path / "memory.peak", "77")
    write(tmp_path / "memory.stat", "anon 55\nfile 9")
    write(tmp_path / "memory.events", "low 0\noom 2\noom_kill 1")
    group = Group(2, {"unified": str(tmp_path)}, ("memory",))
    assert (group.cpu_seconds(), group.memory_peak_bytes(), group.memory_bytes(), group.oom_kills()) == (2.5, 77, 55, 1)


def test_cpus_that_the_kernel_refuses_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.node_agent.supervisor.cgroups.online_cpus", lambda: [0, 1])
    write(tmp_path / "cpuset.cpus", "")
    write(tmp_path / "cpuset.cpus.effective", "0")
    with pytest.raises(GroupError, match="the kernel gives '0'"):
        Group(2, {"unified": str(tmp_path)}, ("cpuset",)).set_cpus([0, 1])


@pytest.fixture
def real_group() -> Group:
    need_groups("cpuset", "memory", "pids")
    node = open_node_group("test-cgroups")
    assert node is not None
    group = node.child("case")
    group.create()
    return group


@pytest.mark.root
def test_a_real_group_limits_kills_and_is_removed(real_group: Group) -> None:
    try:
        real_group.set_cpus(CPUS[-1:])
        real_group.limit_memory(64 * MEBIBYTE)
        process = subprocess.Popen([sys.executable, "-c", "import os; os.read(0, 1)"], stdin=subprocess.PIPE)
        real_group.attach(process.pid)
        assert real_group.pids() == {process.pid}
        assert os.sched_getaffinity(process.pid) == set(CPUS[-1:])
        assert not real_group.remove(0)
        real_group.kill()
        assert process.wait() == -signal.SIGKILL
        assert real_group.pids() == set()
    finally:
        assert real_group.remove()
    assert not real_group.exists()


@pytest.mark.root
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_groups_that_a_job_created_are_killed_and_removed_too(real_group: Group, frozen: bool) -> None:
    if frozen:
        need_groups("freezer")
    inner = real_group.child("inner")
    inner.create()
    process = subprocess.Popen(["sleep", "60"])
    inner.attach(process.pid)
    if frozen:
        inner.freeze(True)
    real_group.kill()
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert real_group.remove()


@pytest.mark.root
def test_unknown_cpus_are_refused(real_group: Group) -> None:
    with pytest.raises(GroupError):
        real_group.set_cpus([4095])
    assert real_group.remove()


@pytest.mark.root
def test_new_groups_have_the_cpus_of_the_group_above() -> None:
    need_groups("cpuset")
    node = open_node_group(f"test-inherit-{os.getpid()}")
    assert node is not None
    attempt = node.child("attempt")
    task = attempt.child("task-0")
    try:
        attempt.create()
        attempt.delegate_controllers()
        if node.version == 1:  # the kernel copies them, so that none are written
            path = Path(node.directories["cpuset"]) / "bare"
            path.mkdir()
            assert (path / "cpuset.cpus").read_text() == (path.parent / "cpuset.cpus").read_text()
        attempt.set_cpus(CPUS[:1])
        task.create()
        assert task.cpus() == attempt.cpus() == CPUS[:1]
        assert task.memory_nodes() == node.memory_nodes()
    finally:
        assert node.remove()


def test_a_process_enters_a_group_of_version_1_as_a_thread(tmp_path: Path) -> None:
    write(tmp_path / "g/cgroup.procs", "")
    group = Group(1, {"cpu": str(tmp_path / "g")}, ("cpu",))
    group.attach()
    assert (tmp_path / "g/cgroup.procs").read_text().startswith("0")
    write(tmp_path / "g/cgroup.procs", "")
    write(tmp_path / "g/tasks", "")
    group.attach()
    assert [(tmp_path / "g" / name).read_text() for name in ("tasks", "cgroup.procs")] == ["0", "\n"]
    group.attach(77)
    assert (tmp_path / "g/cgroup.procs").read_text().startswith("77")
