"""The walk down the order that chooses who should run, against a walk over everything, one job at a time."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant.core import cycle
from cotenant.core.policy import Order
from cotenant.core.table import Capacity, JobRow, Jobs, JobTable


class Ranked:
    """Orders jobs by their arrival and stops whoever is not among the first that fit."""

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
@pytest.mark.parametrize("seed", range(30))
def test_the_first_of_the_order_that_fit_together_are_chosen_however_many_wait(seed: int, strict: bool) -> None:
    rng = np.random.default_rng(seed)
    table = JobTable()
    count = int(rng.integers(1, 3 * cycle.NEEDS_AT_ONCE))
    for number in range(count):
        gpu_milli = int(rng.choice([0, 1000, 2000, 8000]))
        row = JobRow(f"{number}", float(rng.integers(50)), number, gpu_milli=gpu_milli, cores=int(rng.integers(1, 9)))
        table.add(row)
    jobs = table.jobs(now=60)
    capacity = Capacity(int(rng.integers(1, 400)) * 1000, int(rng.integers(1, 2000)), 0)
    policy = Ranked(strict=strict)
    choice = cycle.choose(jobs, policy, policy.order(jobs, 60), capacity, now=60)
    assert set(choice.starts.tolist()) == selected_slowly(jobs, capacity, strict=strict), f"seed {seed}"
