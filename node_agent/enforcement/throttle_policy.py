"""What CPU time an attempt gets, and how it is held back: the one place that decides who may be.

CPU time is weighted by cores, so that attempts which want the same CPUs share them as they were given cores. Time is
taken away only from a best-effort job: one that has its cores to itself, and others that wait for its steps, would be
slowed down by a quota in bursts that nobody sees (CFS throttles a group for the rest of its period). It may have fewer
cores instead (`AttemptCores.narrow`), or stand still.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

WEIGHT_PER_CPU = 10  # so that a thousand CPUs fit below the kernel's largest weight


class HoldRefused(Exception):
    """An attempt cannot be held back like this; it is as it was."""


@dataclass(frozen=True, slots=True)
class Hold:
    """How an attempt is held back in time: each stands for itself.

    Attributes:
        idle: it gets only CPU time that no other attempt wants.
        cpu_limit_cores: it gets the CPU time of at most so many cores; 0 means no limit.
        suspended: its processes stand still.
    """

    idle: bool = False
    cpu_limit_cores: float = 0.0
    suspended: bool = False


FREE = Hold()


def weight_of(cpus: int) -> int:
    """The weight of what holds so many CPUs; one that holds none, and runs on all, counts as one.

    >>> weight_of(8), weight_of(0)
    (80, 10)
    """
    return max(1, cpus) * WEIGHT_PER_CPU


def attempt_weight(allocation: resources_pb2.NodeAllocation) -> int:
    """The weight of all tasks that an attempt has here."""
    return sum(weight_of(len(task.cpu_ids)) for task in allocation.tasks)


def why_not(hold: Hold, *, best_effort: bool) -> str | None:
    """Why a job may not be held back so; None where it may.

    >>> why_not(Hold(suspended=True), best_effort=False) is None
    True
    >>> why_not(Hold(idle=True), best_effort=False)
    'its CPU time may not be taken away (cpu.idle): it is not a best-effort job, its cores are its own'
    """
    ways = [name for name, wanted in (("cpu.idle", hold.idle), ("cpu.max", hold.cpu_limit_cores > 0)) if wanted]
    if hold.cpu_limit_cores < 0:
        return f"CPU time cannot be limited to {hold.cpu_limit_cores} cores"
    if ways and not best_effort:
        words = " and ".join(ways)
        return f"its CPU time may not be taken away ({words}): it is not a best-effort job, its cores are its own"
    return None


def found_hold(group: Group | None) -> Hold:
    """How the kernel holds an attempt back now."""
    if group is None or not group.exists():
        return FREE
    return Hold(group.is_idle(), group.cpu_limit(), group.is_frozen())


def hold_back(group: Group | None, hold: Hold, *, best_effort: bool, allocation: resources_pb2.NodeAllocation) -> None:
    """Hold an attempt back like this and no otherwise; `FREE` lets it go. Blocks for as long as processes take to stop.

    Raises:
        HoldRefused: it may not be, or the kernel does not take it. It is as it was.
    """
    if reason := why_not(hold, best_effort=best_effort):
        raise HoldRefused(reason)
    if group is None:
        if hold != FREE:
            raise HoldRefused("it cannot be held back: no control group can be written on this node")
        return
    before = found_hold(group)
    try:
        _apply(group, before, hold, attempt_weight(allocation))
    except GroupError as error:
        try:
            _apply(group, found_hold(group), before, attempt_weight(allocation))
        except GroupError as second:
            raise HoldRefused(f"{error}; and when going back, {second}") from error
        raise HoldRefused(str(error)) from error


def _apply(group: Group, before: Hold, after: Hold, weight: int) -> None:
    """Change what differs; what lets go comes first."""
    if before.suspended and not after.suspended:
        group.freeze(False)
    if before.idle != after.idle:
        group.set_idle(after.idle)
        group.set_weight(weight)  # the kernel forgets it while a group is idle
    if before.cpu_limit_cores != after.cpu_limit_cores:
        group.limit_cpu(after.cpu_limit_cores)
    if after.suspended and not before.suspended:
        group.freeze(True)
