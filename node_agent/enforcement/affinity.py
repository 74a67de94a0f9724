"""CPU affinity that a job's threads chose themselves, and how it is adapted when the job's cores change.

A control group bounds all of its threads, and Linux 6.2 and later remember what a thread requested with
sched_setaffinity: they narrow it to the group's CPUs and widen it again. Older kernels forget it at each change, and
without cpusets nothing is remembered. So all threads are inspected before and after a change:

- a thread that had all of its task's CPUs gets all of the new ones;
- a thread that had requested some of them keeps those that the task still has;
- a thread whose CPUs are all gone gets all that the task has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

Masks = dict[int, frozenset[int]]

PASSES_MAX = 10


def wanted_mask(own: frozenset[int] | None, now: frozenset[int], change: tuple[frozenset[int], ...]) -> frozenset[int]:
    """Return the CPUs that a thread should have after a change.

    `own` is its mask at the first inspection (None: it did not exist), `now` its current mask, and `change` the task's
    CPUs at the first inspection, just before the change, and after it.

    >>> two, one = frozenset({0, 1}), frozenset({0})
    >>> wanted_mask(two, one, (two, one, two)) == two, wanted_mask(one, one, (two, one, two)) == one
    (True, True)
    >>> wanted_mask(None, one, (two, one, two)) == two
    True
    """
    first, before, after = change
    if own is None:
        own, first = now, before
    return after if own >= first else own & after or after


def threads(pid: int) -> list[int]:
    """Return the threads of a process; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def masks(pids: Iterable[int]) -> Masks:
    """Return the CPU masks of all threads of some processes."""
    found: Masks = {}
    for thread in (thread for pid in pids for thread in threads(pid)):
        try:
            found[thread] = frozenset(os.sched_getaffinity(thread))
        except ProcessLookupError:
            continue
    return found


def add_offline_cpus(found: Masks, cpus: frozenset[int], online: frozenset[int]) -> Masks:
    """Add a task's offline CPUs to the masks of threads that have all of its online CPUs.

    The kernel shows a thread only online CPUs: without this each thread would seem to have chosen them itself.

    >>> add_offline_cpus({1: frozenset({2}), 2: frozenset()}, frozenset({2, 3}), frozenset({0, 1, 2}))
    {1: frozenset({2, 3}), 2: frozenset()}
    """
    visible = cpus & online if online else cpus
    return {thread: mask | cpus if mask >= visible else mask for thread, mask in found.items()}


def apply_masks(pids: Callable[[], Iterable[int]], own: Mapping[int, frozenset[int]], *change: frozenset[int]) -> None:
    """Set each thread's mask until nothing is left to change: threads may appear in the meantime. Blocks.

    `own` and `change` are as in `wanted_mask`.
    """
    given: Masks = {}  # each is set once: if it has less afterwards, its group limits it
    for _ in range(PASSES_MAX):
        odd = {
            thread: wanted
            for thread, now in masks(pids()).items()
            if thread not in given and (wanted := wanted_mask(own.get(thread), now, change)) != now
        }
        if not odd:
            return
        for thread, wanted in odd.items():
            try:
                os.sched_setaffinity(thread, wanted)
            except (ProcessLookupError, PermissionError, OSError):
                continue  # it has ended, runs as another user, or its group refuses
        given.update(odd)
