"""Speed by the distance of a gang's GPUs.

Measured: Gavel's rates apart and together for its models [D]; for others Philly's ResNet-50 on 2 GPUs, 98.0 images/s on
two servers against 114.8 on one, and the mean utilization of 16-GPU jobs, 43.66, 40.94 and 28.56 % on 2, 4 and 8
servers (Jeon et al., ATC 2019, section 3.2 [P]), used as their speed [R]. The cost of crossing racks is not published:
it is assumed to cost the same factor again as crossing servers [R].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cotenant.core.model.model_name import Model
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.interference import TWO_SERVERS
from cotenant.simulator.physics import gpus
from cotenant.simulator.physics.rounding import between, steady

SPREAD = ((0.0, 1.0), (1.0, 40.94 / 43.66), (2.0, 28.56 / 43.66))  # by log2 of servers / fewest servers
SPREAD_GPUS_MIN = 9  # larger than a server of 8: spread over servers even at best


class Distances:
    """How close together a gang could be on a cluster: the minimum number of servers and racks that would hold it."""

    def __init__(self, shapes: Sequence[NodeShape], racks: Sequence[str]) -> None:
        self._racks = tuple(racks)
        self._most_on_server = max((shape.gpus for shape in shapes), default=0)
        in_rack: dict[str, int] = {}
        for shape, rack in zip(shapes, racks, strict=True):
            in_rack[rack] = in_rack.get(rack, 0) + shape.gpus
        self._most_in_rack = max(in_rack.values(), default=0)

    def speed(self, model: Model | None, gang_gpus: float, gpu_type: str, nodes: Iterable[int]) -> float:
        """Return a gang's relative speed with its GPUs on these nodes; 1 if they are as close as possible."""
        servers = sorted(set(nodes))
        left = self.over(model, gang_gpus, gpu_type, len(servers))
        racks = len({self._racks[server] for server in servers})
        if racks > max(1, math.ceil(gang_gpus / max(1, self._most_in_rack))):
            left *= TWO_SERVERS
        return steady(left)

    def over(self, model: Model | None, gang_gpus: float, gpu_type: str, servers: int) -> float:
        """Return the same for a number of servers in as few racks as possible."""
        fewest = max(1, math.ceil(gang_gpus / max(1, self._most_on_server)))
        return 1.0 if servers <= fewest else steady(_spread(model, gang_gpus, gpu_type, servers / fewest))


def _spread(model: Model | None, gang_gpus: float, gpu_type: str, times_the_fewest: float) -> float:
    measured = gpus.apart(model, gang_gpus, gpu_type) if model else None
    if measured is not None:
        return measured
    return between(SPREAD, math.log2(times_the_fewest)) if gang_gpus >= SPREAD_GPUS_MIN else TWO_SERVERS
