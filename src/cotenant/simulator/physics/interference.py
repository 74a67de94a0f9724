"""Speed of a gang that shares its servers with other gangs, each on GPUs of its own.

Measured: ResNet-50 on 2 GPUs, images/s, on one server 114.8 alone and 75.6 beside other gangs; on two servers 98.0
alone and 74.1 beside others (Jeon et al., ATC 2019, section 3.2 [P]). The measured neighbours are taken to have filled
the server; with fewer of its other GPUs in the hands of gangs, the loss is in proportion [R]. Jobs of one GPU neither
suffer nor disturb [R].
"""

from __future__ import annotations

from cotenant.simulator.physics.rounding import steady

SAME_SERVER = 75.6 / 114.8
ACROSS_SERVERS = 74.1 / 98.0


def speed(other_gangs_gpus: float, other_gpus: float, *, servers: int) -> float:
    """Tell what is left of a gang's speed on a server, of whose other GPUs so many are held by other gangs.

    >>> speed(0, 6, servers=1), speed(6, 6, servers=1), speed(3, 6, servers=2)
    (1.0, 0.658536585, 0.878061224)
    """
    crowded = min(1.0, other_gangs_gpus / other_gpus) if other_gpus > 0 else 0.0
    worst = SAME_SERVER if servers == 1 else ACROSS_SERVERS
    return steady(1 - (1 - worst) * crowded)
