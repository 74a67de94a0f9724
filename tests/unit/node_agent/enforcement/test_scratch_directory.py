"""Scratch directories: made for the tasks that request them, limited where possible, removed at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement import project_quota
from cotenant.node_agent.enforcement.hook import EnforcedNode, NewAttempt
from cotenant.node_agent.enforcement.node_settings import NodeSettings
from cotenant.node_agent.enforcement.scratch_directory import NOT_LIMITED, ScratchDirectory
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

NO_GROUP = Group(1, {}, ())


def node(directory: Path) -> EnforcedNode:
    settings = NodeSettings(scratch_directory=str(directory))
    return EnforcedNode(inventory=resources_pb2.Inventory(scratch_bytes=2**30), settings=settings, id="n1")


def attempt(name: str = "job-1", **environment: str) -> NewAttempt:
    assignment = agent_pb2.Assignment()
    assignment.spec.environment.update(environment)
    assignment.allocation.tasks.add(rank=0, scratch_bytes=2**20)
    assignment.allocation.tasks.add(rank=1)
    return NewAttempt(name, Path("/nowhere"), NO_GROUP, assignment, (os.geteuid(), os.getegid()))


def at_once(work: Callable[[], None]) -> None:
    work()


def prepared(hook: ScratchDirectory, new: NewAttempt) -> dict[int, dict[str, str]]:
    hook.prepare(new)
    for task in new.assignment.allocation.tasks:
        hook.prepare_task(new, task, NO_GROUP)
    return {task.rank: dict(hook.environment(new, task)) for task in new.assignment.allocation.tasks}


def test_a_task_that_requests_scratch_space_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    hook = ScratchDirectory(at_once)
    hook.open(node(tmp_path))
    variables = prepared(hook, attempt())
    path = Path(variables[0]["COTENANT_SCRATCH"])
    assert path == tmp_path / "n1" / "job-1" / "task-0"
    assert variables == {0: {"COTENANT_SCRATCH": str(path), "TMPDIR": str(path)}, 1: {}}
    assert path.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["task-0"]
    (path / "sub").mkdir()
    (path / "sub" / "file").write_text("data")
    hook.end("job-1")
    assert os.listdir(tmp_path / "n1") == []
    hook.end("job-1")


def test_a_job_keeps_a_tmpdir_of_its_own(tmp_path: Path) -> None:
    hook = ScratchDirectory(at_once)
    hook.open(node(tmp_path))
    assert list(prepared(hook, attempt(TMPDIR="/tmp"))[0]) == ["COTENANT_SCRATCH"]


def test_the_next_agent_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed = ScratchDirectory(lambda work: None)  # it dies before its thread has removed anything
    killed.open(node(tmp_path))
    for name in ("ended-1", "running-1", "interrupted-1"):
        prepared(killed, attempt(name))
    killed.end("interrupted-1")
    assert len(os.listdir(tmp_path / "n1")) == 3
    following = ScratchDirectory(at_once)
    following.open(node(tmp_path))
    following.end("ended-1")  # as the runtime does for each attempt that has ended
    assert os.listdir(tmp_path / "n1") == ["running-1"]


def test_a_relaunch_starts_with_an_empty_directory(tmp_path: Path) -> None:
    hook = ScratchDirectory(at_once)
    hook.open(node(tmp_path))
    path = Path(prepared(hook, attempt())[0]["COTENANT_SCRATCH"])
    (path / "stale").write_text("")
    prepared(hook, attempt())
    assert os.listdir(path) == []


def test_without_project_quota_the_node_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_quota, "enforced", lambda directory: False)
    assert ScratchDirectory().open(node(tmp_path)) == [NOT_LIMITED]
    assert ScratchDirectory().open(EnforcedNode()) == ()


def test_with_project_quota_each_directory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[Path, int] = {}
    monkeypatch.setattr(project_quota, "enforced", lambda directory: True)
    monkeypatch.setattr(project_quota, "limit", limits.__setitem__)
    hook = ScratchDirectory(at_once)
    assert hook.open(node(tmp_path)) == []
    prepared(hook, attempt())
    assert limits == {tmp_path / "n1" / "job-1" / "task-0": 2**20}


def test_a_directory_that_somebody_else_has_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "n1").symlink_to(tmp_path / "elsewhere")
    hook = ScratchDirectory(at_once)
    assert hook.open(node(tmp_path)) == [
        f"scratch space is not usable: {tmp_path / 'n1'} is not a directory of the agent's user"
    ]
    new = attempt()
    with pytest.raises(OSError, match="no usable scratch directory"):
        hook.prepare_task(new, new.assignment.allocation.tasks[0], NO_GROUP)


def test_a_file_system_without_project_quota_is_recognized(tmp_path: Path) -> None:
    assert not project_quota.enforced(Path("/proc"))
    assert not project_quota.enforced(tmp_path / "absent")
