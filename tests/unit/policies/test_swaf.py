"""Shortest waiting allowance first: the order, lost jobs, and the validity of the order."""

from __future__ import annotations

import math

import pytest

from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.swaf import Swaf

NOW = 1000.0
UNIX_NOW = 1.79e9


def table_of(*jobs: tuple[str, float, float, float], now: float = NOW) -> JobTable:
    """Jobs of (name, deadline from now, remaining s, attained s), each a second after the previous one."""
    table = JobTable()
    for number, (job_id, deadline, remaining, attained) in enumerate(jobs):
        table.add(JobRow(job_id, float(number), number, deadline_seconds=now + deadline))
        table.update(job_id, remaining_seconds=remaining)
        table.attain(job_id, attained)
    return table


def ranked(table: JobTable, swaf: Swaf, now: float = NOW) -> str:
    rows = rank(table.jobs(now), swaf.order(table.jobs(now), now), running_first=swaf.running_first)
    return "".join(table.ids[row] for row in rows)


FOUR = table_of(
    ("f", math.inf, 5.0, 0.0),
    ("l", 90.0, 91.0, 0.0),
    ("b", 100.0, 10.0, 0.0),
    ("a", 200.0, 150.0, 0.0),
    ("g", math.inf, 1.0, 0.0),
)


def test_the_least_allowance_comes_first_then_jobs_without_deadline_then_lost_jobs() -> None:
    assert ranked(FOUR, Swaf()) == "abfgl"


def test_lost_jobs_are_given_up_only_with_the_option() -> None:
    assert Swaf().order(FOUR.jobs(NOW), NOW).given_up is None
    marked = Swaf(Swaf.Options(lost="drop")).order(FOUR.jobs(NOW), NOW).given_up
    assert marked is not None
    assert marked.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("now", [NOW, UNIX_NOW])
def test_the_order_is_valid_until_the_next_allowance_is_used_up(now: float) -> None:
    table = table_of(("a", 50.0, 20.0, 0.0), ("b", 90.0, 20.0, 0.0), now=now)
    order = Swaf().order(table.jobs(now), now)
    assert order.valid_seconds == pytest.approx(30.001)
    later = now + order.valid_seconds
    assert Swaf().order(table.jobs(later), later).level.tolist() == [2, 0]
    assert Swaf().order(table.jobs(now + 30.0), now + 30.0).level.tolist() == [0, 0]
    last = later + Swaf().order(table.jobs(later), later).valid_seconds
    assert Swaf().order(table.jobs(last), last).valid_seconds == math.inf


def test_a_running_job_is_not_lost() -> None:
    table = table_of(("late", 5.0, 50.0, 0.0))
    table.start("late", NOW - 1)
    order = Swaf(Swaf.Options(lost="drop")).order(table.jobs(NOW), NOW)
    assert order.given_up is not None
    assert not order.given_up.any()
    assert order.valid_seconds == math.inf


def test_an_unpredictable_job_needs_its_attained_time_again_and_a_new_job_nothing() -> None:
    table = table_of(("n", 60.0, math.nan, 0.0), ("o", 90.0, math.nan, 50.0), ("p", 90.0, 0.0, 91.0))
    order = Swaf().order(table.jobs(NOW), NOW)
    assert order.level.tolist() == [0, 0, 2]
    assert order.score[:2].tolist() == [NOW + 60.0, NOW + 40.0]


def test_it_never_preempts_and_backfills_unless_strict() -> None:
    assert (Swaf().preemptive, Swaf().strict) == (False, False)
    assert Swaf(Swaf.Options(mode="strict")).strict
