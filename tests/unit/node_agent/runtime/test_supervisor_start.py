"""Supervisors that a zygote forks are like executed ones, and are started exactly once whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import alive, need_groups, private_kib, until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, PYTHON, assignment, shell
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement.cgroup_mounts import open_node_group
from cotenant.node_agent.runtime import supervisor_start
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.launch import LaunchContext, launch
from cotenant.node_agent.runtime.node_cgroup import open_node_cgroup
from cotenant.node_agent.runtime.supervisor_start import GONE, SupervisorProcess, SupervisorStarter, Zygote
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import job_pb2

SUCCEEDED = job_pb2.ATTEMPT_STATE_SUCCEEDED
NODE_GROUP = f"test-zygote-{os.getpid()}"
Change = Callable[[Zygote], None]


class Starting:
    """A starter with the attempts that it launched."""

    def __init__(self, root: Path, starter: SupervisorStarter, home: Group | None = None) -> None:
        self.root, self.starter, self.home = root, starter, home
        self.directories: list[AttemptDirectory] = []

    @property
    def zygote(self) -> Zygote:
        assert self.starter._zygote is not None
        return self.starter._zygote

    def another_zygote(self) -> Zygote | None:
        """Return a zygote that lives, if one can be started now, whatever became of earlier ones."""
        self.starter._retry_at = 0.0
        return self.starter._ready_zygote(None)

    def waiting_zygote(self) -> Zygote | None:
        """Return a zygote that has imported everything and waits; None if there is none yet, or it is just dying."""
        zygote = self.another_zygote()
        with contextlib.suppress(FileNotFoundError):
            return zygote if zygote and len(descriptors(zygote.pid)) == 6 else None
        return None

    def launch(self, job: agent_pb2.Assignment, node_group: Group | None = None) -> SupervisorProcess:
        directory = AttemptDirectory(self.root / "attempts", AttemptKey(job.job_id, job.number))
        self.directories.append(directory)
        surroundings = LaunchContext(
            node_group=node_group,
            all_cpus=tuple(CPUS),
            notify_path="/nowhere",
            lease_path="/nowhere",
            output_bytes_max=1 << 20,
            base_environment={"PATH": os.environ["PATH"]},
            home=self.home,
            starter=self.starter,
        )
        return launch(surroundings, directory, job, "/nowhere")

    def once(self, name: str) -> SupervisorProcess:
        """Launch a job that adds a line to `runs`, for each time that it is started."""
        return self.launch(shell(name, f"echo {name} >> {self.root}/runs"))

    def runs(self) -> list[str]:
        path = self.root / "runs"
        return sorted(path.read_text().split()) if path.exists() else []

    def states(self) -> list[str]:
        """Return the attempts' recorded states."""
        found = [directory.status() for directory in self.directories]
        return [status.state if status else "" for status in found]

    async def ended(self) -> list[str]:
        """Wait until all supervisors are gone, and return the attempts' states."""
        await until(lambda: not any(directory.supervised() for directory in self.directories))
        return self.states()


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    starter = SupervisorStarter()
    starter.open(tmp_path, None)
    starting = Starting(tmp_path, starter)
    yield starting
    starter.close()
    for directory in starting.directories:
        if directory.supervised() and (status := directory.status()):
            os.kill(status.pid, signal.SIGKILL)


def executing(tmp_path: Path) -> Starting:
    """A starter without a zygote."""
    return Starting(tmp_path / "executed", SupervisorStarter())


def proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def ends_a_line(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def kill(pid: int) -> None:
    """Kill and reap a child."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def descriptors(pid: int) -> list[str]:
    """Return what a process's descriptors are, such as `pipe`."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            found.append(os.readlink(path).partition(":")[0])
    return sorted(found)


async def test_a_supervisor_is_the_child_of_the_zygote(starting: Starting) -> None:
    supervisor = starting.launch(shell("forked", "exec sleep 60"))
    process = psutil.Process(supervisor.pid)
    assert process.ppid() == starting.zygote.pid
    await until(lambda: starting.directories[0].status())
    status = starting.directories[0].status()
    assert status
    assert (status.pid, status.pid_start_ticks) == supervisor


# What a job and its supervisor are given.

LOOK = """
import json, os, resource, signal
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
lines = open("/proc/self/status").read().splitlines()
kept = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "CapInh", "CapPrm", "CapEff",
        "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Threads", "Cpus_allowed_list", "Mems_allowed_list")
print(json.dumps({
    "environment": dict(os.environ), "directory": os.getcwd().rpartition("/")[2],
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in (0, 1, 2)),
    "more": [fd for fd in range(3, 4096) if os.path.exists(f"/proc/self/fd/{fd}")],
    "leads": [int(stat[2]) == os.getpid(), int(stat[3]) == os.getpid()], "terminal": stat[4], "nice": stat[16],
    "scheduling": [stat[36 + 2], stat[36 + 1]], "status": [line for line in lines if line.partition(":")[0] in kept],
    "limits": open("/proc/self/limits").read(), "groups": open("/proc/self/cgroup").read(),
    "oom": open("/proc/self/oom_score_adj").read(), "slack": open("/proc/self/timerslack_ns").read(),
    "personality": open("/proc/self/personality").read(),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))},
}), flush=True)
"""


def seen_by_supervisor(pid: int) -> dict[str, object]:
    """What the system shows of a supervisor."""
    proc = Path(f"/proc/{pid}")
    stat = (proc / "stat").read_text().rpartition(")")[2].split()
    words = [word for word in (proc / "cmdline").read_bytes().split(b"\0") if word]
    status = (proc / "status").read_text().splitlines()
    kept = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "CapEff", "NoNewPrivs", "Threads")
    return {
        "command": [Path(os.fsdecode(word)).name for word in words],
        "environment": (proc / "environ").read_bytes(),
        "descriptors": descriptors(pid),
        "leads": [int(stat[2]) == pid, int(stat[3]) == pid],
        "status": [line for line in status if line.partition(":")[0] in kept],
        "limits": (proc / "limits").read_text(),
        "oom": (proc / "oom_score_adj").read_text(),
        "groups": (proc / "cgroup").read_text(),
        "directory": os.readlink(proc / "cwd").rpartition("/")[2],
    }


@pytest.mark.parametrize("groups", [pytest.param(True, marks=pytest.mark.root), False], ids=["groups", "no groups"])
async def test_jobs_and_supervisors_are_the_same_as_executed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: bool
) -> None:
    """In a group of their own, whose name differs only by what starts them; the agent's token is nowhere."""
    if groups:
        need_groups("cpuset", "memory")
    monkeypatch.setenv("COTENANT_TOKEN", "secret")
    seen = {}
    kept = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(kept, True)  # as a library might
    for way in ("execute", "zygotes"):
        place = open_node_cgroup(f"{NODE_GROUP}-{way}", None) if groups else None
        starter = SupervisorStarter()
        starting = Starting(tmp_path / way, starter, place.home if place else None)
        starting.root.mkdir()
        if way == "zygotes":
            starter.open(starting.root, starting.home)
        try:
            job = assignment("job", [*PYTHON, f"{LOOK}\nimport time\nwhile not os.path.exists('go'): time.sleep(.01)"])
            node_group = place.node_group if place else None
            supervisor = starting.launch(job, node_group)
            output = starting.directories[0].path / "output-0.log"
            await until(partial(ends_a_line, output))
            told = json.loads(output.read_text())
            seen[way] = json.dumps([told, repr(seen_by_supervisor(supervisor.pid))]).replace(way, "WAY")
            if way == "zygotes":
                assert psutil.Process(supervisor.pid).ppid() == starting.zygote.pid
                assert proc(starting.zygote.pid, "environ") == b"PATH=/bin:/usr/bin\0LANG=C.UTF-8\0"
            (starting.directories[0].path / "work" / "go").touch()
            assert await starting.ended() == ["SUCCEEDED"]
        finally:
            starter.close()
            if place and place.node_group:
                place.node_group.kill()
                assert place.node_group.remove()
    os.close(kept)
    assert seen["zygotes"] == seen["execute"]
    assert "secret" not in seen["zygotes"]
    assert json.loads(seen["zygotes"])[0]["more"] == []


async def test_a_zygote_has_nothing_of_its_agent(starting: Starting) -> None:
    await until(lambda: "zygote.py" in " ".join(psutil.Process(starting.zygote.pid).cmdline()))
    starting.once("first")
    await starting.ended()
    pid = starting.zygote.pid
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    await until(lambda: descriptors(pid) == ["/dev/null"] * 3 + ["pipe"] * 2 + ["socket"])
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert str(starting.root) in " ".join(psutil.Process(pid).cmdline())


async def test_a_supervisor_shares_its_memory(starting: Starting, tmp_path: Path) -> None:
    executed = executing(tmp_path)
    pids = [starting.launch(shell("long", "exec sleep 60")).pid, executed.launch(shell("long", "exec sleep 60")).pid]
    for each in (starting, executed):  # before RUNNING, its pages are still shared with the task
        await until(lambda each=each: "RUNNING" in each.states())  # type: ignore[misc]  # binds the loop's own
    forked, alone = (private_kib(pid) for pid in pids)
    assert forked < 0.75 * alone
    kill(pids[1])


