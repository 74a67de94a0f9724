from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import picture, replicas_of, rng, tables, take_one
from cotenant.core.capacity.ledger import Holding, Ledger, Offer, Overcommitted, Share
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.job_table import Capacity, JobRow, Jobs, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.protocols import Order, PlacementPolicy, Sizing
from cotenant.core.scheduling.admission import FairShare
from cotenant.core.scheduling.cycle import Choice, InvalidOffer, Plan, Rules, Victim, choose, gang_of, place, take
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.count import Count
from cotenant.policies.first_fit import FirstFit

NOW = 10_000.0
placements: st.SearchStrategy[PlacementPolicy] = st.sampled_from([Count(), FirstFit(), Consolidate()])


@dataclass
class Ranked:
    """A queue policy with a given answer."""

    name: str = "ranked"
    api_version: int = 1
    preemptive: bool = True
    strict: bool = False
    running_first: bool = False

    def order(self, jobs: Jobs, now: float) -> Order:
        raise NotImplementedError


@st.composite
def orders(draw: st.DrawFn, count: int) -> Order:
    levels = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    scores = draw(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=count, max_size=count))
    return Order(np.array(levels, dtype=np.int64), np.array(scores, dtype=np.float64))


def test_a_share_is_taken_on_the_gpu_that_is_offered() -> None:
    ledger = Ledger([NodeShape(2, 8, shareable=True)])
    gang = Gang("a", (Part("worker", 1, Demand(300)),))
    assert take(ledger, gang, (Share(0, 0, 1, (1,)),))[0].shares == ((1, 300),)


@given(st.data(), tables(), st.booleans())
def test_jobs_rank_by_priority_level_running_score_arrival_and_sequence(
    data: st.DataObject, table: JobTable, running_first: bool
) -> None:
    jobs = table.jobs(NOW)
    order = data.draw(orders(len(jobs)))

    def key(row: int) -> tuple[float, ...]:
        runs = bool(running_first and jobs.running[row])
        return -jobs.priority[row], order.level[row], not runs, order.score[row], jobs.arrival_seconds[row], row

    assert rank(jobs, order, running_first=running_first).tolist() == sorted(range(len(jobs)), key=key)


policies = st.builds(Ranked, preemptive=st.booleans(), strict=st.booleans(), running_first=st.booleans())
capacities = st.builds(
    Capacity, st.sampled_from([0, 2000, 5500, 16_000]), st.integers(0, 40), st.integers(0, 20), st.integers(0, 20)
)


@given(st.data(), tables(), policies, capacities, st.sampled_from([0.0, 500.0]))
def test_the_choice_agrees_with_a_walk_through_the_order(
    data: st.DataObject, table: JobTable, policy: Ranked, capacity: Capacity, run_seconds_min: float
) -> None:
    jobs = table.jobs(NOW)
    order = data.draw(orders(len(jobs)))
    choice = choose(jobs, policy, order, capacity, now=NOW, rules=Rules(run_seconds_min=run_seconds_min))
    ranked = rank(jobs, order, running_first=policy.running_first).tolist()
    waiting = [row for row in ranked if not jobs.running[row]]
    assert choice.ranked.tolist() == (ranked if policy.preemptive else waiting)
    if not policy.preemptive:
        assert (choice.starts.tolist(), choice.victims.tolist(), choice.outranked.tolist()) == (waiting, [], [])
        return
    selected = walk(jobs, ranked, capacity, run_seconds_min, strict=policy.strict)
    assert choice.starts.tolist() == [row for row in waiting if row in selected]
    assert choice.outranked.tolist() == [row for row in waiting if row not in selected]
    unwanted = [row for row in reversed(ranked) if jobs.running[row] and row not in selected]
    first = min(map(ranked.index, choice.starts.tolist()), default=len(ranked))
    in_the_way = [
        row
        for row in reversed(ranked[first:])
        if jobs.running[row] and row in selected and may_stop(jobs, row, run_seconds_min)
    ]
    assert choice.victims.tolist() == ([*unwanted, *in_the_way] if len(choice.starts) else [])
    for row, ahead in zip(choice.victims.tolist(), choice.ahead().tolist(), strict=True):
        assert ahead == sum(ranked.index(start) < ranked.index(row) for start in choice.starts.tolist())


def may_stop(jobs: Jobs, row: int, run_seconds_min: float) -> bool:
    return bool(jobs.preemptible[row] and NOW - jobs.running_since[row] >= run_seconds_min)


