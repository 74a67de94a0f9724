"""Who should run: the order, the guarantees of tenants, and who may be stopped for whom. By counting alone.

1. The queue policy's order, by priority first. Jobs that their tenants' guarantees hold come before all that borrow.
   Where tenants share fairly, that is the order inside each tenant, and their shares decide among them.
2. Whether running jobs may be stopped for waiting ones: as the policy says, as priorities say, for borrowed room.
3. Which waiting jobs may start, and which running ones may have to go for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.job_table import Capacity, Flags, Ints, Jobs
from cotenant.core.model.tenancy import NO_TENANTS, Tenancy
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order, QueuePolicy
from cotenant.core.scheduling.choice import Choice as Choice
from cotenant.core.scheduling.fair_share import FairShare as FairShare
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.limits_enforcement import IN_THE_WAY_MAX, enforce, enforce_fairly
from cotenant.core.scheduling.ordering import rank
from cotenant.core.scheduling.reservations import NO_RESERVING, Reserving, starving_first

RESERVATIONS_MAX = 100
CLAIMS_MAX = 1_000  # waiting jobs for which a queue that stops nobody by itself makes room in one cycle


class Preemption(StrEnum):
    """Who may be stopped for whom, beside borrowers for those whom they borrow from."""

    POLICY = "policy"  # as the queue policy says
    PRIORITY = "priority"  # also jobs of lower priority for jobs of a higher one, where the policy itself stops nobody
    NEVER = "never"  # nobody, for anybody


@dataclass(frozen=True, slots=True)
class Rules:
    """How far the order is enforced against jobs that run.

    preemption: who may be stopped for whom.
    run_seconds_min: a job that has run for less, in its present run, is not stopped for others.
    reclaim: whether a queue that stops nobody by itself stops borrowers for jobs within their tenant's guarantee.
    reserve_after_seconds: a gang that has waited for so long gets a reservation; None: nobody does.
    reservations: so many at a time.
    fair_share: `tenants` share the cluster fairly, and the policy orders the jobs of each; `off`: the policy alone
      orders all jobs.
    """

    preemption: Preemption = Preemption.POLICY
    run_seconds_min: float = 0.0
    reclaim: bool = True
    reserve_after_seconds: float | None = None
    reservations: int = 1
    fair_share: FairShare = FairShare.OFF

    def check(self) -> Iterator[Violation]:
        """Name what the types cannot say."""
        if not 0 <= self.run_seconds_min < math.inf:
            yield Violation("run_seconds_min", f"must be 0 or more, not {self.run_seconds_min:g}")
        after = self.reserve_after_seconds
        if after is not None and not 0 <= after < math.inf:
            yield Violation("reserve_after_seconds", f"must be 0 or more, or none, not {after:g}")
        if not 1 <= self.reservations <= RESERVATIONS_MAX:
            yield Violation("reservations", f"must be from 1 to {RESERVATIONS_MAX}, not {self.reservations}")

    @property
    def reserving(self) -> Reserving:
        """Who gets a reservation."""
        after = self.reserve_after_seconds
        return NO_RESERVING if after is None else Reserving(after, self.reservations)

    @property
    def stopping_nobody(self) -> Rules:
        """The same for a cycle in which nobody is stopped for others."""
        return replace(self, preemption=Preemption.NEVER)

    def enforces(self, policy: QueuePolicy) -> bool:
        """Whether running jobs that fall in the policy's order make room."""
        return policy.preemptive and self.preemption is not Preemption.NEVER

    def claims(self, policy: QueuePolicy, tenancy: Tenancy) -> bool:
        """Whether some may be stopped for others although the policy's order is not enforced."""
        if policy.preemptive or self.preemption is Preemption.NEVER:
            return False
        return self.preemption is Preemption.PRIORITY or (self.reclaim and tenancy.guarantees)

    def protects(self, jobs: Jobs, now: float) -> Flags:
        """Mark running jobs that nobody may stop."""
        return jobs.running & (~jobs.preemptible | (now - jobs.running_since < self.run_seconds_min))

    def valid_seconds(self, jobs: Jobs, order: Order, now: float) -> float:
        """Say how long a decision holds if nothing happens: the order's word, or until somebody's protection ends."""
        if not self.run_seconds_min or self.preemption is Preemption.NEVER:
            return order.valid_seconds
        ran = now - jobs.running_since[jobs.running & jobs.preemptible]
        ends = (self.run_seconds_min - ran)[ran < self.run_seconds_min]
        return min(order.valid_seconds, float(ends.min(initial=math.inf)))

    def starves_in(self, jobs: Jobs, now: float) -> float:
        """Say in how long the next waiting job gets a reservation if it still waits then."""
        waited = now - jobs.waiting_since[~jobs.running]
        left = self.reserving.after_seconds - waited
        return float(left[left > 0].min(initial=math.inf))


RULES = Rules()
SHARING = Rules(fair_share=FairShare.TENANTS)  # what a mesh does unless it is told otherwise


