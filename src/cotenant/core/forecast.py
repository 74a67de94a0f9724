"""When waiting jobs will probably start: a short simulation of what is to come, from how things stand now.

Jobs end after what they have left, as the predictor says; whenever one does, the very `place` of the scheduling cycle
is asked who starts. That is done once with the medians of all run times, which also tells whose ends a job waits for,
and then with a few drawn ones, which gives an interval.

What it takes for granted, so that it can be told at all: the order stays what it is now, nobody new comes, nobody is
stopped for others, no node fails or joins. A job may start later than foretold where others come that are put before
it, and sooner where jobs before it are cancelled.

Of a job of which nothing is known, as much again is expected as it ran (ADR 0010). With that the chance that it runs
on for more than x after it ran for a is a / (a + x), the heavy tail of which that median is one point: so nine times
out of ten it is more than a ninth of a, and once in ten more than nine times a [R].
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from cotenant.core.cycle import Start, place
from cotenant.core.estimates import Estimate
from cotenant.core.gangs import Gang
from cotenant.core.jobs import WHOLE_GPU_MILLI
from cotenant.core.ledger import Holding, Ledger, Offer
from cotenant.core.policy import Discerns, PlacementPolicy, needs
from cotenant.core.refusals import Code, Refusal, policy_failed
from cotenant.core.tenancy import Headroom

WAITING_MAX = 1_000  # waiting jobs that are looked at, the first in the order
DRAWS = 20
HORIZON_SECONDS = 30 * 86_400.0
RUN_SECONDS_UNKNOWN = 3600.0  # of a job of which nothing is known, nor of any other
ENDS_MAX = 5  # jobs that are named, for whose end another one waits
UNKNOWN_SPREAD = (
    9.0  # of one that is expected to run for as much again, from the median to the 10th and 90th percentile
)
TURN_SECONDS_MIN = 1e-3  # time goes on by that much at least, so that rounding cannot stop it

_SHARES = np.array([0.0, 0.1, 0.5, 0.9, 1.0])


@dataclass(frozen=True, slots=True)
class Rest:
    """How long a job will run yet, in seconds: the median, and between which times it lies in 8 of 10 cases."""

    seconds: float
    p10_seconds: float
    p90_seconds: float

    @property
    def certain(self) -> bool:
        """Whether there is nothing to draw."""
        return self.p10_seconds == self.seconds == self.p90_seconds


def exactly(seconds: float) -> Rest:
    """A rest that is known, or taken to be."""
    return Rest(seconds, seconds, seconds)


def rest_of(
    estimate: Estimate,
    ran_seconds: float,
    *,
    expected_seconds: float | None = None,
    usual_seconds: float = RUN_SECONDS_UNKNOWN,
) -> Rest:
    """Say how long a job will run yet that has run for so long in all.

    What the predictor says comes first, then the run time that its user expects; who outlived that is unknown. Of an
    unknown job as much again is expected as it ran, of one that has not run what is usual among the others.

    >>> rest_of(Estimate(), ran_seconds=90)
    Rest(seconds=90, p10_seconds=10.0, p90_seconds=810.0)
    >>> rest_of(Estimate(), ran_seconds=90, expected_seconds=100).seconds
    10
    """
    if estimate.predictable and estimate.remaining_seconds:
        middle = estimate.remaining_seconds
        low, high = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
        return Rest(middle, middle if low is None else min(low, middle), middle if high is None else max(high, middle))
    if expected_seconds is not None and expected_seconds > ran_seconds:
        return exactly(expected_seconds - ran_seconds)
    middle = ran_seconds or usual_seconds
    return Rest(middle, middle / UNKNOWN_SPREAD, middle * UNKNOWN_SPREAD)


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds something now, and for how long yet."""

    job_id: str
    holdings: tuple[Holding, ...]
    rest: Rest
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job that waits, and how long it will run."""

    gang: Gang
    run: Rest


@dataclass(frozen=True, slots=True)
class Picture:
    """How things stand: what the holders have is taken on the ledger; waiters are in the order of the queue."""

    ledger: Ledger
    holders: Sequence[Holder]
    waiters: Sequence[Waiter]
    strict: bool = False
    headroom: Headroom = field(default_factory=lambda: Headroom(()))


@dataclass(frozen=True, slots=True)
class Expected:
    """When a job will start, in seconds from now: the median, and between which times in 8 of 10 cases.

    Infinity: not as far as was looked. `ends` are jobs whose end frees the places that it gets, the last to end first,
    and before them those by whose end its turn comes, in a strict queue or within its tenant's limit; at most
    `ENDS_MAX` of `ends_count`. `finish_seconds` is when it will have finished, where all goes as the medians say.
    """

    seconds: float
    p10_seconds: float
    p90_seconds: float
    ends: tuple[str, ...] = ()
    ends_count: int = 0
    finish_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of the wanted jobs, by id. `reached_seconds`: as far as was looked, from now on.

    `draws` counts how often the future was played through, the time with the medians included.
    """

    expected: Mapping[str, Expected]
    reached_seconds: float
    draws: int


