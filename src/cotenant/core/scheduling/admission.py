"""Admission, by counting alone: the order, tenants' quotas, and which running jobs may be stopped for which others.

1. The queue policy's order, by priority first. Jobs within their tenants' quotas come before all that borrow. If
   tenants share fairly, this is the order inside each tenant, and their shares decide between tenants.
2. Whether running jobs may be stopped for waiting ones: by the policy, by priority, or to reclaim borrowed resources.
3. Which waiting jobs may start, and which running jobs may have to make room for them.
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
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, ReservationRules, starving_first

RESERVATIONS_MAX = 100
HALF_LIFE_SECONDS_MIN, HALF_LIFE_SECONDS_MAX = 1.0, 1e9
CLAIMS_MAX = 1_000  # waiting jobs for which a non-preemptive queue makes room in one cycle


class Preemption(StrEnum):
    """Which jobs may be stopped for which others, besides borrowers for the owners of what they borrow."""

    POLICY = "policy"  # as the queue policy says
    PRIORITY = "priority"  # also lower priorities for higher ones, if the policy itself is not preemptive
    NEVER = "never"  # no job for any other


@dataclass(frozen=True, slots=True)
class Rules:
    """How far the order is enforced against running jobs.

    preemption: which jobs may be stopped for which others.
    run_seconds_min: a job is not stopped for others until its present run has lasted this long.
    reclaim: whether a non-preemptive queue stops borrowers for jobs within their tenant's quota.
    reserve_after_seconds: a gang that has waited this long gets a reservation; None: no reservations.
    reservations: the most at a time.
    fair_share: `tenants` share the cluster fairly, and the policy orders the jobs of each; `throughput`: the same, and
      a GPU counts by what its type is worth to its job; `off`: the policy alone orders all jobs.
    usage_half_life_seconds: the time after which past use counts half in fair shares; 0: it does not count.
    """

    preemption: Preemption = Preemption.POLICY
    run_seconds_min: float = 0.0
    reclaim: bool = True
    reserve_after_seconds: float | None = None
    reservations: int = 1
    fair_share: FairShare = FairShare.OFF
    usage_half_life_seconds: float = 0.0

    def check(self) -> Iterator[Violation]:
        """Yield violations that the types cannot express."""
        if not 0 <= self.run_seconds_min < math.inf:
            yield Violation("run_seconds_min", f"must be 0 or more, not {self.run_seconds_min:g}")
        after = self.reserve_after_seconds
        if after is not None and not 0 <= after < math.inf:
            yield Violation("reserve_after_seconds", f"must be 0 or more, or none, not {after:g}")
        if not 1 <= self.reservations <= RESERVATIONS_MAX:
            yield Violation("reservations", f"must be from 1 to {RESERVATIONS_MAX}, not {self.reservations}")
        half_life = self.usage_half_life_seconds
        if half_life and not HALF_LIFE_SECONDS_MIN <= half_life <= HALF_LIFE_SECONDS_MAX:
            range_ = f"0, or from {HALF_LIFE_SECONDS_MIN:g} to {HALF_LIFE_SECONDS_MAX:g}"
            yield Violation("usage_half_life_seconds", f"must be {range_}, not {half_life:g}")

    @property
    def reserving(self) -> ReservationRules:
        """Which gangs get a reservation."""
        after = self.reserve_after_seconds
        return NO_RESERVATIONS if after is None else ReservationRules(after, self.reservations)

    @property
    def without_preemption(self) -> Rules:
        """The same rules for a cycle that stops no job for others."""
        return replace(self, preemption=Preemption.NEVER)

    def enforces(self, policy: QueuePolicy) -> bool:
        """Return whether running jobs that fall in the policy's order make room."""
        return policy.preemptive and self.preemption is not Preemption.NEVER

    def claims(self, policy: QueuePolicy, tenancy: Tenancy) -> bool:
        """Return whether jobs may be stopped for others although the policy's order is not enforced."""
        if policy.preemptive or self.preemption is Preemption.NEVER:
            return False
        return self.preemption is Preemption.PRIORITY or (self.reclaim and tenancy.guarantees)

    def protects(self, jobs: Jobs, now: float) -> Flags:
        """Return which running jobs must not be stopped."""
        return jobs.running & (~jobs.preemptible | (now - jobs.running_since < self.run_seconds_min))

    def valid_seconds(self, jobs: Jobs, order: Order, now: float) -> float:
        """Return how long a decision holds if nothing happens: until the order changes or a job's protection ends."""
        if not self.run_seconds_min or self.preemption is Preemption.NEVER:
            return order.valid_seconds
        ran = now - jobs.running_since[jobs.running & jobs.preemptible]
        ends = (self.run_seconds_min - ran)[ran < self.run_seconds_min]
        return min(order.valid_seconds, float(ends.min(initial=math.inf)))

    def next_reservation_seconds(self, jobs: Jobs, now: float) -> float:
        """Return the time until the next waiting job gets a reservation, if it still waits then."""
        waited = now - jobs.waiting_since[~jobs.running]
        left = self.reserving.after_seconds - waited
        return float(left[left > 0].min(initial=math.inf))


