"""How long requests wait for answers from a server that takes all that wait as its next batch.

A batch of b requests takes τ(b) = αb + τ₀. Requests come at random, λ a second (Poisson). An idle server begins at once
with the one that comes; a busy one takes, when it is done, everything that came meanwhile. It keeps up iff λα < 1.
This is GENIE's inference side (Chen et al., TPDS 2020; papers by Inoue, arXiv 1912.06322, for the bounds of the mean).

The obvious way to percentiles is to simulate the queue. It need not be: the sizes of successive batches are a Markov
chain, the next being Poisson with mean λτ(b), or 1 where nobody came. A request that comes while a batch of b is served
comes at a uniform instant of it, and, as arrivals are Poisson, what else comes meanwhile is independent of that
instant. So its latency is (1 - u)·τ(b) + τ(1 + m), with u uniform and m Poisson of mean λτ(b); a request that finds the
server idle takes τ(1). With the chain's stationary distribution this is the whole distribution of latency, without
chance [R]. Few batch sizes are told apart one by one; of many, some stand for their neighbours, a quarter of a
standard deviation apart, and where all are large both variables are as good as normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STATES_MAX = 256  # batch sizes, or further arrivals, that are told apart one by one
GRID = 97  # of normal variables
SIGMAS = 6.0  # what lies further out, one in 10⁹, has no say in a percentile
TAIL = 12.0  # batch sizes fall off no slower than e^(-2(1-λα)b): further out than this / (1-λα) is nothing
SPACING = 0.25  # between the sizes that stand for others, in standard deviations of what comes during a batch
ROUNDS = 30  # of bisection: to a billionth
SIGNIFICANT = 5  # digits of inputs and answers: the last bits of logarithms differ between machines
LOAD_MAX = 0.99  # of λα; closer to 1 waits are so long, and hang so much on λ and α, that it does not keep up
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
        """The time that a batch takes."""
        return self.per_request * size + self.fixed

    def keeps_up(self, rate: float) -> bool:
        """Whether waits stay finite, by some margin, at a rate of arrivals per second: λα ≤ `LOAD_MAX`, below 1."""
        return rate * self.per_request <= LOAD_MAX


def mean_seconds_max(batch: BatchTime, rate: float) -> float:
    """The upper bound min(φ₀, φ₁) of the mean latency (Inoue, arXiv 1912.06322); infinite where it does not keep up.

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
    """The mean latency where the server waits until a batch is full: (b - 1)/(2λ) + τ(b) [R].

    It leaves out the wait for the batch before, and so holds only while batches fill more slowly than they are served;
    infinite otherwise.
    """
    return _fixed_batch(batch, size, rate, 0.5)


def fixed_batch_worst_seconds(batch: BatchTime, size: int, rate: float) -> float:
    """The mean latency of the first request of each batch, which waits longest: (b - 1)/λ + τ(b) [R]."""
    return _fixed_batch(batch, size, rate, 1.0)


def _fixed_batch(batch: BatchTime, size: int, rate: float, share: float) -> float:
    _require_rate(rate)
    if size < 1:
        raise ValueError(f"a batch has one request or more, not {size}")
    return share * (size - 1) / rate + batch.seconds(size) if rate * batch.seconds(size) < size else math.inf


@dataclass(frozen=True)
class Latencies:
    """The distribution of the latency under one load."""

    busy: Floats  # shares of requests that come while a batch of such a size is served
    size_seconds: Floats  # that this batch takes
    further: Floats  # by size: shares for each count of others that come meanwhile
    answer_seconds: Floats  # by size and count: that the batch of the request itself takes
    idle: float  # share of requests that find the server idle
    idle_seconds: float
    mean_seconds: float

    def share_within(self, seconds: float) -> float:
        """The share of requests that are answered within a time."""
        left = (seconds - self.answer_seconds) / self.size_seconds[:, None]
        share = float(self.busy @ (self.further * np.clip(left, 0, 1)).sum(axis=1))
        return share + (self.idle if seconds >= self.idle_seconds else 0.0)

    def percentile_seconds(self, percent: float) -> float:
        """The time within which a percentage of requests is answered, up to rounding."""
        low, high = 0.0, float((self.answer_seconds + self.size_seconds[:, None]).max()) + self.idle_seconds
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            if self.share_within(middle) < percent / 100:
                low = middle
            else:
                high = middle
        return high


