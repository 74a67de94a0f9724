"""Free resources, summed over all nodes."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.job_table import Capacity
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.simulator.job import JobClass


@dataclass(slots=True)
class FreeResources:
    """Free resources, summed over all nodes."""

    gpu_milli: int
    cores: int
    memory_bytes: int

    def lacks(self, job_class: JobClass) -> bool:
        """Return whether a gang needs more than is free."""
        return (
            job_class.gpu_milli > self.gpu_milli
            or job_class.cores > self.cores
            or job_class.memory_bytes > self.memory_bytes
        )

    def refusal_of(self, job_class: JobClass) -> Refusal | None:
        """Return why the gangs of a class wait, if not only for lack of free resources."""
        return None if self.lacks(job_class) else job_class.refusal

    def lacking(self, job_class: JobClass) -> list[str]:
        """Return the resources of which a gang needs more than is free."""
        names = ("gpu_milli", "cores", "memory_bytes")
        return [name for name in names if getattr(job_class, name) > getattr(self, name)]

    def take(self, job_class: JobClass, times: int = 1) -> None:
        """Take the resources of a gang; a negative number of times gives them back."""
        self.gpu_milli -= times * job_class.gpu_milli
        self.cores -= times * job_class.cores
        self.memory_bytes -= times * job_class.memory_bytes

    def add(self, node: NodeShape, times: int = 1) -> None:
        """Add a node, all of it free; a negative number of times removes it."""
        self.gpu_milli += times * node.gpus * WHOLE_GPU_MILLI
        self.cores += times * node.cores
        self.memory_bytes += times * node.memory_bytes


def with_node(capacity: Capacity, node: NodeShape, times: int = 1) -> Capacity:
    """Return the capacity with one more node; a negative number of times removes it."""
    return Capacity(
        capacity.gpu_milli + times * node.gpus * WHOLE_GPU_MILLI,
        capacity.cores + times * node.cores,
        capacity.memory_bytes + times * node.memory_bytes,
    )
