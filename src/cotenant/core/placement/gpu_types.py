"""Which GPU type a job should take: its speed on each type, and what a type costs the other jobs.

Theory of operation. A job that may run on several types is fastest on one, but so are most jobs, and some gain far more
there than others: a CycleGAN is nine times as fast on a V100 as on a K80, an A3C twice. Gavel (Narayanan et al., OSDI
2020 [P]) maximizes the smallest throughput that any job gets, relative to its throughput on an equal share of all
types, by a linear program. We post prices instead [R], as that program's dual would: a type costs what it would give a
typical job over the slowest type, times the chance that the next job finds none of it free, for which we take the share
of its GPUs that is taken to the power of 8. While a type is free it costs nothing and each job takes its fastest; when
it is nearly full, the last GPUs are left to jobs for which it does more than for others. A price that rises from the
beginning sends jobs to slow types too early: it made the mean JCT 11 to 18 % longer.

Speeds are logarithms, so that a price is compared with a ratio of speeds. They come from the rates that predictors give
for candidate allocations that differ only in their type (`candidate_allocations`). A type on which the job's class
never ran is expected to be as much faster or slower as it is for the running jobs; if nothing is known of it, as fast
as the job's best type, so that it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.estimate import Candidate, Estimate
from cotenant.core.model.node import NodeShape, matches_gpu_type
from cotenant.core.placement.scores import Candidates, Scorer
from cotenant.core.policy.cluster_view import ClusterView

FULLNESS = 8  # exponent of the share taken [R]: of 1, 3 and 8, the best in `benchmarks/gpu_types.py`
DECIMALS = 6  # of logarithms, whose last bits differ between machines
Speeds = Mapping[str, float]  # logarithms by type, relative to any one speed


def rates_by_type(estimate: Estimate) -> dict[str, float]:
    """Return the predicted rates in steps per second of allocations that differ only in their GPU type.

    >>> from cotenant.core.model.estimate import CandidateEstimate
    >>> estimate = Estimate(candidates=(
    ...     CandidateEstimate(5.0, allocation=Candidate(4)),
    ...     CandidateEstimate(2.0, allocation=Candidate(4, gpu_type="T4")),
    ...     CandidateEstimate(5.0, allocation=Candidate(4, gpu_type="A100"))))
    >>> rates_by_type(estimate)
    {'T4': 2.0, 'A100': 5.0}
    """
    found: dict[tuple[int, ...], dict[str, float]] = {}
    for one in estimate.candidates:
        held, rate = one.allocation, one.rate_per_second
        if held is not None and held.gpu_type and rate:
            found.setdefault(_but_type(held), {}).setdefault(held.gpu_type, rate)
    return max(found.values(), key=len, default={})


def _but_type(held: Candidate) -> tuple[int, ...]:
    return held.cores, held.gpu_milli, held.nodes, held.workers, held.servers, held.server_cores


def effective_gpus(estimate: Estimate, gpu_type: str, shapes: Iterable[NodeShape], wanted: str = "") -> float:
    """Return how many GPUs of the average type one GPU of a type is worth to a job; 1 if that is unknown.

    The average is over all GPUs of the types that the job may have: its equal share of them, as in Gavel [P].

    >>> from cotenant.core.model.estimate import CandidateEstimate
    >>> judged = [CandidateEstimate(rate, allocation=Candidate(4, gpu_type=kind)) for kind, rate in (("T4", 1.0),
    ...     ("A100", 3.0))]
    >>> shapes = [NodeShape(8, 64, "T4"), NodeShape(8, 64, "A100")]
    >>> effective_gpus(Estimate(candidates=tuple(judged)), "A100", shapes)
    1.5
    """
    rates = rates_by_type(estimate)
    if len(rates) < 2 or gpu_type not in rates:
        return 1.0
    counts = [
        (one.gpus * one.count, rates[one.gpu_type])
        for one in shapes
        if one.gpu_type in rates and matches_gpu_type(one.gpu_type, wanted)
    ]
    total = sum(count for count, _ in counts)
    return rates[gpu_type] * total / math.fsum(count * rate for count, rate in counts) if total else 1.0


class TypePrices:
    """The typical speeds on each GPU type, from the running jobs, and from them the prices of one cycle."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._typical: Speeds | None = None
        self._known: dict[str, tuple[object, Speeds]] = {}  # by job: the answer of its predictors, and its speeds

    def begin_cycle(self, view: ClusterView) -> None:
        """Use the running jobs of a cycle, which are read only if a gang may choose among types."""
        self._view, self._typical = view, None

    def scorer(self, estimate: Estimate, wanted: Sequence[str], ledger: Ledger) -> Scorer | None:
        """Return a scorer of the types that a job may have: price minus speed; None if it cannot choose.

        `wanted` are the types that the parts of its gang name, "" for any.
        """
        kinds = [kind for kind in ledger.gpu_types if kind and all(matches_gpu_type(kind, one) for one in wanted)]
        if len(kinds) < 2:
            return None
        typical = self.typical
        speeds = _speeds(estimate, typical, kinds)
        if speeds is None:
            return None
        prices = _prices(typical, kinds, ledger) if typical else dict.fromkeys(kinds, 0.0)
        by_type = [round(prices[kind] - speeds[kind], DECIMALS) if kind in speeds else 0.0 for kind in ledger.gpu_types]
        scores: NDArray[np.float64] = np.array(by_type)[ledger.type_numbers]

        def gpu_type(candidates: Candidates) -> NDArray[np.float64] | None:
            """Speed: the logarithm of what a GPU type costs others, less that of the gang's own speed on it."""
            return scores if candidates.gpu_milli else None

        return gpu_type

    @property
    def typical(self) -> Speeds:
        """The mean logarithm of the running jobs' speeds on each type, each relative to the job's own mean."""
        if self._typical is None:
            running = self._view.running_jobs() if self._view else {}
            known = {job_id: self._speeds_of(job_id, one.gang.estimate) for job_id, one in running.items()}
            self._known = {job_id: one for job_id, one in self._known.items() if job_id in known}
            sums: dict[str, list[float]] = {}
            for speeds in known.values():
                for kind, speed in speeds.items():
                    sums.setdefault(kind, []).append(speed)
            self._typical = {kind: math.fsum(ones) / len(ones) for kind, ones in sorted(sums.items())}
        return self._typical

    def _speeds_of(self, job_id: str, estimate: Estimate) -> Speeds:
        before = self._known.get(job_id)
        if before is None or before[0] is not estimate.candidates:
            before = self._known[job_id] = estimate.candidates, _centered(rates_by_type(estimate))
        return before[1]


