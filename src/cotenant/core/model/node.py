"""What a node consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cotenant.core.model.node_capabilities import EVERYTHING, Capability, NodeCapabilities
from cotenant.core.model.resources import WHOLE_GPU_MILLI, Amounts, Resources, amounts_of, present


@dataclass(frozen=True, slots=True)
class Core:
    """A schedulable core: a physical core with its SMT siblings, or one logical CPU if the node splits them."""

    id: int
    cpus: tuple[int, ...]
    numa_node: int = 0
    socket: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, identified by its UUID.

    GPUs of a node with the same `island`, from 1, are connected by NVLink; 0: no known link.
    """

    uuid: str
    model: str = ""
    memory_bytes: int = 0
    numa_node: int = -1
    shareable: bool = False
    declared: bool = False
    pci_bus_id: str = ""
    unhealthy_reason: str = ""
    island: int = 0


class HealthAction(StrEnum):
    """What follows from a health problem, the mildest first."""

    IGNORE = "ignore"  # reported only
    HOLD = "hold"  # no new work until the state is known again; running attempts continue
    RESTART = "restart"  # attempts that use it are restarted
    QUARANTINE = "quarantine"  # no new work for this GPU; attempts that use it are restarted elsewhere
    DRAIN = "drain"  # the whole node takes no new work and is drained


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """A health problem of a node. Without a `gpu_uuid` it concerns the whole node."""

    check: str
    action: HealthAction
    reason: str
    gpu_uuid: str = ""
    since: float | None = None  # unix time
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Inventory(Amounts):
    """Everything on a node that jobs may use."""

    cores: tuple[Core, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    rack: str = ""
    address: str = ""
    not_enforced: tuple[str, ...] = ()
    agent_version: str = ""
    problems: tuple[HealthProblem, ...] = ()
    shared_user: str = ""  # the user that runs every job; empty if jobs run as their submitters
    container_runtime: str = ""  # the program that runs containers, with its version; empty if none can run here
    container_gpus_missing: str = ""  # why jobs with an image get no GPUs here; empty if they do
    outer_job: str = ""  # of another system, in which the agent runs; empty if it has the machine by itself
    available_until: float | None = None  # unix time; None: no end is known
    machine: str = ""  # the boot of the underlying machine; empty if unknown or deliberately shared

    @property
    def gpu_type(self) -> str:
        """The type of its GPUs; a node's GPUs are assumed to be identical."""
        return self.gpus[0].model if self.gpus else ""

    @property
    def shareable(self) -> bool:
        """Whether shares of its GPUs may be allocated."""
        return any(gpu.shareable for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node that gets one job at a time, a canary, because launches or all launched attempts failed there.

    The next canary may start in `next_seconds`; `canary` is the attempt that is the canary now, "" if there is none.
    """

    node_id: str
    reason: str
    next_seconds: float = 0.0
    canary: str = ""


@dataclass(frozen=True, slots=True)
class UnhealthyCapacity:
    """How many GPUs and nodes get no new work because they are unhealthy, and what the nodes would have if healthy.

    `held` are the nodes that get a canary now and then.
    """

    gpus: int = 0
    nodes: int = 0
    healthy_shapes: tuple[NodeShape, ...] = ()
    held: tuple[HeldNode, ...] = ()

    def gpus_of(self, wanted: Sequence[str], shapes: Sequence[NodeShape]) -> int:
        """Count the unhealthy GPUs of the wanted types; `shapes` are what the nodes have now, in the same order."""
        pairs = zip(self.healthy_shapes, shapes, strict=True)
        return sum(
            well.gpus - now.gpus for well, now in pairs if any(matches_gpu_type(well.gpu_type, each) for each in wanted)
        )


@dataclass(frozen=True, slots=True)
class NodeShape(Amounts):
    """The total resources of a node, as counts. `count` 0: such a node could join but has not.

    `containers`: whether jobs with an image can run on it, `container_gpus`: whether they get its GPUs. `lacks`: what
    its executor cannot do.
    """

    gpus: int
    cores: int
    gpu_type: str = ""
    shareable: bool = False
    count: int = 1
    containers: bool = True
    container_gpus: bool = True
    lacks: frozenset[Capability] = frozenset()

    def __str__(self) -> str:
        """Return the shape as refusals name it."""
        gpus = f"{self.gpus} × {self.gpu_type}" if self.gpu_type else f"{self.gpus} GPUs"
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        others = [f", {kind.describe(amount)}" for kind, amount in present(self) if kind.optional]
        return f"{gpus}, {self.cores} cores{memory}{''.join(others)}"

    @property
    def resources(self) -> Resources:
        """Its resources as a vector."""
        return Resources(self.gpus * WHOLE_GPU_MILLI, self.cores, **amounts_of(self))


def matches_gpu_type(gpu_type: str, wanted: str) -> bool:
    """Return whether a GPU is of the wanted type, or of one of several types separated by `|`.

    A type matches anywhere in the GPU's name, ignoring case.

    >>> matches_gpu_type("NVIDIA A100-SXM4-80GB", "a100"), matches_gpu_type("T4", "A100")
    (True, False)
    >>> matches_gpu_type("V100M32", "V100M16|V100M32")
    True
    """
    return any(one in gpu_type.lower() for one in alternatives(wanted.lower()))


def alternatives(wanted: str) -> list[str]:
    """Return the alternatives in a requested GPU type; a request without a type gives one that matches any GPU."""
    return [one.strip() for one in wanted.split("|")]


def shape_of(inventory: Inventory, capabilities: NodeCapabilities = EVERYTHING) -> NodeShape:
    """Return the total resources of a node, and what it can run."""
    return NodeShape(
        gpus=len(inventory.gpus),
        cores=len(inventory.cores),
        **amounts_of(inventory),
        gpu_type=inventory.gpu_type,
        shareable=inventory.shareable,
        containers=bool(inventory.container_runtime),
        container_gpus=not inventory.container_gpus_missing,
        lacks=capabilities.lacks,
    )


def format_gpu_type(gpu_type: str) -> str:
    """Format a requested GPU type.

    >>> format_gpu_type("V100M16|V100M32")
    'V100M16 or V100M32'
    """
    return " or ".join(alternatives(gpu_type))
