"""Which CPUs the threads of a job may use by their own wish, and what becomes of that when its cores change.

A control group bounds all of its threads, and Linux 6.2 and later remember what a thread had asked for with
sched_setaffinity: they narrow it to the group's CPUs and widen it again. Older ones forget it at each change, and
without cpusets nobody remembers. So all threads are looked at before a change and after it:

- one that had all of its task's CPUs has all of them again;
- one that had asked for some of them keeps those of them that the task still has;
- one whose CPUs are all gone has all that the task has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

Masks = dict[int, frozenset[int]]

PASSES_MAX = 10


def wanted_mask(own: frozenset[int] | None, now: frozenset[int], change: tuple[frozenset[int], ...]) -> frozenset[int]:
    """The CPUs that a thread should have after a change.

    `own` is what it had when it was first looked at (None: it was not there), `now` what it has, and `change` the
    task's CPUs when it was first looked at, just before the change, and after it.

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
    """The threads of a process; none where it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def masks(pids: Iterable[int]) -> Masks:
    """The CPUs of each thread of some processes."""
    found: Masks = {}
    for thread in (thread for pid in pids for thread in threads(pid)):
        try:
            found[thread] = frozenset(os.sched_getaffinity(thread))
        except ProcessLookupError:
            continue
    return found


def with_off_line(found: Masks, cpus: frozenset[int], online: frozenset[int]) -> Masks:
    """Add those of a task's CPUs that are off line to the masks of threads that have all that are on line.

    The kernel shows no thread a CPU that is off line: without this each would look as if it had chosen the others.

    >>> with_off_line({1: frozenset({2}), 2: frozenset()}, frozenset({2, 3}), frozenset({0, 1, 2}))
    {1: frozenset({2, 3}), 2: frozenset()}
    """
    visible = cpus & online if online else cpus
    return {thread: mask | cpus if mask >= visible else mask for thread, mask in found.items()}


def settle(pids: Callable[[], Iterable[int]], own: Mapping[int, frozenset[int]], *change: frozenset[int]) -> None:
    """Give each thread what it should have, until a look finds nothing to change: threads may come meanwhile. Blocks.

    `own` and `change` are as in `wanted_mask`.
    """
    given: Masks = {}  # each is told once: where it then has less, its group holds it
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
                continue  # it has ended, runs as somebody else, or its group does not let it
        given.update(odd)
