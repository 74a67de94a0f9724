"""Laws of placement policies over a stream of jobs: no overcommitment, whole gangs, true refusals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.placement_streams import Turn, contradiction, copy_of, live, ready, turns
from cotenant.conformance.trials import tried
from cotenant.conformance.worlds import World, emptied, rng, worlds
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement import constraints


@tried(15)
@given(st.data(), turns, st.integers(0, 2**32))
def test_a_stream_is_placed_whole_without_overcommitment_and_the_same_when_replayed(
    plugin: plugins.Plugin, data: st.DataObject, stream: list[Turn], seed: int
) -> None:
    """A stream of jobs is placed whole, without overcommitment, and the same way when it is replayed."""
    world = data.draw(worlds(racks_max=3))
    first, _ = live(plugin, copy_of(world), stream, seed)
    again, _ = live(plugin, copy_of(world), stream, seed)
    assert first == again


@tried(15)
@given(worlds(), turns)
def test_a_waiting_job_starts_when_its_obstacle_is_removed(
    plugin: plugins.Plugin, world: World, stream: list[Turn]
) -> None:
    """A waiting job starts when the obstacle that its refusal names is removed."""
    _, waiting = live(plugin, world, stream, 0)
    ledger, policy = world.ledger, ready(plugin)
    for gang in waiting:
        if len(gang.parts) > 1:
            continue  # where several roles find their places depends on where the first of them go
        refusal = constraints.place(policy, gang, ledger, rng())
        assert isinstance(refusal, Refusal), "it was refused, and yet there is a place for it"
        assert not contradiction(gang, refusal, ledger, plugin), refusal
        idle = emptied(ledger)
        if refusal.code is Code.NO_NODES:
            idle.open[:] = True
        starts = isinstance(constraints.place(ready(plugin), gang, idle, rng()), tuple)
        assert starts == (refusal.code is not Code.NEVER_FITS) or not ledger.open.any()
