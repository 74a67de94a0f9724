"""GENIE's effects, with another seed than in the tables: their sign, approximate size, and what is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.core.model.estimate import Query
from cotenant.core.placement.candidate_allocations import standard_candidates
from cotenant.core.placement.unschedulable import shapes_of
from cotenant.reproduction.model import Asked, BadData, Data, Done, Figures, Verdict
from cotenant.reproduction.papers.genie import (
    EDF,
    FIFO,
    ITP,
    OURS,
    PAPER,
    RANDOM,
    QosCase,
    Setting,
    cluster,
    drawn,
)
from cotenant.reproduction.profiled_predictor import Profiled
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.world import World

SETTING = Setting(ITP, 0.8, 1.5)
SEED, JOBS = 11, 100


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    found = {arm.name: QosCase(SETTING, arm, JOBS, Data(), SEED).run(lambda: False) for arm in (FIFO, RANDOM, OURS)}
    return {name: one for name, one in found.items() if one is not None}


@pytest.mark.deep
def test_more_deadlines_are_met_than_by_fifo_and_far_more_than_by_random(figures: dict[str, Figures]) -> None:
    fifo, by_chance, ours = (figures[arm.name].values for arm in (FIFO, RANDOM, OURS))
    assert ours["kept_percent"] > 1.1 * fifo["kept_percent"]
    assert ours["kept_percent"] > 1.3 * by_chance["kept_percent"]
    assert ours["makespan_hours"] < by_chance["makespan_hours"]


def test_arms_have_the_same_jobs_and_seeds_have_others() -> None:
    one, same, other = (drawn(SETTING, 20, Data(), seed) for seed in (SEED, SEED, SEED + 1))
    assert one.jobs == same.jobs
    assert one.jobs != other.jobs
    assert all(job.deadline_seconds and job.model and job.work_seconds <= 86_400 for job in one.jobs)


def test_a_profile_of_a_gang_that_fits_on_a_server_is_near_the_truth_and_not_the_truth() -> None:
    trace, place = drawn(SETTING, 100, Data(), SEED), cluster()
    profiled, shapes = Profiled(trace, place, SEED), shapes_of(place.ledger())
    truth = World(place, Settings(speed=("locality",)))
    errors = []
    for job in trace.jobs:
        spec = job.spec()
        if spec.replicas > place.shapes[0].gpus:
            continue
        asked = Query(
            "", job.model, job.name, spec.gpu_milli, spec.replicas, candidates=standard_candidates(spec, shapes)
        )
        told = profiled.estimate(asked).candidates
        for mine, true in zip(told[:2], truth.candidate_estimates(job), strict=False):
            assert mine.remaining_seconds
            assert true.remaining_seconds
            assert mine.allocation == true.allocation
            errors.append(mine.remaining_seconds / true.remaining_seconds - 1)
    assert 0.005 < max(abs(error) for error in errors) < 0.25


def test_the_best_of_the_sweep_is_judged_and_what_was_not_run_is_open(figures: dict[str, Figures]) -> None:
    worse = replace(SETTING, load=2.0)
    low = {name: Figures({**one.values, "kept_percent": 10.0}) for name, one in figures.items()}
    done = Done(
        {(SETTING.name, name, SEED): one for name, one in figures.items()}
        | {(worse.name, name, SEED): one for name, one in low.items()}
    )
    measured = PAPER.findings(Asked(quick=True, seeds=(SEED,)), done).measured
    against = {(one.claim.name, one.base): one for one in measured if one.learned}
    kept = against["kept", FIFO.name]
    assert kept.ours is not None
    assert kept.ours.mean > 0
    assert "load 0.8 and deadlines of 1.5" in kept.why
    assert against["kept", EDF.name].verdict is Verdict.OPEN


def test_a_trace_in_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "itp").mkdir()
    (tmp_path / "itp" / "cluster10.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadData, match="has no column duration and no num_gpu"):
        drawn(SETTING, 5, Data(tmp_path), SEED)


@pytest.mark.parametrize(
    ("rows", "why"), [("", "it has no rows"), ("1,0,9000,4096\n", "no suitable job"), ("1,0,abc,1\n", "convert string")]
)
def test_a_trace_without_any_job_that_can_be_drawn_is_named(tmp_path: Path, rows: str, why: str) -> None:
    (tmp_path / "itp").mkdir()
    (tmp_path / "itp" / "cluster10.csv").write_text("job_id,submission_time,duration,num_gpu\n" + rows)
    with pytest.raises(BadData, match=why):
        drawn(SETTING, 5, Data(tmp_path), SEED)