RULES = Rules()
SHARING = Rules(fair_share=FairShare.TENANTS)  # the default of a mesh


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
    """Return which jobs should run, by counting alone.

    If the order is not enforced, that is every waiting job, in order, within its tenant's limit; running jobs stay,
    except those whose resources others may claim under the rules. If it is enforced, the first jobs of the order that
    fit together into the whole capacity should run. Victims are preemptible running jobs that have run for
    `run_seconds_min`: first those that should not run, the last in the order first; then those that should, but come
    after a start, because a gang may find the resources it was counted on fragmented.

    If tenants share fairly, the next start is that of the tenant with the smallest weighted share, and running jobs are
    not stopped for that alone (`core.scheduling.fair_share`).
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
    shares = rules.fair_share.shares and Sharing.between_several(jobs)
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
    """Return by row the number of its group; the order of groups is fixed, whatever shares their tenants hold.

    Quotas come first. Priorities decide between tenants only if they are enforced between them; otherwise any tenant
    could get any share by asking for a high priority.
    """
    blocks = None if entitled is None else (~entitled).astype(np.int64)
    if rules.preemption is Preemption.PRIORITY:
        below = np.unique(-jobs.priority, return_inverse=True)[1].astype(np.int64)
        blocks = below if blocks is None else blocks * (int(below.max(initial=0)) + 1) + below
    return blocks


def _share(jobs: Jobs, ranked: Ints, sharing: Sharing, blocks: Ints | None) -> tuple[Ints, Flags]:
    """Return the order with its waiting jobs in fair order, and which of these wait because of fair shares."""
    waits = ~jobs.running[ranked]
    waiting = ranked[waits]
    fair = sharing.interleave(waiting, jobs.running, blocks=blocks)
    shared = ranked.copy()
    shared[waits] = fair
    return shared, sharing.held_back(waiting, fair, jobs.running)


def stoppable(jobs: Jobs, choice: Choice, rules: Rules, policy: QueuePolicy, now: float) -> list[tuple[int, int]]:
    """Return running jobs that may be stopped for others, and how many waiting jobs each of them yields to.

    The first victim comes first; the waiting jobs are always the first of all, in order. `choose` names victims only
    for jobs that may start now; the rows here are for later starts, if the order stays as it is.
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
    """Return which jobs wait, if they do, because their tenant holds its fair share or has reached its limit.

    `choice` is the result of `choose` for the same jobs, order and rules, if available. Returns None if neither the
    order nor the tenants involve shares.
    """
    beyond = order.over_share
    if rules.fair_share.shares and Sharing.between_several(jobs):
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
    """Return which jobs are within their tenant's quota: jobs that will not be stopped count first, in any order."""
    return tenancy.entitled(jobs, ranked, first=protected if rules.enforces(policy) else jobs.running)


def _admit(jobs: Jobs, ranked: Ints, tenancy: Tenancy, *, static: bool) -> tuple[Ints, Ints]:
    """Return the waiting jobs within their tenants' limits, and the others; all, if victims may make room."""
    waiting = ranked[~jobs.running[ranked]]
    if not tenancy.limits or not static:
        return waiting, ranked[:0]
    over = tenancy.over_limit(jobs, jobs.running)[waiting]
    return waiting[~over], waiting[over]


def _starving_first(jobs: Jobs, starts: Ints, entitled: Flags | None, now: float, rules: Rules) -> Ints:
    """Return the starts with long-waiting gangs ahead of equals that came later, the longest wait first.

    Equals have the same priority, and are all within their tenants' quotas or all beyond. A gang has several replicas,
    or more than one GPU; smaller jobs are passed over by the order alone, because any free resources will do for them.
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
    """Return running jobs whose resources may be claimed, and how many of the starts may: always the first ones.

    A job within its quota may claim the resources of a borrower; with `Preemption.PRIORITY`, a job of higher priority
    those of a lower one, unless the lower one is within its quota and the higher one is not. Both orders are strict, so
    two jobs can never claim each other's resources.
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
    """Return by victim the number of its group: one priority, all borrowing or none; the group that goes first is 0."""
    apart = jobs.priority[victims[1:]] != jobs.priority[victims[:-1]]
    if entitled is not None:
        apart |= entitled[victims[1:]] != entitled[victims[:-1]]
    return np.concatenate([np.zeros(min(1, len(victims)), dtype=np.int64), np.cumsum(apart)])
