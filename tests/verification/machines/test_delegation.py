"""An agent that is not root, in a group that was delegated to its user.

As systemd does with `Delegate=yes` and `DelegateSubgroup=cotenant-agent`.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import end_jobs
from tests.unit.node_agent.jobs import CPUS, PYTHON, assignment, resize_order, shell, task
from tests.unit.node_agent.placement import Placement
from tests.verification.machines.kernel import GROUPS, MEBIBYTE, group_of, number, read

from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.supervisor.cgroups import Group, format_cpu_list
from cotenant.v1 import job_pb2

pytestmark = pytest.mark.root
USER = 1234
CONTROLLERS = "+cpuset +cpu +memory +pids"
# What has controlled children takes no more processes: the next agent is started beside them, where the first stepped.
ENTERING = (
    'set -e; place="$0/cotenant-agent"; [ -d "$place" ] || place="$0"; echo $$ > "$place/cgroup.procs"; '
    'exec setpriv --reuid {user} --regid {user} --clear-groups "$@"'
)


@pytest.fixture
def unit() -> Iterator[Path]:
    """A group whose directory and three files belong to the user, and nothing above it does."""
    (GROUPS / "cgroup.subtree_control").write_text(CONTROLLERS)
    slice_ = GROUPS / "user.slice"
    slice_.mkdir()
    (slice_ / "cgroup.subtree_control").write_text(CONTROLLERS)
    path = slice_ / "agent.service"
    path.mkdir()
    for owned in (path, *(path / f"cgroup.{name}" for name in ("procs", "threads", "subtree_control"))):
        os.chown(owned, USER, USER)
    yield path
    group = Group(2, {"unified": str(slice_)}, ())
    group.kill()
    assert group.remove(30)


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    os.chown(path, USER, USER)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def delegated(placement: Placement, unit: Path, home: Path) -> AsyncIterator[AgentProcess]:
    prefix = ("/bin/sh", "-c", ENTERING.format(user=USER), str(unit))
    agent = AgentProcess(placement, home / "state", prefix=prefix)
    await agent.start()
    await placement.connected()
    yield agent
    await agent.end(signal.SIGKILL)
    await end_jobs(home / "state")


async def test_everything_is_enforced_below_the_delegated_group(
    placement: Placement, delegated: AgentProcess, unit: Path, home: Path
) -> None:
    assert without_identity(placement.hellos[-1].inventory.not_enforced) == []
    allocation = task(cpus=CPUS[:2], memory_bytes=64 * MEBIBYTE)
    placement.assign(shell("job", "exec sleep 6000", tasks=[allocation], grace_seconds=0))
    pid = await until(lambda: first_process(home))
    await placement.running("job")
    place = group_of(pid)
    assert unit in place.parents
    assert os.stat(f"/proc/{pid}").st_uid == USER
    assert read(place / "memory.max") == str(64 * MEBIBYTE)
    assert os.sched_getaffinity(pid) == set(CPUS[:2])
    placement.send(resizes=[resize_order("job", task(cpus=CPUS[1:2], memory_bytes=64 * MEBIBYTE), epoch=11)])
    assert await placement.answered(11) == ""
    assert os.sched_getaffinity(pid) == set(CPUS[1:2])
    assert read(place / "cpuset.cpus.effective") == format_cpu_list(CPUS[1:2])


def without_identity(not_enforced: Sequence[str]) -> list[str]:
    """Return what is not enforced, without the note that all jobs run as one user, which is expected here."""
    return [sentence for sentence in not_enforced if not sentence.startswith("every job runs as")]


def first_process(home: Path) -> int:
    """The job's first process as it is known outside of its namespaces."""
    return AttemptDirectory(home / "state" / "attempts", AttemptKey("job", 1)).task_pids().get(0, 0)


def sleeps(told: dict[str, Any]) -> bool:
    return bool(told["uids"].real == USER and told["name"] == "sleep")


async def test_a_hog_is_killed_and_a_daemon_goes_with_its_job(
    placement: Placement, delegated: AgentProcess, unit: Path, home: Path
) -> None:
    hog = "held = []\nwhile True: held.append(b'x' * (1 << 20))"
    placement.assign(assignment("hog", [*PYTHON, hog], tasks=[task(memory_bytes=64 * MEBIBYTE)]))
    end = await placement.ended("hog")
    assert (end.state, end.exit.out_of_memory) == (job_pb2.ATTEMPT_STATE_FAILED, True)
    placement.assign(shell("brief", "setsid sleep 6000 & exit 0"))
    assert (await placement.ended("brief")).state == job_pb2.ATTEMPT_STATE_SUCCEEDED
    assert [process.pid for process in psutil.process_iter(["uids", "name"]) if sleeps(process.info)] == []
    await until(lambda: not list(unit.rglob("brief-*")))


async def test_a_restarted_agent_finds_its_jobs_and_their_groups(
    placement: Placement, delegated: AgentProcess, unit: Path, home: Path
) -> None:
    placement.assign(shell("job", "exec sleep 6000", tasks=[task(cpus=CPUS[:1])]))
    pid = await until(lambda: first_process(home))
    await placement.running("job")
    await delegated.end(signal.SIGKILL)
    await delegated.start()
    hello = await placement.connected(2)
    assert [report.state for report in hello.attempts] == [job_pb2.ATTEMPT_STATE_RUNNING]
    assert without_identity(hello.inventory.not_enforced) == []
    assert delegated.process
    assert group_of(delegated.process.pid) == unit / "cotenant-agent"
    placement.send(resizes=[resize_order("job", task(cpus=CPUS[1:2]), epoch=11)])
    assert await placement.answered(11) == ""
    assert os.sched_getaffinity(pid) == set(CPUS[1:2])
    assert number(unit / "cgroup.events", "populated") == 1