def walk(jobs: Jobs, ranked: list[int], capacity: Capacity, run_seconds_min: float, *, strict: bool) -> set[int]:
    """Choose the slow way: what may not be preempted first, then job by job."""

    def needs(row: int) -> list[int]:
        return [int(column[row]) for column in jobs.needs]

    selected = {row for row in ranked if jobs.running[row] and not may_stop(jobs, row, run_seconds_min)}
    left = list(capacity)
    left = [max(0, have - sum(needs(row)[kind] for row in selected)) for kind, have in enumerate(left)]
    for row in [row for row in ranked if row not in selected]:
        if all(need <= have for need, have in zip(needs(row), left, strict=True)):
            selected.add(row)
            left = [have - need for need, have in zip(needs(row), left, strict=True)]
        elif strict:
            break
    return selected


@pytest.mark.parametrize("fair_share", FairShare)
@given(st.lists(st.booleans(), min_size=2, max_size=8), st.data())
def test_of_the_jobs_behind_a_start_the_last_in_the_policys_order_makes_room_first(
    fair_share: FairShare, runs: list[bool], data: st.DataObject
) -> None:
    """There is room for all by counting, so whatever makes room does so for a gang that finds it in fragments."""
    table = JobTable()
    for number, running in enumerate(runs):
        table.add(JobRow(f"job{number}", 0.0, sequence=number, gpu_milli=1000, tenant=number % 2))
        if running:
            table.start(f"job{number}", NOW - 10)
    jobs = table.jobs(NOW)
    scores = np.array(data.draw(st.permutations(range(len(runs)))), dtype=np.float64)
    order = Order(np.zeros(len(runs), dtype=np.int64), scores)
    choice = choose(jobs, Ranked(), order, Capacity(64_000), now=NOW, rules=Rules(fair_share=fair_share))
    ranked = np.argsort(scores).tolist()
    behind = ranked[ranked.index(choice.starts[0]) :] if len(choice.starts) else []
    assert choice.victims.tolist() == [row for row in reversed(behind) if jobs.running[row]]


def test_jobs_that_hold_more_than_there_is_cost_cpu_jobs_nothing() -> None:
    """A node was cordoned: what runs on it is counted, what it has is not."""
    table = JobTable()
    table.add(JobRow("pinned", 0.0, 0, gpu_milli=8000, cores=2, preemptible=False))
    table.add(JobRow("cpu", 1.0, 1, cores=2))
    for job_id in table.ids:
        table.start(job_id, 2.0)
    jobs = table.jobs(NOW)
    order = Order(np.zeros(2, dtype=np.int64), np.zeros(2))
    assert choose(jobs, Ranked(), order, Capacity(4000, 8, 0), now=NOW).victims.tolist() == []


@given(st.data(), tables(), st.sampled_from([0.0, 900.0]))
def test_long_waiting_gangs_go_before_later_equals(data: st.DataObject, table: JobTable, after_seconds: float) -> None:
    jobs = table.jobs(NOW)
    order, capacity = data.draw(orders(len(jobs))), Capacity(16_000, 40, 20)
    policy, rules = Ranked(preemptive=False), Rules(reserve_after_seconds=after_seconds)
    plain = choose(jobs, policy, order, capacity, now=NOW).starts.tolist()
    starts = choose(jobs, policy, order, capacity, now=NOW, rules=rules).starts.tolist()
    assert sorted(starts) == sorted(plain)
    assert jobs.priority[starts].tolist() == jobs.priority[plain].tolist()
    gangs = [row for row in plain if jobs.replicas[row] > 1 or jobs.gpu_milli[row] > 1000]
    starving = [row for row in gangs if NOW - jobs.waiting_since[row] >= after_seconds]
    chosen = sorted(starving, key=lambda row: (jobs.waiting_since[row], jobs.sequence[row]))[: rules.reserving.tries]
    assert [row for row in starts if row not in chosen] == [row for row in plain if row not in chosen]
    for at in chosen:
        passed = [row for row in starts[: starts.index(at)] if jobs.priority[row] == jobs.priority[at]]
        assert all(jobs.waiting_since[row] <= jobs.waiting_since[at] for row in passed)


@dataclass
class Scene:
    """A cluster on which some jobs run that may have to go, some leave, and some gangs want in."""

    ledger: Ledger
    gangs: list[Gang]
    victims: list[Victim]
    leaving: list[Holding]

    def plan(self, policy: PlacementPolicy, *, strict: bool = False, seed: int = 0) -> Plan:
        return place(
            self.gangs,
            self.ledger,
            policy,
            rng(seed),
            victims=self.victims,
            leaving=self.leaving,
            strict=strict,
        )


