"""Latency of services from their batch times, and the replicas needed to meet a latency objective."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import (
    Candidate,
    CandidateEstimate,
    Estimate,
    Latency,
    Observation,
    Query,
    validated_rate,
)
from cotenant.core.model.job import Qos
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.batch_fit import BatchFit, fit
from cotenant.core.prediction.batch_queueing import answer, replicas_needed
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key

PERCENTS = (95.0, 99.0)
SIZE_MAX = 1_000_000

AllocationKey = tuple[int, int, str]  # of one replica: GPUs in thousandths, cores, GPU type
Point = tuple[int, float]  # batch size, seconds


@dataclass(slots=True)
class Service:
    """Observations of a service: the latest batches under each allocation, and the lines fitted to them."""

    batches: OrderedDict[AllocationKey, list[Point]] = field(default_factory=OrderedDict)
    lines: dict[AllocationKey, BatchFit | None] = field(default_factory=dict)  # fitted on demand


class LatencyModel:
    """Predict the mean and percentiles of a service's latency from its batch times, and the replicas needed.

    A batch of b requests takes αb + τ₀, with α and τ₀ fitted to the observations; requests arrive at random and wait
    for the previous batch (GENIE, Chen et al., TPDS 2020; the bound of the mean: Inoue, arXiv 1912.06322 [C]).
    `cotenant.core.prediction.batch_queueing` explains how the percentiles follow [R]. Requests are assumed to be spread
    over the replicas at random. A service does not end by itself, so no remaining time is predicted. Services are
    similar if they share their user and their model (else their name); a candidate is judged by batches observed under
    a similar allocation, with its own number of replicas if it gives one as `workers`.

    >>> from cotenant.core.model.job import Qos
    >>> latency, held = LatencyModel(), Candidate(cores=4, gpu_milli=1000)
    >>> for size in (1, 2, 4, 8, 16, 4, 8, 2, 1, 16):
    ...     seen = Observation("ann", "bert", "", 1000, 1, held, batch_size=size, batch_seconds=0.01 + 0.001 * size)
    ...     latency.observe(seen)
    >>> promise = Qos(latency_seconds=0.03, latency_percentile=99.0, arrivals_per_second=900.0)
    >>> query = Query("ann", "bert", "", gpu_milli=1000, replicas=1, qos=promise, candidates=(held,))
    >>> told = latency.estimate(query).candidates[0].latency
    >>> told.p99_seconds, told.replicas_needed
    (0.27957, 5)
    """

    name = "latency"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered.

        services_max: services remembered; the least recently used service is dropped first.
        allocations_max: latest allocations of a service whose batches are remembered.
        batches_max: latest batches remembered of each allocation.
        """

        services_max: int = 10_000
        allocations_max: int = 16
        batches_max: int = 64

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name in ("services_max", "allocations_max", "batches_max"):
                if getattr(self, name) < 1:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name)}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._services: JobClassMemory[Service] = JobClassMemory(self.options.services_max, Service, _write, _read)

    def observe(self, observation: Observation) -> None:
        """Record the time of a batch; other observations are ignored.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        validated_rate(observation)
        size, seconds = observation.batch_size, observation.batch_seconds
        if size is not None and not 1 <= size <= SIZE_MAX:
            raise ValueError(f"a batch has from 1 to {SIZE_MAX} requests, not {size}")
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"a batch time must be positive and finite, not {seconds:g}")
        if size is None or not seconds:
            return
        key, held = _key(observation), _allocation_key(observation.allocation)
        service = self._services.change(key)
        points = service.batches.setdefault(held, [])
        points.append((size, seconds))
        del points[: -self.options.batches_max]
        service.batches.move_to_end(held)
        service.lines.pop(held, None)
        if len(service.batches) > self.options.allocations_max:
            oldest, _ = service.batches.popitem(last=False)
            service.lines.pop(oldest, None)

    def estimate(self, query: Query) -> Estimate:
        """Return the latency under each candidate; never a remaining time."""
        key = _key(query)
        service = self._services.get(key)
        unjudged = (CandidateEstimate(),) * len(query.candidates)
        if service is None:
            return Estimate(candidates=unjudged, source="no batch of a similar service was observed")
        if not query.qos.arrivals_per_second:
            return Estimate(candidates=unjudged, source="it does not give the arrival rate of its requests")
        judged = tuple([_judge(service, query, candidate) for candidate in query.candidates])
        seen = plural(sum(len(points) for points in service.batches.values()), "batch time")
        return Estimate(candidates=judged, source=f"a service does not end; its latency is predicted from {seen}")

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        return self._services.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of the records that could not be read."""
        return self._services.restore(records)


