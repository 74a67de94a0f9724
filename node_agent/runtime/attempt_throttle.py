"""Throttles one running attempt: the recorded throttle, and what the kernel enforces, mechanism by mechanism.

The mechanisms are independent: if the kernel refuses one, the others apply, and the effective throttle is reported. The
record holds the requested throttle and is written first, so that after a crash the next agent knows what to undo.

Priority when several operations need the same cores:

1. A stop. A suspended attempt is resumed before it is warned or killed.
2. A resize. It changes the allocation; then the attempt is throttled again on its new cores.
3. A throttle. It ends a running profile, and no profile starts while the attempt is throttled.
4. A profile.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.enforcement import affinity
from cotenant.node_agent.enforcement.core_changes import CoresRefused
from cotenant.node_agent.enforcement.resctrl import BandwidthRefused, Resctrl
from cotenant.node_agent.enforcement.throttle_policy import (
    CpuThrottle,
    ThrottleRefused,
    apply_cpu_throttle,
    cpu_throttle_refusal,
    current_cpu_throttle,
)
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.runtime_port import ThrottleState, Usage
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

SIGNAL_PASSES_MAX = 10


@dataclass(slots=True)
class _Change:
    """A throttle request: wanted and previous throttle, and refusals. `uncertain`: the previous one may be wrong."""

    assignment: agent_pb2.Assignment
    inventory: resources_pb2.Inventory
    wanted: Throttle
    was: Throttle
    uncertain: bool
    refused: list[str] = field(default_factory=list)


class AttemptThrottle:
    """One attempt's throttle. Its methods block and exclude each other."""

    def __init__(
        self, group: Group | None, directory: AttemptDirectory, cores: AttemptCores, resctrl: Resctrl | None
    ) -> None:
        self._group, self._directory, self._cores, self._resctrl = group, directory, cores, resctrl
        self._lock = threading.Lock()
        marked = directory.throttled()
        self._uncertain = marked is not None  # an earlier agent may have applied more or less
        self._ending = False
        self.held = ThrottleState(marked or FREE)

    def apply(
        self, assignment: agent_pb2.Assignment, inventory: resources_pb2.Inventory, wanted: Throttle
    ) -> ThrottleState:
        """Apply exactly this throttle; return the effective one and why the rest was refused."""
        with self._lock:
            if self._ending:
                return self.held  # it will not be throttled again
            try:
                self._directory.mark_throttled(wanted)
            except OSError as error:
                if not wanted.free:
                    return ThrottleState(self.held.throttle, (f"cannot record the throttle: {error.strerror}",))
            change = _Change(assignment, inventory, wanted, self.held.throttle, self._uncertain)
            now = Throttle(self._bandwidth(change), self._narrow(change), *self._cpu_time(change))
            self._uncertain = self._uncertain and bool(change.refused)
            self.held = ThrottleState(now, tuple(change.refused))
            return self.held

    def reapply(self, assignment: agent_pb2.Assignment, inventory: resources_pb2.Inventory) -> None:
        """Throttle the attempt again after a change of its cores, which gave all of them to it."""
        with self._lock:
            held = self.held.throttle
            self.held = ThrottleState(replace(held, cores=0))
        if held.cores:
            self.apply(assignment, inventory, held)

    @property
    def may_be_suspended(self) -> bool:
        """Whether its processes are suspended, are about to be, or may be."""
        return self._uncertain or self._lock.locked() or self.held.throttle.suspended

    def resume(self) -> None:
        """Resume a suspended attempt for good, because it is about to be stopped. Raises `GroupError`."""
        with self._lock:
            self._ending = True
            if self._group is not None and self._can_freeze:
                self._group.freeze(False)
            else:
                signal_all(self.pids, signal.SIGCONT)
            self.held = ThrottleState(replace(self.held.throttle, suspended=False))

    def _bandwidth(self, change: _Change) -> int:
        percent, was = change.wanted.bandwidth_percent, change.was.bandwidth_percent
        if percent == was and not change.uncertain:
            return was
        if self._resctrl is None:
            if percent < FREE.bandwidth_percent:
                change.refused.append("this machine cannot limit its memory bandwidth")
            return FREE.bandwidth_percent
        try:
            return self._resctrl.throttle(self._directory.path.name, percent, self.threads)
        except BandwidthRefused as error:
            change.refused.append(str(error))
            return was

    def _narrow(self, change: _Change) -> int:
        allocation, was = change.assignment.allocation, change.was.cores
        most = max((len(task.core_ids) for task in allocation.tasks), default=0)
        count = change.wanted.cores if change.wanted.cores < most else 0
        if count == was and not change.uncertain:
            return was
        try:
            self._cores.narrow(allocation, change.inventory, count or None, at_most=True)
            return count
        except CoresRefused as error:
            change.refused.append(str(error))
            return was

    def _cpu_time(self, change: _Change) -> tuple[bool, bool]:
        """Apply the limits of CPU time; return whether it is now limited to idle time, and whether it is suspended."""
        wanted, was = change.wanted, (change.was.idle, change.was.suspended)
        idle = wanted.idle
        if idle and (
            why := cpu_throttle_refusal(CpuThrottle(idle=True), best_effort=change.assignment.spec.best_effort)
        ):
            change.refused.append(why)
            idle = False
        if (idle, wanted.suspended) == was and not change.uncertain:
            return was
        try:
            self._apply_cpu_time(change.assignment, idle, wanted.suspended)
        except ThrottleRefused as error:
            change.refused.append(str(error))
            return was
        return idle, wanted.suspended

    def _apply_cpu_time(self, assignment: agent_pb2.Assignment, idle: bool, suspended: bool) -> None:
        group = self._group
        if not self._can_freeze:
            signal_all(self.pids, signal.SIGSTOP if suspended else signal.SIGCONT)
        if group is not None or idle:
            cpu_throttle = replace(current_cpu_throttle(group), idle=idle, suspended=suspended and self._can_freeze)
            apply_cpu_throttle(
                group, cpu_throttle, best_effort=assignment.spec.best_effort, allocation=assignment.allocation
            )

    @property
    def _can_freeze(self) -> bool:
        group = self._group
        return group is not None and (group.version == 2 or "freezer" in group.enforces)

    @property
    def has_counters(self) -> bool:
        """Whether the hardware may have counters for the attempt."""
        return self._resctrl is not None

    def with_counters(self, usage: Usage) -> Usage:
        """Return the usage with memory bandwidth and cache from the hardware's counters added."""
        name = self._directory.path.name
        if self._resctrl is None or not self._resctrl.monitor(name, self.threads):
            return usage
        return replace(usage, moved_bytes=self._resctrl.moved_bytes(name), cache_bytes=self._resctrl.cache_bytes(name))

    def close(self) -> None:
        """Remove what was created outside of the ended attempt's own group."""
        if self._resctrl is not None:
            self._resctrl.forget(self._directory.path.name)

    def pids(self) -> set[int]:
        """Return the processes of all its tasks."""
        return {pid for rank in self._directory.task_pids() for pid in self._cores.pids(rank)}

    def threads(self) -> set[int]:
        """Return the threads of all its tasks."""
        return {thread for pid in self.pids() for thread in affinity.threads(pid)}


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
