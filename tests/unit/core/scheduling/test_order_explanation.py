"""The jobs that go before those that an order leaves out."""

from __future__ import annotations

from cotenant.core.model.job_table import Capacity, JobRow, JobTable
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
