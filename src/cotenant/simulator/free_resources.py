"""What is free, in sum."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.job_table import Capacity
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.simulator.job import Shape


@dataclass(slots=True)
class Free:
    """What is free in sum over all nodes."""

    gpu_milli: int
    cores: int
    memory_bytes: int

    def lacks(self, shape: Shape) -> bool:
        """Tell whether a gang needs more."""
        return shape.gpu_milli > self.gpu_milli or shape.cores > self.cores or shape.memory_bytes > self.memory_bytes

    def known(self, shape: Shape) -> Refusal | None:
        """Tell why the gangs of a shape wait, where that is more than that too little is free."""
        return None if self.lacks(shape) else shape.refusal

    def lacking(self, shape: Shape) -> list[str]:
        """Name what a gang needs more of."""
        names = ("gpu_milli", "cores", "memory_bytes")
        return [name for name in names if getattr(shape, name) > getattr(self, name)]

    def take(self, shape: Shape, times: int = 1) -> None:
        """Have that much less; a negative number of times gives back."""
        self.gpu_milli -= times * shape.gpu_milli
        self.cores -= times * shape.cores
        self.memory_bytes -= times * shape.memory_bytes

    def add(self, node: NodeShape, times: int = 1) -> None:
        """Have a node more, all of it free; a negative number of times takes it away."""
        self.gpu_milli += times * node.gpus * WHOLE_GPU_MILLI
        self.cores += times * node.cores
        self.memory_bytes += times * node.memory_bytes


def with_node(capacity: Capacity, node: NodeShape, times: int = 1) -> Capacity:
    """Count a node more; a negative number of times takes it away."""
    return Capacity(
        capacity.gpu_milli + times * node.gpus * WHOLE_GPU_MILLI,
        capacity.cores + times * node.cores,
        capacity.memory_bytes + times * node.memory_bytes,
    )