needs = st.builds(
    Demand, gpu_milli=st.sampled_from([1000, 1000, 2000, 4000, 0, 500]), cores=st.sampled_from([0, 1, 1, 4])
)
wanted = st.lists(st.builds(Part, st.just("worker"), st.sampled_from([1, 1, 2, 4, 6]), needs), min_size=1, max_size=2)
attempts = st.tuples(
    st.sampled_from(["victim", "victim", "leaves", "stays"]), st.integers(0, 2), needs, st.integers(1, 4)
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """A cluster that is nearly full, and gangs of which most could run if it were not."""
    ledger = Ledger([NodeShape(8, 16), NodeShape(4, 16, shareable=True), NodeShape(4, 8)])
    gangs = [Gang(f"job{n}", tuple(parts)) for n, parts in enumerate(draw(st.lists(wanted, min_size=1, max_size=6)))]
    running: list[tuple[Holding, ...]] = []
    leaving: list[Holding] = []
    for role, node, demand, replicas in draw(st.lists(attempts, min_size=3, max_size=10)):
        held = tuple(take_one(ledger, (node + beside) % 3, demand) for beside in range(replicas))
        holdings = tuple(holding for holding in held if holding is not None)
        if role == "victim" and holdings:
            running.append(holdings)
        leaving += holdings if role == "leaves" else ()
    ahead = draw(st.lists(st.integers(0, len(gangs)), min_size=len(running), max_size=len(running)))
    victims = [Victim(f"victim{n}", running[n], place) for n, place in enumerate(ahead)]
    ledger.open[draw(st.sampled_from([[], [], [0], [1, 2]]))] = False
    return Scene(ledger, gangs, victims, leaving)


@given(scenes(), placements, st.booleans())
def test_a_plan_is_whole_and_true_and_leaves_the_ledger_as_it_was(
    scene: Scene, policy: PlacementPolicy, strict: bool
) -> None:
    before = picture(scene.ledger)
    plan = scene.plan(policy, strict=strict)
    assert picture(scene.ledger) == before
    started = [start.gang.job_id for start in plan.starts]
    assert sorted([*started, *plan.refusals]) == sorted(gang.job_id for gang in scene.gangs)
    assert started == [gang.job_id for gang in scene.gangs if gang.job_id in started]
    for start in plan.starts:
        assert replicas_of(start.offer, start.gang) == [part.replicas for part in start.gang.parts]
        assert all(scene.ledger.open[share.node] for share in start.offer)


@given(scenes(), placements)
def test_what_needs_no_room_starts_at_once_and_all_after_the_stops(scene: Scene, policy: PlacementPolicy) -> None:
    plan, ledger = scene.plan(policy), scene.ledger
    with ledger.rolled_back():
        for start in plan.starts:
            if not start.needs_room:
                hold_all(ledger, start.holdings)
    with ledger.rolled_back():
        for holding in [*scene.leaving, *(held for gone in stopped(scene, plan) for held in gone.holdings)]:
            ledger.release(holding)
        for start in plan.starts:
            hold_all(ledger, start.holdings)
        for victim in stopped(scene, plan):
            with pytest.raises(Overcommitted):
                hold_all(ledger, victim.holdings)


def stopped(scene: Scene, plan: Plan) -> list[Victim]:
    return [victim for victim in scene.victims if victim.job_id in plan.stops]


def hold_all(ledger: Ledger, holdings: Sequence[Holding]) -> None:
    with ledger.transaction() as transaction:
        for holding in holdings:
            ledger.hold(holding)
            transaction.taken.append(holding)
        transaction.commit()


@given(scenes(), placements)
def test_no_job_makes_room_for_a_gang_that_it_outranks(scene: Scene, policy: PlacementPolicy) -> None:
    plan = scene.plan(policy)
    for victim in stopped(scene, plan):
        assert victim.ahead is not None
        outranking = {gang.job_id for gang in scene.gangs[: victim.ahead]}
        there = {holding.node for holding in victim.holdings}
        takers = [start for start in plan.starts if there & {share.node for share in start.offer}]
        assert outranking & {start.gang.job_id for start in takers}


@given(scenes(), placements)
def test_no_job_makes_room_if_free_resources_suffice(scene: Scene, policy: PlacementPolicy) -> None:
    free = place(scene.gangs, scene.ledger, policy, rng(), leaving=scene.leaving)
    if not free.refusals:
        assert scene.plan(policy).stops == ()


@given(scenes(), placements)
def test_in_a_strict_queue_no_job_passes_the_head(scene: Scene, policy: PlacementPolicy) -> None:
    plan = scene.plan(policy, strict=True)
    waits = [gang.job_id for gang in scene.gangs if gang.job_id in plan.refusals]
    heads = [job_id for job_id in waits if plan.refusals[job_id].code is not Code.NEVER_FITS]
    assert plan.blocked == bool(heads)
    if heads:
        after = [gang.job_id for gang in scene.gangs]
        behind = after[after.index(heads[0]) + 1 :]
        assert not set(behind) & {start.gang.job_id for start in plan.starts}
        assert {plan.refusals[job_id].code for job_id in behind} <= {Code.BEHIND}
        assert all(f"waits behind {heads[0]}" in plan.refusals[job_id].detail for job_id in behind)


@given(scenes(), placements, st.integers(0, 3))
def test_the_same_seed_gives_the_same_plan(scene: Scene, policy: PlacementPolicy, seed: int) -> None:
    assert scene.plan(policy, seed=seed) == scene.plan(policy, seed=seed)


@given(scenes(), placements)
def test_without_strictness_refused_gangs_do_not_affect_the_plan(scene: Scene, policy: PlacementPolicy) -> None:
    plan = replace(scene, victims=[]).plan(policy)
    kept = [gang for gang in scene.gangs if gang.job_id not in plan.refusals]
    assert replace(scene, gangs=kept, victims=[]).plan(policy).starts == plan.starts


def gang(job_id: str, gpus: int, cores: int = 0) -> Gang:
    return Gang(job_id, (Part("worker", gpus, Demand(1000, cores)),))


def running(ledger: Ledger, job_id: str, node: int, gpus: int, ahead: int | None = None) -> Victim:
    return Victim(job_id, (ledger.take(node, Demand(1000), gpus),), ahead)


def test_a_running_job_does_not_yield_to_one_that_it_outranks() -> None:
    """The head finds no empty node; jobs behind the running job must not take that job's place instead."""
    ledger = Ledger([NodeShape(4, 8), NodeShape(4, 8)])
    ledger.take(0, Demand(1000))
    ledger.take(1, Demand(1000))
    middle = running(ledger, "middle", 0, 3, ahead=1)
    gangs = [gang("head", 4), gang("last", 6)]
    assert place(gangs, ledger, Count(), rng(), victims=[middle]).stops == ("middle",)
    fussy = place(gangs, ledger, Consolidate(), rng(), victims=[middle])
    assert fussy.stops == ()
    assert set(fussy.refusals) == {"head", "last"}


def test_the_least_deserving_makes_room_and_as_few_as_suffice() -> None:
    ledger = Ledger([NodeShape(2, 8)] * 4)
    victims = [running(ledger, f"victim{node}", node, 2) for node in range(4)]
    plan = place([gang("new", 2)], ledger, FirstFit(), rng(), victims=victims)
    assert plan.stops == ("victim0",)
    assert [share.node for share in plan.starts[0].offer] == [0]
    assert plan.starts[0].needs_room


def test_three_of_four_make_room_where_three_suffice() -> None:
    ledger = Ledger([NodeShape(2, 8)] * 4)
    victims = [running(ledger, f"victim{node}", node, 2) for node in (3, 2, 1, 0)]
    plan = place([gang("new", 6)], ledger, FirstFit(), rng(), victims=victims)
    assert set(plan.stops) == {"victim3", "victim2", "victim1"}


def test_room_that_was_looked_at_but_not_used_is_not_free_for_the_next() -> None:
    ledger = Ledger([NodeShape(2, 8), NodeShape(4, 8), NodeShape(1, 8)])
    small, large = running(ledger, "small", 0, 2), running(ledger, "large", 1, 4)
    wide = Gang("wide", (Part("worker", 1, Demand(4000)),))
    plan = place([wide, gang("narrow", 1)], ledger, FirstFit(), rng(), victims=[small, large])
    assert plan.stops == ("large",)
    assert [share.node for start in plan.starts for share in start.offer] == [1, 2]


def test_a_victim_returns_to_room_that_is_left_over() -> None:
    """The first newcomer costs the small job its place; the second one then frees more than it needs."""
    ledger = Ledger([NodeShape(12, 24)])
    large, small = running(ledger, "large", 0, 8, ahead=2), running(ledger, "small", 0, 4, ahead=2)
    plan = place([gang("a", 1), gang("b", 4)], ledger, Count(), rng(), victims=[small, large])
    assert plan.stops == ("large",)


def test_the_room_of_leavers_is_planned_with_but_not_started_in() -> None:
    ledger = Ledger([NodeShape(2, 8)])
    leaving = ledger.take(0, Demand(1000), 2)
    plan = place([gang("a", 1), gang("b", 1)], ledger, Count(), rng(), leaving=[leaving])
    assert [(start.gang.job_id, start.needs_room) for start in plan.starts] == [("a", True), ("b", True)]
    assert plan.stops == ()


class Broken:
    """A policy that offers whatever it was made with."""

    name = "broken"
    api_version = 1

    def __init__(self, offer: Offer) -> None:
        self.offer = offer

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        return self.offer


@pytest.mark.parametrize(
    ("offer", "error"),
    [
        ((Share(0, 0, 1),), InvalidOffer),
        ((Share(0, 0, 2), Share(0, 0, 2)), InvalidOffer),
        ((), InvalidOffer),
        ((Share(0, 0, 3),), Overcommitted),
    ],
)
def test_a_broken_policy_is_caught_and_the_ledger_survives(offer: Offer, error: type[Exception]) -> None:
    ledger = Ledger([NodeShape(2, 8)])
    victim = running(ledger, "victim", 0, 1)
    before = picture(ledger)
    with pytest.raises(error):
        place([gang("new", 3)], ledger, Broken(offer), rng(), victims=[victim])
    assert picture(ledger) == before


def test_taking_an_offer_takes_all_of_it_or_nothing() -> None:
    ledger = Ledger([NodeShape(2, 8), NodeShape(0, 8)])
    with pytest.raises(Overcommitted):
        take(ledger, gang("a", 3), (Share(0, 0, 2), Share(1, 0, 1)))
    assert ledger.free_gpus.tolist() == [2, 0]


def test_a_job_that_can_never_fit_does_not_head_a_strict_queue() -> None:
    ledger = Ledger([NodeShape(2, 8)])
    plan = place([gang("huge", 9), gang("small", 1)], ledger, Count(), rng(), strict=True)
    assert [start.gang.job_id for start in plan.starts] == ["small"]
    assert plan.refusals["huge"].code is Code.NEVER_FITS


class FixedCores:
    name = "fixed"
    api_version = 1

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        return Sizing(tuple(3 + number for number, _ in enumerate(spec.roles)), "because")


def test_a_gang_has_the_cores_that_the_allocator_gave() -> None:
    spec = JobSpec(
        roles=(Role("worker", 2, Request(1000, None, memory_bytes=7, gpu_type="T4")), Role("ps", 1, Request()))
    )
    made = gang_of("job", spec, UNKNOWN, FixedCores(), [])
    assert made.parts == (
        Part("worker", 2, Demand(1000, 3, memory_bytes=7, gpu_type="T4")),
        Part("ps", 1, Demand(0, 4, memory_bytes=0, gpu_type="")),
    )
    assert (made.sizing, made.cores, made.gpu_milli) == ("because", 10, 2000)


def test_a_choice_without_victims_has_none_ahead() -> None:
    rows = np.arange(3)
    assert Choice(rows, rows, rows[:0], rows[:0], rows[:0]).ahead().tolist() == []


@pytest.mark.parametrize(("gpus", "starts"), [(4, ["waits"]), (2, [])])
def test_a_job_is_not_kept_out_by_smaller_ones_that_only_borrow(gpus: int, starts: list[str]) -> None:
    """Placement takes back what they borrowed; a job that is no larger than a borrower has nothing lent to others."""
    table = JobTable()
    for number, (name, size) in enumerate([("first", 2), ("second", 2), ("waits", gpus)]):
        table.add(JobRow(name, float(number), number, gpu_milli=1000 * size))
        if name != "waits":
            table.start(name, NOW - 10.0, borrows=True)
    jobs = table.jobs(NOW)
    order = Order(np.zeros(3, dtype=np.int64), jobs.arrival_seconds.copy())
    choice = choose(jobs, Ranked(preemptive=True), order, Capacity(4000), now=NOW)
    assert [table.ids[row] for row in choice.starts.tolist()] == starts
