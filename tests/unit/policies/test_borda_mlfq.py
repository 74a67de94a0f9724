"""The Borda-count multi-level feedback queue, against ranks counted one by one and expectations computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.worlds import tables
from cotenant.core.model.job_table import JobRow, Jobs, JobTable
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.policy.protocols import EndedJob
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.borda_mlfq import BordaMlfq

NOW = 10_000.0
Options = BordaMlfq.Options
FOURFOLD = BordaMlfq(Options(variant="expected", level_factor=4))
VARIANTS = ("robust", "expected", "literal")
LITERAL = BordaMlfq(Options(variant="literal"))


@st.composite
def partly_predicted(draw: st.DrawFn) -> JobTable:
    table = draw(tables())
    for job_id in table.ids:
        if draw(st.booleans()):
            predicted = draw(st.sampled_from([0.0, 5.0, 700.0, 3250.0, 50_000.0, 1e6]))
            table.update(job_id, predicted_seconds=predicted, confidence=draw(st.sampled_from([0.4, 0.5, 1.0])))
    return table


def table_of(**attained_seconds: float) -> JobTable:
    """Jobs with one GPU that arrived in this order, a second apart, with these run times."""
    table = JobTable()
    for number, (job_id, seconds) in enumerate(attained_seconds.items()):
        table.add(JobRow(job_id, arrival_seconds=float(number), sequence=number, gpu_milli=1000))
        table.attain(job_id, seconds)
    return table


def predict(table: JobTable, **predicted_seconds: float) -> JobTable:
    for job_id, seconds in predicted_seconds.items():
        table.update(job_id, predicted_seconds=seconds, confidence=1.0)
    return table


def levels(table: JobTable, policy: BordaMlfq, now: float = NOW) -> dict[str, int]:
    return dict(zip(table.ids, policy.order(table.jobs(now), now).level.tolist(), strict=True))


def in_order(table: JobTable, policy: BordaMlfq, now: float = NOW) -> list[str]:
    jobs = table.jobs(now)
    return [table.ids[row] for row in rank(jobs, policy.order(jobs, now), running_first=True)]


def naive_literal_scores(jobs: Jobs, now: float, cadence: float) -> list[float]:
    """Count for each job the jobs ranked before it and those with equal rank, list by list."""
    tick = now // cadence * cadence
    rows = range(len(jobs))
    ran = [now - max(jobs.running_since[row], tick) if jobs.running[row] else 0.0 for row in rows]
    attained = [round(jobs.attained_seconds[row] - ran[row], 3) for row in rows]
    weight = [10 * jobs.gpu_milli[row] / 1000 + 5 * jobs.replicas[row] for row in rows]
    service = {row: attained[row] * weight[row] for row in rows}
    sure = [row for row in rows if jobs.confidence[row] >= 0.5 and math.isfinite(jobs.predicted_seconds[row])]
    rest = {row: max(0.0, jobs.predicted_seconds[row] - attained[row]) * weight[row] for row in sure}

    def ranked(votes: dict[int, float], row: int) -> float:
        before = sum(vote < votes[row] for vote in votes.values())
        return before + (1 + sum(vote == votes[row] for vote in votes.values())) / 2

    return [ranked(service, row) + ranked(rest if row in rest else service, row) for row in rows]


@given(partly_predicted())
def test_literal_scores_are_those_of_ranks_counted_one_by_one(table: JobTable) -> None:
    jobs = table.jobs(NOW)
    order = LITERAL.order(jobs, NOW)
    scores = naive_literal_scores(jobs, NOW, 240.0)
    assert order.score.tolist() == scores
    assert order.level.tolist() == [sum(score >= end * len(jobs) for end in (0.5, 1)) for score in scores]


def test_literal_thresholds_are_scores_and_replace_the_quantiles() -> None:
    table = table_of(**{f"job{number:02}": float(number) for number in range(20)})
    low = levels(table, BordaMlfq(parse(Options, {"variant": "literal", "thresholds": "15,30"})))
    assert [sum(level == each for level in low.values()) for each in range(3)] == [7, 7, 6]  # scores are 2, 4 … 40


@pytest.mark.parametrize(("attained", "level"), [(0, 0), (59, 0), (60, 1), (239, 1), (240, 2), (960, 3), (1e9, 12)])
def test_an_unknown_job_is_expected_to_need_its_attained_service_again(attained: float, level: int) -> None:
    assert levels(table_of(a=attained), FOURFOLD) == {"a": level}


@pytest.mark.parametrize(
    ("attained", "expected"),
    [(0, 10_000), (6000, 4000), (9999, 2500), (12_000, 2500), (14_000, 4000), (100_000, 90_000)],
)
def test_an_outlived_prediction_expects_another_overrun(attained: float, expected: float) -> None:
    table = predict(table_of(a=attained), a=10_000.0)
    twin = table_of(a=expected)
    assert levels(table, FOURFOLD) == levels(twin, FOURFOLD)


def test_a_prediction_counts_from_its_confidence_on() -> None:
    table = predict(table_of(a=5000.0), a=5010.0)
    table.update("a", confidence=0.49)
    assert levels(table, FOURFOLD) == levels(table_of(a=5000.0), FOURFOLD)
    table.update("a", confidence=0.5)
    assert levels(table, FOURFOLD)["a"] < levels(table_of(a=5000.0), FOURFOLD)["a"]


def test_inside_a_level_the_votes_of_need_and_of_waiting_count_alike() -> None:
    table = predict(table_of(a=0, b=0, c=0, d=0), a=1000.0, b=900.0, c=800.0, d=990.0)  # d: third need, last arrival
    assert in_order(table, BordaMlfq(Options(variant="expected", level_factor=4, error=0))) == ["b", "c", "a", "d"]


def test_between_two_ticks_only_arrivals_and_ends_change_the_order() -> None:
    table = table_of(a=59.0, b=0.0)
    table.start("a", now=4810.0)  # ticks are at 4800 and 5040
    first = FOURFOLD.order(table.jobs(4810.0), 4810.0)
    assert first.valid_seconds == 230.0
    assert levels(table, FOURFOLD, now=5039.0) == {"a": 0, "b": 0}
    assert levels(table, FOURFOLD, now=5040.0) == {"a": 1, "b": 0}


def test_a_running_job_is_a_level_better_and_yields_only_to_a_job_two_levels_better() -> None:
    table = table_of(runs=4000.0, next=300.0, better=100.0)  # levels 4, 2 and 1, if all were waiting
    table.start("runs", now=NOW)
    assert levels(table, FOURFOLD) == {"runs": 3, "next": 2, "better": 1}
    table.update("next", attained_seconds=1000.0)
    assert in_order(table, FOURFOLD) == ["better", "runs", "next"]


def test_an_order_is_valid_until_the_tick_after_a_job_leaves_its_level() -> None:
    table = table_of(a=0.0, b=0.0)
    table.start("a", now=0.0)
    assert (
        BordaMlfq(Options(variant="expected", level_factor=4, cadence_seconds=7))
        .order(table.jobs(0.0), 0.0)
        .valid_seconds
        == 63.0
    )  # 60 s are enough
    assert FOURFOLD.order(table_of(a=1.0).jobs(5.0), 5.0).valid_seconds == math.inf


@settings(max_examples=examples(300))
@given(
    partly_predicted(),
    st.floats(0, 1),
    st.sampled_from([1.0, 240.0]),
    st.sampled_from(["robust", "expected", "literal"]),
    st.sampled_from(["0", "500", "9000"]),
)
def test_a_valid_order_stays_also_for_predicted_jobs(
    table: JobTable, share: float, cadence: float, variant: str, starvation: str
) -> None:
    policy = BordaMlfq(
        parse(Options, {"variant": variant, "cadence_seconds": str(cadence), "starvation_seconds": starvation})
    )
    order = policy.order(table.jobs(NOW), NOW)
    later = NOW + share * 0.99 * min(order.valid_seconds, 1e9)
    again = policy.order(table.jobs(later), later)
    np.testing.assert_array_equal(order.level, again.level)
    np.testing.assert_array_equal(order.score, again.score)


@given(partly_predicted())
def test_each_wake_up_changes_a_level_or_comes_a_tick_early_at_most(table: JobTable) -> None:
    """The ends are finite: the last level has none."""
    policy, now = FOURFOLD, NOW
    order = policy.order(table.jobs(now), now)
    idle = 0
    while (now := now + order.valid_seconds) < math.inf:
        before, order = order, policy.order(table.jobs(now), now)
        idle += before.level.tolist() == order.level.tolist()
    assert idle <= 2 * len(table)  # a running job changes nothing by moving from the first level to the second


def test_bad_options_are_all_named() -> None:
    with pytest.raises(BadOption) as caught:
        parse(Options, {"cadence_seconds": "0", "level_factor": "1", "quantiles": "0.5,0.25", "thresholds": "-1"})
    assert {bad.field for bad in caught.value.violations} == {
        "cadence_seconds",
        "level_factor",
        "quantiles",
        "thresholds",
    }


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("quantiles", ["", "0.1", "0.1,0.9"], ["0", "1", "0.5,0.5", "0.5,0.1", "-0.1,0.5"]),
        ("thresholds", ["", "1", "1,1e6"], ["0", "inf", "2,2", "2,1", "-1,2"]),
    ],
)
def test_ends_of_levels_are_ascending_above_0_and_as_shares_below_1(
    name: str, valid: list[str], invalid: list[str]
) -> None:
    for text in valid:
        assert parse(Options, {name: text})
    for text in invalid:
        below = " and below 1" if name == "quantiles" else ""
        with pytest.raises(BadOption, match=f"{name}: must be ascending, above 0{below}, not "):
            parse(Options, {name: text})


def test_a_gpu_or_a_replica_has_a_weight() -> None:
    assert parse(Options, {"gpu_weight": "0"})
    assert parse(Options, {"replica_weight": "0"})
    with pytest.raises(BadOption, match="replica_weight: must be more than 0 where gpu_weight is 0"):
        parse(Options, {"gpu_weight": "0", "replica_weight": "0"})


def test_an_order_ends_as_well_when_a_job_comes_nearer_to_its_end_than_its_level() -> None:
    table = predict(table_of(a=0.0, b=0.0), a=5000.0)  # at 1160 s it has 3840 s left, where its level begins
    table.start("a", now=0.0)
    policy = BordaMlfq(Options(variant="expected", level_factor=4, cadence_seconds=10, error=0))
    assert policy.order(table.jobs(0.0), 0.0).valid_seconds == 1160.0
    assert levels(table, policy, now=1159.0) == {"a": 3, "b": 0}
    assert levels(table, policy, now=1170.0) == {"a": 2, "b": 0}


@pytest.mark.parametrize("variant", ["expected", "robust"])
def test_a_job_that_starves_comes_first_and_runs_for_as_long_as_it_waited_at_most(variant: str) -> None:
    policy = BordaMlfq(
        parse(BordaMlfq.Options, {"variant": variant, "starvation_seconds": "7200", "cadence_seconds": "60"})
    )
    table = JobTable()
    table.add(JobRow("long", arrival_seconds=0, sequence=0, gpu_milli=8000))
    table.update("long", predicted_seconds=1e6, confidence=1.0)
    for _ in range(100):  # so that predictions count
        policy.learn(EndedJob(1000, 0, 1, 300.0, 300.0, 300.0, 1.0))
        policy.learn(EndedJob(1000, 0, 1, 90_000.0, 90_000.0, 90_000.0, 1.0))

    def levels(now: float) -> list[int]:
        table.add(JobRow("short", arrival_seconds=now, sequence=int(now), gpu_milli=8000))
        table.update("short", predicted_seconds=60.0, confidence=1.0)
        found = policy.order(table.jobs(now), now).level.tolist()
        table.remove("short")
        return [int(level) for level in found]

    long, short = levels(now=7199)
    assert long > short
    assert levels(now=7200) == [-1, short]
    table.start("long", now=7200)
    assert levels(now=14_399)[0] == -1
    assert levels(now=14_400)[0] == policy.order(table.jobs(14_400), 14_400).level.max() > short
    table.stop("long", now=14_400)
    assert levels(now=14_460)[0] > short


def test_an_order_ends_when_a_job_begins_or_ceases_to_starve() -> None:
    policy = BordaMlfq(
        parse(BordaMlfq.Options, {"variant": "expected", "starvation_seconds": "7200", "cadence_seconds": "60"})
    )
    table = JobTable()
    table.add(JobRow("a", arrival_seconds=30, sequence=0, gpu_milli=1000))
    assert policy.order(table.jobs(100), 100).valid_seconds == 7260 - 100  # the tick at or after 7,230 s
    assert policy.order(table.jobs(7260), 7260).valid_seconds == math.inf
    table.start("a", now=7260)
    table.update("a", predicted_seconds=1e9, confidence=1.0)
    assert policy.order(table.jobs(7300), 7300).valid_seconds == 14_460 - 7300


@given(partly_predicted())
@settings(max_examples=examples(20))
def test_the_votes_make_the_score(table: JobTable) -> None:
    jobs = table.jobs(NOW)
    for policy in (FOURFOLD, LITERAL):
        order = policy.order(jobs, NOW)
        assert order.votes is not None
        for row in range(len(jobs)):
            assert sum(order.votes(row).values()) == pytest.approx(order.score[row])


def test_the_robust_order_names_what_is_expected_of_a_job_and_how_far_predictions_count() -> None:
    table = JobTable()
    table.add(JobRow("young", arrival_seconds=0, sequence=0, gpu_milli=1000))
    table.add(JobRow("old", arrival_seconds=0, sequence=1, gpu_milli=1000))
    table.attain("old", run_seconds=100_000)
    table.update("old", predicted_seconds=200_000, confidence=0.9)
    order = BordaMlfq().order(table.jobs(NOW), NOW)
    assert order.votes is not None
    young, old = order.votes(0), order.votes(1)
    assert old["expected GPU-seconds by age"] > 2 * young["expected GPU-seconds by age"] > 0
    assert (old["weight of its prediction"], len(young)) == (0.0, 1), "no prediction has proved right yet"
