"""The GPU utilization that a job would report, which differs from holding a GPU.

Measured: Philly's mean utilization by GPUs and outcome (Jeon et al., ATC 2019, table 3 [P]), linear in log2 of the GPUs
between its rows and constant beyond them. A job reports that times its speed relative to its undisturbed speed with the
reference cores on its GPUs, at most 100 % [R]; nothing while it repeats work after a restart.
"""

from __future__ import annotations

import math

from cotenant.simulator.physics.rounding import between, steady
from cotenant.simulator.traces.trace_job import Ended

_GPUS = (1, 4, 8, 16)
_PERCENT = {
    Ended.PASSED: (53.51, 51.13, 51.09, 44.88),
    Ended.KILLED: (37.02, 34.39, 60.63, 36.98),
    Ended.FAILED: (62.82, 50.95, 64.34, 39.02),
}


def base(gpus: float, ended: Ended) -> float:
    """Return a job's undisturbed utilization, from 0 to 1.

    >>> base(8, Ended.PASSED), base(2, Ended.PASSED), base(64, Ended.FAILED)
    (0.5109, 0.5232, 0.3902)
    """
    points = tuple((math.log2(size), percent) for size, percent in zip(_GPUS, _PERCENT[ended], strict=True))
    return steady(between(points, math.log2(max(gpus, 1))) / 100)
