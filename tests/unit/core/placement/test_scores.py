from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cotenant.conformance.worlds import World, gangs, picture, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.placement import scores
from cotenant.core.placement.scores import BEST_FIT, CROWDED, ELSEWHERE, Candidates, Weights, lowest, marked, weigh

Marks = NDArray[np.bool_]
five = st.lists(st.booleans(), min_size=5, max_size=5)  # no world has more nodes


def slow_best_fit(
    ledger: Ledger, nodes: list[int], crowded: Marks | None = None, elsewhere: Marks | None = None
) -> int:
    def criteria(node: int) -> tuple[bool, bool, bool, int, int, int]:
        marks = [given is not None and bool(given[node]) for given in (elsewhere, crowded)]
        has_gpus, free = bool(ledger.has_gpus[node]), int(ledger.free_gpus[node])
        return marks[0], has_gpus, marks[1], free, int(ledger.free_cores[node]), node

    return min(nodes, key=criteria)


@given(worlds(), gangs(), five, five, five)
def test_weights_choose_as_one_criterion_after_the_other(
    world: World, gang: Gang, able: list[bool], crowded: list[bool], elsewhere: list[bool]
) -> None:
    ledger = world.ledger
    marks, few, away = (np.array(drawn[: len(ledger)]) for drawn in (able, crowded, elsewhere))
    if not marks.any():
        return
    nodes, candidates = np.flatnonzero(marks).tolist(), Candidates(gang, ledger, marks)
    arms: list[tuple[Weights, int]] = [
        (BEST_FIT, slow_best_fit(ledger, nodes)),
        ({**BEST_FIT, marked(few): CROWDED}, slow_best_fit(ledger, nodes, few)),
        ({**BEST_FIT, marked(away): ELSEWHERE}, slow_best_fit(ledger, nodes, elsewhere=away)),
        ({marked(away): ELSEWHERE, marked(few): CROWDED, **BEST_FIT}, slow_best_fit(ledger, nodes, few, away)),
    ]
    for weights, expected in arms:
        assert lowest(weigh(weights, candidates), marks) == expected


@given(worlds(), gangs())
def test_the_share_that_is_taken_counts_gpus_or_cores(world: World, gang: Gang) -> None:
    ledger = world.ledger
    for part in gang.parts:
        found = scores.share_taken(Candidates(gang, ledger, ledger.open, part)).tolist()
        for node, share in enumerate(found):
            gpus, cores = int(ledger.total_gpus[node]), int(ledger.total_cores[node])
            if part.demand.gpu_milli:
                assert share == 1 - int(ledger.free_milli[node]) / 1000 / max(1, gpus)
            else:
                assert share == (gpus > 0) + 1 - int(ledger.free_cores[node]) / max(1, cores)


@given(worlds(), gangs(), st.sampled_from([1, 1.0, -3]))
def test_a_sum_is_an_array_of_its_own(world: World, gang: Gang, weight: float) -> None:
    before = picture(world.ledger)
    candidates = Candidates(gang, world.ledger, world.ledger.room(gang.parts[0].demand), gang.parts[0])
    for scorer in (scores.free_gpus, scores.free_cores, scores.stranded_gpus):
        found = weigh({scorer: weight}, candidates)
        assert found.tolist() == [weight * one for one in np.asarray(scorer(candidates)).tolist()]
        found[:] = -1
    assert picture(world.ledger) == before


def test_no_scorers_are_a_tie_and_the_first_node_wins() -> None:
    ledger = Ledger([])
    assert weigh({}, Candidates(Gang("job", ()), ledger, ledger.open)).tolist() == []
    assert lowest(np.zeros(3), np.array([False, True, True])) == 1
