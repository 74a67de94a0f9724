"""The port for runtimes, which run attempts for the agent: entry points of the group `cotenant.runtimes`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.containers.container_gpus import DIRECTORIES
from cotenant.node_agent.enforcement.node_settings import NodeSettings
from cotenant.node_agent.probes.outer_job import Nesting
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.uploaded_folder import UploadedFolders
from cotenant.v1 import contention_service_pb2, resources_pb2


class SecretReader(Protocol):
    """Where the secrets of a job come from."""

    async def read(self, assignment: agent_pb2.Assignment, stop_asked: asyncio.Event) -> Mapping[str, bytes]:
        """Return the values of the secrets that a job names, by name.

        Raises:
            CannotFetch: the queue does not have them, or is out of reach for too long.
            FetchStopped: the attempt was stopped.
        """


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """What a runtime gets when it is opened.

    `output_bytes_max` limits each task's output; `kept_max` and `kept_seconds_max` bound how many acknowledged attempts
    keep their output, and for how long. `settings` are those that enforcement hooks read. `gpu_minors` returns the N of
    each GPU's /dev/nvidiaN by UUID, as far as NVML reports it. `users` maps submitters to users of this machine.
    `shared_identity` allows jobs of several submitters to run as the agent's user if the agent is not root. `hidden`
    are paths to hide from jobs in addition to the state directory. `folders` fetches uploaded folders and `secrets`
    secrets; None: no job has any. `image_cache_bytes` limits the cache of unpacked images. `nesting` describes the
    job of another system that the agent runs in, if any: nothing may outlive it. Containers mount only what is in
    `mounts_allowed`, None: whatever their users reach. `cdi_directories` have the CDI specs.
    `tell_launch` gets what a launch that takes long is doing, and "" when that is over.
    """

    node_id: str
    state_dir: Path
    inventory: resources_pb2.Inventory
    output_bytes_max: int
    kept_max: int
    kept_seconds_max: float
    settings: NodeSettings = field(default_factory=NodeSettings)
    gpu_minors: Callable[[], Mapping[str, int]] = dict
    users: Mapping[str, str] = field(default_factory=dict)
    shared_identity: bool = False
    hidden: tuple[Path, ...] = ()
    folders: UploadedFolders | None = None
    image_cache_bytes: int = 50 << 30
    secrets: SecretReader | None = None
    nesting: Nesting | None = None
    mounts_allowed: tuple[str, ...] | None = None
    cdi_directories: tuple[Path, ...] = DIRECTORIES
    tell_launch: Callable[[AttemptKey, str], None] = lambda key, phrase: None


@dataclass(frozen=True, slots=True)
class Usage:
    """An attempt's CPU time since it started, and its current memory.

    `moved_bytes` counts memory traffic since monitoring began, `cache_bytes` is its part of the last-level cache; None
    if the hardware has no counters. Pressures are those within its control group, None if the kernel does not report
    them.
    """

    cpu_seconds: float
    memory_bytes: int
    moved_bytes: int | None = None
    cache_bytes: int | None = None
    cpu_pressure: contention_service_pb2.Pressure | None = None
    memory_pressure: contention_service_pb2.Pressure | None = None


@dataclass(frozen=True, slots=True)
class ThrottleState:
    """An attempt's effective throttle, and why parts of the requested one were refused, one sentence each."""

    throttle: Throttle = FREE
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveredAttempt:
    """An attempt that existed before the agent started, and its status."""

    assignment: agent_pb2.Assignment
    status: Status


