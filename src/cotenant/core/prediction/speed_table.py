"""How a job would run under other allocations, looked up among those that a predictor estimated."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency

Judged = tuple[Candidate, CandidateEstimate]


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """The estimated speeds of a job by nodes and cores, and latencies of a service by replicas.

    Nothing is interpolated: an allocation that was not estimated is unknown, and callers that accept a similar one ask
    for the nearest and get the allocation that it is for.

    >>> two, eight = Candidate(cores=2), Candidate(cores=8)
    >>> found = Estimate(candidates=(CandidateEstimate(1.5, allocation=two), CandidateEstimate(4.0, allocation=eight)))
    >>> paces = SpeedTable.of(found)
    >>> paces.rate(nodes=1, cores=8), paces.rate(nodes=1, cores=6), paces.nearest(nodes=1, cores=6)[0].cores
    (4.0, None, 8)
    """

    judged: tuple[Judged, ...] = ()

    @classmethod
    def of(cls, estimate: Estimate) -> SpeedTable:
        """Return the table of an estimate whose candidates have their allocations."""
        return cls(tuple([(one.allocation, one) for one in estimate.candidates if one.allocation is not None]))

    @property
    def rates(self) -> tuple[Judged, ...]:
        """The allocations with a known rate, in the order in which they were requested."""
        return tuple([(allocation, one) for allocation, one in self.judged if one.rate_per_second is not None])

    def at(self, nodes: int, cores: int, gpu_type: str = "") -> CandidateEstimate | None:
        """Return the estimate for exactly this many nodes and cores per replica; None if its rate is unknown."""
        found = [
            one for allocation, one in self._of_type(gpu_type) if (allocation.nodes, allocation.cores) == (nodes, cores)
        ]
        return _surest(found)

    def rate(self, nodes: int, cores: int, gpu_type: str = "") -> float | None:
        """Return the rate on exactly this many nodes and cores per replica, in steps per second; None if unknown."""
        known = self.at(nodes, cores, gpu_type)
        return known.rate_per_second if known else None

    def nearest(self, nodes: int, cores: int, gpu_type: str = "", *, within: float = 2.0) -> Judged | None:
        """Return the closest allocation with a known rate: by nodes, then by cores; each at most `within` times away.

        None if there is none. `cores` 0 means any.
        """
        near = [
            (abs(math.log(allocation.nodes / nodes)), _apart(allocation.cores, cores), place)
            for place, (allocation, _) in enumerate(self._of_type(gpu_type))
        ]
        far = math.log(within) + 1e-9
        best = min((one for one in near if one[0] <= far and one[1] <= far), default=None)
        return list(self._of_type(gpu_type))[best[2]] if best else None

    def latency(self, replicas: int) -> Latency | None:
        """Return the latency of a service with exactly this many replicas; None if unknown."""
        found = [one.latency for _, one in self.judged if one.latency and one.latency.replicas == replicas]
        return max(found, key=lambda one: one.confidence, default=None)

    @property
    def latencies(self) -> dict[int, Latency]:
        """The latencies of a service by its replicas, the most confident of each."""
        counts = sorted({one.latency.replicas for _, one in self.judged if one.latency})
        return {count: found for count in counts if (found := self.latency(count))}

    def _of_type(self, gpu_type: str) -> Iterable[Judged]:
        return [(one, found) for one, found in self.rates if not gpu_type or one.gpu_type in ("", gpu_type)]


def _apart(cores: int, wanted: int) -> float:
    if not wanted or cores == wanted:
        return 0.0
    return abs(math.log(cores / wanted)) if cores else math.inf


def _surest(found: list[CandidateEstimate]) -> CandidateEstimate | None:
    return max(found, key=lambda one: one.confidence, default=None)
