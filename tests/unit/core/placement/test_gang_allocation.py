"""Holdings are held all together or not at all, and are summed up by resource."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import World, picture, worlds
from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.gang_allocation import cores_of, gpu_milli_of, hold_all, release_all


@given(worlds(), st.data())
def test_all_is_held_or_nothing(world: World, data: st.DataObject) -> None:
    ledger = world.ledger
    holdings = [holding for holdings in world.taken for holding in holdings]
    release_all(ledger, holdings)
    before = picture(ledger)
    too_much = Holding(0, cores=int(ledger.free_cores[0]) + 1)
    at = data.draw(st.integers(0, len(holdings)))
    assert not hold_all(ledger, [*holdings[:at], too_much, *holdings[at:]])
    assert picture(ledger) == before
    assert hold_all(ledger, holdings)
    release_all(ledger, holdings)
    assert picture(ledger) == before


def test_what_was_held_before_the_refusal_is_released() -> None:
    ledger = Ledger([NodeShape(2, 8)])
    assert not hold_all(ledger, [Holding(0, 1, 4), Holding(0, 1, 4), Holding(0, 0, 1)])
    assert (ledger.free_gpus.tolist(), ledger.free_cores.tolist()) == ([2], [8])


def test_shares_count_as_thousandths_and_whole_gpus_as_a_thousand() -> None:
    holdings = [Holding(0, 2, 3), Holding(1, 0, 4, shares=((0, 300), (1, 500)))]
    assert (gpu_milli_of(holdings), cores_of(holdings)) == (2800, 7)
