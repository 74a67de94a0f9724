"""Figures that independent simulators agree on, from the shared bench data; and our own naive one on the sample."""

from __future__ import annotations

import csv

import pytest
from tests.support.paths import SHARED_DATA

from cotenant.simulator import Result, simulate

BENCH = SHARED_DATA / "bench"
EXPECTED = BENCH / "expected.csv"
ROUNDED_SECONDS = 0.05 + 1e-6  # percentiles were published to a tenth of a second
WANTED = pytest.mark.skipif(not EXPECTED.exists(), reason=f"needs the shared bench data in {BENCH}")


def expected(trace: str, policy: str, placement: str) -> dict[str, str]:
    with EXPECTED.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["trace"] == trace and row["policy"].startswith(policy) and row["placement"].startswith(placement)
        ]
    return rows[0]


def assert_same_figures(result: Result, row: dict[str, str]) -> None:
    assert result.finished == int(row["n"])
    assert result.avg_jct_seconds == pytest.approx(float(row["avg_jct"]), abs=0.01)
    assert result.median_jct_seconds == pytest.approx(float(row["median"]), abs=0.01)
    assert result.p95_jct_seconds == pytest.approx(float(row["p95"]), abs=ROUNDED_SECONDS)
    assert result.p99_jct_seconds == pytest.approx(float(row["p99"]), abs=ROUNDED_SECONDS)
    assert result.makespan_seconds == pytest.approx(float(row["makespan"]), abs=0.01)
    assert result.preemptions == int(row["preemptions"])


@WANTED
@pytest.mark.parametrize(
    ("trace", "cluster", "placement"),
    [("philly_0e4a51", "6x8", "count"), ("itp_05", "2x8", "count"), ("philly_0e4a51", "6x8", "consolidate")],
)
def test_strict_fifo_gives_the_figures_that_independent_simulators_agree_on(
    trace: str, cluster: str, placement: str
) -> None:
    result = simulate(BENCH / f"{trace}.csv", cluster, queue="fifo", placement=placement)
    assert_same_figures(result, expected(trace, "FIFO", placement))


@WANTED
@pytest.mark.parametrize("queue", ["srtf", "srsf"])
def test_perfect_knowledge_gives_the_figures_of_independent_simulators(queue: str) -> None:
    result = simulate(BENCH / "philly_0e4a51.csv", "6x8", queue=queue, placement="count")
    assert_same_figures(result, expected("philly_0e4a51", queue.upper(), "count"))


@pytest.mark.deep
@WANTED
def test_las_comes_within_a_tenth_of_discretised_las_as_its_authors_wrote_it() -> None:
    result = simulate(BENCH / "philly_0e4a51.csv", "6x8", queue="las", placement="count")
    row = expected("philly_0e4a51", "DLAS", "count")
    assert result.avg_jct_seconds == pytest.approx(float(row["avg_jct"]), rel=0.1)
    assert result.makespan_seconds == pytest.approx(float(row["makespan"]), rel=0.1)
