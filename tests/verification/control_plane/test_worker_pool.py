"""Seeds run in worker processes: each has an outcome, in order, whatever happens to its worker."""

from __future__ import annotations

import os
from collections import Counter
from itertools import count

from tests.verification.control_plane.simulation import Outcome
from tests.verification.control_plane.worker_pool import SEEDS_PER_WORKER, run_in_workers

ENDS, LOOPS = 2, 5


def run_one(seed: int) -> Outcome:
    """End the process at one seed, and loop forever at another."""
    if seed == ENDS:
        os._exit(3)
    while seed == LOOPS:
        pass
    return Outcome(seed, [], [], faults=[str(os.getpid())])


def test_each_seed_has_an_outcome_in_order_even_if_its_worker_ends_or_hangs() -> None:
    outcomes = list(run_in_workers(run_one, range(8), jobs=2, seconds_max=3.0))
    assert [one.seed for one in outcomes] == list(range(8))
    assert {one.seed: one.failures for one in outcomes if one.failures} == {
        ENDS: ["the process that ran it exited with 3"],
        LOOPS: ["it has not finished within 3 s"],
    }


def test_workers_are_replaced_and_seeds_are_run_on_demand() -> None:
    by_copy = Counter(one.faults[0] for one in run_in_workers(run_one, range(10, 11 + 2 * SEEDS_PER_WORKER), jobs=1))
    assert sorted(by_copy.values()) == [1, SEEDS_PER_WORKER, SEEDS_PER_WORKER]
    endless = run_in_workers(run_one, count(10), jobs=2)
    assert [next(endless).seed for _ in range(3)] == [10, 11, 12]
    endless.close()
