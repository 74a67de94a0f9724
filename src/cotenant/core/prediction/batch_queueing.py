"""Response times of a server that takes all waiting requests as its next batch.

A batch of b requests takes τ(b) = αb + τ₀. Requests arrive at random, λ per second (Poisson). An idle server starts at
once with the first request; a busy server takes, when it is done, all that have arrived. It keeps up iff λα < 1. This
is GENIE's inference side (Chen et al., TPDS 2020; papers by Inoue, arXiv 1912.06322, for the bounds of the mean).

The obvious way to percentiles is to simulate the queue. That is not necessary: the sizes of successive batches are a
Markov chain, the next being Poisson with mean λτ(b), or 1 if no request came. A request that arrives while a batch of b
is served arrives at a uniform instant of it, and, as arrivals are Poisson, what else arrives in that time is
independent of that instant. So its latency is (1 - u)·τ(b) + τ(1 + m), with u uniform and m Poisson of mean λτ(b); a
request that finds the server idle takes τ(1). With the chain's stationary distribution this is the whole distribution
of latency, without sampling [R]. A few batch sizes are treated one by one; of many, some stand for their neighbors, a
quarter of a standard deviation apart, and if all are large both variables are practically normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STATES_MAX = 256  # batch sizes, or further arrivals, that are treated one by one
GRID = 97  # of normal variables
SIGMAS = 6.0  # values further out, one in 10⁹, do not affect a percentile
TAIL = 12.0  # batch sizes fall off no slower than e^(-2(1-λα)b): beyond this / (1-λα) nothing is left
SPACING = 0.25  # between the sizes that stand for others, in standard deviations of what comes during a batch
ROUNDS = 30  # of bisection: to a billionth
SIGNIFICANT = 5  # digits of inputs and answers: the last bits of logarithms differ between machines
LOAD_MAX = 0.99  # of λα; closer to 1, waits are so long and so sensitive to λ and α that it counts as not keeping up
REPLICAS_MAX = 4096
CACHED = 4096


@dataclass(frozen=True, slots=True)
class BatchTime:
    """τ(b) = αb + τ₀, in seconds.

    >>> BatchTime(0.002, 0.01).seconds(5)
    0.02
    """

    per_request: float  # α
    fixed: float  # τ₀

    def __post_init__(self) -> None:
        if not (0 <= self.per_request < math.inf and 0 <= self.fixed < math.inf and self.per_request + self.fixed > 0):
            raise ValueError(f"a batch cannot take {self.per_request:g} s a request and {self.fixed:g} s besides")

    def seconds(self, size: float) -> float:
        """Return the time that a batch takes."""
        return self.per_request * size + self.fixed

    def keeps_up(self, rate: float) -> bool:
        """Return whether waits stay finite, with a margin, at this many arrivals per second: λα ≤ `LOAD_MAX` < 1."""
        return rate * self.per_request <= LOAD_MAX


def mean_seconds_max(batch: BatchTime, rate: float) -> float:
    """Return the upper bound min(φ₀, φ₁) of the mean latency (Inoue, arXiv 1912.06322); infinity if overloaded.

    >>> round(mean_seconds_max(BatchTime(0.001, 0.01), 500.0), 5)
    0.03167
    """
    _require_rate(rate)
    if not batch.keeps_up(rate):
        return math.inf
    alpha, fixed = batch.per_request, batch.fixed
    load = rate * alpha
    inner = 1 + 2 * rate * fixed + (1 - rate * fixed) / (1 + load)
    short = (alpha + fixed) / (2 * (1 - load)) * inner
    long = 1.5 * fixed / (1 - load) + alpha / 2 * (load + 2) / (1 - load * load)
    return min(short, long)


def fixed_batch_mean_seconds(batch: BatchTime, size: int, rate: float) -> float:
    """Return the mean latency if the server waits until a batch is full: (b - 1)/(2λ) + τ(b) [R].

    The wait for the previous batch is not included, so this holds only while batches fill more slowly than they are
    served; infinity otherwise.
    """
    return _fixed_batch(batch, size, rate, 0.5)


def fixed_batch_worst_seconds(batch: BatchTime, size: int, rate: float) -> float:
    """Return the mean latency of the first request of each batch, which waits longest: (b - 1)/λ + τ(b) [R]."""
    return _fixed_batch(batch, size, rate, 1.0)


def _fixed_batch(batch: BatchTime, size: int, rate: float, share: float) -> float:
    _require_rate(rate)
    if size < 1:
        raise ValueError(f"a batch has one request or more, not {size}")
    return share * (size - 1) / rate + batch.seconds(size) if rate * batch.seconds(size) < size else math.inf


@dataclass(frozen=True)
class Latencies:
    """The distribution of the latency under one load."""

    busy: Floats  # by size: share of requests that arrive while such a batch is served
    size_seconds: Floats  # time that this batch takes
    further: Floats  # by size: share of each count of other arrivals in that time
    answer_seconds: Floats  # by size and count: time that the request's own batch takes
    idle: float  # share of requests that find the server idle
    idle_seconds: float
    mean_seconds: float

    def share_within(self, seconds: float) -> float:
        """Return the share of requests that are answered within a time."""
        left = (seconds - self.answer_seconds) / self.size_seconds[:, None]
        share = float(self.busy @ (self.further * np.clip(left, 0, 1)).sum(axis=1))
        return share + (self.idle if seconds >= self.idle_seconds else 0.0)

    def percentile_seconds(self, percent: float) -> float:
        """Return the time within which a percentage of requests is answered, up to rounding."""
        low, high = 0.0, float((self.answer_seconds + self.size_seconds[:, None]).max()) + self.idle_seconds
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            if self.share_within(middle) < percent / 100:
                low = middle
            else:
                high = middle
        return high


def latencies(batch: BatchTime, rate: float) -> Latencies:
    """Return the distribution of latency.

    Raises:
        ValueError: the rate is invalid, or the server does not keep up with it.
    """
    _require_rate(rate)
    if not batch.keeps_up(rate):
        raise ValueError(f"at {rate:g} requests a second the server does not keep up")
    sizes, shares = _sizes(batch, rate)
    seconds = batch.per_request * sizes + batch.fixed
    while_busy, none_came = shares * rate * seconds, shares * np.exp(-rate * seconds)
    total = float(while_busy.sum() + none_came.sum())
    counts, further = _poisson(rate * seconds)
    answers = batch.per_request * (1 + counts) + batch.fixed
    busy, idle, idle_seconds = while_busy / total, float(none_came.sum()) / total, batch.seconds(1)
    mean = float(busy @ ((further * answers).sum(axis=1) + seconds / 2)) + idle * idle_seconds
    return Latencies(busy, seconds, further, answers, idle, idle_seconds, mean)


def _sizes(batch: BatchTime, rate: float) -> tuple[Floats, Floats]:
    """Return batch sizes and the frequency of each: the chain's stationary distribution."""
    load = rate * batch.per_request
    mean = rate * batch.fixed / (1 - load)
    sigma = math.sqrt(max(mean, 1.0) / (1 - load * load))
    low = max(1, math.floor(mean - SIGMAS * sigma))
    high = math.ceil(max(mean, 1) + SIGMAS * (sigma + 1) + TAIL / (1 - load))
    if high - low >= STATES_MAX and low > 1:
        sizes = np.linspace(low, high, GRID)
        shares = np.exp(-(((sizes - mean) / sigma) ** 2) / 2)
        return sizes, shares / shares.sum()
    counts = np.arange(low, high + 1, dtype=np.float64)
    sizes = counts if len(counts) < STATES_MAX else _standing(high)
    means = rate * (batch.per_request * sizes + batch.fixed)
    moves = _poisson_table(means, counts)
    if low == 1:
        moves[:, 0] += np.exp(-means)  # no request came: the next batch is the first one to come
    moves /= moves.sum(axis=1, keepdims=True)
    return sizes, _stationary(moves if sizes is counts else _shared_out(moves, counts, sizes))


