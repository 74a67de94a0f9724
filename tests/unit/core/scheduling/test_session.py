"""The invariants of a placement session and of its parts, over random clusters with limited tenants and victims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.worlds import picture, rng
from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, policy_failed
from cotenant.core.model.tenancy import Headroom, Tenant
from cotenant.core.placement.gang_allocation import Victim, cores_of, gpu_milli_of, hold_all, release_all
from cotenant.core.policy.cluster_view import ClusterView, Reclaim, RunningJob
from cotenant.core.scheduling.cycle import place
from cotenant.core.scheduling.policy_calls import PolicyCalls
from cotenant.core.scheduling.reservation_book import ReservationBook
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, ReservationRules
from cotenant.core.scheduling.session import PlacementSession, Start
from cotenant.core.scheduling.tentative_cluster import TentativeCluster
from cotenant.core.scheduling.victims import Victims
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.first_fit import FirstFit

TENANTS = ("", "team", "vision")
LIMITS = st.sampled_from([None, 2, 4, 3000, 6000])


class Shown(ClusterView):
    """A view of jobs by id."""

    def __init__(self, jobs: Mapping[str, RunningJob]) -> None:
        self.jobs, self.now = dict(jobs), 0.0

    def running_jobs(self) -> Mapping[str, RunningJob]:
        return self.jobs

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        return [one for one in self.jobs.values() if any(held.node == node for held in one.holdings)]


class Intolerant(FirstFit):
    """A policy under which no two jobs tolerate each other on a node with an even number."""

    name = "intolerant"

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        self._view = cluster_view

    def can_coexist(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        return all(node % 2 or len(self._view.jobs_on(node)) < 2 for node in nodes)


class Lender(FirstFit):
    """A policy that reclaims from the first jobs, one after the other, until a gang fits."""

    name = "lender"

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        self._view = cluster_view

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        return False

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: object) -> Reclaim | None:
        stops: list[RunningJob] = []
        with ledger.rolled_back():
            for job_id, one in self._view.running_jobs().items():
                if job_id.startswith("runs") and job_id not in fixed:  # type: ignore[operator]  # a collection of ids
                    stops.append(one)
                    release_all(ledger, one.holdings)
                    if isinstance(offer := self.place(gang, ledger, rng), tuple):
                        return Reclaim(offer, tuple(stops)) if len(stops) < 3 else None
        return None


POLICIES: st.SearchStrategy[Any] = st.sampled_from([FirstFit, Consolidate, Intolerant, Lender]).map(lambda kind: kind())


@dataclass
class Scene:
    """A session, and the jobs that run when it begins."""

    ledger: Ledger
    headroom: Headroom
    running: dict[str, RunningJob]
    session: PlacementSession
    gangs: list[Gang]

    @property
    def cluster(self) -> TentativeCluster:
        return self.session._cluster

    @property
    def victims(self) -> Victims:
        return self.session._victims

    @property
    def limited(self) -> set[str]:
        return {tenant.id for binding in self.headroom.bound.values() for tenant in binding}

    def state(self) -> object:
        """Return everything that a refusal must leave as it was."""
        shown = {job_id: one.holdings for job_id, one in self.cluster.view.running_jobs().items()}
        return (
            picture(self.ledger),
            {tenant: self.headroom.held(tenant) for tenant in self.limited},
            shown,
            set(self.cluster.displaced),
            [one.job_id for one in self.victims.left if self.victims._unread is None],
            [one.job_id for one in self.victims.evicted],
            (list(self.session.reservations), list(self.session.moves), list(self.session.reclaimed)),
        )

    def check(self) -> None:
        """Check the invariants of the parts."""
        shown = self.cluster.view.running_jobs()
        with self.ledger.rolled_back():
            release_all(self.ledger, (held for one in shown.values() for held in one.holdings))
            assert picture(self.ledger) == picture(empty_of(self.ledger)), "the view shows all that is taken"
        for tenant in self.limited:
            mine = [one.holdings for one in shown.values() if tenant in (one.gang.tenant, PARENT.get(one.gang.tenant))]
            held = sum(map(gpu_milli_of, mine)), sum(map(cores_of, mine))
            assert self.headroom.held(tenant) == held, "and all that counts for tenants"
        left, evicted = ({one.job_id for one in some} for some in (self.victims.left, self.victims.evicted))
        assert not left & evicted
        assert evicted <= self.cluster.displaced
        assert not evicted & shown.keys()
        assert left <= shown.keys()


PARENT = {"vision": "team"}


def empty_of(ledger: Ledger) -> Ledger:
    empty = Ledger(ledger.shapes, ledger.racks)
    empty.open[:] = ledger.open
    return empty


SHORT = Estimate(predictable=True, remaining_seconds=10.0)
LONG = Estimate(predictable=True, remaining_seconds=500.0)
ESTIMATES = st.sampled_from([UNKNOWN, SHORT, LONG])


@st.composite
def sessions(draw: st.DrawFn) -> Scene:
    """Draw a session on a cluster that is nearly full of jobs that may be stopped."""
    ledger, names = (
        Ledger([NodeShape(4, 24), NodeShape(4, 24, shareable=True), NodeShape(2, 24)]),
        st.sampled_from(TENANTS),
    )
    running: dict[str, RunningJob] = {}
    for number, (node, gpus) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=3, max_size=10))
    ):
        if ledger.free_gpus[node] >= gpus:
            held = (ledger.take(node, Demand(1000, draw(st.integers(1, 3))), gpus),)
            gang = replace(one_gang(f"runs{number}", held, draw(names)), estimate=draw(ESTIMATES))
            running[gang.job_id] = RunningJob(gang, held, 0.0)
    asked = [
        Gang(
            f"g{number}",
            (Part("worker", draw(st.integers(1, 5)), Demand(draw(st.sampled_from([1000, 1000, 2000, 500])), 1)),),
            tenant=draw(names),
            waited_seconds=draw(st.sampled_from([200.0, 0.0])),
            estimate=draw(ESTIMATES),
        )
        for number in range(draw(st.integers(2, 5)))
    ]
    places, ranked = st.sampled_from([None, len(asked), len(asked), 2, 1]), draw(st.booleans())
    victims = [
        Victim(job_id, one.holdings, draw(places), one.gang.tenant, 0 if ranked else None, draw(st.floats(1, 9)))
        for job_id, one in running.items()
        if draw(st.sampled_from([True, True, True, False]))
    ]
    limited = [Tenant("vision", limit_gpu_milli=draw(LIMITS), parent="team"), Tenant("team", limit_cores=draw(LIMITS))]
    held_by = dict.fromkeys(TENANTS, (0, 0))
    for one in running.values():
        milli, cores = held_by[one.gang.tenant]
        held_by[one.gang.tenant] = milli + gpu_milli_of(one.holdings), cores + cores_of(one.holdings)
    headroom = Headroom(limited if draw(st.booleans()) else (), held_by)
    rules = draw(st.sampled_from([NO_RESERVATIONS, ReservationRules(100.0)]))
    session = PlacementSession(ledger, draw(POLICIES), rng(), victims, headroom, None, Shown(running), rules)
    return Scene(ledger, headroom, running, session, asked)


def one_gang(job_id: str, holdings: tuple[Holding, ...], tenant: str) -> Gang:
    demand = Demand(gpu_milli_of(holdings), cores_of(holdings))
    return Gang(job_id, (Part("worker", 1, demand),), tenant=tenant)


@given(sessions())
@settings(max_examples=examples(300))
def test_a_refused_gang_leaves_everything_as_it_was_and_a_started_one_keeps_the_invariants(scene: Scene) -> None:
    with scene.ledger.rolled_back():
        scene.check()
        for number, gang in enumerate(scene.gangs):
            scene.session.advance_to(number)
            scene.check()
            assert all(one.ahead is None or one.ahead > number for one in scene.victims.left)
            if scene.session.over_limit(gang):
                continue
            scene.victims.load()  # so that it does not count as a change
            before = scene.state()
            answer = scene.session.place(gang)
            if isinstance(answer, Refusal):
                assert scene.state() == before
                scene.session.reserve(gang, answer)
                assert len(scene.session.reservations) <= 1
            else:
                assert scene.cluster.view.running_jobs()[gang.job_id].holdings == answer.holdings
            scene.check()
        stops = scene.session.stops()
        scene.check()
        for job_id in stops:
            one = scene.running[job_id]
            with scene.ledger.rolled_back():
                free = hold_all(scene.ledger, one.holdings)
            allowed = scene.headroom.allows(one.gang.tenant, gpu_milli_of(one.holdings), cores_of(one.holdings))
            picky = any(not held.node % 2 for held in one.holdings)
            assert not (free and allowed) or (picky and isinstance(scene.session._policy, Intolerant)), (
                "it need not stop"
            )


@given(sessions())
def test_a_gang_takes_nothing_that_is_kept_for_a_reservation_that_binds_it(scene: Scene) -> None:
    with scene.ledger.rolled_back():
        for number, gang in enumerate(scene.gangs):
            scene.session.advance_to(number)
            if scene.session.over_limit(gang):
                continue
            book, away = scene.session._book, scene.cluster.displaced
            kept = {
                one.gang.job_id: [*one.kept(scene.ledger, away)]
                for one in scene.session.reservations
                if one.binds(gang)
            }
            answer = scene.session.place(gang)
            if isinstance(answer, Refusal):
                scene.session.reserve(gang, answer)
                continue
            assert answer.reclaims or all(scene.ledger.can_hold(held) for some in kept.values() for held in some), (
                "what was kept is still free"
            )
            ended = [one for one in book.reservations if not one.binds(gang) and shares(one.holdings, answer)]
            assert all(gang.job_id in one.back for one in ended), "it will have left by then"


def shares(holdings: Sequence[Holding], start: Start) -> bool:
    return bool({held.node for held in holdings} & {held.node for held in start.holdings})


def test_victims_of_a_tenant_over_its_limit_run_on_when_their_tenants_gang_is_refused() -> None:
    ledger = Ledger([NodeShape(4, 8)])
    held = ledger.take(0, Demand(1000, 1), 4)
    headroom = Headroom([Tenant("vision", limit_gpu_milli=2000)], {"vision": (4000, 4)})  # the limit was lowered
    gangs = [Gang(f"g{n}", (Part("worker", 1, Demand(1000, 9)),), tenant="vision") for n in range(2)]
    gangs.append(Gang("other", (Part("worker", 1, Demand(4000, 1)),)))
    victims = [Victim("runs", (held,), 2, "vision")]
    plan = place(gangs, ledger, FirstFit(), rng(), victims=victims, headroom=headroom)
    assert (plan.starts, plan.stops) == ((), ())
    assert plan.refusals["other"].code is Code.CAPACITY


def test_a_broken_policy_changes_nothing_and_only_refuses_the_gang() -> None:
    class Broken(FirstFit):
        def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
            if gang.job_id == "good":
                return super().place(gang, ledger, rng)
            ledger.take(0, Demand(1000), 1)
            raise ValueError(gang.job_id)

    ledger = Ledger([NodeShape(4, 8)], ids=["n0"])
    before = picture(ledger)
    calls = PolicyCalls(Broken(), ledger, rng(), lambda gang, error: policy_failed("broken", error))
    bad = Gang("bad", (Part("worker", 1, Demand(1000)),))
    answers = [calls.offer(bad), calls.offer(replace(bad, avoided=("n0",))), calls.offer(replace(bad, job_id="good"))]
    assert [isinstance(one, Refusal) and one.code for one in answers] == [Code.POLICY_FAILED, Code.POLICY_FAILED, False]
    assert picture(ledger) == before


def test_victims_are_read_once_and_only_those_that_the_gang_outranks() -> None:
    def read() -> object:
        for ahead in (1, None, 3):
            yield Victim(f"v{ahead}", (), ahead)

    victims = Victims(read())  # type: ignore[arg-type]  # a generator of victims
    victims.advance_to(1, lambda victim: pytest.fail("nothing was evicted"))
    victims.load()
    victims.load()
    assert [one.job_id for one in victims.left] == ["v3", "vNone"]
    victims.evict([victims.left[0]])
    asked: list[str] = []

    def restored(victim: Victim, *, comes_back: bool) -> bool:
        asked.append(victim.job_id)
        return comes_back

    victims.advance_to(2, lambda victim: pytest.fail("not its turn"))
    victims.advance_to(3, lambda victim: restored(victim, comes_back=False))
    victims.advance_to(math.inf, lambda victim: restored(victim, comes_back=True))
    assert asked == ["v3", "v3"]
    assert not victims.evicted


def test_a_book_makes_no_more_reservations_and_attempts_than_its_rules_allow() -> None:
    ledger = Ledger([NodeShape(1, 4)])
    held = (ledger.take(0, Demand(1000), 1),)
    ends = replace(one_gang("runs", held, ""), estimate=Estimate(predictable=True, remaining_seconds=60.0))
    rules, view = ReservationRules(after_seconds=10.0), Shown({"runs": RunningJob(ends, held, 0.0)})
    book = ReservationBook(rules, TentativeCluster(ledger, Headroom(()), view, None), view)
    attempts: list[str] = []

    def query(gang: Gang, gone: object, kept: object) -> Refusal:
        attempts.append(gang.job_id)
        return Refusal(Code.CAPACITY, "full")

    for number in range(10):
        gang = Gang(f"g{number}", (Part("worker", 1, Demand(1000)),), waited_seconds=100.0)
        assert book.reserve(gang, Refusal(Code.CAPACITY, "full"), FirstFit(), query).code is Code.CAPACITY
    assert len(set(attempts)) == rules.tries
    assert not book.reservations


def test_a_victim_that_stops_for_its_tenants_limit_makes_room_only_once() -> None:
    ledger = Ledger([NodeShape(4, 8)])
    other, own = (Victim(name, (ledger.take(0, Demand(1000), 2),), None, name) for name in ("speech", "vision"))
    headroom = Headroom([Tenant("vision", limit_gpu_milli=4000)], {"vision": (2000, 0)})
    gang = Gang("large", (Part("worker", 1, Demand(4000)),), tenant="vision")
    plan = place([gang], ledger, FirstFit(), rng(), victims=[other, own], headroom=headroom)
    assert [start.gang.job_id for start in plan.starts] == ["large"]
    assert sorted(plan.stops) == ["speech", "vision"]
    assert sorted(plan.starts[0].stops) == ["speech", "vision"]


def test_the_second_gang_of_a_tenant_needs_the_room_that_a_limit_leaves_to_the_first() -> None:
    ledger = Ledger([NodeShape(8, 8)])
    victim = Victim("runs", (ledger.take(0, Demand(1000), 2),), None, "vision")
    headroom = Headroom([Tenant("vision", limit_gpu_milli=4000)], {"vision": (2000, 0)})
    gangs = [Gang(f"g{number}", (Part("worker", 2, Demand(1000)),), tenant="vision") for number in range(2)]
    plan = place(gangs, ledger, FirstFit(), rng(), victims=[victim], headroom=headroom)
    assert [(start.gang.job_id, start.needs_room) for start in plan.starts] == [("g0", False), ("g1", True)]
    assert plan.stops == ("runs",)


def test_a_policy_is_told_of_jobs_that_stay_and_of_those_that_make_room_already() -> None:
    told: list[set[str]] = []

    class Asked(Lender):
        def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: object) -> None:
            told.append(set(fixed))  # type: ignore[call-overload]  # a collection of ids

    ledger = Ledger([NodeShape(4, 8)])
    jobs = {}
    for name in ("stays", "goes"):
        held = (ledger.take(0, Demand(1000), 2),)
        jobs[name] = RunningJob(one_gang(name, held, "vision"), held, 0.0)
    victim = Victim("goes", jobs["goes"].holdings, None, "vision")
    headroom = Headroom([Tenant("vision", limit_gpu_milli=6000)], {"vision": (4000, 0)})
    session = PlacementSession(ledger, Asked(), rng(), [victim], headroom, None, Shown(jobs))
    session.staying = frozenset({"stays"})
    for tenant in ("vision", ""):
        assert isinstance(
            session.place(Gang(f"for-{tenant}", (Part("worker", 3, Demand(1000)),), tenant=tenant)), Refusal
        )
    assert told == [{"stays", "goes"}, {"stays"}]
