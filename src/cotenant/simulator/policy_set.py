"""The policies of a simulation, and what is said of one that fails."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import Jobs
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.topology import place_in_one
from cotenant.core.policy.capabilities import able
from cotenant.core.policy.cluster_view import Heeds, Rearrangement, Rearranges, Reclaim, Reclaims, Scene, Sees
from cotenant.core.policy.protocols import (
    CpuAllocator,
    Discerns,
    Ended,
    Learns,
    Order,
    PlacementPolicy,
    QueuePolicy,
    needs,
)
from cotenant.simulator.job import Life

GROUPS = {
    "queue": "cotenant.queue_policies",
    "placement": "cotenant.placement_policies",
    "allocator": "cotenant.cpu_allocators",
    "predictor": "cotenant.predictors",
    "contention": "cotenant.contention_policies",
}


class PolicyFailed(Exception):
    """A policy raised an error or answered nonsense; says which policy, over what, and how."""

    def __init__(self, kind: str, policy: object, over: str, fault: str) -> None:
        name = getattr(policy, "name", type(policy).__name__)
        super().__init__(f"{kind} policy {name!r} failed over {over}: {fault}")


@dataclass(frozen=True, slots=True)
class Policies:
    """Who decides in a simulation."""

    queue: QueuePolicy
    placement: PlacementPolicy
    allocator: CpuAllocator


def ordered(policy: QueuePolicy, jobs: Jobs, now: float) -> Order:
    """Ask a queue policy for its order, and check that it is one.

    Raises:
        PolicyFailed: it is not.
    """
    over = f"{len(jobs)} jobs at {now:.3f} s"
    try:
        order = policy.order(jobs, now)
        sizes = len(order.level), len(order.score)
        unordered = bool(np.isnan(order.score).any())
        valid = float(order.valid_seconds)
        marks = [len(marked) for marked in (order.over_share, order.given_up) if marked is not None]
    except Exception as error:  # whatever a stranger's code does
        raise PolicyFailed("queue", policy, over, f"{type(error).__name__}: {error}") from error
    if sizes != (len(jobs), len(jobs)):
        raise PolicyFailed("queue", policy, over, f"{sizes[0]} levels and {sizes[1]} scores for {len(jobs)} jobs")
    if any(count != len(jobs) for count in marks):
        raise PolicyFailed("queue", policy, over, f"{' and '.join(map(str, marks))} marks for {len(jobs)} jobs")
    if unordered:
        raise PolicyFailed("queue", policy, over, "a score that is no number")
    if not valid >= 0:
        raise PolicyFailed("queue", policy, over, f"an order that is valid for {valid} s")
    return order


def teach(policy: QueuePolicy, life: Life) -> None:
    """Tell a queue policy of a job that is done, if it learns.

    Raises:
        PolicyFailed: it raised an error.
    """
    if not (learns := able(policy, Learns)):
        return
    shape, seconds = life.shape, life.attained_seconds
    gpu_seconds = seconds * shape.gpu_milli / 1000
    try:
        learns.learn(Ended(shape.gpu_milli, shape.cores, shape.replicas, seconds, gpu_seconds))
    except Exception as error:  # whatever a stranger's code does
        raise PolicyFailed("queue", policy, f"the end of {life.job.id}", f"{type(error).__name__}: {error}") from error


class AskedPlacement:
    """A placement policy that remembers its last answer; `refusal` is None where that was an offer."""

    api_version = 1

    def __init__(self, policy: PlacementPolicy) -> None:
        self.name = policy.name
        self.refusal: Refusal | None = None
        self._policy = policy
        self._discerning, self._sees, self._heeds = able(policy, Discerns), able(policy, Sees), able(policy, Heeds)
        self._rearranges, self._reclaims = able(policy, Rearranges), able(policy, Reclaims)
        self.discerns = self._discerning is not None

    def alike(self, gang: Gang) -> Hashable:
        """Ask what gangs are alike in; their needs, for a policy that does not discern."""
        return self._discerning.alike(gang) if self._discerning else needs(gang)

    def alike_seconds(self, gang: Gang) -> float:
        """Ask for how long that stays so while a gang waits."""
        return self._discerning.alike_seconds(gang) if self._discerning else math.inf

    def see(self, scene: Scene) -> None:
        """Show how things stand, to a policy that looks."""
        if self._sees:
            self._sees.see(scene)

    def bears(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        """Ask whether all on some nodes can be beside each other; a policy to which that does not matter is content."""
        return self._heeds is None or self._heeds.bears(nodes, ledger)

    def rearrange(
        self, gang: Gang, refusal: Refusal, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]
    ) -> Rearrangement | None:
        """Ask a policy that moves jobs.

        Raises:
            PolicyFailed: it raised an error.
        """
        if not self._rearranges:
            return None
        try:
            found = self._rearranges.rearrange(gang, refusal, ledger, rng, fixed)
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error
        if found:
            self.refusal = None
        return found

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        """Ask a policy that lends whether a gang borrows.

        Raises:
            PolicyFailed: it raised an error.
        """
        if not self._reclaims:
            return False
        try:
            return bool(self._reclaims.lends(gang, offer, ledger))
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        """Ask a policy that lends to take back.

        Raises:
            PolicyFailed: it raised an error.
        """
        if not self._reclaims:
            return None
        try:
            found = self._reclaims.reclaim(gang, ledger, rng, fixed)
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error
        if found:
            self.refusal = None
        return found

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Ask the policy.

        Raises:
            PolicyFailed: it raised an error, or offered what there is not.
        """
        try:
            answer = place_in_one(self._policy, gang, ledger, rng)
            self.refusal = answer if isinstance(answer, Refusal) else None
            wrong = (
                [] if isinstance(answer, Refusal) else [share for share in answer if not _exists(share, gang, ledger)]
            )
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed("placement", self, gang.job_id, f"{type(error).__name__}: {error}") from error
        if wrong:
            raise PolicyFailed("placement", self, gang.job_id, f"it offered what there is not: {wrong[0]}")
        return answer


def _exists(share: Share, gang: Gang, ledger: Ledger) -> bool:
    """Tell whether the node and the part that an offer names are there."""
    return 0 <= share.node < len(ledger) and 0 <= share.part < len(gang.parts)
