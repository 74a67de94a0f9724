"""Tentative reservations for a gang and for the jobs that migrate to make room for it, until the stops are done.

Theory of operation. A plan that migrates jobs cannot be carried out at once: the jobs have to stop first. Until then
their new places, and the place that they leave, are reserved by job and attempt: later plans count them as taken, and a
job with a reservation gets its reserved place as soon as it is free. A reservation is kept in memory only. It ends when
it is used, when its place is gone, when its job has another attempt, and in any case at a fixed time, so that nothing
stays reserved for a job that never asks. A job that loses its reservation, as all do when placement restarts, competes
like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.placement.gang_allocation import hold_all
from cotenant.core.scheduling.cycle import Start
from cotenant.services.placement.cluster.cluster_state import Cluster

KEPT_SECONDS = 15.0  # after the longest grace of the stopping jobs


@dataclass(frozen=True, slots=True)
class TentativeReservation:
    """The start reserved for a job's next attempt; `nodes` are the node ids of its holdings, in order."""

    start: Start
    number: int
    nodes: tuple[str, ...]
    until_seconds: float  # on the monotonic clock

    def start_in(self, cluster: Cluster) -> Start | None:
        """Return the start with the nodes' present numbers.

        None if a node is closed, or if the attempt before it ended otherwise than by the stop: it may have succeeded.
        """
        job_id = self.start.gang.job_id
        live, forgotten = cluster.attempts.get(job_id), cluster.forgotten_attempts.get(job_id)
        if live and (live.key[1] >= self.number or live.state not in (AttemptState.STOPPING, AttemptState.STOPPED)):
            return None
        if not live and forgotten and (forgotten.number >= self.number or forgotten.state is not AttemptState.STOPPED):
            return None
        nodes = [cluster.nodes.get(node_id) for node_id in self.nodes]
        numbers = [node.number for node in nodes if node and node.open]
        if len(numbers) < len(nodes):
            return None
        offer = tuple(replace(share, node=node) for share, node in zip(self.start.offer, numbers, strict=True))
        holdings = tuple(replace(one, node=node) for one, node in zip(self.start.holdings, numbers, strict=True))
        return replace(self.start, offer=offer, holdings=holdings, needs_room=True)


class TentativeReservations:
    """All tentative reservations, by job."""

    def __init__(self) -> None:
        self._by_job: dict[str, TentativeReservation] = {}

    def __bool__(self) -> bool:
        return bool(self._by_job)

    def __iter__(self) -> Iterator[TentativeReservation]:
        return iter(self._by_job.values())

    def make(self, cluster: Cluster, start: Start, number: int, until_seconds: float) -> None:
        """Reserve a start for a job's next attempt."""
        nodes = tuple(cluster.node_at(holding.node).id for holding in start.holdings)
        self._by_job[start.gang.job_id] = TentativeReservation(start, number, nodes, until_seconds)

    def drop(self, job_id: str) -> None:
        """Drop a job's reservation."""
        self._by_job.pop(job_id, None)

    def valid(self, cluster: Cluster, requested: Mapping[str, int], now: float) -> dict[str, Start]:
        """Return the reserved starts that are still valid, by job; `requested` has candidates' attempt numbers by job.

        A reservation is invalid if its time is over or its place was taken after nodes changed.
        """
        if not self._by_job:
            return {}
        kept: dict[str, Start] = {}
        ledger = cluster.ledger
        with ledger.rolled_back():
            for holding in cluster.leaving():
                ledger.release(holding)
            for job_id, reservation in self._by_job.items():
                if reservation.until_seconds <= now or requested.get(job_id, reservation.number) != reservation.number:
                    continue
                start = reservation.start_in(cluster)
                if start and hold_all(ledger, start.holdings):
                    kept[job_id] = start
        return kept

    def retain(self, job_ids: Mapping[str, Start]) -> bool:
        """Drop all other reservations; return True if there were any."""
        before = len(self._by_job)
        self._by_job = {job_id: reservation for job_id, reservation in self._by_job.items() if job_id in job_ids}
        return len(self._by_job) < before
