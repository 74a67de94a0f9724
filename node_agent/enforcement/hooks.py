"""The enforcement hooks, in the order in which they are called at each moment; what is undone is undone in reverse."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from cotenant.node_agent.enforcement.bandwidth_share import BandwidthShare
from cotenant.node_agent.enforcement.core_changes import ConfinedAttempt, CoreChange, Cores, CoresRefused
from cotenant.node_agent.enforcement.core_pinning import CorePinning
from cotenant.node_agent.enforcement.cpu_time import CpuTime
from cotenant.node_agent.enforcement.gpu_devices import GpuIsolation
from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, NewAttempt
from cotenant.node_agent.enforcement.memory_limit import MemoryLimit
from cotenant.node_agent.enforcement.process_limit import ProcessLimit
from cotenant.node_agent.enforcement.scratch_directory import ScratchDirectory
from cotenant.node_agent.supervisor.cgroups import GroupError
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

Hooks = Sequence[EnforcementHook]

HOOKS: tuple[type[EnforcementHook], ...] = (
    BandwidthShare,
    CorePinning,
    MemoryLimit,
    CpuTime,
    ProcessLimit,
    GpuIsolation,
    ScratchDirectory,
)


def make_hooks() -> Hooks:
    """Return the hooks of a node, which are still to be opened."""
    return [kind() for kind in HOOKS]


def open_hooks(hooks: Hooks, node: EnforcedNode) -> list[str]:
    """Let the hooks find out what can be enforced; return what cannot be. Blocks."""
    return [sentence for hook in hooks for sentence in hook.open(node)]


def variables(hooks: Hooks, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> dict[str, str]:
    """Return the variables that all hooks set for a task."""
    return {name: value for hook in hooks for name, value in hook.environment(attempt, task).items()}


def change(hooks: Hooks, attempt: ConfinedAttempt, first: Cores, before: Cores, after: Cores) -> None:
    """Move an attempt from the cores `before` to the cores `after`, all or nothing. See `CoreChange`. Blocks.

    Raises:
        CoresRefused: the kernel refused, for the given reason.
    """
    step = CoreChange(first, before, after)
    changed: list[EnforcementHook] = []
    try:
        for hook in hooks:
            hook.change_cores(attempt, step)
            changed.append(hook)
    except CoresRefused as error:
        reason = str(error)
        for hook in reversed(changed):
            try:
                hook.change_cores(attempt, step.reversed())
            except CoresRefused as second:
                log.error("cores_restore_failed", error=str(second))
                reason += f"; rollback failed: {second}"
        raise CoresRefused(reason) from error


def end(hooks: Hooks, attempt: str) -> None:
    """Remove what the hooks made for an attempt that has ended."""
    for hook in reversed(hooks):
        end_hook(hook, attempt)


def end_hook(hook: EnforcementHook, attempt: str) -> None:
    """Remove what one hook made for an attempt. An error is logged: it keeps no other hook from its end."""
    try:
        hook.end(attempt)
    except (OSError, GroupError) as error:
        log.error("enforcement_end_failed", hook=type(hook).__name__, attempt=attempt, error=str(error))
