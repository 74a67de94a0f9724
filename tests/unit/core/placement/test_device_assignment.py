from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import demands
from cotenant.core.capacity.ledger import Holding, Ledger, Overcommitted
from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.model.gang import Demand
from cotenant.core.model.node import Core, Gpu, Inventory, shape_of
from cotenant.core.placement.core_selection import choose_cores, core_positions
from cotenant.core.placement.device_assignment import NodeDevices, Task


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    numa_nodes = draw(st.integers(1, 3))
    siblings = draw(st.sampled_from([1, 2]))
    ids = draw(st.lists(st.integers(0, 40), unique=True, max_size=12))
    cores = tuple(
        Core(number, tuple(number + 64 * sibling for sibling in range(siblings)), numa_node=number % numa_nodes)
        for number in ids
    )
    shareable = draw(st.booleans())
    gpus = tuple(
        Gpu(f"GPU-{number}", numa_node=draw(st.integers(-1, numa_nodes - 1)), shareable=shareable)
        for number in range(draw(st.integers(0, 5)))
    )
    return Inventory(cores, gpus, memory_bytes=20)


def names_of(allocations: list[NodeAllocation]) -> tuple[list[int], dict[str, int]]:
    """List every core that is held, and sum up what is held of each GPU."""
    tasks = [task for allocation in allocations for task in allocation.tasks]
    milli: dict[str, int] = {}
    for share in (share for task in tasks for share in task.gpus):
        milli[share.uuid] = milli.get(share.uuid, 0) + share.milli
    return [core_id for task in tasks for core_id in task.core_ids], milli


Life = tuple[bool, int, list[tuple[Demand, int]]]
lives = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 9), st.lists(st.tuples(demands(), st.integers(1, 3)), min_size=1, max_size=2)
    )
)


@given(inventories(), lives)
def test_what_the_ledger_counts_the_book_can_name_and_no_name_is_given_twice(
    inventory: Inventory, lives: list[Life]
) -> None:
    ledger, book, ranks = Ledger([shape_of(inventory)]), NodeDevices("n1", inventory), count()
    live: list[tuple[NodeAllocation, list[Holding]]] = []
    for arrives, which, wanted in lives:
        if live and not arrives:
            allocation, holdings = live.pop(which % len(live))
            book.release(allocation)
            for holding in holdings:
                ledger.release(holding)
        else:
            holdings, tasks = [], []
            for demand, replicas in wanted:
                if ledger.room(demand)[0] >= replicas:
                    holdings.append(ledger.take(0, demand, replicas))
                    tasks += [Task("worker", next(ranks), demand) for _ in range(replicas)]
            shares = [share for holding in holdings for share in holding.shares]
            allocation = book.assign(tasks, shares)
            for task, given_ in zip(tasks, allocation.tasks, strict=True):
                assert len(given_.core_ids) == task.demand.cores
                assert sum(share.milli for share in given_.gpus) == task.demand.gpu_milli
            counted = book.holding(0, allocation)
            assert (counted.cores, counted.memory_bytes) == (
                sum(holding.cores for holding in holdings),
                sum(holding.memory_bytes for holding in holdings),
            )
            assert (sum(holding.gpus for holding in holdings), sorted(shares)) == (
                counted.gpus,
                sorted(counted.shares),
            )
            live.append((allocation, holdings))
        cores, milli = names_of([allocation for allocation, _ in live])
        assert len(cores) == len(set(cores))
        assert all(part <= 1000 for part in milli.values())
        assert len(book.free_cores) == ledger.free_cores[0]
        assert sum(free == 1000 for free in book.free_milli.values()) == ledger.free_gpus[0]


