"""The default profile is ahead of the baselines and of a paper's own part, on that paper's kind of work."""

from __future__ import annotations

import pytest
from tests.verification.profiles.workloads import PLAIN, WORKLOADS, Workload, behind, ratios


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "workload", [one for one in WORKLOADS if one.profile in ("paper:coda", "paper:xiao")], ids=lambda one: one.profile
)
def test_the_default_is_ahead_of_the_baselines_and_of_the_paper(workload: Workload) -> None:
    found = ratios(workload, (PLAIN, workload.profile), seeds=[1])
    assert behind(found) == [], found


def test_a_profile_that_is_behind_is_named() -> None:
    assert behind({PLAIN: [1.01, 0.99, 1.01], "paper:coda": [1.01], "paper:xiao": [1.03, 0.5, 1.03]}) == [
        PLAIN,
        "paper:xiao",
    ]
