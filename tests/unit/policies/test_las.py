from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import tables
from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.las import Las

UNIX_NOW = 1.79e9


def table_of(**gpus: int) -> JobTable:
    table = JobTable()
    for number, (job_id, count) in enumerate(gpus.items()):
        table.add(JobRow(job_id, arrival_seconds=float(number), sequence=number, gpu_milli=count * 1000))
    return table


def levels(table: JobTable, now: float, las: Las) -> dict[str, int]:
    return dict(zip(table.ids, las.order(table.jobs(now), now).level.tolist(), strict=True))


@pytest.mark.parametrize(("gpu_seconds", "level"), [(0, 0), (3249, 0), (3250, 1), (7199, 1), (7200, 2), (1_000_000, 2)])
def test_a_threshold_that_is_reached_takes_a_job_down(gpu_seconds: float, level: int) -> None:
    table = table_of(a=2)
    table.attain("a", gpu_seconds / 2)
    assert levels(table, 10.0, Las()) == {"a": level}


@given(
    st.floats(0, UNIX_NOW),
    st.integers(1, 4096),
    st.lists(st.floats(1, 1e7), min_size=1, max_size=4, unique=True),
    st.floats(0, 1e6),
)
def test_each_wake_up_takes_the_job_down_a_level(now: float, gpus: int, ends: list[float], attained: float) -> None:
    """Unix times are coarse and divisions round: a wake-up must be neither too early nor repeated forever."""
    las, table = Las(Las.Options(thresholds=tuple(sorted(ends)))), JobTable()
    table.add(JobRow("a", now, 0, gpu_milli=gpus * 1000))
    table.attain("a", attained)
    table.start("a", now)
    order = las.order(table.jobs(now), now)
    while order.valid_seconds < math.inf:
        now += order.valid_seconds
        before, order = order, las.order(table.jobs(now), now)
        assert order.level[0] > before.level[0]
    assert order.level[0] == len(ends)


def test_within_a_level_running_jobs_come_first_then_arrival_order() -> None:
    table = table_of(first=1, second=1, third=1)
    table.start("third", 5.0)
    las = Las()
    jobs = table.jobs(10.0)
    ranked = rank(jobs, las.order(jobs, 10.0), running_first=las.running_first)
    assert [table.ids[row] for row in ranked] == ["third", "first", "second"]


def test_the_order_is_valid_until_the_next_running_job_falls() -> None:
    table = table_of(slow=1, fast=10, waiting=64)
    table.start("slow", 100.0)
    table.start("fast", 100.0)
    assert Las().order(table.jobs(200.0), 200.0).valid_seconds == pytest.approx(225.0)


def test_without_anyone_running_nothing_changes() -> None:
    assert Las().order(table_of(a=1).jobs(5.0), 5.0).valid_seconds == math.inf


def test_a_job_without_gpus_is_charged_its_cores() -> None:
    table = JobTable()
    table.add(JobRow("cpu", 0.0, 0, cores=6))
    table.add(JobRow("free", 0.0, 1))
    for job_id in table.ids:
        table.attain(job_id, 2000.0)
    assert levels(table, 0.0, Las()) == {"cpu": 1, "free": 0}
    assert levels(table, 0.0, Las(Las.Options(cores_per_gpu=6))) == {"cpu": 0, "free": 0}


def waited(seconds: float) -> JobTable:
    """A job that ran 5,000 s and then waited; 10,000 + `seconds` have passed since."""
    table = table_of(a=1)
    table.start("a", 5000.0)
    table.stop("a", 10_000.0)
    return table


def test_a_long_wait_returns_a_job_to_the_top_and_the_order_expires_then() -> None:
    las, table = Las(Las.Options(promote_knob=2.0)), waited(0)
    assert levels(table, 10_500.0, las) == {"a": 1}
    assert las.order(table.jobs(10_500.0), 10_500.0).valid_seconds == pytest.approx(9_500.0)
    assert levels(table, 20_000.0, las) == {"a": 0}
    assert las.order(table.jobs(20_000.0), 20_000.0).valid_seconds == math.inf
    assert levels(table, 20_000.0, Las()) == {"a": 1}


def test_after_its_return_a_job_is_judged_by_its_new_run() -> None:
    las, table = Las(Las.Options(promote_knob=2.0)), waited(0)
    table.start("a", 20_000.0)
    assert levels(table, 23_000.0, las) == {"a": 0}
    assert las.order(table.jobs(23_000.0), 23_000.0).valid_seconds == pytest.approx(250.0)
    assert levels(table, 23_251.0, las) == {"a": 1}
    early, short_wait = waited(0), Las(Las.Options(promote_knob=2.0))
    early.start("a", 12_000.0)
    assert levels(early, 12_001.0, short_wait) == {"a": 1}


def test_a_starved_job_returns_to_the_top_whatever_it_attained() -> None:
    las, table = Las(Las.Options(starvation_seconds=3600.0)), waited(0)
    assert levels(table, 10_500.0, las) == {"a": 1}
    assert las.order(table.jobs(10_500.0), 10_500.0).valid_seconds == pytest.approx(3100.0)
    assert levels(table, 13_600.0, las) == {"a": 0}
    table.start("a", 13_600.0)
    assert levels(table, 16_000.0, las) == {"a": 0}
    assert levels(table, 16_851.0, las) == {"a": 1}, "its new run alone counts"
    sooner = Las(Las.Options(promote_knob=0.5, starvation_seconds=3600.0))
    assert sooner.order(waited(0).jobs(10_500.0), 10_500.0).valid_seconds == pytest.approx(2000.0)


def test_a_job_that_never_ran_has_nothing_to_be_promoted_from() -> None:
    assert levels(table_of(a=1), 1e9, Las(Las.Options(promote_knob=1.0))) == {"a": 0}


@given(tables(), st.floats(0, 1), st.sampled_from([0.5, 2.0, 8.0]))
def test_with_promotions_too_an_order_holds_as_long_as_it_says(table: JobTable, share: float, knob: float) -> None:
    las, now = Las(Las.Options(promote_knob=knob)), 10_000.0
    order = las.order(table.jobs(now), now)
    assert order.valid_seconds > 1e-4
    later = now + share * 0.999 * min(order.valid_seconds, 1e7)
    np.testing.assert_array_equal(las.order(table.jobs(later), later).level, order.level)


@given(tables(), st.sampled_from([0.5, 2.0]))
def test_promotions_change_nothing_without_the_knob(table: JobTable, knob: float) -> None:
    def order(options: Las.Options) -> Order:
        return Las(options).order(table.jobs(10_000.0), 10_000.0)

    assert (order(Las.Options(promote_knob=knob)).level <= order(Las.Options()).level).all()


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({"thresholds": "7200,3250"}, "thresholds"),
        ({"thresholds": "0,10"}, "thresholds"),
        ({"thresholds": "5,5"}, "thresholds"),
        ({"thresholds": "inf"}, "thresholds"),
        ({"promote_knob": "-1"}, "promote_knob"),
        ({"promote_knob": "inf"}, "promote_knob"),
        ({"starvation_seconds": "-1"}, "starvation_seconds"),
        ({"starvation_seconds": "inf"}, "starvation_seconds"),
        ({"cores_per_gpu": "0"}, "cores_per_gpu"),
    ],
)
def test_options_that_make_no_sense_are_named(given_: dict[str, str], field: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse(Las.Options, given_)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_without_thresholds_all_jobs_are_on_one_level() -> None:
    table = table_of(a=1)
    table.attain("a", 1e9)
    assert levels(table, 0.0, Las(parse(Las.Options, {"thresholds": ""}))) == {"a": 0}
