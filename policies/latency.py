"""How long requests to a service wait for their answers, and how many replicas keep its promise."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency, Observation, Query, rate_of
from cotenant.core.model.job import Qos
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.batch_fit import BatchFit, fit
from cotenant.core.prediction.batch_queueing import answer, replicas_needed
from cotenant.core.prediction.job_class_memory import Key, Remembered

PERCENTS = (95.0, 99.0)
SIZE_MAX = 1_000_000

Held = tuple[int, int, str]  # of one replica: GPUs in thousandths, cores, GPU type
Point = tuple[int, float]  # batch size, seconds


@dataclass(slots=True)
class Service:
    """What was seen of a service: the latest batches under each allocation, and the lines through them."""

    batches: OrderedDict[Held, list[Point]] = field(default_factory=OrderedDict)
    lines: dict[Held, BatchFit | None] = field(default_factory=dict)  # made when they are asked for


class LatencyModel:
    """Tell mean and percentiles of a service's latency from the times of its batches, and the replicas that it needs.

    A batch of b requests takes αb + τ₀, of which α and τ₀ are fitted to what was seen; requests come at random and wait
    for the batch before (GENIE, Chen et al., TPDS 2020; the bound of the mean: Inoue, arXiv 1912.06322 [C]). How the
    percentiles follow is told in `core/predicting/latency.py` [R]. Requests are taken to be spread over the replicas at
    random. A service does not end by itself, so nothing is said of remaining time. Services are alike that share their
    user and their model (else their name); a candidate is judged by batches that were seen under an allocation like it,
    with its own number of replicas where it names one, as `workers`.

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

        services_max: services remembered; the one unused for longest is forgotten first.
        allocations_max: latest allocations of a service whose batches are remembered.
        batches_max: latest batches remembered of each allocation.
        """

        services_max: int = 10_000
        allocations_max: int = 16
        batches_max: int = 64

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name in ("services_max", "allocations_max", "batches_max"):
                if getattr(self, name) < 1:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name)}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._services: Remembered[Service] = Remembered(self.options.services_max, Service, _write, _read)

    def observe(self, observation: Observation) -> None:
        """Take in the time of a batch; other observations tell nothing here.

        Raises:
            ValueError: a figure that cannot be; nothing of the observation is kept.
        """
        rate_of(observation)
        size, seconds = observation.batch_size, observation.batch_seconds
        if size is not None and not 1 <= size <= SIZE_MAX:
            raise ValueError(f"a batch has from 1 to {SIZE_MAX} requests, not {size}")
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"a batch time must be positive and finite, not {seconds:g}")
        if size is None or not seconds:
            return
        key, held = _key(observation), _held(observation.allocation)
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
        """Tell the latency under each candidate; never a remaining time."""
        key = _key(query)
        service = self._services.get(key)
        unjudged = (CandidateEstimate(),) * len(query.candidates)
        if service is None:
            return Estimate(candidates=unjudged, source="no batch of a service like it was seen")
        if not query.qos.arrivals_per_second:
            return Estimate(candidates=unjudged, source="it does not tell the rate at which requests arrive")
        judged = tuple([_judge(service, query, candidate) for candidate in query.candidates])
        seen = plural(sum(len(points) for points in service.batches.values()), "batch time")
        return Estimate(candidates=judged, source=f"a service does not end; its latency is told from {seen}")

    def dump(self) -> Mapping[str, bytes]:
        """Write down what changed since the last dump; a record without content was forgotten."""
        return self._services.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
        return self._services.restore(records)


def _key(about: Observation | Query) -> Key:
    """Know a service by its user and its model, else its name."""
    return about.user, about.model or about.name


def _held(allocation: Candidate) -> Held:
    return allocation.gpu_milli, allocation.cores, allocation.gpu_type


def _line(service: Service, candidate: Candidate) -> BatchFit | None:
    """Find the line of an allocation; any cores where it names none, any type where it names none, the latest first."""
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
    """The replicas that keep the promise, where one is made."""
    if not (qos.latency_seconds > 0 and 0 < qos.latency_percentile < 100):
        return None
    return replicas_needed(line.batch, qos.arrivals_per_second, qos.latency_percentile, qos.latency_seconds)


def _confidence(line: BatchFit, rate: float) -> float:
    """Trust the line less where it reaches beyond the batches that were seen, and where its error decides the load."""
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
    """Read a record.

    Raises:
        ValueError, TypeError, KeyError: it is none, or some figure in it cannot be.
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
            raise ValueError("an allocation of which no batch is told")
        service.batches[kept.gpu_milli(gpu_milli), kept.cores(cores), kept.text(gpu_type)] = batches
    return (user, model), service
