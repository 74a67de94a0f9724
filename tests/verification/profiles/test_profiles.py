"""The default profile is ahead of the baselines and of a paper's own part, on that paper's kind of work."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.properties import amount
from tests.verification.profiles.workloads import PLAIN, WORKLOADS, Workload, behind, ratios

from cotenant.simulator.traces import SAMPLE_PATH

ALL_JOBS = 260
BUSY = 100, 140  # numbers of jobs that keep all GPUs busy


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """All jobs of the sample; with `--deep` alone some busy days of it."""
    header, *rows = SAMPLE_PATH.read_text().splitlines()
    path = tmp_path / "jobs.csv"
    path.write_text("\n".join([header, *rows[amount(BUSY[0], deep=0) : amount(BUSY[1], deep=ALL_JOBS)], ""]))
    return str(path)


@pytest.mark.deep
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "workload",
    [pytest.param(one, id=one.profile) for one in WORKLOADS if one.profile in ("paper:coda", "paper:xiao")],
)
def test_the_default_is_ahead_of_the_baselines_and_of_the_paper(workload: Workload, trace: str) -> None:
    found = ratios(workload, (PLAIN, workload.profile), [1], trace)
    assert behind(found) == [], found


def test_a_profile_that_is_behind_is_named() -> None:
    assert behind({PLAIN: [1.01, 0.99, 1.01], "paper:coda": [1.01], "paper:xiao": [1.03, 0.5, 1.03]}) == [
        PLAIN,
        "paper:xiao",
    ]
