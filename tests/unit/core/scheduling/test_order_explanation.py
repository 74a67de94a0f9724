"""The jobs that go before those that an order leaves out."""

from __future__ import annotations

import numpy as np
from tests.unit.core.scheduling.test_cycle import Ranked

from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.admission import choose
from cotenant.policies.las import Las


def test_outrankers_stay_valid_when_the_table_changes() -> None:
    """Where all jobs are equal to the order, their rows are those that the table keeps for itself."""
    table = JobTable()
    for number in range(4):
        table.add(JobRow(f"job{number}", arrival_seconds=number, sequence=number + 1, gpu_milli=1000))
    policy, capacity = Las(), Capacity(2000, 100, 0)
    jobs, ids = table.jobs(10.0), list(table.ids)
    choice = choose(jobs, policy, policy.order(jobs, 10.0), capacity, now=10.0)
    told = choice.outrankers
    assert told
    before = [told.refusal(place, ids) for place in range(4)]
    table.remove("job0")
    for number in range(4, 9):
        table.add(JobRow(f"job{number}", arrival_seconds=0.5, sequence=number + 1, gpu_milli=1000))
    table.jobs(11.0)
    assert [told.refusal(place, ids) for place in range(4)] == before


def test_behind_the_head_of_a_strict_order_jobs_learn_what_it_needs_and_what_is_left() -> None:
    """The first fits, the second is the head, the third is behind it although it would fit."""
    table = JobTable()
    for number, gpus in enumerate([2, 4, 1]):
        table.add(JobRow(f"job{number}", arrival_seconds=number, sequence=number, gpu_milli=1000 * gpus, cores=gpus))
    policy, capacity = Ranked(strict=True), Capacity(4000, 16, 0)
    jobs = table.jobs(10.0)
    order = Order(np.zeros(3, dtype=np.int64), jobs.arrival_seconds.copy())
    told = choose(jobs, policy, order, capacity, now=10.0).outrankers
    assert told
    head, behind = told.refusal(1, table.ids), told.refusal(2, table.ids)
    assert "the jobs before it, first job0, leave 2 GPUs" in head.detail
    assert "stops at job1, which needs 4 GPUs" in behind.detail
    assert (behind.numbers["head_gpu_milli"], behind.numbers["left_gpu_milli"]) == (4000, 2000)
    assert (told.before(0), told.before(1)) == ([], [0])
