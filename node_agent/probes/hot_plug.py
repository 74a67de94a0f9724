"""CPU hot-plug: adapts the offered cores when CPUs go offline, come back or are added while the agent runs.

The kernel announces this to user space only in one small file, which is polled. A core keeps the id under which it was
first offered, also over a restart: its lowest CPU may be the one that is offline, and the holder of the core must not
lose it because of a new id.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import structlog

from cotenant.node_agent.probes.inventory import ProbeOptions, offered_cores, usable_cpus
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

FILE = "cores.json"
CORE_ID_MAX = 1 << 20


class HotPlug:
    """Keeps an inventory's cores current. `report` is given it after each change, after `heal` has restored CPUs."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        options: ProbeOptions,
        state_dir: Path,
        *,
        report: Callable[[resources_pb2.Inventory], None],
        heal: Callable[[], Awaitable[None]] | None,
        interval_seconds: float,
        sysfs: Path,
        allowed: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
    ) -> None:
        self._inventory, self._options, self._path = inventory, options, state_dir / FILE
        self._report, self._heal = report, heal
        self._interval_seconds, self._sysfs, self._allowed = interval_seconds, sysfs, allowed
        self._ids = _read(self._path)
        self._usable: list[int] = []
        self.refresh()

    def refresh(self) -> bool:
        """Offer the CPUs that are usable now; return whether the cores changed."""
        usable = usable_cpus(self._sysfs, self._allowed())
        if usable == self._usable:
            return False
        self._usable = usable
        cores = offered_cores(self._options, usable, self._sysfs, self._ids)
        before = list(self._inventory.cores)
        del self._inventory.cores[:]
        self._inventory.cores.extend(cores)
        self._save_ids(cores)
        return cores != before

    def _save_ids(self, cores: Iterable[resources_pb2.Core]) -> None:
        names = {**self._ids, **{cpu: core.id for core in cores for cpu in core.cpus}}
        if names == self._ids:
            return
        self._ids = names
        try:
            self._path.write_text(json.dumps(names))
        except OSError as error:  # the ids stay in memory
            log.warning("core_ids_not_saved", error=str(error))

    async def run(self) -> None:
        """Refresh periodically until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self.refresh():
                log.warning("cores_changed", cores=[core.id for core in self._inventory.cores], cpus=self._usable)
                if self._heal:
                    await self._heal()
                self._report(self._inventory)


def _read(path: Path) -> Mapping[int, int]:
    """Return the saved core id of each CPU; empty if the file is missing or invalid."""
    try:
        ids = {int(cpu): int(core) for cpu, core in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return {}
    return ids if all(0 <= core <= CORE_ID_MAX for core in ids.values()) else {}
