"""Limits of version 2 control groups, as the kernel enforces them: memory, processes, kills, freezing, pressure."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import alive, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, PYTHON, assignment, shell, stop_order, task
from tests.unit.node_agent.placement import Placement
from tests.verification.machines.kernel import MEBIBYTE, group_of, new_group, number, read, stalled_microseconds

from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import job_pb2

pytestmark = pytest.mark.root
LIMIT_BYTES = 64 * MEBIBYTE
# Takes more and more, in a child of its own, and tells how that ended.
GREEDY = """
import os, sys
child = os.fork()
if not child:
    held = []
    while True: held.append(b'x' * (1 << 20))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=open(sys.argv[1], 'w'), flush=True)
"""
# Forks until the kernel refuses, tells how many there are, and leaves them all waiting.
FORKING = """
import os, sys
children = 0
try:
    while os.fork(): children += 1
    os.read(os.pipe()[0], 1)
except BlockingIOError:
    print(children, file=open(sys.argv[1], 'w'), flush=True)
    os.read(os.pipe()[0], 1)
"""
BURNING = "while True: sum(range(1000))"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = new_group(tmp_path.name)
    yield made
    made.kill()
    assert made.remove(30)


def start(*command: str) -> subprocess.Popen[bytes]:
    """Start a command that waits for `go`, so that it is in its group from its first instruction."""
    return subprocess.Popen(["/bin/sh", "-c", 'read go; exec "$@"', "sh", *command], stdin=subprocess.PIPE)


def go(group: Group, process: subprocess.Popen[bytes]) -> None:
    group.attach(process.pid)
    assert process.stdin
    process.stdin.write(b"\n")
    process.stdin.flush()


async def test_a_job_beyond_its_memory_is_killed_as_a_whole_and_the_kernel_counts_it(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    script = f'echo $$ > {tmp_path}/pid; read _ < {tmp_path}/go; exec {" ".join(PYTHON)} "$0" {told}'
    os.mkfifo(tmp_path / "go")
    placement.assign(
        assignment("hog", ["/bin/sh", "-c", script, GREEDY], tasks=[task(cpus=CPUS[:1], memory_bytes=LIMIT_BYTES)])
    )
    place = group_of(await until(lambda: written_number(tmp_path / "pid")))
    assert read(place / "memory.max") == str(LIMIT_BYTES)
    assert read(place / "memory.swap.max") == "0"
    assert read(place / "memory.oom.group") == "1"
    (tmp_path / "go").write_text("\n")
    end = await placement.ended("hog")
    assert end.state == job_pb2.ATTEMPT_STATE_FAILED
    assert end.exit.signal == signal.SIGKILL
    assert end.exit.out_of_memory
    assert not told.exists()  # the parent died with the child that took too much


def test_the_kernel_counts_kills_for_memory(group: Group) -> None:
    group.limit_memory(LIMIT_BYTES)
    process = start(*PYTHON, "held = []\nwhile True: held.append(b'x' * (1 << 20))")
    go(group, process)
    assert process.wait() == -signal.SIGKILL
    events = Path(group.paths()[0]) / "memory.events"
    assert number(events, "oom_kill") == group.oom_kills() >= 1  # a group that dies as a whole counts its victim twice
    assert 0 < group.memory_peak_bytes() <= LIMIT_BYTES


async def test_no_more_processes_than_the_limit_and_all_die_at_once(group: Group, tmp_path: Path) -> None:
    group.limit_processes(20)
    process = start(*PYTHON, FORKING, str(tmp_path / "told"))
    go(group, process)
    assert await until(lambda: written_number(tmp_path / "told")) == 19
    assert number(Path(group.paths()[0]) / "pids.events", "max") >= 1
    pids = group.pids()
    assert len(pids) == 20
    group.kill()
    assert process.wait() == -signal.SIGKILL
    await until(lambda: not any(alive(pid) for pid in pids))
    assert group.pids() == set()


async def test_a_group_that_forks_without_end_dies_by_one_write(group: Group) -> None:
    group.limit_processes(200)
    process = start("/bin/sh", "-c", "bomb() { bomb & bomb & wait; }; bomb")
    go(group, process)
    events = Path(group.paths()[0]) / "pids.events"
    await until(lambda: number(events, "max") > 0)
    group.kill()
    await until(lambda: process.poll() is not None and not group.pids())


async def test_a_frozen_job_can_be_stopped(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    placement.assign(shell("job", f"echo $$ > {tmp_path}/pid; exec sleep 6000", grace_seconds=0))
    pid = await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("job")
    place = group_of(pid)
    (place / "cgroup.freeze").write_text("1")
    await until(lambda: number(place / "cgroup.events", "frozen") == 1)
    placement.send(stops=[stop_order("job", grace_seconds=0)])
    assert (await placement.ended("job")).state == job_pb2.ATTEMPT_STATE_STOPPED
    assert not alive(pid)
    assert not place.exists()


async def test_only_jobs_that_share_a_cpu_are_under_pressure(group: Group) -> None:
    crowd, alone = group.child("crowd"), group.child("alone")
    group.delegate_controllers()
    for child, cpus in ((crowd, CPUS[:1]), (alone, CPUS[1:2])):
        child.create()
        child.set_cpus(cpus)
    processes = [(child, start(*PYTHON, BURNING)) for child in (crowd, crowd, crowd, alone)]
    for child, process in processes:
        go(child, process)
    crowded, calm = (Path(child.paths()[0]) / "cpu.pressure" for child in (crowd, alone))
    await until(lambda: stalled_microseconds(crowded) > 3_000_000)
    assert stalled_microseconds(crowded) > 3 * stalled_microseconds(calm)
    assert stalled_microseconds(Path("/proc/pressure/cpu")) > 3_000_000
    group.kill()
    for _, process in processes:
        process.wait()


async def test_a_daemon_of_a_job_dies_with_it(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    script = f"setsid sh -c 'env -i sh -c \"echo \\$\\$ > {tmp_path}/daemon; exec sleep 6000\"' & wait"
    placement.assign(shell("job", script, grace_seconds=0))
    daemon = await until(lambda: written_number(tmp_path / "daemon"))
    await placement.running("job")
    place = group_of(daemon)
    assert "job-1" in place.as_posix()
    placement.send(stops=[stop_order("job", grace_seconds=0)])
    await placement.ended("job")
    assert not alive(daemon)
    assert not place.exists()
