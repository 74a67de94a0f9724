"""The list of enforcement hooks: a new one is called at every moment, and refusals are undone or reported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import need_groups, until
from tests.unit.node_agent.jobs import CPUS, NODE, assignment, shell, task

from cotenant.core.model.lifecycle import LaunchCause
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.enforcement import hooks
from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.enforcement.core_changes import (
    ConfinedAttempt,
    CoreChange,
    Cores,
    CoresRefused,
    TaskCores,
    task_group,
)
from cotenant.node_agent.enforcement.core_pinning import CorePinning
from cotenant.node_agent.enforcement.cpu_time import CpuTime
from cotenant.node_agent.enforcement.hook import (
    EnforcedAttempt,
    EnforcedNode,
    EnforcementHook,
    NewAttempt,
    ThrottleChange,
)
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.attempt_throttle import AttemptThrottle
from cotenant.node_agent.runtime.launch import CannotLaunch, LaunchContext, launch
from cotenant.node_agent.runtime.process_runtime import ProcessRuntime
from cotenant.node_agent.runtime.runtime_port import RuntimeContext
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

KEY = AttemptKey("job", 1)
EVERYWHERE = Cores({}, frozenset())


class Scratch(EnforcementHook):
    """A resource as somebody would add it: a folder for each task, with what was done to it."""

    root: Path
    log: list[str]

    def open(self, node: EnforcedNode) -> Sequence[str]:
        return ["the scratch of a job is not limited"]

    def prepare(self, attempt: NewAttempt) -> None:
        (self.root / attempt.name).mkdir()

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        (self.root / attempt.name / str(task.rank)).mkdir()

    def environment(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> Mapping[str, str]:
        return {"SCRATCH": str(self.root / attempt.name / str(task.rank))}

    def change_cores(self, attempt: ConfinedAttempt, change: CoreChange) -> None:
        self.log.append(f"cores {sorted(change.before.whole)} to {sorted(change.after.whole)}")

    def throttle(self, change: ThrottleChange) -> None:
        self.log.append(f"throttle to {change.wanted.cores}")

    def before_stop(self, attempt: EnforcedAttempt) -> None:
        self.log.append(f"stop of {attempt.name}")

    def end(self, attempt: str) -> None:
        shutil.rmtree(self.root / attempt, ignore_errors=True)


class Running:
    """A runtime whose agent may be replaced by another one."""

    def __init__(self, state_dir: Path) -> None:
        self.runtime = ProcessRuntime()
        self.told: list[Status] = []
        self.inventory = resources_pb2.Inventory(cores=[resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in CPUS])
        self._context = RuntimeContext(NODE, state_dir, self.inventory, 1 << 20, 10, 1e9)

    async def open(self) -> None:
        await self.runtime.open(self._context, self.told.append)

    async def ended(self) -> Status:
        return await until(lambda: next((status for status in self.told if status.ended), None)) or self.told[-1]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Scratch]:
    """A hook in the list: its line is all that the agent needs."""
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, Scratch))
    Scratch.root, Scratch.log = tmp_path / "scratch", []
    Scratch.root.mkdir()
    return Scratch


async def test_a_hook_in_the_list_follows_an_attempt_over_a_restart_of_its_agent(
    tmp_path: Path, scratch: type[Scratch]
) -> None:
    first, second = Running(tmp_path / "state"), Running(tmp_path / "state")
    await first.open()
    assert "the scratch of a job is not limited" in first.runtime.not_enforced()
    old = shell("job", f"echo $SCRATCH > {tmp_path}/seen; exec sleep 60", tasks=[task(cpus=CPUS)])
    old.spec.environment["SCRATCH"] = "/of/the/user"
    await first.runtime.launch(old)
    await until((tmp_path / "seen").exists)
    assert await until((tmp_path / "seen").read_text) == f"{scratch.root}/job-1/0\n"
    await first.runtime.close()
    await second.open()
    assert scratch.log == []
    new = shell("job", "", tasks=[task(cpus=CPUS[:1])], epoch=11)
    new.spec.CopyFrom(old.spec)
    assert await second.runtime.adopt(new) is None
    assert scratch.log.pop() == f"cores {CPUS} to {CPUS[:1]}"
    await second.runtime.throttle(KEY, Throttle(suspended=True))
    second.runtime.stop(KEY, 5)
    assert (await second.ended()).state == "STOPPED"
    assert scratch.log == ["throttle to 0", "stop of job-1"]
    await until(lambda: not list(scratch.root.iterdir()))
    await second.runtime.close()


async def test_gpus_that_appear_later_open_the_hooks_again(tmp_path: Path, scratch: type[Scratch]) -> None:
    agent = Running(tmp_path / "state")
    await agent.open()
    known = agent.inventory.not_enforced
    known.extend(agent.runtime.not_enforced())
    before = list(known)
    agent.inventory.gpus.add(uuid="GPU-late")
    await agent.runtime.launch(shell("job", "true"))
    await agent.ended()
    assert known[: len(before)] == before
    assert [sentence.rpartition(": ")[2] for sentence in known[len(before) :]] == [
        "the device files of GPU-late are unknown"
    ]
    await agent.runtime.close()


async def test_what_was_made_for_an_attempt_that_never_started_is_removed(
    tmp_path: Path, scratch: type[Scratch]
) -> None:
    AttemptDirectory(tmp_path / "state/attempts", KEY).create(shell("job", "true"))  # then its agent was killed
    (scratch.root / "job-1").mkdir()
    agent = Running(tmp_path / "state")
    await agent.open()
    await agent.runtime.close()
    assert list(scratch.root.iterdir()) == []


@pytest.mark.root
async def test_what_was_made_for_an_attempt_without_files_is_removed_at_its_end(
    tmp_path: Path, scratch: type[Scratch]
) -> None:
    need_groups()
    first, second = Running(tmp_path / "state"), Running(tmp_path / "state")
    await first.open()
    await first.runtime.launch(shell("job", f"touch {tmp_path}/up; exec sleep 60"))
    await until((tmp_path / "up").exists)
    await first.runtime.close()
    (tmp_path / "state/attempts/job-1").rename(tmp_path / "gone")
    await second.open()
    second.runtime.stop(KEY, 0)
    await second.ended()
    await until(lambda: not list(scratch.root.iterdir()))
    await second.runtime.close()


class Recorded(EnforcementHook):
    """A hook that records its calls and may refuse one kind of them."""

    launch_cause = LaunchCause.DEVICE

    def __init__(self, name: str, calls: list[str], refuses: str = "") -> None:
        self._name, self._calls, self._refuses = name, calls, refuses

    def _call(self, moment: str, error: Callable[[str], Exception] = GroupError) -> None:
        self._calls.append(f"{self._name} {moment}")
        if moment.startswith(self._refuses or "-"):
            raise error(f"{self._name} refuses")

    def prepare(self, attempt: NewAttempt) -> None:
        self._call("prepare")

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        self._call(f"task {task.rank}")

    def change_cores(self, attempt: ConfinedAttempt, change: CoreChange) -> None:
        self._call("forth" if change.after is not EVERYWHERE else "back", CoresRefused)

    def throttle(self, change: ThrottleChange) -> None:
        self._call("throttle")
        change.refused.append(f"{self._name} refuses")

    def end(self, attempt: str) -> None:
        self._call("end")


def refused_launch(tmp_path: Path, known: hooks.Hooks, node: Group | None = None) -> CannotLaunch:
    job = assignment("job", ["true"], tasks=[task(0), task(1)])
    surroundings = LaunchContext(node, (), "/nowhere", "/nowhere", 1 << 20, {}, hooks=known)
    with pytest.raises(CannotLaunch, match="b refuses") as refused:
        launch(surroundings, AttemptDirectory(tmp_path / "attempts", KEY), job, "/nowhere")
    assert not (tmp_path / "attempts/job-1/spec").exists()
    return refused.value


def test_a_refused_launch_is_undone_in_reverse_and_has_the_cause_of_its_hook(tmp_path: Path) -> None:
    calls: list[str] = []
    known = [Recorded("a", calls), Recorded("b", calls, "prepare"), Recorded("c", calls)]
    assert refused_launch(tmp_path, known).cause == "device"
    assert calls == ["a prepare", "b prepare", "b end", "a end"]
    calls.clear()
    known[1] = Recorded("b", calls, "task 1")
    assert refused_launch(tmp_path, known).cause == "device"
    both = [f"{name} {moment}" for moment in ("prepare", "task 0") for name in "abc"]
    assert calls == [*both, "a task 1", "b task 1", "c end", "b end", "a end"]


@pytest.mark.root
def test_the_group_of_a_refused_launch_is_removed_after_what_hooks_made(tmp_path: Path) -> None:
    need_groups()
    node = open_node_group(f"test-hooks-{os.getpid()}")
    assert node is not None
    group, there = node.child("job-1"), []

    class Last(Recorded):
        def end(self, attempt: str) -> None:
            there.append(group.exists())

    try:
        refused_launch(tmp_path, [Last("a", []), Recorded("b", [], "task 1")], node)
        assert (there, group.exists()) == ([True], False)
    finally:
        assert node.remove()


def test_a_refused_change_of_cores_is_undone_in_reverse() -> None:
    calls: list[str] = []
    known = [Recorded("a", calls), Recorded("b", calls), Recorded("c", calls, "forth"), Recorded("d", calls)]
    attempt, one = ConfinedAttempt(None, lambda _: []), Cores({0: TaskCores(frozenset({0}))}, frozenset({0}))
    with pytest.raises(CoresRefused, match=r"^c refuses$"):
        hooks.change(known, attempt, EVERYWHERE, EVERYWHERE, one)
    assert calls == ["a forth", "b forth", "c forth", "b back", "a back"]
    calls.clear()
    known[1] = Recorded("b", calls, "back")
    with pytest.raises(CoresRefused, match=r"^c refuses; rollback failed: b refuses$"):
        hooks.change(known, attempt, EVERYWHERE, EVERYWHERE, one)
    assert calls[-1] == "a back"


@pytest.mark.root
def test_cores_whose_weights_are_refused_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    need_groups("cpuset", "cpu")
    node = open_node_group(f"test-weights-{os.getpid()}")
    assert node is not None
    group, known = node.child("attempt"), [CorePinning(), CpuTime()]
    whole, one = (Cores({0: TaskCores(frozenset(some))}, frozenset(some)) for some in (CPUS, CPUS[:1]))
    attempt = ConfinedAttempt(group, lambda _: [])
    try:
        group.create()
        group.delegate_controllers()
        task_group(group, 0).create()
        hooks.change(known, attempt, whole, whole, whole)
        monkeypatch.setattr(Group, "set_weight", refuse)
        with pytest.raises(CoresRefused, match=r"^no weight; rollback failed: no weight$"):
            hooks.change(known, attempt, whole, whole, one)
        assert (group.cpus(), task_group(group, 0).cpus()) == (CPUS, CPUS)
    finally:
        group.remove()
        assert node.remove()


def refuse(*_: object) -> None:
    raise GroupError("no weight")


def test_a_refused_part_of_a_throttle_keeps_no_other_from_applying(tmp_path: Path) -> None:
    class Sets(EnforcementHook):
        def throttle(self, change: ThrottleChange) -> None:
            change.now = replace(change.now, bandwidth_percent=change.wanted.bandwidth_percent)

    directory = AttemptDirectory(tmp_path, KEY)
    directory.path.mkdir()
    known = [Recorded("a", []), Sets(), Recorded("b", [])]
    throttle = AttemptThrottle(None, directory, AttemptCores(None, directory, known), known, None)
    held = throttle.apply(shell("job", ""), resources_pb2.Inventory(), Throttle(20, suspended=True))
    assert (held.throttle, held.refused) == (Throttle(20), ("a refuses", "b refuses"))
    assert throttle.apply(shell("job", ""), resources_pb2.Inventory(), FREE).throttle == FREE


def test_an_end_that_fails_keeps_no_other_from_its_end() -> None:
    calls: list[str] = []
    hooks.end([Recorded("a", calls), Recorded("b", calls, "end"), Recorded("c", calls)], "job-1")
    assert calls == ["c end", "b end", "a end"]


def test_each_hook_alone_says_what_is_not_enforced_without_groups() -> None:
    said = {kind.__name__: list(kind().open(EnforcedNode())) for kind in hooks.HOOKS}
    assert {name: len(sentences) for name, sentences in said.items()} == {
        "BandwidthShare": 0, "CorePinning": 1, "MemoryLimit": 1, "CpuTime": 2, "ProcessLimit": 1, "GpuIsolation": 0,
        "ScratchDirectory": 0,
    }  # fmt: skip
