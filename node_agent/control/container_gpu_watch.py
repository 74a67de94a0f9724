"""Notices CDI specs that are written, changed or removed while an agent runs: they give containers their GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant.node_agent.runtime.runtime_port import ContainerGpuRuntime, Runtime
from cotenant.v1 import resources_pb2

log = structlog.get_logger()


class ContainerGpuWatch:
    """Reports the inventory after changed specs have changed it."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        runtime: Runtime,
        report: Callable[[resources_pb2.Inventory], None],
        interval_seconds: float,
    ) -> None:
        self._inventory, self._runtime = inventory, runtime
        self._report, self._interval_seconds = report, interval_seconds

    async def run(self) -> None:
        """Look periodically until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            runtime = self._runtime
            if not self._inventory.gpus or not isinstance(runtime, ContainerGpuRuntime):
                continue
            if await runtime.refresh_container_gpus():
                log.info("container_gpus_changed", missing=self._inventory.container_gpus_missing)
                self._report(self._inventory)
