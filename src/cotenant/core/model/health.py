"""Judges the health of a node and its GPUs: from observations to consequences, and back to normal.

A *sign* is what one check shows: an event, such as an XID, or a present condition, such as a lost GPU. A *finding* is
the state kept for signs from check to check, and across restarts of the agent: since when it exists, how long it has
lasted, and for how long it has not been seen. Elapsed time is counted in steps of a monotonic clock, so that a clock
that jumps neither releases a GPU nor holds one forever. Each finding has a way to recover, by its rule (`health_rules`)
or by an operator's release.

If NVML does not respond, nothing is learned about the GPUs: their findings then neither begin nor clear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cotenant.core.model.health_rules import OUTER_JOB, RULES, Recovery, Rule, xid_rule
from cotenant.core.model.node import HealthAction, HealthProblem, Inventory

HOLDING = frozenset({HealthAction.HOLD, HealthAction.QUARANTINE})  # of a GPU: it gets no new work
MIB = 1 << 20
FACTS = ("hardware_slowdown", "thermal_slowdown", "remap_failed", "remap_pending", "retirement_pending")

DISK_BYTES_MIN, DISK_BYTES_ENOUGH = 256 * MIB, 512 * MIB
INODES_MIN, INODES_ENOUGH = 1_000, 2_000
MEMORY_SHARE_MIN, MEMORY_SHARE_ENOUGH = 0.015, 0.03
DESCRIPTORS_MIN, DESCRIPTORS_ENOUGH = 32, 64
STALL_PERCENT_MAX, STALL_PERCENT_CALM = 40.0, 20.0
LOAD_PER_CPU_MAX, LOAD_PER_CPU_CALM = 50.0, 25.0


@dataclass(frozen=True, slots=True)
class BootInstance:
    """A boot of the machine and a load of the driver; empty if unknown."""

    boot: str = ""
    driver: str = ""


UNKNOWN_BOOT = BootInstance()


@dataclass(frozen=True, slots=True)
class Sign:
    """What one check shows. A finding keeps its first detail as long as the `mark` stays the same."""

    rule: str
    detail: str
    gpu_uuid: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The state kept for one rule's signs on one GPU, or on the node if there is no UUID."""

    rule: str
    detail: str
    gpu_uuid: str = ""
    mark: str = ""
    since: float = 0.0  # unix time
    lasted_seconds: float = 0.0
    calm_seconds: float = 0.0  # time since it was last seen
    era: BootInstance = UNKNOWN_BOOT

    @property
    def key(self) -> tuple[str, str]:
        """The identity of a finding: GPU and rule."""
        return self.gpu_uuid, self.rule

    @property
    def reportable(self) -> bool:
        """Whether it has lasted long enough to have consequences."""
        return self.lasted_seconds >= RULES[self.rule].after_seconds

    def sign(self) -> str:
        """Return the sign in the few words that failure rules match."""
        rule = RULES[self.rule]
        if not self.gpu_uuid:
            return f"{rule.name.replace('_', ' ')}: {self.detail}"
        return f"{f'xid {self.mark}' if rule.check == 'xid' else rule.name.replace('_', ' ')} on {self.gpu_uuid}"

    def problem(self) -> HealthProblem:
        """Return the problem to report."""
        rule = RULES[self.rule]
        return HealthProblem(rule.check, rule.action, self.detail, self.gpu_uuid, self.since, rule.remedy)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU. An empty name means that it has exited."""

    pid: int
    memory_bytes: int = 0
    name: str = ""
    user: str = ""
    ours: bool = False

    def __str__(self) -> str:
        """Return the process as shown to users."""
        holds = f" with {self.memory_bytes / MIB:.0f} MiB" if self.memory_bytes else ""
        who = f"{self.name} of {self.user or 'an unknown user'}" if self.name else "which is gone"
        return f"pid {self.pid} ({who}){holds}"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What NVML reports about a GPU now; None for values it does not report."""

    uuid: str
    error: str = ""  # NVML's error if it does not answer for this GPU
    lost: bool = False
    hardware_slowdown: bool = False
    thermal_slowdown: bool = False
    temperature_celsius: float | None = None
    remap_failed: bool = False
    remap_pending: bool = False
    retirement_pending: bool = False
    recovery: str = ""  # "reset", "reboot" or "drain", where the driver asks for it
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReading:
    """What the kernel reports about the node; None for values it does not report."""

    disk_free_bytes: int | None = None
    inodes_free: int | None = None
    disk_error: str = ""
    memory_available_bytes: int | None = None
    memory_bytes: int = 0
    memory_stall_percent: float | None = None
    load: float | None = None
    cpus: int = 1
    descriptors_free: int | None = None  # that the agent may still open
    descriptors_max: int = 0
    descriptors_error: str = ""  # why the agent cannot open files, if out of descriptors
    processes_error: str = ""  # why the agent cannot start processes or threads
    memory_error: str = ""  # why the agent cannot allocate memory
    outer_job_ends: str = ""  # why the outer job that the agent runs in takes no more work


