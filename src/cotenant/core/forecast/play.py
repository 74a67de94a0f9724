"""One forecast run: jobs end, and after each end the cycle's own `place` decides which jobs start."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.forecast.array_limits import ArrayLimits
from cotenant.core.forecast.forecast_state import ForecastState, QueueSnapshot, RunningEntry
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI, Locality
from cotenant.core.model.refusal import Code, Refusal, policy_failed
from cotenant.core.model.resources import Resources
from cotenant.core.placement import constraints
from cotenant.core.placement.capacity_shortage import shortage
from cotenant.core.placement.gang_allocation import Victim
from cotenant.core.placement.unschedulable import fits
from cotenant.core.policy.cluster_view import Rearranges, Reclaims, RunningJob, UsesClusterView
from cotenant.core.policy.protocols import DefinesEquivalence, PlacementPolicy, equivalence_key_by
from cotenant.core.prediction.remaining_time import certain_time
from cotenant.core.scheduling.cycle import Plan, Start, place
from cotenant.core.scheduling.equivalence import ClassRefusals, room_on
from cotenant.core.scheduling.reservations import starving_first

_TOO_LITTLE = Refusal(Code.CAPACITY, "too little is free")
_IN_FRAGMENTS = Refusal(Code.FRAGMENTED, "free resources are fragmented")
STEP_SECONDS_MIN = 1e-3  # time advances by at least this much, so that rounding cannot stop it


class _RecordingPolicy:
    """A placement policy that remembers its last refusal; None if the last answer was an offer."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self.name, self.api_version = policy.name, policy.api_version
        self.refusal: Refusal | None = None
        self._policy = policy
        self._discerns = policy if isinstance(policy, DefinesEquivalence) else None
        self.equivalence_key = equivalence_key_by(policy)
        self.discerns = self._discerns is not None

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        self.refusal = Refusal(Code.POLICY_FAILED, "")  # in case it raises
        answer = constraints.place(self._policy, gang, ledger, rng)
        self.refusal = answer if isinstance(answer, Refusal) else None
        return answer

    def equivalence_seconds(self, gang: Gang) -> float:
        return self._discerns.equivalence_seconds(gang) if self._discerns else math.inf


