"""Philly's guidelines, with another seed than in the tables: the direction of each effect."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cotenant.reproduction.model import Asked, Data, Done, Figures
from cotenant.reproduction.papers import philly
from cotenant.reproduction.papers.philly import APART, BASE, OURS, PAPER, TIGHT, VIRTUAL_CLUSTERS, Replayed, jobs_of

JOBS = 450  # of 1,857: the first three and a half weeks


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    whole = jobs_of(Data(), VIRTUAL_CLUSTERS)
    with pytest.MonkeyPatch.context() as shorter:
        shorter.setattr(philly, "jobs_of", lambda *_: replace(whole, jobs=whole.jobs[:JOBS]))
        found = {arm.name: Replayed(TIGHT, arm, Data(), seed=11).run(lambda: False) for arm in (BASE, APART, OURS)}
    return {name: one for name, one in found.items() if one is not None}


def test_the_bundled_jobs_are_those_of_two_virtual_clusters() -> None:
    trace = jobs_of(Data(), VIRTUAL_CLUSTERS)
    assert len(trace) == 1857
    assert {job.tenant for job in trace.jobs} == {"0e4a51", "2869ce"}
    assert trace.jobs[0].submitted_seconds == 0


@pytest.mark.deep
def test_servers_of_their_own_and_wise_retries_spare_time(figures: dict[str, Figures]) -> None:
    base, apart, ours = (figures[arm.name].values for arm in (BASE, APART, OURS))
    assert apart["avg_jct_hours"] < base["avg_jct_hours"]
    assert apart["utilisation_4"] > base["utilisation_4"]
    assert ours["failed_trials"] < 0.8 * apart["failed_trials"]


@pytest.mark.deep
def test_jobs_end_as_often_as_philly_counted(figures: dict[str, Figures]) -> None:
    base = figures[BASE.name].values
    assert base["jobs_passed"] == pytest.approx(69.3, abs=3)
    assert base["jobs_failed"] == pytest.approx(17.2, abs=3)


def test_tables_are_complete_for_a_single_arm(figures: dict[str, Figures]) -> None:
    done = Done({(TIGHT.name, BASE.name, 11): figures[BASE.name]})
    tables = PAPER.findings(Asked(quick=True, seeds=(11,)), done).tables
    assert all(len(row) == len(table.columns) == len(table.formats) for table in tables for row in table.rows)
    last = tables[-1].rows[-1]
    assert all(isinstance(cell, float) and math.isnan(cell) for cell in last[1:])
