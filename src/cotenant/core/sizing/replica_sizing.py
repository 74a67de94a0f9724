"""How many replicas a service needs to meet its latency objective, and how much neighbors may slow each of them.

Theory of operation. A predictor tells how long batches take (`core.prediction.batch_queueing`), and so, for any number
of replicas with an equal share of the requests, the percentile of the objective. The fewest that meet the objective
undisturbed are what a service with `auto` replicas gets. Neighbors slow every batch in proportion [R]: at a share s of
its speed a replica needs τ(b)/s. More replicas have fewer requests each, and tolerate a smaller share, so where
neighbors disturb a service, more replicas may meet what fewer do not (GENIE, Chen et al., TPDS 2020 [D], chooses the
replicas of its inference jobs by the same model).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from cotenant.core.model.estimate import Estimate, Latency
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec, Qos
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.prediction.batch_queueing import BatchTime, answer, replicas_needed
from cotenant.core.prediction.speed_table import SpeedTable

SHARE_MIN = 0.25  # of its speed: no assumption about neighbors slows a job more than that
ROUNDS = 10  # of bisection: to a thousandth of the speed, or of the requests
CACHED = 4096
DIGITS = 3  # of figures given as what would suffice


def required_replicas(spec: JobSpec, estimate: Estimate) -> float | None:
    """Return the fewest replicas that meet the objective undisturbed; infinity: no number does; None: unknown.

    >>> from cotenant.core.model.estimate import Candidate, CandidateEstimate
    >>> known = Latency(1, per_request_seconds=0.001, fixed_seconds=0.01)
    >>> estimate = Estimate(candidates=(CandidateEstimate(latency=known, allocation=Candidate(4)),))
    >>> promise = Qos(latency_seconds=0.03, latency_percentile=99.0, arrivals_per_second=900.0)
    >>> required_replicas(JobSpec(qos=promise), estimate)
    5
    """
    known, qos = _known_latency(estimate), spec.qos
    if known is None or not _promises(qos):
        return None
    batch = _batch(known)
    if batch is None:
        return known.replicas_needed or math.inf
    count = replicas_needed(batch, qos.arrivals_per_second, qos.latency_percentile, qos.latency_seconds)
    return math.inf if count is None else count


def with_required_replicas(spec: JobSpec, estimate: Estimate) -> JobSpec:
    """Return a service with `auto` replicas with as many as it needs, undisturbed, within its limits.

    An unknown service gets the minimum, because it must run to become known; a service for which even the maximum is
    too few gets the maximum, and `unreachable_target` says so. Other jobs stay as they are.
    """
    if spec.open is None:
        return spec
    count = required_replicas(spec, estimate)
    return spec.with_replicas(int(min(max(count or 0, spec.open.least), spec.open.most)))


def in_words(spec: JobSpec, estimate: Estimate) -> str:
    """Describe why a service with `auto` replicas has this number; "" for other jobs."""
    if spec.open is None:
        return ""
    count = required_replicas(spec, estimate)
    have = plural(spec.replicas, "replica")
    if count is None:
        return f"{have}, its minimum: nothing is known about its latency yet"
    if spec.replicas < count:
        return f"{have}, its maximum"
    if spec.replicas > max(count, spec.open.least):
        return f"{have}, which answer {_promise(spec.qos)} beside its neighbors; alone {count:g} would"
    if spec.replicas > count:
        return f"{have}, its minimum"
    return f"{have}, the fewest that answer {_promise(spec.qos)}"


def range_in_words(spec: JobSpec) -> str:
    """Describe with how many replicas an elastic job starts; "" for other jobs.

    >>> from cotenant.core.model.job import ReplicaRange, Role
    >>> range_in_words(JobSpec(roles=(Role(replicas=2, elastic=ReplicaRange(2, 8)),)))
    '2 of its 2..8 worker replicas to begin with'
    """
    chosen = [
        f"{role.replicas} of its {role.elastic} {role.name} replicas to begin with"
        for role in spec.roles
        if role.elastic
    ]
    return "; ".join(chosen)


def unreachable_target(spec: JobSpec, estimate: Estimate) -> Refusal | None:
    """Return why no number of replicas that a service may have meets its objective, and what would change that.

    None if some number does, or nothing is known, or the number is fixed.
    """
    if spec.open is None or (count := required_replicas(spec, estimate)) is None or count <= spec.open.most:
        return None
    most, known, qos = spec.open.most, _known_latency(estimate), spec.qos
    batch = _batch(known) if known else None
    numbers = {"replicas_max": float(most), "target_seconds": qos.latency_seconds}
    remedies = []
    if count < math.inf:
        numbers["replicas_needed"] = count
        who = f"it takes {plural(count, 'replica')} to answer {_promise(qos)}, and its maximum is {most}"
        remedies.append(f"replicas_max is {count:g} or more")
    else:
        who = f"no number of replicas would answer {_promise(qos)}"
    if batch is not None:
        words, more = _with_most(batch, qos, most)
        if count == math.inf and batch.seconds(1) > qos.latency_seconds:
            who += f": one request alone takes {_up(batch.seconds(1)):g} s"
        who += f"; {words}"
        remedies += [f"its target is {more['latency_seconds']:g} s or more"] if "latency_seconds" in more else []
        remedies += [f"at most {more['arrivals_max']:g} requests arrive a second"] if "arrivals_max" in more else []
        numbers |= more
    return Refusal(
        Code.NEVER_FITS, who, ", or ".join(remedies) or "its target is longer, or fewer requests arrive", numbers
    )


def _with_most(batch: BatchTime, qos: Qos, most: int) -> tuple[str, dict[str, float]]:
    """Return how the maximum would do, which target it would meet, and at which arrival rate it would meet this one."""
    known = answer(batch, qos.arrivals_per_second / most, (qos.latency_percentile,))
    numbers: dict[str, float] = {}
    if known is None:
        words = f"{most} of them would not keep up"
    else:
        numbers["latency_seconds"] = _up(known.percentiles_seconds[0])
        words = f"{most} of them take {numbers['latency_seconds']:g} s"
    if rate := _rate_max(batch, qos, most):
        numbers["arrivals_max"] = rate
    return words, numbers


def _rate_max(batch: BatchTime, qos: Qos, replicas: int) -> float:
    """Return about the most requests per second that this many replicas answer in time; 0: hardly any."""

    def keeps(rate: float) -> bool:
        return _keeps(batch, rate / replicas, qos.latency_percentile, qos.latency_seconds)

    share = _least(lambda share: keeps(qos.arrivals_per_second * (1 - share)), 0.0, 1.0 - 2.0**-ROUNDS)
    rate = _down(qos.arrivals_per_second * (1 - share)) if share < math.inf else 0.0
    return rate if rate and keeps(rate) else 0.0


def expected_latency(qos: Qos, estimate: Estimate, replicas: int) -> float | None:
    """Return the undisturbed latency of this many replicas at the objective's percentile; None: unknown.

    Infinity if they do not keep up with the arrivals.

    >>> from cotenant.core.model.estimate import Candidate, CandidateEstimate
    >>> known = Latency(1, per_request_seconds=0.001, fixed_seconds=0.01)
    >>> estimate = Estimate(candidates=(CandidateEstimate(latency=known, allocation=Candidate(4)),))
    >>> qos = Qos(latency_seconds=0.03, latency_percentile=99.0, arrivals_per_second=900.0)
    >>> expected_latency(qos, estimate, 5) <= 0.03 < expected_latency(qos, estimate, 4)
    True
    """
    known = SpeedTable.of(estimate).latency(replicas) or _known_latency(estimate)
    if known is None or not _promises(qos) or replicas < 1:
        return None
    if (batch := _batch(known)) is None:
        return known.promised_seconds if known.replicas == replicas else None
    answered = answer(batch, qos.arrivals_per_second / replicas, (qos.latency_percentile,))
    return math.inf if answered is None else answered.percentiles_seconds[0]


def share_needed(spec: JobSpec, estimate: Estimate, replicas: int) -> float | None:
    """Return the smallest share of its undisturbed speed at which this many replicas meet the objective.

    Infinity if they do not meet it undisturbed; None if nothing is known. If only the fact is known, but not how long
    batches take, the full speed is needed.
    """
    qos = spec.qos
    known = SpeedTable.of(estimate).latency(replicas) or (_known_latency(estimate) if _promises(qos) else None)
    batch = _batch(known) if known else None
    if known is not None and batch is not None and _promises(qos):
        rate = qos.arrivals_per_second / replicas
        return _share(batch, rate, qos.latency_percentile, qos.latency_seconds)
    if known is None or known.replicas != replicas:
        return None
    kept = known.replicas_needed is not None and known.replicas_needed <= replicas
    return 1.0 if kept or (known.promised_seconds or math.inf) <= qos.latency_seconds else math.inf


def larger_gangs(gang: Gang) -> Iterator[Gang]:
    """Yield a service with `auto` replicas with one more, two more and so on, while more are of use.

    That is until they would meet the objective beside the worst neighbors, or reach the maximum.
    """
    spec = gang.spec
    if spec is None or spec.open is None or len(gang.parts) != 1 or required_replicas(spec, gang.estimate) is None:
        return
    before = share_needed(spec, gang.estimate, spec.replicas)
    for count in range(spec.replicas + 1, spec.open.most + 1):
        if before is None or before <= SHARE_MIN:
            return
        grown = spec.with_replicas(count)
        sizing = "; ".join([gang.sizing.split("; ")[0], in_words(grown, gang.estimate)])
        yield replace(gang, spec=grown, parts=(replace(gang.parts[0], replicas=count),), sizing=sizing)
        before = share_needed(spec, gang.estimate, count)


def _known_latency(estimate: Estimate) -> Latency | None:
    """Return the first known latency among the candidates: that of the job's own request."""
    return next((one.latency for one in estimate.candidates if one.latency), None)


