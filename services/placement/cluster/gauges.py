"""Metrics of the cluster's GPUs, cores and nodes by state: held, free, closed or unhealthy."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from cotenant import telemetry
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import NodeState

REPORT_SECONDS = 5.0

GPUS = telemetry.gauge("cotenant.placement.gpus", "{gpu}", "GPUs by state: held, free, closed or ill.")
CORES = telemetry.gauge("cotenant.placement.cores", "{core}", "Cores by state: held, free or closed.")
NODES = telemetry.gauge("cotenant.placement.nodes", "{node}", "Nodes by state.")

CORE_STATES = ("held", "free", "closed")
GPU_STATES = (*CORE_STATES, "ill")

Values = dict[str, float]


class Gauges:
    """Updates the gauges every few seconds. Free resources on nodes that take no work count as closed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._states: Counter[str] = Counter()

    async def run(self) -> None:
        """Update the gauges until cancelled, then reset them: another leader reports them from then on."""
        try:
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                self.report()
        finally:
            _set_gauges(dict.fromkeys(GPU_STATES, 0.0), dict.fromkeys(CORE_STATES, 0.0))
            self._set_nodes(Counter())

    def report(self) -> tuple[Values, Values, Values]:
        """Update the gauges; return the values of GPUs, cores and nodes by state."""
        ledger = self._cluster.ledger
        every = np.ones_like(ledger.open)
        have, free, open_free = ledger.sums(every, empty=True), ledger.sums(every), ledger.sums(ledger.open)
        gpus = _split_free(*(sums[0] / WHOLE_GPU_MILLI for sums in (have, free, open_free)))
        gpus["ill"] = float(ledger.unhealthy.gpus)
        cores = _split_free(*(float(sums[1]) for sums in (have, free, open_free)))
        _set_gauges(gpus, cores)
        names = (NodeState.Name(node.state) for node in self._cluster.nodes.values())
        return gpus, cores, self._set_nodes(Counter(name.removeprefix("NODE_STATE_").lower() for name in names))

    def _set_nodes(self, states: Counter[str]) -> Values:
        for state in sorted(states.keys() | self._states.keys()):
            NODES.set(states[state], state=state)
        self._states = states
        return dict(states)


def _set_gauges(gpus: Values, cores: Values) -> None:
    for gauge, values in ((GPUS, gpus), (CORES, cores)):
        for state, value in values.items():
            gauge.set(value, state=state)


def _split_free(have: float, free: float, open_free: float) -> Values:
    return {"held": have - free, "free": open_free, "closed": free - open_free}
