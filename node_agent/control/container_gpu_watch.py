"""Notices CDI specs that are written, changed or removed while an agent runs: they give containers their GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from cotenant.v1 import resources_pb2

log = structlog.get_logger()


class ContainerGpuWatch:
    """Reports the inventory after `refresh` has changed it; None: this runtime gives containers no GPUs."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        refresh: Callable[[], Awaitable[bool]] | None,
        *,
        report: Callable[[resources_pb2.Inventory], None],
        interval_seconds: float,
    ) -> None:
        self._inventory, self._refresh = inventory, refresh
        self._report, self._interval_seconds = report, interval_seconds

    async def run(self) -> None:
        """Look periodically until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._refresh is not None and self._inventory.gpus and await self._refresh():
                log.info("container_gpus_changed", missing=self._inventory.container_gpus_missing)
                self._report(self._inventory)
