"""Laws of placement policies: what they offer one gang, and why they refuse it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.trials import tried
from cotenant.conformance.worlds import World, emptied, gangs, picture, replicas_of, rng, worlds
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.cycle import take


@tried(150)
@given(worlds(), gangs(), st.integers(0, 2**32))
def test_an_offer_is_complete_free_and_deterministic(
    plugin: plugins.Plugin, world: World, gang: Gang, seed: int
) -> None:
    """An offer has every replica of a gang, on open nodes with free resources, and is the same for the same chance."""
    policy: PlacementPolicy = plugin.make()
    ledger, before = world.ledger, picture(world.ledger)
    answer = policy.place(gang, ledger, rng(seed))
    assert picture(ledger) == before
    assert plugin.make().place(gang, ledger, rng(seed)) == answer
    if isinstance(answer, Refusal):
        assert answer.detail
        return
    assert replicas_of(answer, gang) == [part.replicas for part in gang.parts]
    for share in answer:
        demand = gang.parts[share.part].demand
        assert ledger.open[share.node]
        assert not demand.gpu_milli or ledger.of_type(demand.gpu_type)[share.node]
    with ledger.rolled_back():
        take(ledger, gang, answer)


@tried(150)
@given(worlds(), gangs(roles_max=1))
def test_a_refused_gang_starts_without_its_obstacle(plugin: plugins.Plugin, world: World, gang: Gang) -> None:
    """A refusal is true: the gang starts once the obstacle that it names is gone."""
    policy: PlacementPolicy = plugin.make()
    refusal = policy.place(gang, world.ledger, rng())
    if not isinstance(refusal, Refusal):
        return
    idle = emptied(world.ledger)
    if refusal.code is Code.NO_NODES:
        idle.open[:] = True
    starts = isinstance(policy.place(gang, idle, rng()), tuple)
    if refusal.code in (Code.CAPACITY, Code.FRAGMENTED):
        assert starts, f"{refusal}, and yet it finds no place when all others have finished"
    elif refusal.code is Code.NEVER_FITS:
        idle.open[:] = True
        assert isinstance(policy.place(gang, idle, rng()), Refusal)
    elif world.ledger.open.any():
        assert starts, f"{refusal}, and yet it finds no place when all nodes are open and empty"
