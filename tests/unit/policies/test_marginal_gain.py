"""Replicas of elastic jobs: limits that hold for any jobs, and what is gained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import ReplicaRange
from cotenant.core.model.resources import Resources
from cotenant.core.sizing.elastic import ElasticJob, InvalidTargets, room_for, validated_targets
from cotenant.policies.marginal_gain import Goal, MarginalGain

GPU = Resources(1000, 2)
RATES = tuple(count / (1 + 0.05 * (count - 1) ** 0.5) for count in range(1, 17))


def job(name: str, replicas: int, remaining: float | None, **changes: Any) -> ElasticJob:
    made = ElasticJob(name, ReplicaRange(1, 16), replicas, GPU, RATES, remaining, settled_seconds=1e6)
    return replace(made, **changes)


@st.composite
def elastic_jobs(draw: st.DrawFn) -> list[ElasticJob]:
    found = []
    for number in range(draw(st.integers(1, 8))):
        least = draw(st.integers(1, 4))
        most = draw(st.integers(least, 9))
        rates = sorted(draw(st.lists(st.floats(0.1, 9), min_size=most - least + 1, max_size=most - least + 1)))
        found.append(
            ElasticJob(
                f"j{number}",
                ReplicaRange(least, most),
                draw(st.sampled_from([0, *range(least, most + 1)])),
                Resources(draw(st.sampled_from([0, 500, 1000, 4000])), draw(st.integers(1, 4))),
                tuple(rates),
                draw(st.none() | st.floats(0, 1e6)),
                draw(st.floats(0, 1e6)),
                draw(st.floats(0, 300)),
                draw(st.sampled_from([0.0, 30.0, 1e6])),
            )
        )
    return found


@given(elastic_jobs(), st.integers(0, 20), st.integers(0, 20), st.sampled_from(["completions", "time"]))
def test_targets_are_within_ranges_and_room_and_the_same_for_the_same_input(
    jobs: list[ElasticJob], gpus: int, cores: int, goal: Goal
) -> None:
    policy = MarginalGain(MarginalGain.Options(goal=goal))
    rigid = [Resources(1000 * gpus, cores), Resources(2000, 1)]
    room = room_for(jobs, Resources(1000 * gpus, cores), rigid)
    found = policy.targets(jobs, room, now=5.0)
    assert validated_targets(jobs, room, found) == policy.targets(jobs, room, now=5.0)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=6), st.integers(6, 40))
def test_without_waiting_jobs_all_capacity_that_pays_is_used(rests: list[float], gpus: int) -> None:
    jobs = [job(f"j{number}", 1, rest, restart_seconds=0.0) for number, rest in enumerate(rests)]
    found = MarginalGain().targets(jobs, Resources(1000 * gpus, 2 * gpus), now=0.0)
    assert sum(found.values()) == min(gpus, 16 * len(jobs))


@given(st.floats(1, 1e4), st.integers(1, 15), st.floats(0, 600))
def test_a_resize_that_loses_time_by_its_restart_is_not_made(rest: float, have: int, restart: float) -> None:
    found = MarginalGain().targets([job("a", have, rest, restart_seconds=restart)], Resources(16000, 32), now=0.0)
    target = found["a"]
    assert target >= have
    if target > have:
        assert restart + rest / RATES[target - 1] < rest / RATES[have - 1]
    else:
        assert restart + rest / RATES[15] >= rest / RATES[have - 1]


def test_capacity_that_one_job_cannot_use_profitably_goes_to_another() -> None:
    jobs = [job("soon", 4, 10.0), job("long", 4, 1e6)]
    assert MarginalGain().targets(jobs, Resources(16000, 32), now=0.0) == {"soon": 4, "long": 12}


def test_the_shortest_job_grows_first_and_optimus_favors_the_longest() -> None:
    jobs = [job("short", 1, 1000.0), job("long", 1, 100_000.0)]
    room = Resources(10_000, 20)
    assert MarginalGain().targets(jobs, room, now=0.0) == {"short": 9, "long": 1}
    optimus = MarginalGain(MarginalGain.Options(goal="time"))
    found = optimus.targets(jobs, room, now=0.0)
    assert found["long"] > found["short"]


def test_a_job_that_changed_lately_keeps_its_number_unless_waiting_jobs_need_it() -> None:
    jobs = [job("new", 6, 1e5, settled_seconds=10.0), job("short", 1, 1000.0)]
    free = Resources(2000, 4)
    assert MarginalGain().targets(jobs, room_for(jobs, free, []), now=0.0) == {"new": 6, "short": 3}
    room = room_for(jobs, free, [Resources(6000)])
    assert room.gpu_milli == 3000
    assert sum(MarginalGain().targets(jobs, room, now=0.0).values()) == 3
    waiting = [*jobs, job("waits", 0, 100.0)]
    found = MarginalGain().targets(waiting, room_for(waiting, free, []), now=0.0)
    assert found == {"new": 1, "short": 1, "waits": 7}


def test_a_small_advantage_moves_no_replicas() -> None:
    jobs = [job("a", 8, 1000.0), job("b", 8, 990.0)]
    assert MarginalGain().targets(jobs, Resources(16_000, 32), now=0.0) == {"a": 8, "b": 8}


@pytest.mark.parametrize("targets", [{}, {"a": 17}, {"a": 0}, {"a": 9}])
def test_targets_of_a_broken_policy_are_rejected(targets: dict[str, int]) -> None:
    jobs = [job("a", 4, 10.0)]
    with pytest.raises(InvalidTargets):
        validated_targets(jobs, Resources(8000, 16), targets)


def test_running_jobs_may_keep_their_minimum_in_a_room_that_is_too_small_for_it() -> None:
    jobs = [job("runs", 4, 10.0, range=ReplicaRange(4, 8)), job("waits", 0, 10.0)]
    assert validated_targets(jobs, Resources(1000, 2), {"runs": 4, "waits": 0}) == {"runs": 4, "waits": 0}
    for targets in ({"runs": 5, "waits": 0}, {"runs": 4, "waits": 1}):
        with pytest.raises(InvalidTargets, match="in a room of 1"):
            validated_targets(jobs, Resources(1000, 2), targets)
