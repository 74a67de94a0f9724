"""The supervisor without an agent: only its records count."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.node_agent.conditions import alive, need_groups, private_kib, until, written_number
from tests.unit.node_agent.jobs import CPUS, PYTHON, assignment, shell, task

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts, open_node_group
from cotenant.node_agent.enforcement.hook import EnforcedNode
from cotenant.node_agent.enforcement.hooks import open_hooks
from cotenant.node_agent.enforcement.node_settings import NodeSettings
from cotenant.node_agent.probes.outer_job import Nesting, OuterJob
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.launch import LaunchContext, launch
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.process_table import start_ticks
from cotenant.v1 import job_pb2

MEBIBYTE = 1 << 20
NODE_GROUP = f"test-supervisor-{os.getpid()}"


class Attempt:
    """An attempt that was launched, and its directory."""

    def __init__(self, directory: AttemptDirectory, pid: int, group: Group | None) -> None:
        self.directory, self.pid, self.group = directory, pid, group

    async def end(self) -> dict[str, Any]:
        """The last state, once the supervisor is gone."""
        await until(lambda: os.waitpid(self.pid, os.WNOHANG)[0])
        return self.state()

    def state(self) -> dict[str, Any]:
        state = json.loads((self.directory.path / "state.json").read_text())
        assert isinstance(state, dict)
        return state

    async def running(self) -> None:
        path = self.directory.path / "state.json"
        await until(lambda: path.exists() and self.state()["state"] != "STARTING")

    def output(self, rank: int = 0) -> str:
        return (self.directory.path / f"output-{rank}.log").read_text()


Launch = Callable[..., Attempt]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "attempts"


@pytest.fixture
def start(root: Path) -> Iterator[Launch]:
    """Launches attempts, in control groups if asked to, and makes sure that none is left."""
    attempts = []

    def start(
        job: agent_pb2.Assignment,
        *,
        groups: bool = False,
        output_bytes_max: int = MEBIBYTE,
        notify: str = "/nowhere",
        pids_max: int = 0,
        outer: tuple[int, int] | None = None,
    ) -> Attempt:
        node_group = open_node_group(NODE_GROUP) if groups else None
        directory = AttemptDirectory(root, AttemptKey(job.job_id, job.number))
        surroundings = LaunchContext(
            node_group=node_group,
            all_cpus=tuple(CPUS),
            notify_path=notify,
            lease_path="/nowhere",
            output_bytes_max=output_bytes_max,
            base_environment={"PATH": os.environ["PATH"]},
            nesting=Nesting(OuterJob("slurm/7", "", process=outer)) if outer else None,
        )
        open_hooks(surroundings.hooks, EnforcedNode(settings=NodeSettings(pids_max=pids_max)))
        pid = launch(surroundings, directory, job, "/nowhere").pid
        attempt = Attempt(directory, pid, node_group.child(directory.path.name) if node_group else None)
        attempts.append(attempt)
        return attempt

    yield start
    for attempt in attempts:
        try:
            os.kill(attempt.pid, signal.SIGKILL)
            os.waitpid(attempt.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
    if any(attempt.group for attempt in attempts):
        node_group = open_node_group(NODE_GROUP)
        assert node_group is not None
        node_group.kill()
        assert node_group.remove(timeout_seconds=10)


BOTH = pytest.mark.parametrize(
    "groups", [pytest.param(True, marks=pytest.mark.root), False], ids=["groups", "no groups"]
)


def skip_without(groups: bool) -> None:
    if groups:
        need_groups("cpuset", "memory")


@BOTH
async def test_a_daemon_does_not_outlive_its_job(start: Launch, tmp_path: Path, groups: bool) -> None:
    skip_without(groups)
    daemon = f"(setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 60' > /dev/null 2>&1 &)"
    attempt = start(shell("daemon", f"{daemon}; while [ ! -s {tmp_path}/pid ]; do sleep 0.01; done"), groups=groups)
    assert (await attempt.end())["state"] == "SUCCEEDED"
    assert not alive(written_number(tmp_path / "pid"))
    assert attempt.group is None or not attempt.group.exists()


@BOTH
async def test_the_other_tasks_stop_when_one_fails(start: Launch, tmp_path: Path, groups: bool) -> None:
    skip_without(groups)
    wait = f"trap 'echo warned; exit 0' TERM; echo $$ > {tmp_path}/$RANK; while :; do sleep 0.01; done"
    script = f"[ $RANK = 1 ] && exit 7; {wait}"
    attempt = start(shell("gang", script, tasks=[task(0), task(1), task(2)]), groups=groups)
    state = await attempt.end()
    assert (state["state"], state["exit"]["rank"], state["exit"]["code"]) == ("FAILED", 1, 7)
    assert not any(alive(written_number(tmp_path / str(rank))) for rank in (0, 2))


@BOTH
async def test_usage_is_recorded(start: Launch, groups: bool) -> None:
    skip_without(groups)
    burn = "x = bytearray(50 << 20)\nimport time\nwhile time.process_time() < 0.2: pass"
    attempt = start(assignment("burner", [*PYTHON, burn]), groups=groups)
    state = await attempt.end()
    assert 0.15 < state["cpu_seconds"] < 5
    assert 50 * MEBIBYTE < state["memory_peak_bytes"] < 200 * MEBIBYTE


@pytest.mark.root
@pytest.mark.parametrize("child", [False, True], ids=["itself", "a child of it"])
async def test_a_task_beyond_its_memory_limit_is_reported(start: Launch, child: bool) -> None:
    need_groups("memory")
    hog = "x = [bytearray(1 << 20) for _ in range(200)]"
    if child:
        hog = f"import os, sys\nif os.fork() == 0:\n    {hog}\nsys.exit(os.wait()[1] != 0)"
    attempt = start(assignment("hog", [*PYTHON, hog], tasks=[task(memory_bytes=64 * MEBIBYTE)]), groups=True)
    state = await attempt.end()
    assert (state["state"], state["exit"]["out_of_memory"]) == ("FAILED", True)
    assert state["message"] == "rank 0 ran out of memory: its limit is 64 MiB"
    assert attempt.group is not None
    assert not attempt.group.exists()


@BOTH
async def test_sigterm_without_an_order_uses_the_jobs_own_grace(start: Launch, tmp_path: Path, groups: bool) -> None:
    skip_without(groups)
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.02; done"
    attempt = start(shell("deaf", script, grace_seconds=0.1), groups=groups)
    pid = await until(lambda: written_number(tmp_path / "pid"))
    os.kill(attempt.pid, signal.SIGTERM)
    state = await attempt.end()
    assert (state["state"], state["exit"]["signal"]) == ("FAILED", 9)
    assert "told to end by something else" in state["message"]
    assert not alive(pid)


async def test_in_an_outer_job_a_signal_to_all_processes_stops_the_attempt(start: Launch, tmp_path: Path) -> None:
    script = f"trap 'exit 0' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.02; done"
    attempt = start(shell("nested", script, grace_seconds=30), outer=(os.getpid(), start_ticks(os.getpid())))
    pid = await until(lambda: written_number(tmp_path / "pid"))
    await attempt.running()
    os.kill(pid, signal.SIGTERM)
    await until(lambda: not alive(pid))
    os.kill(attempt.pid, signal.SIGTERM)  # a moment later: the task had ended with status 0
    state = await attempt.end()
    assert (state["state"], state["stop_reason"], state["message"]) == ("STOPPED", "DRAINED", "Slurm job 7 ended")


async def test_an_attempt_ends_with_the_outer_job(start: Launch, tmp_path: Path) -> None:
    outer = await asyncio.create_subprocess_exec("sleep", "60")
    script = f"setsid sleep 60 & echo $! > {tmp_path}/pid; trap '' TERM; while :; do sleep 0.02; done"
    attempt = start(shell("nested", script, grace_seconds=30), outer=(outer.pid, start_ticks(outer.pid)))
    daemon = await until(lambda: written_number(tmp_path / "pid"))
    await attempt.running()
    outer.kill()
    await outer.wait()
    state = await attempt.end()
    assert (state["state"], state["stop_reason"], state["message"]) == ("STOPPED", "DRAINED", "Slurm job 7 ended")
    assert not alive(daemon)


async def test_an_attempt_does_not_begin_after_the_outer_job(start: Launch) -> None:
    outer = await asyncio.create_subprocess_exec("sleep", "60")
    identity = outer.pid, start_ticks(outer.pid)
    outer.kill()
    await outer.wait()
    state = await start(shell("late", "sleep 60"), outer=identity).end()
    assert (state["state"], state["stop_reason"]) == ("STOPPED", "DRAINED")


async def test_processes_left_by_the_warned_one_keep_the_grace(start: Launch, tmp_path: Path) -> None:
    wait = f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    saver = f"trap '' TERM; {wait}; touch {tmp_path}/saved"
    attempt = start(shell("parent", f'sh -c "{saver}" & wait', grace_seconds=30))
    await until(lambda: written_number(tmp_path / "pid"))
    await attempt.running()
    os.kill(attempt.pid, signal.SIGTERM)
    await until(lambda: attempt.state()["state"] == "STOPPING")
    (tmp_path / "go").touch()
    await attempt.end()
    assert (tmp_path / "saved").exists()


async def test_an_unwarned_daemon_does_not_use_up_the_grace(start: Launch, tmp_path: Path) -> None:
    script = f"setsid sleep 60 & echo $! > {tmp_path}/pid; exec sleep 60"
    attempt = start(shell("parent", script, grace_seconds=3600))
    daemon = await until(lambda: written_number(tmp_path / "pid"))
    await attempt.running()
    attempt.directory.write_stop_order(3600)
    os.kill(attempt.pid, signal.SIGTERM)
    assert (await attempt.end())["state"] == "STOPPED"
    assert not alive(daemon)


async def test_other_signals_do_not_disturb_it(start: Launch, tmp_path: Path) -> None:
    attempt = start(shell("calm", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"))
    await attempt.running()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(attempt.pid, number)
    (tmp_path / "go").touch()
    assert (await attempt.end())["state"] == "SUCCEEDED"


async def test_a_program_starts_with_default_signals(start: Launch) -> None:
    show = "import signal; print([s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN])"
    attempt = start(shell("signals", f"exec {PYTHON[0]} -I -S -c '{show}' "))
    await attempt.end()
    ignored_by_python = [signal.SIGPIPE, signal.SIGXFSZ]
    assert attempt.output() == f"{ignored_by_python}\n"


async def test_a_program_has_only_the_standard_files_open(start: Launch) -> None:
    show = "import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))"
    attempt = start(assignment("files", [*PYTHON, show]))
    await attempt.end()
    assert attempt.output() == "[0, 1, 2, 3]\n"  # the last is that of the directory it lists


async def test_the_newest_output_is_kept_in_two_files(start: Launch) -> None:
    attempt = start(shell("chatty", "seq 1 100000"), output_bytes_max=64 * 1024)
    await attempt.end()
    older = attempt.directory.path / "output-0.log.1"
    kept = older.read_text() + attempt.output()
    assert kept.endswith("99999\n100000\n")
    assert 32 * 1024 <= len(kept) <= 64 * 1024
    assert older.stat().st_size == 32 * 1024


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "attempts"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.root
async def test_a_full_disk_only_drops_output(tiny_disk: Path, start: Launch) -> None:
    attempt = start(shell("flood", "seq 1 500000; exit 9"), output_bytes_max=64 * MEBIBYTE)
    state = await attempt.end()
    assert (state["state"], state["exit"]["code"]) == ("FAILED", 9)
    assert state["dropped_bytes"] == len("".join(f"{n}\n" for n in range(1, 500001))) - len(attempt.output())
    assert state["message"].endswith(f"{state['dropped_bytes']} bytes of output were dropped: No space left on device")


@pytest.mark.root
async def test_output_resumes_when_the_disk_has_space_again(tiny_disk: Path, start: Launch, tmp_path: Path) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(800 * 1024))
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    attempt = start(
        shell("flood", f"seq 1 100000; touch {tmp_path}/full; {wait}; echo end"), output_bytes_max=64 * MEBIBYTE
    )
    await until((tmp_path / "full").exists)
    ballast.unlink()
    (tmp_path / "go").touch()
    state = await attempt.end()
    note = f"[cotenant: {state['dropped_bytes']} bytes of output dropped: No space left on device]"
    assert attempt.output().count(f"\n{note}\n") == 1
    assert attempt.output().endswith("\nend\n")  # what still lay in the pipe may stand in between


async def test_the_supervisor_exits_when_its_directory_was_removed(start: Launch, tmp_path: Path) -> None:
    attempt = start(shell("gone", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"))
    await attempt.running()
    attempt.directory.remove()
    (tmp_path / "go").touch()
    await until(lambda: os.waitpid(attempt.pid, os.WNOHANG)[0])


@pytest.mark.root
async def test_an_end_that_cannot_be_recorded_is_reported_and_retried(
    tiny_disk: Path, start: Launch, tmp_path: Path
) -> None:
    wait = f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "notify"))
        agent.settimeout(60)
        attempt = start(shell("full", wait), notify=str(tmp_path / "notify"))
        await until(lambda: written_number(tmp_path / "pid"))
        await attempt.running()
        held_by_a_stranger = os.open(f"/proc/{written_number(tmp_path / 'pid')}/fd/1", os.O_WRONLY)
        spare = attempt.directory.path / "state.json.spare"
        spare.unlink()
        spare.mkdir()  # stands for a disk that takes nothing more
        (tmp_path / "go").touch()
        while json.loads(agent.recv(65536))["state"] != "SUCCEEDED":
            pass
        began = psutil.Process(attempt.pid).cpu_times().user
        assert json.loads(agent.recv(65536))["state"] == "SUCCEEDED"  # a second later, with the next try
        assert psutil.Process(attempt.pid).cpu_times().user - began < 0.2
        os.close(held_by_a_stranger)
        spare.rmdir()
        assert (await attempt.end())["state"] == "SUCCEEDED"


async def test_an_agent_receives_each_state_as_a_datagram(start: Launch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "notify"))
        agent.settimeout(60)
        attempt = start(shell("told", "true"), notify=str(tmp_path / "notify"))
        states = [json.loads(agent.recv(65536))["state"] for _ in range(3)]
        assert states == ["STARTING", "RUNNING", "SUCCEEDED"]
        await attempt.end()


def fill(sender: socket.socket, path: Path) -> None:
    """Send until the receiver's queue takes no more."""
    while True:
        try:
            sender.sendto(b"x", str(path))
        except BlockingIOError:
            return


