"""The users that jobs run as: their submitters if the agent is root; root only if an operator allows it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.jobs import NODE, assignment, shell
from tests.unit.node_agent.runtime.test_runtime_port import Opened

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime import run_as
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.run_as import UserMapping, UserNotAllowed, min_person_uid
from cotenant.node_agent.runtime.runtime_port import RuntimeContext
from cotenant.node_agent.supervisor import task_process
from cotenant.v1 import job_pb2

DAEMON, NOBODY = "daemon", "nobody"  # users that each machine has


def people(name: str) -> pwd.struct_passwd:
    known = {"eve": 1001, "root": 0, "toor": 0, NOBODY: 65534, "etcd": 112}
    return pwd.struct_passwd((name, "x", known[name], known[name], "", f"/people/{name}", "/bin/sh"))


def of(submitter: str, **names: str) -> int | None:
    user = UserMapping(names, 0, 1000, people).of(submitter)
    return None if user is None else user.uid


def test_a_submitter_is_the_user_of_its_name_unless_the_settings_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 7])
    assert of("eve") == 1001
    assert of("eve@example.org", **{"eve@example.org": "eve"}) == 1001
    assert of("stranger", **{"*": NOBODY}) == 65534
    user = UserMapping({}, 0, 1000, people).of("eve")
    assert user
    assert user.environment() == {"HOME": "/people/eve", "USER": "eve", "LOGNAME": "eve", "SHELL": "/bin/sh"}
    assert user.to_spec() == {"uid": 1001, "gid": 1001, "groups": [1001, 7]}


def test_only_the_settings_allow_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid])
    for name in ("root", "toor"):
        with pytest.raises(UserNotAllowed, match="as root: only"):
            of(name)
    with pytest.raises(UserNotAllowed, match="as root: only"):
        of("stranger", **{"*": "toor"})  # for everybody is for nobody in particular
    assert of("eve", eve="root") == 0


def test_a_system_account_does_not_run_jobs_of_a_submitter_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid])
    with pytest.raises(UserNotAllowed, match=r"system account of this node .its user id 112 is below 1000"):
        of("etcd")
    with pytest.raises(UserNotAllowed, match="system account"):
        of("etcd", **{"*": "etcd"})  # the name of one of all the others
    assert of("stranger", **{"*": "etcd"}) == 112
    assert of("etcd", etcd="etcd") == 112


def test_the_lowest_person_uid_is_read_from_login_defs(tmp_path: Path) -> None:
    defs = tmp_path / "login.defs"
    assert min_person_uid(defs) == 1000
    defs.write_text("#UID_MIN 7\nSYS_UID_MIN 100\nUID_MIN\t\t\t  500\nUID_MAX 60000\n")
    assert min_person_uid(defs) == 500
    defs.write_text("UMASK 022\n")
    assert min_person_uid(defs) == 1000


def test_an_unknown_user_runs_nothing() -> None:
    with pytest.raises(UserNotAllowed, match="this node has no user 'stranger'"):
        of("stranger")
    with pytest.raises(UserNotAllowed, match="no user 'gone', which 'eve' is mapped to"):
        of("eve", eve="gone")


def test_the_operators_jobs_run_as_the_agents_user_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid])
    for submitter in ("", "operator", "anyone"):
        assert of(submitter, **{"*": NOBODY}) is None
    assert of("operator", operator=NOBODY) == 65534


def test_an_agent_that_is_not_root_runs_only_its_own_users_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_as, "user_name", lambda uid: "bob")
    for mine in ("", "operator", "anyone", "bob"):
        assert UserMapping({}, 1000, 1000, people).of(mine) is None
    with pytest.raises(UserNotAllowed, match="run as the user 'bob', so jobs of 'eve' could read and change"):
        UserMapping({}, 1000, 1000, people).of("eve")


def test_an_operator_may_allow_a_shared_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_as, "user_name", lambda uid: "bob")
    assert UserMapping({}, 1000, 1000, people, shared=True).of("eve") is None
    assert UserMapping({"eve": "bob"}, 1000, 1000, people).of("eve") is None
    assert UserMapping({"*": "bob"}, 1000, 1000, people).of("eve") is None
    with pytest.raises(UserNotAllowed, match="jobs of 'ann'"):
        UserMapping({"eve": "bob"}, 1000, 1000, people).of("ann")


# With real processes -----------------------------------------------------------------------------------------------


def submitted(job_id: str, submitter: str, script: str, **more: object) -> agent_pb2.Assignment:
    job = shell(job_id, script, **more)
    job.submitter = submitter
    return job


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")


@pytest.fixture
async def opened(tmp_path: Path) -> object:
    need_root()
    opened = Opened(tmp_path)
    opened.context = RuntimeContext(NODE, tmp_path, opened.context.inventory, 1 << 20, 10, 1e9, users={"eve": DAEMON})
    assert not await opened.runtime.open(opened.context, opened.told.append)
    yield opened
    for status in opened.told:
        opened.runtime.stop(status.key, 0)
        await opened.ended(status.key.job_id)
    await opened.runtime.close()


async def run(opened: Opened, job: agent_pb2.Assignment) -> tuple[str, str, str]:
    await opened.runtime.launch(job)
    status = await opened.ended(job.job_id)
    output = opened.context.state_dir / "attempts" / f"{job.job_id}-1" / "output-0.log"
    return status.state, status.message, output.read_text() if output.exists() else ""


@pytest.mark.root
async def test_a_job_runs_as_its_submitter_without_root_privileges(opened: Opened) -> None:
    daemon = pwd.getpwnam(DAEMON)
    script = "id -u; id -g; id -G; grep Cap[EPI] /proc/self/status | cut -f2; echo $HOME $USER"
    script += "; echo x > made; stat -c %u made ."
    state, message, output = await run(opened, submitted("as-eve", "eve", script))
    assert (state, message) == ("SUCCEEDED", "")
    groups = " ".join(map(str, os.getgrouplist(DAEMON, daemon.pw_gid)))
    zero = "0" * 16
    uid = str(daemon.pw_uid)
    assert output.splitlines() == [
        uid, str(daemon.pw_gid), groups, zero, zero, zero, f"{daemon.pw_dir} {DAEMON}", uid, uid,
    ]  # fmt: skip


@pytest.mark.root
async def test_a_program_is_searched_along_its_path(opened: Opened) -> None:
    """Not by what of Python's library only root may read."""
    found = assignment("found", ["env", "echo", "here"])
    found.submitter = "eve"
    assert await run(opened, found) == ("SUCCEEDED", "", "here\n")
    lost = assignment("lost", ["no-such-program"])
    lost.submitter = "eve"
    state, message, _ = await run(opened, lost)
    assert (state, message) == ("FAILED", "rank 0: command not found: no-such-program")