class ForecastRun:
    """One forecast run. A refusal stands until something is freed, or until time changes the equivalence key."""

    def __init__(
        self,
        snapshot: QueueSnapshot,
        policy: PlacementPolicy,
        rng: np.random.Generator,
        lengths: NDArray[np.float64],
        wanted: Collection[str],
    ) -> None:
        self.now = 0.0
        self.starts: dict[str, float] = {}
        self.finishes: dict[str, float] = {}
        self.freed_for: dict[str, tuple[str, ...]] = {}
        self.of_unknown: set[str] = set()  # jobs whose start depends only on ends of jobs of unknown length
        self._ends_known = {holder.job_id: holder.rest.known for holder in snapshot.holders}
        self._ends_known |= {waiter.gang.job_id: waiter.run.known for waiter in snapshot.waiters}
        self._ends_on: dict[int, tuple[float, bool]] = {}  # by node: the last end, and whether one of them was known
        self._last_end = -math.inf, False  # the same on any node, of the ends at that moment
        self._snapshot, self._rng, self._asked, self._policy = snapshot, rng, _RecordingPolicy(policy), policy
        self._ledger, self._headroom = snapshot.ledger, snapshot.headroom.copy()
        self._lacking = set(wanted)
        self._run_seconds = dict(
            zip([waiter.gang.job_id for waiter in snapshot.waiters], lengths[len(snapshot.holders) :], strict=True)
        )
        self._ends: list[tuple[float, int, str]] = []
        self._end_of: dict[str, tuple[float, int]] = {}  # of jobs that hold resources, as predicted last
        self._state = ForecastState(snapshot.now)
        self._numbers = count()  # of two jobs that end together, the one that started first comes first
        self._arrays = ArrayLimits(snapshot.holders, snapshot.waiters)
        for holder, seconds in zip(snapshot.holders, lengths, strict=False):
            self._arrays.take(holder.job_id, +1)
            self._state.enter(holder)
            self._expect(holder.job_id, float(seconds))
        self._waiting = {number: waiter.gang for number, waiter in enumerate(snapshot.waiters)}
        self._rank = {number: float(number) for number in self._waiting}  # by place in the queue's order
        self._numbers_of = {gang.job_id: number for number, gang in self._waiting.items()}
        self._kind_numbers: dict[Hashable, int] = {}  # integers compare faster than equivalence keys
        self._kinds = {number: self._kind_of(gang) for number, gang in self._waiting.items()}
        self._refused = ClassRefusals[int]()  # aging gangs change their class, so all refusals are uniform
        self._representative: dict[int, Gang] = {}  # one gang of each equivalence class
        self._relaxing: dict[int, bool] = {}
        self._possible: dict[int, bool] = {}  # whether a class fits into the empty cluster, by counting
        self._ages: set[int] = set()  # gangs that wait because free resources are fragmented
        self._key_change = math.inf  # when the first of their equivalence keys changes
        looks = any(isinstance(policy, protocol) for protocol in (UsesClusterView, Rearranges, Reclaims))
        self._in_full_from = 0.0 if looks or snapshot.stoppable else self._starves_in()
        self._freed: deque[tuple[float, RunningEntry]] = deque()  # with the time they ended, the last first

    def play(self, horizon_seconds: float, spent: Callable[[], bool]) -> bool:
        """Advance until all wanted jobs have started, or nothing more happens; False if the time is spent."""
        with self._ledger.rolled_back():
            self._end_due()
            while True:
                self._start_all()
                then = min(self._ends[0][0] if self._ends else math.inf, self._key_change)
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

    def _starves_in(self) -> float:
        """Return when the first gang will have waited long enough for a reservation."""
        rule = self._snapshot.reserving
        if not rule:
            return math.inf
        waited = max((gang.waited_seconds for gang in self._waiting.values()), default=-math.inf)
        return max(0.0, rule.after_seconds - waited)

    def _expect(self, job_id: str, end: float) -> None:
        self._end_of[job_id] = end, (number := next(self._numbers))
        heapq.heappush(self._ends, (end, number, job_id))

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= self.now:
            end, number, job_id = heapq.heappop(self._ends)
            if self._end_of.get(job_id) != (end, number):
                continue  # it was stopped or moved
            holder = self._release(job_id)
            milli, cores = held(holder.holdings)
            self._headroom.take(holder.tenant, -milli, -cores)
            self._freed.appendleft((end, holder))
            nodes = {holding.node for holding in holder.holdings}
            self._note_known(nodes, end, self._ends_known[job_id])
            self._invalidate_refusals(nodes)

    def _note_known(self, nodes: Collection[int], end: float, known: bool) -> None:
        for node in nodes:
            self._ends_on[node] = end, known or (node in self._ends_on and self._ends_on[node][1])
        before, others = self._last_end
        self._last_end = end, known or (end == before and others)

    def _of_unknown(self, nodes: Collection[int]) -> bool:
        """Return whether all the jobs that `_freed_for` returns for these nodes have unknown ends, and some are."""
        there = [self._ends_on[node] for node in nodes if node in self._ends_on]
        if self._last_end[0] == self.now and all(end < self.now for end, _ in there):
            there.append(self._last_end)
        return bool(there) and not any(known for _, known in there)

    def _release(self, job_id: str) -> RunningEntry:
        del self._end_of[job_id]
        self._arrays.take(job_id, -1)
        holder, _ = self._state.leave(job_id)
        for holding in holder.holdings:
            self._ledger.release(holding)
        return holder

    def _age(self, seconds: float) -> None:
        """Let gangs wait longer, for which that may change the equivalence key."""
        for number in self._ages:
            gang = self._waiting[number]
            aged = replace(gang, fragmented_seconds=gang.fragmented_seconds + seconds)
            self._waiting[number], self._kinds[number] = aged, self._kind_of(aged)

    def _kind_of(self, gang: Gang) -> int:
        return self._kind_numbers.setdefault(self._asked.equivalence_key(gang), len(self._kind_numbers))

    def _gang(self, number: int) -> Gang:
        gang = self._waiting[number]
        return replace(gang, waited_seconds=gang.waited_seconds + self.now) if self.now else gang

    def _start_all(self) -> None:
        self._state.advance_to(self.now)
        if self.now >= self._in_full_from:
            self._start_in_full()
            return
        plan = place(
            self._candidates(),
            self._ledger,
            self._asked,
            self._rng,
            strict=self._snapshot.strict,
            headroom=self._headroom,
            on_broken=lambda gang, error: policy_failed(self._asked.name, error),
        )
        for start in plan.starts:
            self._start(start)
        if self._asked.discerns:
            self._note_ages()

    def _start_in_full(self, *, stopping: bool = True) -> None:
        """Do what a cycle does: with reservations, with a view for policies that need one, with stops and moves.

        All jobs that could start are tried, because equivalent gangs may get different answers.
        """
        rule, stoppable = self._snapshot.reserving, self._stoppable() if stopping else {}
        free, tries = self._free(), rule.tries
        asked: list[int] = []
        asked_of: Counter[str] = Counter()
        for number in self._in_order():
            if self._arrays:
                array = self._arrays.array(self._waiting[number].job_id)
                if array and self._arrays.full(self._waiting[number].job_id, asked_of[array]):
                    continue
                asked_of[array] += 1
            if not (stoppable or self._snapshot.strict) and not self._waiting[number].needs.fits(free):
                if not tries or not rule or not rule.starves(self._gang(number)):
                    continue
                tries -= 1
            asked.append(number)
        plan = place(
            [self._gang(number) for number in asked],
            self._ledger,
            self._policy,
            self._rng,
            victims=list(self._victims(stoppable, asked)),
            strict=self._snapshot.strict,
            headroom=self._headroom,
            cluster_view=self._state,
            reserving=rule,
            on_broken=lambda gang, error: policy_failed(self._policy.name, error),
        )
        self._carry_out(plan)
        if plan.stops or plan.moves or plan.reclaimed:
            self._start_in_full(stopping=False)  # there may be room left
            return
        apart = {job_id for job_id, refusal in plan.refusals.items() if refusal.code is Code.FRAGMENTED}
        self._ages = {self._numbers_of[job_id] for job_id in apart}
        self._key_change = self.now + max(min(plan.valid_seconds, plan.keeps_seconds), STEP_SECONDS_MIN)

    def _in_order(self) -> list[int]:
        """Return the waiting jobs in the queue's order, with long-waiting gangs ahead of their equals."""
        numbers = sorted(self._waiting, key=lambda number: (self._rank[number], number))
        rule = self._snapshot.reserving
        if not rule or self._snapshot.strict or not numbers:
            return numbers
        gangs = [self._waiting[number] for number in numbers]
        several = np.array([sum(part.replicas for part in gang.parts) > 1 for gang in gangs])
        several |= np.array([gang.gpu_milli > WHOLE_GPU_MILLI for gang in gangs])
        since = -np.array([gang.waited_seconds for gang in gangs])
        priorities = np.array([gang.spec.priority if gang.spec else 0 for gang in gangs])
        order = starving_first(since, self.now, several, np.array(numbers), np.diff(priorities) != 0, rule)
        return [numbers[place] for place in order.tolist()]

    def _stoppable(self) -> dict[str, int]:
        """Return the jobs that may be stopped and still run, with how many of the initial waiters come before each."""
        return {job_id: before for job_id, before in self._snapshot.stoppable.items() if job_id in self._end_of}

    def _victims(self, stoppable: Mapping[str, int], asked: Sequence[int]) -> Iterator[Victim]:
        for job_id, before in stoppable.items():
            if holder := self._state.get(job_id):
                ahead = sum(self._rank[number] < before for number in asked)
                yield Victim(job_id, holder.holdings, ahead, holder.tenant)

    def _carry_out(self, plan: Plan) -> None:
        """Apply a plan: stop the jobs that make room, start those that got it, and move the others."""
        for job_id in (*plan.stops, *plan.reclaimed):
            self._stop(job_id)
        moved = [(move, self._end_of[move.gang.job_id][0], self._release(move.gang.job_id)) for move in plan.moves]
        for start in plan.starts:
            self._start(start)
        for move, end, holder in moved:
            self._arrays.take(holder.job_id, +1)
            for holding in move.holdings:
                self._ledger.hold(holding)
            self._state.enter(replace(holder, holdings=move.holdings))
            self._expect(holder.job_id, end + _stop_cost_seconds(holder))

    def _stop(self, job_id: str) -> None:
        """Return a stopped job to the queue, behind all that come before it."""
        left = self._end_of[job_id][0] - self.now
        holder = self._release(job_id)
        gang = holder.running_job.gang if holder.running_job else Gang(job_id, ())
        number = len(self._rank)
        self._rank[number] = self._snapshot.stoppable.get(job_id, len(self._snapshot.waiters)) - 0.5
        self._waiting[number] = replace(gang, waited_seconds=-self.now, fragmented_seconds=0.0)
        self._numbers_of[job_id], self._kinds[number] = number, self._kind_of(self._waiting[number])
        self._run_seconds[job_id] = left + _stop_cost_seconds(holder)

    def _note_ages(self) -> None:
        """Record which gangs wait because of fragmentation, and when the first of their equivalence keys changes."""
        in_fragments = {kind for kind, one in self._refused.uniform.items() if one.code is Code.FRAGMENTED}
        self._ages = {number for number in self._waiting if self._kinds[number] in in_fragments}
        left = min((self._asked.equivalence_seconds(self._waiting[number]) for number in self._ages), default=math.inf)
        self._key_change = self.now + max(left, STEP_SECONDS_MIN)

    def _start(self, start: Start) -> None:
        gang = start.gang
        for holding in start.holdings:
            self._ledger.hold(holding)
        self._arrays.take(gang.job_id, +1)
        nodes = {holding.node for holding in start.holdings}
        if self._of_unknown(nodes):
            self._ends_known[gang.job_id] = False
            if gang.job_id not in self.starts:
                self.of_unknown.add(gang.job_id)
        self.starts.setdefault(gang.job_id, self.now)
        self.finishes[gang.job_id] = self.now + float(self._run_seconds[gang.job_id])
        running_job = RunningJob(gang, start.holdings, self._state.now)
        self._state.enter(RunningEntry(gang.job_id, start.holdings, certain_time(0.0), gang.tenant, running_job))
        self._expect(gang.job_id, self.finishes[gang.job_id])
        del self._waiting[self._numbers_of[gang.job_id]]
        if gang.job_id in self._lacking:
            self._lacking.discard(gang.job_id)
            self.freed_for[gang.job_id] = tuple(self._freed_for(nodes))

    def finish_seconds(self, job_id: str) -> float:
        """Return when a job that started will have finished; infinity if that is unknown."""
        return self.finishes[job_id] if self._ends_known[job_id] else math.inf

    def _freed_for(self, nodes: Collection[int]) -> list[str]:
        """Return the jobs that ran where a gang starts now; if none of them ended just now, all that did come first."""
        there = [(end, one.job_id) for end, one in self._freed if any(held.node in nodes for held in one.holdings)]
        if there and there[0][0] == self.now:
            return [job_id for _, job_id in there]
        known = {job_id for _, job_id in there}
        now = [one.job_id for end, one in self._freed if end == self.now and one.job_id not in known]
        return now + [job_id for _, job_id in there]

    def _invalidate_refusals(self, nodes: Collection[int]) -> None:
        """Forget the refusals of gangs for which room on some nodes could make a difference."""
        self._refused.forget_helped(
            lambda kind: self._relaxes(kind) or room_on(nodes, self._representative[kind], self._ledger)
        )

    def _relaxes(self, kind: int) -> bool:
        """Return whether the key of an equivalence class changes once resources have been fragmented for longer."""
        if kind not in self._relaxing:
            self._relaxing[kind] = self._asked.equivalence_seconds(self._representative[kind]) < math.inf
        return self._relaxing[kind]

    def _candidates(self) -> Iterator[Gang]:
        """Yield the jobs that may start; when the next one is requested, the last one has been placed or refused.

        A strict queue is tried up to the first job that does not fit. Equivalents of refused jobs are left out, as are
        jobs for which there is no room by counting alone.
        """
        strict, free, limits = self._snapshot.strict, self._free(), bool(self._headroom)
        started_of, refused = Counter[str](), self._refused.uniform  # started: by array with a limit
        for number, gang in self._waiting.items():
            kind = self._kinds[number]
            array = self._arrays.array(gang.job_id) if self._arrays else ""
            if array and self._arrays.full(gang.job_id, started_of[array]):
                continue
            if limits and not self._headroom.allows(gang.tenant, gang.gpu_milli, gang.cores):
                continue
            if kind not in refused:
                self._representative[kind] = gang
                counted = self._counted(kind, gang, free)
                if counted is None:
                    self._asked.refusal = None
                    yield self._gang(number)
                    counted = self._asked.refusal
                    free = self._free()
                if counted is None:
                    started_of[array] += 1
                    continue
                self._refused.add_uniform(kind, counted)
            if strict and refused[kind].code is not Code.NEVER_FITS:
                return

    def _counted(self, kind: int, gang: Gang, free: Resources) -> Refusal | None:
        """Return the refusal of a gang under any policy, by counting; None: the policy must be asked."""
        if not gang.needs.fits(free) and not self._snapshot.strict:
            return _TOO_LITTLE
        within = gang.locality or Locality.ANYWHERE
        if kind not in self._possible:
            self._possible[kind] = fits(gang, self._ledger, within=within, empty=True)
        if not self._possible[kind] or fits(gang, self._ledger, within=within):
            return None
        return _IN_FRAGMENTS if self._relaxes(kind) and not shortage(gang, self._ledger) else _TOO_LITTLE

    def _free(self) -> Resources:
        return self._ledger.sums(self._ledger.open)


def _stop_cost_seconds(holder: RunningEntry) -> float:
    return holder.running_job.stop_cost_seconds if holder.running_job else 0.0


def held(holdings: Iterable[Holding]) -> tuple[int, int]:
    """Return the sums of GPUs, in thousandths, and cores."""
    milli = sum(holding.gpus * WHOLE_GPU_MILLI + sum(part for _, part in holding.shares) for holding in holdings)
    return milli, sum(holding.cores for holding in holdings)
