"""A job's replicas are on as many different nodes or racks as it wants, under every placement policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant import plugins
from cotenant.conformance.worlds import World, parts, rng, worlds
from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobKind, JobSpec, Locality, OpenReplicas, Qos, Request, Role, Spread, SpreadBy
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.validation import check_spec
from cotenant.core.placement import constraints
from cotenant.core.placement.anti_affinity import SpreadOut
from cotenant.core.placement.candidate_allocations import standard_candidates
from cotenant.core.placement.gang_allocation import Victim, take
from cotenant.core.placement.node_avoidance import relax_avoidance
from cotenant.core.placement.unschedulable import fits, never_fits, no_place, quick_shortage
from cotenant.core.policy.cluster_view import EmptyClusterView, Rearrangement, RunningJob, UsesClusterView
from cotenant.core.policy.protocols import PlacementPolicy, equivalence_key_by
from cotenant.core.scheduling.cycle import gang_with, place
from cotenant.core.scheduling.reservations import ReservationRules
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.count import Count

FOUND = plugins.discover("cotenant.placement_policies")
every_policy = pytest.mark.parametrize("plugin", FOUND, ids=[plugin.name for plugin in FOUND])
NODES, RACKS = SpreadBy.NODE, SpreadBy.RACK


class OnOneNode:
    """A policy that knows no constraint: it places gangs on the first node with room for all replicas of one role."""

    name, api_version = "on-one-node", 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        able = np.flatnonzero(ledger.room(gang.parts[0].demand) >= gang.parts[0].replicas)
        return (Share(int(able[0]), 0, gang.parts[0].replicas),) if len(able) else no_place(gang, ledger)


def ready(plugin: plugins.Plugin) -> PlacementPolicy:
    policy: PlacementPolicy = plugin.make()
    if isinstance(policy, UsesClusterView):
        policy.begin_cycle(EmptyClusterView())
    return policy


def workers(replicas: int, least: int, by: SpreadBy = NODES, *, milli: int = 1000, cores: int = 0) -> Gang:
    return Gang("job", (Part("worker", replicas, Demand(milli, cores)),), constraints=(SpreadOut(by, least),))


def spec_of(replicas: int, least: int, by: SpreadBy | None = None, locality: Locality | None = None) -> JobSpec:
    role = Role("worker", replicas, Request(1000, 0))
    return JobSpec(roles=(role,), command=("true",), spread=Spread(by, least), locality=locality)


def cluster(*free: int, racks: str = "") -> Ledger:
    """Nodes of 8 GPUs with these numbers free."""
    ledger = Ledger([NodeShape(8, 24)] * len(free), list(racks), [f"n{number}" for number in range(len(free))])
    for node, gpus in enumerate(free):
        if gpus < 8:
            ledger.take(node, Demand(1000), 8 - gpus)
    return ledger


def placed(policy: PlacementPolicy, gang: Gang, ledger: Ledger) -> dict[int, int] | Refusal:
    """Return the replicas on each node; the ledger is unchanged."""
    before = ledger.free_milli.tolist(), ledger.open.tolist()
    answer = constraints.place(policy, gang, ledger, rng())
    assert (ledger.free_milli.tolist(), ledger.open.tolist()) == before
    if isinstance(answer, Refusal):
        return answer
    with ledger.rolled_back():
        take(ledger, gang, answer)
    counts: dict[int, int] = {}
    for share in answer:
        counts[share.node] = counts.get(share.node, 0) + share.replicas
    return counts


@every_policy
@settings(max_examples=examples(60))
@given(worlds(), parts(), st.sampled_from(SpreadBy), st.integers(2, 4), st.sampled_from([None, Locality.RACK]))
def test_a_gang_of_one_role_is_spread_if_and_only_if_there_are_such_places(
    plugin: plugins.Plugin, world: World, part: Part, by: SpreadBy, least: int, locality: Locality | None
) -> None:
    if (by, locality) == (RACKS, Locality.RACK):
        return  # a contradiction, which is refused at submission
    ledger, part = world.ledger, replace(part, replicas=max(part.replicas, least))
    gang = Gang("job", (part,), locality, constraints=(SpreadOut(by, least),))
    numbers = ledger.rack_numbers if by is RACKS else np.arange(len(ledger))
    scopes = [ledger.rack_numbers == rack for rack in set(ledger.rack_numbers.tolist())] if locality else [ledger.open]
    rooms = [np.where(scope, ledger.room(part.demand), 0) for scope in scopes]
    there = any(
        np.minimum(room, part.replicas).sum() >= part.replicas and len(set(numbers[room > 0].tolist())) >= least
        for room in rooms
    )
    assert fits(gang, ledger, within=locality or Locality.ANYWHERE) == there
    answer = placed(ready(plugin), gang, ledger)
    if isinstance(answer, Refusal):
        assert not there or plugin.name == "multi-array"  # it keeps cores for jobs with GPUs
    else:
        assert there
        assert len({int(numbers[node]) for node in answer}) >= least
        assert not locality or len({int(ledger.rack_numbers[node]) for node in answer}) == 1


@every_policy
@settings(max_examples=examples(40))
@given(worlds(), st.lists(parts(), min_size=2, max_size=3), st.sampled_from(SpreadBy))
def test_a_gang_of_several_roles_is_never_less_spread(
    plugin: plugins.Plugin, world: World, some: list[Part], by: SpreadBy
) -> None:
    gang = Gang("job", tuple(some), constraints=(SpreadOut(by, 2),))
    answer = placed(ready(plugin), gang, world.ledger)
    if not isinstance(answer, Refusal):
        numbers = world.ledger.rack_numbers if by is RACKS else np.arange(len(world.ledger))
        assert len({int(numbers[node]) for node in answer}) >= 2


@every_policy
def test_without_it_a_policy_would_put_the_gang_closer_together(plugin: plugins.Plugin) -> None:
    ledger = cluster(8, 8, 8, 8, racks="aabb")
    for by, numbers in ((NODES, [0, 1, 2, 3]), (RACKS, [0, 0, 1, 1])):
        answer = placed(ready(plugin), workers(2, 2, by), ledger)
        assert isinstance(answer, dict)
        assert len({numbers[node] for node in answer}) == 2
    assert placed(Consolidate(), replace(workers(2, 2), constraints=()), ledger) == {0: 2}


def test_the_rest_goes_where_the_policy_wants_it() -> None:
    assert placed(Consolidate(), workers(6, 3), cluster(8, 8, 8, 8)) == {0: 4, 1: 1, 2: 1}
    assert placed(Count(), workers(6, 2), cluster(2, 8, 8)) == {0: 2, 1: 4}
    assert placed(Consolidate(), workers(4, 2), cluster(2, 2)) == {0: 2, 1: 2}, "it does not wait to be together"


def test_a_policy_that_knows_no_constraints_is_asked_piece_by_piece() -> None:
    assert placed(OnOneNode(), workers(6, 3), cluster(8, 1, 1, 8)) == {0: 4, 1: 1, 2: 1}
    refusal = placed(OnOneNode(), workers(6, 3), cluster(8, 8))
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.NEVER_FITS


@pytest.mark.parametrize(
    ("free", "racks", "by", "code", "said"),
    [
        ((8, 8, 0, 0), "", NODES, Code.FRAGMENTED, "must be on at least 3 servers; 2 have room"),
        ((8, 0, 0, 0), "", NODES, Code.FRAGMENTED, "must be on at least 3 servers; 1 has room"),
        ((8, 8), "", NODES, Code.NEVER_FITS, "must be on at least 3 servers; 2 could hold a replica even if empty"),
        ((8, 8, 8, 8), "aabb", RACKS, Code.NEVER_FITS, "must be on at least 3 racks; 2 could hold a replica"),
        ((8, 8, 0, 0), "aabc", RACKS, Code.FRAGMENTED, "must be on at least 3 racks; 1 has room"),
        ((1, 0, 0), "", NODES, Code.CAPACITY, "needs 4 GPUs, 1 of 24 free"),
    ],
)
def test_a_refusal_says_how_many_have_room(
    free: tuple[int, ...], racks: str, by: SpreadBy, code: Code, said: str
) -> None:
    for policy in (Consolidate(), Count()):
        refusal = placed(policy, workers(4, 3, by), cluster(*free, racks=racks))
        assert isinstance(refusal, Refusal)
        assert (refusal.code, said in refusal.detail) == (code, True), refusal


def test_closed_nodes_are_blamed_where_they_would_suffice() -> None:
    ledger = cluster(8, 8, 8)
    ledger.open[2] = False
    refusal = placed(Count(), workers(4, 3), ledger)
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.NO_NODES
    assert "4 replicas of 1 GPU, on at least 3 servers, more than the servers now taking work" in refusal.detail


def test_avoidance_yields_if_the_other_nodes_are_too_few() -> None:
    gang = replace(workers(2, 2), avoided=("n0", "n1"))
    assert relax_avoidance(gang, cluster(8, 8, 8)).avoided == ("n1",)
    assert placed(Count(), relax_avoidance(gang, cluster(8, 8, 8)), cluster(8, 8, 8)) == {0: 1, 2: 1}


def test_gangs_that_are_spread_differently_are_not_equivalent() -> None:
    gangs = [workers(4, 2), workers(4, 3), workers(4, 2, RACKS), replace(workers(4, 2), constraints=())]
    for plugin in FOUND:
        key = equivalence_key_by(plugin.make())
        assert len({key(gang) for gang in gangs}) == 4
    assert len(set(gangs)) == 4
    plan = place([replace(gangs[1], job_id="a"), replace(gangs[0], job_id="b")], cluster(4, 4), Consolidate(), rng())
    assert ([start.gang.job_id for start in plan.starts], list(plan.refusals)) == (["b"], ["a"])


def test_victims_are_those_on_enough_nodes() -> None:
    ledger = cluster(8, 8, 8)
    victims = [Victim(f"v{node}", (ledger.take(node, Demand(1000), 8),)) for node in range(3)]
    plan = place([workers(2, 2)], ledger, Consolidate(), rng(), victims=victims)
    assert (len(plan.stops), len({share.node for share in plan.starts[0].offer})) == (2, 2)
    assert len(place([workers(2, 1)], ledger, Consolidate(), rng(), victims=victims).stops) == 1


def test_places_are_reserved_on_enough_nodes() -> None:
    ledger, gang = cluster(8, 0), replace(workers(2, 2), waited_seconds=1e5)
    plan = place([gang], ledger, Consolidate(), rng(), reserving=ReservationRules(after_seconds=10.0))
    assert not plan.reservations, "nobody knows when the other node will be free"
    assert plan.refusals["job"].code is Code.FRAGMENTED


def test_places_found_by_moving_jobs_are_judged_too() -> None:
    class Moves(Count):
        def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
            return Refusal(Code.FRAGMENTED, "wants to move")

        def rearrange(self, gang: Gang, *_: object) -> Rearrangement:
            return Rearrangement((Share(0, 0, 2),), tuple[tuple[RunningJob, Offer], ...]())

    spread, free = workers(2, 2), replace(workers(2, 2), job_id="free", constraints=())
    plan = place([spread, free], cluster(8, 8), Moves(), rng())
    assert ([start.gang.job_id for start in plan.starts], list(plan.refusals)) == (["free"], ["job"])


def test_a_shortage_in_total_is_not_answered_before_what_never_fits() -> None:
    ledger, free = cluster(0, 0), replace(workers(4, 3), constraints=())
    for _ in range(2):  # the totals are cached by then
        found = [no_place(free, ledger), quick_shortage(free, ledger, within=Locality.ANYWHERE)]
        never = quick_shortage(workers(4, 3), ledger, within=Locality.ANYWHERE) or no_place(workers(4, 3), ledger)
    assert [refusal.code for refusal in (*filter(None, found), never)] == [Code.CAPACITY] * 2 + [Code.NEVER_FITS]


def test_a_job_that_the_cluster_could_never_spread_is_refused_at_submission() -> None:
    two = [NodeShape(8, 24, count=2), NodeShape(0, 24, count=5)]
    refusal = never_fits(spec_of(4, 3), two, elastic=False)
    assert refusal
    assert "the job must be on at least 3 servers; 2 servers could hold a replica" in refusal.detail
    assert never_fits(spec_of(4, 3), two, elastic=True) is None
    assert never_fits(spec_of(4, 2), two, elastic=False) is None
    assert never_fits(spec_of(4, 3, RACKS), two, elastic=False), "racks are no more than nodes"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_of(4, 2, locality=Locality.SERVER), "locality server wants all replicas on one server, spread wants"),
        (spec_of(4, 2, RACKS, Locality.RACK), "locality rack wants all replicas on one rack, spread wants them on 2 r"),
        (spec_of(2, 3), "must be at most the number of replicas, 2, not 3"),
        (replace(spec_of(2, 0), spread=Spread(RACKS)), "is missing"),
        (spec_of(4, 2, NODES, Locality.RACK), ""),
        (spec_of(4, 1, NODES, Locality.SERVER), ""),
        (spec_of(4, 4), ""),
    ],
)
def test_contradictions_are_named_at_submission(spec: JobSpec, said: str) -> None:
    found = [one for one in check_spec(spec) if one.field == "spec.spread.min"]
    assert [said in one.description for one in found] == [True] * bool(said), found


def test_the_gang_of_a_job_has_its_constraint_and_estimates_for_as_many_nodes() -> None:
    spec = spec_of(4, 3)
    assert gang_with("job", spec, workers(1, 1).estimate, [0], "").constraints == (SpreadOut(NODES, 3),)
    assert not gang_with("job", spec_of(4, 1), workers(1, 1).estimate, [0], "").constraints
    assert standard_candidates(spec, [NodeShape(8, 24, count=4)])[0].nodes == 3


def test_a_service_with_auto_replicas_has_at_least_as_many() -> None:
    role = Role("worker", 2, Request(1000, 1), open=OpenReplicas(2, 8))
    service = JobSpec(kind=JobKind.INFERENCE, roles=(role,), command=("true",), qos=Qos(0, 0.1, 99, 5))
    assert not check_spec(replace(service, spread=Spread(None, 2)))
    assert check_spec(replace(service, spread=Spread(None, 3)))