@pytest.mark.root
async def test_a_job_cannot_read_the_agents_files(opened: Opened) -> None:
    script = "for f in ../assignment ../spec ../state.json ../output-0.log; do cat $f && echo read $f; done 2>/dev/null"
    (opened.context.state_dir / "token").touch(mode=0o600)
    script += f"; cat {opened.context.state_dir}/token 2>/dev/null && echo read the token"
    script += "; (touch ../x && echo wrote; kill -9 $PPID && echo killed) 2>/dev/null; true"
    assert await run(opened, submitted("nosy", "eve", script)) == ("SUCCEEDED", "", "")


@pytest.mark.root
async def test_the_working_directory_is_entered_as_the_submitter(opened: Opened, tmp_path: Path) -> None:
    private = tmp_path / "private"
    os.mkdir(private, mode=0o700)
    job = submitted("outside", "eve", "pwd", spec=job_pb2.JobSpec(working_directory=str(private)))
    state, message, _ = await run(opened, job)
    assert state == "NOT_LAUNCHED"
    assert f"the working directory {private} cannot be entered: Permission denied" in message


@pytest.mark.root
async def test_root_and_unknown_users_are_refused(opened: Opened) -> None:
    for submitter, told in (("root", "as root: only [users]"), ("no-such-person", "no user 'no-such-person'")):
        state, message, output = await run(opened, submitted(f"by-{submitter}", submitter, "id -u"))
        assert (state, output) == ("NOT_LAUNCHED", "")
        assert told in message


@pytest.mark.root
async def test_the_operators_jobs_run_as_the_agents_user(opened: Opened) -> None:
    assert await run(opened, submitted("mine", "operator", "id -u")) == ("SUCCEEDED", "", "0\n")


@pytest.mark.root
async def test_a_submitters_job_gets_its_warning_and_dies_with_its_supervisor(opened: Opened) -> None:
    await opened.runtime.launch(submitted("long", "eve", "trap 'echo warned; exit 0' TERM; echo up; sleep 60 & wait"))
    output = opened.context.state_dir / "attempts" / "long-1" / "output-0.log"
    await until(lambda: output.exists() and "up" in output.read_text())
    opened.runtime.stop(AttemptKey("long", 1), 10)
    assert (await opened.ended("long")).state == "STOPPED"
    assert "warned" in output.read_text()


@pytest.mark.root
def test_the_agents_groups_are_dropped() -> None:
    need_root()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([4242])
        task_process.switch_user({"uid": 1, "gid": 1, "groups": [1, 7]})
        os.write(writer, f"{sorted(os.getgroups())} {os.getresuid()} {os.getresgid()}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 200).decode() == "[1, 7] (1, 1, 1) (1, 1, 1)"
    os.close(reader)
    os.close(writer)
