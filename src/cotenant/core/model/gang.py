"""A job as placement sees it: what its replicas will hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.job import JobKind, JobSpec, Locality


@dataclass(frozen=True, slots=True)
class Demand:
    """What one replica will hold, its cores decided."""

    gpu_milli: int = 0
    cores: int = 0
    memory_bytes: int = 0
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The replicas of one role of a gang."""

    role: str
    replicas: int
    demand: Demand


@dataclass(frozen=True, slots=True)
class Gang:
    """A job as placement sees it: parts that get their places together or not at all.

    Two gangs are equal where they need the same; policies to which more matters say so (`policy.Discerns`).
    """

    job_id: str
    parts: tuple[Part, ...]
    locality: Locality | None = None
    sizing: str = field(default="", compare=False)  # how the cores were decided, for people
    tenant: str = field(default="", compare=False)  # whose limits it counts against; "" has none
    kind: JobKind = field(default=JobKind.TRAINING, compare=False)
    waited_seconds: float = field(default=0.0, compare=False)  # since it last began to wait
    fragmented_seconds: float = field(default=0.0, compare=False)  # of these, those in which places were in fragments
    spec: JobSpec | None = field(default=None, compare=False)  # None where nobody knows more than the parts say
    estimate: Estimate = field(default=UNKNOWN, compare=False)
    avoided: tuple[str, ...] = ()  # ids of nodes on which it is not to be placed, the longest avoided first
    yielded: tuple[str, ...] = field(default=(), compare=False)  # that it would avoid, if others could hold it

    @property
    def gpu_milli(self) -> int:
        """GPUs over all replicas, in thousandths."""
        total = 0
        for part in self.parts:  # a cycle asks so often that a generator would cost more than the sum
            total += part.replicas * part.demand.gpu_milli
        return total

    @property
    def cores(self) -> int:
        """Cores over all replicas."""
        total = 0
        for part in self.parts:  # a cycle asks so often that a generator would cost more than the sum
            total += part.replicas * part.demand.cores
        return total

    @property
    def memory_bytes(self) -> int:
        """Memory over all replicas."""
        total = 0
        for part in self.parts:  # a cycle asks so often that a generator would cost more than the sum
            total += part.replicas * part.demand.memory_bytes
        return total
