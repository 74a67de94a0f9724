"""Fair share between tenants: which tenant's job goes next, whatever the queue policy orders inside each tenant.

Theory of operation. The policy orders the jobs of each tenant. Between tenants, the next job is that of the tenant
whose dominant share, divided by its weight, is the smallest (progressive filling: Ghodsi et al., Dominant Resource
Fairness, NSDI 2011, algorithm 1 [P]). The dominant share is the largest of the tenant's shares of the cluster's
resources. Progressive filling is a merge: a job's key is the share that its tenant holds before the job gets
what it asks for, counting what the tenant's running jobs hold and what its earlier jobs in the order ask for. Keys
never decrease along a tenant's own order, so sorting by key keeps that order and interleaves the tenants. Ties are
broken by the policy's order, which ends with the job's sequence number.

Tenants that belong to others share at each level, as in hierarchical DRF (Bhattacharya et al., SoCC 2013 [P]): the
groups of a department are merged first, then the departments. The jobs that a department has itself form one more
group, of weight 1.

The order has two uses, with two sets of keys. Positions and forecasts look far ahead and count everything that a tenant
asks for. Starts now count at most what is free: otherwise, a tenant whose first gangs find no place would wait with its
small jobs because of shares that the gangs never take.

Past use counts, if its half-life is set, as if it were held now: a tenant's share is that of what its jobs hold plus
what they held on decayed average (`core.scheduling.decayed_usage`). It is the same for all jobs of a tenant, so keys
still never decrease along a tenant's own order.

A GPU of a fast type is worth more than one of a slow type, to some jobs far more. Where `Jobs.gpu_worth` is known, what
a tenant's jobs hold counts by it: a tenant that has only slow GPUs holds less than its number of GPUs says, and is
served first. The same holds for attained service, by which jobs are ordered: so both the tenant and the job with the
smallest effective throughput go first, which is Gavel's max-min rule (Narayanan et al., OSDI 2020 [P]).

An idle tenant has no jobs in the order and costs the others nothing; a single active tenant has the policy's own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from cotenant.core.model.job_table import Capacity, Flags, Floats, Ints, Jobs
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.resources import KINDS
from cotenant.core.model.tenancy import Tenancy

ROUNDING = 1e-9  # a share this close to the fair share counts as fair
RESOURCES = tuple(kind.noun for kind in KINDS)
_SMALL_MAX = np.iinfo(np.int16).max  # up to here numpy sorts integers by radix, in linear time


class FairShare(StrEnum):
    """Whether the cluster is shared fairly."""

    TENANTS = "tenants"  # between tenants, by weight
    THROUGHPUT = "throughput"  # the same, and a GPU counts by how fast it makes its job, compared with other types
    OFF = "off"  # the queue policy alone decides the order

    @property
    def shares(self) -> bool:
        """Whether the cluster is shared between tenants."""
        return self is not FairShare.OFF


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant's dominant share of the cluster, the resource that it is of, and its fair share.

    `used` is its share of the decayed usage of the tenants that it shares with, and `used_fair` its fair share of that;
    0 if past use does not hold it back.
    """

    tenant_id: str
    resource: str
    held: float
    fair: float
    used: float = 0.0
    used_fair: float = 0.0

    def refine(self, refusal: Refusal) -> Refusal:
        """Return the refusal of a job that waits because its tenant already holds its fair share, or used more.

        >>> from cotenant.core.model.refusal import Code
        >>> refusal = Standing("vision", "GPUs", 0.75, 0.5).refine(Refusal(Code.CAPACITY, "needs 1 GPU, 0 of 8 free"))
        >>> refusal.detail
        'needs 1 GPU, 0 of 8 free; tenant vision holds 75% of the GPUs, its fair share is 50%'
        """
        words = (
            f"tenant {self.tenant_id} holds {self.held:.0%} of the {self.resource}, its fair share is {self.fair:.0%}"
        )
        numbers = {"tenant_share": self.held, "tenant_fair_share": self.fair}
        remedy = "jobs of tenants below their fair share start first, then its own; or its weight is raised"
        if self.used:
            words += f"; it has {self.used:.0%} of the decayed usage, its fair share of that is {self.used_fair:.0%}"
            numbers |= {"tenant_usage_share": self.used, "tenant_fair_usage_share": self.used_fair}
            remedy = f"its usage decays, or that of others grows; {remedy}"
        return replace(
            refusal,
            detail=f"{refusal.detail}; {words}",
            remedy=f"{refusal.remedy}; {remedy}" if refusal.remedy else remedy,
            numbers={**refusal.numbers, **numbers},
            over_share=True,
        )