def forecast(
    picture: Picture,
    policy: PlacementPolicy,
    rng: np.random.Generator,
    wanted: Collection[str] | None = None,
    *,
    draws: int = DRAWS,
    horizon_seconds: float = HORIZON_SECONDS,
    spent: Callable[[], bool] = lambda: False,
) -> Forecast:
    """Play the future through, and say when the wanted jobs start (None: all); the ledger is left as it was.

    `draws` run times are drawn beside the medians, fewer where all are certain. Once the time for it is `spent` there
    are no more; a job that the time did not suffice for starts at infinity, and surely not before `reached_seconds`.
    """
    asked = frozenset(waiter.gang.job_id for waiter in picture.waiters)
    asked = asked if wanted is None else asked & frozenset(wanted)
    rests = [holder.rest for holder in picture.holders] + [waiter.run for waiter in picture.waiters]
    lengths = _drawn(rests, rng, draws)
    runs: list[_Run] = []
    for row in lengths:
        run = _Run(picture, policy, rng, row, asked)
        whole = run.play(horizon_seconds, spent)
        if runs and not whole:
            break
        runs.append(run)
        if not whole:
            break
    first = runs[0]
    return Forecast({job_id: _expected(job_id, runs) for job_id in asked}, first.now, len(runs))


def _expected(job_id: str, runs: Sequence[_Run]) -> Expected:
    first = runs[0]
    at = np.sort([run.starts.get(job_id, math.inf) for run in runs])
    low, middle, high = (float(at[round(share * (len(at) - 1))]) for share in (0.1, 0.5, 0.9))
    if job_id not in first.starts:
        return Expected(middle, low, high)
    ends = first.freed_for[job_id]
    return Expected(middle, low, high, ends[:ENDS_MAX], len(ends), first.finishes[job_id])


def _drawn(rests: Sequence[Rest], rng: np.random.Generator, draws: int) -> NDArray[np.float64]:
    """Draw run times, a row each time; the first row are the medians, and alone where nothing is uncertain.

    Logarithms are linear between the quantiles, and end as far beyond them as they are from the median.
    """
    told = np.array([(rest.p10_seconds, rest.seconds, rest.p90_seconds) for rest in rests]).reshape(-1, 3)
    medians = told[:, 1]
    if all(rest.certain for rest in rests):
        return medians[None, :]
    low, middle, high = np.log1p(told.T)
    knots = np.column_stack([np.maximum(0.0, 2 * low - middle), low, middle, high, 2 * high - middle])
    at = rng.random((draws, len(rests)))
    place = np.clip(np.searchsorted(_SHARES, at, side="right") - 1, 0, len(_SHARES) - 2)
    rows = np.arange(len(rests))
    below, above = knots[rows, place], knots[rows, place + 1]
    along = (at - _SHARES[place]) / (_SHARES[place + 1] - _SHARES[place])
    return np.vstack([medians, np.expm1(below + along * (above - below))])


