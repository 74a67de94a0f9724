"""CODA's effects, with other seeds than in the tables: their sign, and approximate size."""

from __future__ import annotations

import pytest

from cotenant.reproduction.model import Asked, Data, Done, Figures, Verdict
from cotenant.reproduction.papers.coda import DRF, FIFO, PAPER, QUICK, SLIM, Mixed

pytestmark = pytest.mark.deep  # the other papers' figures stay in the short form


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    found = {arm.name: Mixed(QUICK, arm, Data(), seed=11).run(lambda: False) for arm in (FIFO, DRF, SLIM)}
    return {name: one for name, one in found.items() if one is not None}


def test_slimmed_jobs_make_more_of_the_gpus_and_cpu_jobs_wait_no_longer(figures: dict[str, Figures]) -> None:
    fifo, drf, slim = (figures[arm.name].values for arm in (FIFO, DRF, SLIM))
    assert slim["utilisation_percent"] > 1.2 * drf["utilisation_percent"] > 1.2 * fifo["utilisation_percent"]
    assert slim["cpu_queue_seconds"] <= drf["cpu_queue_seconds"]
    assert slim["cores_percent"] < drf["cores_percent"]


def test_what_was_cut_short_is_open_and_shown_all_the_same(figures: dict[str, Figures]) -> None:
    done = Done({(QUICK.name, name, 11): one for name, one in figures.items()})
    findings = PAPER.findings(Asked(quick=True, seeds=(11,)), done)
    assert {one.verdict for one in findings.measured} == {Verdict.OPEN}  # the full arm was not run
    assert findings.tables[0].rows[0][0] == FIFO.name
