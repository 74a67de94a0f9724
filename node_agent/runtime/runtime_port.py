"""The port through which the agent has attempts run: entry points of the group `cotenant.runtimes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.v1 import contention_service_pb2, node_service_pb2, resources_pb2


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """What a runtime is told when it opens.

    `output_bytes_max` is what is kept of each task's output; `kept_max` and `kept_seconds_max` bound how many
    acknowledged attempts' output is kept, and for how long. `pids_max` is how many processes and threads each task of a
    job that names none may have; 0 means no limit. `gpu_minors` tells the numbers N of /dev/nvidiaN by UUID, as far
    as NVML tells. `users` maps submitters to users of this machine. `shared_identity` lets jobs of several submitters
    run as the agent's user where it is not root. `hidden` is what jobs are not to see beside the state directory.
    """

    node_id: str
    state_dir: Path
    inventory: resources_pb2.Inventory
    output_bytes_max: int
    kept_max: int
    kept_seconds_max: float
    pids_max: int = 0
    gpu_minors: Callable[[], Mapping[str, int]] = dict
    users: Mapping[str, str] = field(default_factory=dict)
    shared_identity: bool = False
    hidden: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What an attempt has used of the CPUs since it began, and holds of memory now.

    Of the memory bandwidth it tells the bytes that were moved since somebody began to look, and what it holds of the
    last-level cache; None where the hardware does not tell. Pressures are those within its control group, None where
    the kernel does not tell.
    """

    cpu_seconds: float
    memory_bytes: int
    moved_bytes: int | None = None
    cache_bytes: int | None = None
    cpu_pressure: contention_service_pb2.Pressure | None = None
    memory_pressure: contention_service_pb2.Pressure | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """How an attempt is held back, and why not in all the ways that were asked for, in a sentence each."""

    throttle: Throttle = FREE
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """An attempt that was there before the agent was, and where it stands."""

    assignment: node_service_pb2.Assignment
    status: Status


class Runtime(Protocol):
    """Runs attempts in such a way that they outlive the agent.

    A runtime is made without arguments and opened once. It tells of every change through `changed`, on the event
    loop: of the end of an attempt exactly once, and only when nothing of the attempt runs any more.
    """

    api_version: int
    name: str

    async def open(self, context: RuntimeContext, changed: Callable[[Status], None]) -> Sequence[Found]:
        """Begin, and find what runs already and what ended without being forgotten."""

    def not_enforced(self) -> Sequence[str]:
        """What it cannot enforce here, each in one sentence; known once it is open."""

    async def launch(self, assignment: node_service_pb2.Assignment) -> None:
        """Start an attempt.

        One that this node cannot start becomes NOT_LAUNCHED with a cause and the reason, before anything of it was
        executed, and so does one for which this raises. It becomes FAILED where no node could start it.
        """

    def stop(self, key: AttemptKey, grace_seconds: float) -> None:
        """Warn an attempt, and kill it when grace is over."""

    async def adopt(self, assignment: node_service_pb2.Assignment) -> str | None:
        """Let a running attempt go on under a newer assignment, also after a restart; a reason where it cannot.

        Only its cores may differ. It has all of them or, with a reason, exactly those that it had.
        """

    async def narrow(self, key: AttemptKey, cores: int | None) -> str | None:
        """Let each task of an attempt use only so many of its cores, or with None all; a reason where it cannot.

        It holds all of them meanwhile. A runtime that is opened again gives all of them back first.
        """

    async def usage(self, key: AttemptKey) -> Usage | None:
        """What an attempt uses; None where it is not running."""

    def output_directory(self, key: AttemptKey) -> Path | None:
        """Where an attempt's output lies, running or kept; None where there is none."""

    async def forget(self, key: AttemptKey) -> None:
        """Placement has committed the end: only the output is kept, for a while."""

    async def close(self) -> None:
        """Let go. What runs, runs on."""


@runtime_checkable
class Throttles(Protocol):
    """A runtime that can hold attempts back."""

    async def throttle(self, key: AttemptKey, throttle: Throttle) -> Held:
        """Hold an attempt back so and not otherwise; what holds then.

        It stays so, also over a restart and under other cores, until this is called again or the attempt is stopped:
        what stands still goes on before it is warned.
        """

    def held(self, key: AttemptKey) -> Held:
        """How an attempt is held back; after a restart, as far as it is known."""


@runtime_checkable
class Heals(Protocol):
    """A runtime that gives running attempts back what the kernel took while CPUs were off line."""

    async def heal(self) -> None:
        """CPUs have come or gone: let each attempt use all of its own that are on line now."""
