"""Slurm's commands and the script of a pilot, with programs of the test's own in their place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cotenant.cli.outcome import CommandError
from cotenant.cli.pilots.job_script import job_script
from cotenant.cli.pilots.plan import Pilot
from cotenant.cli.pilots.slurm_commands import Slurm, SlurmRefused


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return Slurm("cotenant-pilot", {})


def test_pilots_are_found_by_their_name_and_those_that_end_are_left_out(slurm: Slurm, tmp_path: Path) -> None:
    program(tmp_path, "squeue", 'echo "$@" > $0.said; printf "12|PENDING\\n9|RUNNING\\n10|COMPLETING\\n"')
    assert slurm.pilots() == [Pilot("9", pending=False), Pilot("12", pending=True)]
    assert "--name cotenant-pilot" in (tmp_path / "squeue.said").read_text()


def test_a_refusal_has_slurms_words(slurm: Slurm, tmp_path: Path) -> None:
    program(tmp_path, "sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid account" >&2; exit 1')
    with pytest.raises(SlurmRefused, match=r"^sbatch: error: Batch job submission failed: Invalid account$"):
        slurm.submit([], "")


def test_a_pilot_that_slurm_has_forgotten_has_ended_and_an_unreachable_one_has_not(
    slurm: Slurm, tmp_path: Path
) -> None:
    program(tmp_path, "squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert slurm.has_ended("5")
    for state, ended in (("COMPLETED", True), ("COMPLETING", False), ("RUNNING", False), ("", False)):
        program(tmp_path, "squeue", f"echo {state}")
        assert slurm.has_ended("5") is ended
    program(tmp_path, "squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(SlurmRefused, match="Unable to contact"):
        slurm.has_ended("5")


def test_without_slurm_the_error_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="sbatch is not installed here"):
        Slurm("a", {}).submit([], "")


def run_script(tmp_path: Path, agent: str) -> subprocess.CompletedProcess[str]:
    program(tmp_path, "agent", agent)
    script = job_script("pilot", [str(tmp_path / "agent"), "two words"])
    environment = {"SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path / "scratch"), "PATH": "/bin:/usr/bin"}
    (tmp_path / "scratch").mkdir()
    return subprocess.run(
        ["sh"], input=script, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False
    )


def test_a_killed_agent_is_started_again_with_the_same_state(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'echo "$@" >> said; [ -e once ] || { touch once; kill -9 $$; }; exit 3')
    assert done.returncode == 3
    first, second = (tmp_path / "said").read_text().splitlines()
    assert first == second
    assert first.startswith("two words --node pilot-7 --state-dir ")
    assert not list((tmp_path / "scratch").iterdir())


def test_the_script_outlives_sigterm_until_its_agent_has_ended(tmp_path: Path) -> None:
    agent = "trap 'sleep 0.3; touch handed-back; exit 0' TERM; kill -TERM $PPID; while :; do sleep 0.1; done"
    assert run_script(tmp_path, agent).returncode == 0
    assert (tmp_path / "handed-back").exists()
