"""CPU time of attempts: weights, throttles, and the policy that decides which jobs may be throttled.

CPU time is weighted by cores, so that attempts that compete for the same CPUs share them in proportion to their cores.
Only best-effort jobs lose CPU time: a job with cores of its own, and other jobs that wait for its steps, would be
slowed down in bursts by a quota, invisibly (CFS throttles a group for the rest of its period). Such a job may be given
fewer cores (`AttemptCores.narrow`) or be suspended.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

WEIGHT_PER_CPU = 10  # a thousand CPUs stay below the kernel's maximum weight


class ThrottleRefused(Exception):
    """An attempt cannot be throttled like this; its throttle is unchanged."""


@dataclass(frozen=True, slots=True)
class CpuThrottle:
    """How an attempt's CPU time is limited; the fields are independent.

    Attributes:
        idle: it gets only CPU time that no other attempt wants.
        cpu_limit_cores: it gets the CPU time of at most this many cores; 0 means no limit.
        suspended: its processes are frozen.
    """

    idle: bool = False
    cpu_limit_cores: float = 0.0
    suspended: bool = False


FREE = CpuThrottle()


def weight_of(cpus: int) -> int:
    """Return the weight for a number of CPUs; a task without CPUs of its own, which runs on all, counts as one CPU.

    >>> weight_of(8), weight_of(0)
    (80, 10)
    """
    return max(1, cpus) * WEIGHT_PER_CPU


def attempt_weight(allocation: resources_pb2.NodeAllocation) -> int:
    """Return the weight of all tasks of an attempt on this node."""
    return sum(weight_of(len(task.cpu_ids)) for task in allocation.tasks)


def cpu_throttle_refusal(throttle: CpuThrottle, *, best_effort: bool) -> str | None:
    """Return why a job may not be throttled like this; None if it may.

    >>> cpu_throttle_refusal(CpuThrottle(suspended=True), best_effort=False) is None
    True
    >>> cpu_throttle_refusal(CpuThrottle(idle=True), best_effort=False)
    'its CPU time may not be limited (cpu.idle): it is not a best-effort job and has cores of its own'
    """
    ways = [name for name, wanted in (("cpu.idle", throttle.idle), ("cpu.max", throttle.cpu_limit_cores > 0)) if wanted]
    if throttle.cpu_limit_cores < 0:
        return f"cannot limit CPU time to {throttle.cpu_limit_cores} cores"
    if ways and not best_effort:
        words = " and ".join(ways)
        return f"its CPU time may not be limited ({words}): it is not a best-effort job and has cores of its own"
    return None


def current_cpu_throttle(group: Group | None) -> CpuThrottle:
    """Return an attempt's current CPU throttle in the kernel."""
    if group is None or not group.exists():
        return FREE
    return CpuThrottle(group.is_idle(), group.cpu_limit(), group.is_frozen())


def apply_cpu_throttle(
    group: Group | None, throttle: CpuThrottle, *, best_effort: bool, allocation: resources_pb2.NodeAllocation
) -> None:
    """Throttle an attempt exactly like this; `FREE` releases it. Blocks while processes stop.

    Raises:
        ThrottleRefused: it is not allowed, or the kernel refuses it. The throttle is unchanged.
    """
    if reason := cpu_throttle_refusal(throttle, best_effort=best_effort):
        raise ThrottleRefused(reason)
    if group is None:
        if throttle != FREE:
            raise ThrottleRefused("it cannot be throttled: this node has no writable control group")
        return
    before = current_cpu_throttle(group)
    try:
        _apply(group, before, throttle, attempt_weight(allocation))
    except GroupError as error:
        try:
            _apply(group, current_cpu_throttle(group), before, attempt_weight(allocation))
        except GroupError as second:
            raise ThrottleRefused(f"{error}; rollback failed: {second}") from error
        raise ThrottleRefused(str(error)) from error


def _apply(group: Group, before: CpuThrottle, after: CpuThrottle, weight: int) -> None:
    """Apply the differences; releases come first."""
    if before.suspended and not after.suspended:
        group.freeze(False)
    if before.idle != after.idle:
        group.set_idle(after.idle)
        group.set_weight(weight)  # the kernel forgets it while a group is idle
    if before.cpu_limit_cores != after.cpu_limit_cores:
        group.limit_cpu(after.cpu_limit_cores)
    if after.suspended and not before.suspended:
        group.freeze(True)
