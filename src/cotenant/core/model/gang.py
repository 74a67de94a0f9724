"""A job as placement sees it: what its replicas will hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.job import JobKind, JobSpec, Locality
from cotenant.core.model.resources import Amounts, Resources, added, times


@dataclass(frozen=True, slots=True)
class Demand(Amounts):
    """What one replica will hold, with its cores decided."""

    gpu_milli: int = 0
    cores: int = 0
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """The replicas of one role of a gang."""

    role: str
    replicas: int
    demand: Demand


@dataclass(frozen=True, slots=True)
class Gang:
    """A job as placement sees it: parts that are placed together or not at all.

    Two gangs are equal if they have the same requirements; policies for which more matters implement
    `DefinesEquivalence`.
    """

    job_id: str
    parts: tuple[Part, ...]
    locality: Locality | None = None
    sizing: str = field(default="", compare=False)  # how the cores were decided, for users
    tenant: str = field(default="", compare=False)  # the tenant whose limits apply; "": none
    kind: JobKind = field(default=JobKind.TRAINING, compare=False)
    waited_seconds: float = field(default=0.0, compare=False)  # since it last began to wait
    fragmented_seconds: float = field(
        default=0.0, compare=False
    )  # time of that in which free resources were fragmented
    spec: JobSpec | None = field(default=None, compare=False)  # None if only the parts are known
    estimate: Estimate = field(default=UNKNOWN, compare=False)
    avoided: tuple[str, ...] = ()  # ids of nodes to avoid, the longest avoided first
    constraints: tuple[Hashable, ...] = ()  # on its places, as its job sets them: `core.placement.constraint`
    yielded: tuple[str, ...] = field(default=(), compare=False)  # nodes it would avoid if any other node could hold it

    @property
    def gpu_milli(self) -> int:
        """GPUs over all replicas, in thousandths."""
        total = 0
        for part in self.parts:  # hot path: a generator would cost more than the sum
            total += part.replicas * part.demand.gpu_milli
        return total

    @property
    def cores(self) -> int:
        """Cores over all replicas."""
        total = 0
        for part in self.parts:  # hot path: a generator would cost more than the sum
            total += part.replicas * part.demand.cores
        return total

    @property
    def needs(self) -> Resources:
        """Resources over all replicas."""
        return needs_of(self.parts)


def needs_of(parts: Sequence[Part]) -> Resources:
    """Return the resources over all replicas of some parts."""
    if len(parts) == 1:
        return times(parts[0].demand, parts[0].replicas)
    return added([times(part.demand, part.replicas) for part in parts])
