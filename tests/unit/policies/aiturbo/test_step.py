"""The unified step: the value of one worker, server, GPU or core more or fewer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import Candidate
from cotenant.policies.aiturbo.step import RIGID, Elastic, best_step, neighbours, service

TEAM = Candidate(3, 1000, workers=2, servers=1, server_cores=2)


def test_only_elastic_resources_have_neighboring_allocations() -> None:
    assert [one.cores for one in neighbours(TEAM, RIGID, (3, 3))] == []
    elastic = Elastic(workers=(1, 3), servers=(1, 2), gpus_each=(1, 2))
    found = list(neighbours(TEAM, elastic, (1, 4)))
    assert found == [
        replace(TEAM, workers=1),
        replace(TEAM, workers=3),
        replace(TEAM, servers=2),
        replace(TEAM, gpu_milli=2000),
        replace(TEAM, cores=2),
        replace(TEAM, cores=4),
    ]


def test_the_larger_benefit_wins_with_its_direction() -> None:
    more, fewer = replace(TEAM, workers=3), replace(TEAM, workers=1)
    change = best_step(TEAM, 10.0, 1000.0, [(more, 14.9), (fewer, 9.9)])
    assert change
    assert (change.to, change.increase) == (fewer, False)
    change = best_step(TEAM, 10.0, 1000.0, [(more, 20.0), (fewer, 6.0)])
    assert change
    assert (change.to, change.increase) == (more, True)


def test_a_change_that_restarts_the_job_must_save_more_than_that_costs_and_cores_restart_nothing() -> None:
    more = replace(TEAM, workers=3)
    assert best_step(TEAM, 10.0, 1000.0, [(more, 20.0)], restart_seconds=100.0)
    assert best_step(TEAM, 10.0, 1000.0, [(more, 20.0)], restart_seconds=500.0) is None
    assert best_step(TEAM, 10.0, 1000.0, [(replace(TEAM, cores=4), 20.0)], restart_seconds=1e9)


@given(st.floats(0.1, 100), st.floats(1, 1e6), st.lists(st.tuples(st.integers(1, 9), st.floats(0, 100)), max_size=5))
def test_a_change_lowers_remaining_time_times_service_by_the_most(
    rate: float, rest: float, others: list[tuple[int, float]]
) -> None:
    judged = [(replace(TEAM, cores=cores), faster) for cores, faster in others]
    change = best_step(TEAM, rate, rest, judged)
    now = rest * service(TEAM)
    left = [rest * rate / faster * service(other) for other, faster in judged if faster > 0]
    best = min(left, default=now)
    if change is None:
        assert best >= now * (1 - 1e-9)
    else:
        assert abs((now - best) / service(TEAM) - change.benefit_seconds) <= 1e-6 * (1 + rest)
