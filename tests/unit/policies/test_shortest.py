"""Shortest first: by time, GPU time, and total run time; and jobs without a prediction."""

from __future__ import annotations

import math

import pytest

from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.sjf import Sjf
from cotenant.policies.srsf import Srsf
from cotenant.policies.srtf import Srtf

NOW = 1000.0
Shortest = Sjf | Srsf | Srtf


def table_of(*jobs: tuple[str, int, float, float]) -> JobTable:
    """Jobs of (name, GPUs, attained s, remaining s), each a second after the previous one."""
    table = JobTable()
    for number, (job_id, gpus, attained, remaining) in enumerate(jobs):
        table.add(JobRow(job_id, float(number), number, gpu_milli=1000 * gpus, cores=6))
        table.attain(job_id, attained)
        table.update(job_id, remaining_seconds=remaining)
    return table


def ranked(table: JobTable, policy: Shortest) -> str:
    jobs = table.jobs(NOW)
    rows = rank(jobs, policy.order(jobs, NOW), running_first=policy.running_first)
    return "".join(table.ids[row] for row in rows)


def test_time_left_gpu_time_left_and_total_time_are_three_orders() -> None:
    table = table_of(("a", 8, 90.0, 10.0), ("b", 1, 10.0, 50.0), ("c", 1, 0.0, 70.0))
    assert ranked(table, Srtf()) == "abc"
    assert ranked(table, Srsf()) == "bca"
    assert ranked(table, Sjf()) == "bca"


def test_a_job_without_gpus_is_charged_its_cores() -> None:
    table = table_of(("g", 3, 0.0, 10.0), ("c", 0, 0.0, 14.0))
    assert ranked(table, Srsf()) == "cg"
    assert ranked(table, Srsf(Srsf.Options(cores_per_gpu=1.0))) == "gc"


UNKNOWNS = table_of(
    ("a", 1, 0.0, 100.0), ("b", 1, 0.0, 500.0), ("n", 1, 0.0, math.nan), ("o", 1, 300.0, 0.0), ("i", 1, 970.0, math.inf)
)


@pytest.mark.parametrize(("unknown", "wanted"), [("first", "noiab"), ("last", "abnoi"), ("attained", "naobi")])
def test_jobs_without_a_valid_prediction_follow_the_option_unknown(unknown: str, wanted: str) -> None:
    assert ranked(UNKNOWNS, Srtf(parse(Srtf.Options, {"unknown": unknown}))) == wanted
    assert ranked(UNKNOWNS, Srsf(parse(Srsf.Options, {"unknown": unknown}))) == wanted


def test_by_total_time_the_attained_counts_twice() -> None:
    assert ranked(UNKNOWNS, Sjf()) == "abnoi"
    assert ranked(UNKNOWNS, Sjf(Sjf.Options(unknown="attained"))) == "naboi"
    assert Sjf(Sjf.Options(unknown="attained")).order(UNKNOWNS.jobs(NOW), NOW).score.tolist() == [
        100,
        500,
        0,
        540,
        1930,
    ]


def test_an_order_expires_when_the_quantum_of_a_running_unknown_job_doubles() -> None:
    table = table_of(("k", 1, 59.0, 10.0), ("u", 1, 100.0, math.nan), ("w", 1, 59.0, math.nan))
    table.start("k", NOW)
    table.start("u", NOW)
    assert Srtf().order(table.jobs(NOW), NOW).valid_seconds == pytest.approx(20.0)
    assert Srtf(Srtf.Options(unknown="last")).order(table.jobs(NOW), NOW).valid_seconds == math.inf
    assert Sjf(Sjf.Options(unknown="attained")).order(table.jobs(NOW), NOW).valid_seconds == math.inf


def test_sjf_is_strict_unless_it_may_backfill() -> None:
    assert Sjf().strict
    assert not Sjf(parse(Sjf.Options, {"mode": "backfill"})).strict


@pytest.mark.parametrize("made", [Sjf, Srsf, Srtf])
@pytest.mark.parametrize("quantum", ["0.5", "inf"])
def test_a_quantum_that_makes_no_sense_is_named(made: type[Shortest], quantum: str) -> None:
    with pytest.raises(BadOption, match="quantum_seconds: must be 1 or more"):
        parse(made.Options, {"quantum_seconds": quantum})


def test_cores_that_cost_nothing_are_named() -> None:
    with pytest.raises(BadOption, match="cores_per_gpu: must be more than 0"):
        parse(Srsf.Options, {"cores_per_gpu": "0"})
