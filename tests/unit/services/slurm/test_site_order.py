"""The order of pending jobs as SiteFactors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.slurm.pictures import NOW, picture

from cotenant import plugins
from cotenant.core.model.estimate import Estimate
from cotenant.services.slurm.records import SlurmJob, SlurmNode
from cotenant.services.slurm.site_order import planned_order, site_factors

JOB = SlurmJob("1", 1, gpus_total=1, cpus=1, priority=1, reason="Resources", submitted_seconds=NOW - 60)


def estimate(seconds: float) -> Estimate:
    """Return the estimate of a job that takes some seconds."""
    return Estimate(predictable=True, confidence=1.0, remaining_seconds=seconds)


def test_shorter_jobs_come_first_and_an_array_is_one() -> None:
    jobs = [
        replace(JOB, id="1", number=1),
        replace(JOB, id="2", number=2),
        replace(JOB, id="3_1", number=3, array=3, task=1, reason="JobArrayTaskLimit"),
        replace(JOB, id="3_2", number=3, array=3, task=2),
        replace(JOB, id="4", number=4, priority=0, reason="JobHeldUser"),
        replace(JOB, id="5", number=5, reason="Dependency"),
        replace(JOB, id="6+0", number=6, het=6),
        replace(JOB, id="7", number=7, state="RUNNING", started_seconds=NOW - 5),
        replace(JOB, id="8", number=8, state="SUSPENDED"),
        replace(JOB, id="9", number=9, reservation="training"),
    ]
    estimates = {"1": estimate(500), "2": estimate(50), "3_1": estimate(100), "7": estimate(1)}
    policy = plugins.load("cotenant.queue_policies", "srsf")
    cluster = picture([SlurmNode("n1", cores=16, gpus=4)], *jobs)
    assert planned_order(cluster, estimates, policy, NOW) == ["2", "3", "1"]


def test_a_job_is_as_large_as_its_larger_share() -> None:
    jobs = [
        replace(JOB, id="1", number=1, cpus=8),  # two GPUs' share of the cores
        replace(JOB, id="2", number=2, cpus=1),
        replace(JOB, id="3", number=3, gpus_total=0, cpus=6),
    ]
    cluster = picture([SlurmNode("n1", cores=16, gpus=4)], *jobs)
    policy = plugins.load("cotenant.queue_policies", "srsf")
    assert planned_order(cluster, {job.id: estimate(10) for job in jobs}, policy, NOW) == ["2", "3", "1"]


JOBS = st.lists(st.integers(0, 60), unique=True, max_size=30).map(lambda some: [str(one) for one in some])


@given(JOBS, st.dictionaries(st.integers(0, 60).map(str), st.integers(-5, 120), max_size=40), st.integers(1, 100))
def test_factors_fall_along_the_order(order: list[str], current: dict[str, int], weight: int) -> None:
    changes = site_factors(order, current, weight)
    factors = [(current | changes).get(job, 0) for job in order]
    assert all(1 <= factor <= weight for factor in factors)
    falls = [before > after for before, after in pairwise(factors)]
    assert all(falls) or len(order) >= weight
    assert all(before >= after for before, after in pairwise(factors))
    assert site_factors(order, current | changes, weight) == {} or len(order) >= weight


@given(JOBS, st.dictionaries(st.integers(0, 60).map(str), st.integers(0, 1000), max_size=40))
def test_a_few_changes_at_a_time_reach_the_order(order: list[str], current: dict[str, int]) -> None:
    for _ in range(200):
        changes = site_factors(order, current, 1000)
        if not changes:
            break
        current = current | dict(list(changes.items())[:2])
    factors = [current.get(job, 0) for job in order]
    assert all(before > after for before, after in pairwise(factors))


def test_one_more_job_changes_one_factor() -> None:
    order = [str(n) for n in range(1000)]
    current = site_factors(order, {}, 100_000)
    assert len(current) == 1000
    assert site_factors([*order[:500], "new", *order[500:]], current, 100_000).keys() == {"new"}
    moved = [*order[1:], order[0]]
    assert site_factors(moved, current, 100_000).keys() == {"0"}
