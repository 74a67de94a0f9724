"""The cores of one running attempt: what is recorded, and what the kernel has.

The record is authoritative. It changes after the kernel has followed, so that an agent that is killed in between goes
back to placement's last order. What a profile narrows temporarily is never recorded, only marked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.history.events import Resized
from cotenant.history.recording import record
from cotenant.history.stored import holds_of
from cotenant.node_agent.enforcement.core_changes import (
    ConfinedAttempt,
    Cores,
    CoresRefused,
    TaskCores,
    cores_of,
    covers,
    current_cores,
    narrowed,
    online_only,
    same_cpus,
    task_group,
)
from cotenant.node_agent.enforcement.hooks import Hooks, change
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.orphan_processes import descendants
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.v1 import resources_pb2


class AttemptCores:
    """Changes one attempt's cores. Its methods block and exclude each other."""

    def __init__(self, group: Group | None, directory: AttemptDirectory, hooks: Hooks) -> None:
        self._directory, self._hooks = directory, hooks
        self._confined = ConfinedAttempt(group, self.pids)
        self._narrowed: Cores | None = None
        self._lock = threading.Lock()

    def pids(self, rank: int) -> Iterable[int]:
        """Return the processes of a task; without a group, the descendants of its first process."""
        if self._confined.group is not None:
            return task_group(self._confined.group, rank).pids()
        pid = self._directory.task_pids().get(rank, 0)
        return [pid, *(process.pid for process in descendants(pid))] if pid else []

    def resize(self, old: agent_pb2.Assignment, new: agent_pb2.Assignment) -> None:
        """Move a running attempt to the cores of another assignment, and record it.

        Raises:
            CoresRefused: the kernel or the disk refuses; nothing has changed.
        """
        with self._lock:
            self._widen(old.allocation)
            before, after = cores_of(old.allocation), cores_of(new.allocation)
            self._confined.record_masks(before)
            change(self._hooks, self._confined, before, before, after)
            try:
                self._directory.replace_assignment(new)
            except OSError as error:
                change(self._hooks, self._confined, before, after, before)
                raise CoresRefused(f"cannot record the change of its cores: {error.strerror}") from error
            record(_resized(new))

    def narrow(
        self,
        allocation: resources_pb2.NodeAllocation,
        inventory: resources_pb2.Inventory,
        count: int | None,
        *,
        at_most: bool = False,
    ) -> None:
        """Let each task use `count` of the cores that it holds; None: all of them.

        With `at_most`, a task that holds fewer keeps them.

        Raises:
            CoresRefused: a task holds fewer, or the kernel or the disk refuses.
        """
        with self._lock:
            if count is None:
                self._widen(allocation)
                return
            full, less = cores_of(allocation), narrowed(allocation, inventory, count, at_most=at_most)
            if self._narrowed is None:
                self._confined.record_masks(full)
            try:
                self._directory.mark_narrowed({rank: task.cpus for rank, task in less.tasks.items()})
            except OSError as error:
                raise CoresRefused(f"cannot mark the change of its cores: {error.strerror}") from error
            change(self._hooks, self._confined, full, self._narrowed or full, less)
            self._narrowed = less

    def _widen(self, allocation: resources_pb2.NodeAllocation) -> None:
        """Give back the cores that a profile or a throttle had taken."""
        if self._narrowed is not None:
            full = cores_of(allocation)
            change(self._hooks, self._confined, full, self._narrowed, full)
            self._narrowed = None
        self._directory.mark_narrowed(None)

    def restore(self, allocation: resources_pb2.NodeAllocation) -> bool:
        """Give the attempt its recorded cores after a restart; return False if it has them.

        Raises:
            CoresRefused: the kernel refuses.
        """
        with self._lock:
            wanted, marks = cores_of(allocation), self._directory.narrowed()
            marked = {rank: TaskCores(frozenset(cpus)) for rank, cpus in marks.items() if rank in wanted.tasks}
            found = current_cores(self._confined.group, wanted) or Cores({**wanted.tasks, **marked}, wanted.whole)
            if same_cpus(found, wanted):
                self._directory.mark_narrowed(None)
                return False
            change(self._hooks, self._confined, found, found, wanted)
            self._directory.mark_narrowed(None)
            return True

    def heal(self, allocation: resources_pb2.NodeAllocation) -> bool:
        """Give the attempt back its CPUs that came online again; return False if it has them.

        A narrowed attempt is left alone: it gets all of its CPUs when that ends.

        Raises:
            CoresRefused: the kernel refuses.
        """
        with self._lock:
            wanted = online_only(cores_of(allocation), online_cpus())
            if self._narrowed is not None or wanted is None:
                return False
            found = current_cores(self._confined.group, wanted)
            if found is None or covers(found, wanted):
                return False
            self._confined.record_masks(found)
            change(self._hooks, self._confined, found, found, wanted)
            return True


def _resized(now: agent_pb2.Assignment) -> Resized:
    held = now.allocation
    return Resized(held.node_id, now.job_id, now.number, now.epoch, holds_of([held]))