def xid_sign(gpu_uuid: str, number: int) -> Sign:
    """Return the sign of an XID event."""
    rule = xid_rule(number)
    return Sign(rule.name, f"XID {number}: {rule.meaning}", gpu_uuid, str(number))


def gpu_signs(reading: GpuReading) -> list[Sign]:
    """Return the signs in a GPU's reading."""
    if reading.lost:
        return [_plain("gpu_lost", reading.uuid)]
    if reading.error:
        return [Sign("gpu_unreadable", f"NVML does not answer for it: {reading.error}", reading.uuid)]
    heat = f", at {reading.temperature_celsius:.0f} °C" if reading.temperature_celsius is not None else ""
    signs = [
        _plain(name, reading.uuid, heat if name.endswith("slowdown") else "")
        for name in FACTS
        if getattr(reading, name)
    ]
    if reading.recovery:
        signs.append(_plain(f"recovery_{reading.recovery}", reading.uuid))
    return signs + foreign_process_signs(reading)


def foreign_process_signs(reading: GpuReading) -> list[Sign]:
    """Return the sign of processes on a GPU that we did not start, if there are any."""
    foreign = [process for process in reading.processes if not process.ours]
    if not foreign:
        return []
    rule = "foreign_process_beside" if len(foreign) < len(reading.processes) else "foreign_process"
    words = ", ".join(map(str, foreign[:3])) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
    mark = " ".join(str(process.pid) for process in foreign)
    return [Sign(rule, f"held by {words}, not started by us", reading.uuid, mark)]


def unresponsive_signs(uuids: Iterable[str], why: str) -> list[Sign]:
    """Return one sign for each GPU if NVML does not respond."""
    return [Sign("nvml_silent", f"NVML does not answer: {why}", uuid) for uuid in uuids]


def _plain(name: str, gpu_uuid: str, more: str = "") -> Sign:
    return Sign(name, RULES[name].meaning + more, gpu_uuid)