def choose(
    jobs: Jobs,
    policy: QueuePolicy,
    order: Order,
    capacity: Capacity,
    *,
    now: float,
    rules: Rules = RULES,
    tenancy: Tenancy = NO_TENANTS,
) -> Choice:
    """Say who should run, by counting alone.

    Where the order is not enforced that is every waiting job, in order, as long as there is room and its tenant's
    limit allows; running jobs stay, but for those that the rules let others claim the room of. Where it is enforced,
    the first jobs of the order that fit together into the whole capacity should run. Victims are running jobs that
    may be preempted and have run for `run_seconds_min`: first those that should not run, the last in the order first;
    then those that should, but come after one that starts, for a gang may find the room that it was counted in
    fragments.

    Where tenants share fairly, the next start is that of the tenant that holds the least of its share, and running jobs
    are not stopped for that alone (`core.queueing.fair_share`).
    """
    enforced, claims = rules.enforces(policy), rules.claims(policy, tenancy)
    everybody = enforced or claims or tenancy.guarantees
    ranked = rank(
        jobs,
        order,
        running_first=policy.running_first and everybody,
        among=None if everybody else ~jobs.running,
    )
    protected = rules.protects(jobs, now) if everybody else jobs.running
    entitled = None
    if tenancy.guarantees:
        entitled = _entitled(jobs, ranked, policy, protected, rules, tenancy)
        ranked = np.concatenate([ranked[entitled[ranked]], ranked[~entitled[ranked]]])
    shares = rules.fair_share is FairShare.TENANTS and Sharing.between_several(jobs)
    sharing = Sharing(jobs, capacity, tenancy) if shares else None
    blocks = _blocks(jobs, entitled, rules) if sharing else None
    if enforced:
        common = jobs, ranked, protected, capacity, tenancy, entitled, order.score
        if sharing is None:
            return enforce(*common, strict=policy.strict)
        return enforce_fairly(*common, sharing, blocks, strict=policy.strict)
    starts, over = _admit(jobs, ranked, tenancy, static=not claims)
    if rules.reserving and not policy.strict:
        starts = _starving_first(jobs, starts, entitled, now, rules)
    by_policy, held_back = ranked, None
    if sharing:
        starts = sharing.interleave(starts, jobs.running, blocks=blocks, at_once=True)
        ranked, held_back = _share(jobs, ranked, sharing, blocks)
    nobody = ranked[:0]
    if not claims:
        return Choice(ranked, starts, nobody, nobody, over, entitled=entitled, held_back=held_back, sharing=sharing)
    victims, turns = _claims(jobs, by_policy, starts, protected, entitled, rules)
    standings = _standings(jobs, victims, entitled)
    return Choice(
        ranked,
        starts,
        victims,
        nobody,
        over,
        turns,
        entitled,
        standings=standings,
        held_back=held_back,
        sharing=sharing,
    )


def _blocks(jobs: Jobs, entitled: Flags | None, rules: Rules) -> Ints | None:
    """Number by row the groups of jobs that go before each other whatever shares their tenants hold.

    Guarantees come first. Priorities decide among tenants only where they are enforced among them; else anybody could
    have any share by asking for a high priority.
    """
    blocks = None if entitled is None else (~entitled).astype(np.int64)
    if rules.preemption is Preemption.PRIORITY:
        below = np.unique(-jobs.priority, return_inverse=True)[1].astype(np.int64)
        blocks = below if blocks is None else blocks * (int(below.max(initial=0)) + 1) + below
    return blocks


def _share(jobs: Jobs, ranked: Ints, sharing: Sharing, blocks: Ints | None) -> tuple[Ints, Flags]:
    """Return the order with its waiting jobs in fair order, and which of these wait for the sake of fair shares."""
    waits = ~jobs.running[ranked]
    waiting = ranked[waits]
    fair = sharing.interleave(waiting, jobs.running, blocks=blocks)
    shared = ranked.copy()
    shared[waits] = fair
    return shared, sharing.held_back(waiting, fair, jobs.running)


def stoppable(jobs: Jobs, choice: Choice, rules: Rules, policy: QueuePolicy, now: float) -> list[tuple[int, int]]:
    """Give rows of running jobs that may be stopped for others, the first to go first, and how many that wait may.

    Those are always the first of all that wait, in order. `choose` names victims for those alone that may start now;
    these are for whoever starts later, if the order stays as it is.
    """
    waiting = ~jobs.running[choice.ranked]
    before = np.zeros(len(jobs), dtype=np.int64)
    if rules.enforces(policy):
        before[choice.ranked] = np.cumsum(waiting)
        rows = choice.ranked[(jobs.running & ~rules.protects(jobs, now))[choice.ranked]][::-1]
    else:
        rows = choice.victims
        if not len(rows):
            return []
        place = np.append(np.flatnonzero(waiting), len(choice.ranked))
        starts = np.flatnonzero(np.isin(choice.ranked[place[:-1]], choice.starts))
        reach = np.append(starts, len(place) - 1)
        before[rows] = reach[np.minimum(choice.ahead(), len(starts))]
    return [(row, before[row]) for row in rows[before[rows] > 0][:IN_THE_WAY_MAX].tolist()]