async def test_ended_supervisors_are_reaped(starting: Starting) -> None:
    starting.once("brief")
    await starting.ended()
    await until(lambda: not psutil.Process(starting.zygote.pid).children())


async def test_a_stop_order_that_comes_at_once_is_carried_out(starting: Starting) -> None:
    supervisor = starting.launch(shell("stopped", "exec sleep 60"))
    starting.directories[0].write_stop_order(0.0)
    os.kill(supervisor.pid, signal.SIGTERM)
    assert await starting.ended() in (["STOPPED"], ["FAILED"])  # before the first state it counts as external


# Deaths.


async def test_supervisors_survive_their_zygote_and_the_next_launch_gets_another(starting: Starting) -> None:
    first = starting.zygote.pid
    long = starting.launch(shell("long", f"while [ ! -e {starting.root}/go ]; do sleep 0.01; done"))
    os.kill(first, signal.SIGKILL)
    await until(lambda: not alive(first))
    starting.once("next")
    assert starting.zygote.pid != first
    assert alive(long.pid)
    (starting.root / "go").touch()
    assert await starting.ended() == ["SUCCEEDED", "SUCCEEDED"]
    assert starting.runs() == ["next"]


class Channel:
    """A channel on which something happens to the zygote between a request and its answer."""

    def __init__(self, zygote: Zygote, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._channel, self._before, self._after = zygote._channel, before, after
        zygote._channel = self  # type: ignore[assignment]  # what it needs of one

    def sendmsg(self, *words: object) -> int:
        self._before()
        return self._channel.sendmsg(*words)  # type: ignore[arg-type]  # passed on as they are

    def recv(self, count: int) -> bytes:
        self._after()
        return self._channel.recv(count)

    def close(self) -> None:
        self._channel.close()


class Once:
    """An action that is done the first time only: a request may take several messages, or none."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action:
            action()


def kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def test_a_zygote_killed_before_it_forks_has_started_nothing(starting: Starting) -> None:
    zygote = starting.zygote
    Channel(zygote, lambda: os.kill(zygote.pid, signal.SIGSTOP), lambda: os.kill(zygote.pid, signal.SIGKILL))
    supervisor = starting.launch(shell("once", f"echo once >> {starting.root}/runs; exec sleep 60"))
    assert psutil.Process(supervisor.pid).ppid() == os.getpid()
    await until(starting.runs)
    starting.directories[0].write_stop_order(0.0)
    os.kill(supervisor.pid, signal.SIGTERM)
    await starting.ended()
    assert starting.runs() == ["once"]


async def test_a_supervisor_whose_zygote_is_killed_before_it_answers_is_found(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, pids = Zygote.fork, []

    def unanswered(zygote: Zygote, directory: AttemptDirectory, lock: int) -> SupervisorProcess | None:
        pids.append(answered(zygote, directory, lock))
        os.kill(zygote.pid, signal.SIGKILL)
        raise ConnectionResetError

    monkeypatch.setattr(Zygote, "fork", unanswered)
    assert [starting.once("once")] == pids
    assert await starting.ended() == ["SUCCEEDED"]
    assert starting.runs() == ["once"]


async def test_jobs_run_once_whenever_the_zygote_is_killed(starting: Starting) -> None:
    rng = Random(7)
    names = [f"job-{number}" for number in range(8)]
    for name in names:
        zygote = await until(starting.waiting_zygote)
        assert zygote
        timer = threading.Timer(rng.uniform(0.0, 0.006), kill_if_there, [zygote.pid])
        start = Once(timer.start)
        Channel(zygote, start, lambda: None)
        assert starting.once(name) != GONE
        start()  # if it was not asked
        timer.join()
    assert await starting.ended() == ["SUCCEEDED"] * len(names)
    assert starting.runs() == sorted(names)


async def test_a_zygote_that_does_not_answer_is_killed(starting: Starting, monkeypatch: pytest.MonkeyPatch) -> None:
    zygote = starting.zygote
    zygote._channel.settimeout(0.05)
    os.kill(zygote.pid, signal.SIGSTOP)
    starting.once("anyway")
    assert not psutil.pid_exists(zygote.pid)
    assert await starting.ended() == ["SUCCEEDED"]


async def test_zygotes_that_keep_dying_are_left_alone_for_a_while(
    starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_start, "RETRY_SECONDS_FIRST", 1e6)
    monkeypatch.setattr(supervisor_start, "RETRY_SECONDS_MAX", 1e6)
    names = [f"job-{number}" for number in range(4)]
    parents = []
    for name in names:
        parents.append(psutil.Process(starting.launch(shell(name, "exec sleep 60")).pid).ppid())
        if (zygote := starting.starter._zygote) is not None:
            os.kill(zygote.pid, signal.SIGKILL)
            await until(lambda pid=zygote.pid: not alive(pid))  # type: ignore[misc]  # binds the loop's own
    assert parents[0] != os.getpid()
    assert parents[-1] == os.getpid(), "executed by the agent itself"
    assert starting.starter._retry_at > time.monotonic()
    starting.starter._retry_at = 0.0
    assert psutil.Process(starting.launch(shell("later", "exec sleep 60")).pid).ppid() == starting.zygote.pid


async def test_a_zygote_without_descriptors_starts_nothing_itself(starting: Starting) -> None:
    await until(lambda: len(descriptors(starting.zygote.pid)) == 6)
    resource.prlimit(starting.zygote.pid, resource.RLIMIT_NOFILE, (6, 6))
    supervisor = starting.once("executed")
    assert psutil.Process(supervisor.pid).ppid() == os.getpid()
    assert await starting.ended() == ["SUCCEEDED"]
    assert starting.runs() == ["executed"]


async def test_two_launches_at_once_are_two_jobs(starting: Starting) -> None:
    names = [f"job-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        pids = {supervisor.pid for supervisor in pool.map(starting.once, names)}
    assert len(pids) == len(names)
    assert await starting.ended() == ["SUCCEEDED"] * len(names)
    assert starting.runs() == sorted(names)


# The package on disk.


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the supervisor's program that a test may change."""
    copy = tmp_path / "package"
    shutil.copytree(supervisor_start.SUPERVISOR.parent, copy)
    monkeypatch.setattr(supervisor_start, "SUPERVISOR", copy / "supervisor.py")
    monkeypatch.setattr(supervisor_start, "STAMP_SECONDS", 0.0)
    return copy


async def test_a_changed_package_gets_another_zygote(package: Path, starting: Starting) -> None:
    before = starting.zygote.pid
    starting.once("before")
    assert starting.zygote.pid == before
    loop = package / "loop.py"
    fresh = package / "loop.new"
    fresh.write_text(loop.read_text().replace('self.message = ""', 'self.message = "a newer release"'))
    fresh.rename(loop)
    starting.once("after")
    assert starting.zygote.pid != before
    assert await starting.ended() == ["SUCCEEDED"] * 2
    messages = [status.message for directory in starting.directories if (status := directory.status())]
    assert messages == ["", "a newer release"]


async def test_a_package_without_a_working_zygote_starts_jobs_all_the_same(package: Path, starting: Starting) -> None:
    (package / "zygote.py").write_text("raise SystemExit(3)\n")
    starting.once("first")
    starting.once("second")
    (package / "zygote.py").unlink()
    starting.once("third")
    assert await starting.ended() == ["SUCCEEDED"] * 3
    assert starting.runs() == ["first", "second", "third"]


# With a whole agent.


@pytest.mark.root
async def test_supervisors_are_born_in_their_group(placement: Placement, agent: RunningAgent) -> None:
    need_groups("cpuset")
    placement.assign(shell("job", "exec sleep 60"))
    await placement.running("job")
    status = AttemptDirectory(agent.config.state_dir / "attempts", AttemptKey("job", 1)).status()
    assert status
    zygote = psutil.Process(psutil.Process(status.pid).ppid())
    assert any(word.endswith("zygote.py") for word in zygote.cmdline())
    groups = [proc(pid, "cgroup") for pid in (zygote.pid, status.pid)]
    assert groups[0] == groups[1]
    assert b"/cotenant-agent" in groups[0]
    node_group = open_node_group(agent.config.node_id)
    assert node_group is not None
    assert status.pid not in node_group.pids()


async def test_a_zygote_ends_with_its_agent(placement: Placement, agent_process: AgentProcess) -> None:
    placement.assign(shell("survivor", "exec sleep 60"))
    await placement.running("survivor")
    state_dir = Path(agent_process._fields["state_dir"])
    directory = AttemptDirectory(state_dir / "attempts", AttemptKey("survivor", 1))
    status = directory.status()
    assert status
    zygote = psutil.Process(status.pid).ppid()
    await agent_process.end(signal.SIGKILL)
    await until(lambda: not alive(zygote))
    assert directory.supervised()
    assert alive(status.pid)
    await agent_process.start()
    (told,) = (await placement.connected(2)).attempts
    assert told.state == job_pb2.ATTEMPT_STATE_RUNNING
    placement.assign(shell("next", "true"))
    assert (await placement.ended("next")).state == SUCCEEDED
