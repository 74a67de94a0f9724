"""Fair share: compared with progressive filling, one job at a time."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.core.model.test_tenancy import family_of, pictures, rules_of_stopping, tenancies
from tests.unit.core.scheduling.test_cycle import NOW, Ranked, capacities, orders, policies

from cotenant import plugins
from cotenant.conformance.worlds import tables
from cotenant.core.model.job_table import Capacity, JobRow, Jobs, JobTable
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.resources import KINDS
from cotenant.core.model.tenancy import NO_TENANTS, Tenancy, Tenant
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.admission import FairShare, Preemption, Rules, beyond_share, choose
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.order_explanation import Outrankers
from cotenant.core.scheduling.ordering import rank

FAIR = Rules(fair_share=FairShare.TENANTS)
BACKFILL = Ranked(preemptive=False)


def table_of(*jobs: tuple[int, int], running: int = 0) -> JobTable:
    """Make a table of jobs by tenant and GPUs, of which the first run."""
    table = JobTable()
    for number, (tenant, gpus) in enumerate(jobs):
        table.add(JobRow(f"{number}", number, sequence=number, gpu_milli=1000 * gpus, tenant=tenant))
        if number < running:
            table.start(f"{number}", NOW - 10)
    return table


def by_arrival(jobs: Jobs) -> Order:
    return Order(np.zeros(len(jobs), dtype=np.int64), jobs.arrival_seconds.copy())


def starts(table: JobTable, gpus: int, tenancy: Tenancy = NO_TENANTS, rules: Rules = FAIR) -> list[int]:
    jobs = table.jobs(NOW)
    choice = choose(jobs, BACKFILL, by_arrival(jobs), Capacity(1000 * gpus), now=NOW, rules=rules, tenancy=tenancy)
    return [int(row) for row in choice.starts]


def positions(table: JobTable, gpus: int, tenancy: Tenancy = NO_TENANTS) -> list[int]:
    jobs = table.jobs(NOW)
    choice = choose(jobs, BACKFILL, by_arrival(jobs), Capacity(1000 * gpus), now=NOW, rules=FAIR, tenancy=tenancy)
    return [int(row) for row in choice.ranked]


def test_a_tenant_with_slow_gpus_holds_less_than_their_number_and_goes_first() -> None:
    table = table_of((0, 4), (1, 4), (0, 1), (1, 1), running=2)
    assert starts(table, 9) == [2, 3]
    table.update("0", gpu_worth=1.5)
    table.update("1", gpu_worth=0.5)
    assert starts(table, 9) == [3, 2]


def test_attained_service_counts_by_what_the_gpus_were_worth() -> None:
    table = table_of((0, 2), running=1)
    table.update("0", gpu_worth=0.5)
    assert table.jobs(NOW).attained_gpu_seconds.tolist() == [10.0]
    table.stop("0", NOW)
    table.start("0", NOW)
    assert table.jobs(NOW + 3).attained_gpu_seconds.tolist() == [16.0], "its next GPUs are not like the last"
    table.attain("0", 10, gpu_worth=0.25)
    assert table.jobs(NOW + 3).attained_gpu_seconds.tolist() == [21.0]


def filled_slowly(
    jobs: Jobs, ranked: list[int], held: list[int], totals: list[int], tenancy: Tenancy, node: str | None
) -> list[int]:
    """Merge the jobs of those that belong to a tenant (None: of all), the child with the least share first."""
    families = {row: [tenant.id or f"#{jobs.tenant[row]}" for tenant in _family(jobs, tenancy, row)] for row in ranked}
    families |= {row: [tenant.id or f"#{jobs.tenant[row]}" for tenant in _family(jobs, tenancy, row)] for row in held}

    def child(row: int) -> str | None:
        path = families[row][::-1]
        if node is not None:
            if node not in path:
                return None
            path = path[path.index(node) + 1 :]
        return path[0] if path else "(own)"

    mine = [row for row in ranked if node is None or node in families[row]]
    names = list(dict.fromkeys(name for row in mine if (name := child(row))))
    queues = {
        name: [row for row in mine if child(row) == name]
        if name == "(own)" or name.startswith("#") or not any(tenant.parent == name for tenant in tenancy.tenants)
        else filled_slowly(jobs, mine, held, totals, tenancy, name)
        for name in names
    }
    weights = {tenant.id: tenant.weight for tenant in tenancy.tenants}
    given = {name: [row for row in held if child(row) == name] for name in names}
    columns = jobs.needs

    def share(name: str) -> float:
        sums = [sum(int(column[row]) for row in given[name]) for column in columns]
        return max((have / total for have, total in zip(sums, totals, strict=True) if total), default=0.0) / (
            weights.get(name, 1.0) if name != "(own)" else 1.0
        )

    merged: list[int] = []
    while any(queues.values()):
        name = min((one for one in names if queues[one]), key=lambda one: (share(one), ranked.index(queues[one][0])))
        row = queues[name].pop(0)
        given[name].append(row)
        merged.append(row)
    return merged


def _family(jobs: Jobs, tenancy: Tenancy, row: int) -> list[Tenant]:
    return family_of(tenancy, int(jobs.tenant[row]))


@st.composite
def weighted_families(draw: st.DrawFn) -> Tenancy:
    tenants: list[Tenant] = []
    for number in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(["", "", *(tenant.id for tenant in tenants)]))
        tenants.append(Tenant(f"t{number}", weight=draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])), parent=parent))
    return Tenancy(draw(st.permutations(tenants)))


@given(pictures(), weighted_families(), st.data())
def test_the_order_is_that_of_progressive_filling_at_each_level(
    jobs: Jobs, tenancy: Tenancy, data: st.DataObject
) -> None:
    """The slow twin has one level; of several, what holds is that each tenant's own order stays."""
    ranked = rank(jobs, data.draw(orders(len(jobs))), running_first=False)
    capacity = Capacity(8000, 24, 16)
    sharing = Sharing(jobs, capacity, tenancy)
    waiting = ranked[~jobs.running[ranked]]
    fair = sharing.interleave(waiting, jobs.running).tolist()
    totals = [total if column.any() else 0 for total, column in zip(Capacity(8000, 24, 16), jobs.needs, strict=True)]
    held = np.flatnonzero(jobs.running).tolist()
    if len(tenancy.tree(0)[0]) == 1:
        assert fair == filled_slowly(jobs, waiting.tolist(), held, totals, tenancy, None)
    for tenant in range(4):
        own = [row for row in waiting.tolist() if jobs.tenant[row] == tenant]
        assert [row for row in fair if jobs.tenant[row] == tenant] == own, "the policy orders the jobs of each tenant"
    assert sorted(fair) == sorted(waiting.tolist())