@given(inventories(), st.lists(st.tuples(demands(shares=False), st.integers(1, 3)), max_size=6))
def test_a_record_held_anew_and_released_leaves_the_book_as_it_was(
    inventory: Inventory, wanted: list[tuple[Demand, int]]
) -> None:
    book, again = NodeDevices("n1", inventory), NodeDevices("n1", inventory)
    ledger = Ledger([shape_of(inventory)])
    allocations = []
    for demand, replicas in wanted:
        if ledger.room(demand)[0] >= replicas:
            holding = ledger.take(0, demand, replicas)
            tasks = [Task("worker", rank, demand) for rank in range(replicas)]
            allocations.append(book.assign(tasks, holding.shares))
    for allocation in allocations:
        again.hold(allocation)
    assert (again.free_cores.keys(), again.free_milli) == (book.free_cores.keys(), book.free_milli)
    for allocation in allocations:
        if allocation.cores or allocation.gpu_milli:
            with pytest.raises(Overcommitted):
                again.hold(allocation)
    for allocation in allocations:
        again.release(allocation)
    assert (again.free_cores, again.free_milli) == (
        NodeDevices("n1", inventory).free_cores,
        dict.fromkeys(again.free_milli, 1000),
    )


@given(inventories(), demands(), st.integers(1, 4))
def test_an_assignment_that_fails_holds_nothing(inventory: Inventory, demand: Demand, replicas: int) -> None:
    book = NodeDevices("n1", inventory)
    before = dict(book.free_cores), dict(book.free_milli)
    try:
        book.assign([Task("worker", rank, demand) for rank in range(replicas)])
    except Overcommitted:
        assert (book.free_cores, book.free_milli) == before


@given(inventories(), st.integers(1, 6))
def test_a_task_gets_all_siblings_of_its_cores_and_the_memory_beside_them(inventory: Inventory, cores: int) -> None:
    book = NodeDevices("n1", inventory)
    if cores > len(inventory.cores):
        return
    task = book.assign([Task("worker", 0, Demand(cores=cores))]).tasks[0]
    chosen = [core for core in inventory.cores if core.id in task.core_ids]
    assert sorted(task.cpu_ids) == sorted(cpu for core in chosen for cpu in core.cpus)
    assert set(task.memory_nodes) == {core.numa_node for core in chosen}


