"""What a node is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Core:
    """A schedulable core: a physical one with its SMT siblings, or one logical CPU where a node splits them."""

    id: int
    cpus: tuple[int, ...]
    numa_node: int = 0
    socket: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, named by its UUID alone.

    GPUs of a node with the same `island`, from 1, reach each other over NVLink; 0: it has none that is known.
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
    """What follows from something that is not well, the mildest first."""

    IGNORE = "ignore"  # it is told, and nothing else
    HOLD = "hold"  # no new work until it is known again how things stand; what runs, runs on
    RESTART = "restart"  # attempts that use it are to be started anew
    QUARANTINE = "quarantine"  # no new work for this GPU; attempts that use it are to be started anew elsewhere
    DRAIN = "drain"  # the whole node takes no new work and is emptied


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """Something on a node that is not well. Without a `gpu_uuid` it concerns the whole node."""

    check: str
    action: HealthAction
    reason: str
    gpu_uuid: str = ""
    since: float | None = None  # unix time
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that jobs may use of a node."""

    cores: tuple[Core, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    memory_bytes: int = 0
    rack: str = ""
    address: str = ""
    not_enforced: tuple[str, ...] = ()
    agent_version: str = ""
    problems: tuple[HealthProblem, ...] = ()
    shared_user: str = ""  # as whom every job runs; empty where jobs run as their submitters
    machine: str = ""  # the boot of the machine that it is on; empty where unknown, or deliberately shared

    @property
    def gpu_type(self) -> str:
        """The type of its GPUs; a node's GPUs are taken to be alike."""
        return self.gpus[0].model if self.gpus else ""

    @property
    def shareable(self) -> bool:
        """Whether shares of its GPUs may be given out."""
        return any(gpu.shareable for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node that gets one job at a time, a canary, since launches or all that was launched failed there.

    The next canary may start in `next_seconds`; `canary` is the attempt that is one now, "" where there is none.
    """

    node_id: str
    reason: str
    next_seconds: float = 0.0
    canary: str = ""


@dataclass(frozen=True, slots=True)
class Illness:
    """How many GPUs get no new work, and how many nodes, for their health; and what all nodes had if they were well.

    `held` are those of the nodes that get a canary now and then.
    """

    gpus: int = 0
    nodes: int = 0
    shapes_when_well: tuple[NodeShape, ...] = ()
    held: tuple[HeldNode, ...] = ()

    def gpus_of(self, wanted: Sequence[str], shapes: Sequence[NodeShape]) -> int:
        """Count those of the wanted types; `shapes` are what the nodes have now, in the same order."""
        pairs = zip(self.shapes_when_well, shapes, strict=True)
        return sum(
            well.gpus - now.gpus for well, now in pairs if any(is_of_type(well.gpu_type, each) for each in wanted)
        )


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a node has in all, for those who only count. `count` 0: such a node could join but has not."""

    gpus: int
    cores: int
    memory_bytes: int = 0
    gpu_type: str = ""
    shareable: bool = False
    count: int = 1

    def __str__(self) -> str:
        """The shape in words, as refusals name it."""
        gpus = f"{self.gpus} × {self.gpu_type}" if self.gpu_type else f"{self.gpus} GPUs"
        memory = f", {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return f"{gpus}, {self.cores} cores{memory}"


def is_of_type(gpu_type: str, wanted: str) -> bool:
    """Tell whether a GPU is of a wanted type, or of one of several with a `|` between them.

    A type is found anywhere in the GPU's name, case aside.

    >>> is_of_type("NVIDIA A100-SXM4-80GB", "a100"), is_of_type("V100M32", "V100M16|V100M32"), is_of_type("T4", "A100")
    (True, True, False)
    """
    return any(one in gpu_type.lower() for one in alternatives(wanted.lower()))


def alternatives(wanted: str) -> list[str]:
    """Take a wish for one of several GPU types apart; a wish for none in particular is one for any."""
    return [one.strip() for one in wanted.split("|")]


def shape_of(inventory: Inventory) -> NodeShape:
    """Count what a node has."""
    return NodeShape(
        gpus=len(inventory.gpus),
        cores=len(inventory.cores),
        memory_bytes=inventory.memory_bytes,
        gpu_type=inventory.gpu_type,
        shareable=inventory.shareable,
    )


def type_in_words(gpu_type: str) -> str:
    """Write a wish for a GPU type.

    >>> type_in_words("V100M16|V100M32")
    'V100M16 or V100M32'
    """
    return " or ".join(alternatives(gpu_type))