@given(pictures(), st.data(), policies, rules_of_stopping, capacities)
def test_a_tenant_that_is_alone_has_the_policys_own_order(
    jobs: Jobs, data: st.DataObject, policy: Ranked, rules: Rules, capacity: Capacity
) -> None:
    jobs = dataclasses.replace(jobs, tenant=np.zeros(len(jobs), dtype=np.int64))
    order = data.draw(orders(len(jobs)))
    without = choose(jobs, policy, order, capacity, now=NOW, rules=rules)
    shared = choose(
        jobs, policy, order, capacity, now=NOW, rules=dataclasses.replace(rules, fair_share=FairShare.TENANTS)
    )
    for field in dataclasses.fields(without):
        np.testing.assert_equal(_plain(getattr(without, field.name)), _plain(getattr(shared, field.name)))


def _plain(value: object) -> object:
    told = value() if isinstance(value, partial) else value
    return dataclasses.asdict(told) if isinstance(told, Outrankers) else told


@given(pictures(), st.data(), tenancies, policies, rules_of_stopping, capacities)
def test_fair_share_stops_no_job_that_the_policy_alone_would_let_run(
    jobs: Jobs, data: st.DataObject, tenancy: Tenancy, policy: Ranked, rules: Rules, capacity: Capacity
) -> None:
    order = data.draw(orders(len(jobs)))
    fair = dataclasses.replace(rules, fair_share=FairShare.TENANTS)
    alone = choose(jobs, policy, order, capacity, now=NOW, rules=rules, tenancy=tenancy)
    shared = choose(jobs, policy, order, capacity, now=NOW, rules=fair, tenancy=tenancy)
    assert sorted([*alone.starts, *alone.outranked, *alone.over_limit]) == sorted(
        [*shared.starts, *shared.outranked, *shared.over_limit]
    )
    if not rules.enforces(policy) or alone.selected is None or shared.selected is None:
        return
    kept = alone.selected & jobs.running
    assert (shared.selected[kept]).all()
    place = {int(row): number for number, row in enumerate(alone.ranked)}
    first = shared.starts.tolist()
    for victim, ahead in zip(shared.victims.tolist(), shared.ahead().tolist(), strict=True):
        if kept[victim]:  # it stands where a gang may need its room, which is before it in the policy's order too
            assert all(place[start] < place[victim] for start in first[:ahead])


