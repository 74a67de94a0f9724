"""Some steps of chaos, and what is said where there can be none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import require_etcd
from tests.verification.chaos import machines

STEPS, SEED, REST_EVERY, PACE = 60, 31, 40, 0.6
JOBS_MIN = 10  # on a machine that has other things to do as well


def chaos(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.verification.chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


@pytest.mark.root
@pytest.mark.timeout(600)  # it takes about two minutes on a machine of its own
def test_a_mesh_under_faults_loses_duplicates_and_leaks_nothing(tmp_path: Path) -> None:
    require_etcd()
    if why := machines.missing_tools():
        pytest.skip(why)
    told = tmp_path / "told"
    pace = f"--rest-every={REST_EVERY}", f"--pace={PACE}"
    ended = chaos(f"--steps={STEPS}", f"--seed={SEED}", "--lasting=0", *pace, f"--json={told}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    came_of_it = json.loads(told.read_text())
    assert came_of_it["wrong"] == []
    assert STEPS <= came_of_it["steps"] <= sum(came_of_it["drawn"].values())
    assert came_of_it["rests"] == -(-sum(came_of_it["drawn"].values()) // REST_EVERY)
    assert came_of_it["jobs"] >= JOBS_MIN
    assert came_of_it["attempts"] >= JOBS_MIN
    assert came_of_it["commits"] > came_of_it["jobs"]  # those of a large array share some


def test_missing_tools_are_named() -> None:
    ended = chaos("--steps=1", PATH=str(Path(sys.executable).parent))
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.startswith("no chaos here: machines of their own for all parts need ")
