"""Monitors the node's health: takes readings, evaluates the rules of the core, saves the findings and reports them.

While the NVML process does not answer, the last known GPUs stay in the inventory and are held from new work.
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

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model import health as core
from cotenant.core.model.health import Finding, GpuReading, Sign
from cotenant.core.model.health_rules import RULES
from cotenant.core.model.node import HealthProblem
from cotenant.exhaustion import exhausted_resource
from cotenant.node_agent.control.attempt import Attempts
from cotenant.node_agent.control.gpu_owners import GpuOwners, sees_all_processes
from cotenant.node_agent.control.health_file import HealthFile, HealthSnapshot
from cotenant.node_agent.probes.gpus import nvml_gpus
from cotenant.node_agent.probes.node_reading import read_era, read_node
from cotenant.node_agent.probes.nvml_link import Event, NvmlLink, NvmlNotFound, NvmlUnresponsive
from cotenant.node_agent.probes.own_limits import OwnLimits
from cotenant.node_agent.runtime.attempt_status import AttemptKey, timestamp
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

UNKNOWN = -1.0
DISK_SECONDS_MAX = 5.0
FIRST_CHECK_SECONDS_MAX = 15.0  # then the agent starts without NVML, which may answer later
GPU_RELEASE_SECONDS_MAX = 5.0  # until a GPU that should be free counts as busy
PAUSE_SECONDS = 0.25
PROCESSES_UNKNOWN = (
    "processes on GPUs are not checked: the agent runs in a PID namespace of its own, where NVML's pids are not valid"
)
FACTS = (*core.FACTS, "lost", "error", "temperature_celsius", "recovery")


class NodeHealth:
    """The health of one node, written into its inventory. Without a `link` there are no GPUs to monitor."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        state_dir: Path,
        *,
        link: NvmlLink | None,
        attempts: Attempts,
        report: Callable[[resources_pb2.Inventory], None],
        interval_seconds: float,
        sysfs: Path,
        shareable: bool = False,
        knows_pids: bool | None = None,
        gpu_release_seconds: float = GPU_RELEASE_SECONDS_MAX,
        limits: OwnLimits | None = None,
    ) -> None:
        self._inventory, self._state_dir, self._link, self._report = inventory, state_dir, link, report
        self._interval_seconds, self._sysfs, self._shareable = interval_seconds, sysfs, shareable
        self._gpu_release_seconds, self._limits = gpu_release_seconds, limits or OwnLimits(self.wake)
        self._knows_pids = sees_all_processes() if knows_pids is None else knows_pids
        self._attempts, self._owners = attempts, GpuOwners(attempts)
        self._file = HealthFile(state_dir)
        self._findings: tuple[Finding, ...] = ()
        self._gpus: dict[str, dict[str, Any]] = {}  # as NVML reported them
        self._utilisation: dict[str, float] = {}
        self._answering: frozenset[str] = frozenset()  # GPUs that NVML reported at the last check
        self._released: set[str] = set()  # by an operator; removed unless NVML reports them
        self._events: list[Sign] = []
        self._written: HealthSnapshot | None = None
        self._checked_seconds = time.monotonic()
        self._wake = asyncio.Event()
        self._checking = asyncio.Lock()
        self._disk: asyncio.Task[core.NodeReading] | None = None
        self._starting: asyncio.Task[list[dict[str, Any]]] | None = None
        self._outer_job_ends = ""
        self._note = ""  # why there are no GPUs, while there are none
        self._era = core.BootInstance()
        if link is not None:
            link.events.subscribe(self._take_event)

    # Readings -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Load the saved health and find the GPUs; the inventory then has them and their problems."""
        remembered = self._file.read()
        self._findings, self._gpus = remembered.findings, {str(gpu["uuid"]): gpu for gpu in remembered.gpus}
        signs = await self._find_gpus(self._link, remembered.era) if self._link is not None else []
        if self._link is None:
            self._gpus = {}
            self._findings = tuple(finding for finding in self._findings if not finding.gpu_uuid)
        if self._gpus and not self._knows_pids:
            self._inventory.not_enforced.append(PROCESSES_UNKNOWN)
        self._evaluate(signs, blind=True)

    def gpu_minors(self) -> Mapping[str, int]:
        """Return the N of each GPU's /dev/nvidiaN by UUID, as far as NVML reports it."""
        return self._link.minors if self._link is not None else {}

    async def _find_gpus(self, link: NvmlLink, then: core.BootInstance) -> list[Sign]:
        """List the GPUs. GPUs that were present since this boot and are not reported any longer count as lost."""
        try:
            async with asyncio.timeout(FIRST_CHECK_SECONDS_MAX):
                found = await asyncio.shield(self._start(link))
        except NvmlNotFound:
            log.info("nvml_not_found")
            self._link = None
        except (TimeoutError, NvmlUnresponsive) as error:
            self._note = f"GPUs are not used: NVML failed: {error or 'no answer'}"
            self._inventory.not_enforced.append(self._note)
            return core.unresponsive_signs(self._gpus, str(error) or "no answer")
        else:
            if then.boot != read_era(self._sysfs).boot:
                self._gpus = {}  # a GPU missing after a reboot was removed
            self._gpus |= {gpu["uuid"]: gpu for gpu in found}
            self._inventory.not_enforced.extend(link.troubles)
        return []

    def _start(self, link: NvmlLink) -> asyncio.Task[list[dict[str, Any]]]:
        """Start listing all GPUs, in a task that need not be awaited."""
        self._starting = asyncio.create_task(link.gpus())
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._starting

    async def run(self) -> None:
        """Check periodically, and at once after an event, until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self.check()
            except Exception:  # the next check may succeed
                log.exception("health_check_failed")
            with contextlib.suppress(TimeoutError):  # the next check is due
                async with asyncio.timeout(self._interval_seconds):
                    await self._wake.wait()

    async def check(self) -> None:
        """Check everything once and publish changes."""
        async with self._checking:
            node = replace(await self._read_node(), outer_job_ends=self._outer_job_ends)
            readings, why = await self._readings()
            standing = [finding.rule for finding in self._findings if not finding.gpu_uuid]
            signs = core.node_signs(node, standing)
            if why:
                signs += core.unresponsive_signs(self._gpus, why)
            signs += [sign for reading in readings for sign in core.gpu_signs(reading)]
            self._evaluate(signs, blind=bool(why))

    async def _read_node(self) -> core.NodeReading:
        """Read the node's state; while the disk does not answer, no second read is started."""
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
            reading = _unreadable_node(error)
        self._disk = None
        return reading

    async def wait_for_resources(self, given_up: Callable[[], bool]) -> str:
        """Wait briefly until the agent has the resources for a launch; return what is missing, or "" if `given_up`."""
        return await self._limits.wait_for_resources(given_up)

    async def drain(self, reason: str) -> None:
        """Report that the node takes no more work and is drained, because the outer job ends."""
        self._outer_job_ends = reason
        await self.check()

    def wake(self) -> None:
        """Check at once."""
        self._wake.set()

    async def _readings(self, without: AttemptKey | None = None) -> tuple[list[GpuReading], str]:
        """Return the GPUs' readings, where processes of `without` count as foreign; or why NVML does not answer."""
        if self._link is None:
            return [], ""
        try:
            reported = {str(raw["uuid"]): raw for raw in await self._link.readings()}
        except NvmlNotFound:
            self._utilisation = {}
            return [], "the driver is gone"
        except NvmlUnresponsive as error:
            self._utilisation = {}
            return [], str(error)
        if reported.keys() - self._gpus.keys():
            await self._add_new_gpus(self._link)
        self._utilisation = {
            uuid: float(raw["utilisation_percent"])
            for uuid, raw in reported.items()
            if raw.get("utilisation_percent") is not None
        }
        self._answering = frozenset(reported)
        self._drop_removed_gpus()
        return [self._reading(uuid, reported.get(uuid), without) for uuid in self._gpus], ""

    async def _add_new_gpus(self, link: NvmlLink) -> None:
        try:
            self._gpus |= {gpu["uuid"]: gpu for gpu in await link.gpus()}
            if self._note in self._inventory.not_enforced:
                self._inventory.not_enforced.remove(self._note)
        except (NvmlUnresponsive, NvmlNotFound) as error:  # the next check retries
            log.warning("gpu_list_failed", error=str(error))

    def _reading(self, uuid: str, raw: Mapping[str, Any] | None, without: AttemptKey | None) -> GpuReading:
        if raw is None:  # NVML no longer reports it
            return GpuReading(uuid, lost=True)
        facts = {name: raw[name] for name in FACTS if name in raw}
        processes = [(int(pid), int(held)) for pid, held in raw.get("processes", ())] if self._knows_pids else []
        return GpuReading(uuid, processes=self._owners.describe(uuid, processes, without), **facts)

    def _take_event(self, event: Event) -> None:
        double_bit = RULES["ecc_double_bit"]
        self._events.append(
            Sign(double_bit.name, double_bit.meaning, event.gpu_uuid)
            if event.xid is None
            else core.xid_sign(event.gpu_uuid, event.xid)
        )
        self._wake.set()

    # Findings ---------------------------------------------------------------------------------------------

    def _evaluate(self, signs: Sequence[Sign], *, blind: bool = False) -> None:
        now, self._events, events = time.monotonic(), [], self._events
        elapsed_seconds, self._checked_seconds = now - self._checked_seconds, now
        self._era = read_era(self._sysfs)
        self._findings = core.judge(
            self._findings, [*signs, *events], time.time(), elapsed_seconds, self._era, blind=blind
        )
        self._publish()

    def _publish(self) -> None:
        """Write the current findings into the inventory, save them, and report the inventory if it changed."""
        before = resources_pb2.Inventory()
        before.CopyFrom(self._inventory)
        found = core.problems(self._findings)
        ill = core.unhealthy_gpus(found)
        if self._gpus or self._link is not None:
            gpus = nvml_gpus(self._gpus.values(), shareable=self._shareable)
            del self._inventory.gpus[:]
            self._inventory.gpus.extend(gpus)
        for gpu in self._inventory.gpus:
            gpu.unhealthy_reason = ill.get(gpu.uuid, "")
        del self._inventory.problems[:]
        self._inventory.problems.extend(map(_to_wire, found))
        self._save()
        if self._inventory != before:
            for problem in found:
                log.warning("node_unhealthy", check=problem.check, gpu=problem.gpu_uuid, action=problem.action.value,
                            reason=problem.reason)  # fmt: skip
            self._report(self._inventory)

    def _save(self) -> None:
        """Save findings when they change; elapsed times alone are not worth a write."""
        remembered = HealthSnapshot(self._findings, tuple(self._gpus.values()), self._era)
        still = replace(remembered, findings=tuple(map(_without_times, self._findings)))
        if still != self._written:
            self._file.write(remembered)
            self._written = still

    def release(self, gpu_uuids: Sequence[str]) -> None:
        """Clear the findings of some GPUs and check again: persisting problems are found again."""
        log.warning("gpus_released", gpus=list(gpu_uuids))
        self._findings = core.released(self._findings, gpu_uuids)
        self._released |= set(gpu_uuids)
        self._drop_removed_gpus()
        self._publish()
        self._wake.set()

    def _drop_removed_gpus(self) -> None:
        """Drop released GPUs that NVML no longer reports; waits for NVML's first answer."""
        if self._answering:
            for uuid in self._released & self._gpus.keys() - self._answering:
                del self._gpus[uuid]
            self._released.clear()

    # Allocated and released GPUs -----------------------------------------------------------------------

    async def busy(self, assignment: agent_pb2.Assignment) -> str:
        """Return why the GPUs of an attempt that is about to start are not free or not known to be; "" if they are."""
        return await self._wait_for_free_gpus(assignment, "cannot start")

    async def wait_for_gpus(self, assignment: agent_pb2.Assignment) -> None:
        """Wait until NVML shows no process of an ended attempt on its GPUs; otherwise hold the GPUs from new work."""
        await self._wait_for_free_gpus(assignment, "has ended")

    async def _wait_for_free_gpus(self, assignment: agent_pb2.Assignment, what: str) -> str:
        uuids = gpus_of(assignment) & self._gpus.keys()
        if not uuids or not self._knows_pids:
            return ""
        deadline = time.monotonic() + self._gpu_release_seconds
        key = AttemptKey(assignment.job_id, assignment.number)
        while True:
            async with self._checking:
                readings, why = await self._readings(key)
            if why:
                return f"gpu_busy: cannot check whether its GPUs are free: {why}"
            signs = [
                sign for reading in readings if reading.uuid in uuids for sign in core.foreign_process_signs(reading)
            ]
            if not signs:
                return ""
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        log.error("gpu_busy", attempt=str(key), what=what, why=signs[0].detail)
        self._hold_gpus(signs)
        return f"gpu_busy: {signs[0].gpu_uuid} is {signs[0].detail}"

    def _hold_gpus(self, signs: Sequence[Sign]) -> None:
        """Turn signs into findings at once: their waiting time is over."""
        stands = {finding.key: finding for finding in self._findings}
        for sign in signs:
            finding = stands.get((sign.gpu_uuid, sign.rule)) or Finding(
                sign.rule, sign.detail, sign.gpu_uuid, sign.mark, time.time(), era=self._era
            )
            stands[finding.key] = replace(
                finding, lasted_seconds=max(finding.lasted_seconds, RULES[sign.rule].after_seconds)
            )
        self._findings = tuple(stands[key] for key in sorted(stands))
        self._publish()

    def signs_of(self, key: AttemptKey) -> Sequence[str]:
        """Return the signs seen on an attempt's GPUs and on the node while the attempt ran."""
        if (attempt := self._attempts.get(key)) is None:
            return ()
        began = min(attempt.received, attempt.status.start_time or attempt.received)
        return core.signs_for(self._findings, gpus_of(attempt.assignment), began)

    def utilisation_percent(self, gpu_uuids: Sequence[str]) -> float:
        """Return the mean utilization of some GPUs at the last check, 0 to 100; -1 if it is unknown for any of them."""
        if not gpu_uuids or any(uuid not in self._utilisation for uuid in gpu_uuids):
            return UNKNOWN
        return sum(self._utilisation[uuid] for uuid in gpu_uuids) / len(gpu_uuids)

    async def close(self) -> None:
        """Stop the NVML process."""
        self._limits.close()
        if self._link is not None:
            await self._link.close()


def gpus_of(assignment: agent_pb2.Assignment) -> set[str]:
    """Return the UUIDs of the GPUs that an assignment uses on this node."""
    return {share.uuid for task in assignment.allocation.tasks for share in task.gpus}


def _unreadable_node(error: BaseException) -> core.NodeReading:
    """Return the reading that an error during a check of the node amounts to."""
    why = str(error)
    match exhausted_resource(error):
        case "descriptors":
            return core.NodeReading(descriptors_error=why)
        case "processes":
            return core.NodeReading(processes_error=why)
        case "memory":
            return core.NodeReading(memory_error=why or "the agent cannot allocate memory")
    return core.NodeReading(disk_error=why)


def _without_times(finding: Finding) -> Finding:
    return replace(finding, lasted_seconds=float(finding.reportable), calm_seconds=0.0)


def _to_wire(problem: HealthProblem) -> resources_pb2.HealthProblem:
    return resources_pb2.HealthProblem(
        check=problem.check,
        gpu_uuid=problem.gpu_uuid,
        action=resources_pb2.HealthAction.Value(f"HEALTH_ACTION_{problem.action.name}"),
        reason=problem.reason,
        since=timestamp(problem.since or 0.0),
        remedy=problem.remedy,
    )
