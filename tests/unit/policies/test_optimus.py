"""Optimus' greedy rule for rigid gangs: remaining time × dominant share, as of the last update."""

from __future__ import annotations

import math

import pytest

from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.optimus import Optimus

LOOK = 1200.0


def table_of(*jobs: tuple[str, float, int, int, float]) -> JobTable:
    """Jobs of (name, arrival, GPUs, cores, predicted s) on 8 GPUs and 16 cores."""
    table = JobTable()
    table.capacity = Capacity(gpu_milli=8000, cores=16)
    for number, (job_id, arrival, gpus, cores, seconds) in enumerate(jobs):
        table.add(JobRow(job_id, arrival, number, gpu_milli=1000 * gpus, cores=cores))
        table.update(job_id, predicted_seconds=seconds, confidence=1.0)
    return table


def ranked(table: JobTable, now: float, policy: Optimus | None = None) -> str:
    jobs, policy = table.jobs(now), policy or Optimus()
    rows = rank(jobs, policy.order(jobs, now), running_first=policy.running_first)
    return "".join(table.ids[row] for row in rows)


def test_what_a_job_takes_most_of_counts() -> None:
    assert ranked(table_of(("g", 0, 4, 4, 100), ("c", 0, 1, 12, 100), ("s", 0, 2, 4, 150)), LOOK) == "sgc"


def test_a_look_holds_until_the_next() -> None:
    table = table_of(("r", 0, 2, 2, 1000), ("w", 0, 2, 2, 900))
    table.start("r", LOOK)
    assert ranked(table, LOOK + 599) == "wr"  # though the running one would now finish earlier
    assert ranked(table, LOOK + 600) == "rw"


def valid_seconds(table: JobTable, now: float) -> float:
    return Optimus().order(table.jobs(now), now).valid_seconds


def test_updates_are_skipped_while_running_jobs_only_approach_their_end() -> None:
    table = table_of(("r", 0, 2, 2, 1000), ("w", 0, 2, 2, 900))
    table.start("r", LOOK)
    assert valid_seconds(table, LOOK + 599) == pytest.approx(601.0)  # it is to end at 1,000 s, and falls back if not
    table.update("r", predicted_seconds=1200.0)
    assert valid_seconds(table, LOOK + 599) == pytest.approx(601.0)


def test_an_unknown_job_falls_back_at_the_update_after_its_quantum_doubles() -> None:
    table = table_of(("u", 0, 2, 2, math.nan), ("w", 0, 2, 2, 900))
    table.start("u", LOOK)
    assert valid_seconds(table, LOOK) == pytest.approx(600.0)  # at 60 s
    assert valid_seconds(table, LOOK + 700) == pytest.approx(500.0)  # at 960 s
    assert valid_seconds(table, LOOK + 1300) == pytest.approx(1100.0)  # at 1,920 s
    assert valid_seconds(table, LOOK + 2500) == pytest.approx(1700.0)  # at 3,840 s


def test_new_jobs_are_considered_at_the_next_update() -> None:
    assert valid_seconds(table_of(("n", LOOK + 5, 1, 1, 10)), LOOK + 10) == pytest.approx(590.0)


def test_a_job_that_arrives_between_updates_waits_for_the_next() -> None:
    table = table_of(("l", 0, 8, 16, 9000), ("n", LOOK + 5, 1, 1, 10))
    assert ranked(table, LOOK + 10) == "ln"
    assert ranked(table, LOOK + 600) == "nl"


def test_nothing_changes_without_running_jobs_or_arrivals() -> None:
    assert Optimus().order(table_of(("a", 0, 1, 1, 10)).jobs(LOOK), LOOK).valid_seconds == math.inf


@pytest.mark.parametrize("text", ["0.5", "inf", "nan"])
def test_an_interval_that_makes_no_sense_is_named(text: str) -> None:
    with pytest.raises(BadOption, match="interval_seconds"):
        parse(Optimus.Options, {"interval_seconds": text})