def two_sockets() -> Inventory:
    cores = tuple(Core(number, (number, number + 16), numa_node=number // 8) for number in range(16))
    gpus = tuple(Gpu(f"GPU-{number}", numa_node=number // 2) for number in range(4))
    return Inventory(cores, gpus)


def test_cores_come_from_beside_the_gpu() -> None:
    book = NodeDevices("n1", two_sockets())
    book.assign([Task("worker", 0, Demand(1000, 4)), Task("worker", 1, Demand(1000, 4))])
    task = book.assign([Task("worker", 0, Demand(1000, 4))]).tasks[0]
    assert task.gpus == (GpuShare("GPU-2"),)
    assert task.core_ids == (8, 9, 10, 11)
    assert task.memory_nodes == (1,)


def test_a_pair_of_gpus_comes_from_one_socket_where_one_has_a_pair() -> None:
    book = NodeDevices("n1", two_sockets())
    book.assign([Task("worker", 0, Demand(1000, 1))])
    assert [share.uuid for share in book.assign([Task("worker", 0, Demand(2000, 1))]).tasks[0].gpus] == [
        "GPU-2",
        "GPU-3",
    ]


def test_gpus_come_from_a_socket_that_has_cores_left() -> None:
    cores = tuple(core for core in two_sockets().cores if core.numa_node == 1)
    for gpus in (1, 2):
        book = NodeDevices("n1", replace(two_sockets(), cores=cores))
        task = book.assign([Task("worker", 0, Demand(1000 * gpus, 1))]).tasks[0]
        assert [share.uuid for share in task.gpus] == ["GPU-2", "GPU-3"][:gpus]
    book.assign([Task("worker", 0, Demand(cores=7))])
    task = book.assign([Task("worker", 0, Demand(2000))]).tasks[0]
    assert [share.uuid for share in task.gpus] == ["GPU-0", "GPU-1"], "without cores rather than not at all"


@pytest.mark.parametrize(
    ("islands", "count", "given"),
    [
        ((1, 1, 2, 2), 2, [0, 1]),
        ((1, 2, 2, 1), 2, [0, 3]),
        ((1, 1, 1, 2, 2), 2, [3, 4]),
        ((1, 1, 0, 0), 1, [2]),
        ((1, 1, 1, 2, 2, 2), 4, [0, 1, 2, 3]),
        ((1, 1, 1), 1, [0]),
    ],
)
def test_gpus_come_from_one_nvlink_island_and_from_the_one_that_has_least(
    islands: tuple[int, ...], count: int, given: list[int]
) -> None:
    gpus = tuple(Gpu(f"GPU-{number}", island=island) for number, island in enumerate(islands))
    allocation = NodeDevices("n1", Inventory(gpus=gpus)).assign([Task("worker", 0, Demand(1000 * count))])
    assert [share.uuid for share in allocation.tasks[0].gpus] == [f"GPU-{number}" for number in given]


def test_an_island_over_two_sockets_is_used_one_socket_after_the_other() -> None:
    gpus = tuple(Gpu(f"GPU-{number}", numa_node=number % 2, island=1) for number in range(4))
    allocation = NodeDevices("n1", Inventory(gpus=gpus)).assign([Task("worker", 0, Demand(2000))])
    assert [share.uuid for share in allocation.tasks[0].gpus] == ["GPU-0", "GPU-2"]


def test_a_cpu_job_uses_up_the_socket_that_has_least() -> None:
    cores = [core for core in two_sockets().cores if core.id not in (0, 1, 2)]
    assert [core.id for core in choose_cores(cores, 5, [], core_positions(two_sockets().cores))] == [3, 4, 5, 6, 7]


def test_cores_spill_over_to_the_other_socket_only_where_they_must() -> None:
    cores = two_sockets().cores
    picked = [core.id for core in choose_cores(cores, 10, [1], core_positions(cores))]
    assert picked == [8, 9, 10, 11, 12, 13, 14, 15, 0, 1]


def test_a_share_that_the_ledger_has_not_chosen_is_rejected() -> None:
    book = NodeDevices("n1", Inventory((), (Gpu("GPU-0", shareable=True),)))
    with pytest.raises(Overcommitted, match="the ledger has not chosen"):
        book.assign([Task("worker", 0, Demand(gpu_milli=500))])


def test_too_few_chosen_shares_are_refused() -> None:
    book = NodeDevices("n1", Inventory((), (Gpu("GPU-0", shareable=True), Gpu("GPU-1", shareable=True))))
    with pytest.raises(Overcommitted):
        book.assign([Task("worker", 0, Demand(gpu_milli=2000))], shares=[(0, 1000)])
    assert book.free_milli == {"GPU-0": 1000, "GPU-1": 1000}


def test_what_the_node_no_longer_has_is_passed_over() -> None:
    gone = NodeAllocation("n1", (TaskAllocation("worker", 0, core_ids=(99,), gpus=(GpuShare("GPU-9"),)),))
    book = NodeDevices("n1", two_sockets())
    book.release(gone)
    assert book.free_cores.keys() == {core.id for core in two_sockets().cores}
    assert book.holding(0, gone).gpus == 0


@given(inventories(), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_who_is_fitted_keeps_what_is_left_and_gets_up_to_its_own_from_what_is_free(
    inventory: Inventory, wanted: list[int], data: st.DataObject
) -> None:
    book = NodeDevices("n1", inventory)
    held = []
    for rank, cores in enumerate(wanted):
        if cores <= len(book.free_cores):
            held.append(book.assign([Task("worker", rank, Demand(cores=cores))]))
    left = tuple(core for core in inventory.cores if data.draw(st.booleans()))
    now = NodeDevices("n1", replace(inventory, cores=left))
    there = {core.id for core in left}
    for part in held:
        now.hold(replace(part, tasks=tuple(without(task, there) for task in part.tasks)))
    for part in held:
        spare = data.draw(st.integers(0, 8))
        fitted = now.fit(part, spare)
        (task,), (new,) = part.tasks, fitted.tasks
        kept = set(task.core_ids) & there
        assert kept <= set(new.core_ids) <= there
        assert not (set(new.core_ids) - kept) - now.free_cores.keys()
        assert len(new.core_ids) == len(kept) + min(len(task.core_ids) - len(kept), spare, len(now.free_cores))
        assert new.own_cores in ((0,) if new is task else (len(task.core_ids),))
        assert now.fit(fitted, 0) == fitted
        whole = NodeDevices("n1", inventory)
        assert len(whole.fit(fitted, 99).tasks[0].core_ids) == len(task.core_ids)


def without(task: TaskAllocation, there: set[int]) -> TaskAllocation:
    return replace(task, core_ids=tuple(core for core in task.core_ids if core in there))
