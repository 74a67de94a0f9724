"""Seeds that are played in copies of this process: each is told of, in order, whatever becomes of the copy."""

from __future__ import annotations

import os
from collections import Counter
from itertools import count

from tests.verification.control_plane.batches import SEEDS_PER_WORKER, played
from tests.verification.control_plane.playing import Outcome

ENDS, LOOPS = 2, 5


def play(seed: int) -> Outcome:
    """End over one seed, and go round in circles over another."""
    if seed == ENDS:
        os._exit(3)
    while seed == LOOPS:
        pass
    return Outcome(seed, [], [], faults=[str(os.getpid())])


def test_each_seed_has_an_outcome_in_order_even_if_its_worker_ends_or_hangs() -> None:
    told = list(played(play, range(8), jobs=2, seconds_max=0.5))
    assert [one.seed for one in told] == list(range(8))
    assert {one.seed: one.failures for one in told if one.failures} == {
        ENDS: ["the process that played it ended with 3"],
        LOOPS: ["it has not come to its end in 0.5 s"],
    }


def test_workers_are_replaced_and_seeds_are_run_on_demand() -> None:
    by_copy = Counter(one.faults[0] for one in played(play, range(10, 11 + 2 * SEEDS_PER_WORKER), jobs=1))
    assert sorted(by_copy.values()) == [1, SEEDS_PER_WORKER, SEEDS_PER_WORKER]
    endless = played(play, count(10), jobs=2)
    assert [next(endless).seed for _ in range(3)] == [10, 11, 12]
    endless.close()
