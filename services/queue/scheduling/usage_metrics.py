"""Metrics of decayed usage by tenant."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from cotenant import telemetry
from cotenant.core.model.job_table import Floats
from cotenant.core.model.resources import NAMES, UNITS
from cotenant.services.queue.jobs.queue_state import State

REPORT_SECONDS = 5.0

USED = telemetry.gauge(
    "cotenant.queue.usage", "{unit}", "GPUs and cores that a tenant held on decayed average, by resource and tenant."
)
RESOURCES = NAMES[:2]


class UsageMetrics:
    """Reports what each tenant held on decayed average."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def run(self) -> None:
        """Report forever; at the end all gauges are set to zero, because the next leader reports its own."""
        try:
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                self.report(time.time())
        finally:
            if ledger := self._state.usage.ledger:
                self._set(ledger.tenants, np.zeros((len(NAMES), len(ledger.tenants))))

    def report(self, now: float) -> None:
        """Report the averages at a time."""
        if ledger := self._state.usage.ledger:
            self._set(ledger.tenants, ledger.averages(ledger.tenants, now))

    @staticmethod
    def _set(tenants: list[str], averages: Floats) -> None:
        for number, tenant in enumerate(tenants):
            for name, units, row in zip(RESOURCES, UNITS, averages, strict=False):
                USED.set(float(row[number]) / units, resource=name.removesuffix("_milli"), tenant=tenant)
