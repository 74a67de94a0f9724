"""How often jobs recur under a name, and what it predicts of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant import simulator
from cotenant.reproduction.model import Data
from cotenant.reproduction.papers.philly import VIRTUAL_CLUSTERS, jobs_of
from cotenant.reproduction.recurring_names import named


@pytest.fixture(scope="module")
def trace() -> simulator.Trace:
    return named(jobs_of(Data(), VIRTUAL_CLUSTERS), seed=5)


def test_as_many_jobs_recur_as_aiturbo_counted(trace: simulator.Trace) -> None:
    again = [job for job in trace.jobs if job.name.startswith("again")]
    assert len(again) / len(trace) == pytest.approx(0.71, abs=0.03)
    assert len({job.name for job in trace.jobs}) > len(trace) - len(again)  # a new job's name never recurs


def test_most_names_predict_the_run_time(trace: simulator.Trace) -> None:
    seconds: dict[str, list[float]] = {}
    for job in trace.jobs:
        if job.name.startswith("again"):
            seconds.setdefault(job.name, []).append(max(1.0, job.work_seconds))
    middles = {name: sorted(each)[len(each) // 2] for name, each in seconds.items()}
    far = sum(not 0.5 <= one / middles[name] <= 2 for name, each in seconds.items() for one in each)
    assert 0.02 < far / sum(map(len, seconds.values())) < 0.08


def test_nothing_but_names_changes(trace: simulator.Trace) -> None:
    assert replace(trace, jobs=tuple(replace(job, name="") for job in trace.jobs)) == jobs_of(Data(), VIRTUAL_CLUSTERS)
