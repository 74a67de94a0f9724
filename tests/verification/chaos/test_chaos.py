"""A short chaos run, and the message where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import require_etcd
from tests.verification.chaos import machines

STEPS, SEED, REST_EVERY, PACE = 20, 31, 40, 0.6  # `make verify` takes 1,000 steps
JOBS_MIN = 10  # on a machine with other load


def chaos(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.verification.chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


@pytest.mark.root
@pytest.mark.timeout(600)  # takes about a minute on an idle machine
def test_a_mesh_under_faults_loses_duplicates_and_leaks_nothing(tmp_path: Path) -> None:
    require_etcd()
    if why := machines.missing_tools():
        pytest.skip(why)
    report = tmp_path / "report"
    pace = f"--rest-every={REST_EVERY}", f"--pace={PACE}"
    ended = chaos(f"--steps={STEPS}", f"--seed={SEED}", "--lasting=0", *pace, f"--json={report}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(report.read_text())
    assert result["wrong"] == []
    assert STEPS <= result["steps"] <= sum(result["drawn"].values())
    assert result["rests"] == -(-sum(result["drawn"].values()) // REST_EVERY)
    assert result["jobs"] >= JOBS_MIN
    assert result["attempts"] >= JOBS_MIN
    assert result["commits"] > result["jobs"]  # jobs of a large array share commits


@pytest.mark.deep
def test_missing_tools_are_named() -> None:
    ended = chaos("--steps=1", PATH=str(Path(sys.executable).parent))
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.startswith("chaos cannot run here: separate machines for all parts need ")
