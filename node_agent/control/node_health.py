"""Watches over the node's health: looks, judges by the core's table, keeps what it found, and tells placement.

While the process that asks NVML does not answer, the GPUs that were last known stay in the inventory, and are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from cotenant.core.model import health as core
from cotenant.core.model.health import Finding, GpuReading, Sign
from cotenant.core.model.health_rules import RULES
from cotenant.core.model.node import HealthProblem
from cotenant.node_agent.control.attempt_manager import Attempt
from cotenant.node_agent.control.gpu_owners import GpuOwners, sees_all_processes
from cotenant.node_agent.control.health_file import HealthFile, Remembered
from cotenant.node_agent.probes.gpus import nvml_gpus
from cotenant.node_agent.probes.node_reading import read_era, read_node
from cotenant.node_agent.probes.nvml_link import Event, NvmlAbsent, NvmlLink, NvmlSilent
from cotenant.node_agent.probes.own_limits import OwnLimits, lacking
from cotenant.node_agent.runtime.attempt_status import AttemptKey, timestamp
from cotenant.v1 import node_service_pb2, resources_pb2

log = structlog.get_logger()

UNKNOWN = -1.0
DISK_SECONDS_MAX = 5.0
FIRST_LOOK_SECONDS_MAX = 15.0  # then the agent begins without NVML, which may come later
PATIENCE_SECONDS = 5.0  # until a GPU that should be free is taken to be held by somebody
PAUSE_SECONDS = 0.25
BLIND_TO_PROCESSES = (
    "who uses the GPUs is not checked: the agent runs in a PID namespace of its own and does not know NVML's pids"
)
FACTS = (*core.FACTS, "lost", "error", "temperature_celsius", "recovery")


class Health:
    """The health of one node, written into its inventory. Without a `link` there are no GPUs to ask about."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        state_dir: Path,
        *,
        link: NvmlLink | None,
        attempts: Callable[[], Mapping[AttemptKey, Attempt]],
        changed: Callable[[], None],
        interval_seconds: float,
        sysfs: Path,
        shareable: bool = False,
        knows_pids: bool | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        limits: OwnLimits | None = None,
    ) -> None:
        self._inventory, self._state_dir, self._link, self._changed = inventory, state_dir, link, changed
        self._interval_seconds, self._sysfs, self._shareable = interval_seconds, sysfs, shareable
        self._patience_seconds, self._limits = patience_seconds, limits or OwnLimits(self.wake)
        self._knows_pids = sees_all_processes() if knows_pids is None else knows_pids
        self._attempts, self._owners = attempts, GpuOwners(attempts)
        self._file = HealthFile(state_dir)
        self._findings: tuple[Finding, ...] = ()
        self._gpus: dict[str, dict[str, Any]] = {}  # as NVML told of them
        self._utilisation: dict[str, float] = {}
        self._answering: frozenset[str] = frozenset()  # of which NVML told at the last look
        self._released: set[str] = set()  # by an operator, before NVML has told which GPUs it has
        self._events: list[Sign] = []
        self._written: Remembered | None = None
        self._looked_seconds = time.monotonic()
        self._wake = asyncio.Event()
        self._looking = asyncio.Lock()
        self._disk: asyncio.Task[core.NodeReading] | None = None
        self._starting: asyncio.Task[list[dict[str, Any]]] | None = None
        self._note = ""  # why there are no GPUs, as long as there are none
        self._era = core.Era()
        if link is not None:
            link.on_event = self._take_event

    # Looking --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Remember what was known and find the GPUs: the inventory has them, and their problems, then."""
        remembered = self._file.read()
        self._findings, self._gpus = remembered.findings, {str(gpu["uuid"]): gpu for gpu in remembered.gpus}
        signs = await self._find_gpus(self._link, remembered.era) if self._link is not None else []
        if self._link is None:
            self._gpus = {}
            self._findings = tuple(finding for finding in self._findings if not finding.gpu_uuid)
        if self._gpus and not self._knows_pids:
            self._inventory.not_enforced.append(BLIND_TO_PROCESSES)
        self._judge(signs, blind=True)

    def gpu_minors(self) -> Mapping[str, int]:
        """The N of /dev/nvidiaN by UUID, as far as NVML tells."""
        return self._link.minors if self._link is not None else {}

    async def _find_gpus(self, link: NvmlLink, then: core.Era) -> list[Sign]:
        """Look which GPUs there are. Those that were there since this boot and are not told of are lost."""
        try:
            async with asyncio.timeout(FIRST_LOOK_SECONDS_MAX):
                found = await asyncio.shield(self._start(link))
        except NvmlAbsent:
            log.info("nvml_absent")
            self._link = None
        except (TimeoutError, NvmlSilent) as error:
            self._note = f"GPUs are not used: NVML failed: {error or 'it does not answer'}"
            self._inventory.not_enforced.append(self._note)
            return core.silent_signs(self._gpus, str(error) or "it does not answer")
        else:
            if then.boot != read_era(self._sysfs).boot:
                self._gpus = {}  # what a reboot does not bring back is gone
            self._gpus |= {gpu["uuid"]: gpu for gpu in found}
            self._inventory.not_enforced.extend(link.troubles)
        return []

    def _start(self, link: NvmlLink) -> asyncio.Task[list[dict[str, Any]]]:
        """Ask for all GPUs in a task that nobody has to wait for."""
        self._starting = asyncio.create_task(link.gpus())
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._starting

    async def run(self) -> None:
        """Look again and again, and at once after an event; until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self.look()
            except Exception:  # whatever it was, the next look may see more
                log.exception("health_look_failed")
            with contextlib.suppress(TimeoutError):  # the next look is due
                async with asyncio.timeout(self._interval_seconds):
                    await self._wake.wait()

    async def look(self) -> None:
        """Look at everything once, and tell what has changed."""
        async with self._looking:
            node = await self._read_node()
            readings, why = await self._readings()
            standing = [finding.rule for finding in self._findings if not finding.gpu_uuid]
            signs = core.node_signs(node, standing)
            if why:
                signs += core.silent_signs(self._gpus, why)
            signs += [sign for reading in readings for sign in core.gpu_signs(reading)]
            self._judge(signs, blind=bool(why))

    async def _read_node(self) -> core.NodeReading:
        """Look at the node; a disk that does not answer is asked no second time meanwhile."""
        usage = self._limits.usage()
        if self._disk is None:
            self._disk = asyncio.create_task(asyncio.to_thread(read_node, self._state_dir, usage))
        try:
            async with asyncio.timeout(DISK_SECONDS_MAX):  # wait_for may lose a cancellation before Python 3.12
                reading = await asyncio.shield(self._disk)
        except TimeoutError:
            return core.NodeReading(
                disk_error=f"no answer within {DISK_SECONDS_MAX:g} s",
                descriptors_free=usage.free,
                descriptors_max=usage.limit,
            )
        except (OSError, RuntimeError, MemoryError) as error:
            reading = _unread(error)
        self._disk = None
        return reading

    async def room(self, given_up: Callable[[], bool]) -> str:
        """Wait a little until the agent has what a launch takes, or it is given up; why there is still no room."""
        return await self._limits.room(given_up)

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    async def _readings(self, without: AttemptKey | None = None) -> tuple[list[GpuReading], str]:
        """How the GPUs are, to an attempt's processes as to strangers'; or why NVML does not answer."""
        if self._link is None:
            return [], ""
        try:
            told = {str(raw["uuid"]): raw for raw in await self._link.readings()}
        except NvmlAbsent:
            self._utilisation = {}
            return [], "the driver is gone"
        except NvmlSilent as error:
            self._utilisation = {}
            return [], str(error)
        if told.keys() - self._gpus.keys():
            await self._take_newcomers(self._link)
        self._utilisation = {
            uuid: float(raw["utilisation_percent"])
            for uuid, raw in told.items()
            if raw.get("utilisation_percent") is not None
        }
        self._answering = frozenset(told)
        self._forget_gone()
        return [self._reading(uuid, told.get(uuid), without) for uuid in self._gpus], ""

    async def _take_newcomers(self, link: NvmlLink) -> None:
        try:
            self._gpus |= {gpu["uuid"]: gpu for gpu in await link.gpus()}
            if self._note in self._inventory.not_enforced:
                self._inventory.not_enforced.remove(self._note)
        except (NvmlSilent, NvmlAbsent) as error:  # the next look asks again
            log.warning("gpus_not_told", error=str(error))

    def _reading(self, uuid: str, raw: Mapping[str, Any] | None, without: AttemptKey | None) -> GpuReading:
        if raw is None:  # NVML has it no more
            return GpuReading(uuid, lost=True)
        facts = {name: raw[name] for name in FACTS if name in raw}
        processes = [(int(pid), int(held)) for pid, held in raw.get("processes", ())] if self._knows_pids else []
        return GpuReading(uuid, processes=self._owners.tell(uuid, processes, without), **facts)

    def _take_event(self, event: Event) -> None:
        double_bit = RULES["ecc_double_bit"]
        self._events.append(
            Sign(double_bit.name, double_bit.meaning, event.gpu_uuid)
            if event.xid is None
            else core.xid_sign(event.gpu_uuid, event.xid)
        )
        self._wake.set()

    # What follows ---------------------------------------------------------------------------------------------

    def _judge(self, signs: Sequence[Sign], *, blind: bool = False) -> None:
        now, self._events, events = time.monotonic(), [], self._events
        elapsed_seconds, self._looked_seconds = now - self._looked_seconds, now
        self._era = read_era(self._sysfs)
        self._findings = core.judge(
            self._findings, [*signs, *events], time.time(), elapsed_seconds, self._era, blind=blind
        )
        self._tell()

    def _tell(self) -> None:
        """Put what stands into the inventory, keep it, and tell placement where that changes anything."""
        before = resources_pb2.Inventory()
        before.CopyFrom(self._inventory)
        found = core.problems(self._findings)
        ill = core.ill_gpus(found)
        if self._gpus or self._link is not None:
            gpus = nvml_gpus(self._gpus.values(), shareable=self._shareable)
            del self._inventory.gpus[:]
            self._inventory.gpus.extend(gpus)
        for gpu in self._inventory.gpus:
            gpu.unhealthy_reason = ill.get(gpu.uuid, "")
        del self._inventory.problems[:]
        self._inventory.problems.extend(map(_to_wire, found))
        self._keep()
        if self._inventory != before:
            for problem in found:
                log.warning("unwell", check=problem.check, gpu=problem.gpu_uuid, action=problem.action.value,
                            reason=problem.reason)  # fmt: skip
            self._changed()

    def _keep(self) -> None:
        """Write down what is new; how time passes over what stands is not worth a write at each look."""
        remembered = Remembered(self._findings, tuple(self._gpus.values()), self._era)
        still = replace(remembered, findings=tuple(map(_timeless, self._findings)))
        if still != self._written:
            self._file.write(remembered)
            self._written = still

    def release(self, gpu_uuids: Sequence[str]) -> None:
        """Forget what was found of some GPUs, and look anew: what is still so is found again."""
        log.warning("gpus_released", gpus=list(gpu_uuids))
        self._findings = core.released(self._findings, gpu_uuids)
        self._released |= set(gpu_uuids)
        self._forget_gone()
        self._tell()
        self._wake.set()

    def _forget_gone(self) -> None:
        """Forget GPUs that NVML has no more, and the operator knows; which those are the first look tells."""
        if self._answering:
            for uuid in self._released & self._gpus.keys() - self._answering:
                del self._gpus[uuid]
            self._released.clear()

    # GPUs that are given and given back -----------------------------------------------------------------------

    async def busy(self, assignment: node_service_pb2.Assignment) -> str:
        """Why the GPUs of an attempt that is to be started are not free, or may not be; nothing where they are."""
        return await self._settle(assignment, "cannot start")

    async def settle(self, assignment: node_service_pb2.Assignment) -> None:
        """Wait until NVML says that nothing of an attempt that has ended holds its GPUs; else they are held."""
        await self._settle(assignment, "has ended")

    async def _settle(self, assignment: node_service_pb2.Assignment, what: str) -> str:
        uuids = gpus_of(assignment) & self._gpus.keys()
        if not uuids or not self._knows_pids:
            return ""
        deadline = time.monotonic() + self._patience_seconds
        key = AttemptKey(assignment.job_id, assignment.number)
        while True:
            async with self._looking:
                readings, why = await self._readings(key)
            if why:
                return f"gpu_busy: NVML does not say whether its GPUs are free: {why}"
            signs = [sign for reading in readings if reading.uuid in uuids for sign in core.busy_signs(reading)]
            if not signs:
                return ""
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        log.error("gpu_busy", attempt=str(key), what=what, why=signs[0].detail)
        self._hold_at_once(signs)
        return f"gpu_busy: {signs[0].gpu_uuid} is {signs[0].detail}"

    def _hold_at_once(self, signs: Sequence[Sign]) -> None:
        """Take signs as having lasted long enough: they were waited for."""
        stands = {finding.key: finding for finding in self._findings}
        for sign in signs:
            finding = stands.get((sign.gpu_uuid, sign.rule)) or Finding(
                sign.rule, sign.detail, sign.gpu_uuid, sign.mark, time.time(), era=self._era
            )
            stands[finding.key] = replace(
                finding, lasted_seconds=max(finding.lasted_seconds, RULES[sign.rule].after_seconds)
            )
        self._findings = tuple(stands[key] for key in sorted(stands))
        self._tell()

    def signs_of(self, key: AttemptKey) -> Sequence[str]:
        """What was seen of the GPUs that an attempt has or had while it ran, and of the node."""
        if (attempt := self._attempts().get(key)) is None:
            return ()
        began = min(attempt.received, attempt.status.start_time or attempt.received)
        return core.signs_for(self._findings, gpus_of(attempt.assignment), began)

    def utilisation_percent(self, gpu_uuids: Sequence[str]) -> float:
        """The mean utilisation of some GPUs at the last look, from 0 to 100; -1 where it is not known of all."""
        if not gpu_uuids or any(uuid not in self._utilisation for uuid in gpu_uuids):
            return UNKNOWN
        return sum(self._utilisation[uuid] for uuid in gpu_uuids) / len(gpu_uuids)

    async def close(self) -> None:
        """End the process that asks NVML."""
        self._limits.close()
        if self._link is not None:
            await self._link.close()


def gpus_of(assignment: node_service_pb2.Assignment) -> set[str]:
    """The UUIDs of the GPUs of which an attempt has something here."""
    return {share.uuid for task in assignment.allocation.tasks for share in task.gpus}


def _unread(error: BaseException) -> core.NodeReading:
    """Return what it shows of a node that it could not be read."""
    why = str(error)
    match lacking(error):
        case "descriptors":
            return core.NodeReading(descriptors_error=why)
        case "processes":
            return core.NodeReading(processes_error=why)
        case "memory":
            return core.NodeReading(memory_error=why or "the agent cannot allocate memory")
    return core.NodeReading(disk_error=why)


def _timeless(finding: Finding) -> Finding:
    return replace(finding, lasted_seconds=float(finding.told), calm_seconds=0.0)


def _to_wire(problem: HealthProblem) -> resources_pb2.HealthProblem:
    return resources_pb2.HealthProblem(
        check=problem.check,
        gpu_uuid=problem.gpu_uuid,
        action=resources_pb2.HealthAction.Value(f"HEALTH_ACTION_{problem.action.name}"),
        reason=problem.reason,
        since=timestamp(problem.since or 0.0),
        remedy=problem.remedy,
    )