@given(tables(), st.data(), st.booleans(), capacities)
def test_a_running_job_that_was_chosen_is_chosen_again(
    table: JobTable, data: st.DataObject, running_first: bool, capacity: Capacity
) -> None:
    """Else tenants would stop each other's jobs at every cycle.

    An earlier job of its own tenant may take its place: another tenant got the room that both would have had.
    """
    scores = {job_id: data.draw(st.sampled_from([0.0, 1.0, 2.0])) for job_id in table.ids}
    policy = Ranked(preemptive=True, running_first=running_first)

    def chosen() -> tuple[set[str], list[str]]:
        """Return what should run, and all jobs in the policy's own order."""
        jobs = table.jobs(NOW)
        order = Order(np.zeros(len(jobs), dtype=np.int64), np.array([scores[one] for one in table.ids]))
        choice = choose(jobs, policy, order, capacity, now=NOW, rules=FAIR)
        assert choice.selected is not None
        ranked = rank(jobs, order, running_first=running_first)
        rows = np.flatnonzero(choice.selected)
        return {table.ids[row] for row in rows.tolist()}, [table.ids[row] for row in ranked.tolist()]

    first, ranked = chosen()
    for job_id in table.ids:
        if table.running(job_id) and job_id not in first:
            table.stop(job_id, NOW)
        elif job_id in first and not table.running(job_id):
            table.start(job_id, NOW)
    again, _ = chosen()
    tenants = dict(zip(table.ids, table.jobs(NOW).tenant.tolist(), strict=True))
    for dropped in first - again:
        before = ranked[: ranked.index(dropped)]
        assert any(tenants[other] == tenants[dropped] and other in again - first for other in before)


def test_a_running_job_gives_way_to_an_earlier_job_of_its_tenant_once_another_tenant_has_the_room() -> None:
    table = JobTable()
    table.add(JobRow("first", 0, sequence=0, gpu_milli=1000, tenant=1, preemptible=False))
    table.add(JobRow("small", 1, sequence=1, gpu_milli=500, tenant=1))
    table.add(JobRow("other", 2, sequence=2, gpu_milli=1000, tenant=2, preemptible=False))
    table.start("small", NOW - 10)
    made: list[set[str]] = []
    for _ in range(3):
        jobs = table.jobs(NOW)
        choice = choose(jobs, Ranked(preemptive=True), by_arrival(jobs), Capacity(2000), now=NOW, rules=FAIR)
        assert choice.selected is not None
        made.append({table.ids[row] for row in np.flatnonzero(choice.selected).tolist()})
        for job_id in table.ids:
            if table.running(job_id) and job_id not in made[-1]:
                table.stop(job_id, NOW)
            elif job_id in made[-1] and not table.running(job_id):
                table.start(job_id, NOW)
    assert made == [{"small", "other"}, {"first", "other"}, {"first", "other"}]


