"""Dominant resource fairness: progressive filling as an order, and which tenants have their fair share."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.drf import Drf

CAPACITY = Capacity(gpu_milli=8000, cores=32, memory_bytes=64)
WEIGHTS = (1.0, 2.0, 0.5)
Job = tuple[int, int, int, int]  # tenant, thousandths of GPUs, cores, bytes

jobs_ = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([500, 1000, 2000]), st.sampled_from([0, 1, 8]), st.sampled_from([0, 1, 16])
    ),
    max_size=14,
)


def table_of(jobs: list[Job], running: int = 0) -> JobTable:
    """The first `running` jobs run; later jobs arrived later."""
    table = JobTable()
    table.capacity = CAPACITY
    for number, (tenant, milli, cores, memory) in enumerate(jobs):
        weight = WEIGHTS[tenant]
        row = JobRow(
            f"{number}", float(number), number, milli, cores, memory_bytes=memory, tenant=tenant, tenant_weight=weight
        )
        table.add(row)
        if number < running:
            table.start(f"{number}", now=50.0)
    return table


def filled_progressively(jobs: list[Job]) -> list[int]:
    """Algorithm 1 of the paper while there are jobs; of equal tenants the one with the earliest job."""
    given_: dict[int, list[int]] = {tenant: [0, 0, 0] for tenant in range(len(WEIGHTS))}
    left = {tenant: [n for n, job in enumerate(jobs) if job[0] == tenant] for tenant in given_}
    whole = CAPACITY[:3]

    def dominant(tenant: int) -> Fraction:
        shares = [Fraction(had, all_) for had, all_ in zip(given_[tenant], whole, strict=True)]
        return max(shares) / Fraction(WEIGHTS[tenant])

    order = list[int]()
    while any(left.values()):
        tenant = min((one for one in left if left[one]), key=lambda one: (dominant(one), left[one][0]))
        order.append(number := left[tenant].pop(0))
        given_[tenant] = [had + more for had, more in zip(given_[tenant], jobs[number][1:], strict=True)]
    return order


@given(jobs_)
def test_the_order_fills_progressively(jobs: list[Job]) -> None:
    table = table_of(jobs)
    ranked = rank(table.jobs(99.0), Drf().order(table.jobs(99.0), 99.0), running_first=False)
    assert ranked.tolist() == filled_progressively(jobs)


def test_what_runs_counts_before_what_waits_and_priority_comes_before_arrival() -> None:
    table = table_of([(0, 1000, 0, 0), (0, 2000, 0, 0), (0, 4000, 0, 0)])
    table.start("1", now=50.0)
    table.update("2", priority=1)
    assert Drf().order(table.jobs(99.0), 99.0).score.tolist() == [0.75, 0.0, 0.25]


def test_weight_over_the_sum_of_weights_is_a_fair_share() -> None:
    jobs = [(0, 2000, 0, 0), (1, 2000, 16, 0), (1, 3000, 0, 0), (0, 1000, 0, 0), (2, 1000, 0, 0)]

    def over(running: int) -> list[bool]:
        marked = Drf().order(table_of(jobs, running).jobs(99.0), 99.0).over_share
        assert marked is not None
        return list(marked.tolist())

    assert (
        over(2) == [False] * 5
    )  # weights 1, 2, 0.5: fair shares are 2/7, 4/7 and 1/7; actual shares are 1/4, 1/2 and nothing
    assert over(3) == [False, True, True, False, False]
    assert over(4) == [True, True, True, True, False]


@pytest.mark.parametrize("jobs", [[], [(0, 1000, 1, 1)] * 3])
def test_without_any_capacity_there_is_an_order_by_arrival(jobs: list[Job]) -> None:
    table = table_of(jobs)
    table.capacity = Capacity()
    assert Drf().order(table.jobs(99.0), 99.0).score.tolist() == [0.0] * len(jobs)


def test_running_jobs_make_room_only_if_preemptive() -> None:
    assert not Drf().preemptive
    assert not Drf().strict
    assert Drf(Drf.Options(preemptive=True)).preemptive
    assert Drf(Drf.Options(mode="strict")).strict
