"""Quotas, limits, and which jobs may be stopped: compared with slow walks through the order."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.core.scheduling.test_cycle import (
    NOW,
    Ranked,
    Scene,
    capacities,
    orders,
    placements,
    policies,
    scenes,
)

from cotenant.conformance.worlds import rng, tables, take_one
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job_table import Capacity, JobRow, Jobs, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, Wait
from cotenant.core.model.tenancy import UNLIMITED, Headroom, Tenancy, Tenant, check_hierarchy, check_tenant
from cotenant.core.placement.gang_allocation import cores_of, gpu_milli_of
from cotenant.core.policy.protocols import Order, PlacementPolicy
from cotenant.core.scheduling.admission import Preemption, Rules, beyond_share, choose, stoppable
from cotenant.core.scheduling.cycle import Plan, Victim, place
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.count import Count

amounts = st.none() | st.sampled_from([0, 1000, 2500, 9000])
cores = st.none() | st.integers(0, 12)


@st.composite
def families(draw: st.DrawFn) -> Tenancy:
    """Up to four tenants in a random hierarchy; no tenant guarantees more than it is guaranteed itself."""
    tenants: list[Tenant] = []
    for number in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(["", *(tenant.id for tenant in tenants)]))
        quotas, limits = (draw(amounts), draw(cores)), (draw(amounts), draw(cores))
        tenant = Tenant(f"t{number}", *quotas, *limits, parent=parent)
        if list(check_hierarchy([*tenants, tenant])):
            tenant = dataclasses.replace(tenant, quota_gpu_milli=None, quota_cores=None)
        tenants.append(tenant)
    return Tenancy(draw(st.permutations(tenants)))


tenancies = families()
rules_of_stopping = st.builds(Rules, st.sampled_from(Preemption), st.sampled_from([0.0, 500.0]), reclaim=st.booleans())


@st.composite
def pictures(draw: st.DrawFn) -> Jobs:
    """Jobs of four tenants, the last of which are unknown."""
    table: JobTable = draw(tables())
    for job_id in table.ids:
        table.update(job_id, tenant=draw(st.integers(0, 3)))
    return table.jobs(NOW)


def entitled_slowly(jobs: Jobs, ranked: list[int], first: list[int], tenancy: Tenancy) -> set[int]:
    """Walk the order, job by job."""
    within: set[int] = set()
    order = [*(row for row in ranked if row in first), *(row for row in ranked if row not in first)]
    for height in range(5):
        for row in order:
            for tenant in family_of(tenancy, int(jobs.tenant[row])):
                if row in within or height_of(tenancy, tenant) != height:
                    continue
                held = [other for other in within if tenant in family_of(tenancy, int(jobs.tenant[other]))]
                milli = int(jobs.gpu_milli[row]) + sum(int(jobs.gpu_milli[other]) for other in held)
                many = int(jobs.cores[row]) + sum(int(jobs.cores[other]) for other in held)
                gpus_fit = milli <= (tenant.quota_gpu_milli or 0)
                cores_fit = tenant.quota_cores is None or many <= tenant.quota_cores
                if gpus_fit and cores_fit and (jobs.gpu_milli[row] or tenant.quota_cores is not None):
                    within.add(row)
    return within


def height_of(tenancy: Tenancy, tenant: Tenant) -> int:
    """Count the steps down to the lowest that belongs to a tenant."""
    children = [child for child in tenancy.tenants if child.parent and child.parent == tenant.id]
    return max((1 + height_of(tenancy, child) for child in children), default=0)


def family_of(tenancy: Tenancy, number: int) -> list[Tenant]:
    """Give a tenant and those that it belongs to."""
    if number >= len(tenancy.tenants):
        return [Tenant("")]
    known = {tenant.id: tenant for tenant in tenancy.tenants}
    chain = [tenancy.tenants[number]]
    while chain[-1].parent:
        chain.append(known[chain[-1].parent])
    return chain


@given(st.data(), pictures(), tenancies, policies, rules_of_stopping, capacities)
def test_entitled_jobs_come_first_and_else_the_order_is_the_policys(
    data: st.DataObject, jobs: Jobs, tenancy: Tenancy, policy: Ranked, rules: Rules, capacity: object
) -> None:
    order = data.draw(orders(len(jobs)))
    choice = choose(jobs, policy, order, capacity, now=NOW, rules=rules, tenancy=tenancy)  # type: ignore[arg-type]  # a capacity
    plain = rank(jobs, order, running_first=policy.running_first).tolist()
    if not tenancy.guarantees:
        assert choice.entitled is None
        waiting = [row for row in plain if not jobs.running[row]]
        stops = rules.enforces(policy) or rules.claims(policy, tenancy)
        assert choice.ranked.tolist() == (plain if stops else waiting)
        return
    stays = rules.protects(jobs, NOW) if policy.preemptive and rules.preemption != "never" else jobs.running
    entitled = entitled_slowly(jobs, plain, np.flatnonzero(stays).tolist(), tenancy)
    assert choice.ranked.tolist() == [row for row in plain if row in entitled] + [
        row for row in plain if row not in entitled
    ]
    beyond = beyond_share(jobs, policy, order, now=NOW, rules=rules, tenancy=tenancy)
    assert beyond is not None
    assert not any(beyond[row] and not tenancy.limits for row in entitled)


@given(st.data(), pictures(), tenancies, st.booleans(), rules_of_stopping, capacities)
def test_only_jobs_with_claimable_resources_may_be_stopped(
    data: st.DataObject, jobs: Jobs, tenancy: Tenancy, strict: bool, rules: Rules, capacity: object
) -> None:
    order = data.draw(orders(len(jobs)))
    policy = Ranked(preemptive=False, strict=strict)
    choice = choose(jobs, policy, order, capacity, now=NOW, rules=rules, tenancy=tenancy)  # type: ignore[arg-type]  # a capacity
    borrows = np.zeros(len(jobs), dtype=np.bool_) if choice.entitled is None else ~choice.entitled

    def may(start: int, victim: int) -> bool:
        if rules.preemption is Preemption.NEVER or rules.protects(jobs, NOW)[victim]:
            return False
        reclaimed = rules.reclaim and borrows[victim] and not borrows[start]
        outranked = jobs.priority[start] > jobs.priority[victim] and not (borrows[start] and not borrows[victim])
        return bool(reclaimed or (rules.preemption is Preemption.PRIORITY and outranked))

    ahead = dict(zip(choice.victims.tolist(), choice.ahead().tolist(), strict=True))
    starts = choice.starts.tolist()
    for victim in np.flatnonzero(jobs.running).tolist():
        claims = [may(start, victim) for start in starts]
        first_ones = claims.index(False) if False in claims else len(claims)
        assert ahead.get(victim, 0) == first_ones
    assert not any(may(one, other) and may(other, one) for one in range(len(jobs)) for other in range(len(jobs)))


@given(st.data(), pictures(), tenancies, policies, rules_of_stopping, capacities)
def test_what_counting_lets_start_is_within_every_limit(
    data: st.DataObject, jobs: Jobs, tenancy: Tenancy, policy: Ranked, rules: Rules, capacity: object
) -> None:
    order = data.draw(orders(len(jobs)))
    choice = choose(jobs, policy, order, capacity, now=NOW, rules=rules, tenancy=tenancy)  # type: ignore[arg-type]  # a capacity
    if not rules.enforces(policy):
        return
    stays = np.ones(len(jobs), dtype=np.bool_)
    stays[choice.victims] = False
    for tenant in tenancy.tenants:
        inside = np.array([tenant in family_of(tenancy, int(one)) for one in jobs.tenant], dtype=np.bool_)
        starts = [row for row in choice.starts.tolist() if inside[row]]
        fixed = np.flatnonzero(rules.protects(jobs, NOW) & inside).tolist()
        for limit, need in ((tenant.limit_gpu_milli, jobs.gpu_milli), (tenant.limit_cores, jobs.cores)):
            if limit is not None and any(need[row] for row in starts):
                assert sum(int(need[row]) for row in [*starts, *fixed]) <= limit
    for row in choice.over_limit.tolist():
        assert not jobs.running[row]


@given(st.data(), pictures(), tenancies, st.booleans(), st.sampled_from([0.0, 500.0]), capacities)
def test_under_limits_the_choice_agrees_with_a_walk_through_the_order(
    data: st.DataObject, jobs: Jobs, tenancy: Tenancy, strict: bool, run_seconds_min: float, capacity: Capacity
) -> None:
    """A limit holds back no other tenant; what does not fit holds back everything behind it in a strict queue."""
    order, rules = data.draw(orders(len(jobs))), Rules(run_seconds_min=run_seconds_min)
    tenancy = Tenancy([*tenancy.tenants, Tenant("limited", limit_gpu_milli=64_000)])
    choice = choose(jobs, Ranked(strict=strict), order, capacity, now=NOW, rules=rules, tenancy=tenancy)
    assert choice.selected is not None
    stays = rules.protects(jobs, NOW)
    selected = set(np.flatnonzero(stays).tolist())
    left = [max(0, have - int(column[stays].sum())) for column, have in zip(jobs.needs, capacity, strict=True)]
    for row in choice.ranked.tolist():
        if row in selected or exceeds_a_limit(jobs, row, selected, tenancy):
            continue
        needs = [int(column[row]) for column in jobs.needs]
        if all(need <= have for need, have in zip(needs, left, strict=True)):
            selected.add(row)
            left = [have - need for need, have in zip(needs, left, strict=True)]
        elif strict:
            break
    assert set(np.flatnonzero(choice.selected).tolist()) == selected


def exceeds_a_limit(jobs: Jobs, row: int, selected: set[int], tenancy: Tenancy) -> bool:
    for tenant in family_of(tenancy, int(jobs.tenant[row])):
        members = [other for other in selected if tenant in family_of(tenancy, int(jobs.tenant[other]))]
        for limit, need in ((tenant.limit_gpu_milli, jobs.gpu_milli), (tenant.limit_cores, jobs.cores)):
            if limit is not None and need[row] and need[row] + sum(int(need[other]) for other in members) > limit:
                return True
    return False


@given(st.data(), pictures(), policies, rules_of_stopping, capacities)
def test_a_job_that_may_be_stopped_later_yields_to_all_that_wait_before_it_the_last_first(
    data: st.DataObject, jobs: Jobs, policy: Ranked, rules: Rules, capacity: Capacity
) -> None:
    choice = choose(jobs, policy, data.draw(orders(len(jobs))), capacity, now=NOW, rules=rules)
    if not rules.enforces(policy):
        return
    ranked, stays = choice.ranked.tolist(), rules.protects(jobs, NOW)
    before = {row: sum(not jobs.running[other] for other in ranked[:place]) for place, row in enumerate(ranked)}
    may_stop = [(row, before[row]) for row in reversed(ranked) if jobs.running[row] and not stays[row] and before[row]]
    assert stoppable(jobs, choice, rules, policy, NOW) == may_stop


@given(pictures(), tenancies)
def test_a_walk_allows_a_row_as_long_as_every_limit_that_applies_to_it(jobs: Jobs, tenancy: Tenancy) -> None:
    walk, taken = tenancy.walk(jobs, np.zeros(len(jobs), dtype=np.bool_)), set[int]()
    for row in range(len(jobs)):
        need = int(jobs.gpu_milli[row]), int(jobs.cores[row])
        assert walk.allows(row, *need) != exceeds_a_limit(jobs, row, taken, tenancy)
        if walk.allows(row, *need):
            walk.take(row, *need)
            taken.add(row)


@given(st.data(), pictures(), policies, capacities)
def test_tenants_that_are_promised_nothing_change_nothing(
    data: st.DataObject, jobs: Jobs, policy: Ranked, capacity: object
) -> None:
    order = data.draw(orders(len(jobs)))
    without = choose(jobs, policy, order, capacity, now=NOW)  # type: ignore[arg-type]  # a capacity
    weighed = Tenancy([Tenant("a", weight=3.0), Tenant("b")])
    with_them = choose(jobs, policy, order, capacity, now=NOW, tenancy=weighed)  # type: ignore[arg-type]  # a capacity
    for field in dataclasses.fields(without):
        np.testing.assert_equal(_plain(getattr(without, field.name)), _plain(getattr(with_them, field.name)))


def _plain(value: object) -> object:
    """Return a decision in a form that numpy can compare."""
    told = value() if isinstance(value, partial) else value  # counted only on access
    return dataclasses.asdict(told) if isinstance(told, Outrankers) else told


def protected_for_a_second() -> Jobs:
    """Return one running job that is protected for one more second, with a minimum run time of 500 s."""
    table = JobTable()
    table.add(JobRow("a", 0.0, sequence=0))
    table.start("a", NOW - 499.0)
    return table.jobs(NOW)


@given(pictures(), rules_of_stopping)
@example(protected_for_a_second(), Rules(Preemption.NEVER, 500.0))
@example(protected_for_a_second(), Rules(Preemption.PRIORITY, 500.0))
def test_a_decision_holds_no_longer_than_the_first_protection(jobs: Jobs, rules: Rules) -> None:
    order = Order(np.zeros(len(jobs), dtype=np.int64), np.zeros(len(jobs)), valid_seconds=450.0)
    valid = rules.valid_seconds(jobs, order, NOW)
    assert 0 < valid <= 450.0
    if rules.preemption is Preemption.NEVER:
        assert valid == 450.0, "nobody is stopped, protected or not"
        return
    before = rules.protects(jobs, NOW)
    assert (rules.protects(jobs, NOW + valid * 0.999) == before).all()
    if valid < 450.0:
        assert rules.protects(jobs, NOW + valid + 0.001).sum() < before.sum()


@given(st.data(), pictures(), tenancies, policies, rules_of_stopping, capacities)
def test_a_decision_is_the_same_for_as_long_as_it_holds(
    data: st.DataObject, jobs: Jobs, tenancy: Tenancy, policy: Ranked, rules: Rules, capacity: object
) -> None:
    order = data.draw(orders(len(jobs)))
    soon = NOW + 0.999 * min(450.0, rules.valid_seconds(jobs, order, NOW))
    now, then = (
        choose(jobs, policy, order, capacity, now=at, rules=rules, tenancy=tenancy)  # type: ignore[arg-type]  # a capacity
        for at in (NOW, soon)
    )
    for field in dataclasses.fields(now):
        np.testing.assert_equal(_plain(getattr(now, field.name)), _plain(getattr(then, field.name)))


def test_a_refusal_for_a_limit_has_the_numbers() -> None:
    room = Headroom([Tenant("vision", limit_gpu_milli=8000, limit_cores=10)], {"vision": (6000, 9)})
    refusal = room.refuse("vision", 4000, 4)
    assert refusal is not None
    assert (refusal.code, refusal.wait) == (Code.QUOTA, Wait.FAIR_SHARE)
    assert refusal.detail == "tenant vision would hold 10 GPUs of at most 8 and 13 cores of at most 10"
    assert refusal.numbers["held_gpu_milli"] == 6000
    assert refusal.numbers["wanted_gpu_milli"] == 4000
    assert refusal.numbers["limit_gpu_milli"] == 8000


def test_a_tenant_over_one_limit_may_still_take_unlimited_resources() -> None:
    room = Headroom([Tenant("vision", limit_gpu_milli=4000)], {"vision": (6000, 9)})
    assert room.refuse("vision", 0, 64) is None


@pytest.mark.parametrize("code", [Code.SUSPENDED, Code.BACK_OFF, Code.NEVER_FITS])
def test_what_no_share_would_change_is_no_wait_for_a_fair_share(code: Code) -> None:
    assert Refusal(code, "", over_share=True).wait is Refusal(code, "").wait


@pytest.mark.parametrize("code", [Code.CAPACITY, Code.FRAGMENTED, Code.OUTRANKED, Code.BEHIND, Code.NO_NODES])
def test_a_job_beyond_its_share_waits_for_fair_share(code: Code) -> None:
    assert Refusal(code, "", over_share=True).wait is Wait.FAIR_SHARE


def test_every_bad_field_of_a_tenant_is_named() -> None:
    bad = check_tenant(Tenant("", quota_gpu_milli=9, limit_gpu_milli=8, limit_cores=-1, weight=0.0))
    assert sorted(one.field for one in bad) == ["id", "limit_cores", "quota_gpu_milli", "weight"]


@pytest.mark.parametrize(
    ("field", "valid", "invalid"),
    [
        *((name, [None, 0, UNLIMITED - 1], [-1, UNLIMITED]) for name in ("quota_gpu_milli", "quota_cores")),
        *((name, [None, 0, UNLIMITED - 1], [-1, UNLIMITED]) for name in ("limit_gpu_milli", "limit_cores")),
        ("weight", [math.nextafter(0, 1), 1e300], [0.0, math.inf, math.nan]),
    ],
)
def test_an_amount_of_a_tenant_may_be_as_small_and_as_large_as_its_bounds(
    field: str, valid: list[float | None], invalid: list[float]
) -> None:
    for value in valid:
        assert not list(check_tenant(dataclasses.replace(Tenant("a"), **{field: value})))  # type: ignore[arg-type]  # by name
    for value in invalid:
        assert [one.field for one in check_tenant(dataclasses.replace(Tenant("a"), **{field: value}))] == [field]  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("what", ["gpu_milli", "cores"])
def test_a_guarantee_may_be_as_much_as_the_limit_and_as_the_parent_has(what: str) -> None:
    for more in (0, 1):
        figures = {f"quota_{what}": 5 + more, f"limit_{what}": 5}
        found = [one.field for one in check_tenant(Tenant("a", **figures))]  # type: ignore[arg-type]  # by name
        assert found == [f"quota_{what}"] * more
        both = [Tenant(name, **{f"quota_{what}": 5 + more * (name == "b")}, parent="dept") for name in ("a", "b")]
        wrong = [(one, bad.field) for one, bad in check_hierarchy([Tenant("dept", **{f"quota_{what}": 10}), *both])]  # type: ignore[arg-type]  # by name
        assert wrong == [("dept", f"quota_{what}")] * more


def test_a_tenant_at_its_limit_makes_room_for_itself_although_there_is_some() -> None:
    ledger = Ledger([NodeShape(gpus=8, cores=24)])
    mine = take_one(ledger, 0, Demand(gpu_milli=4000))
    assert mine is not None
    part = Part("worker", 1, Demand(gpu_milli=4000))
    gang = Gang("new", (part,), tenant="vision")
    room = Headroom([Tenant("vision", limit_gpu_milli=4000)], {"vision": (4000, 0)})

    def plan(*victims: Victim) -> Plan:
        return place([gang], ledger, Count(), rng(), victims=victims, headroom=room.copy())

    assert plan().refusals["new"].code is Code.QUOTA
    assert plan(Victim("other", (), tenant="speech")).refusals["new"].code is Code.QUOTA
    made = plan(Victim("old", (mine,), tenant="vision"))
    assert made.stops == ("old",)
    assert [start.needs_room for start in made.starts] == [True]
    assert ledger.free_gpus.tolist() == [4]


def test_what_a_stopped_victim_held_no_longer_counts_toward_its_tenants_limit() -> None:
    """Each gang replaces one victim, so the tenant stays at its limit."""
    ledger = Ledger([NodeShape(gpus=8, cores=24)])
    victims = [Victim(f"old{number}", (ledger.take(0, Demand(2000, 3)),), tenant="vision") for number in range(2)]
    gangs = [Gang(f"new{number}", (Part("worker", 1, Demand(2000, 3)),), tenant="vision") for number in range(2)]
    room = Headroom([Tenant("vision", limit_gpu_milli=4000, limit_cores=6)], {"vision": (4000, 6)})
    plan = place(gangs, ledger, Count(), rng(), victims=victims, headroom=room)
    assert plan.refusals == {}
    assert set(plan.stops) == {"old0", "old1"}
    assert room.held("vision") == (4000, 6)


@given(scenes(), placements, st.data())
def test_after_a_plan_each_tenant_holds_what_it_held_and_started_less_what_it_stopped(
    scene: Scene, policy: PlacementPolicy, data: st.DataObject
) -> None:
    names = st.sampled_from(["vision", "speech", "other"])
    gangs = [dataclasses.replace(gang, tenant=data.draw(names)) for gang in scene.gangs]
    victims = [dataclasses.replace(victim, tenant=data.draw(names)) for victim in scene.victims]
    tenants = [
        Tenant(one, limit_gpu_milli=data.draw(st.sampled_from([0, 4000, 64_000]))) for one in ("vision", "speech")
    ]
    held = {one.id: (0, 0) for one in tenants}
    for victim in victims:
        if victim.tenant in held:
            milli, many = held[victim.tenant]
            held[victim.tenant] = milli + gpu_milli_of(victim.holdings), many + cores_of(victim.holdings)
    room = Headroom(tenants, held)
    plan = place(gangs, scene.ledger, policy, rng(), victims=victims, leaving=scene.leaving, headroom=room)
    gone = [victim for victim in victims if victim.job_id in plan.stops]
    for name, (milli, many) in held.items():
        stopped = [holding for victim in gone if victim.tenant == name for holding in victim.holdings]
        started = [start.gang for start in plan.starts if start.gang.tenant == name]
        assert room.held(name) == (
            milli - gpu_milli_of(stopped) + sum(gang.gpu_milli for gang in started),
            many - cores_of(stopped) + sum(gang.cores for gang in started),
        )


def test_a_gang_over_its_limit_holds_back_no_other_gang_of_its_shape() -> None:
    ledger = Ledger([NodeShape(gpus=8, cores=24)])
    part = Part("worker", 1, Demand(gpu_milli=4000))
    gangs = [Gang("a", (part,), tenant="vision"), Gang("b", (part,), tenant="vision"), Gang("c", (part,))]
    room = Headroom([Tenant("vision", limit_gpu_milli=4000)])
    made = place(gangs, ledger, Count(), rng(), strict=True, headroom=room)
    assert [start.gang.job_id for start in made.starts] == ["a", "c"]
    assert {job_id: refusal.code for job_id, refusal in made.refusals.items()} == {"b": Code.QUOTA}
    assert room.held("vision") == (4000, 0)


def test_a_departments_guarantee_holds_what_its_groups_do_not_use() -> None:
    dept, asr = Tenant("dept", quota_gpu_milli=8000), Tenant("asr", quota_gpu_milli=4000, parent="dept")
    tenancy = Tenancy([dept, asr, Tenant("nlp", parent="dept")])
    table = JobTable()
    for number, (tenant, milli) in enumerate([(0, 9000), (2, 4000), (2, 4000), (1, 4000)]):
        table.add(JobRow(f"job{number}", 0, sequence=number, gpu_milli=milli, tenant=tenant))
    jobs, nobody = table.jobs(NOW), np.zeros(4, dtype=np.bool_)
    assert tenancy.entitled(jobs, np.arange(4), first=nobody).tolist() == [False, True, False, True]
    table.remove("job3")  # without asr's job its group's room is lent inside the department
    jobs = table.jobs(NOW)
    by_sequence = np.argsort(jobs.sequence)
    assert tenancy.entitled(jobs, by_sequence, first=nobody[:3])[by_sequence].tolist() == [False, True, True]


def test_a_departments_limit_applies_to_all_its_groups_and_is_named() -> None:
    tenants = [Tenant("dept", limit_gpu_milli=8000), Tenant("asr", parent="dept"), Tenant("nlp", 1000, parent="dept")]
    room = Headroom(tenants, {"asr": (6000, 0), "dept": (1000, 0)})
    assert room.allows("nlp", 1000, 0)
    refusal = room.refuse("nlp", 2000, 0)
    assert refusal is not None
    assert refusal.detail == "tenant dept, to which nlp belongs, would hold 9 GPUs of at most 8"
    room.take("nlp", 1000, 0)
    assert room.held("dept") == (8000, 0)
    assert not room.copy().allows("asr", 1000, 0)


def test_the_tenant_hierarchy_is_validated() -> None:
    wrong = [
        Tenant("a", parent="b"),
        Tenant("b", parent="a"),
        Tenant("c", parent="dep"),
        Tenant("dept", quota_gpu_milli=1000),
        Tenant("e", quota_gpu_milli=2000, parent="dept"),
    ]
    told = {(tenant, bad.field): bad.description for tenant, bad in check_hierarchy(wrong)}
    assert told == {
        ("a", "parent"): "a tenant cannot belong to itself: a → b → a",
        ("b", "parent"): "a tenant cannot belong to itself: b → a → b",
        ("c", "parent"): "dep is not a tenant; did you mean dept?",
        ("dept", "quota_gpu_milli"): "is 1000, less than the 2000 guaranteed to its child tenants",
    }


def test_a_tenant_without_a_quota_of_its_own_has_that_of_its_ancestors() -> None:
    tenancy = Tenancy([Tenant("lab", quota_gpu_milli=4000), Tenant("asr", parent="lab"), Tenant("shop")])
    table = JobTable()
    for number in range(4):
        table.add(JobRow(f"{number}", 0.0, number, gpu_milli=1000, tenant=number))
    jobs = table.jobs(NOW)
    assert tenancy.over_quota(jobs, np.zeros(4, dtype=np.bool_)).tolist() == [True, True, False, False]
    assert not tenancy.over_quota(jobs, np.ones(4, dtype=np.bool_)).any()


@pytest.mark.parametrize("preemption", Preemption)
def test_a_borrower_claims_nothing_from_another_for_a_reclaim_alone(preemption: Preemption) -> None:
    """The owner may claim what is lent; a borrower of higher priority only where priorities are enforced."""
    tenancy = Tenancy([Tenant("owner", quota_gpu_milli=4000), Tenant("guest", quota_gpu_milli=0)])
    table = JobTable()
    for job_id, tenant, priority in (("runs", 1, 0), ("owned", 0, 0), ("urgent", 1, 9)):
        table.add(JobRow(job_id, 0.0, len(table.ids), gpu_milli=4000, tenant=tenant, priority=priority))
    table.start("runs", 1.0)
    jobs = table.jobs(NOW)
    order = Order(np.zeros(3, dtype=np.int64), np.zeros(3))
    rules = Rules(preemption, 0.0, reclaim=True)
    choice = choose(jobs, Ranked(preemptive=False), order, Capacity(4000), now=NOW, rules=rules, tenancy=tenancy)
    claims = {Preemption.POLICY: [1], Preemption.PRIORITY: [2], Preemption.NEVER: []}[preemption]
    assert [table.ids[row] for row in choice.starts.tolist()] == ["owned", "urgent"]
    assert choice.ahead().tolist() == claims