@given(pictures(), st.data(), weighted_families(), policies)
def test_a_job_held_back_by_fair_share_would_start_earlier_without_it(
    jobs: Jobs, data: st.DataObject, tenancy: Tenancy, policy: Ranked
) -> None:
    order, capacity = data.draw(orders(len(jobs))), Capacity(8000, 24, 16)
    jobs = dataclasses.replace(jobs, capacity=capacity)
    fair = choose(jobs, policy, order, capacity, now=NOW, rules=FAIR, tenancy=tenancy)
    alone = choose(jobs, policy, order, capacity, now=NOW, tenancy=tenancy)
    beyond = beyond_share(jobs, policy, order, now=NOW, rules=FAIR, tenancy=tenancy)
    if fair.held_back is None:
        assert beyond is None
        return
    assert beyond is not None
    assert beyond.tolist() == fair.held_back.tolist()
    assert not (fair.held_back & jobs.running).any()
    before = {int(row): set(fair.ranked[:number].tolist()) for number, row in enumerate(fair.ranked)}
    alone_before = {int(row): set(alone.ranked[:number].tolist()) for number, row in enumerate(alone.ranked)}
    assert fair.sharing is not None
    standings = fair.sharing.standings(jobs.running, [f"t{number}" for number in range(4)])
    for row in np.flatnonzero(fair.held_back).tolist():
        passed = before[row] - alone_before[row]
        assert any(jobs.tenant[other] != jobs.tenant[row] for other in passed)
        standing = standings[f"t{jobs.tenant[row]}"]
        assert standing.held >= standing.fair * 0.999


@given(pictures(), weighted_families(), st.data())
def test_past_use_counts_like_resources_that_are_held(jobs: Jobs, tenancy: Tenancy, data: st.DataObject) -> None:
    ranked = rank(jobs, data.draw(orders(len(jobs))), running_first=False)
    capacity, waiting = Capacity(8000, 24, 16), ranked[~jobs.running[ranked]]
    past = np.zeros((len(jobs.needs), data.draw(st.integers(4, 6))))
    for kind, column in enumerate(jobs.needs):
        np.add.at(past[kind], jobs.tenant[jobs.running], column[jobs.running])
    now = Sharing(jobs, capacity, tenancy).interleave(waiting, jobs.running)
    before = Sharing(dataclasses.replace(jobs, past_use=past), capacity, tenancy)
    assert before.interleave(waiting, np.zeros(len(jobs), dtype=np.bool_)).tolist() == now.tolist()


def used(table: JobTable, *averages: float) -> JobTable:
    """Set the GPUs that each tenant held on decayed average."""
    table.past_use = np.zeros((len(KINDS), len(averages)))
    table.past_use[0] = [1000 * average for average in averages]
    return table


def test_who_used_more_waits_until_the_others_have_caught_up() -> None:
    table = used(table_of(*[(0, 1)] * 4, *[(1, 1)] * 4), 2.0, 0.0)
    assert positions(table, gpus=8) == [4, 5, 0, 6, 1, 7, 2, 3]
    assert positions(used(table, 0.0, 0.0), gpus=8) == [0, 4, 1, 5, 2, 6, 3, 7]
    weighed = Tenancy([Tenant("a", weight=2.0), Tenant("b")])
    assert positions(used(table, 2.0, 0.0), gpus=8, tenancy=weighed) == [4, 0, 5, 1, 2, 6, 3, 7]


def test_the_past_use_of_a_department_is_that_of_its_groups() -> None:
    tenancy = Tenancy([Tenant("lab"), Tenant("asr", parent="lab"), Tenant("nlp", parent="lab"), Tenant("shop")])
    table = used(table_of((1, 1), (2, 1), (3, 1), (3, 1)), 0.0, 1.5, 0.0, 0.0)
    assert positions(table, gpus=8, tenancy=tenancy) == [2, 3, 1, 0], "the shop, then the group that used nothing"


