"""Places that are kept for a gang and for the jobs that move for its sake, until those who are there have stopped.

Theory of operation. A plan that moves jobs cannot be carried out at once: the movers have to stop first. Until then
their new places, and the place that they leave, are promised by job and attempt: later plans count them as taken, and a
job that has a promise and asks for a place is given that one, as soon as it is free. A promise is a memory and no
record: it ends when it is kept, when its place is gone, when its job has become something else, and in any case at a
fixed time, so that nothing stays reserved for a job that never asks. Whoever loses a promise, as all do when placement
is started anew, asks like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.placement.gang_allocation import hold_all
from cotenant.core.scheduling.cycle import Start
from cotenant.services.placement.cluster.cluster_state import Cluster

KEPT_SECONDS = 15.0  # after the longest grace of those who stop


@dataclass(frozen=True, slots=True)
class Promise:
    """The places that a job's next attempt will have; `nodes` are the ids of those of its holdings, in their order."""

    start: Start
    number: int
    nodes: tuple[str, ...]
    until_seconds: float  # on the monotonic clock

    def start_in(self, cluster: Cluster) -> Start | None:
        """Write the places with the nodes' numbers of now; None where a node takes no work, or the job lives on."""
        live = cluster.attempts.get(self.start.gang.job_id)
        if live and (live.key[1] >= self.number or live.state not in (AttemptState.STOPPING, AttemptState.STOPPED)):
            return None
        nodes = [cluster.nodes.get(node_id) for node_id in self.nodes]
        numbers = [node.number for node in nodes if node and node.open]
        if len(numbers) < len(nodes):
            return None
        offer = tuple(replace(share, node=node) for share, node in zip(self.start.offer, numbers, strict=True))
        holdings = tuple(replace(one, node=node) for one, node in zip(self.start.holdings, numbers, strict=True))
        return replace(self.start, offer=offer, holdings=holdings, needs_room=True)


class Promises:
    """All promises, by job."""

    def __init__(self) -> None:
        self._by_job: dict[str, Promise] = {}

    def __bool__(self) -> bool:
        return bool(self._by_job)

    def __iter__(self) -> Iterator[Promise]:
        return iter(self._by_job.values())

    def make(self, cluster: Cluster, start: Start, number: int, until_seconds: float) -> None:
        """Promise a job's next attempt its places."""
        nodes = tuple(cluster.node_at(holding.node).id for holding in start.holdings)
        self._by_job[start.gang.job_id] = Promise(start, number, nodes, until_seconds)

    def drop(self, job_id: str) -> None:
        """Keep the place no longer."""
        self._by_job.pop(job_id, None)

    def standing(self, cluster: Cluster, asking: Mapping[str, int], now: float) -> dict[str, Start]:
        """Give the places that are still kept, by job; of those who are `asking`, for the attempts that they ask for.

        A place that others were given as the nodes changed is kept no longer, nor is one whose time is over.
        """
        if not self._by_job:
            return {}
        kept: dict[str, Start] = {}
        ledger = cluster.ledger
        with ledger.undone():
            for holding in cluster.leaving():
                ledger.release(holding)
            for job_id, promise in self._by_job.items():
                if promise.until_seconds <= now or asking.get(job_id, promise.number) != promise.number:
                    continue
                start = promise.start_in(cluster)
                if start and hold_all(ledger, start.holdings):
                    kept[job_id] = start
        return kept

    def keep(self, job_ids: Mapping[str, Start]) -> bool:
        """Forget all others; True where there were any."""
        before = len(self._by_job)
        self._by_job = {job_id: promise for job_id, promise in self._by_job.items() if job_id in job_ids}
        return len(self._by_job) < before
