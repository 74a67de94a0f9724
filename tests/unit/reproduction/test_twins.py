"""The verdict on live and simulated twins; tests/end_to_end checks that they agree."""

from __future__ import annotations

import math

import pytest

from cotenant.reproduction.live_mesh import Ran
from cotenant.reproduction.model import Asked, Done, Figures, Verdict
from cotenant.reproduction.papers.twins import BUSY_PERCENT, FIGURES, PAPER, StepTimes, compared, twins

ASKED = Asked(quick=False, seeds=(0, 1, 2))


def done(ratios: tuple[float, ...], others: float = 0.0) -> Done:
    """Return rounds of one twin that took this multiple of the simulated time."""
    return Done(
        {
            ("xiao", "live", seed): Figures(
                dict.fromkeys(FIGURES, 1.0)
                | {"ratio": ratio, "off_percent": 100 * abs(ratio - 1), "others_percent": others}
            )
            for seed, ratio in enumerate(ratios)
        }
    )


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.04, 0.97, 1.06), Verdict.EXCEEDED),
        ((1.10, 1.10, 1.10), Verdict.REACHED),
        ((1.16, 1.17, 1.15), Verdict.MISSED),
        ((0.80, 0.82, 0.81), Verdict.MISSED),
    ],
)
def test_live_and_simulated_may_be_ten_percent_apart_either_way(ratios: tuple[float, ...], verdict: Verdict) -> None:
    findings = PAPER.findings(ASKED, done(ratios))
    assert {one.workload: one.verdict for one in findings.measured} == {
        "coda": Verdict.OPEN,
        "xiao": verdict,
        "aiturbo": Verdict.OPEN,
        "genie": Verdict.OPEN,
        "philly": Verdict.OPEN,
    }
    (table,) = findings.tables
    assert f"{table.rows[1][list(table.columns).index('live ÷ simulated')]:.3f}" == f"{sum(ratios) / 3:.3f}"


def test_a_busy_machine_gives_a_warning() -> None:
    _, calm, *_ = PAPER.findings(ASKED, done((1.0,), others=BUSY_PERCENT - 1)).measured
    coda, busy, *_ = PAPER.findings(ASKED, done((1.0,), others=85.0)).measured
    assert (coda.why, calm.why) == ("", "")
    assert busy.why.startswith("other processes used 85 % of the CPUs")


def test_each_twin_has_ten_jobs_and_contention_on() -> None:
    for twin in twins(1.0):
        assert len(twin.jobs) >= 10
        assert twin.flags()[twin.flags().index("--contention") + 1] == "coda-eliminator"


@pytest.mark.parametrize("name", [twin.name for twin in twins(1.0)])
def test_a_twin_is_replayed_with_its_gangs_and_deadlines(name: str) -> None:
    """Jobs that ran one after another, as fast as they may, are simulated with the twin's own policies."""
    (twin,) = (one for one in twins(0.5) if one.name == name)
    ran, told, now = [], [], 0.0
    for job in twin.jobs:
        took = 0.05 * job.steps
        ran.append(Ran(job.after_seconds, now, now + took))
        told.append(StepTimes(now, now + took, {1: [0.05] * job.steps}))
        now += took
    figures = compared(twin, ran, told, seed=0).values
    assert 0 < figures["simulated_seconds"] <= figures["simulated_makespan_seconds"]
    assert math.isnan(figures["live_met_percent"]) == math.isnan(figures["simulated_met_percent"]) == (name != "genie")
    if name == "genie":
        assert 0 < figures["live_met_percent"] < 100
