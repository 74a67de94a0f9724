"""CPU time of attempts: weights, suspension, and the policy that decides which jobs may lose CPU time.

CPU time is weighted by cores, so that attempts that compete for the same CPUs share them in proportion to their cores.
Only best-effort jobs lose CPU time: a job with cores of its own, and other jobs that wait for its steps, would be
slowed down in bursts by a quota, invisibly (CFS throttles a group for the rest of its period). Such a job may be given
fewer cores (`AttemptCores.narrow`) or be suspended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cotenant.node_agent.enforcement.core_changes import (
    ConfinedAttempt,
    CoreChange,
    Cores,
    task_group,
    write_or_restore,
)
from cotenant.node_agent.enforcement.hook import (
    EnforcedAttempt,
    EnforcedNode,
    EnforcementHook,
    NewAttempt,
    ThrottleChange,
    no_controller,
)
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

NOT_WEIGHTED = (
    "CPU time on shared cores is not weighted, and best-effort jobs cannot be limited to idle CPU time: "
    "no writable cpu control group"
)
NO_FREEZER = "jobs cannot be suspended in place: no writable freezer control group"
SIGNAL_PASSES_MAX = 10
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


class CpuTime(EnforcementHook):
    """Weights CPU time by cores, limits best-effort jobs to idle CPU time, and suspends attempts."""

    def open(self, node: EnforcedNode) -> list[str]:
        """Return why CPU time is not weighted and attempts are not suspended in place here."""
        frozen = node.group is not None and node.group.can_freeze()
        return [*no_controller(node, "cpu", NOT_WEIGHTED), *([] if frozen else [NO_FREEZER])]

    def prepare(self, attempt: NewAttempt) -> None:
        """Set the attempt's weight."""
        attempt.group.set_weight(attempt_weight(attempt.assignment.allocation))

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Set a task's weight."""
        group.set_weight(weight_of(len(task.cpu_ids)))

    def change_cores(self, attempt: ConfinedAttempt, change: CoreChange) -> None:
        """Set the weights for the new cores."""
        write_or_restore(attempt.group, change, write_weights)

    def throttle(self, change: ThrottleChange) -> None:
        """Limit the attempt to idle CPU time, suspend it, or release it: both, or neither if one is refused."""
        idle, suspended = change.wanted.idle, change.wanted.suspended
        if idle and (
            why := cpu_throttle_refusal(CpuThrottle(idle=True), best_effort=change.assignment.spec.best_effort)
        ):
            change.refused.append(why)
            idle = False
        if (idle, suspended) == (change.now.idle, change.now.suspended) and not change.uncertain:
            return
        try:
            _limit(change, idle, suspended)
        except ThrottleRefused as error:
            change.refused.append(str(error))
            return
        change.now = replace(change.now, idle=idle, suspended=suspended)

    def before_stop(self, attempt: EnforcedAttempt) -> None:
        """Resume a suspended attempt."""
        if attempt.group is not None and _can_freeze(attempt.group):
            attempt.group.freeze(False)
        else:
            signal_all(attempt.pids, signal.SIGCONT)


def write_weights(group: Group, cores: Cores) -> None:
    """Write the weights of an attempt and its tasks. Raises `GroupError`."""
    for rank, task in sorted(cores.tasks.items()):
        task_group(group, rank).set_weight(weight_of(len(task.cpus)))
    if cores.whole:
        group.set_weight(weight_of(len(cores.whole)))


def _limit(change: ThrottleChange, idle: bool, suspended: bool) -> None:
    group, assignment = change.attempt.group, change.assignment
    can_freeze = _can_freeze(group)
    if not can_freeze:
        signal_all(change.attempt.pids, signal.SIGSTOP if suspended else signal.SIGCONT)
    if group is not None or idle:
        cpu_throttle = replace(current_cpu_throttle(group), idle=idle, suspended=suspended and can_freeze)
        apply_cpu_throttle(
            group, cpu_throttle, best_effort=assignment.spec.best_effort, allocation=assignment.allocation
        )


def _can_freeze(group: Group | None) -> bool:
    return group is not None and (group.version == 2 or "freezer" in group.enforces)


def signal_all(pids: Callable[[], Iterable[int]], which: signal.Signals) -> None:
    """Send a signal once to each process until no new one appears: a process that has not stopped yet may fork."""
    signaled: set[int] = set()
    for _ in range(SIGNAL_PASSES_MAX):
        fresh = set(pids()) - signaled
        if not fresh:
            return
        for pid in fresh:
            try:
                os.kill(pid, which)
            except (ProcessLookupError, PermissionError):
                continue
        signaled |= fresh