class Runtime(Protocol):
    """Runs attempts that outlive the agent.

    A runtime is created without arguments and opened once. It reports every change through `changed`, on the event
    loop: the end of an attempt exactly once, and only when no process of the attempt runs.
    """

    api_version: int
    name: str

    async def open(self, context: RuntimeContext, changed: Callable[[Status], None]) -> Sequence[RecoveredAttempt]:
        """Start the runtime; return running attempts and ended ones that were not forgotten."""

    def not_enforced(self) -> Sequence[str]:
        """Return what the runtime cannot enforce here, one sentence each; known once it is open."""

    async def launch(self, assignment: agent_pb2.Assignment) -> None:
        """Start an attempt.

        If this node cannot start it, or if this method raises, it becomes NOT_LAUNCHED with a cause and a reason before
        any of its programs is executed. If no node could start it, it becomes FAILED.
        """

    def stop(self, key: AttemptKey, grace_seconds: float, reason: str = "") -> None:
        """Warn an attempt, and kill it when its grace period is over; its end names the reason, a `StopReason`."""

    async def adopt(self, assignment: agent_pb2.Assignment) -> str | None:
        """Apply a newer assignment to a running attempt, also after a restart; return why not, or None.

        Only its cores may differ. It gets all of the new cores or, with a reason, keeps exactly the old ones.
        """

    async def narrow(self, key: AttemptKey, cores: int | None) -> str | None:
        """Let each task of an attempt use only `cores` of its cores, or with None all; return why not, or None.

        The attempt holds all of them in the meantime. A runtime that is opened again first gives all of them back.
        """

    async def usage(self, key: AttemptKey) -> Usage | None:
        """Return an attempt's usage; None if it is not running."""

    def output_directory(self, key: AttemptKey) -> Path | None:
        """Return the directory of an attempt's output, running or kept; None if there is none."""

    async def forget(self, key: AttemptKey) -> None:
        """Forget an attempt whose end placement has committed: only the output is kept, for a while."""

    async def close(self) -> None:
        """Close the runtime. Running attempts continue."""


class SessionFailed(Exception):
    """A session could not be opened, for this reason."""


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """What a session runs in the task with a rank; without a command the user's shell.

    `size` is that of its terminal in lines and characters, None without a terminal. `environment` is added to the
    task's.
    """

    command: Sequence[str]
    rank: int
    size: tuple[int, int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class CommandSession(Protocol):
    """A command that runs in an attempt, with non-blocking descriptors: `error` is -1 on a terminal."""

    input: int
    output: int
    error: int

    async def started(self) -> None:
        """Wait until the command runs. Raises `SessionFailed`."""

    async def ended(self) -> tuple[int, int]:
        """Wait until the command and all that it started have ended; return its exit code and signal."""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""

    async def close(self) -> None:
        """Kill all that is left of it, and wait until it is gone. The descriptors stay open."""


@runtime_checkable
class SessionRuntime(Protocol):
    """A runtime that can run commands in a running attempt."""

    async def open_session(self, key: AttemptKey, wanted: SessionCommand) -> CommandSession:
        """Start a command where a task of an attempt runs, under the same limits. Raises `SessionFailed`."""


@runtime_checkable
class ThrottlingRuntime(Protocol):
    """A runtime that can throttle attempts."""

    async def throttle(self, key: AttemptKey, throttle: Throttle) -> ThrottleState:
        """Apply exactly this throttle to an attempt; return the effective one.

        It persists, also over a restart and a change of cores, until this is called again or the attempt is stopped: a
        suspended attempt is resumed before it is warned.
        """

    def held(self, key: AttemptKey) -> ThrottleState:
        """Return an attempt's throttle; after a restart, as far as it is known."""


@runtime_checkable
class TimeLimitRuntime(Protocol):
    """A runtime that can change the time limit of a running attempt."""

    async def limit_time(self, key: AttemptKey, limit_seconds: float | None) -> str | None:
        """Hold a running attempt to this limit from its start on, also after a restart; return why not, or None."""
        ...


@runtime_checkable
class ContainerGpuRuntime(Protocol):
    """A runtime that gives containers GPUs by specs, which may be written while the agent runs."""

    async def refresh_container_gpus(self) -> bool:
        """Look at the specs again if they have changed; return whether that changes the inventory."""
        ...


@runtime_checkable
class HotPlugRuntime(Protocol):
    """A runtime that restores running attempts' CPUs that the kernel removed while they were offline."""

    async def heal(self) -> None:
        """Let each attempt use all of its online CPUs after CPUs went offline or came online."""
