"""A job has the Python environment of its submitter and the variables of files, and nothing of the agent's."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.end_to_end.commands import Cli
from tests.end_to_end.meshes import Mesh

from cotenant.core.model.lifecycle import Phase

SCRIPT = "import os, sys; print(sys.prefix, os.environ['VIRTUAL_ENV'], os.environ.get('DATA'))\n"


@pytest.fixture
def project(cli: Cli, tmp_path: Path) -> Path:
    """A folder with a script, in which commands are typed."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(SCRIPT)
    cli.folder = tmp_path / "project"
    return cli.folder


def make_environment(path: Path, more: str = "") -> Path:
    """Make a virtual environment without packages."""
    python = Path(sys.executable).resolve()
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(python)
    (path / "pyvenv.cfg").write_text(f"home = {python.parent}\n{more}")
    return path


def in_shell(cli: Cli, **variables: str) -> Cli:
    """Return the command line of a shell with these variables."""
    other = Cli({**cli.environment, **variables})
    other.folder = cli.folder
    return other


def test_python_is_that_of_the_submitter_and_files_give_variables(cli: Cli, project: Path, tmp_path: Path) -> None:
    venv, uv = make_environment(tmp_path / "venv"), make_environment(project / ".venv", "uv = 0.9.1\n")
    (project / "a.env").write_text("export DATA='/data'  # shared\n")
    found = cli("submit", "--env-file", "a.env", "--wait", "--", "python", "train.py").out
    assert found == f"{uv} {uv} /data\n"
    activated = in_shell(cli, VIRTUAL_ENV=str(venv), PATH=f"{venv}/bin:{os.environ['PATH']}")
    assert activated("submit", "--wait", "--", "python", "train.py").out == f"{venv} {venv} None\n"
    words = ("--env-from", "venv", "--workdir", "none", "--wait", "--", "python", str(project / "train.py"))
    assert activated("submit", *words).out == f"{venv} {venv} None\n"
    assert f"{venv} (venv, asked for)" in cli("show", "@last").out


def test_a_job_that_no_node_has_the_interpreter_for_fails_and_says_what_to_do(
    cli: Cli, project: Path, tmp_path: Path
) -> None:
    venv = make_environment(tmp_path / "venv")
    job_id = cli("submit", "--hold", "--", "python", "train.py", VIRTUAL_ENV=str(venv)).out.strip()
    (venv / "bin" / "python").unlink()
    cli("resume", job_id)
    cli("wait", job_id, code=1)
    shown = cli("show", job_id).out
    assert f"does not have the interpreter {venv}/bin/python of the job's Python environment" in shown
    assert "or submit with --env-from none" in shown


def test_the_agents_own_environment_is_in_no_job_and_no_session(mesh: Mesh, cli: Cli, project: Path) -> None:
    own = sysconfig.get_path("scripts")
    plain = in_shell(cli, PATH="/usr/local/bin:/usr/bin:/bin")
    for words in (("--empty-workdir",), ()):
        printed = plain("submit", *words, "--wait", "--", "env").out
        assert "PATH=/" in printed
        assert own not in printed
        assert "VIRTUAL_ENV" not in printed
    job_id = cli.submit("--empty-workdir", "--", "sleep", "600")
    mesh.client.wait_for(job_id, Phase.RUNNING)
    session = cli("exec", job_id, "--", "env").out
    assert "PATH=/" in session
    assert own not in session
    cli("cancel", job_id)
