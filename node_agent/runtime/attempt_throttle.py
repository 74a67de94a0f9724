"""Throttles one running attempt: the recorded throttle, and what the kernel enforces, hook by hook.

The hooks are independent: if the kernel refuses one, the others apply, and the effective throttle is reported. The
record holds the requested throttle and is written first, so that after a crash the next agent knows what to undo.

Priority when several operations need the same cores:

1. A stop. A suspended attempt is resumed before it is warned or killed.
2. A resize. It changes the allocation; then the attempt is throttled again on its new cores.
3. A throttle. It ends a running profile, and no profile starts while the attempt is throttled.
4. A profile.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.enforcement.hook import EnforcedAttempt, ThrottleChange
from cotenant.node_agent.enforcement.hooks import Hooks
from cotenant.node_agent.enforcement.resctrl import Resctrl
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.runtime_port import ThrottleState, Usage
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2


class AttemptThrottle:
    """One attempt's throttle. Its methods block and exclude each other."""

    def __init__(
        self,
        group: Group | None,
        directory: AttemptDirectory,
        cores: AttemptCores,
        hooks: Hooks,
        counters: Resctrl | None,
    ) -> None:
        self._attempt = EnforcedAttempt(directory.path.name, group, self.pids)
        self._directory, self._cores, self._hooks, self._counters = directory, cores, hooks, counters
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
            narrow = partial(self._cores.narrow, assignment.allocation, inventory, at_most=True)
            change = ThrottleChange(self._attempt, assignment, wanted, self.held.throttle, self._uncertain, narrow)
            for hook in self._hooks:
                hook.throttle(change)
            self._uncertain = self._uncertain and bool(change.refused)
            self.held = ThrottleState(change.now, tuple(change.refused))
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
            for hook in self._hooks:
                hook.before_stop(self._attempt)
            self.held = ThrottleState(replace(self.held.throttle, suspended=False))

    @property
    def has_counters(self) -> bool:
        """Whether the hardware may have counters for the attempt."""
        return self._counters is not None

    def with_counters(self, usage: Usage) -> Usage:
        """Return the usage with memory bandwidth and cache from the hardware's counters added."""
        name = self._attempt.name
        if self._counters is None or not self._counters.monitor(name, self._attempt.threads):
            return usage
        return replace(
            usage, moved_bytes=self._counters.moved_bytes(name), cache_bytes=self._counters.cache_bytes(name)
        )

    def pids(self) -> set[int]:
        """Return the processes of all its tasks."""
        return {pid for rank in self._directory.task_pids() for pid in self._cores.pids(rank)}
