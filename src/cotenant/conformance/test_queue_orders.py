"""Laws of queue policies."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.cases import taught
from cotenant.conformance.trials import tried
from cotenant.conformance.worlds import NOW, histories, tables
from cotenant.core.model.job_table import Capacity, Jobs, JobTable
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.protocols import EndedJob, FixedWhileWaiting, Order
from cotenant.core.scheduling.ordering import rank


@tried(60)
@given(tables(), histories, st.data())
def test_every_job_gets_a_finite_score_in_any_row_order(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], data: st.DataObject
) -> None:
    """Every job gets one finite score, which does not depend on the order of the rows; the jobs are left unchanged."""
    policy = taught(plugin, history)
    jobs, before = table.jobs(NOW), table.jobs(NOW)
    order = policy.order(jobs, NOW)
    assert len(order.level) == len(order.score) == len(jobs)
    assert np.isfinite(order.score).all()
    assert order.valid_seconds > 1e-4, "a wake-up that never comes to an end"
    assert order.given_up is None or not (order.given_up & jobs.running).any(), "who runs is not given up"
    for column in dataclasses.fields(Jobs):
        np.testing.assert_array_equal(getattr(jobs, column.name), getattr(before, column.name))
    shuffle = np.array(data.draw(st.permutations(range(len(jobs)))), dtype=np.int64)
    whole = ("capacity", "by_arrival", "needs", "past_use")  # not columns of jobs
    columns = [field.name for field in dataclasses.fields(Jobs) if field.name not in whole]
    needs = tuple(column[shuffle] for column in jobs.needs)
    shuffled = Jobs(**{name: getattr(jobs, name)[shuffle] for name in columns}, needs=needs, capacity=jobs.capacity)
    again = taught(plugin, history).order(shuffled, NOW)
    np.testing.assert_array_equal(again.level, order.level[shuffle])
    np.testing.assert_array_equal(again.score, order.score[shuffle])
    assert again.valid_seconds == order.valid_seconds
    for marks, shuffled_marks in ((order.over_share, again.over_share), (order.given_up, again.given_up)):
        assert (marks is None) == (shuffled_marks is None)
        assert marks is None or marks[shuffle].tolist() == shuffled_marks.tolist()  # type: ignore[union-attr]  # as above


@tried(60)
@given(tables(), histories, st.floats(0, 1))
def test_while_an_order_is_valid_no_waiting_job_gains_on_any_other(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], share: float
) -> None:
    """While an order is valid, no waiting job overtakes another.

    Running jobs may rise, such as those that near their end; where none is ever stopped, they may also fall.
    """
    policy = taught(plugin, history)
    order = policy.order(table.jobs(NOW), NOW)
    later = NOW + share * 0.999 * min(order.valid_seconds, 1e7)
    again = policy.order(table.jobs(later), later)
    waiting = ~table.jobs(NOW).running
    compared = waiting | policy.preemptive

    def overtaken(now: float, order: Order) -> np.ndarray:
        """Which waiting jobs (columns) come after which jobs (rows)."""
        place = np.argsort(rank(table.jobs(now), order, running_first=policy.running_first))
        return (place[:, None] < place[None, :])[compared][:, waiting]

    assert not (overtaken(NOW, order) & ~overtaken(later, again)).any()


@tried(60)
@given(tables(), histories, st.data())
def test_an_order_that_is_fixed_while_jobs_wait_depends_on_no_other_job_and_no_moment(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], data: st.DataObject
) -> None:
    """An order that is fixed while jobs wait depends on no other job and on no moment."""
    policy = taught(plugin, history)
    fixed = capability_of(policy, FixedWhileWaiting)
    if fixed is None or not fixed.fixed_while_waiting:
        return
    jobs = table.jobs(NOW)
    order = policy.order(jobs, NOW)
    assert order.over_share is order.given_up is None
    picked = data.draw(st.lists(st.sampled_from(range(len(jobs))), unique=True)) if len(jobs) else []
    rows = np.array(picked, dtype=np.int64)
    some = policy.order(table.jobs(NOW, rows), NOW)
    np.testing.assert_array_equal(some.level, order.level[rows])
    np.testing.assert_array_equal(some.score, order.score[rows])
    assert policy.order(table.jobs(NOW, np.flatnonzero(jobs.running)), NOW).valid_seconds == order.valid_seconds
    waiting = np.flatnonzero(~jobs.running)
    later = NOW + data.draw(st.floats(0, 1e7))
    again = policy.order(table.jobs(later), later)
    np.testing.assert_array_equal(again.level[waiting], order.level[waiting])
    np.testing.assert_array_equal(again.score[waiting], order.score[waiting])


@tried(60)
@given(tables(), histories)
def test_a_running_job_is_chosen_again(plugin: plugins.Plugin, table: JobTable, history: list[EndedJob]) -> None:
    """A running job is chosen again as long as nothing has changed.

    Else jobs would stop each other at every event, though nothing that matters to them has changed.
    """
    policy = taught(plugin, history)

    def chosen() -> set[str]:
        jobs, left, found = table.jobs(NOW), np.array(Capacity(5000, 12, 8)), set[str]()
        for row in rank(jobs, policy.order(jobs, NOW), running_first=policy.running_first):
            need = np.array([column[row] for column in jobs.needs])
            if (need <= left).all():
                left = left - need
                found.add(table.ids[row])
        return found

    first = chosen()
    for job_id in table.ids:
        if table.running(job_id) and job_id not in first:
            table.stop(job_id, NOW)
        elif job_id in first and not table.running(job_id):
            table.start(job_id, NOW)
    assert not policy.preemptive or chosen() == first


def test_an_empty_queue_has_an_order(plugin: plugins.Plugin) -> None:
    """An empty queue has an order: an empty one."""
    order = plugin.make().order(JobTable().jobs(NOW), NOW)
    assert (len(order.level), len(order.score)) == (0, 0)