def latencies(batch: BatchTime, rate: float) -> Latencies:
    """Find the distribution of latency.

    Raises:
        ValueError: a rate that cannot be, or at which the server does not keep up.
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
    """Find batch sizes and how often each comes: the chain's stationary distribution."""
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
        moves[:, 0] += np.exp(-means)  # nobody came: the next batch is of whoever comes first
    moves /= moves.sum(axis=1, keepdims=True)
    return sizes, _stationary(moves if sizes is counts else _shared_out(moves, counts, sizes))


def _standing(high: int) -> Floats:
    """Sizes from 1 that stand for their neighbours: each a share of its root away from the next, and at least 1."""
    roots = np.arange(1.0, math.sqrt(high), SPACING / 2)
    return np.unique(np.append(np.floor(roots**2), float(high)))


def _shared_out(moves: Floats, counts: Floats, sizes: Floats) -> Floats:
    """Share each count out to the sizes around it, by its distance from either, so that the mean stays."""
    above = np.clip(np.searchsorted(sizes, counts), 1, len(sizes) - 1)
    share = (counts - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    begins = np.searchsorted(above, np.arange(1, len(sizes)))
    shared = np.zeros((len(moves), len(sizes)))
    shared[:, 1:] += np.add.reduceat(moves * share, begins, axis=1)
    shared[:, :-1] += np.add.reduceat(moves * (1 - share), begins, axis=1)
    return shared


def _stationary(moves: Floats) -> Floats:
    """How often a chain with these transition probabilities (from: down, to: across) is where.

    By the elimination of Grassmann, Taksar and Heyman (Operations Research 33, 1985): it subtracts nothing, so that no
    digit is lost, and needs no library whose threads or machine decide the last ones.
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
    """The probability of each count (across) for each mean (down)."""
    factorials = np.array([math.lgamma(count + 1) for count in counts])
    table: Floats = np.exp(counts * np.log(means)[:, None] - means[:, None] - factorials)
    return table


def _poisson(means: Floats) -> tuple[Floats, Floats]:
    """For each mean the counts that matter and their probabilities."""
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
class Answer:
    """Latency at one replica: the bound of the mean, the mean, and percentiles, in seconds."""

    mean_seconds_max: float
    mean_seconds: float
    percentiles_seconds: tuple[float, ...]


def answer(batch: BatchTime, rate: float, percents: tuple[float, ...]) -> Answer | None:
    """Say how long requests wait; None where the server does not keep up. Inputs are rounded, so that few differ.

    >>> answer(BatchTime(0.001, 0.01), 500.0, (95.0, 99.0)).percentiles_seconds
    (0.045432, 0.05168)
    """
    rounded = BatchTime(_rounded(batch.per_request), _rounded(batch.fixed))
    return _answer(rounded, _rounded(rate), percents) if rounded.keeps_up(_rounded(rate)) else None


@lru_cache(maxsize=CACHED)
def _answer(batch: BatchTime, rate: float, percents: tuple[float, ...]) -> Answer:
    found = latencies(batch, rate)
    percentiles = tuple([_rounded(found.percentile_seconds(percent)) for percent in percents])
    return Answer(_rounded(mean_seconds_max(batch, rate)), _rounded(found.mean_seconds), percentiles)


def replicas_needed(batch: BatchTime, rate: float, percent: float, target_seconds: float) -> int | None:
    """The fewest replicas, each taking its share of the requests at random, that keep a percentile within its target.

    None where `REPLICAS_MAX` do not: then no number does that matters, for even an idle server takes τ(1).
    """
    if target_seconds < batch.seconds(1):
        return None

    def keeps(replicas: int) -> bool:
        told = answer(batch, rate / replicas, (percent,))
        return told is not None and told.percentiles_seconds[0] <= target_seconds

    enough = max(1, math.floor(rate * batch.per_request))
    while not keeps(enough):
        if enough == REPLICAS_MAX:
            return None
        enough = min(2 * enough, REPLICAS_MAX)
    return _first(keeps, enough // 2, enough)


def _first(holds: Callable[[int], bool], fails: int, enough: int) -> int:
    """The first number after one that fails for which something holds that holds from there on."""
    while enough - fails > 1:
        middle = (fails + enough) // 2
        fails, enough = (fails, middle) if holds(middle) else (middle, enough)
    return enough


def _rounded(figure: float) -> float:
    return float(f"{figure:.{SIGNIFICANT}g}")
