"""The strided walk down the order, compared with a walk one job at a time."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.properties import some

from cotenant.core.model.job_table import Capacity, JobRow, Jobs, JobTable
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling import cycle, ordering


class Ranked:
    """Orders jobs by arrival and stops jobs that are not among the first that fit."""

    name, api_version, preemptive, running_first = "ranked", 1, True, False

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict

    def order(self, jobs: Jobs, now: float) -> Order:
        return Order(np.zeros(len(jobs), dtype=np.int64), jobs.arrival_seconds)


def selected_slowly(jobs: Jobs, capacity: Capacity, *, strict: bool) -> set[int]:
    gpus, cores = capacity.gpu_milli, capacity.cores
    chosen: set[int] = set()
    for row in np.lexsort((jobs.sequence, jobs.arrival_seconds)).tolist():
        if jobs.gpu_milli[row] <= gpus and jobs.cores[row] <= cores:
            chosen.add(row)
            gpus -= int(jobs.gpu_milli[row])
            cores -= int(jobs.cores[row])
        elif strict:
            return chosen
    return chosen


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", some(range(30), 8))
def test_the_first_of_the_order_that_fit_together_are_chosen_however_many_wait(seed: int, strict: bool) -> None:
    rng = np.random.default_rng(seed)
    table = JobTable()
    count = int(rng.integers(1, 3 * ordering.STRIDE))
    for number in range(count):
        gpu_milli = int(rng.choice([0, 1000, 2000, 8000]))
        row = JobRow(f"{number}", float(rng.integers(50)), number, gpu_milli=gpu_milli, cores=int(rng.integers(1, 9)))
        table.add(row)
    jobs = table.jobs(now=60)
    capacity = Capacity(int(rng.integers(1, 400)) * 1000, int(rng.integers(1, 2000)), 0)
    policy = Ranked(strict=strict)
    choice = cycle.choose(jobs, policy, policy.order(jobs, 60), capacity, now=60)
    assert set(choice.starts.tolist()) == selected_slowly(jobs, capacity, strict=strict), f"seed {seed}"


@pytest.mark.parametrize("running_first", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_ranking_is_sorting_by_all_six_keys(seed: int, running_first: bool) -> None:
    rng = np.random.default_rng(seed)
    table = JobTable()
    for number in range(int(rng.integers(0, 60))):
        priority = int(rng.integers(-1, 2)) if seed % 3 else 0
        table.add(
            JobRow(f"{number}", float(rng.integers(9)), int(rng.permutation(60)[0]) * 60 + number, priority=priority)
        )
        if rng.random() < 0.5:
            table.start(f"{number}", 10.0)
    for job_id in [job_id for job_id in table.ids if rng.random() < 0.4]:
        table.remove(job_id)  # another row moves into its place
    jobs = table.jobs(now=60)
    far = 2**40 if seed % 2 else 1
    level = rng.integers(-2, 3, size=len(jobs)) * far
    order = Order(level, rng.choice([1.0, 2.0, rng.random()], size=len(jobs)))
    keys = [jobs.sequence, jobs.arrival_seconds, order.score, ~jobs.running, order.level, -jobs.priority]
    if not running_first:
        del keys[3]
    slow = np.lexsort(keys)
    assert ordering.rank(jobs, order, running_first=running_first).tolist() == slow.tolist(), f"seed {seed}"
    waiting = ordering.rank(jobs, order, running_first=running_first, among=~jobs.running)
    assert waiting.tolist() == [row for row in slow.tolist() if not jobs.running[row]], f"seed {seed}"


@pytest.mark.parametrize("running_first", [False, True])
def test_levels_as_far_apart_as_integers_reach_rank_like_close_ones(running_first: bool) -> None:
    table = JobTable()
    for number in range(12):
        table.add(JobRow(f"{number}", float(number), number, priority=number % 2))
        if number % 3 == 0:
            table.start(f"{number}", 20.0)
    jobs = table.jobs(now=60)
    steps = np.array([3, 0, 2, 1] * 3)
    scores = np.arange(12.0)[::-1].copy()
    close = ordering.rank(jobs, Order(steps, scores), running_first=running_first).tolist()
    for least, step in ((-(2**62), 2**61), (0, 2**61), (-(2**62) - 2**61, 2**62), (2**40, 1), (-(2**63), 1)):
        far = Order(least + steps * step, scores)
        assert ordering.rank(jobs, far, running_first=running_first).tolist() == close
