"""Jobs of an agent that is not root: in namespaces of their own, isolated from the mesh's token and processes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.unprivileged import AS_USER, USER, WITHOUT_NAMESPACES, need_another_user
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import alive, until
from tests.unit.node_agent.conftest import end_jobs
from tests.unit.node_agent.jobs import PYTHON, assignment, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.runtime import node_identity
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.v1 import job_pb2

pytestmark = pytest.mark.root
FINE, BROKEN = job_pb2.ATTEMPT_STATE_SUCCEEDED, job_pb2.ATTEMPT_STATE_FAILED


class Unprivileged:
    """An agent of a user's own mesh, and what that user has."""

    def __init__(self, placement: Placement, home: Path, prefix: tuple[str, ...]) -> None:
        self.placement, self.home = placement, home
        self.token = home / "state" / "token"
        self.node_state = home / "state" / "nodes" / "n"
        self.node_state.mkdir(parents=True)
        self.token.write_text("secret")
        for path in (home, *home.rglob("*")):
            os.chown(path, USER, USER)
        self.agent = AgentProcess(placement, self.node_state, prefix=prefix, hidden=[str(home / "state")])

    async def output_of(self, job_id: str) -> list[str]:
        """Wait for a job to succeed, and return the lines that it wrote."""
        end = await self.placement.ended(job_id)
        assert end.state == FINE, end.message
        return self.written(job_id)

    def written(self, job_id: str) -> list[str]:
        output = self.node_state / "attempts" / f"{job_id}-1" / "output-0.log"
        return output.read_text().splitlines() if output.exists() else []

    def supervisor(self, job_id: str) -> int:
        status = AttemptDirectory(self.node_state / "attempts", AttemptKey(job_id, 1)).status()
        return status.pid if status else 0

    async def enforced(self) -> str:
        return " ".join((await self.placement.connected()).inventory.not_enforced)


