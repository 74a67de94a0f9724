"""A failure before the program is executed is the node's, and names the part that failed."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, shell, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime import launch as launch_module
from cotenant.node_agent.runtime import supervisor_start
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.launch import CannotLaunch, LaunchContext, launch
from cotenant.node_agent.runtime.run_as import UserMapping, UserNotAllowed
from cotenant.node_agent.runtime.running_attempt import open_pidfd
from cotenant.node_agent.runtime.supervisor_start import SupervisorProcess
from cotenant.node_agent.supervisor.launch_faults import EXECUTING, cause_of_execution
from cotenant.v1 import job_pb2

FAILED, NOT_LAUNCHED = job_pb2.ATTEMPT_STATE_FAILED, job_pb2.ATTEMPT_STATE_NOT_LAUNCHED


def surroundings(tmp_path: Path, **more: Any) -> LaunchContext:
    return LaunchContext(
        node_group=None,
        all_cpus=tuple(CPUS),
        notify_path="/nowhere",
        lease_path="/nowhere",
        output_bytes_max=1 << 20,
        base_environment={"PATH": os.environ["PATH"]},
        **more,
    )


def directory_of(tmp_path: Path, job: agent_pb2.Assignment) -> AttemptDirectory:
    return AttemptDirectory(tmp_path / "attempts", AttemptKey(job.job_id, job.number))


async def state_of_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *limits: str) -> dict[str, Any]:
    """Run an attempt whose supervisor has these limits of `prlimit`; returns what it recorded."""
    wrapper = tmp_path / "limited"
    wrapper.write_text(f'#!/bin/sh\nexec prlimit {" ".join(limits)} {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    job = shell("limited", "touch ran", tasks=[task(rank) for rank in range(4)])
    directory = directory_of(tmp_path, job)
    pid = launch(surroundings(tmp_path), directory, job, "/nowhere").pid
    await until(lambda: os.waitpid(pid, os.WNOHANG)[0])
    state: dict[str, Any] = json.loads((directory.path / "state.json").read_text())
    return state


async def test_a_supervisor_without_descriptors_launches_nothing_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await state_of_limited(tmp_path, monkeypatch, "--nofile=14")
    assert (state["state"], state["launch_cause"]) == ("NOT_LAUNCHED", "limit")
    assert "could not be started: Too many open files" in state["message"]


def test_an_unknown_submitter_is_refused(tmp_path: Path) -> None:
    def look_up(name: str) -> Any:
        raise KeyError(name)

    job = shell("carols", "true")
    job.submitter = "carol"
    with pytest.raises(CannotLaunch, match="no user 'carol'") as refused:
        launch(
            surroundings(tmp_path, users=UserMapping(own_uid=0, look_up=look_up)),
            directory_of(tmp_path, job),
            job,
            "/x",
        )
    assert refused.value.cause == "user"
    assert isinstance(refused.value.__cause__, UserNotAllowed)


def test_a_state_directory_that_is_a_file_fails_the_launch(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("")
    job = shell("anyone", "true")
    with pytest.raises(CannotLaunch) as refused:
        launch(surroundings(tmp_path), directory_of(tmp_path, job), job, "/x")
    assert refused.value.cause == "directory"


def test_an_agent_that_cannot_start_processes_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    job = shell("anyone", "true")
    with pytest.raises(CannotLaunch, match="No such file") as refused:
        launch(surroundings(tmp_path), directory_of(tmp_path, job), job, "/x")
    assert refused.value.cause == "process"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.ENOTDIR])
def test_a_program_that_cannot_be_executed_is_the_jobs_failure(number: int) -> None:
    assert cause_of_execution(OSError(number, os.strerror(number))) == ""


@pytest.mark.parametrize(("number", "cause"), [(errno.EAGAIN, "limit"), (errno.ENOMEM, "limit"), (errno.EIO, "disk")])
def test_a_node_that_cannot_execute_a_program_is_to_blame(number: int, cause: str) -> None:
    assert cause_of_execution(OSError(number, os.strerror(number))) == cause


async def test_cpus_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    job = shell("far", "touch ran", tasks=[task(cpus=[1000])])
    directory = directory_of(tmp_path, job)
    pid = launch(surroundings(tmp_path), directory, job, "/nowhere").pid
    await until(lambda: os.waitpid(pid, os.WNOHANG)[0])
    status = directory.status()
    assert status is not None
    assert (status.state, status.launch_cause) == ("NOT_LAUNCHED", "cpus")
    assert not (directory.path / "work" / "ran").exists()


async def test_a_supervisor_that_dies_early_has_not_launched_the_job(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(supervisor_start, "SUPERVISOR", Path("/no/such/supervisor.py"))
        patch.setattr(supervisor_start, "STAMP_SECONDS", 0.0)
        placement.assign(shell("stillborn", "true"))
        end = await placement.ended("stillborn")
    assert (end.state, end.launch_cause) == (NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_OTHER)
    assert "its supervisor died" in end.message
    placement.assign(shell("after", "true"))
    assert (await placement.ended("after")).state == job_pb2.ATTEMPT_STATE_SUCCEEDED


async def test_an_error_of_the_agent_is_not_the_jobs_failure(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "launch", broken)
        placement.assign(shell("unlucky", "true"))
        end = await placement.ended("unlucky")
    assert (end.state, end.launch_cause) == (NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_OTHER)
    assert end.message == "the agent failed: can't start new thread"


async def test_a_program_that_ran_is_marked_as_executed(tmp_path: Path) -> None:
    job = shell("ran", "true")
    directory = directory_of(tmp_path, job)
    pid = launch(surroundings(tmp_path), directory, job, "/nowhere").pid
    await until(lambda: os.waitpid(pid, os.WNOHANG)[0])
    assert (directory.path / EXECUTING).exists()
    assert directory.was_executed()


async def test_an_agent_out_of_descriptors_keeps_watching_its_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: Iterator[OSError | int] = iter(
        [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOMEM, "no memory"), 7]
    )

    def once(pid: int) -> int:
        got = next(tries)
        if isinstance(got, OSError):
            raise got
        return got

    monkeypatch.setattr(os, "pidfd_open", once)
    monkeypatch.setattr("cotenant.node_agent.runtime.running_attempt.PIDFD_RETRY_SECONDS", 0.0)
    assert await open_pidfd(SupervisorProcess(1)) == 7
