"""Xiao's effects, with other seeds than those of the tables: their sign, and roughly their size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.reproduction.papers.xiao import EIGHT, PAPER, Learning, best_cores
from cotenant.reproduction.papers.xiao_jobs import BEFOREHAND, DENSE, EQUAL, LEARNED, ROLES, Replay
from cotenant.reproduction.words import Asked, Data, Done, Figures, Verdict

SMALL = replace(DENSE, servers=2, jobs=120)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    found = {
        arm.name: Replay(SMALL, arm, Data(), seed=11).run(lambda: False) for arm in (ROLES, EQUAL, LEARNED, BEFOREHAND)
    }
    return {name: one for name, one in found.items() if one is not None}


def test_jobs_with_as_many_cores_as_help_are_done_earlier(figures: dict[str, Figures]) -> None:
    jct = {name: one.values["jct_seconds"] for name, one in figures.items()}
    assert jct[LEARNED.name] < 0.96 * jct[EQUAL.name] < 0.96 * jct[ROLES.name]
    assert jct[BEFOREHAND.name] < jct[LEARNED.name], "who knows beforehand need not try"


def test_they_use_their_gpus_better_and_hold_fewer_cores(figures: dict[str, Figures]) -> None:
    ours, equal = figures[LEARNED.name].values, figures[EQUAL.name].values
    assert ours["utilisation_percent"] > 1.04 * equal["utilisation_percent"]
    assert ours["cores_percent"] < 0.95 * equal["cores_percent"]


def test_what_has_no_baseline_is_open_and_says_why(figures: dict[str, Figures]) -> None:
    asked = Asked(quick=True, seeds=(11,))
    done = Done({(DENSE.name, name, 11): one for name, one in figures.items()})
    measured = [one for one in PAPER.findings(asked, done).measured if one.workload == DENSE.name]
    unshared = [one for one in measured if one.base == "no isolation"]
    assert {one.verdict for one in unshared} == {Verdict.OPEN}
    assert all(one.why for one in unshared)
    assert all(one.ours for one in measured if one not in unshared)


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
