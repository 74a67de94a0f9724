"""The interpreter of a job's Python environment is checked on the node, and the agent's own is no job's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.unit.node_agent.jobs import shell
from tests.unit.node_agent.runtime.test_run_as import run
from tests.unit.node_agent.runtime.test_runtime_port import Opened, opened
from tests.unit.node_agent.runtime.test_submit_directory import spec_from

__all__ = ["opened"]  # a fixture

from cotenant.node_agent.runtime.task_environment import clean_environment
from cotenant.v1 import job_pb2


@pytest.fixture(autouse=True)
def activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent runs in an activated environment."""
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")


def with_environment(spec: job_pb2.JobSpec, path: Path, *, requested: bool = False) -> job_pb2.JobSpec:
    spec.python_environment.path, spec.python_environment.interpreter = str(path), str(path / "bin" / "python")
    spec.python_environment.source = job_pb2.ENVIRONMENT_SOURCE_VENV
    spec.python_environment.requested = requested
    return spec


def interpreter_in(path: Path) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    return path / "bin" / "python"


async def test_python_is_the_interpreter_of_the_environment(opened: Opened, tmp_path: Path) -> None:
    interpreter = interpreter_in(tmp_path / "venv")
    path = f"{tmp_path}/venv/bin:/usr/bin:/bin"
    spec = with_environment(spec_from(tmp_path, PATH=path), tmp_path / "venv")
    state, _, output = await run(opened, shell("found", "command -v python", spec=spec))
    assert (state, output) == ("SUCCEEDED", f"{interpreter}\n")


@pytest.mark.parametrize("wrong", ["no file", "a broken link", "not executable"])
async def test_a_missing_interpreter_is_an_error_that_says_what_to_do(
    opened: Opened, tmp_path: Path, wrong: str
) -> None:
    interpreter = interpreter_in(tmp_path / "venv")
    interpreter.unlink()
    if wrong == "a broken link":
        interpreter.symlink_to("/nowhere/python3")
    if wrong == "not executable":
        interpreter.write_text("")
    order = shell("missing", "echo started", spec=with_environment(spec_from(tmp_path), tmp_path / "venv"))
    state, message, output = await run(opened, order)
    assert (state, output) == ("NOT_LAUNCHED", "")
    assert (await opened.ended("missing")).launch_cause == "environment"
    link = " (a link to /nowhere/python3)" if wrong == "a broken link" else ""
    why = "it is not executable for the job's user" if wrong == "not executable" else "No such file or directory"
    assert f"does not have the interpreter {interpreter}{link} of the job's Python environment" in message
    assert f"{why}; keep it on storage that all nodes have at the same path, or submit with --env-from none" in message


async def test_it_is_needed_on_nodes_without_the_folder_only_if_it_was_asked_for(
    opened: Opened, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    found = with_environment(spec_from(tmp_path, inode=1), missing)
    assert (await run(opened, shell("found", "echo started", spec=found)))[0] == "SUCCEEDED"
    asked_for = with_environment(job_pb2.JobSpec(), missing, requested=True)
    assert (await run(opened, shell("asked", "echo started", spec=asked_for)))[0] == "NOT_LAUNCHED"


def test_no_variable_of_the_agents_environment_reaches_jobs() -> None:
    own = {"PATH": f"{sys.prefix}/bin", "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": "/x", "PYTHONHOME": "/y"}
    assert clean_environment({**own, "CONDA_PREFIX": "/z", "LD_LIBRARY_PATH": "/l", "TZ": "UTC"}) == {"TZ": "UTC"}


async def test_a_job_does_not_see_the_agents_own_environment(opened: Opened, tmp_path: Path) -> None:
    for folder in (job_pb2.JobSpec(), spec_from(tmp_path)):
        name = "there" if folder.HasField("submit_directory") else "empty"
        output = (await run(opened, shell(name, "env; cat /proc/$PPID/environ", spec=folder)))[2]
        assert f"{os.path.dirname(sys.executable)}:" not in output
        assert sys.prefix not in output
