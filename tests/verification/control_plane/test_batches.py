"""Seeds that are played in copies of this process: each is told of, in order, whatever becomes of the copy."""

from __future__ import annotations

import os
from collections import Counter
from itertools import count

from tests.verification.control_plane.batches import SEEDS_EACH, played
from tests.verification.control_plane.playing import Outcome

ENDS, GOES_ROUND = 2, 5


def play(seed: int) -> Outcome:
    """End over one seed, and go round in circles over another."""
    if seed == ENDS:
        os._exit(3)
    while seed == GOES_ROUND:
        pass
    return Outcome(seed, [], [], faults=[str(os.getpid())])


def test_each_seed_is_told_of_in_order_also_where_a_copy_ends_or_never_does() -> None:
    told = list(played(play, range(8), jobs=2, seconds_max=0.5))
    assert [one.seed for one in told] == list(range(8))
    assert {one.seed: one.failures for one in told if one.failures} == {
        ENDS: ["the process that played it ended with 3"],
        GOES_ROUND: ["it has not come to its end in 0.5 s"],
    }


def test_copies_play_so_many_seeds_and_no_more_of_them_are_played_than_are_asked_for() -> None:
    by_copy = Counter(one.faults[0] for one in played(play, range(10, 11 + 2 * SEEDS_EACH), jobs=1))
    assert sorted(by_copy.values()) == [1, SEEDS_EACH, SEEDS_EACH]
    endless = played(play, count(10), jobs=2)
    assert [next(endless).seed for _ in range(3)] == [10, 11, 12]
    endless.close()