def test_a_job_held_back_by_past_use_says_so_with_numbers() -> None:
    table = used(table_of((0, 1), (1, 1)), 3.0, 1.0)
    jobs = dataclasses.replace(table.jobs(NOW), capacity=Capacity(8000))
    choice = choose(jobs, BACKFILL, by_arrival(jobs), jobs.capacity, now=NOW, rules=FAIR)
    assert choice.held_back is not None
    assert choice.held_back.tolist() == [True, False]
    assert choice.sharing is not None
    standing = choice.sharing.standings(jobs.running, ["vision", "speech"])["vision"]
    refusal = standing.refine(Refusal(Code.CAPACITY, "needs 1 GPU, 0 of 8 free"))
    assert refusal.detail == (
        "needs 1 GPU, 0 of 8 free; tenant vision holds 0% of the GPUs, its fair share is 50%; "
        "it has 75% of the decayed usage, its fair share of that is 50%"
    )
    assert refusal.numbers["tenant_usage_share"] == 0.75
    assert refusal.numbers["tenant_fair_usage_share"] == 0.5


def test_past_use_counts_for_tenants_whose_jobs_now_need_other_resources() -> None:
    table = JobTable()
    for number, tenant in enumerate((0, 1)):
        table.add(JobRow(f"{number}", number, number, cores=1, tenant=tenant))
    jobs = used(table, 1.0, 0.0).jobs(NOW)
    choice = choose(jobs, BACKFILL, by_arrival(jobs), Capacity(8000, 16), now=NOW, rules=FAIR)
    assert choice.ranked.tolist() == [1, 0]


def test_past_use_of_later_tenants_is_not_read_beyond_its_columns() -> None:
    table = used(table_of((0, 1), (1, 1), (2, 1)), 1.0)
    assert positions(table, gpus=8) == [1, 2, 0]


@pytest.mark.parametrize("seconds", [-1.0, 0.5, 1e10, float("nan")])
def test_a_half_life_out_of_range_is_refused(seconds: float) -> None:
    (violation,) = Rules(usage_half_life_seconds=seconds).check()
    assert violation.field == "usage_half_life_seconds"
    assert violation.description == f"must be 0, or from 1 to 1e+09, not {seconds:g}"
    assert not list(Rules(usage_half_life_seconds=604_800.0).check())


def test_a_small_tenant_goes_first_until_it_holds_its_share() -> None:
    table = table_of(*[(0, 1)] * 12, *[(1, 1)] * 3, running=4)
    assert starts(table, gpus=4)[:3] == [12, 13, 14]
    assert positions(table_of(*[(0, 1)] * 6, *[(1, 1)] * 3), gpus=4) == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_weights_decide_how_many_go_before_the_next() -> None:
    tenancy = Tenancy([Tenant("a", weight=2.0), Tenant("b")])
    assert positions(table_of(*[(0, 1)] * 4, *[(1, 1)] * 2), gpus=8, tenancy=tenancy) == [0, 4, 1, 2, 5, 3]


