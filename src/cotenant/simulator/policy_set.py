"""The policies of a simulation, and errors that name a failing policy."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import Jobs
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement import constraints
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import (
    ChecksNeighbors,
    ClusterView,
    Rearrangement,
    Rearranges,
    Reclaim,
    Reclaims,
    UsesClusterView,
)
from cotenant.core.policy.protocols import (
    CpuAllocator,
    DefinesEquivalence,
    EndedJob,
    Learns,
    LeavesOutScorers,
    Order,
    PlacementPolicy,
    QueuePolicy,
    default_equivalence_key,
)
from cotenant.simulator.job import SimulatedJob


class PolicyFailed(Exception):
    """A policy raised an error or returned an invalid answer; the message names the policy, the input and the fault."""

    def __init__(self, kind: str, policy: object, over: str, fault: str) -> None:
        name = getattr(policy, "name", type(policy).__name__)
        super().__init__(f"{kind} policy {name!r} failed over {over}: {fault}")


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a simulation."""

    queue: QueuePolicy
    placement: PlacementPolicy
    allocator: CpuAllocator


def checked_order(policy: QueuePolicy, jobs: Jobs, now: float) -> Order:
    """Return a queue policy's order after checking it.

    Raises:
        PolicyFailed: the order is invalid.
    """
    over = f"{len(jobs)} jobs at {now:.3f} s"
    try:
        order = policy.order(jobs, now)
        sizes = len(order.level), len(order.score)
        unordered = bool(np.isnan(order.score).any())
        valid = float(order.valid_seconds)
        marks = [len(marked) for marked in (order.over_share, order.given_up) if marked is not None]
    except Exception as error:  # third-party code may raise anything
        raise PolicyFailed("queue", policy, over, f"{type(error).__name__}: {error}") from error
    if sizes != (len(jobs), len(jobs)):
        raise PolicyFailed("queue", policy, over, f"{sizes[0]} levels and {sizes[1]} scores for {len(jobs)} jobs")
    if any(count != len(jobs) for count in marks):
        raise PolicyFailed("queue", policy, over, f"{' and '.join(map(str, marks))} marks for {len(jobs)} jobs")
    if unordered:
        raise PolicyFailed("queue", policy, over, "a score is NaN")
    if not valid >= 0:
        raise PolicyFailed("queue", policy, over, f"an order that is valid for {valid} s")
    return order


def report_finished(
    policy: QueuePolicy, sim_job: SimulatedJob, predicted_seconds: float | None, confidence: float
) -> None:
    """Report a finished job, with what was predicted of it, to a queue policy that learns.

    Raises:
        PolicyFailed: it raised an error.
    """
    job_class, seconds = sim_job.job_class, sim_job.attained_seconds
    gpu_seconds = seconds * job_class.gpu_milli / 1000
    requested = job_class.gpu_milli, job_class.cores, job_class.replicas
    ended = EndedJob(*requested, seconds, gpu_seconds, predicted_seconds, confidence)
    report_ended(policy, ended, sim_job.job.id)


def report_ended(policy: QueuePolicy, ended: EndedJob, job_id: str) -> None:
    """Report a job that ended to a queue policy that learns.

    Raises:
        PolicyFailed: it raised an error.
    """
    if not (learns := capability_of(policy, Learns)):
        return
    try:
        learns.learn(ended)
    except Exception as error:  # third-party code may raise anything
        raise PolicyFailed("queue", policy, f"the end of {job_id}", f"{type(error).__name__}: {error}") from error


class CheckedPlacement:
    """A placement policy whose answers are checked; `refusal` is the last answer if it was one."""

    api_version = 1

    def __init__(self, policy: PlacementPolicy) -> None:
        self.name = policy.name
        self.refusal: Refusal | None = None
        self._policy = policy
        self._discerning, self._sees, self._heeds = (
            capability_of(policy, DefinesEquivalence),
            capability_of(policy, UsesClusterView),
            capability_of(policy, ChecksNeighbors),
        )
        self._rearranges, self._reclaims = capability_of(policy, Rearranges), capability_of(policy, Reclaims)
        self._scored = capability_of(policy, LeavesOutScorers)
        self.discerns = self._discerning is not None

    def equivalence_key(self, gang: Gang) -> Hashable:
        """Return the equivalence key of a gang; its needs, for a policy without one."""
        return self._discerning.equivalence_key(gang) if self._discerning else default_equivalence_key(gang)

    def equivalence_seconds(self, gang: Gang) -> float:
        """Return for how long the key stays valid while the gang waits."""
        return self._discerning.equivalence_seconds(gang) if self._discerning else math.inf

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        """Pass the cluster view to a policy that uses it."""
        if self._sees:
            self._sees.begin_cycle(cluster_view)

    def can_coexist(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        """Return whether all jobs on some nodes tolerate each other; True for a policy that does not check."""
        return self._heeds is None or self._heeds.can_coexist(nodes, ledger)

    def rearrange(
        self, gang: Gang, refusal: Refusal, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]
    ) -> Rearrangement | None:
        """Return the rearrangement of a policy that moves jobs.

        Raises:
            PolicyFailed: it raised an error.
        """
        if not self._rearranges:
            return None
        try:
            found = self._rearranges.rearrange(gang, refusal, ledger, rng, fixed)
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error
        if found:
            self.refusal = None
        return found

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        """Return whether a policy that lends lends to a gang.

        Raises:
            PolicyFailed: it raised an error.
        """
        if not self._reclaims:
            return False
        try:
            return bool(self._reclaims.lends(gang, offer, ledger))
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        """Return what a policy that lends takes back for a gang.

        Raises:
            PolicyFailed: it raised an error.
        """
        if not self._reclaims:
            return None
        try:
            found = self._reclaims.reclaim(gang, ledger, rng, fixed)
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error
        if found:
            self.refusal = None
        return found

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Return the policy's answer.

        Raises:
            PolicyFailed: it raised an error, offered what does not exist, or left out a scorer: the results would be
                those of another policy.
        """
        try:
            answer = constraints.place(self._policy, gang, ledger, rng)
            self.refusal = answer if isinstance(answer, Refusal) else None
            wrong = (
                [] if isinstance(answer, Refusal) else [share for share in answer if not _is_valid(share, gang, ledger)]
            )
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error
        if wrong:
            raise PolicyFailed(
                "placement", self, gang.job_id, f"it offered a node or part that does not exist: {wrong[0]}"
            )
        if self._scored and (faults := self._scored.take_scorer_faults()):
            told = "; ".join(f"scorer {scorer}: {fault}" for scorer, fault in faults.items())
            raise PolicyFailed("placement", self, gang.job_id, told)
        return answer


def _is_valid(share: Share, gang: Gang, ledger: Ledger) -> bool:
    """Return whether the node and the part of an offer exist."""
    return 0 <= share.node < len(ledger) and 0 <= share.part < len(gang.parts)
