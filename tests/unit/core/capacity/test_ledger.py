from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import World, demands, picture, shapes, take_one, worlds
from cotenant.core.capacity.ledger import Holding, Ledger, Overcommitted
from cotenant.core.model.gang import Demand
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import Resources


@dataclass
class SlowNode:
    """A node counted the slow way: each GPU a number, each replica tried one by one."""

    shape: NodeShape
    gpus: list[int]
    cores: int
    memory: int

    @classmethod
    def of(cls, shape: NodeShape) -> SlowNode:
        return cls(shape, [1000] * shape.gpus, shape.cores, shape.memory_bytes)

    def room(self, demand: Demand) -> int:
        wanted = [one.strip() for one in demand.gpu_type.lower().split("|")]
        if demand.gpu_milli and not any(one in self.shape.gpu_type.lower() for one in wanted):
            return 0
        left = SlowNode(self.shape, list(self.gpus), self.cores, self.memory)
        count = 0
        while count < 100 and left.take_one(demand):
            count += 1
        return count

    def take_one(self, demand: Demand) -> bool:
        each = min(demand.gpu_milli, 1000)
        if each < 1000 and each and not self.shape.shareable:
            return False
        fitting = [index for index, free in enumerate(self.gpus) if free >= each][: -(-demand.gpu_milli // 1000)]
        if len(fitting) * each < demand.gpu_milli or self.cores < demand.cores or self.memory < demand.memory_bytes:
            return False
        for index in fitting:
            self.gpus[index] -= each
        self.cores -= demand.cores
        self.memory -= demand.memory_bytes
        return True

    def give(self, holding: Holding, sign: int) -> None:
        self.cores += sign * holding.cores
        self.memory += sign * holding.memory_bytes
        for index, milli in holding.shares:
            self.gpus[index] += sign * milli
        wanted = 1000 if sign < 0 else 0
        for index in [index for index, free in enumerate(self.gpus) if free == wanted][: holding.gpus]:
            self.gpus[index] += sign * 1000


Step = tuple[str, int, Demand, int]
steps = st.lists(st.tuples(st.sampled_from(["take", "take", "give"]), st.integers(0, 3), demands(), st.integers(1, 4)))


@given(st.lists(shapes(), min_size=1, max_size=4), steps)
def test_the_ledger_agrees_with_a_slow_twin(made_of: list[NodeShape], steps: list[Step]) -> None:
    ledger, slow = Ledger(made_of), [SlowNode.of(shape) for shape in made_of]
    held: list[Holding] = []
    for verb, number, demand, replicas in steps:
        node = number % len(made_of)
        room = ledger.room(demand)
        assert np.minimum(room, 100).tolist() == [twin.room(demand) for twin in slow]
        if verb == "give" and held:
            holding = held.pop(number % len(held))
            ledger.release(holding)
            slow[holding.node].give(holding, +1)
        elif room[node] >= replicas:
            holding = ledger.take(node, demand, replicas)
            held.append(holding)
            slow[node].give(holding, -1)
        elif not demand.gpu_type:  # `take` trusts its caller on the type
            with pytest.raises(Overcommitted):
                ledger.take(node, demand, replicas)
        assert all(min(twin.gpus, default=0) >= 0 for twin in slow)
        assert ledger.free_cores.tolist() == [twin.cores for twin in slow]
        assert ledger.free_memory.tolist() == [twin.memory for twin in slow]
        assert ledger.free_gpus.tolist() == [sum(free == 1000 for free in twin.gpus) for twin in slow]
        assert ledger.free_gpu_milli == sum(sum(twin.gpus) for twin in slow)


@given(worlds())
def test_giving_all_back_empties_every_node(world: World) -> None:
    for holding in [holding for holdings in world.taken for holding in holdings]:
        world.ledger.release(holding)
    empty = Ledger(world.ledger.shapes)
    empty.open[:] = world.ledger.open
    assert picture(world.ledger) == picture(empty)


@given(worlds(), demands(), st.integers(0, 4), st.booleans())
def test_an_attempt_leaves_nothing_unless_it_is_committed(
    world: World, demand: Demand, node: int, commit: bool
) -> None:
    ledger = world.ledger
    node %= len(ledger)
    ledger.open[:] = True
    before = picture(ledger)
    room = int(min(ledger.room(demand)[node], 2))
    with ledger.transaction() as transaction:
        taken = [transaction.take(node, demand) for _ in range(room)]
        if commit:
            assert transaction.commit() == tuple(taken)
    if commit:
        for holding in taken:
            ledger.release(holding)
    assert picture(ledger) == before


@given(worlds())
def test_what_is_undone_leaves_no_trace_however_it_is_nested(world: World) -> None:
    ledger, before = world.ledger, picture(world.ledger)
    with ledger.rolled_back():
        for number, holdings in enumerate(world.taken):
            for holding in holdings:
                ledger.release(holding)
            inside = picture(ledger)
            with ledger.rolled_back():
                for holding in holdings[: number + 1]:
                    ledger.hold(holding)
            assert picture(ledger) == inside
    assert picture(ledger) == before


@given(worlds(), st.booleans())
def test_a_copy_and_its_original_change_independently_also_what_is_undone(world: World, copied_inside: bool) -> None:
    ledger, before = world.ledger, picture(world.ledger)
    other = ledger.copy()
    with ledger.rolled_back():
        if copied_inside:
            other = ledger.copy()
        mark = ledger.mark
        for holding in [holding for holdings in world.taken for holding in holdings]:
            other.release(holding)
        other.open[:] = False
        assert picture(ledger) == before
        assert ledger.mark == mark
        with other.rolled_back():
            for holding in [holding for holdings in world.taken for holding in holdings]:
                ledger.release(holding)
        assert picture(other)[:-1] == picture(Ledger(ledger.shapes))[:-1]
    assert picture(ledger) == before
    assert picture(other)[:-1] == picture(Ledger(ledger.shapes))[:-1]


def test_what_is_undone_is_undone_after_an_error_too() -> None:
    ledger = Ledger([NodeShape(gpus=2, cores=4)])
    with pytest.raises(Overcommitted), ledger.rolled_back():
        assert [ledger.take(0, Demand(1000)) for _ in range(3)] == []
    assert ledger.free_gpus.tolist() == [2]


@given(worlds())
def test_what_was_never_taken_cannot_be_given_back(world: World) -> None:
    ledger, before = world.ledger, picture(world.ledger)
    for node in range(len(ledger)):
        with pytest.raises(Overcommitted):
            ledger.release(Holding(node, cores=int(ledger.total_cores[node] - ledger.free_cores[node]) + 1))
        with pytest.raises(Overcommitted):
            ledger.release(Holding(node, memory_bytes=int(ledger.total_memory[node] - ledger.free_memory[node]) + 1))
        if parts := ledger.parts_of(node):
            with pytest.raises(Overcommitted):
                ledger.release(Holding(node, shares=((0, 1001 - parts[0]),)))
        else:
            with pytest.raises(Overcommitted):
                ledger.release(Holding(node, gpus=int(ledger.total_gpus[node] - ledger.free_gpus[node]) + 1))
    assert picture(ledger) == before


def test_a_closed_node_has_no_room_unless_everywhere_is_asked() -> None:
    ledger = Ledger([NodeShape(gpus=2, cores=4), NodeShape(gpus=2, cores=4)])
    ledger.open[1] = False
    assert ledger.room(Demand(1000)).tolist() == [2, 0]
    assert ledger.room(Demand(1000), everywhere=True).tolist() == [2, 2]
    assert (ledger.free_gpu_milli, ledger.total_gpu_milli) == (2000, 2000)


def test_a_type_of_gpu_says_nothing_about_replicas_without_gpus() -> None:
    ledger = Ledger([NodeShape(gpus=0, cores=4), NodeShape(gpus=1, cores=4, gpu_type="Tesla T4")])
    assert ledger.room(Demand(cores=2, gpu_type="a100")).tolist() == [2, 2]
    assert ledger.room(Demand(1000, cores=2, gpu_type="t4")).tolist() == [0, 1]


def test_two_halves_are_not_one_gpu_where_gpus_are_not_shared() -> None:
    ledger = Ledger([NodeShape(gpus=1, cores=4)])
    with pytest.raises(Overcommitted, match="has no shareable GPUs"):
        ledger.take(0, Demand(gpu_milli=500), replicas=2)


def test_shares_fill_the_fullest_gpu_that_still_fits() -> None:
    ledger = Ledger([NodeShape(gpus=2, cores=4, shareable=True)])
    ledger.take(0, Demand(gpu_milli=700))
    ledger.take(0, Demand(gpu_milli=400))
    ledger.take(0, Demand(gpu_milli=300))
    assert ledger.parts_of(0) == (0, 600)
    assert ledger.room(Demand(gpu_milli=200)).tolist() == [3]


def test_the_sums_of_some_nodes_count_what_is_left_of_shared_gpus() -> None:
    ledger = Ledger([NodeShape(1, 4, memory_bytes=8), NodeShape(2, 4, memory_bytes=8, shareable=True)])
    ledger.take(1, Demand(gpu_milli=300, cores=1, memory_bytes=2))
    assert ledger.sums(np.array([False, True])) == Resources(1700, 3, 6)
    assert ledger.sums(np.array([True, True]), empty=True) == Resources(3000, 8, 16)


def test_an_error_tells_what_the_node_has() -> None:
    ledger = Ledger([NodeShape(gpus=1, cores=4)])
    with pytest.raises(Overcommitted, match="1 of 1 GPUs, 4 of 4 cores"):
        ledger.hold(Holding(0, gpus=2))


@pytest.mark.parametrize(
    ("node", "demand", "replicas", "gpus"),
    [
        (0, Demand(400), 1, (2,)),
        (0, Demand(400), 1, (-1,)),
        (0, Demand(400), 2, (0,)),
        (0, Demand(800), 2, (0, 0)),
        (0, Demand(2000), 1, (0,)),
        (0, Demand(cores=1), 1, (0,)),
        (1, Demand(400), 1, (0,)),
    ],
)
def test_a_gpu_that_cannot_be_shared_so_is_not_given(
    node: int, demand: Demand, replicas: int, gpus: tuple[int, ...]
) -> None:
    ledger = Ledger([NodeShape(2, 8, shareable=True), NodeShape(2, 8)])
    before = picture(ledger)
    with pytest.raises(Overcommitted):
        ledger.take(node, demand, replicas, gpus)
    assert picture(ledger) == before


def test_shares_are_given_on_the_gpus_that_are_named() -> None:
    ledger = Ledger([NodeShape(2, 8, shareable=True)])
    assert ledger.take(0, Demand(400), 3, (1, 0, 1)).shares == ((1, 400), (0, 400), (1, 400))
    assert ledger.parts_of(0) == (600, 200)


@given(worlds(), st.lists(st.tuples(st.integers(0, 4), demands()), max_size=6))
def test_who_keeps_figures_by_node_is_told_which_have_changed(world: World, takes: list[tuple[int, Demand]]) -> None:
    ledger = world.ledger
    mark, before = ledger.mark, by_node(ledger)
    for node, demand in takes:
        take_one(ledger, node % len(ledger), demand)
    changed, unchanged = ledger.changed_since(mark), ledger.changed_since(ledger.mark)
    assert changed is not None
    after = by_node(ledger)
    assert {node for node in range(len(ledger)) if before[node] != after[node]} <= set(changed.tolist())
    assert unchanged is not None
    assert len(unchanged) == 0


def by_node(ledger: Ledger) -> list[tuple[object, ...]]:
    gpus, cores, memory, parts, _ = picture(ledger)
    return list(zip(gpus, cores, memory, parts, strict=True))


def test_changes_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.core.capacity.ledger.CHANGES_MAX", 4)
    ledger = Ledger([NodeShape(8, 8)] * 2)
    mark = ledger.mark
    for _ in range(5):
        ledger.take(1, Demand(1000))
    assert ledger.changed_since(mark) is None
    lately = ledger.changed_since(ledger.mark - 1)
    assert lately is not None
    assert lately.tolist() == [1]


def test_a_holding_takes_nothing_but_what_it_names() -> None:
    ledger = Ledger([NodeShape(4, 8, memory_bytes=10)])
    ledger.hold(Holding(0, gpus=2))
    assert (int(ledger.free_gpus[0]), int(ledger.free_cores[0])) == (2, 8)
    ledger.hold(Holding(0, cores=3))
    assert (int(ledger.free_gpus[0]), int(ledger.free_cores[0])) == (2, 5)
