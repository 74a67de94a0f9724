"""Attempts of which only the control group is left: somebody has removed their files, or restored older ones.

They may be running, so they are not ended on our own authority: placement is told of them as of any other attempt and
decides. Until then the CPUs that the kernel gives them are held. How they end nobody can know.

Two agents with different state directories may bear one node's id on one machine, so a group is only ours where a
process in it bears our marker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import structlog

from cotenant.node_agent.enforcement.core_changes import task_group
from cotenant.node_agent.runtime.attempt_directory import key_of
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.orphan_processes import end_remains, has_marker
from cotenant.node_agent.runtime.running_attempt import Supervised
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import node_service_pb2, resources_pb2

log = structlog.get_logger()

FOUND = "its files on this node are gone; it is known by its control group alone"
ENDED = "its files on this node were gone when it ended: how it ended is not known"
LOOK_SECONDS = 1.0


def take_in(
    node_group: Group,
    known: Collection[str],
    marker: Callable[[AttemptKey], str],
    inventory: resources_pb2.Inventory,
    node_id: str,
) -> list[Supervised]:
    """All strays of ours as attempts that run. See `find_strays`. Blocks."""
    taken = []
    for key, group in find_strays(node_group, known, marker):
        attempt = Supervised(key, assignment_of(key, group, inventory, node_id), None, group)
        attempt.status = attempt.new_status("RUNNING", FOUND)
        taken.append(attempt)
    return taken


async def end_of(attempt: Supervised, marker: str) -> Status:
    """Wait until nothing of a stray is left, ending it once that is asked for; what is to be told, unless it was."""
    assert attempt.group is not None
    while await asyncio.to_thread(attempt.group.pids):
        if attempt.stop_grace_seconds is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await attempt.stop_asked.wait()
        else:
            await asyncio.to_thread(end_remains, attempt.group, marker, patience_seconds=LOOK_SECONDS)
    await asyncio.sleep(LOOK_SECONDS)  # a supervisor that lives tells how it ended
    await asyncio.to_thread(attempt.group.remove)
    return attempt.new_status("FAILED" if attempt.stop_grace_seconds is None else "STOPPED", ENDED)


def find_strays(
    node_group: Group, known: Collection[str], marker: Callable[[AttemptKey], str]
) -> Iterator[tuple[AttemptKey, Group]]:
    """All groups whose directories are not `known` and that have a process with the attempt's `marker`. Blocks."""
    names = {entry.name for path in node_group.paths() if os.path.isdir(path) for entry in os.scandir(path)}
    for name in sorted(names - set(known)):
        key, group = key_of(Path(name)), node_group.child(name)
        if key and any(has_marker(pid, marker(key)) for pid in group.pids()):
            log.warning("stray_found", attempt=str(key))
            yield key, group


def assignment_of(
    key: AttemptKey, group: Group, inventory: resources_pb2.Inventory, node_id: str
) -> node_service_pb2.Assignment:
    """What can be told of a stray: its tasks and, as far as the kernel bounds them, their cores."""
    assignment = node_service_pb2.Assignment(job_id=key.job_id, number=key.number)
    assignment.allocation.node_id = node_id
    for rank in _ranks(group):
        cpus = set(task_group(group, rank).cpus())
        cores = [core for core in inventory.cores if cpus & set(core.cpus)]
        held = [] if len(cores) == len(inventory.cores) else cores  # all of them: it was not bound
        assignment.allocation.tasks.add(
            rank=rank, core_ids=[core.id for core in held], cpu_ids=[cpu for core in held for cpu in core.cpus]
        )
    assignment.world_size = len(assignment.allocation.tasks)
    return assignment


def _ranks(group: Group) -> list[int]:
    names = {entry.name for path in group.paths() if os.path.isdir(path) for entry in os.scandir(path)}
    ranks = {name.removeprefix("task-") for name in names if name.startswith("task-")}
    return sorted(int(rank) for rank in ranks if rank.isdigit())