@pytest.fixture
def home() -> Iterator[Path]:
    need_another_user()
    path = Path(tempfile.mkdtemp(prefix="cotenant-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def bare(placement: Placement, home: Path) -> AsyncIterator[Unprivileged]:
    """A user's agent where no user namespaces can be made."""
    bare = Unprivileged(placement, home, WITHOUT_NAMESPACES)
    await bare.agent.start()
    yield bare
    await bare.agent.end(signal.SIGKILL)
    await end_jobs(bare.node_state)


@pytest.fixture
async def own(placement: Placement, home: Path) -> AsyncIterator[Unprivileged]:
    own = Unprivileged(placement, home, AS_USER)
    await own.agent.start()
    if "are not available" in (told := await own.enforced()):
        await own.agent.end(signal.SIGKILL)
        pytest.skip(told)
    yield own
    await own.agent.end(signal.SIGKILL)
    await end_jobs(own.node_state)


def reach_for(own: Unprivileged) -> str:
    """A script that tries what it must not be able to do, once `pids` in its directory names the victims."""
    state = own.home / "state"
    return (
        f"while [ ! -s pids ]; do sleep 0.05; done; cat {own.token} && echo read; "
        f"ls {state}/tokens.json && echo listed; "
        f"for pid in $(cat pids); do kill -9 $pid && echo killed; cat /proc/$pid/environ && echo traced; done; "
        f"ls {own.node_state}/attempts; for f in {own.node_state}/sockets/notify; do [ -e $f ] && echo reached; done; "
        f"umount {state} && echo uncovered; unshare -r umount {state} && echo uncovered; "
        "[ -w /sys/fs/cgroup/cgroup.procs ] && echo moved; true"
    )  # fmt: skip


async def test_a_job_cannot_read_the_token_or_kill_the_meshs_processes(own: Unprivileged) -> None:
    own.placement.assign(shell("nosy", f"{{ {reach_for(own)}; }} 2>/dev/null"))
    own.placement.assign(shell("victim", "sleep 600", grace_seconds=0))
    await own.placement.running("nosy")
    await own.placement.running("victim")
    assert own.agent.process
    pids = [own.agent.process.pid, own.supervisor("nosy"), own.supervisor("victim")]
    work = own.node_state / "attempts" / "nosy-1" / "work"
    (work / "pids").write_text(" ".join(map(str, pids)))
    told = [line for line in await own.output_of("nosy") if line]
    assert told == ["nosy-1"], "its own directory stands where it stood, and nothing beside it"
    assert own.token.read_text() == "secret"
    assert all(alive(pid) for pid in pids if pid != pids[1])


async def test_not_enforced_lists_what_is_still_shared(own: Unprivileged) -> None:
    told = await own.enforced()
    assert f"every job runs as '{USER}', the agent's user: namespaces isolate jobs from the mesh's files" in told
    assert (await own.placement.connected()).inventory.shared_user == str(USER)


async def test_a_job_has_its_directory_variables_and_devices(own: Unprivileged) -> None:
    script = "pwd; id -u; echo made > file; cat file; test -c /dev/null && echo device; echo $COTENANT_JOB_ID $RANK"
    own.placement.assign(shell("plain", script))
    assert await own.output_of("plain") == [
        str(own.node_state / "attempts" / "plain-1" / "work"), str(USER), "made", "device", "plain 0",
    ]  # fmt: skip


async def test_a_job_works_in_the_directory_that_it_names(own: Unprivileged) -> None:
    project = own.home / "project"
    project.mkdir()
    os.chown(project, USER, USER)
    named = shell("named", "pwd; echo x > result", spec=job_pb2.JobSpec(working_directory=str(project)))
    own.placement.assign(named)
    assert await own.output_of("named") == [str(project)]
    assert (project / "result").stat().st_uid == USER
    hidden = job_pb2.JobSpec(working_directory=str(own.home / "state"))
    own.placement.assign(shell("thief", "cat token", spec=hidden))
    await own.placement.ended("thief")
    assert own.written("thief") in ([], ["cat: token: No such file or directory"])


async def test_the_next_agent_receives_progress(own: Unprivileged) -> None:
    script = (
        "import os, socket, time\n"
        "step = 0\n"
        "while not os.path.exists('enough'):\n"
        "    step += 1\n"
        "    time.sleep(0.05)\n"
        "    try:\n"
        "        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(\n"
        "            b'step=%d' % step, os.environ['COTENANT_PROGRESS'])\n"
        "    except OSError: pass\n"
    )
    own.placement.assign(assignment("steady", [*PYTHON, script]))
    await own.placement.until(lambda: own.placement.progress)
    await own.agent.end(signal.SIGKILL)
    await own.agent.start()
    await own.placement.connected(2)
    heard = len(own.placement.progress)
    await own.placement.until(lambda: len(own.placement.progress) > heard)
    (own.node_state / "attempts" / "steady-1" / "work" / "enough").touch()
    await own.output_of("steady")


async def test_a_job_is_warned_and_ends_within_its_grace(own: Unprivileged) -> None:
    reads = "mkfifo pipe; exec 3<>pipe; echo up; read line <&3"  # without a child, which might miss the signal
    own.placement.assign(shell("long", f"trap 'echo warned; exit 0' TERM; {reads}"))
    await until(lambda: "up" in own.written("long"))
    own.placement.send(stops=[stop_order("long", grace_seconds=30)])
    assert (await own.placement.ended("long")).state == job_pb2.ATTEMPT_STATE_STOPPED
    assert own.written("long") == ["up", "warned"]


async def test_exit_statuses_and_signals_are_reported(own: Unprivileged) -> None:
    own.placement.assign(shell("three", "exit 3"), shell("segv", "kill -SEGV $$"), assignment("lost", ["no-such"]))
    ends = {job: await own.placement.ended(job) for job in ("three", "segv", "lost")}
    assert {end.state for end in ends.values()} == {BROKEN}
    assert (ends["three"].exit.code, ends["segv"].exit.signal) == (3, signal.SIGSEGV)
    assert "command not found: no-such" in ends["lost"].message


async def test_daemons_end_with_their_job_without_a_control_group(own: Unprivileged) -> None:
    script = "(setsid sh -c 'echo > up; exec sleep 600' &) ; while [ ! -e up ]; do sleep 0.02; done; echo pid $$"
    own.placement.assign(shell("daemon", script))
    assert (await own.output_of("daemon"))[0].startswith("pid ")
    assert users_processes("sleep") == []


async def test_everything_ends_with_the_supervisor(own: Unprivileged) -> None:
    own.placement.assign(shell("orphan", "(setsid sleep 600 &); echo up; sleep 600"))
    await until(lambda: "up" in own.written("orphan"))
    os.kill(own.supervisor("orphan"), signal.SIGKILL)
    assert (await own.placement.ended("orphan")).state == BROKEN
    await until(lambda: users_processes("sleep") == [])


async def test_the_tasks_of_a_gang_see_each_other(own: Unprivileged) -> None:
    tasks = [task(0), task(1)]
    script = "readlink /proc/self/ns/pid /proc/self/ns/user /proc/self/ns/mnt"
    own.placement.assign(shell("gang", script, tasks=tasks))
    await own.output_of("gang")
    seen = [(own.node_state / "attempts" / "gang-1" / f"output-{rank}.log").read_text() for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert os.readlink("/proc/self/ns/pid") not in seen[0]


async def test_without_namespaces_jobs_run_and_the_node_reports_it(bare: Unprivileged) -> None:
    told = await bare.enforced()
    assert "can read the mesh's token and kill its processes" in told
    assert "are not available (unshare: Operation not permitted)" in told
    bare.placement.assign(shell("open", f"cat {bare.token}"))
    assert await bare.output_of("open") == ["secret"]


def test_a_root_agent_reports_what_the_operators_jobs_share(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found = node_identity.find_identity({}, [tmp_path])
    assert (found.user, found.hidden) == ("", ())
    assert "run as root and can read that token" in found.not_enforced[0]
    assert node_identity.find_identity({"operator": "daemon"}, [tmp_path]).not_enforced == ()
    assert "all run as 'nobody'" in node_identity.find_identity({"*": "nobody"}, [tmp_path]).not_enforced[1]


def test_nested_paths_are_hidden_with_their_directory(tmp_path: Path) -> None:
    (tmp_path / "state" / "nodes").mkdir(parents=True)
    paths = [tmp_path / "state" / "nodes", tmp_path / "state", tmp_path / "absent"]
    assert node_identity.paths_to_hide(paths) == [(tmp_path / "state").resolve()]


def users_processes(name: str) -> list[int]:
    """The processes of the user with this name that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == USER and (path / "comm").read_text().strip() == name and alive(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue
    return found
