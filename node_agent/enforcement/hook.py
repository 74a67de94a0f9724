"""The protocol of enforcement hooks: what the runtime calls at each moment of an attempt, one hook per concern.

`hooks.HOOKS` lists them in the order in which they are called. What a hook does not override does nothing. A hook keeps
what it found out about the node, and nothing about attempts: the kernel and the attempt's directory keep that, because
an agent may be killed at any moment, and the next one calls the hooks for attempts that it did not launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.core.model.throttle import Throttle
from cotenant.node_agent.enforcement import affinity
from cotenant.node_agent.enforcement.core_changes import ConfinedAttempt, CoreChange
from cotenant.node_agent.enforcement.node_settings import NodeSettings
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2


@dataclass(frozen=True, slots=True)
class EnforcedNode:
    """What hooks may know of a node: the group of all attempts, its hardware, and the agent's settings.

    `gpu_minors` has the N of each GPU's /dev/nvidiaN by UUID, as far as NVML reports it.
    """

    group: Group | None = None
    inventory: resources_pb2.Inventory = field(default_factory=resources_pb2.Inventory)
    gpu_minors: Mapping[str, int] = field(default_factory=dict)
    settings: NodeSettings = field(default_factory=NodeSettings)
    id: str = ""


@dataclass(frozen=True, slots=True)
class NewAttempt:
    """An attempt that is about to be launched: its name, its directory, and its group.

    Without control groups it has a group without controllers, all of whose limits do nothing. `owner` is the user and
    the group of its processes; None if they are the agent's own.
    """

    name: str
    directory: Path
    group: Group
    assignment: agent_pb2.Assignment
    owner: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class EnforcedAttempt:
    """A running attempt: its name, its group, if any, and a function for the processes of all its tasks."""

    name: str
    group: Group | None
    pids: Callable[[], Iterable[int]]

    def threads(self) -> set[int]:
        """Return the threads of all its tasks."""
        return {thread for pid in self.pids() for thread in affinity.threads(pid)}


@dataclass(slots=True)
class ThrottleChange:
    """A throttle to apply. Each hook sets its own fields of `now`, and adds what it refuses, one sentence each.

    Attributes:
        now: the effective throttle, which is the previous one until a hook changes it.
        uncertain: the previous throttle may be wrong, so a hook applies its part even if nothing seems to change.
        narrow: lets each task use this many of its cores; None: all. Raises `CoresRefused`.
    """

    attempt: EnforcedAttempt
    assignment: agent_pb2.Assignment
    wanted: Throttle
    now: Throttle
    uncertain: bool
    narrow: Callable[[int | None], None]
    refused: list[str] = field(default_factory=list)


class EnforcementHook:
    """One concern: limits attempts at their launch, follows their changes, and removes what it made."""

    launch_cause: ClassVar[LaunchCause] = LaunchCause.CGROUP  # why a launch failed if this hook refuses it

    def open(self, node: EnforcedNode) -> Sequence[str]:
        """Find out what can be enforced here; return what cannot be, one sentence each. Blocks.

        Called before anything else, and again when the node's GPUs change.
        """
        return ()

    # At the launch. A refusal (`OSError` or `GroupError`) fails the launch as the platform's fault.

    def prepare(self, attempt: NewAttempt) -> None:
        """Limit a new attempt as a whole; its tasks have no groups yet."""

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Limit one of its tasks, in the task's own group."""

    def environment(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> Mapping[str, str]:
        """Return the variables of a task that its job may not override."""
        return {}

    # While it runs, also under another agent than the one that launched it.

    def change_cores(self, attempt: ConfinedAttempt, change: CoreChange) -> None:
        """Follow a change of cores: a resize, a profile or throttle, a CPU that is back, or a restart of the agent.

        Raises:
            CoresRefused: the kernel refuses; nothing has changed.
        """

    def throttle(self, change: ThrottleChange) -> None:
        """Apply this concern's part of a throttle exactly; a refusal is only reported."""

    def before_stop(self, attempt: EnforcedAttempt) -> None:
        """Let an attempt that may be suspended handle the warning that it is about to get.

        Raises:
            GroupError: the kernel refuses; that is logged, and the attempt is warned.
        """

    # At its end, and if it was not launched after all.

    def end(self, attempt: str) -> None:
        """Remove what was made for the attempt of this name outside of its group and its directory, if anything was.

        Called on the agent's event loop, so it must not wait; and again by the next agent, if one is killed. An error
        (`OSError` or `GroupError`) is logged.
        """


def no_controller(node: EnforcedNode, controller: str, sentence: str) -> list[str]:
    """Return the sentence if a node's control groups do not have this controller."""
    return [] if node.group is not None and controller in node.group.enforces else [sentence]
