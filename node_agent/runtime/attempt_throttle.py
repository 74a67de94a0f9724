"""Holds one running attempt back: what is recorded of it, and what the kernel is made to have, way by way.

Each way stands for itself: where the kernel refuses one, the others hold, and what holds is told as it is. The record
says what was asked for and is written first, so that an agent that was killed in between is followed by one that
knows what there may be to take back.

What comes before what, where several want something of the same cores:

1. A stop. What stands still goes on before it is warned or killed.
2. A resize. It changes what is held; then the attempt is held back again on what it holds now.
3. A throttle. A profile that is under way ends before it, and none begins while the attempt is held back.
4. A profile.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.enforcement import affinity
from cotenant.node_agent.enforcement.core_changes import CoresRefused
from cotenant.node_agent.enforcement.resctrl import CannotHold, Resctrl
from cotenant.node_agent.enforcement.throttle_policy import Hold, HoldRefused, found_hold, hold_back, why_not
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.runtime_port import Held, Usage
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import node_service_pb2, resources_pb2

SIGNAL_PASSES_MAX = 10


@dataclass(slots=True)
class _Change:
    """What is asked for, what was, and why not all of it can be. `unsure`: what was may not be what is told."""

    assignment: node_service_pb2.Assignment
    inventory: resources_pb2.Inventory
    wanted: Throttle
    was: Throttle
    unsure: bool
    refused: list[str] = field(default_factory=list)


class AttemptThrottle:
    """One attempt's throttle. Its methods block, and wait for each other."""

    def __init__(
        self, group: Group | None, directory: AttemptDirectory, cores: AttemptCores, resctrl: Resctrl | None
    ) -> None:
        self._group, self._directory, self._cores, self._resctrl = group, directory, cores, resctrl
        self._turn = threading.Lock()
        marked = directory.throttled()
        self._unsure = marked is not None  # an agent before us may have done more, or less
        self._ending = False
        self.held = Held(marked or FREE)

    def hold(
        self, assignment: node_service_pb2.Assignment, inventory: resources_pb2.Inventory, wanted: Throttle
    ) -> Held:
        """Hold the attempt back so and not otherwise; what holds then, and why the rest does not."""
        with self._turn:
            if self._ending:
                return self.held  # it will not be held back any more
            try:
                self._directory.mark_throttled(wanted)
            except OSError as error:
                if not wanted.free:
                    return Held(self.held.throttle, (f"it cannot be noted: {error.strerror}",))
            change = _Change(assignment, inventory, wanted, self.held.throttle, self._unsure)
            now = Throttle(self._bandwidth(change), self._narrow(change), *self._time(change))
            self._unsure = self._unsure and bool(change.refused)
            self.held = Held(now, tuple(change.refused))
            return self.held

    def hold_again(self, assignment: node_service_pb2.Assignment, inventory: resources_pb2.Inventory) -> None:
        """Its cores were changed, which gave all of them to it: hold it back on what it has now."""
        with self._turn:
            held = self.held.throttle
            self.held = Held(replace(held, cores=0))
        if held.cores:
            self.hold(assignment, inventory, held)

    @property
    def may_stand_still(self) -> bool:
        """Whether its processes stand still, or are about to, or nobody knows."""
        return self._unsure or self._turn.locked() or self.held.throttle.suspended

    def let_go_on(self) -> None:
        """Let what stands still go on, whatever comes next: it is to be ended. Raises `GroupError`."""
        with self._turn:
            self._ending = True
            if self._group is not None and self._freezes:
                self._group.freeze(False)
            else:
                signal_all(self.pids, signal.SIGCONT)
            self.held = Held(replace(self.held.throttle, suspended=False))

    def _bandwidth(self, change: _Change) -> int:
        percent, was = change.wanted.bandwidth_percent, change.was.bandwidth_percent
        if percent == was and not change.unsure:
            return was
        if self._resctrl is None:
            if percent < FREE.bandwidth_percent:
                change.refused.append("this machine cannot hold it to a share of the memory bandwidth")
            return FREE.bandwidth_percent
        try:
            return self._resctrl.hold(self._directory.path.name, percent, self.threads)
        except CannotHold as error:
            change.refused.append(str(error))
            return was

    def _narrow(self, change: _Change) -> int:
        allocation, was = change.assignment.allocation, change.was.cores
        most = max((len(task.core_ids) for task in allocation.tasks), default=0)
        count = change.wanted.cores if change.wanted.cores < most else 0
        if count == was and not change.unsure:
            return was
        try:
            self._cores.narrow(allocation, change.inventory, count or None, at_most=True)
            return count
        except CoresRefused as error:
            change.refused.append(str(error))
            return was

    def _time(self, change: _Change) -> tuple[bool, bool]:
        """What it gets of CPU time: whether only what nobody wants, and whether it stands still."""
        wanted, was = change.wanted, (change.was.idle, change.was.suspended)
        idle = wanted.idle
        if idle and (why := why_not(Hold(idle=True), best_effort=change.assignment.spec.best_effort)):
            change.refused.append(why)
            idle = False
        if (idle, wanted.suspended) == was and not change.unsure:
            return was
        try:
            self._take_time(change.assignment, idle, wanted.suspended)
        except HoldRefused as error:
            change.refused.append(str(error))
            return was
        return idle, wanted.suspended

    def _take_time(self, assignment: node_service_pb2.Assignment, idle: bool, suspended: bool) -> None:
        group = self._group
        if not self._freezes:
            signal_all(self.pids, signal.SIGSTOP if suspended else signal.SIGCONT)
        if group is not None or idle:
            hold = replace(found_hold(group), idle=idle, suspended=suspended and self._freezes)
            hold_back(group, hold, best_effort=assignment.spec.best_effort, allocation=assignment.allocation)

    @property
    def _freezes(self) -> bool:
        group = self._group
        return group is not None and (group.version == 2 or "freezer" in group.enforces)

    @property
    def counts(self) -> bool:
        """Whether the hardware may tell something of it."""
        return self._resctrl is not None

    def counted(self, usage: Usage) -> Usage:
        """Add to an account what the hardware tells of memory bandwidth and cache."""
        name = self._directory.path.name
        if self._resctrl is None or not self._resctrl.watch(name, self.threads):
            return usage
        return replace(usage, moved_bytes=self._resctrl.moved_bytes(name), cache_bytes=self._resctrl.cache_bytes(name))

    def close(self) -> None:
        """It has ended: remove what was made for it outside of its own group."""
        if self._resctrl is not None:
            self._resctrl.forget(self._directory.path.name)

    def pids(self) -> set[int]:
        """The processes of all its tasks."""
        return {pid for rank in self._directory.task_pids() for pid in self._cores.pids(rank)}

    def threads(self) -> set[int]:
        """The threads of all its tasks."""
        return {thread for pid in self.pids() for thread in affinity.threads(pid)}


def signal_all(pids: Callable[[], Iterable[int]], which: signal.Signals) -> None:
    """Signal each process once, until a look finds no new one: what is not stopped yet may fork."""
    told: set[int] = set()
    for _ in range(SIGNAL_PASSES_MAX):
        fresh = set(pids()) - told
        if not fresh:
            return
        for pid in fresh:
            try:
                os.kill(pid, which)
            except (ProcessLookupError, PermissionError):
                continue
        told |= fresh
