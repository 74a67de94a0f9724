"""A job starts in the folder that it was submitted from, on nodes that have it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.node_agent.jobs import shell
from tests.unit.node_agent.runtime.test_run_as import opened as opened_for_users
from tests.unit.node_agent.runtime.test_run_as import run, submitted
from tests.unit.node_agent.runtime.test_runtime_port import Opened, opened

__all__ = ["opened", "opened_for_users"]  # fixtures

from cotenant.v1 import job_pb2


def spec_from(folder: Path, *, inode: int = 0, workdir: str = "", **environment: str) -> job_pb2.JobSpec:
    found = folder.stat() if folder.exists() else None
    spec = job_pb2.JobSpec(working_directory=workdir)
    spec.submit_directory.path = str(folder)
    spec.submit_directory.inode = inode or (found.st_ino if found else 1)
    spec.submit_directory.owner_uid = found.st_uid if found else 0
    spec.submit_directory.environment.update(environment)
    return spec


async def test_a_job_starts_in_the_submitters_folder_with_its_search_path(opened: Opened, tmp_path: Path) -> None:
    project = tmp_path / "a project"
    (project / "bin").mkdir(parents=True)
    tool = project / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho of $VIRTUAL_ENV in $(pwd) from $COTENANT_SUBMIT_DIR; cat data; echo x > result")
    tool.chmod(0o755)
    (project / "data").write_text("data\n")
    spec = spec_from(project, PATH=f"{project}/bin:/usr/bin:/bin", VIRTUAL_ENV="venv")
    state, _, output = await run(opened, shell("here", "tool", spec=spec))
    assert (state, output) == ("SUCCEEDED", f"of venv in {project} from {project}\ndata\n")
    assert (project / "result").read_text() == "x\n"


@pytest.mark.parametrize("difference", ["no such folder", "another inode"])
async def test_elsewhere_it_starts_in_an_empty_folder_and_says_why(
    opened: Opened, tmp_path: Path, difference: str
) -> None:
    folder = tmp_path / "project"
    if difference == "another inode":
        folder.mkdir()
    spec = spec_from(folder, inode=1, PATH="/nowhere")
    state, _, output = await run(opened, shell("elsewhere", "ls; echo $COTENANT_SUBMIT_DIR", spec=spec))
    why = "has a different folder" if folder.exists() else "does not have the folder"
    assert state == "SUCCEEDED"
    assert output.startswith(f"cotenant: this node {why} {folder}")
    assert output.endswith("; started in an empty folder\n\n")


async def test_a_named_working_directory_wins_and_keeps_the_search_path(opened: Opened, tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    spec = spec_from(project, workdir=str(other), PATH="/usr/bin:/bin:/opt/own", VIRTUAL_ENV="venv")
    _, _, output = await run(opened, shell("named", "pwd; echo $PATH $VIRTUAL_ENV", spec=spec))
    assert output == f"{other}\n/usr/bin:/bin:/opt/own venv\n"


async def test_the_jobs_own_environment_wins(opened: Opened, tmp_path: Path) -> None:
    spec = spec_from(tmp_path, PATH="/nowhere", VIRTUAL_ENV="theirs")
    spec.environment["PATH"] = "/usr/bin:/bin"
    spec.environment["VIRTUAL_ENV"] = "own"
    assert (await run(opened, shell("own", "echo $VIRTUAL_ENV", spec=spec)))[2] == "own\n"


@pytest.mark.root
async def test_the_folder_is_entered_with_the_submitters_rights(opened_for_users: Opened, tmp_path: Path) -> None:
    private = tmp_path / "private"
    os.mkdir(private, mode=0o700)
    state, _, output = await run(opened_for_users, submitted("outside", "eve", "ls", spec=spec_from(private)))
    assert state == "SUCCEEDED"
    assert "Permission denied; started in an empty folder" in output
