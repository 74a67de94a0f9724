"""Orphan attempts: only the control group is left, because their files were removed or older files were restored.

They may still run, so they are not killed on the agent's own authority: they are reported like any other attempt and
placement decides. Until then the CPUs that the kernel gives them are held. Their outcome cannot be known.

Two agents with different state directories may use one node id on one machine, so a group is only ours if a process in
it has our marker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement.core_changes import task_group
from cotenant.node_agent.runtime.attempt_directory import key_of
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.orphan_processes import has_marker, kill_orphans
from cotenant.node_agent.runtime.running_attempt import RunningAttempt
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

FOUND = "its files on this node are gone; only its control group is left"
ENDED = "its files on this node were gone when it ended: its outcome is unknown"
LOOK_SECONDS = 1.0


def recover_orphans(
    node_group: Group,
    known: Collection[str],
    marker: Callable[[AttemptKey], str],
    inventory: resources_pb2.Inventory,
    node_id: str,
) -> list[RunningAttempt]:
    """Return our orphan attempts as running attempts. See `find_orphans`. Blocks."""
    taken = []
    for key, group in find_orphans(node_group, known, marker):
        attempt = RunningAttempt(key, assignment_of(key, group, inventory, node_id), None, group)
        attempt.status = attempt.new_status("RUNNING", FOUND)
        taken.append(attempt)
    return taken


async def wait_for_end(attempt: RunningAttempt, marker: str) -> Status:
    """Wait until no process of an orphan is left, killing it once a stop is requested; return its final status."""
    assert attempt.group is not None
    while await asyncio.to_thread(attempt.group.pids):
        if attempt.stop_grace_seconds is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await attempt.stop_asked.wait()
        else:
            await asyncio.to_thread(kill_orphans, attempt.group, marker, timeout_seconds=LOOK_SECONDS)
    await asyncio.sleep(LOOK_SECONDS)  # a live supervisor reports the outcome
    await asyncio.to_thread(attempt.group.remove)
    status = attempt.new_status("FAILED", ENDED)
    return status if attempt.stop_grace_seconds is None else attempt.stopped(status)


def find_orphans(
    node_group: Group, known: Collection[str], marker: Callable[[AttemptKey], str]
) -> Iterator[tuple[AttemptKey, Group]]:
    """Yield the groups without `known` directories that contain a process with the attempt's `marker`. Blocks."""
    names = {entry.name for path in node_group.paths() if os.path.isdir(path) for entry in os.scandir(path)}
    for name in sorted(names - set(known)):
        key, group = key_of(Path(name)), node_group.child(name)
        if key and any(has_marker(pid, marker(key)) for pid in group.pids()):
            log.warning("orphan_attempt_found", attempt=str(key))
            yield key, group


def assignment_of(
    key: AttemptKey, group: Group, inventory: resources_pb2.Inventory, node_id: str
) -> agent_pb2.Assignment:
    """Return what is known of an orphan: its tasks and, if the kernel binds them, their cores."""
    assignment = agent_pb2.Assignment(job_id=key.job_id, number=key.number)
    assignment.allocation.node_id = node_id
    for rank in _ranks(group):
        cpus = set(task_group(group, rank).cpus())
        cores = [core for core in inventory.cores if cpus & set(core.cpus)]
        held = [] if len(cores) == len(inventory.cores) else cores  # all cores: it was not bound
        assignment.allocation.tasks.add(
            rank=rank, core_ids=[core.id for core in held], cpu_ids=[cpu for core in held for cpu in core.cpus]
        )
    assignment.world_size = len(assignment.allocation.tasks)
    return assignment


def _ranks(group: Group) -> list[int]:
    names = {entry.name for path in group.paths() if os.path.isdir(path) for entry in os.scandir(path)}
    ranks = {name.removeprefix("task-") for name in names if name.startswith("task-")}
    return sorted(int(rank) for rank in ranks if rank.isdigit())
