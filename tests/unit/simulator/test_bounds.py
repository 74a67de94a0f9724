"""The lower bound of the average JCT: no schedule is below it, and it is the fluid machine's optimum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.simulator.histories import Tape
from tests.unit.simulator.recording.test_events import world

from cotenant.simulator import Trace, TraceJob, simulate
from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.simulator.comparison.bounds import Work, avg_jct_seconds_min, gpus_only, pooled
from cotenant.simulator.comparison.time_series import POINTS_MAX, Sampler
from cotenant.simulator.traces import workers

JOBS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 60), st.sampled_from([1, 1, 2, 3, 4])), min_size=1, max_size=12
)


def trace(jobs: list[tuple[int, int, int]]) -> Trace:
    made = [TraceJob(f"j{n}", float(at), float(long), workers(gpus)) for n, (at, long, gpus) in enumerate(sorted(jobs))]
    return Trace("made up", "none", tuple(made))


@settings(max_examples=examples(60), deadline=None)
@given(JOBS, st.sampled_from(["fifo", "las", "srtf", "srsf"]), st.sampled_from(["1x4", "2x2", "4x1"]))
def test_no_policy_undercuts_it(jobs: list[tuple[int, int, int]], queue: str, cluster: str) -> None:
    result = simulate(trace(jobs), cluster, queue=queue, placement="count", options=eager(queue))
    least = avg_jct_seconds_min([Work(at, long, gpus) for at, long, gpus in jobs], 4)
    assert least is not None
    assert result.avg_jct_seconds is not None
    assert result.finished == len(jobs)
    assert result.avg_jct_seconds >= least - 1e-6


def eager(queue: str) -> dict[str, dict[str, str]]:
    return {"queue": {"mode": "backfill"}} if queue == "fifo" else {}


@settings(max_examples=examples(60), deadline=None)
@given(JOBS)
def test_it_is_what_slow_steps_of_the_fluid_machine_give(jobs: list[tuple[int, int, int]]) -> None:
    """The machine does a job's work in whole steps, since 4 GPUs divide 12 steps a second."""
    gpus, steps = 4, 12
    rest = {n: long * width * steps // gpus for n, (_, long, width) in enumerate(jobs)}
    finishes, means, now = 0.0, 0.0, 0
    by_rest, total = dict(rest), dict(rest)
    while by_rest:
        ready = [n for n in by_rest if jobs[n][0] * steps <= now]
        now += 1
        if ready:
            first = min(ready, key=lambda n: (by_rest[n], n))
            by_rest[first] -= 1
            if not by_rest[first]:
                del by_rest[first]
                finishes += now / steps
    now, left = 0, dict(rest)
    while left:
        ready = [n for n in left if jobs[n][0] * steps <= now]
        now += 1
        if ready:
            first = min(ready, key=lambda n: (total[n], n))
            means += (now - 0.5) / steps / total[first]
            left[first] -= 1
            if not left[first]:
                del left[first]
    released, runs = sum(at for at, _, _ in jobs), sum(long for _, long, _ in jobs)
    expected = max(runs, finishes - released, means - released + runs / 2) / len(jobs)
    assert avg_jct_seconds_min([Work(at, long, width) for at, long, width in jobs], gpus) == pytest.approx(expected)


def test_jobs_without_gpus_count_with_their_run_time_and_no_jobs_have_no_bound() -> None:
    assert avg_jct_seconds_min([Work(0, 10, 1), Work(0, 4, 0)], 1) == 7
    assert avg_jct_seconds_min([], 1) is None


def test_the_pooled_server_has_all_gpus_and_is_short_of_nothing_else() -> None:
    cluster = pooled(parse_cluster("3x4x8"))
    jobs = gpus_only(world(3), frozenset({"j0"}))
    result = simulate(jobs, cluster, queue="srsf", placement="count")
    assert "j0" not in {one.id for one in result.outcomes}
    assert all("13" in refusal.detail for _, refusal in result.unschedulable)  # the gang of 13 GPUs, more than all 12


@pytest.mark.parametrize("queue", ["fifo", "las"])
def test_the_course_keeps_every_gpu_second_in_few_points(queue: str) -> None:
    for seed in range(5):
        tape, sampler = Tape(), Sampler()
        result = simulate(world(seed), "3x4x8", queue=queue, recorder=tape)
        for event in tape.events:
            sampler.record(event)
        series = sampler.series()
        assert len(series.gpus) <= POINTS_MAX
        end = tape.events[-1].at_seconds
        spans = [min(series.span_seconds, end - n * series.span_seconds) for n in range(len(series.gpus))]
        held = math.fsum(one.run_seconds * one.gpu_milli / 1000 for one in result.outcomes)
        waited = math.fsum(one.queue_seconds for one in result.outcomes)
        assert (series.gpus * spans).sum() == pytest.approx(held)
        assert (series.waiting * spans).sum() == pytest.approx(waited)
        drawn = math.fsum((bar.end_seconds - bar.begin_seconds) * bar.gpu_milli / 1000 for bar in series.bars)
        assert drawn == pytest.approx(held)
