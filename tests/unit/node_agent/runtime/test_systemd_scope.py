"""A scope from a small stand-in for systemd, which acts on the kernel's real tree as systemd would."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import alive, until
from tests.unit.node_agent.jobs import CPUS, shell

from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.enforcement.cgroup_mounts import Mount, find_mounts
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.launch import LaunchContext, launch
from cotenant.node_agent.runtime.node_cgroup import NO_GROUPS, open_node_cgroup
from cotenant.node_agent.runtime.systemd_scope import Bus, ScopeRefused, open_scope, reach_systemd, scope_name
from cotenant.node_agent.supervisor.cgroups import Group

STAND_IN = """#!/bin/sh
echo "$*" >> {log}
while [ "${{1#--}}" != "$1" ]; do shift; done
case "$1 $5" in
"call GetUnit") [ -d "{tree}/$7" ] || {{ echo "Unit $7 not loaded." >&2; exit 1; }}
    echo "o \\"/unit/$7\\"" ;;
"call StartTransientUnit") name=$7
    while [ "$1" != PIDs ]; do shift; done
    mkdir "{tree}/$name" && echo "$4" > "{tree}/$name/cgroup.procs" && echo 'o "/job/1"' ;;
"get-property ControlGroup") echo "s \\"/${{3#/unit/}}\\"" ;;
esac
"""


def stand_in(directory: Path, script: str) -> Bus:
    path = directory / "busctl"
    path.write_text(script)
    path.chmod(0o755)
    return Bus(str(path), user=False)


@pytest.fixture
def tree() -> str:
    mount = next((mount for mount in find_mounts() if mount.version == 2), None)
    if os.getuid() != 0 or mount is None or not os.access(mount.root, os.W_OK):
        pytest.skip("needs root and a writable hierarchy of version 2")
    return mount.root


@pytest.fixture
def node_id(tmp_path: Path, tree: str) -> Iterator[str]:
    """A unique name; the processes in its scope are killed afterwards."""
    name = f"{tmp_path.name[-20:]}-{os.getpid()}"
    yield name
    scope = Group(2, {"unified": f"{tree}/{scope_name(name)}"}, ())
    scope.kill()
    assert scope.remove(10)


@pytest.fixture
def bus(tmp_path: Path, tree: str) -> Bus:
    return stand_in(tmp_path, STAND_IN.format(log=tmp_path / "log", tree=tree))


def test_names_are_escaped_as_in_systemd() -> None:
    assert scope_name("a-b.c_d:e") == "cotenant-a-b.c_d:e.scope"
    assert scope_name("a/é") == "cotenant-a\\x2f\\xc3\\xa9.scope"


def test_systemd_is_used_only_if_it_runs_and_busctl_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reach_systemd(tmp_path / "absent") is None
    assert reach_systemd(tmp_path) == Bus(str(tmp_path / "busctl"), os.geteuid() != 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert reach_systemd(tmp_path) is None


@pytest.mark.root
def test_a_scope_is_created_once_and_found_again(bus: Bus, tree: str, node_id: str, tmp_path: Path) -> None:
    scope = open_scope(bus, node_id)
    assert scope == f"/{scope_name(node_id)}"
    assert len(Group(2, {"unified": tree + scope}, ()).pids()) == 1
    assert open_scope(bus, node_id) == scope
    calls = (tmp_path / "log").read_text()
    assert calls.count("StartTransientUnit") == 1
    assert "Delegate b true TasksMax t 18446744073709551615" in calls


async def test_a_refusal_is_reported_and_leaves_no_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = f'case "$*" in *PIDs*) echo "$*" > {tmp_path}/told;; esac; echo "Access denied" >&2; exit 1'
    bus = stand_in(tmp_path, f"#!/bin/sh\n{refuses}\n")
    with pytest.raises(ScopeRefused, match="Access denied"):
        open_scope(bus, "n")
    words = (tmp_path / "told").read_text().split()
    assert not alive(int(words[words.index("PIDs") + 3]))
    monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda *_: None)
    monkeypatch.setattr(cgroup_mounts, "find_mounts", list)
    place = open_node_cgroup("n", bus)
    assert (place.home, place.not_enforced[0]) == (None, NO_GROUPS)
    assert place.not_enforced[1].endswith("systemd created no scope: Access denied")


def test_an_unresponsive_manager_counts_as_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(ScopeRefused, match="does not answer"):
        open_scope(Bus(str(tmp_path / "absent"), user=True), "n")


def test_jobs_of_a_limited_agent_stay_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit/memory.max").write_text("1000000\n")
    mount = Mount(2, (), str(tmp_path), str(tmp_path / "unit"))
    monkeypatch.setattr(cgroup_mounts, "find_mounts", lambda: [mount])
    place = open_node_cgroup("n", Bus("/nowhere", user=False))
    assert place.home is None
    assert "has limits" in place.not_enforced[-1]


def groups_of(pid: int) -> list[str]:
    """Return a process's groups from the kernel."""
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()


@pytest.mark.root
async def test_a_supervisor_outlives_its_agents_group(
    bus: Bus, tree: str, node_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup_mounts, "is_bounded", lambda _: False)
    place = open_node_cgroup(node_id, bus, Path(tree).parent)
    assert place.home is not None
    surroundings = LaunchContext(
        node_group=place.node_group,
        all_cpus=tuple(CPUS),
        notify_path="/nowhere",
        lease_path="/nowhere",
        output_bytes_max=1 << 20,
        base_environment={"PATH": os.environ["PATH"]},
        home=place.home,
    )
    directory = AttemptDirectory(tmp_path / "attempts", AttemptKey("job", 1))
    go = tmp_path / "go"
    pid = launch(surroundings, directory, shell("job", f"while [ ! -e {go} ]; do sleep 0.01; done"), "/nowhere").pid
    try:
        await until(lambda: (directory.status() or None) and directory.task_pids())
        scope = f"/{scope_name(node_id)}"
        assert any(line.startswith(f"0::{scope}") for line in groups_of(pid))
        assert directory.recorded_group() is not None
        go.touch()
        await until(lambda: os.waitpid(pid, os.WNOHANG)[0])
        assert json.loads((directory.path / "state.json").read_text())["state"] == "SUCCEEDED"
        assert place.node_group is None or place.node_group.remove()
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def containers_tree(tmp_path: Path, *, ours: str) -> Group:
    """A tree like that of version 1, with the group of a node in it; our own process is in `ours`."""
    for path in ("freezer/cotenant/n", "freezer/engine/agent"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("freezer", "freezer/engine/agent"):
        (tmp_path / path / "cgroup.procs").write_text(f"{os.getpid()}\n" if path == ours else "1\n")
    return Group(1, {"freezer": str(tmp_path / "freezer/cotenant/n")}, ["freezer"])


def test_supervisors_leave_the_group_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = containers_tree(tmp_path, ours="freezer/engine/agent")
    monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda *_: node)
    home = open_node_cgroup("n", None).home
    assert home is not None
    assert home.directories == {"freezer": str(tmp_path / "freezer/cotenant/cotenant-agent")}
    assert Path(home.directories["freezer"]).is_dir()


def test_supervisors_stay_if_attempts_live_within_the_agents_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = containers_tree(tmp_path, ours="freezer")
    monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda *_: node)
    assert open_node_cgroup("n", None).home is None
