"""How many replicas a service needs to keep its promised latency, and how much neighbours may cost each of them.

Theory of operation. A predictor tells how long batches take (`core.predicting.latency`), and so for any number of
replicas the percentile that is promised, each taking its share of the requests. The fewest that keep the promise
undisturbed are what a service gets that leaves the number open. Neighbours make every batch take longer, in proportion
[R]: at a share s of its speed a replica needs τ(b)/s. More replicas each have fewer requests to answer, and bear a
smaller share, so where neighbours disturb a service more replicas may keep what fewer do not (GENIE, Chen et al., TPDS
2020 [D], chooses the replicas of its inference jobs by the same model).
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
from cotenant.core.prediction.speed_table import Paces

SHARE_MIN = 0.25  # of its speed: nobody is disturbed more than that by any belief about neighbours
ROUNDS = 10  # of bisection: to a thousandth of the speed, or of the requests
CACHED = 4096
DIGITS = 3  # of figures that are told as what would do


def needed(spec: JobSpec, estimate: Estimate) -> float | None:
    """The fewest replicas that keep the promise undisturbed; infinity: no number does; None: nothing is known.

    >>> from cotenant.core.model.estimate import Candidate, CandidateEstimate
    >>> told = Latency(1, per_request_seconds=0.001, fixed_seconds=0.01)
    >>> estimate = Estimate(candidates=(CandidateEstimate(latency=told, allocation=Candidate(4)),))
    >>> promise = Qos(latency_seconds=0.03, latency_percentile=99.0, arrivals_per_second=900.0)
    >>> needed(JobSpec(qos=promise), estimate)
    5
    """
    told, qos = _told(estimate), spec.qos
    if told is None or not _promises(qos):
        return None
    batch = _batch(told)
    if batch is None:
        return told.replicas_needed or math.inf
    count = replicas_needed(batch, qos.arrivals_per_second, qos.latency_percentile, qos.latency_seconds)
    return math.inf if count is None else count


def decided(spec: JobSpec, estimate: Estimate) -> JobSpec:
    """Give a service that leaves the number of its replicas open as many as it needs, undisturbed, within its limits.

    One of which nothing is known yet gets the fewest, for it has to run to be known; one for which the most that it may
    have are too few gets those, and `too_few` says so. Other jobs stay as they are.
    """
    if spec.open is None:
        return spec
    count = needed(spec, estimate)
    return spec.with_replicas(int(min(max(count or 0, spec.open.least), spec.open.most)))


def in_words(spec: JobSpec, estimate: Estimate) -> str:
    """Say why a service that left its replicas open has as many as it has; nothing of any other job."""
    if spec.open is None:
        return ""
    count = needed(spec, estimate)
    have = plural(spec.replicas, "replica")
    if count is None:
        return f"{have}, the fewest that it may have, for nothing is known of its latency yet"
    if spec.replicas < count:
        return f"{have}, the most that it may have"
    if spec.replicas > max(count, spec.open.least):
        return f"{have}, which answer {_promise(spec.qos)} beside its neighbours; alone {count:g} would"
    if spec.replicas > count:
        return f"{have}, the fewest that it may have"
    return f"{have}, the fewest that answer {_promise(spec.qos)}"


def too_few(spec: JobSpec, estimate: Estimate) -> Refusal | None:
    """Say why no number of replicas that a service may have keeps its promise, and what would change that.

    None where some number does, or nothing is known, or the number is not open.
    """
    if spec.open is None or (count := needed(spec, estimate)) is None or count <= spec.open.most:
        return None
    most, told, qos = spec.open.most, _told(estimate), spec.qos
    batch = _batch(told) if told else None
    numbers = {"replicas_max": float(most), "target_seconds": qos.latency_seconds}
    remedies = []
    if count < math.inf:
        numbers["replicas_needed"] = count
        who = f"it takes {plural(count, 'replica')} to answer {_promise(qos)}, and it may have {most}"
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
    """Tell how the most replicas would do, which target they would keep, and at which rate of arrivals this one."""
    told = answer(batch, qos.arrivals_per_second / most, (qos.latency_percentile,))
    numbers: dict[str, float] = {}
    if told is None:
        words = f"with {most} they would not keep up"
    else:
        numbers["latency_seconds"] = _up(told.percentiles_seconds[0])
        words = f"with {most} they take {numbers['latency_seconds']:g} s"
    if rate := _rate_max(batch, qos, most):
        numbers["arrivals_max"] = rate
    return words, numbers


def _rate_max(batch: BatchTime, qos: Qos, replicas: int) -> float:
    """About the most requests a second that so many replicas answer in time; 0: hardly any."""

    def keeps(rate: float) -> bool:
        return _keeps(batch, rate / replicas, qos.latency_percentile, qos.latency_seconds)

    share = _least(lambda share: keeps(qos.arrivals_per_second * (1 - share)), 0.0, 1.0 - 2.0**-ROUNDS)
    rate = _down(qos.arrivals_per_second * (1 - share)) if share < math.inf else 0.0
    return rate if rate and keeps(rate) else 0.0


def share_needed(spec: JobSpec, estimate: Estimate, replicas: int) -> float | None:
    """The least share of its undisturbed speed at which so many replicas keep the promise.

    Infinity where they do not keep it undisturbed; None where nothing is known. Where it is known whether they keep it,
    but not how long batches take, all of the speed is needed.
    """
    qos = spec.qos
    told = Paces.of(estimate).latency(replicas) or (_told(estimate) if _promises(qos) else None)
    batch = _batch(told) if told else None
    if told is not None and batch is not None and _promises(qos):
        rate = qos.arrivals_per_second / replicas
        return _share(batch, rate, qos.latency_percentile, qos.latency_seconds)
    if told is None or told.replicas != replicas:
        return None
    kept = told.replicas_needed is not None and told.replicas_needed <= replicas
    return 1.0 if kept or (told.promised_seconds or math.inf) <= qos.latency_seconds else math.inf


def larger(gang: Gang) -> Iterator[Gang]:
    """Give a service that left its replicas open with one more, two more and so on, up to where more are of no use.

    That is where they would keep the promise beside the worst neighbours, or at the most that it may have.
    """
    spec = gang.spec
    if spec is None or spec.open is None or len(gang.parts) != 1 or needed(spec, gang.estimate) is None:
        return
    before = share_needed(spec, gang.estimate, spec.replicas)
    for count in range(spec.replicas + 1, spec.open.most + 1):
        if before is None or before <= SHARE_MIN:
            return
        grown = spec.with_replicas(count)
        sizing = "; ".join([gang.sizing.split("; ")[0], in_words(grown, gang.estimate)])
        yield replace(gang, spec=grown, parts=(replace(gang.parts[0], replicas=count),), sizing=sizing)
        before = share_needed(spec, gang.estimate, count)


def _told(estimate: Estimate) -> Latency | None:
    """What was told of the first allocation of which anything was: the one that the job asks for."""
    return next((one.latency for one in estimate.candidates if one.latency), None)


def _batch(told: Latency) -> BatchTime | None:
    if told.per_request_seconds is None or told.fixed_seconds is None:
        return None
    return BatchTime(told.per_request_seconds, told.fixed_seconds)


def _promises(qos: Qos) -> bool:
    return qos.latency_seconds > 0 and 0 < qos.latency_percentile < 100 and qos.arrivals_per_second > 0


@lru_cache(maxsize=CACHED)
def _share(batch: BatchTime, rate: float, percent: float, target_seconds: float) -> float:
    def keeps(share: float) -> bool:
        slowed = BatchTime(batch.per_request / share, batch.fixed / share)
        return _keeps(slowed, rate, percent, target_seconds)

    return _least(keeps, SHARE_MIN, 1.0)


def _keeps(batch: BatchTime, rate: float, percent: float, target_seconds: float) -> bool:
    told = answer(batch, rate, (percent,))
    return told is not None and told.percentiles_seconds[0] <= target_seconds


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """About the least figure for which something holds that holds from there on; infinity where it never does."""
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
    """Round up to what is told, so that what is told would do."""
    return _rounded(figure, math.ceil)


def _down(figure: float) -> float:
    return _rounded(figure, math.floor)


def _rounded(figure: float, towards: Callable[[float], int]) -> float:
    if figure <= 0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(figure))
    return towards(round(figure * 10.0**digits, 6)) / 10.0**digits
