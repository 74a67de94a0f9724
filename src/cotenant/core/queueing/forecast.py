"""When waiting jobs will probably start: a short simulation of what is to come, from how things stand now.

Jobs end after what they have left, as the predictor says; whenever one does, the very `place` of the scheduling cycle
is asked who starts. That is done once with the medians of all run times, which also tells whose ends a job waits for,
and then with a few drawn ones, which gives an interval.

What it takes for granted, so that it can be told at all: the order stays what it is now, nobody new comes, nobody is
stopped for others, no node fails or joins. A job may start later than foretold where others come that are put before
it, and sooner where jobs before it are cancelled.
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

from cotenant.core.gangs import Demand, Gang
from cotenant.core.jobs import WHOLE_GPU_MILLI, Locality
from cotenant.core.ledger import Holding, Ledger, Offer
from cotenant.core.placing.obstacles import fits
from cotenant.core.placing.shortness import shortage
from cotenant.core.policy import Discerns, PlacementPolicy, alike_by
from cotenant.core.predicting.rests import Rest, drawn, exactly
from cotenant.core.queueing.cycle import Start, place
from cotenant.core.queueing.floor import HOPELESS
from cotenant.core.refusals import Code, Refusal, policy_failed
from cotenant.core.tenancy import Headroom

WAITING_MAX = 1_000  # waiting jobs that are looked at, the first in the order
DRAWS = 20
HORIZON_SECONDS = 30 * 86_400.0
ENDS_MAX = 5  # jobs that are named, for whose end another one waits
TURN_SECONDS_MIN = 1e-3  # time goes on by that much at least, so that rounding cannot stop it


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
    lengths = drawn(rests, rng, draws)
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


class _Asked:
    """A placement policy that remembers its last answer: None where that was an offer."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self.name, self.api_version = policy.name, policy.api_version
        self.refusal: Refusal | None = None
        self._policy = policy
        self._discerns = policy if isinstance(policy, Discerns) else None
        self.alike = alike_by(policy)
        self.discerns = self._discerns is not None

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        self.refusal = Refusal(Code.POLICY_FAILED, "")  # should it fail
        answer = self._policy.place(gang, ledger, rng)
        self.refusal = answer if isinstance(answer, Refusal) else None
        return answer

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
        self._numbers_of = {gang.job_id: number for number, gang in self._waiting.items()}
        self._kind_numbers: dict[Hashable, int] = {}  # numbers are compared more quickly than what gangs are alike in
        self._kinds = {number: self._kind_of(gang) for number, gang in self._waiting.items()}
        self._refused: dict[int, Code] = {}
        self._like: dict[int, Gang] = {}  # one of each kind
        self._relaxing: dict[int, bool] = {}
        self._possible: dict[int, bool] = {}  # whether a kind fits into the empty cluster, by counting
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
            self._hope({holding.node for holding in holder.holdings})

    def _age(self, seconds: float) -> None:
        """Let gangs wait for longer, of which that may make another question."""
        for number in self._ages:
            gang = self._waiting[number]
            aged = replace(gang, fragmented_seconds=gang.fragmented_seconds + seconds)
            self._waiting[number], self._kinds[number] = aged, self._kind_of(aged)

    def _kind_of(self, gang: Gang) -> int:
        return self._kind_numbers.setdefault(self._asked.alike(gang), len(self._kind_numbers))

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
        for start in plan.starts:
            self._start(start)
            del self._waiting[self._numbers_of[start.gang.job_id]]
        if self._asked.discerns:
            self._note_ages()

    def _note_ages(self) -> None:
        """Note whose places are in fragments, and when that will first be another question."""
        in_fragments = {kind for kind, code in self._refused.items() if code is Code.FRAGMENTED}
        self._ages = {number for number in self._waiting if self._kinds[number] in in_fragments}
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

    def _hope(self, nodes: Collection[int]) -> None:
        """Let those be asked about again for whom a place on some nodes would make a difference."""
        self._refused = {
            kind: code
            for kind, code in self._refused.items()
            if code in HOPELESS or not (self._relaxes(kind) or self._helps(self._like[kind], nodes))
        }

    def _relaxes(self, kind: int) -> bool:
        """Tell whether gangs of a kind will be of another one once their places have been in fragments for longer."""
        if kind not in self._relaxing:
            self._relaxing[kind] = self._asked.alike_seconds(self._like[kind]) < math.inf
        return self._relaxing[kind]

    def _helps(self, gang: Gang, nodes: Collection[int]) -> bool:
        return any(_has_room(self._ledger, node, part.demand) for node in nodes for part in gang.parts)

    def _candidates(self) -> Iterator[Gang]:
        """Give those who may start, one by one; whoever asks for the next one has placed the last one, or refused it.

        A strict queue is asked up to the first that does not fit. Those are left out of whose kind one was refused,
        and those for whom there is no room by counting alone.
        """
        strict, free, limits = self._picture.strict, self._free(), bool(self._headroom)
        for number, gang in self._waiting.items():
            kind = self._kinds[number]
            if limits and not self._headroom.allows(gang.tenant, gang.gpu_milli, gang.cores):
                continue
            if kind not in self._refused:
                self._like[kind] = gang
                counted = self._counted(kind, gang, free)
                if counted is None:
                    yield self._gang(number)
                    counted = self._asked.refusal.code if self._asked.refusal else None
                    free = self._free()
                if counted is None:
                    continue
                self._refused[kind] = counted
            if strict and self._refused[kind] is not Code.NEVER_FITS:
                return

    def _counted(self, kind: int, gang: Gang, free: tuple[int, int, int]) -> Code | None:
        """Say why a gang is refused whatever the policy, as far as counting tells; None: the policy is to be asked."""
        if _lacks(gang, free) and not self._picture.strict:
            return Code.CAPACITY
        within = gang.locality or Locality.ANYWHERE
        if kind not in self._possible:
            self._possible[kind] = fits(gang, self._ledger, within=within, empty=True)
        if not self._possible[kind] or fits(gang, self._ledger, within=within):
            return None
        return Code.FRAGMENTED if self._relaxes(kind) and not shortage(gang, self._ledger) else Code.CAPACITY

    def _free(self) -> tuple[int, int, int]:
        return self._ledger.sums(self._ledger.open)


def _has_room(ledger: Ledger, node: int, demand: Demand) -> bool:
    """Tell whether a node has room for one replica, whatever the type of its GPUs."""
    if demand.cores > ledger.free_cores[node] or demand.memory_bytes > ledger.free_memory[node]:
        return False
    if demand.gpu_milli % WHOLE_GPU_MILLI:
        return any(free >= demand.gpu_milli for free in ledger.parts_of(node))
    return bool(demand.gpu_milli <= ledger.free_gpus[node] * WHOLE_GPU_MILLI)


def _lacks(gang: Gang, free: tuple[int, int, int]) -> bool:
    return gang.gpu_milli > free[0] or gang.cores > free[1] or gang.memory_bytes > free[2]


def held(holdings: Iterable[Holding]) -> tuple[int, int]:
    """Sum up GPUs, in thousandths, and cores."""
    milli = sum(holding.gpus * WHOLE_GPU_MILLI + sum(part for _, part in holding.shares) for holding in holdings)
    return milli, sum(holding.cores for holding in holdings)