def _standing(high: int) -> Floats:
    """Return sizes from 1 that stand for their neighbors: each a share of its root from the next, and at least 1."""
    roots = np.arange(1.0, math.sqrt(high), SPACING / 2)
    return np.unique(np.append(np.floor(roots**2), float(high)))


def _shared_out(moves: Floats, counts: Floats, sizes: Floats) -> Floats:
    """Return the moves with each count split between the sizes around it, by distance, so that the mean stays."""
    above = np.clip(np.searchsorted(sizes, counts), 1, len(sizes) - 1)
    share = (counts - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    begins = np.searchsorted(above, np.arange(1, len(sizes)))
    shared = np.zeros((len(moves), len(sizes)))
    shared[:, 1:] += np.add.reduceat(moves * share, begins, axis=1)
    shared[:, :-1] += np.add.reduceat(moves * (1 - share), begins, axis=1)
    return shared


def _stationary(moves: Floats) -> Floats:
    """Return the stationary distribution of a chain with these transition probabilities (from: down, to: across).

    By the elimination of Grassmann, Taksar and Heyman (Operations Research 33, 1985): it subtracts nothing, so that no
    digit is lost, and needs no library whose threads or machine decide the last digits.
    """
    moves = moves.copy()
    for last in range(len(moves) - 1, 0, -1):
        moves[:last, last] /= moves[last, :last].sum()
        moves[:last, :last] += moves[:last, last, None] * moves[last, :last]
    shares = np.ones(len(moves))
    for state in range(1, len(moves)):
        shares[state] = (shares[:state] * moves[:state, state]).sum()
    stationary: Floats = shares / shares.sum()
    return stationary


def _poisson_table(means: Floats, counts: Floats) -> Floats:
    """Return the probability of each count (across) for each mean (down)."""
    factorials = np.array([math.lgamma(count + 1) for count in counts])
    logarithms = np.log(np.maximum(means, np.finfo(np.float64).tiny))  # a mean of 0 has all its weight on 0
    table: Floats = np.exp(counts * logarithms[:, None] - means[:, None] - factorials)
    return table


def _poisson(means: Floats) -> tuple[Floats, Floats]:
    """Return for each mean the counts that matter and their probabilities."""
    sigma = math.sqrt(float(means.max()))
    low, high = max(0.0, float(means.min()) - SIGMAS * sigma), float(means.max()) + SIGMAS * sigma + SIGMAS
    if high - low < STATES_MAX:
        counts = np.arange(math.floor(low), math.ceil(high) + 1, dtype=np.float64)
        table = _poisson_table(means, counts)
        return np.broadcast_to(counts, table.shape), table / table.sum(axis=1, keepdims=True)
    sigmas = np.linspace(-SIGMAS, SIGMAS, GRID)
    shares = np.exp(-(sigmas**2) / 2)
    counts = np.clip(means[:, None] + sigmas * np.sqrt(means)[:, None], 0, None)
    return counts, np.broadcast_to(shares / shares.sum(), counts.shape)


def _require_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"an arrival rate must be positive and finite, not {rate:g}")


