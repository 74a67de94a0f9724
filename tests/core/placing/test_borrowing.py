"""Those who borrow, as some of them go and come back, against what is summed up anew."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds import picture

from cotenant.core.gangs import Demand, Gang, Part
from cotenant.core.ledger import Holding, Ledger
from cotenant.core.nodes import NodeShape
from cotenant.core.placing.borrowing import Borrowers
from cotenant.core.placing.taking import hold_all, release_all
from cotenant.core.scenes import Resident

SHAPES = [NodeShape(24, 64, 100), NodeShape(24, 64, 100), NodeShape(24, 64, 100, shareable=True)]
NAMES = [f"job{number}" for number in range(6)]


@st.composite
def residents(draw: st.DrawFn) -> list[Resident]:
    some: list[Resident] = []
    for number in range(draw(st.integers(0, len(NAMES)))):
        with_gpus = draw(st.booleans())
        held: list[Holding] = []
        for node in draw(st.sets(st.integers(0, 2), min_size=1)):
            gpus, cores = with_gpus * draw(st.integers(1, 3)), draw(st.integers(0, 4))
            if node == 2 and gpus:
                held.append(Holding(node, 0, cores, 7, ((number, 500),)))
            else:
                held.append(Holding(node, gpus, cores, 7))
        gang = Gang(f"job{number}", (Part("worker", 1, Demand(1000 * with_gpus)),))
        some.append(Resident(gang, tuple(held), since_seconds=float(draw(st.integers(0, 2)))))
    return some


@settings(max_examples=80)
@given(residents(), st.lists(st.sets(st.sampled_from([*NAMES, "stranger"])), max_size=5))
def test_who_is_gone_is_left_out_of_the_sums_and_counted_again_when_it_comes_back(
    some: list[Resident], steps: list[set[str]]
) -> None:
    borrowers = Borrowers(some, len(SHAPES))
    for gone in [set[str](), *steps]:
        borrowers.leave(gone)
        there = [one for one in some if one.gang.job_id not in gone]
        there.sort(key=lambda one: (-one.since_seconds, one.gang.job_id))
        for gpus in (False, True):
            able = [one for one in there if gpus or not one.gang.gpu_milli]
            assert borrowers.any(gpus=gpus) == bool(able)
            for node in range(len(SHAPES)):
                mine = [one for one in able if any(held.node == node for held in one.holdings)]
                assert list(borrowers.on(node, gpus=gpus)) == mine
        held = [one for each in there if not each.gang.gpu_milli for one in each.holdings]
        for sums, what in ((borrowers.cores, "cores"), (borrowers.memory, "memory_bytes")):
            by_node = [sum(getattr(one, what) for one in held if one.node == node) for node in range(len(SHAPES))]
            assert sums.tolist() == by_node
        ledger = Ledger(SHAPES)
        for one in there:
            assert hold_all(ledger, one.holdings)
        before = picture(ledger)
        with borrowers.without_gpus(ledger):
            counted = picture(ledger)
        assert picture(ledger) == before
        for one in there:
            if one.gang.gpu_milli:
                release_all(ledger, one.holdings)
        assert counted == picture(ledger)
