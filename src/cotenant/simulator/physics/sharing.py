"""Shared cores: how many each job gets, and the cost of oversubscription.

Theory of operation. Without isolation the kernel divides a node's cores among all runnable threads. A job whose threads
want more than its share starts as many as the node has cores, which is what frameworks do by default
(pytorch/pytorch#22501 on OpenMP; TensorFlow's pools likewise) [D]; a job that has what it wants keeps no more threads
busy than that. So the cores are shared max-min fairly [R].

Threads beyond the cores cost context switches and cache misses. Public measurements differ widely. The same work took
3.41 s with four threads on four cores and 4.84 s with ten ("Oversubscription: a classic parallel performance problem",
Parallel Programming with Visual Studio 2010, 2009) [D]; four trainings with a thread for each of 16 CPUs took 8.4 times
as long as with four CPUs each (pytorch/pytorch#3021) [D]. The milder figure is used: the loss grows from none at one
thread per core to 29.5 % at 2.5 and stays there [R].
"""

from __future__ import annotations

from collections.abc import Sequence

LOSS = 1 - 3.41 / 4.84
AT_THREADS_PER_CORE = 2.5


def shares(wants: Sequence[float], cores: float, *, ideal: bool = False) -> tuple[float, ...]:
    """Return each job's share of a node's cores; `ideal`: without the cost of oversubscription.

    >>> shares([1.0, 2.0], 4), shares([1.0, 20.0, 20.0], 9, ideal=True)
    ((1.0, 2.0), (1.0, 4.0, 4.0))
    >>> [round(share, 2) for share in shares([1.0, 20.0, 20.0], 9)]
    [1.0, 3.02, 3.02]
    """
    fair = _fair(wants, cores)
    if ideal:
        return fair
    threads = sum(cores if want > share + 1e-9 else want for want, share in zip(wants, fair, strict=True))
    return _fair(wants, cores * efficiency(threads / cores)) if cores else fair


def efficiency(threads_per_core: float) -> float:
    """Return the share of the cores' work that is left with this many runnable threads per core.

    >>> efficiency(0.5), round(efficiency(1.75), 3), round(efficiency(10.0), 3)
    (1.0, 0.852, 0.705)
    """
    crowded = (threads_per_core - 1) / (AT_THREADS_PER_CORE - 1)
    return 1 - LOSS * min(1.0, max(0.0, crowded))


def _fair(wants: Sequence[float], cores: float) -> tuple[float, ...]:
    """Return max-min fair shares: no job gets more than it wants, and the rest is divided equally."""
    given, left = [0.0] * len(wants), cores
    order = sorted(range(len(wants)), key=lambda number: (wants[number], number))
    for done, number in enumerate(order):
        given[number] = min(wants[number], left / (len(order) - done))
        left -= given[number]
    return tuple(given)
