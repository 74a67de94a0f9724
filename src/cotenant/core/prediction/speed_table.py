"""How a job would run under other allocations, looked up among those that a predictor judged."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency

Judged = tuple[Candidate, CandidateEstimate]


@dataclass(frozen=True, slots=True)
class Paces:
    """What was told of a job's speed, by nodes and cores, and of a service's latency, by replicas.

    Nothing is made up between what was judged: an allocation that was not asked about is unknown, and whoever is
    content with one that is like it asks for the nearest and is told which that is.

    >>> two, eight = Candidate(cores=2), Candidate(cores=8)
    >>> told = Estimate(candidates=(CandidateEstimate(1.5, allocation=two), CandidateEstimate(4.0, allocation=eight)))
    >>> paces = Paces.of(told)
    >>> paces.rate(nodes=1, cores=8), paces.rate(nodes=1, cores=6), paces.nearest(nodes=1, cores=6)[0].cores
    (4.0, None, 8)
    """

    judged: tuple[Judged, ...] = ()

    @classmethod
    def of(cls, estimate: Estimate) -> Paces:
        """Take what an estimate tells of allocations by name."""
        return cls(tuple([(one.allocation, one) for one in estimate.candidates if one.allocation is not None]))

    @property
    def rates(self) -> tuple[Judged, ...]:
        """The allocations whose rate is known, in the order in which they were asked about."""
        return tuple([(allocation, one) for allocation, one in self.judged if one.rate_per_second is not None])

    def at(self, nodes: int, cores: int, gpu_type: str = "") -> CandidateEstimate | None:
        """Give what is known of exactly so many nodes and cores a replica; None where no rate is."""
        found = [
            one for allocation, one in self._of_type(gpu_type) if (allocation.nodes, allocation.cores) == (nodes, cores)
        ]
        return _surest(found)

    def rate(self, nodes: int, cores: int, gpu_type: str = "") -> float | None:
        """The rate on exactly so many nodes and cores a replica, in steps per second; None where it is unknown."""
        known = self.at(nodes, cores, gpu_type)
        return known.rate_per_second if known else None

    def nearest(self, nodes: int, cores: int, gpu_type: str = "", *, within: float = 2.0) -> Judged | None:
        """Find the closest allocation whose rate is known: by nodes, then by cores; each at most `within` times away.

        None where there is none. `cores` 0 stands for any.
        """
        near = [
            (abs(math.log(allocation.nodes / nodes)), _apart(allocation.cores, cores), place)
            for place, (allocation, _) in enumerate(self._of_type(gpu_type))
        ]
        far = math.log(within) + 1e-9
        best = min((one for one in near if one[0] <= far and one[1] <= far), default=None)
        return list(self._of_type(gpu_type))[best[2]] if best else None

    def latency(self, replicas: int) -> Latency | None:
        """The latency of a service with exactly so many replicas; None where it is unknown."""
        found = [one.latency for _, one in self.judged if one.latency and one.latency.replicas == replicas]
        return max(found, key=lambda one: one.confidence, default=None)

    @property
    def latencies(self) -> dict[int, Latency]:
        """The latencies of a service by its replicas, the surest of each."""
        counts = sorted({one.latency.replicas for _, one in self.judged if one.latency})
        return {count: told for count in counts if (told := self.latency(count))}

    def _of_type(self, gpu_type: str) -> Iterable[Judged]:
        return [(one, told) for one, told in self.rates if not gpu_type or one.gpu_type in ("", gpu_type)]


def _apart(cores: int, wanted: int) -> float:
    if not wanted or cores == wanted:
        return 0.0
    return abs(math.log(cores / wanted)) if cores else math.inf


def _surest(found: list[CandidateEstimate]) -> CandidateEstimate | None:
    return max(found, key=lambda one: one.confidence, default=None)