def beyond_share(
    jobs: Jobs,
    policy: QueuePolicy,
    order: Order,
    *,
    now: float,
    rules: Rules = RULES,
    tenancy: Tenancy = NO_TENANTS,
    choice: Choice | None = None,
) -> Flags | None:
    """Mark jobs whose tenant has what it is due already, or may have no more: if they wait, that is why.

    `choice` is the one of the same jobs by the same order and rules, where that is at hand. None comes out where
    neither the order nor the tenants know of shares.
    """
    beyond = order.over_share
    if rules.fair_share is FairShare.TENANTS and Sharing.between_several(jobs):
        if choice is None:
            choice = choose(jobs, policy, order, jobs.capacity, now=now, rules=rules, tenancy=tenancy)
        if choice.held_back is not None:
            beyond = choice.held_back if beyond is None else beyond | choice.held_back
    if tenancy.guarantees:
        entitled = choice.entitled if choice else None
        if entitled is None:
            ranked = rank(jobs, order, running_first=policy.running_first)
            entitled = _entitled(jobs, ranked, policy, rules.protects(jobs, now), rules, tenancy)
        over = tenancy.over_quota(jobs, entitled)
        beyond = over if beyond is None else beyond | over
    if tenancy.limits:
        over = tenancy.over_limit(jobs, jobs.running)
        beyond = over if beyond is None else beyond | over
    return beyond


def _entitled(jobs: Jobs, ranked: Ints, policy: QueuePolicy, protected: Flags, rules: Rules, tenancy: Tenancy) -> Flags:
    """Mark jobs within their tenant's guarantee: those that nobody will stop come first, whatever the order says."""
    return tenancy.entitled(jobs, ranked, first=protected if rules.enforces(policy) else jobs.running)


def _admit(jobs: Jobs, ranked: Ints, tenancy: Tenancy, *, static: bool) -> tuple[Ints, Ints]:
    """Let all that wait in, but for those over a limit, unless jobs of the same tenant may be stopped for them."""
    waiting = ranked[~jobs.running[ranked]]
    if not tenancy.limits or not static:
        return waiting, ranked[:0]
    over = tenancy.over_limit(jobs, jobs.running)[waiting]
    return waiting[~over], waiting[over]


def _starving_first(jobs: Jobs, starts: Ints, entitled: Flags | None, now: float, rules: Rules) -> Ints:
    """Let the gangs that have waited longest, and for long enough, go before their equals who came later.

    Equals have the same priority, and are within their tenants' guarantees or beyond. A gang has several replicas, or
    more than one GPU: one that has not is passed over by the order alone, for whatever is free will do.
    """
    since = jobs.waiting_since[starts]
    gangs = (jobs.replicas[starts] > 1) | (jobs.gpu_milli[starts] > WHOLE_GPU_MILLI)
    apart = jobs.priority[starts[1:]] != jobs.priority[starts[:-1]]
    if entitled is not None:
        apart |= entitled[starts[1:]] != entitled[starts[:-1]]
    rows: Ints = starts[starving_first(since, now, gangs, jobs.sequence[starts], apart, rules.reserving)]
    return rows


def _claims(
    jobs: Jobs, ranked: Ints, starts: Ints, protected: Flags, entitled: Flags | None, rules: Rules
) -> tuple[Ints, Ints]:
    """Find running jobs whose room a waiting job may claim, and how many of the starts may: always the first ones.

    A job within its guarantee may have the room of one that borrows; with `Preemption.PRIORITY`, one of a higher
    priority that of one of a lower, unless that is within its guarantee and the other is not. Both orders are strict,
    so two jobs can never claim each other's room.
    """
    rows = ranked[(jobs.running & ~protected)[ranked]][::-1]
    borrows = np.zeros(len(jobs), dtype=np.bool_) if entitled is None else ~entitled
    by_priority = rules.preemption is Preemption.PRIORITY
    guaranteed, others = starts[~borrows[starts]], starts[borrows[starts]]
    outrank = np.where(by_priority, np.searchsorted(-jobs.priority[guaranteed], -jobs.priority[rows]), 0)
    if rules.reclaim:
        outrank = np.where(borrows[rows], len(guaranteed), outrank)
    more = np.where(by_priority & borrows[rows], np.searchsorted(-jobs.priority[others], -jobs.priority[rows]), 0)
    ahead = np.where(outrank < len(guaranteed), outrank, len(guaranteed) + more)
    ahead = np.minimum(ahead, CLAIMS_MAX)
    return rows[ahead > 0][:IN_THE_WAY_MAX], ahead[ahead > 0][:IN_THE_WAY_MAX]


def _standings(jobs: Jobs, victims: Ints, entitled: Flags | None) -> Ints:
    """Number the groups of one priority that all borrow, or all do not, the first to go first."""
    apart = jobs.priority[victims[1:]] != jobs.priority[victims[:-1]]
    if entitled is not None:
        apart |= entitled[victims[1:]] != entitled[victims[:-1]]
    return np.concatenate([np.zeros(min(1, len(victims)), dtype=np.int64), np.cumsum(apart)])
