"""The cores of one running attempt: what is recorded of them, and what the kernel is made to have.

The record is what counts. It changes after the kernel has followed, so that an agent that was killed in between goes
back to what placement was last told; and what a profile does for a while is never recorded, only marked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cotenant.history.events import Resized
from cotenant.history.recording import record
from cotenant.history.stored import holds_of
from cotenant.node_agent.enforcement.core_changes import (
    Confined,
    Cores,
    CoresRefused,
    TaskCores,
    change,
    cores_of,
    covers,
    found_cores,
    narrowed,
    on_line,
    same_cpus,
    task_group,
)
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.orphan_processes import descendants
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.v1 import node_service_pb2, resources_pb2


class AttemptCores:
    """Changes one attempt's cores. Its methods block, and wait for each other."""

    def __init__(self, group: Group | None, directory: AttemptDirectory) -> None:
        self._directory = directory
        self._confined = Confined(group, self.pids)
        self._narrowed: Cores | None = None
        self._turn = threading.Lock()

    def pids(self, rank: int) -> Iterable[int]:
        """The processes of a task; without a group, as far as they descend from its first."""
        if self._confined.group is not None:
            return task_group(self._confined.group, rank).pids()
        pid = self._directory.task_pids().get(rank, 0)
        return [pid, *(process.pid for process in descendants(pid))] if pid else []

    def resize(self, old: node_service_pb2.Assignment, new: node_service_pb2.Assignment) -> None:
        """Move a running attempt to the cores of another assignment, and record that.

        Raises:
            CoresRefused: the kernel or the disk does not take it; all is as it was.
        """
        with self._turn:
            self._widen(old.allocation)
            before, after = cores_of(old.allocation), cores_of(new.allocation)
            self._confined.look(before)
            change(self._confined, before, before, after)
            try:
                self._directory.replace_assignment(new)
            except OSError as error:
                change(self._confined, before, after, before)
                raise CoresRefused(f"the change of its cores cannot be recorded: {error.strerror}") from error
            record(_resized(new))

    def narrow(
        self,
        allocation: resources_pb2.NodeAllocation,
        inventory: resources_pb2.Inventory,
        count: int | None,
        *,
        at_most: bool = False,
    ) -> None:
        """Let each task use `count` of the cores that it holds, or with None all of them.

        With `at_most`, a task that holds fewer keeps them.

        Raises:
            CoresRefused: a task holds fewer, or the kernel or the disk does not take it.
        """
        with self._turn:
            if count is None:
                self._widen(allocation)
                return
            full, less = cores_of(allocation), narrowed(allocation, inventory, count, at_most=at_most)
            if self._narrowed is None:
                self._confined.look(full)
            try:
                self._directory.mark_narrowed({rank: task.cpus for rank, task in less.tasks.items()})
            except OSError as error:
                raise CoresRefused(f"the change of its cores cannot be noted: {error.strerror}") from error
            change(self._confined, full, self._narrowed or full, less)
            self._narrowed = less

    def _widen(self, allocation: resources_pb2.NodeAllocation) -> None:
        """Give back what a profile or a throttle had taken."""
        if self._narrowed is not None:
            full = cores_of(allocation)
            change(self._confined, full, self._narrowed, full)
            self._narrowed = None
        self._directory.mark_narrowed(None)

    def restore(self, allocation: resources_pb2.NodeAllocation) -> bool:
        """After a restart: give the attempt what is recorded; False where it has it.

        Raises:
            CoresRefused: the kernel does not take it.
        """
        with self._turn:
            wanted, marks = cores_of(allocation), self._directory.narrowed()
            marked = {rank: TaskCores(frozenset(cpus)) for rank, cpus in marks.items() if rank in wanted.tasks}
            found = found_cores(self._confined.group, wanted) or Cores({**wanted.tasks, **marked}, wanted.whole)
            if same_cpus(found, wanted):
                self._directory.mark_narrowed(None)
                return False
            change(self._confined, found, found, wanted)
            self._directory.mark_narrowed(None)
            return True

    def heal(self, allocation: resources_pb2.NodeAllocation) -> bool:
        """After CPUs came back: give the attempt those of its own that the kernel had taken; False where it has them.

        One that is held to some of its cores is left so: it gets all of them when that ends.

        Raises:
            CoresRefused: the kernel does not take it.
        """
        with self._turn:
            wanted = on_line(cores_of(allocation), online_cpus())
            if self._narrowed is not None or wanted is None:
                return False
            found = found_cores(self._confined.group, wanted)
            if found is None or covers(found, wanted):
                return False
            self._confined.look(found)
            change(self._confined, found, found, wanted)
            return True


def _resized(now: node_service_pb2.Assignment) -> Resized:
    held = now.allocation
    return Resized(held.node_id, now.job_id, now.number, now.epoch, holds_of([held]))