@dataclass(frozen=True, slots=True)
class LatencyAnswer:
    """Latency at one replica: the bound of the mean, the mean, and percentiles, in seconds."""

    mean_seconds_max: float
    mean_seconds: float
    percentiles_seconds: tuple[float, ...]


def answer(batch: BatchTime, rate: float, percents: tuple[float, ...]) -> LatencyAnswer | None:
    """Return how long requests wait; None if the server does not keep up. Inputs are rounded to limit their number.

    >>> answer(BatchTime(0.001, 0.01), 500.0, (95.0, 99.0)).percentiles_seconds
    (0.045432, 0.05168)
    """
    rounded = BatchTime(_rounded(batch.per_request), _rounded(batch.fixed))
    return _answer(rounded, _rounded(rate), percents) if rounded.keeps_up(_rounded(rate)) else None


@lru_cache(maxsize=CACHED)
def _answer(batch: BatchTime, rate: float, percents: tuple[float, ...]) -> LatencyAnswer:
    found = latencies(batch, rate)
    percentiles = tuple([_rounded(found.percentile_seconds(percent)) for percent in percents])
    return LatencyAnswer(_rounded(mean_seconds_max(batch, rate)), _rounded(found.mean_seconds), percentiles)


def replicas_needed(batch: BatchTime, rate: float, percent: float, target_seconds: float) -> int | None:
    """Return the fewest replicas, with requests shared at random, that keep a percentile within its target.

    None if `REPLICAS_MAX` do not: then no relevant number does, because even an idle server takes τ(1).
    """
    if target_seconds < batch.seconds(1):
        return None

    def keeps(replicas: int) -> bool:
        latency = answer(batch, rate / replicas, (percent,))
        return latency is not None and latency.percentiles_seconds[0] <= target_seconds

    enough = max(1, math.floor(rate * batch.per_request))
    while not keeps(enough):
        if enough == REPLICAS_MAX:
            return None
        enough = min(2 * enough, REPLICAS_MAX)
    return _first(keeps, enough // 2, enough)


def _first(holds: Callable[[int], bool], fails: int, enough: int) -> int:
    """Return the first number after one that fails for which a condition holds that then holds from there on."""
    while enough - fails > 1:
        middle = (fails + enough) // 2
        fails, enough = (fails, middle) if holds(middle) else (middle, enough)
    return enough


def _rounded(figure: float) -> float:
    return float(f"{figure:.{SIGNIFICANT}g}")