def test_departments_share_first_and_then_their_groups() -> None:
    tenancy = Tenancy([Tenant("lab"), Tenant("asr", parent="lab"), Tenant("nlp", parent="lab"), Tenant("shop")])
    table = table_of((1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (3, 1), (3, 1), (3, 1))
    order = positions(table, gpus=8, tenancy=tenancy)
    assert [[1, 1, 2, 2, 3, 3, 3, 3][row] for row in order] == [1, 3, 2, 3, 1, 3, 2, 3]


def test_the_share_that_counts_is_the_dominant_one() -> None:
    table = JobTable()
    for number, (tenant, gpus, cores) in enumerate([(0, 1, 8), (0, 1, 8), (0, 1, 8), (1, 1, 1), (1, 1, 1), (1, 1, 1)]):
        table.add(JobRow(f"{number}", number, number, gpu_milli=1000 * gpus, cores=cores, tenant=tenant))
    jobs = table.jobs(NOW)
    choice = choose(jobs, BACKFILL, by_arrival(jobs), Capacity(8000, 16), now=NOW, rules=FAIR)
    assert choice.ranked.tolist() == [0, 3, 4, 5, 1, 2]  # half of the cores, against an eighth of the GPUs each


def test_gangs_that_find_no_place_do_not_hold_up_their_tenants_small_jobs() -> None:
    table = table_of(*[(0, 1)] * 6, (1, 1), (1, 8), (1, 8), (1, 1), running=5)
    table.start("6", NOW - 5)  # five GPUs of one tenant, one of the other, one is free
    assert starts(table, gpus=7)[:3] == [7, 8, 9]


def test_a_higher_priority_is_worth_nothing_to_others_unless_priorities_are_enforced() -> None:
    table = table_of(*[(0, 1)] * 6, (1, 1), running=4)
    for number in (4, 5):
        table.update(f"{number}", priority=1000)
    assert starts(table, gpus=4) == [6, 4, 5]
    enforced = Rules(preemption=Preemption.PRIORITY, fair_share=FairShare.TENANTS)
    assert starts(table, gpus=4, rules=enforced) == [4, 5, 6]


def test_guarantees_come_before_fair_shares() -> None:
    tenancy = Tenancy([Tenant("a", quota_gpu_milli=6000), Tenant("b")])
    assert starts(table_of(*[(0, 1)] * 8, (1, 1), running=4), gpus=4, tenancy=tenancy) == [4, 5, 8, 6, 7]


def test_off_is_the_policys_order() -> None:
    assert starts(table_of(*[(0, 1)] * 6, (1, 1), running=4), gpus=4, rules=Rules()) == [4, 5, 6]


def test_tenants_alternate_in_the_positions_although_nothing_is_free() -> None:
    jobs = [(0, 1)] * 3 + [(1, 1)] * 3
    assert positions(table_of((2, 4), *jobs, running=1), gpus=4) == [1, 4, 2, 5, 3, 6]
    assert positions(table_of((2, 2), (0, 4), (0, 1), (1, 1), (1, 1), running=1), gpus=4) == [1, 3, 4, 2]


@given(pictures(), weighted_families(), st.data())
def test_the_shares_of_children_add_up_to_their_parents(jobs: Jobs, tenancy: Tenancy, data: st.DataObject) -> None:
    past = np.zeros((len(jobs.needs), max(4, len(tenancy.tenants))))
    past[0] = data.draw(st.lists(st.sampled_from([0.0, 500.0, 4000.0]), min_size=past.shape[1], max_size=past.shape[1]))
    capacity = Capacity(8000, 24, 16, 16)
    present = {int(tenant) for tenant in jobs.tenant}
    found = Sharing(dataclasses.replace(jobs, past_use=past), capacity, tenancy).shares(jobs.running)
    numbers = {tenant.id: number for number, tenant in enumerate(tenancy.tenants)}
    families = {
        number: [numbers[one.id] if one.id else number for one in family_of(tenancy, number)]
        for number in range(past.shape[1])
    }
    assert found.keys() == {above for number in present for above in families[number]}, "and all their ancestors"
    for number, one in found.items():
        rows = [row for row in np.flatnonzero(jobs.running) if number in families[int(jobs.tenant[row])]]
        parts = [
            sum(int(column[row]) for row in rows) / total
            for column, total in zip(jobs.needs, capacity, strict=True)
            if total
        ]
        assert one.held == pytest.approx(max(parts))
    children: dict[int | None, list[int]] = {}
    for number in found:
        family = families[number]
        children.setdefault(family[1] if len(family) > 1 else None, []).append(number)
    for parent, below in children.items():
        whole = found[parent] if parent is not None else None
        fair, used = (sum(getattr(found[one], field) for one in below) for field in ("fair", "used"))
        assert fair <= (whole.fair if whole else 1.0) + 1e-9
        assert used <= (whole.used if whole else 1.0) + 1e-9
        if parent not in present:  # else the parent's own jobs have the rest
            assert fair == pytest.approx(whole.fair if whole else 1.0)
        if whole is None:
            past_here = [number for number, family in families.items() if family[-1] in below]
            assert used == pytest.approx(float(past[0, past_here].any()))
        elif parent not in present and not past[0, parent]:  # else its own jobs have the rest, ended ones too
            assert used == pytest.approx(whole.used)


def test_the_usage_of_a_group_is_its_part_of_its_departments() -> None:
    tenancy = Tenancy([Tenant("lab"), Tenant("asr", parent="lab"), Tenant("nlp", parent="lab"), Tenant("shop")])
    jobs = used(table_of((1, 1), (2, 1), (3, 1), running=1), 0.0, 3.0, 1.0, 4.0).jobs(NOW)
    found = Sharing(jobs, Capacity(8000), tenancy).shares(jobs.running)
    assert {number: one.used for number, one in found.items()} == {0: 0.5, 1: 0.375, 2: 0.125, 3: 0.5}
    assert {number: one.held for number, one in found.items()} == {0: 0.125, 1: 0.125, 2: 0.0, 3: 0.0}
    assert {number: one.fair for number, one in found.items()} == {0: 0.5, 1: 0.25, 2: 0.25, 3: 0.5}


# In the long run -----------------------------------------------------------------------------------------------

QUEUES = list(plugins.discover("cotenant.queue_policies"))


@pytest.mark.parametrize("plugin", QUEUES, ids=[plugin.name for plugin in QUEUES])
@settings(max_examples=examples(20))
@given(st.data())
def test_in_the_long_run_no_tenant_is_ahead_of_another_that_waits_by_more_than_a_gang(
    plugin: plugins.Plugin, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.0]), min_size=2, max_size=4))
    size, room = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 9))
    tenancy = Tenancy([Tenant(f"t{number}", weight=weight) for number, weight in enumerate(weights)])
    policy, table, rng = plugin.make(), JobTable(), np.random.default_rng(data.draw(st.integers(0, 99)))
    capacity = table.capacity = Capacity(1000 * size * room)
    number, now = 0, 0.0

    def submit(tenant: int) -> None:
        nonlocal number
        weight = weights[tenant]
        table.add(JobRow(f"{number}", now, number, gpu_milli=1000 * size, tenant=tenant, tenant_weight=weight))
        if rng.random() < 0.5:
            table.update(f"{number}", predicted_seconds=float(rng.uniform(1, 9000)), confidence=0.9)
        number += 1

    def cycle() -> None:
        jobs, ids = table.jobs(now), list(table.ids)
        order = policy.order(jobs, now)
        choice = choose(jobs, policy, order, capacity, now=now, rules=FAIR, tenancy=tenancy)
        if choice.selected is not None:
            for row in np.flatnonzero(jobs.running & ~choice.selected).tolist():
                table.stop(ids[row], now)
        for row in choice.starts.tolist():
            if len(running()) < room:
                table.start(ids[row], now)

    def running() -> list[str]:
        return [one for one in table.ids if table.running(one)]

    for _ in range(room + 3):
        submit(0)  # one floods the cluster before the others come
    cycle()
    flood = set(running())
    for tenant in range(1, len(weights)):
        for _ in range(room + 3):
            submit(tenant)
    for _ in range(6 * room):
        now += float(rng.uniform(1, 900))
        cycle()
        ran = running()
        assert len(ran) == room, "what is free is given to somebody"
        if not flood & set(ran):
            tenants = table.jobs(now).tenant[[table.row(one) for one in ran]].tolist()
            held = [tenants.count(tenant) for tenant in range(len(weights))]
            for ahead, behind in product(range(len(weights)), repeat=2):
                assert (held[ahead] - 1) / weights[ahead] <= held[behind] / weights[behind] + 1e-9, held
        ended = ran[int(rng.integers(len(ran)))]
        tenant = int(table.jobs(now).tenant[table.row(ended)])
        table.remove(ended)
        submit(tenant)