def _centered(rates: Mapping[str, float]) -> Speeds:
    """Return the logarithms of some rates less their mean; none if there are fewer than two to compare."""
    if len(rates) < 2:
        return {}
    logs = {kind: math.log(rate) for kind, rate in rates.items()}
    mean = math.fsum(logs.values()) / len(logs)
    return {kind: one - mean for kind, one in logs.items()}


def _speeds(estimate: Estimate, typical: Speeds, kinds: Sequence[str]) -> Speeds | None:
    """Return the logarithms of a job's speeds on some types; None if nothing tells them apart."""
    own = {kind: math.log(rate) for kind, rate in rates_by_type(estimate).items() if kind in kinds}
    both = [kind for kind in own if kind in typical]
    shift = math.fsum(own[kind] - typical[kind] for kind in both) / len(both) if both else 0.0
    expected = {kind: typical[kind] + shift for kind in kinds if kind in typical and (both or not own)}
    known = {**expected, **own}
    if not known:
        return None
    best = max(known.values())
    return {kind: known.get(kind, best) for kind in kinds}


def _prices(typical: Speeds, kinds: Sequence[str], ledger: Ledger) -> dict[str, float]:
    """Return what a GPU of each type costs: what it gives a typical job over the slowest, by how full the type is."""
    least = min((typical[kind] for kind in kinds if kind in typical), default=0.0)
    numbers = np.where(ledger.open, ledger.type_numbers, len(ledger.gpu_types))
    count = len(ledger.gpu_types) + 1
    free, total = (np.bincount(numbers, column, count) for column in (ledger.free_gpus, ledger.total_gpus))
    taken = {kind: 1 - free[place] / max(1.0, total[place]) for place, kind in enumerate(ledger.gpu_types)}
    return {kind: (typical.get(kind, least) - least) * float(taken[kind]) ** FULLNESS for kind in kinds}
