"""What Slurm says, as typed records: nodes and jobs at one moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MIB = 1024 * 1024

RUNNING = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SIGNALING"})
PAUSED = frozenset({"SUSPENDED", "STOPPED"})
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING", "RESV_DEL_HOLD"})
SUCCEEDED = frozenset({"COMPLETED"})
CANCELLED = frozenset({"CANCELLED", "PREEMPTED", "REVOKED"})
CLOSED = frozenset(
    {
        *("DOWN", "DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID_REG", "MAINTENANCE"),
        *("MAINT", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED", "ERROR", "UNKNOWN", "BLOCKED"),
    }
)
AWAY = frozenset({"DOWN", "NOT_RESPONDING", "ERROR", "UNKNOWN", "FUTURE", "INVAL", "INVALID_REG"})


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node, its resources, and what Slurm says of its state. `threads` are the hardware threads of a core."""

    name: str
    cores: int = 0
    threads: int = 1
    sockets: int = 1
    memory_bytes: int = 0
    gpus: int = 0
    gpu_type: str = ""
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    reason: str = ""
    version: str = ""
    address: str = ""

    @property
    def open(self) -> bool:
        """Whether Slurm starts jobs there."""
        return not self.states & CLOSED

    @property
    def away(self) -> bool:
        """Whether its slurmd does not answer, or the node is out of service."""
        return bool(self.states & AWAY)


@dataclass(frozen=True, slots=True)
class Placed:
    """What a job holds on one node: cores by number, and GPUs by index."""

    node: str
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job, an array task or a component of a heterogeneous job. Times are unix seconds, 0 if unknown.

    `id` is as Slurm's commands show it: 17, 17_3, 17+1. `task` is None for anything but a task of an array.
    """

    id: str
    number: int
    state: str = "PENDING"
    flags: frozenset[str] = frozenset()
    reason: str = ""
    array: int = 0
    task: int | None = None
    tasks_running_max: int = 0
    het: int = 0
    name: str = ""
    user: str = ""
    user_id: int | None = None
    account: str = ""
    qos: str = ""
    partitions: tuple[str, ...] = ()
    cpus: int = 0
    nodes_min: int = 1
    processes: int = 0
    gpus_per_node: int = 0
    gpus_total: int = 0
    gpu_type: str = ""
    memory_bytes: int = 0
    exclusive: bool = False
    features: str = ""
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    dependency: str = ""
    reservation: str = ""
    priority: int = 0
    time_limit_seconds: float | None = None
    submitted_seconds: float = 0.0
    eligible_seconds: float = 0.0
    started_seconds: float = 0.0
    ended_seconds: float = 0.0
    suspended_seconds: float = 0.0
    ran_before_suspension_seconds: float = 0.0
    restarts: int = 0
    exit_code: int = 0
    signal: int = 0
    placed: tuple[Placed, ...] = ()
    command: str = ""
    directory: str = ""
    admin_comment: str = ""
    output: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is pending."""
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        """Whether it holds resources and runs."""
        return self.state in RUNNING

    @property
    def paused(self) -> bool:
        """Whether it is suspended; it then keeps its places."""
        return self.state in PAUSED

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return not (self.waits or self.runs or self.paused)

    @property
    def held(self) -> bool:
        """Whether a user or an administrator holds it."""
        return self.waits and (self.reason.startswith("JobHeld") or self.priority == 0)

    def ran_seconds(self, now: float) -> float:
        """Return how long it has run, without the time in which it was suspended."""
        if self.paused:
            return self.ran_before_suspension_seconds
        if not self.started_seconds or self.waits:
            return 0.0
        end = self.ended_seconds if self.ended and self.ended_seconds else now
        if self.suspended_seconds and self.ran_before_suspension_seconds:
            return self.ran_before_suspension_seconds + max(0.0, end - self.suspended_seconds)
        return max(0.0, end - self.started_seconds)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one answer of Slurm has, the version that gave it, and what it lacks or has in an unknown form."""

    jobs: tuple[SlurmJob, ...] = ()
    nodes: tuple[SlurmNode, ...] = ()
    version: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """The cluster as Slurm describes it at `taken_seconds`."""

    taken_seconds: float = 0.0
    nodes: Mapping[str, SlurmNode] = field(default_factory=lambda: MappingProxyType({}))
    jobs: Mapping[str, SlurmJob] = field(default_factory=lambda: MappingProxyType({}))
    version: str = ""
    memory_counts: bool = False  # whether Slurm allocates memory; else jobs hold none
