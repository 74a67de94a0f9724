"""Borrowers, as some of them leave and return, against a full count."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.worlds import picture
from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.gang_allocation import hold_all, release_all
from cotenant.core.policy.cluster_view import Occupancy, RunningJob
from cotenant.policies.multi_array.borrowing import Borrowers, NodeOccupancy
from cotenant.policies.multi_array.split import Held

SHAPES = [
    NodeShape(24, 64, memory_bytes=100),
    NodeShape(24, 64, memory_bytes=100),
    NodeShape(24, 64, memory_bytes=100, shareable=True),
]
NAMES = [f"job{number}" for number in range(6)]


@st.composite
def running_jobs(draw: st.DrawFn) -> list[RunningJob]:
    some: list[RunningJob] = []
    for number in range(draw(st.integers(0, len(NAMES)))):
        with_gpus = draw(st.booleans())
        held: list[Holding] = []
        for node in draw(st.sets(st.integers(0, 2), min_size=1)):
            gpus, cores = with_gpus * draw(st.integers(1, 3)), draw(st.integers(0, 4))
            if node == 2 and gpus:
                held.append(Holding(node, 0, cores, memory_bytes=7, shares=((number, 500),)))
            else:
                held.append(Holding(node, gpus, cores, memory_bytes=7))
        gang = Gang(f"job{number}", (Part("worker", 1, Demand(1000 * with_gpus)),))
        some.append(RunningJob(gang, tuple(held), since_seconds=float(draw(st.integers(0, 2)))))
    return some


@settings(max_examples=examples(80))
@given(running_jobs(), st.lists(st.sets(st.sampled_from([*NAMES, "stranger"])), max_size=5))
def test_excluded_borrowers_leave_the_sums_and_return(some: list[RunningJob], steps: list[set[str]]) -> None:
    borrowers = Borrowers(len(SHAPES))
    for one in some:
        borrowers.add(one.gang.job_id, Occupancy.of(one))
    for gone in [set[str](), *steps]:
        borrowers.exclude(gone)
        there = [one for one in some if one.gang.job_id not in gone]
        there.sort(key=lambda one: (-one.since_seconds, one.gang.job_id))
        for gpus in (False, True):
            able = [one for one in there if gpus or not one.gang.gpu_milli]
            assert borrowers.any(gpus=gpus) == bool(able)
            for node in range(len(SHAPES)):
                mine = [one.gang.job_id for one in able if any(held.node == node for held in one.holdings)]
                assert list(borrowers.on(node, gpus=gpus)) == mine
        held = [one for each in there if not each.gang.gpu_milli for one in each.holdings]
        for sums, what in ((borrowers.cores, "cores"), (borrowers.amounts[0], "memory_bytes")):
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


@st.composite
def stays(draw: st.DrawFn, job_id: str) -> Occupancy:
    one = draw(running_jobs())
    held = one[0].holdings if one else ()
    milli = sum(1000 * holding.gpus + 500 * len(holding.shares) for holding in held)
    return Occupancy(milli, held, float(draw(st.integers(0, 3))), draw(st.booleans()))


@settings(max_examples=examples(80))
@given(st.data())
def test_incremental_updates_equal_a_full_count(data: st.DataObject) -> None:
    ledger, there = Ledger(SHAPES), dict[str, Occupancy]()
    followed = NodeOccupancy(ledger, 4)
    for _ in range(data.draw(st.integers(1, 4))):
        for job_id in data.draw(st.sets(st.sampled_from(NAMES))):
            if job_id in there and data.draw(st.booleans()):
                del there[job_id]
            else:
                there[job_id] = data.draw(stays(job_id))
        followed.update(dict(there))
        rebuilt = NodeOccupancy(ledger, 4)
        rebuilt.update(dict(there))
        for name in ("firm", "lent_cores"):
            assert getattr(followed, name).tolist() == getattr(rebuilt, name).tolist()
        assert nonzero(followed.held) == nonzero(rebuilt.held)
        assert [job_id in followed for job_id in NAMES] == [job_id in there for job_id in NAMES]
        for since in (-1.0, 0.0, 2.0):
            young = [one for one in there.values() if one.gpu_milli and one.since_seconds > since]
            held = [one for stay in young for one in stay.holdings]
            milli = [sum(_milli(one) for one in held if one.node == node) for node in range(len(SHAPES))]
            assert followed.young_gpus(since).tolist() == [-(-each // 1000) for each in milli]
        for node in range(len(SHAPES)):
            assert list(followed.borrowers.on(node, gpus=True)) == list(rebuilt.borrowers.on(node, gpus=True))
        assert followed.borrowers.cores.tolist() == rebuilt.borrowers.cores.tolist()
        followed.expect(data.draw(st.integers(0, 2)), 3)  # only for this cycle


def _milli(held: Holding) -> int:
    return 1000 * held.gpus + 500 * len(held.shares)


def nonzero(held: Held) -> tuple[object, ...]:
    """Return what is held, without zeros."""
    gpus = {array: count for array, count in held.gpus.items() if count}
    return gpus, {kind: both for kind, both in held.by_type.items() if any(both)}, held.busy