class _Asked:
    """A placement policy that remembers its last answer: None where that was an offer."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self.name, self.api_version = policy.name, policy.api_version
        self.refusal: Refusal | None = None
        self._policy = policy
        self._discerns = policy if isinstance(policy, Discerns) else None
        self.discerns = self._discerns is not None

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        self.refusal = Refusal(Code.POLICY_FAILED, "")  # should it fail
        answer = self._policy.place(gang, ledger, rng)
        self.refusal = answer if isinstance(answer, Refusal) else None
        return answer

    def alike(self, gang: Gang) -> Hashable:
        return self._discerns.alike(gang) if self._discerns else needs(gang)

    def alike_seconds(self, gang: Gang) -> float:
        return self._discerns.alike_seconds(gang) if self._discerns else math.inf


class _Run:
    """One future. What was refused stays so until something is freed, or until the time makes it another question."""

    def __init__(
        self,
        picture: Picture,
        policy: PlacementPolicy,
        rng: np.random.Generator,
        lengths: NDArray[np.float64],
        wanted: Collection[str],
    ) -> None:
        self.now = 0.0
        self.starts: dict[str, float] = {}
        self.finishes: dict[str, float] = {}
        self.freed_for: dict[str, tuple[str, ...]] = {}
        self._picture, self._rng, self._asked = picture, rng, _Asked(policy)
        self._ledger, self._headroom = picture.ledger, picture.headroom.copy()
        self._lacking = set(wanted)
        self._run_seconds = dict(
            zip([waiter.gang.job_id for waiter in picture.waiters], lengths[len(picture.holders) :], strict=True)
        )
        self._ends: list[tuple[float, int, Holder]] = []
        self._numbers = count()  # so that of two that end together the one that began first comes first
        for holder, seconds in zip(picture.holders, lengths, strict=False):
            self._expect(holder, float(seconds))
        self._waiting = {number: waiter.gang for number, waiter in enumerate(picture.waiters)}
        self._kinds = {number: self._asked.alike(gang) for number, gang in self._waiting.items()}
        self._refused: dict[Hashable, Code] = {}
        self._ages: set[int] = set()  # gangs that wait longer and longer for a place that is not in fragments
        self._turn = math.inf  # when the first of them will be another question for that
        self._freed: deque[tuple[float, Holder]] = deque()  # with when they ended, the last first

    def play(self, horizon_seconds: float, spent: Callable[[], bool]) -> bool:
        """Go on until all wanted jobs have started, or nothing happens any more; False where the time is spent."""
        with self._ledger.undone():
            self._end_due()
            while True:
                self._start_all()
                then = min(self._ends[0][0] if self._ends else math.inf, self._turn)
                if not self._lacking or math.isinf(then):
                    return True
                if spent():
                    return False
                if then > horizon_seconds:
                    self.now = horizon_seconds
                    return True
                self._age(then - self.now)
                self.now = then
                self._end_due()

    def _expect(self, holder: Holder, end: float) -> None:
        heapq.heappush(self._ends, (end, next(self._numbers), holder))

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= self.now:
            end, _, holder = heapq.heappop(self._ends)
            for holding in holder.holdings:
                self._ledger.release(holding)
            milli, cores = held(holder.holdings)
            self._headroom.take(holder.tenant, -milli, -cores)
            self._freed.appendleft((end, holder))
            self._refused.clear()

    def _age(self, seconds: float) -> None:
        """Let gangs wait for longer, of which that may make another question."""
        for number in self._ages:
            gang = self._waiting[number]
            aged = replace(gang, fragmented_seconds=gang.fragmented_seconds + seconds)
            self._waiting[number], self._kinds[number] = aged, self._asked.alike(aged)

    def _gang(self, number: int) -> Gang:
        gang = self._waiting[number]
        return replace(gang, waited_seconds=gang.waited_seconds + self.now) if self.now else gang

    def _start_all(self) -> None:
        plan = place(
            self._candidates(),
            self._ledger,
            self._asked,
            self._rng,
            strict=self._picture.strict,
            headroom=self._headroom,
            on_broken=lambda gang, error: policy_failed(self._asked.name, error),
        )
        started = {start.gang.job_id for start in plan.starts}
        for start in plan.starts:
            self._start(start)
        if started:
            self._waiting = {number: gang for number, gang in self._waiting.items() if gang.job_id not in started}
        if self._asked.discerns:
            self._note_ages()

    def _note_ages(self) -> None:
        """Note whose places are in fragments, and when that will first be another question."""
        free = self._free()
        in_fragments = {kind for kind, code in self._refused.items() if code is Code.FRAGMENTED}
        self._ages = {
            number
            for number, gang in self._waiting.items()
            if self._kinds[number] in in_fragments and not _lacks(gang, free)
        }
        left = min((self._asked.alike_seconds(self._waiting[number]) for number in self._ages), default=math.inf)
        self._turn = self.now + max(left, TURN_SECONDS_MIN)

    def _start(self, start: Start) -> None:
        gang = start.gang
        for holding in start.holdings:
            self._ledger.hold(holding)
        self.starts[gang.job_id] = self.now
        self.finishes[gang.job_id] = self.now + float(self._run_seconds[gang.job_id])
        self._expect(Holder(gang.job_id, start.holdings, exactly(0.0), gang.tenant), self.finishes[gang.job_id])
        if gang.job_id in self._lacking:
            self._lacking.discard(gang.job_id)
            self.freed_for[gang.job_id] = tuple(self._freed_for({holding.node for holding in start.holdings}))

    def _freed_for(self, nodes: Collection[int]) -> list[str]:
        """Name those who were where a gang starts now; where none of them ended just now, all who did come first."""
        there = [(end, one.job_id) for end, one in self._freed if any(held.node in nodes for held in one.holdings)]
        if there and there[0][0] == self.now:
            return [job_id for _, job_id in there]
        known = {job_id for _, job_id in there}
        now = [one.job_id for end, one in self._freed if end == self.now and one.job_id not in known]
        return now + [job_id for _, job_id in there]

    def _candidates(self) -> Iterator[Gang]:
        """Give those who may start, one by one; whoever asks for the next one has placed the last one, or refused it.

        A strict queue is asked up to the first that does not fit. Else those are left out of whose kind one was
        refused, and those that need more than is free in sum.
        """
        strict, free = self._picture.strict, self._free()
        for number in self._waiting:
            if self._kinds[number] in self._refused and not strict:
                continue
            gang = self._waiting[number]
            if self._headroom and not self._headroom.allows(gang.tenant, gang.gpu_milli, gang.cores):
                continue
            if not strict and _lacks(gang, free):
                continue
            yield self._gang(number)
            if self._asked.refusal is None:
                free = self._free()
                continue
            self._refused[self._kinds[number]] = self._asked.refusal.code
            if strict and self._asked.refusal.code is not Code.NEVER_FITS:
                return

    def _free(self) -> tuple[int, int, int]:
        return self._ledger.sums(self._ledger.open)


def _lacks(gang: Gang, free: tuple[int, int, int]) -> bool:
    return gang.gpu_milli > free[0] or gang.cores > free[1] or gang.memory_bytes > free[2]


def held(holdings: Iterable[Holding]) -> tuple[int, int]:
    """Sum up GPUs, in thousandths, and cores."""
    milli = sum(holding.gpus * WHOLE_GPU_MILLI + sum(part for _, part in holding.shares) for holding in holdings)
    return milli, sum(holding.cores for holding in holdings)
