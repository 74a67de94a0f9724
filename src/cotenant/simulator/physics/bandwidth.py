"""Speed by memory bandwidth: training jobs lose what CPU jobs take.

Assumed [R]: up to the node's peak there is no slowdown. If the demands exceed it, each job gets bandwidth in proportion
to its demand, as memory controllers that do not distinguish jobs share it. A CPU job with a demand is bound by its
bandwidth alone. A training job spends a share m of its step waiting for memory once memory is the bottleneck, so a step
takes (1 − m) + m·demand/peak times as long.

Measured: four production training jobs lost 40 % of their speed on average to unmanaged contention (Kelp, HPCA 2019
[P]); m = 2/3 gives that figure if the demand is twice the peak, which is our reading of "unmanaged".
"""

from __future__ import annotations

from cotenant.simulator.physics.rounding import steady

PEAK_BYTES_PER_SECOND = 153.6e9  # two sockets of four channels of DDR4-2400: a server of Philly's and CODA's years [R]
SENSITIVITY = 0.667


def speed(demand_bytes_per_second: float, peak_bytes_per_second: float, sensitivity: float) -> float:
    """Return the relative speed of a job on a node; `sensitivity` is m, 1 for jobs bound by bandwidth alone.

    >>> speed(80e9, 100e9, 0.5), speed(200e9, 100e9, 1.0), speed(200e9, 100e9, 0.5)
    (1.0, 0.5, 0.666666667)
    """
    over = demand_bytes_per_second / peak_bytes_per_second
    return 1.0 if over <= 1 else steady(1 / ((1 - sensitivity) + sensitivity * over))


def granted(demand_bytes_per_second: float, all_demands_bytes_per_second: float, peak_bytes_per_second: float) -> float:
    """Return the bandwidth that one job gets, in bytes/s.

    >>> granted(50e9, 200e9, 100e9)
    25000000000.0
    """
    over = all_demands_bytes_per_second / peak_bytes_per_second
    return demand_bytes_per_second if over <= 1 else steady(demand_bytes_per_second / over)