def node_signs(reading: NodeReading, standing: Iterable[str] = ()) -> list[Sign]:
    """Return the signs in a node's reading. A present finding clears at a separate threshold, so that it does not flap.

    >>> [sign.rule for sign in node_signs(NodeReading(disk_free_bytes=300 * MIB))]
    []
    >>> [sign.rule for sign in node_signs(NodeReading(disk_free_bytes=300 * MIB), ["disk_low"])]
    ['disk_low']
    """
    stands = frozenset(standing)
    signs: list[Sign] = []

    def limit(rule: str, begins: float, ends: float) -> float:
        return ends if rule in stands else begins

    disk, inodes = reading.disk_free_bytes, reading.inodes_free
    if disk is not None and disk < limit("disk_low", DISK_BYTES_MIN, DISK_BYTES_ENOUGH):
        detail = f"only {disk / MIB:.0f} MiB are free on the disk of the agent's directory"
        signs.append(Sign("disk_low", detail))
    elif inodes is not None and inodes < limit("disk_low", INODES_MIN, INODES_ENOUGH):
        signs.append(Sign("disk_low", f"only {inodes} files can be made on the disk of the agent's directory"))
    if reading.disk_error:
        signs.append(Sign("disk_refuses", f"the agent's directory cannot be written: {reading.disk_error}"))
    available, all_of_it = reading.memory_available_bytes, reading.memory_bytes
    least = limit("memory_low", MEMORY_SHARE_MIN, MEMORY_SHARE_ENOUGH)
    if available is not None and available < least * all_of_it:
        detail = f"only {available / MIB:.0f} of {all_of_it / MIB:.0f} MiB of memory are available"
        signs.append(Sign("memory_low", detail))
    stall, most = reading.memory_stall_percent, limit("memory_stall", STALL_PERCENT_MAX, STALL_PERCENT_CALM)
    if stall is not None and stall > most:
        signs.append(Sign("memory_stall", f"all tasks wait for memory {stall:.0f} % of the time"))
    load = limit("overload", LOAD_PER_CPU_MAX, LOAD_PER_CPU_CALM)
    if reading.load is not None and reading.load > load * reading.cpus:
        signs.append(Sign("overload", f"a load of {reading.load:.0f} on {reading.cpus} CPUs"))
    if reading.outer_job_ends:
        signs.append(Sign(OUTER_JOB, reading.outer_job_ends))
    return signs + _agent_signs(reading, limit("descriptors_low", DESCRIPTORS_MIN, DESCRIPTORS_ENOUGH))


def _agent_signs(reading: NodeReading, descriptors_min: float) -> list[Sign]:
    """Return the signs of resources that the agent itself lacks."""
    signs = []
    free, most = reading.descriptors_free, reading.descriptors_max
    if reading.descriptors_error:
        signs.append(Sign("descriptors_low", f"out of file descriptors: {reading.descriptors_error}"))
    elif free is not None and free < descriptors_min:
        signs.append(Sign("descriptors_low", f"out of file descriptors: the agent has {most - free} of {most} open"))
    if reading.processes_error:
        signs.append(Sign("processes_low", f"out of process ids: {reading.processes_error}"))
    if reading.memory_error:
        signs.append(Sign("memory_refused", f"out of memory: {reading.memory_error}"))
    return signs


def judge(
    standing: Sequence[Finding], signs: Iterable[Sign], now: float, elapsed_seconds: float, era: BootInstance,
    *, blind: bool = False,
) -> tuple[Finding, ...]:  # fmt: skip
    """Return the findings after a check, in a fixed order.

    `now` is unix time, used only for display; `elapsed_seconds` have passed on a monotonic clock since the last check.
    `blind`: nothing was learned about the GPUs this time.
    """
    seen: dict[tuple[str, str], Sign] = {(sign.gpu_uuid, sign.rule): sign for sign in signs if sign.rule in RULES}
    kept = {
        finding.key: after
        for finding in standing
        if finding.rule in RULES
        and (after := _after(finding, seen.get(finding.key), max(0.0, elapsed_seconds), era, blind=blind))
    }
    for key, sign in seen.items():
        before = kept.get(key)
        if before is None:
            kept[key] = Finding(sign.rule, sign.detail, sign.gpu_uuid, sign.mark, now, era=era)
        elif before.mark != sign.mark:
            kept[key] = replace(before, detail=sign.detail, mark=sign.mark)
        if RULES[sign.rule].event:  # it happened now, and again
            kept[key] = replace(kept[key], since=now, era=era)
    return tuple(kept[key] for key in sorted(kept))


def _after(
    finding: Finding, sign: Sign | None, elapsed_seconds: float, era: BootInstance, *, blind: bool
) -> Finding | None:
    """Return a finding after some time; None if it has cleared."""
    rule = RULES[finding.rule]
    if sign is None and _recovered(rule, finding.era, era):
        return None
    lasted_seconds = finding.lasted_seconds + elapsed_seconds
    if sign is not None:
        return replace(finding, lasted_seconds=lasted_seconds, calm_seconds=0.0)
    if blind and finding.gpu_uuid and finding.rule != "nvml_silent":
        return finding
    calm_seconds = finding.calm_seconds + elapsed_seconds
    if rule.recovery is Recovery.CALM and (calm_seconds >= rule.calm_seconds or not finding.reportable):
        return None
    return replace(finding, lasted_seconds=lasted_seconds, calm_seconds=calm_seconds)


