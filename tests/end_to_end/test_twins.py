"""The simulator matches the real mesh: the same small jobs, live and simulated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.end_to_end import remains

from cotenant.reproduction.live_mesh import LiveStopped
from cotenant.reproduction.papers.twins import CPUS, compared, run_live, twins

pytestmark = pytest.mark.calm

BAND = (0.7, 1.4)  # wide, for a machine that does much else; the bar of a quiet one is 10 %


def test_a_tiny_twin_takes_about_as_long_as_simulated(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < CPUS:
        pytest.skip("jobs have to be able to differ in cores")
    coda = twins(0.3)[0]
    ran, reported = run_live(coda, tmp_path)
    assert not remains.processes_of(tmp_path), "the mesh ends with the twin"
    assert [sum(map(len, one.took.values())) for one in reported] == [job.steps for job in coda.jobs], (
        "all did their work"
    )
    assert all(one.submitted_seconds <= one.assigned_seconds <= one.ended_seconds for one in ran)
    figures = compared(coda, ran, reported, seed=0).values
    assert BAND[0] < figures["ratio"] < BAND[1], figures
    assert figures["simulated_makespan_seconds"] >= figures["simulated_seconds"]


def test_a_stopped_twin_leaves_nothing_running(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < CPUS:
        pytest.skip("a twin needs them")
    with pytest.raises(LiveStopped):
        run_live(twins(100.0)[0], tmp_path, stopped=lambda: True)
    assert not remains.processes_of(tmp_path)
