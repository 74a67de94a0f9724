"""CPUs that go off line, come back or are plugged in while the agent runs: the cores that it offers follow.

The kernel tells nobody in user space of it but by one small file, which is read as often as the agent beats. A core
keeps the id under which it was first offered, also over a restart: the lowest of its CPUs may be the one that is gone,
and who holds the core must not lose it for a new name.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import structlog

from cotenant.node_agent.probes.inventory import ProbeWishes, cores_now, usable_cpus
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

NAMES = "cores.json"
CORE_ID_MAX = 1 << 20


class HotPlug:
    """Keeps an inventory's cores true. `changed` is told after each change, once `heal` has given jobs their CPUs."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        wishes: ProbeWishes,
        state_dir: Path,
        *,
        changed: Callable[[], None],
        heal: Callable[[], Awaitable[None]],
        interval_seconds: float,
        sysfs: Path,
        allowed: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
    ) -> None:
        self._inventory, self._wishes, self._path = inventory, wishes, state_dir / NAMES
        self._changed, self._heal = changed, heal
        self._interval_seconds, self._sysfs, self._allowed = interval_seconds, sysfs, allowed
        self._names = _read(self._path)
        self._usable: list[int] = []
        self.look()

    def look(self) -> bool:
        """Offer what is usable now; whether that is something else than before."""
        usable = usable_cpus(self._sysfs, self._allowed())
        if usable == self._usable:
            return False
        self._usable = usable
        cores = cores_now(self._wishes, usable, self._sysfs, self._names)
        before = list(self._inventory.cores)
        del self._inventory.cores[:]
        self._inventory.cores.extend(cores)
        self._remember(cores)
        return cores != before

    def _remember(self, cores: Iterable[resources_pb2.Core]) -> None:
        names = {**self._names, **{cpu: core.id for core in cores for cpu in core.cpus}}
        if names == self._names:
            return
        self._names = names
        try:
            self._path.write_text(json.dumps(names))
        except OSError as error:  # they are known until the agent ends
            log.warning("core_names_not_kept", error=str(error))

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self.look():
                log.warning("cores_changed", cores=[core.id for core in self._inventory.cores], cpus=self._usable)
                await self._heal()
                self._changed()


def _read(path: Path) -> Mapping[int, int]:
    """The id of each CPU's core as it was kept; a file that makes no sense says nothing."""
    try:
        told = {int(cpu): int(core) for cpu, core in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return {}
    return told if all(0 <= core <= CORE_ID_MAX for core in told.values()) else {}
