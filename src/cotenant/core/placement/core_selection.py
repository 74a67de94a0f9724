"""Which cores of a node: near the GPUs, on few NUMA nodes, side by side.

Adjacency is judged by the order of a NUMA node's own cores, not by their numbers: where ids alternate between sockets
(0, 2, 4… on the first, 1, 3, 5… on the second) the neighbor of core 2 is core 4, with which it shares caches and the
path to memory. A `Core` holds its SMT siblings, so they are never separated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.core.model.node import Core


def core_positions(cores: Sequence[Core]) -> dict[int, int]:
    """Number all cores of a node so that neighbors get consecutive numbers; a number is skipped between NUMA nodes.

    >>> core_positions([Core(n, (n,), numa_node=n % 2) for n in range(4)])
    {0: 0, 2: 1, 1: 3, 3: 4}
    """
    position_of: dict[int, int] = {}
    seat = -1
    numa_node: tuple[int, int] | None = None
    for core in sorted(cores, key=lambda core: (core.socket, core.numa_node, core.id)):
        seat += 1 if numa_node in (None, (core.socket, core.numa_node)) else 2
        numa_node = core.socket, core.numa_node
        position_of[core.id] = seat
    return position_of


def choose_cores(free: Sequence[Core], count: int, near: Sequence[int], position_of: Mapping[int, int]) -> list[Core]:
    """Choose cores: on the NUMA nodes `near` the GPUs first, then from as few others as possible, contiguous.

    Of NUMA nodes that suffice alone, the one with the fewest free cores is used first; if several are needed, those
    with the most free cores come first, to keep them few, and of equals those on a socket of the GPUs. Returns all
    cores if there are too few. Applied to what a task holds, it gives the cores to keep.

    >>> cores = [Core(n, (n,), numa_node=n // 4) for n in range(8)]
    >>> [core.id for core in choose_cores(cores, 2, [1], core_positions(cores))]
    [4, 5]
    """
    by_node = _by_numa_node(free)
    sockets = {core.socket for core in free if core.numa_node in near}
    picked: list[Core] = []
    for some in ([node for node in by_node if node in near], [node for node in by_node if node not in near]):
        for node in _fewest(by_node, some, count - len(picked), sockets):
            picked += contiguous(by_node[node], count - len(picked), position_of)
    return picked


def grow_cores(
    held: Sequence[Core], free: Sequence[Core], more: int, near: Sequence[int], position_of: Mapping[int, int]
) -> list[Core]:
    """Choose more cores for a task that holds some; all free ones if there are too few.

    NUMA nodes near its GPUs come first, then those that it is on already, then as few others as possible; on each, the
    neighbors of what it holds come first.

    >>> cores = [Core(n, (n,), numa_node=n // 4) for n in range(8)]
    >>> held, free = cores[1:2], [core for core in cores if core.id != 1]
    >>> [core.id for core in grow_cores(held, free, 4, [], core_positions(cores))]
    [2, 3, 0, 4]
    """
    by_node = _by_numa_node(free)
    own = {core.numa_node for core in held}
    sockets = {core.socket for core in held} | {core.socket for core in free if core.numa_node in near}
    groups: tuple[list[int], ...] = (
        [node for node in by_node if node in near and node in own],
        [node for node in by_node if node in near and node not in own],
        [node for node in by_node if node not in near and node in own],
        [node for node in by_node if node not in near and node not in own],
    )
    picked: list[Core] = []
    for some in groups:
        for node in _fewest(by_node, some, more - len(picked), sockets):
            there = [core for core in held if core.numa_node == node]
            picked += _beside(there, by_node[node], more - len(picked), position_of)
    return picked


def contiguous(cores: Sequence[Core], count: int, position_of: Mapping[int, int]) -> list[Core]:
    """Return cores from the smallest gap-free run that suffices; else from the longest runs, so that runs are few.

    >>> cores = [Core(n, (n,)) for n in (0, 2, 3, 4, 7, 8)]
    >>> [core.id for core in contiguous(cores, 2, {core.id: core.id for core in cores})]
    [7, 8]
    >>> [core.id for core in contiguous(cores, 4, {core.id: core.id for core in cores})]
    [2, 3, 4, 0]
    """
    runs = _runs(cores, position_of)
    picked: list[Core] = []
    while len(picked) < count and runs:
        still = count - len(picked)
        enough = [run for run in runs if len(run) >= still]
        run = min(enough, key=lambda run: (len(run), run[0].id)) if enough else _longest(runs)
        runs.remove(run)
        picked += run[:still]
    return picked


def _beside(held: Sequence[Core], free: Sequence[Core], count: int, position_of: Mapping[int, int]) -> list[Core]:
    """Return the neighbors of what is held, and then the neighbors of those; then whatever is contiguous.

    A run of free cores before or after held cores is taken from that side. Of several such runs, the smallest that
    suffices leaves the largest to other tasks; if none suffices, the longest comes first.
    """
    taken = {position_of[core.id] for core in held}
    runs = _runs(free, position_of)
    beside = [run for run in runs if _touches(run, taken, position_of)]
    picked: list[Core] = []
    while len(picked) < count and beside:
        still = count - len(picked)
        enough = [run for run in beside if len(run) >= still]
        run = min(enough, key=lambda run: (len(run), run[0].id)) if enough else _longest(beside)
        beside.remove(run)
        runs.remove(run)
        after = position_of[run[0].id] - 1 in taken
        picked += run[:still] if after else run[::-1][:still]
    rest = [core for run in runs for core in run]
    return picked + contiguous(rest, count - len(picked), position_of)


def _touches(run: Sequence[Core], taken: set[int], position_of: Mapping[int, int]) -> bool:
    return position_of[run[0].id] - 1 in taken or position_of[run[-1].id] + 1 in taken


def _longest(runs: Sequence[list[Core]]) -> list[Core]:
    return min(runs, key=lambda run: (-len(run), run[0].id))


def _runs(cores: Sequence[Core], position_of: Mapping[int, int]) -> list[list[Core]]:
    runs: list[list[Core]] = []
    for core in sorted(cores, key=lambda core: position_of[core.id]):
        if runs and position_of[core.id] == position_of[runs[-1][-1].id] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return runs


def _by_numa_node(cores: Sequence[Core]) -> dict[int, list[Core]]:
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.numa_node, []).append(core)
    return by_node


def _fewest(by_node: Mapping[int, Sequence[Core]], some: Sequence[int], count: int, sockets: set[int]) -> list[int]:
    """Return the fewest of some NUMA nodes that have this many cores together: the largest, the smallest for the rest.

    All of them, if they are too few.
    """
    chosen: list[int] = []
    left = list(some)
    while count > 0 and left:
        enough = [node for node in left if len(by_node[node]) >= count]
        far = {node: by_node[node][0].socket not in sockets for node in left}
        if enough:
            best = min(enough, key=lambda node: (far[node], len(by_node[node]), node))
        else:
            best = min(left, key=lambda node: (-len(by_node[node]), far[node], node))
        chosen.append(best)
        left.remove(best)
        count -= len(by_node[best])
    return chosen