def _recovered(rule: Rule, then: BootInstance, now: BootInstance) -> bool:
    """Return whether a reboot or driver reload ends a finding. A reboot ends every finding that is only observed."""
    rebooted = bool(then.boot and now.boot and then.boot != now.boot)
    reloaded = bool(then.driver and now.driver and then.driver != now.driver)
    return rule.recovery is not Recovery.RELEASE and (rebooted or (rule.recovery is Recovery.RESET and reloaded))


def released(standing: Iterable[Finding], gpu_uuids: Iterable[str]) -> tuple[Finding, ...]:
    """Return the findings left after an operator has released GPUs: conditions that persist are found again."""
    free = frozenset(gpu_uuids)
    return tuple(finding for finding in standing if not finding.gpu_uuid or finding.gpu_uuid not in free)


def problems(standing: Iterable[Finding]) -> tuple[HealthProblem, ...]:
    """Return the problems of the findings, the most severe of each GPU first."""
    reported = [finding.problem() for finding in standing if finding.reportable]
    return tuple(sorted(reported, key=lambda problem: (problem.gpu_uuid, -severity(problem.action), problem.check)))


def severity(action: HealthAction) -> int:
    """Return how severe an action is, from 0."""
    return list(HealthAction).index(action)


def unhealthy_gpus(found: Iterable[HealthProblem]) -> dict[str, str]:
    """Return why each unhealthy GPU gets no new work, by UUID."""
    ill: dict[str, str] = {}
    for problem in sorted(found, key=lambda problem: -severity(problem.action)):
        if problem.gpu_uuid and problem.action in HOLDING:
            ill.setdefault(problem.gpu_uuid, problem.reason)
    return ill


def signs_for(standing: Iterable[Finding], gpu_uuids: Iterable[str], since: float) -> list[str]:
    """Return the signs on an attempt's GPUs since it began, in unix time, and on its node, to explain why it ended.

    Signs without consequences are left out: a program's own XIDs say less about its end than its output does.

    >>> seen = [Finding("xid_79", "XID 79: it has gone", "GPU-a", "79", since=5.0), Finding("gpu_lost", "", "GPU-b")]
    >>> signs_for(seen, ["GPU-a"], 4.0), signs_for(seen, ["GPU-a"], 6.0)
    (['xid 79 on GPU-a'], [])
    """
    mine = frozenset(gpu_uuids)
    return [
        finding.sign()
        for finding in standing
        if finding.reportable
        and RULES[finding.rule].action is not HealthAction.IGNORE
        and (not finding.gpu_uuid or (finding.gpu_uuid in mine and finding.since >= since))
    ]


def node_problem(inventory: Inventory) -> HealthProblem | None:
    """Return the most severe problem for which the whole node gets no new work; None if there is none."""
    grave = [
        problem
        for problem in inventory.problems
        if not problem.gpu_uuid and problem.action in (HealthAction.HOLD, HealthAction.DRAIN)
    ]
    return max(grave, key=lambda problem: (severity(problem.action), problem.check), default=None)


def gpus_to_restart(before: Inventory | None, now: Inventory) -> frozenset[str]:
    """Return the UUIDs of the GPUs whose attempts must be restarted.

    These are GPUs in quarantine, as long as they are; and GPUs with a new problem that only a restart of the attempt
    fixes: attempts started after the problem was first reported may stay.
    """
    known = {_identity(problem) for problem in before.problems} if before else set()
    return frozenset(
        problem.gpu_uuid
        for problem in now.problems
        if problem.gpu_uuid
        and (
            problem.action is HealthAction.QUARANTINE
            or (problem.action is HealthAction.RESTART and _identity(problem) not in known)
        )
    )


def _identity(problem: HealthProblem) -> tuple[str, str, HealthAction, float | None]:
    return problem.check, problem.gpu_uuid, problem.action, problem.since
