"""The submitter's Python environment is found, and becomes the job's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.jobs.python_environment import NoEnvironment, find_environment, named_environment
from cotenant.cli.outcome import ExitCode
from cotenant.v1 import job_pb2


def environment_in(path: Path, *, uv: bool = False) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    (path / "pyvenv.cfg").write_text("home = /usr/bin\n" + "uv = 0.9.1\n" * uv)
    return path


def sources(shell: dict[str, str], folder: Path) -> str:
    found = find_environment(shell, str(folder))
    return f"{found.source} {Path(found.path).name}" if found else ""


def test_which_environment_is_found(tmp_path: Path) -> None:
    venv, conda = environment_in(tmp_path / "venv"), environment_in(tmp_path / "conda")
    plain, uv = tmp_path / "plain", tmp_path / "uv"
    environment_in(plain / ".venv")
    environment_in(uv / ".venv", uv=True)
    activated = {"CONDA_PREFIX": str(conda), "CONDA_DEFAULT_ENV": "conda"}
    base = {**activated, "CONDA_DEFAULT_ENV": "base"}
    assert sources({}, plain) == ""  # not activated: the shell's `python` is another one
    assert sources({}, uv) == "uv .venv"
    assert sources(activated, uv) == sources(activated, plain) == "conda conda"
    assert sources(base, uv) == "uv .venv"
    assert sources(base, plain) == "conda conda"
    assert sources({**activated, "VIRTUAL_ENV": f"{venv}/"}, uv) == "venv venv"
    assert sources({"VIRTUAL_ENV": str(tmp_path / "removed")}, plain) == ""
    assert sources({"VIRTUAL_ENV": "venv"}, tmp_path) == ""


def test_an_environment_of_somebody_else_in_a_folder_for_all_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment_in(tmp_path / ".venv", uv=True)
    own, stat = os.getuid(), os.stat
    monkeypatch.setattr(os, "getuid", lambda: own + 1)  # the .venv belongs to another user, and so does the folder
    assert sources({}, tmp_path) == "uv .venv"

    def of_root(path: str, **more: Any) -> os.stat_result:
        found = stat(path, **more)
        return os.stat_result([*found[:4], own + 2, *found[5:]]) if path == str(tmp_path) else found

    monkeypatch.setattr(os, "stat", of_root)  # as /tmp, where anyone may put one
    assert sources({}, tmp_path) == ""
    with pytest.raises(NoEnvironment, match="belongs neither to you"):
        named_environment("uv", {}, str(tmp_path))


def test_a_job_gets_what_is_found_only_in_the_folder(
    shell: Shell, standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    venv = environment_in(project / ".venv", uv=True)
    (project / "job.yaml").write_text("command: ['true']\n")
    monkeypatch.chdir(project)
    shell("submit", "--", "true")  # the plain way
    shell("submit", "job.yaml")
    for made in standin.jobs.jobs.values():
        found = made.spec.python_environment
        assert (found.source, found.path) == (job_pb2.ENVIRONMENT_SOURCE_UV, str(venv))
        assert (found.interpreter, found.requested) == (f"{venv}/bin/python", False)
        sent = made.spec.submit_directory.environment
        assert (sent["PATH"], sent["VIRTUAL_ENV"]) == (f"{venv}/bin:{os.environ['PATH']}", str(venv))
        assert not made.spec.environment
    first = next(iter(standin.jobs.jobs))
    assert f"{venv} (uv, found at submission)" in shell("show", first).out
    assert shell("show", first, "--json").json["python_environment"]["source"] == "uv"
    assert standin.jobs.jobs[shell("rerun", first).out.strip()].spec.python_environment.path == str(venv)
    for words in (
        ("--empty-workdir",), ("--workdir", "/"), ("--workdir", "none"), ("--env", "PATH=/bin"),
        ("--env-from", "none"), ("--like", first, "--empty-workdir"), ("--like", first, "--env-from", "none"),
        ("--workdir", "/", "--deadline", "2h"), ("--env", "PATH=/bin", "--deadline", "2h"),
    ):  # fmt: skip
        told = shell("submit", *words, "--", "true")
        spec = standin.jobs.jobs[told.out.strip()].spec
        assert not spec.HasField("python_environment"), words
        assert str(venv) not in spec.submit_directory.environment.get("PATH", ""), words


def test_an_environment_that_is_asked_for_is_ordinary_environment(
    shell: Shell, standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conda, venv = environment_in(tmp_path / "conda"), environment_in(tmp_path / "venv")
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "mine")
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    monkeypatch.setenv("PATH", f"/opt/x:{conda}/bin")
    job_id = shell("submit", "--env-from", "conda", "--env", "A=1", "--workdir", "/", "--", "true").out.strip()
    spec = standin.jobs.jobs[job_id].spec
    assert dict(spec.environment) == {
        "A": "1", "PATH": f"{conda}/bin:/opt/x", "CONDA_PREFIX": str(conda), "CONDA_DEFAULT_ENV": "mine",
    }  # fmt: skip
    assert (spec.python_environment.requested, dict(spec.submit_directory.environment)) == (True, {})
    assert f"{conda} (conda, asked for)" in shell("show", job_id).out
    again = shell("submit", "--like", job_id, "--env-from", "venv").out.strip()
    assert dict(standin.jobs.jobs[again].spec.environment) == {
        "A": "1", "PATH": f"{venv}/bin:{conda}/bin:/opt/x", "VIRTUAL_ENV": str(venv),
    }  # fmt: skip
    none = shell("submit", "--like", job_id, "--env-from", "none").out.strip()
    assert dict(standin.jobs.jobs[none].spec.environment) == {"A": "1", "PATH": "/opt/x"}
    assert not standin.jobs.jobs[none].spec.HasField("python_environment")
    own = shell("submit", "--env-from", "venv", "--env", "PATH=/own", "--", "true").out.strip()
    assert standin.jobs.jobs[own].spec.environment["PATH"] == f"{venv}/bin:/own"


@pytest.mark.parametrize(
    ("source", "words"),
    [("venv", "VIRTUAL_ENV is not set"), ("conda", "run `conda activate NAME`"), ("uv", "`uv sync` or `uv venv`")],
)
def test_an_environment_that_is_missing_is_an_error(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = shell("submit", "--env-from", source, "--dry-run", "--", "true")
    assert told.code == ExitCode.USAGE
    assert "--env-from: " in told.err
    assert words in told.err
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    if source != "uv":
        told = shell("submit", "--env-from", source, "--dry-run", "--", "true")
        assert f"has no interpreter that you can run: {tmp_path}/bin/python" in told.err