async def test_a_busy_agent_does_not_block_the_supervisor(start: Launch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
            filler.setblocking(False)
            fill(filler, tmp_path / "notify")
        attempt = start(
            shell("told", f"touch {tmp_path}/ran; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"),
            notify=str(tmp_path / "notify"),
        )
        await until((tmp_path / "ran").exists)
        agent.settimeout(60)
        while agent.recv(65536) == b"x":
            pass
        (tmp_path / "go").touch()
        assert (await attempt.end())["state"] == "SUCCEEDED"


async def test_the_supervisor_stays_small(start: Launch, tmp_path: Path) -> None:
    attempt = start(shell("small", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done"))
    await attempt.running()
    size_kib = private_kib(attempt.pid)
    (tmp_path / "go").touch()
    await attempt.end()
    assert size_kib <= 12 * 1024


@pytest.mark.root
async def test_a_fork_bomb_is_killed(start: Launch, tmp_path: Path) -> None:
    need_groups("pids")
    bomb = (
        f"import os, pathlib\npathlib.Path('{tmp_path}/pid').write_text(str(os.getpid()))\n"
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass"
    )
    limited = f'ulimit -u 400; exec {PYTHON[0]} -I -S -c "{bomb}"'
    attempt = start(shell("bomb", limited, grace_seconds=0.05, tasks=[task(cpus=CPUS[-1:])]), groups=True)
    assert attempt.group is not None
    attempt.group.limit_processes(200)
    await until(lambda: written_number(tmp_path / "pid"))
    attempt.directory.write_stop_order(0.05)
    os.kill(attempt.pid, signal.SIGTERM)
    assert (await attempt.end())["state"] == "STOPPED"
    assert not attempt.group.exists()


@pytest.mark.root
@pytest.mark.parametrize(("own", "default", "expected"), [(0, 40, 40), (20, 40, 20), (0, 0, "max")])
async def test_the_number_of_processes_per_task_is_limited(
    start: Launch, own: int, default: int, expected: int | str
) -> None:
    need_groups("pids")
    count = (
        "import os\nmade = 0\nheld, hold = os.pipe()\ntry:\n    while made < 60:\n"
        "        if os.fork() == 0: os.close(hold); os.read(held, 1); os._exit(0)\n        made += 1\n"
        "except OSError: pass\nprint(made + 1)"
    )
    job = assignment("forks", [*PYTHON, count], spec=job_pb2.JobSpec(pids_max=own))
    attempt = start(job, groups=True, pids_max=default)
    await attempt.end()
    assert attempt.output() == f"{61 if expected == 'max' else expected}\n"


@pytest.mark.root
async def test_frozen_processes_of_an_earlier_try_do_not_block_the_next(start: Launch) -> None:
    need_groups("freezer")
    node = open_node_group(NODE_GROUP)
    assert node is not None
    for group in (node.child("again-1"), node.child("again-1").child("task-0")):
        group.create()
    node.child("again-1").freeze(True)
    assert (await start(shell("again", "exit 3"), groups=True).end())["exit"]["code"] == 3


@pytest.mark.root
async def test_a_suspended_job_gets_its_warning(start: Launch, tmp_path: Path) -> None:
    need_groups("freezer")
    script = f"trap 'touch {tmp_path}/saved; exit 0' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.01; done"
    attempt = start(shell("still", script, grace_seconds=30), groups=True)
    await until(lambda: written_number(tmp_path / "pid"))
    await attempt.running()
    assert attempt.group is not None
    attempt.group.freeze(True)
    attempt.directory.write_stop_order(30)
    os.kill(attempt.pid, signal.SIGTERM)
    assert (await attempt.end())["state"] == "STOPPED"
    assert (tmp_path / "saved").exists()


ESCAPES = {
    "daemon": "(setsid setsid sh -c '{stay}' &)",
    "its own process group": "set -m; sh -c '{stay}' & set +m",
    "stopped": "(setsid sh -c '{stay}' &); {wait}; kill -STOP $(cat {pid})",
    "in no group": "(setsid sh -c 'for p in {roots}; do echo $$ > $p || :; done; {stay}' &)",
}


@BOTH
@pytest.mark.parametrize("escape", ESCAPES)
async def test_no_process_survives_its_attempt(start: Launch, tmp_path: Path, groups: bool, escape: str) -> None:
    skip_without(groups)
    if escape == "in no group" and not groups:
        pytest.skip("it is in no group anyway")
    pid = tmp_path / "pid"
    stay = f'trap "" TERM HUP INT; echo $$ > {pid}; while :; do sleep 0.05; done'
    wait = f"while [ ! -s {pid} ]; do sleep 0.01; done"
    roots = " ".join(f"{mount.root}/cgroup.procs" for mount in find_mounts())
    script = ESCAPES[escape].format(stay=stay, wait=wait, pid=pid, roots=roots)
    attempt = start(shell("escape", f"{script}; {wait}"), groups=groups)
    state = await attempt.end()
    assert state["state"] == "SUCCEEDED", (state, attempt.output())
    assert not alive(written_number(pid))
    assert attempt.group is None or not attempt.group.exists()