def _batch(known: Latency) -> BatchTime | None:
    if known.per_request_seconds is None or known.fixed_seconds is None:
        return None
    return BatchTime(known.per_request_seconds, known.fixed_seconds)


def _promises(qos: Qos) -> bool:
    return qos.latency_seconds > 0 and 0 < qos.latency_percentile < 100 and qos.arrivals_per_second > 0


@lru_cache(maxsize=CACHED)
def _share(batch: BatchTime, rate: float, percent: float, target_seconds: float) -> float:
    def keeps(share: float) -> bool:
        slowed = BatchTime(batch.per_request / share, batch.fixed / share)
        return _keeps(slowed, rate, percent, target_seconds)

    return _least(keeps, SHARE_MIN, 1.0)


def _keeps(batch: BatchTime, rate: float, percent: float, target_seconds: float) -> bool:
    known = answer(batch, rate, (percent,))
    return known is not None and known.percentiles_seconds[0] <= target_seconds


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return about the least figure for which a condition holds, and holds from there on; infinity if none."""
    if holds(low):
        return low
    if not holds(high):
        return math.inf
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _promise(qos: Qos) -> str:
    share, rate = f"{qos.latency_percentile:g} %", f"{qos.arrivals_per_second:g} requests a second"
    return f"{share} of {rate} within {qos.latency_seconds:g} s"


def _up(figure: float) -> float:
    """Return a figure rounded up as shown, so that the shown figure suffices."""
    return _rounded(figure, math.ceil)


def _down(figure: float) -> float:
    return _rounded(figure, math.floor)


def _rounded(figure: float, towards: Callable[[float], int]) -> float:
    if figure <= 0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(figure))
    return towards(round(figure * 10.0**digits, 6)) / 10.0**digits