def _key(about: Observation | Query) -> Key:
    """Return the key of a service: its user and its model, else its name."""
    return about.user, about.model or about.name


def _allocation_key(allocation: Candidate) -> AllocationKey:
    return allocation.gpu_milli, allocation.cores, allocation.gpu_type


def _line(service: Service, candidate: Candidate) -> BatchFit | None:
    """Return the line of an allocation; unspecified cores or GPU type match any, the latest first."""
    for held in reversed(service.batches):
        gpu_milli, cores, gpu_type = held
        if gpu_milli == candidate.gpu_milli and candidate.cores in (0, cores) and candidate.gpu_type in ("", gpu_type):
            if held not in service.lines:
                service.lines[held] = fit(service.batches[held])
            return service.lines[held]
    return None


def _judge(service: Service, query: Query, candidate: Candidate) -> CandidateEstimate:
    line = _line(service, candidate)
    if line is None:
        return CandidateEstimate()
    replicas = candidate.workers or max(query.replicas, 1)
    rate = query.qos.arrivals_per_second / replicas
    sure = round(_confidence(line, rate), 6)
    latency = Latency(
        replicas,
        replicas_needed=_needed(line, query.qos),
        confidence=sure,
        per_request_seconds=line.batch.per_request,
        fixed_seconds=line.batch.fixed,
    )
    promised = query.qos.latency_percentile
    told = answer(line.batch, rate, (*PERCENTS, promised) if 0 < promised < 100 else PERCENTS)
    if told is None:
        return CandidateEstimate(latency=latency)
    p95, p99 = told.percentiles_seconds[:2]
    at_promised = told.percentiles_seconds[2] if len(told.percentiles_seconds) > 2 else None
    return CandidateEstimate(
        latency=replace(
            latency,
            mean_seconds_max=told.mean_seconds_max,
            p95_seconds=p95,
            p99_seconds=p99,
            promised_seconds=at_promised,
        )
    )


def _needed(line: BatchFit, qos: Qos) -> int | None:
    """Return the replicas that meet the objective, if there is one."""
    if not (qos.latency_seconds > 0 and 0 < qos.latency_percentile < 100):
        return None
    return replicas_needed(line.batch, qos.arrivals_per_second, qos.latency_percentile, qos.latency_seconds)


def _confidence(line: BatchFit, rate: float) -> float:
    """Return the confidence: lower beyond the observed batch sizes, and where the line's error decides the load."""
    batch = line.batch
    idle = max(1 - rate * batch.per_request, 0.0)
    size = rate * batch.fixed / idle if idle else math.inf
    beyond = min(1.0, line.size_max / max(size, 1.0))
    off = rate * line.per_request_error
    return line.confidence * beyond * (idle / (idle + off) if idle + off else 0.0)


def _write(key: Key, service: Service) -> bytes:
    batches = [[*held, points] for held, points in service.batches.items()]
    return json.dumps({"key": key, "batches": batches}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Service]:
    """Decode a record.

    Raises:
        ValueError, TypeError, KeyError: the content is not a valid record.
    """
    record = json.loads(content)
    user, model = (kept.text(part) for part in record["key"])
    service = Service()
    for gpu_milli, cores, gpu_type, points in record["batches"]:
        batches = [
            (kept.whole(size, 1, SIZE_MAX), kept.between(seconds, kept.RATE_MIN_PER_SECOND, kept.SECONDS_MAX))
            for size, seconds in points
        ]
        if not batches:
            raise ValueError("an allocation without batches")
        service.batches[kept.gpu_milli(gpu_milli), kept.cores(cores), kept.text(gpu_type)] = batches
    return (user, model), service
