"""Which cores a task gets, keeps and releases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation, merge_allocations
from cotenant.core.model.gang import Demand
from cotenant.core.model.node import Core, Gpu, Inventory
from cotenant.core.placement.core_selection import choose_cores, contiguous, core_positions, grow_cores
from cotenant.core.placement.device_assignment import NodeDevices, Task


@st.composite
def machines(draw: st.DrawFn) -> tuple[Core, ...]:
    """Nodes of up to two sockets and two NUMA nodes on each; ids may alternate between them, and some are missing."""
    sockets, per_socket = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    numa_nodes, each = sockets * per_socket, draw(st.integers(1, 5))
    alternating, siblings = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    cores = []
    for number in range(numa_nodes * each):
        node = number % numa_nodes if alternating else number // each
        cpus = tuple(number + 64 * sibling for sibling in range(siblings))
        cores.append(Core(number, cpus, numa_node=node, socket=node // per_socket))
    return tuple(draw(st.lists(st.sampled_from(cores), unique=True, min_size=1)))


nears = st.lists(st.integers(-1, 3), unique=True, max_size=2)


def fewest(free: Sequence[Core], count: int, nodes: set[int]) -> int:
    """Try all sets of NUMA nodes: the slow way to say how many are needed."""
    there = {node: sum(core.numa_node == node for core in free) for node in nodes}
    wanted = min(count, sum(there.values()))
    sizes = range(len(nodes) + 1)
    return next(size for size in sizes if any(sum(there[n] for n in s) >= wanted for s in combinations(nodes, size)))


def runs(cores: Sequence[Core], position_of: dict[int, int]) -> int:
    taken = {position_of[core.id] for core in cores}
    return sum(seat - 1 not in taken for seat in taken)


@given(machines(), st.integers(0, 12), nears, st.randoms(use_true_random=False))
def test_what_is_chosen_is_near_on_as_few_numa_nodes_as_can_be_and_always_the_same(
    cores: tuple[Core, ...], count: int, near: list[int], rng: Random
) -> None:
    picked = choose_cores(cores, count, near, core_positions(cores))
    assert len({core.id for core in picked}) == len(picked) == min(count, len(cores))
    close = [core for core in picked if core.numa_node in near]
    assert len(close) == min(count, sum(core.numa_node in near for core in cores))
    nodes = {core.numa_node for core in cores}
    assert len({core.numa_node for core in close}) == fewest(cores, count, nodes & set(near))
    far = {core.numa_node for core in picked if core.numa_node not in near}
    assert len(far) == fewest(cores, count - len(close), nodes - set(near))
    shuffled = rng.sample(cores, len(cores))
    assert choose_cores(shuffled, count, near, core_positions(shuffled)) == picked


@given(machines(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_run_is_taken_where_one_suffices_and_never_more_of_them_than_needed(
    cores: tuple[Core, ...], count: int, rng: Random
) -> None:
    position_of = core_positions(cores)
    free = rng.sample(cores, rng.randint(1, len(cores)))
    lengths = sorted((len(one) for one in _runs_of(free, position_of)), reverse=True)
    picked = contiguous(free, count, position_of)
    needed = next((n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= count), len(lengths))
    assert runs(picked, position_of) == needed


def _runs_of(cores: Sequence[Core], position_of: dict[int, int]) -> list[list[int]]:
    found: list[list[int]] = []
    for seat in sorted(position_of[core.id] for core in cores):
        if found and found[-1][-1] == seat - 1:
            found[-1].append(seat)
        else:
            found.append([seat])
    return found


@given(machines(), st.integers(1, 8), nears, st.randoms(use_true_random=False))
def test_what_is_added_lies_beside_what_is_held_wherever_it_can(
    cores: tuple[Core, ...], more: int, near: list[int], rng: Random
) -> None:
    position_of = core_positions(cores)
    mixed = rng.sample(cores, len(cores))
    cut = rng.randint(1, len(cores))
    held, free = mixed[:cut], mixed[cut:]
    added = grow_cores(held, free, more, near, position_of)
    assert len({core.id for core in added}) == len(added) == min(more, len(free))
    assert {core.id for core in added} <= {core.id for core in free}
    close = sum(core.numa_node in near for core in added)
    assert close == min(len(added), sum(core.numa_node in near for core in free))
    on = {core.numa_node for core in held}
    there = sum(core.numa_node in on for core in free)
    if not near and there >= more:
        assert {core.numa_node for core in added} <= on
    (node, *others) = on
    if not others and not near and more == 1 and there:
        touching = [c for c in free if c.numa_node == node and runs([*held, c], position_of) <= runs(held, position_of)]
        assert not touching or runs([*held, *added], position_of) <= runs(held, position_of)
    assert grow_cores(held, rng.sample(free, len(free)), more, near, position_of) == added


Changes = list[tuple[int, list[int]]]


@given(machines(), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_a_resize_keeps_what_it_can_moves_the_least_and_never_overlaps(
    cores: tuple[Core, ...], wanted: list[int], data: st.DataObject
) -> None:
    gpus = tuple(Gpu(f"GPU-{node}", numa_node=node) for node in range(2))
    book = NodeDevices("n1", Inventory(cores, gpus))
    living: list[NodeAllocation] = []
    for rank, count in enumerate(wanted):
        if count <= len(book.free_cores):
            gpu = 1000 if rank < len(gpus) else 0
            living.append(book.assign([Task("worker", rank, Demand(gpu, count))]))
    for _ in range(data.draw(st.integers(1, 4))):
        which = data.draw(st.integers(0, len(living) - 1)) if living else 0
        if not living:
            return
        before = living[which]
        (task,) = before.tasks
        count = data.draw(st.integers(0, len(task.core_ids) + len(book.free_cores)))
        after = book.resize(before, {task.rank: count})
        (then,) = after.tasks
        kept = set(task.core_ids) & set(then.core_ids)
        assert len(then.core_ids) == count
        assert len(kept) == min(count, len(task.core_ids))
        held = {core_id for one in living for task_ in one.tasks for core_id in task_.core_ids}
        assert not (set(then.core_ids) - kept) & held
        chosen = [core for core in cores if core.id in then.core_ids]
        assert then.cpu_ids == tuple(sorted(cpu for core in chosen for cpu in core.cpus))
        assert then.memory_nodes == tuple(sorted({core.numa_node for core in chosen}))
        assert (then.gpus, then.rank, then.role) == (task.gpus, task.rank, task.role)
        book.release(before)
        book.hold(*merge_allocations((before,), (after,)))  # while it is under way
        book.release(*merge_allocations((before,), (after,)))
        book.hold(after)
        living[which] = after


def sockets_that_alternate() -> tuple[Core, ...]:
    return tuple(Core(n, (n, n + 8), numa_node=n % 2, socket=n % 2) for n in range(8))


def test_neighbours_are_those_of_one_numa_node_whatever_their_numbers() -> None:
    cores = sockets_that_alternate()
    free = [core for core in cores if core.id not in (2, 3)]
    assert [core.id for core in choose_cores(free, 2, [0], core_positions(cores))] == [4, 6]


def test_cores_spill_over_within_the_socket_of_the_gpus() -> None:
    cores = [Core(n, (n,), numa_node=n // 2, socket=n // 4) for n in range(8)]
    assert [core.id for core in choose_cores(cores, 3, [2], core_positions(cores))] == [4, 5, 6]


def test_where_no_numa_node_suffices_the_largest_make_them_few() -> None:
    cores = [Core(n, (n,), numa_node=node) for n, node in enumerate([0, 1, 1, 1, 2, 2, 2, 2])]
    assert {core.numa_node for core in choose_cores(cores, 7, [], core_positions(cores))} == {1, 2}


def test_what_is_added_before_what_is_held_ends_beside_it() -> None:
    cores = [Core(n, (n,)) for n in range(8)]
    assert [core.id for core in grow_cores(cores[5:], cores[:5], 2, [], core_positions(cores))] == [4, 3]


def test_a_task_that_shrinks_keeps_what_is_beside_its_gpu() -> None:
    cores = tuple(Core(n, (n,), numa_node=n // 4) for n in range(8))
    book = NodeDevices("n1", Inventory(cores, (Gpu("GPU-1", numa_node=1),)))
    held = NodeAllocation("n1", (TaskAllocation("worker", 0, (2, 3, 4, 6, 7), gpus=(GpuShare("GPU-1"),)),))
    book.hold(held)
    assert book.resize(held, {0: 2}).tasks[0].core_ids == (6, 7)
    assert book.resize(held, {0: 3}).tasks[0].memory_nodes == (1,)


def test_what_the_node_no_longer_has_is_given_up_by_a_resize() -> None:
    cores = tuple(Core(n, (n,)) for n in range(4))
    book = NodeDevices("n1", Inventory(cores))
    held = NodeAllocation("n1", (TaskAllocation("worker", 0, core_ids=(1, 99)),))
    assert book.resize(held, {0: 2}).tasks[0].core_ids == (1, 0)