class Shares(NamedTuple):
    """A tenant's shares: the dominant share that it holds, its fair share, and its share of the decayed usage."""

    held: float
    fair: float
    used: float


class Sharing:
    """The tenants of one cycle: their places in the tree, their weights, and what their jobs hold.

    `present` are the tenants among which the cluster is shared, by number; those that have jobs if it is not given.
    """

    def __init__(self, jobs: Jobs, capacity: Capacity, tenancy: Tenancy, present: Ints | None = None) -> None:
        self._jobs, self._tenancy = jobs, tenancy
        self._present = np.unique(jobs.tenant) if present is None else present
        self._levels, self._weights = tenancy.tree(int(self._present.max(initial=-1)) + 1)
        columns, totals = jobs.needs, capacity
        past = jobs.past_use if jobs.past_use is not None and jobs.past_use.any() else None
        kinds = [kind for kind, column in enumerate(columns) if column.any() or (past is not None and past[kind].any())]
        known = [kind for kind in kinds if totals[kind] > 0]
        self._kinds = known or kinds  # while the cluster is unknown, shares are of all that is asked for
        self._columns = [columns[kind] for kind in self._kinds]
        self._worth = [self._worth_of(kind, columns[kind]) for kind in self._kinds]
        self._totals = [totals[kind] if known else int(columns[kind].sum()) for kind in self._kinds]
        self._past = None if past is None or not known else self._by_tenant(past)

    def _worth_of(self, kind: int, column: Ints) -> Ints:
        """Return a column of what jobs need, with GPUs counted by what they are worth to their jobs."""
        if kind or bool((self._jobs.gpu_worth == 1).all()):
            return column
        worth: Ints = np.rint(column * self._jobs.gpu_worth).astype(np.int64)
        return worth

    def _by_tenant(self, past: Floats) -> list[Floats]:
        """Return by resource what tenants held on decayed average; nothing for numbers beyond those that are known."""
        count = len(self._levels[0])
        width = min(count, past.shape[1])
        rows = [np.zeros(count) for _ in self._kinds]
        for row, kind in zip(rows, self._kinds, strict=True):
            row[:width] = past[kind, :width]
        return rows

    @staticmethod
    def between_several(jobs: Jobs) -> bool:
        """Return whether more than one tenant has jobs."""
        return len(jobs) > 1 and bool((jobs.tenant != jobs.tenant[0]).any())

    def interleave(self, ranked: Ints, held: Flags, *, blocks: Ints | None = None, at_once: bool = False) -> Ints:
        """Return rows in fair order, given the policy's order in `ranked`.

        `held` marks rows that already hold resources. `blocks` numbers, by row, groups whose order stays, such as jobs
        within their tenants' quotas before others. `at_once` counts at most what is free, for starts now.
        """
        tenant = self._jobs.tenant[ranked]
        if len(ranked) < 2 or not bool((tenant != tenant[0]).any()):
            return ranked
        asked = [column[ranked] for column in self._columns]
        places = np.arange(len(ranked))
        for nodes in reversed(self._levels):
            key = self._keys(nodes, asked, tenant, places, held, at_once=at_once)
            places = places[_sorted(key[places])]
            if blocks is not None:
                places = places[np.argsort(blocks[ranked][places], kind="stable")]
        return ranked[places]

    def _keys(
        self, nodes: Ints, asked: Sequence[Ints], tenant: Ints, places: Ints, held: Flags, *, at_once: bool
    ) -> Floats:
        """Return by place the weighted share that each row's node holds before the row, at one level of the tree."""
        node = nodes[tenant]
        walk = places[_grouped(node[places])]
        ordered = node[walk]
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        sizes = np.diff(np.append(begins, len(walk)))
        share = np.zeros(len(walk))
        for number, (column, wanted, total) in enumerate(zip(self._columns, asked, self._totals, strict=True)):
            use = self._use(self._worth[number], nodes, held) + self._used(number, nodes)
            free = max(0, total - int(column[held].sum()))
            amounts = wanted[walk]
            if at_once:
                amounts = np.where(amounts > free, 0, amounts)
            before = np.cumsum(amounts) - amounts
            before -= np.repeat(before[begins], sizes)
            if at_once:
                before = np.minimum(before, free)
            np.maximum(share, (before + np.repeat(use[ordered[begins]], sizes)) / total, out=share)
        key = np.empty(len(walk))
        key[walk] = share / np.repeat(self._weights[ordered[begins]], sizes)
        return key

    def _use(self, column: Ints, nodes: Ints, held: Flags) -> Ints:
        """Return by node what rows hold."""
        amounts = column[held].astype(np.float64)  # whole numbers far below 2**53
        sums = np.bincount(nodes[self._jobs.tenant[held]], weights=amounts, minlength=len(self._weights))
        return sums.astype(np.int64)

    def _used(self, number: int, nodes: Ints) -> Floats | int:
        """Return by node what it held of a resource on decayed average; 0 if past use does not count."""
        return 0 if self._past is None else self._sums(self._past[number], nodes)

    def _sums(self, amounts: Floats, nodes: Ints) -> Floats:
        """Return by node the sum of its tenants' amounts."""
        sums: Floats = np.bincount(nodes, weights=amounts, minlength=len(self._weights)).astype(np.float64)
        return sums

    def held_back(self, ranked: Ints, fair: Ints, held: Flags) -> Flags:
        """Return which rows wait because of fair shares.

        Their tenant, or one of its ancestors, already holds its fair share, or used more than that, and a job goes
        before them that the policy alone would have put behind them: a job of another tenant, because a tenant's own
        order stays.
        """
        marked = np.zeros(len(self._jobs), dtype=np.bool_)
        if fair is ranked or len(ranked) < 2:
            return marked
        place = np.empty(len(self._jobs), dtype=np.int64)
        place[ranked] = np.arange(len(ranked))
        own = place[fair]
        later = np.maximum.accumulate(own) > own
        marked[fair[later]] = True
        return marked & self._over(held)[self._jobs.tenant]

    def _over(self, held: Flags) -> Flags:
        """Return by tenant whether it, or one of its ancestors, holds at least its fair share, or used more than it."""
        used, _, fair = self._stand(held)
        part, fair_part = self._usage_parts()
        over = np.zeros(len(self._levels[0]), dtype=np.bool_)
        for nodes in self._levels:
            over |= used[nodes] >= fair[nodes] * (1 - ROUNDING)
            over |= part[nodes] > fair_part[nodes] * (1 + ROUNDING)
        return over

    def _usage_parts(self) -> tuple[Floats, Floats]:
        """Return by node its part of the decayed usage among the present children of its parent, and its fair part."""
        part, fair = np.zeros(len(self._weights)), np.zeros(len(self._weights))
        if self._past is None:
            return part, fair
        for nodes, here, parents in self._siblings():
            dominant = np.zeros(len(self._weights))
            for amounts, total in zip(self._past, self._totals, strict=True):
                dominant = np.maximum(dominant, self._sums(amounts, nodes) / total)
            for own, values in ((part, dominant), (fair, self._weights)):
                sums = np.bincount(parents, weights=values[here], minlength=len(self._weights))[parents]
                own[here] = np.divide(values[here], sums, out=np.zeros(len(here)), where=sums > 0)
        return part, fair

    def _siblings(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield each level with its present nodes and their parents; of the first level, these are all one."""
        above: Ints | None = None
        for nodes in self._levels:
            here, first = np.unique(nodes[self._present], return_index=True)
            parents = np.zeros_like(here) if above is None else above[self._present[first]]
            new = np.ones(len(here), dtype=np.bool_) if above is None else parents != here  # else it has no children
            yield nodes, here[new], parents[new]
            above = nodes

    def _stand(self, held: Flags) -> tuple[Floats, Ints, Floats]:
        """Return by node the dominant share held, the resource that it is of, and the fair share."""
        used, kind = np.zeros(len(self._weights)), np.zeros(len(self._weights), dtype=np.int64)
        for nodes in self._levels:
            for number, (column, total) in enumerate(zip(self._worth, self._totals, strict=True)):
                share = self._use(column, nodes, held) / total
                kind[share > used] = number
                used = np.maximum(used, share)
        present = self._present
        fair, above = np.zeros(len(self._weights)), np.zeros(len(self._weights), dtype=np.int64)
        whole = np.ones(1)  # of what is shared at the level, by parent
        for nodes in self._levels:
            here, first = np.unique(nodes[present], return_index=True)
            parents = above[present[first]] if nodes is not self._levels[0] else np.zeros(len(here), dtype=np.int64)
            sums = np.bincount(parents, weights=self._weights[here], minlength=len(whole))
            fair[here] = whole[parents] * self._weights[here] / sums[parents]
            above = np.zeros(len(nodes), dtype=np.int64)
            above[present] = nodes[present]
            whole = fair.copy()
        return used, kind, fair

    def standings(self, held: Flags, ids: Sequence[str]) -> dict[str, Standing]:
        """Return the standing of each tenant that holds its fair share, or used more, by id.

        `ids` are the ids of tenants by number. If a tenant has ancestors, the standing is that of the highest one that
        holds its share, or used more.
        """
        used, kind, fair = self._stand(held)
        part, fair_part = self._usage_parts()
        found: dict[str, Standing] = {}
        for number in self._present.tolist():
            for nodes in self._levels:
                node = int(nodes[number])
                over = part[node] > fair_part[node] * (1 + ROUNDING)
                if over or used[node] >= fair[node] * (1 - ROUNDING):
                    name = self._tenancy.tenants[node].id if node < len(self._tenancy.tenants) else ids[number]
                    resource = RESOURCES[self._kinds[int(kind[node])]] if self._kinds else RESOURCES[0]
                    past = (float(part[node]), float(fair_part[node])) if over else (0.0, 0.0)
                    found[ids[number]] = Standing(name, resource, float(used[node]), float(fair[node]), *past)
                    break
        return found

    def shares(self, held: Flags) -> dict[int, Shares]:
        """Return the shares of each present tenant and its ancestors, by number; a tenant's include its children's.

        `held` marks the rows that hold resources.
        """
        holds, _, fair = self._stand(held)
        part, _ = self._usage_parts()
        used = part.copy()
        for nodes, here, parents in self._siblings():
            if nodes is not self._levels[0]:
                used[here] = part[here] * used[parents]
        numbers = {int(node) for nodes in self._levels for node in nodes[self._present]}
        count = len(self._levels[0])
        return {node: Shares(*(float(one[node]) for one in (holds, fair, used))) for node in numbers if node < count}


def _grouped(numbers: Ints) -> Ints:
    """Return the stable sort order of small integers."""
    few = int(numbers.max()) <= _SMALL_MAX
    return np.argsort(numbers.astype(np.int16) if few else numbers, kind="stable")


def _sorted(values: Floats) -> Ints:
    """Return the stable sort order."""
    if bool((values[1:] >= values[:-1]).all()):
        return np.arange(len(values))
    return np.argsort(values, kind="stable")
