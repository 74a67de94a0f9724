from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import World, demands, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand
from cotenant.core.model.node import NodeShape, matches_gpu_type
from cotenant.policies.fgd.fragmentation import IMPOSSIBLE, NO_GPU, Measure

workloads = st.dictionaries(demands(), st.integers(1, 9), max_size=4)


def lost_to(task: Demand, ledger: Ledger, node: int, parts: Sequence[int]) -> int:
    """F_n(m), as in the paper, one node and one task at a time."""
    shape = ledger.shapes[node]
    limit = min(task.gpu_milli, 1000)
    gpus = sum(part >= limit for part in parts) if limit == 1000 or shape.shareable else 0
    runs = (
        gpus >= max(1, task.gpu_milli // 1000)
        and matches_gpu_type(shape.gpu_type, task.gpu_type)
        and ledger.free_cores[node] >= task.cores
        and ledger.free_memory[node] >= task.memory_bytes
    )
    return sum(part for part in parts if not runs or part < limit)


def expected(ledger: Ledger, node: int, workload: dict[Demand, int]) -> int:
    parts = ledger.parts_of(node) or [1000] * int(ledger.free_gpus[node])
    return sum(weight * lost_to(task, ledger, node, parts) for task, weight in workload.items() if task.gpu_milli)


@given(worlds(), workloads)
def test_the_measure_agrees_with_the_definition(world: World, workload: dict[Demand, int]) -> None:
    ledger = world.ledger
    found = Measure.of(ledger, workload).fragmentation(np.arange(len(ledger)))
    assert found.tolist() == [expected(ledger, node, workload) for node in range(len(ledger))]


@given(worlds(), workloads, demands())
def test_an_increase_is_what_taking_the_best_gpu_adds(
    world: World, workload: dict[Demand, int], demand: Demand
) -> None:
    ledger = world.ledger
    found = Measure.of(ledger, workload).increases(demand, np.arange(len(ledger)))
    untyped = Demand(demand.gpu_milli, demand.cores, memory_bytes=demand.memory_bytes)  # types are checked by the room
    room = ledger.room(untyped, everywhere=True)
    for node in range(len(ledger)):
        added: dict[int, int] = {}
        share = demand.gpu_milli % 1000 > 0
        for gpu in range(ledger.shapes[node].gpus) if share else [NO_GPU]:
            if not room[node] or (share and ledger.parts_of(node)[gpu] < demand.gpu_milli):
                continue
            before = expected(ledger, node, workload)
            with ledger.rolled_back():
                ledger.take(node, untyped, 1, (gpu,) if share else ())
                added[gpu] = expected(ledger, node, workload) - before
        assert found.increase[node] == min(added.values(), default=IMPOSSIBLE)
        if added:
            parts = ledger.parts_of(node)
            best = min(added, key=lambda gpu: (added[gpu], parts[gpu] if share else 0, gpu))
            assert found.gpu[node] == best


def test_a_large_part_may_be_left_where_a_small_one_would_be_lost() -> None:
    """The fullest GPU that fits is not always the one to take."""
    ledger = Ledger([NodeShape(2, 8, shareable=True)])
    ledger.take(0, Demand(300), 1, (0,))
    found = Measure.of(ledger, {Demand(600): 1}).increases(Demand(300), np.array([0]))
    assert (found.increase[0], found.gpu[0]) == (0, 1)


def test_cores_that_go_take_the_gpus_with_them() -> None:
    ledger = Ledger([NodeShape(4, 8)])
    found = Measure.of(ledger, {Demand(1000, cores=6): 2}).increases(Demand(cores=3), np.array([0]))
    assert found.increase.tolist() == [2 * 4000]


def test_only_a_share_of_an_unbroken_gpu_takes_a_whole_gpu_from_the_tasks() -> None:
    ledger = Ledger([NodeShape(2, 8, shareable=True)])
    found = Measure.of(ledger, {Demand(2000): 1}).increases(Demand(500), np.array([0]))
    assert found.increase.tolist() == [1500], "two whole GPUs are needed, and one is left"
    ledger.take(0, Demand(500), 1, (0,))
    found = Measure.of(ledger, {Demand(1000): 1}).increases(Demand(300), np.array([0]))
    assert (found.increase[0], found.gpu[0]) == (-300, 0), "500 were lost before, 200 are now"
