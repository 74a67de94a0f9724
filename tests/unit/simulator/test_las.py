"""Preemption: least attained service against a simulator with a cycle every second."""

from __future__ import annotations

import random

import pytest
from tests.support.properties import amount

from cotenant.simulator import Trace, TraceJob, simulate
from cotenant.simulator.traces import workers

THRESHOLDS = (24, 60)  # GPU-seconds; all GPU counts below divide them, so that levels change at whole seconds


def workload(seed: int) -> list[TraceJob]:
    rng = random.Random(seed)
    now, jobs = 0, []
    for number in range(rng.randint(1, 25)):
        now += rng.choice([0, 1, 4, 20]) if number else 0
        jobs.append(TraceJob(f"j{number}", float(now), float(rng.randint(1, 90)), workers(rng.choice([1, 1, 2, 3, 4]))))
    return jobs


def finishes(jobs: list[TraceJob], gpus: int) -> tuple[dict[str, float], int]:
    """Decide every second: the first jobs of the order that fit together run, all others wait."""
    done = dict.fromkeys(range(len(jobs)), 0)
    finished: dict[str, float] = {}
    running: set[int] = set()
    now = stops = 0
    while len(finished) < len(jobs):
        ended = {number for number in running if done[number] >= jobs[number].work_seconds}
        finished |= {jobs[number].id: float(now) for number in ended}
        running -= ended
        here = [n for n, job in enumerate(jobs) if job.submitted_seconds <= now and job.id not in finished]

        service = {number: done[number] * jobs[number].roles[0].replicas for number in here}
        level = {number: sum(service[number] >= threshold for threshold in THRESHOLDS) for number in here}
        free, chosen = gpus, set[int]()
        for _, _, number in sorted((level[number], number not in running, number) for number in here):
            if jobs[number].roles[0].replicas <= free:
                chosen.add(number)
                free -= jobs[number].roles[0].replicas
        stops += len(running - chosen)
        running = chosen
        for number in running:
            done[number] += 1
        now += 1
    return finished, stops


@pytest.mark.parametrize("block", range(amount(3, deep=5)))
def test_las_finishes_every_job_when_a_look_at_every_second_does(block: int) -> None:
    for seed in range(30 * block, 30 * block + amount(12, deep=30)):
        jobs = workload(seed)
        options = {"queue": {"thresholds": ",".join(map(str, THRESHOLDS))}}
        result = simulate(Trace("made up", "none", tuple(jobs)), "2x2", queue="las", placement="count", options=options)
        wanted, stops = finishes(jobs, 4)
        found = {one.id: one.finished_seconds for one in result.outcomes}
        assert found == pytest.approx(wanted, abs=1e-6), f"seed {seed}"
        assert result.preemptions == stops, f"seed {seed}"


def test_preempted_jobs_keep_what_they_have_attained() -> None:
    result = simulate("sample", "2x8", queue="las", placement="consolidate")
    assert result.preemptions > 0
    for one in result.outcomes:
        assert one.run_seconds == pytest.approx(one.work_seconds, abs=1e-6)
        assert one.jct_seconds == pytest.approx(one.run_seconds + one.queue_seconds, abs=1e-6)


def test_each_preemption_costs_its_work_again() -> None:
    cost = 30.0
    options = {"simulator": {"preemption_cost_seconds": str(cost)}, "queue": {"thresholds": "3250,7200"}}
    result = simulate("sample", "2x8", queue="las", placement="count", options=options)
    assert result.preemptions > 0
    for one in result.outcomes:
        assert one.run_seconds <= one.work_seconds + cost * one.preemptions + 1e-6
        assert one.run_seconds >= one.work_seconds + (cost if one.preemptions else 0) - 1e-6


def test_a_job_stopped_while_it_repeats_work_repeats_all_of_it_again() -> None:
    # `long` runs 0–10 s, makes room for `a` at 10, repeats from 11, makes room for `b` at 13, repeats 5 s from 14 on.
    jobs = (
        TraceJob("long", 0.0, 20.0, workers(1)),
        TraceJob("a", 10.0, 1.0, workers(1)),
        TraceJob("b", 13.0, 1.0, workers(1)),
    )
    result = simulate(
        Trace("made up", "none", jobs),
        "1x1",
        queue="las",
        placement="count",
        options={"queue": {"thresholds": "5,1000"}, "simulator": {"preemption_cost_seconds": "5"}},
    )
    assert [one.finished_seconds for one in result.outcomes] == [14.0 + 5.0 + 10.0, 11.0, 14.0]
    assert result.preemptions == 2
