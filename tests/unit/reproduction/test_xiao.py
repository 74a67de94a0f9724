"""Xiao's effects, with other seeds than in the tables: their sign, and approximate size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.reproduction.model import Asked, Data, Done, Figures, Verdict
from cotenant.reproduction.papers.xiao import EIGHT, PAPER, Learning, best_cores
from cotenant.reproduction.papers.xiao_jobs import (
    BALANCED,
    BOUND,
    CROWDED,
    DENSE,
    EQUAL,
    KNOWN_BALANCED,
    KNOWN_THETA,
    LEARNED,
    ROLES,
    SWEEPS,
    UNCROWDED,
    Replay,
)
from cotenant.reproduction.report import claim_columns, claim_rows

SMALL = replace(DENSE, servers=2, jobs=120)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    arms = (ROLES, EQUAL, LEARNED, KNOWN_THETA, BALANCED, KNOWN_BALANCED, BOUND)
    found = {arm.name: Replay(SMALL, arm, Data(), seed=11).run(lambda: False) for arm in arms}
    return {name: one for name, one in found.items() if one is not None}


@pytest.mark.deep
def test_jobs_with_as_many_cores_as_help_are_done_earlier(figures: dict[str, Figures]) -> None:
    jct = {name: one.values["jct_seconds"] for name, one in figures.items()}
    assert jct[LEARNED.name] < 0.96 * jct[EQUAL.name] < 0.96 * jct[ROLES.name]
    assert jct[KNOWN_THETA.name] < jct[LEARNED.name], "who knows beforehand need not try"
    assert jct[BOUND.name] < min(jct[KNOWN_THETA.name], jct[BALANCED.name])


@pytest.mark.deep
def test_they_use_their_gpus_better_and_hold_fewer_cores(figures: dict[str, Figures]) -> None:
    ours, equal = figures[LEARNED.name].values, figures[EQUAL.name].values
    assert ours["utilisation_percent"] > 1.04 * equal["utilisation_percent"]
    assert ours["cores_percent"] < 0.95 * equal["cores_percent"]


def test_unfinished_cases_are_open_and_misses_are_explained(figures: dict[str, Figures]) -> None:
    asked = Asked(quick=True, seeds=(11,))
    done = Done({(DENSE.name, name, 11): one for name, one in figures.items()})
    measured = PAPER.findings(asked, done).measured
    here = [one for one in measured if one.workload == DENSE.name]
    assert all(one.ours for one in here if one.base != CROWDED.name)
    assert all(one.why for one in here if one.learned)
    assert {one.verdict for one in measured if one.workload != DENSE.name} == {Verdict.OPEN}


def test_without_isolation_jobs_are_late_for_what_crowding_costs_and_hardly_for_anything_else(
    figures: dict[str, Figures],
) -> None:
    crowded, free = (Replay(SMALL, arm, Data(), seed=11).run(lambda: False) for arm in (CROWDED, UNCROWDED))
    assert crowded
    assert free
    assert figures[LEARNED.name].values["jct_seconds"] < 0.95 * crowded.values["jct_seconds"]
    assert free.values["jct_seconds"] == pytest.approx(figures[KNOWN_THETA.name].values["jct_seconds"], rel=0.05)


@pytest.mark.deep
def test_near_saturation_a_gain_in_speed_is_a_larger_one_in_completion_time() -> None:
    sweep = replace(SWEEPS[0], like=replace(SWEEPS[0].like, servers=2))
    point = replace(sweep, loads_quick=(2.0,)).points(Asked(quick=True, seeds=(11,)))[2.0]
    found = [Replay(point, arm, Data(), seed=11).run(lambda: False) for arm in (LEARNED, ROLES)]
    ours, roles = (one.values for one in found if one)
    assert ours["jct_seconds"] < 0.66 * roles["jct_seconds"]
    assert ours["utilisation_percent"] > 1.19 * roles["utilisation_percent"]


def test_the_best_load_is_judged_and_all_are_named() -> None:
    asked = Asked(quick=False, seeds=(0,))
    (light, point), (heavy, other) = list(SWEEPS[0].points(asked).items())[:2]
    run = {BALANCED: (90.0, 60.0), ROLES: (100.0, 100.0), BOUND: (80.0, 50.0)}  # at the light and the heavy load
    done = Done(
        {
            (load.name, arm.name, 0): Figures({"jct_seconds": jct[number], "utilisation_percent": 50.0})
            for number, load in enumerate((point, other))
            for arm, jct in run.items()
        }
    )
    (best,) = (
        one
        for one in PAPER.findings(asked, done).measured
        if (one.workload, one.base, one.claim.unit, one.claim.published) == (SWEEPS[0].name, ROLES.name, "%", -34.0)
    )
    assert best.ours
    assert best.ours.mean == pytest.approx(-40)
    assert best.verdict is Verdict.EXCEEDED
    assert best.bound
    assert best.bound.mean == pytest.approx(-50), "at the same load"
    assert "bound" in claim_columns([best])
    assert next(iter(claim_rows([best])))[7] == "-50.0 %"
    assert best.why == f"the best of the sweep, at a load of {heavy:g}: -10.0 % at {light:g}, -40.0 % at {heavy:g}"


@pytest.mark.parametrize("model", ["LeNet", "DeepSpeech", "language model", "resnet18", "gnmt"])
def test_a_curve_is_known_after_five_counts_at_most(model: str) -> None:
    found = Learning(model, seed=11).run(lambda: False)
    assert found
    assert found.values["points"] <= 5
    assert found.values["error_percent"] < 8
    assert found.values["speed_percent"] > 85


def test_the_best_counts_are_those_that_were_published() -> None:
    assert [best_cores(model) for model in ("LeNet", "language model", "resnet50", "alexnet")] == [20, 1, 4, 9]
    assert EIGHT in {case.workload for case in PAPER.cases(Asked(quick=True, seeds=(0,)))}
