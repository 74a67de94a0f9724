"""Streams of jobs that a placement policy places cycle by cycle, beside a model of the cluster without a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.worlds import World, emptied, gangs, rng
from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement import constraints
from cotenant.core.policy.cluster_view import EmptyClusterView, UsesClusterView
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.cycle import Plan, place


@dataclass(frozen=True)
class Turn:
    """What happens before a cycle: jobs come, one goes, a node is closed or opened."""

    arrivals: Sequence[Gang]
    leaves: int
    node: int | None


turns = st.lists(
    st.builds(Turn, st.lists(gangs(roles_max=2), max_size=3), st.integers(0, 9), st.none() | st.integers(0, 4)),
    min_size=1,
    max_size=5,
)


@dataclass
class Cluster:
    """A cluster model: allocations are summed up again each time, without the ledger."""

    world: World
    held: list[tuple[Holding, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.held = list(self.world.taken)

    def check(self) -> None:
        """Check that what is held is what the ledger counts, and no more than there is."""
        ledger = self.world.ledger
        for node, shape in enumerate(ledger.shapes):
            here = [holding for holdings in self.held for holding in holdings if holding.node == node]
            whole = sum(holding.gpus for holding in here)
            parts = dict.fromkeys(range(shape.gpus), 0)
            for index, milli in (share for holding in here for share in holding.shares):
                parts[index] += milli
            assert whole + sum(taken > 0 for taken in parts.values()) <= shape.gpus
            assert not any(parts.values()) or shape.shareable
            assert all(taken <= 1000 for taken in parts.values())
            assert sum(holding.cores for holding in here) == shape.cores - ledger.free_cores[node]
            assert sum(holding.memory_bytes for holding in here) == shape.memory_bytes - ledger.free_memory[node]
            assert min(ledger.free_cores[node], ledger.free_memory[node], ledger.free_gpus[node]) >= 0


def ready(plugin: plugins.Plugin) -> PlacementPolicy:
    """Make a policy, at the beginning of a cycle without running jobs."""
    policy: PlacementPolicy = plugin.make()
    if isinstance(policy, UsesClusterView):
        policy.begin_cycle(EmptyClusterView())
    return policy


def keeps_together(gang: Gang, nodes: set[int], ledger: Ledger, policy: PlacementPolicy) -> None:
    """A gang that insists on one server or one rack is there; `count` alone, which only counts, knows no servers."""
    if gang.locality is Locality.SERVER and policy.name != "count":
        assert len(nodes) == 1
    if gang.locality is Locality.RACK:
        assert len({ledger.racks[node] for node in nodes}) == 1


def live(plugin: plugins.Plugin, world: World, stream: Sequence[Turn], seed: int) -> tuple[list[Plan], list[Gang]]:
    """Run and apply a cycle after each turn; return the plans and the jobs that wait at the end."""
    ledger, cluster, policy = world.ledger, Cluster(world), ready(plugin)
    waiting: list[Gang] = []
    plans: list[Plan] = []
    for number, turn in enumerate(stream):
        waiting += [replace(gang, job_id=f"job-{number}-{place}") for place, gang in enumerate(turn.arrivals)]
        if cluster.held and turn.leaves < len(cluster.held):
            for holding in cluster.held.pop(turn.leaves):
                ledger.release(holding)
        if turn.node is not None and turn.node < len(ledger):
            ledger.open[turn.node] ^= True
        plan = place(waiting, ledger, policy, rng(seed + number))
        for start in plan.starts:
            gang, offered = start.gang, [0] * len(start.gang.parts)
            for share, holding in zip(start.offer, start.holdings, strict=True):
                offered[share.part] += share.replicas
                assert ledger.open[share.node]
                wanted = gang.parts[share.part].demand
                assert not wanted.gpu_milli or ledger.of_type(wanted.gpu_type)[share.node]
                assert holding.cores == share.replicas * wanted.cores
                ledger.hold(holding)
            assert offered == [part.replicas for part in gang.parts]
            keeps_together(gang, {share.node for share in start.offer}, ledger, policy)
            cluster.held.append(start.holdings)
        started = {start.gang.job_id for start in plan.starts}
        assert started | set(plan.refusals) == {gang.job_id for gang in waiting}
        assert not started & set(plan.refusals)
        waiting = [gang for gang in waiting if gang.job_id not in started]
        cluster.check()
        plans.append(plan)
    return plans, waiting


def contradiction(gang: Gang, refusal: Refusal, ledger: Ledger, plugin: plugins.Plugin) -> str:
    """Return what is false in a refusal, or nothing."""
    for name in ("gpu_milli", "cores", "memory_bytes"):
        if f"wanted_{name}" in refusal.numbers:
            wanted, free = refusal.numbers[f"wanted_{name}"], refusal.numbers[f"free_{name}"]
            if wanted != getattr(gang.needs, name) or not free < wanted:
                return f"{name}: it wants {getattr(gang.needs, name)}, {free} are said to be free"
        if f"fits_without_{name}" in refusal.numbers:
            (part,) = gang.parts
            demand = replace(part.demand, cores=0) if name == "cores" else replace(part.demand, memory_bytes=0)
            less = replace(gang, parts=(replace(part, demand=demand),))
            if isinstance(constraints.place(ready(plugin), less, ledger, rng()), Refusal):
                return f"{name}: without them it does not start either"
    return ""


def copy_of(world: World) -> World:
    """Return the same world with a ledger of its own."""
    ledger = emptied(world.ledger)
    for holdings in world.taken:
        for holding in holdings:
            ledger.hold(holding)
    return World(ledger, list(world.taken))
