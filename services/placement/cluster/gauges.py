"""How much of the cluster is held, free or out of service, as metrics."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from cotenant import telemetry
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import NodeState

TELL_SECONDS = 5.0

GPUS = telemetry.gauge("cotenant.placement.gpus", "{gpu}", "GPUs, by what becomes of them: held, free, closed or ill.")
CORES = telemetry.gauge("cotenant.placement.cores", "{core}", "Cores, by what becomes of them: held, free or closed.")
NODES = telemetry.gauge("cotenant.placement.nodes", "{node}", "Nodes, by state.")

CORE_STATES = ("held", "free", "closed")
GPU_STATES = (*CORE_STATES, "ill")

Told = dict[str, float]


class Gauges:
    """Sums the cluster up, every few seconds. What is free on nodes that take no work is closed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._states: Counter[str] = Counter()

    async def run(self) -> None:
        """Tell for ever. At the end nothing is left: what a process told last is told on, and another one sums up."""
        try:
            while True:
                await asyncio.sleep(TELL_SECONDS)
                self.tell()
        finally:
            _tell(dict.fromkeys(GPU_STATES, 0.0), dict.fromkeys(CORE_STATES, 0.0))
            self._tell_nodes(Counter())

    def tell(self) -> tuple[Told, Told, Told]:
        """Tell of GPUs, of cores and of nodes as they are now."""
        ledger = self._cluster.ledger
        every = np.ones_like(ledger.open)
        have, free, open_free = ledger.sums(every, empty=True), ledger.sums(every), ledger.sums(ledger.open)
        gpus = _divided(*(sums[0] / WHOLE_GPU_MILLI for sums in (have, free, open_free)))
        gpus["ill"] = float(ledger.illness.gpus)
        cores = _divided(*(float(sums[1]) for sums in (have, free, open_free)))
        _tell(gpus, cores)
        names = (NodeState.Name(node.state) for node in self._cluster.nodes.values())
        return gpus, cores, self._tell_nodes(Counter(name.removeprefix("NODE_STATE_").lower() for name in names))

    def _tell_nodes(self, states: Counter[str]) -> Told:
        for state in sorted(states.keys() | self._states.keys()):
            NODES.set(states[state], state=state)
        self._states = states
        return dict(states)


def _tell(gpus: Told, cores: Told) -> None:
    for gauge, told in ((GPUS, gpus), (CORES, cores)):
        for state, value in told.items():
            gauge.set(value, state=state)


def _divided(have: float, free: float, open_free: float) -> Told:
    return {"held": have - free, "free": open_free, "closed": free - open_free}
