"""The tentative cluster: what would be free, run and count if the decisions of a cycle so far were carried out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.gang_allocation import Victim, cores_of, gpu_milli_of, hold_all, release_all, take
from cotenant.core.policy.cluster_view import ChecksNeighbors, ClusterView, CycleView


class TentativeCluster:
    """The ledger, the view that policies see, and what limited tenants hold, changed together.

    Invariant: the view shows a job if and only if what it holds is taken on the ledger and counted for its tenant.
    `displaced` names the jobs that ran when the cycle began and do not hold what they held then.
    """

    def __init__(
        self, ledger: Ledger, headroom: Headroom, cluster_view: ClusterView, checks_neighbors: ChecksNeighbors | None
    ) -> None:
        self.ledger, self.headroom, self.view = ledger, headroom, CycleView(cluster_view)
        self.displaced: set[str] = set()
        self._checks_neighbors = checks_neighbors

    def displace(self, job_id: str, tenant: str, holdings: tuple[Holding, ...]) -> None:
        """Remove a job that would stop."""
        self.displaced.add(job_id)
        release_all(self.ledger, holdings)
        self.view.remove_job(job_id)
        self._count(tenant, holdings, -1)

    def put_back(self, victim: Victim) -> None:
        """Undo the displacement of a victim; nothing has happened since.

        Raises:
            Overcommitted: something has, and took what it held.
        """
        for holding in victim.holdings:
            self.ledger.hold(holding)
        self._keep(victim)

    def restore(self, victim: Victim) -> bool:
        """Let a displaced victim stay, if nothing stands in its way; returns whether it stays.

        What it held must be free, its tenant may hold that, and its neighbors tolerate it.
        """
        milli, cores = gpu_milli_of(victim.holdings), cores_of(victim.holdings)
        if not self.headroom.allows(victim.tenant, milli, cores) or not hold_all(self.ledger, victim.holdings):
            return False
        self.view.restore_job(victim.job_id)
        if self._checks_neighbors and not self._checks_neighbors.can_coexist(
            [held.node for held in victim.holdings], self.ledger
        ):
            release_all(self.ledger, victim.holdings)
            self.view.remove_job(victim.job_id)
            return False
        self._keep(victim)
        return True

    def _keep(self, victim: Victim) -> None:
        self.view.restore_job(victim.job_id)
        self._count(victim.tenant, victim.holdings, +1)
        self.displaced.discard(victim.job_id)

    def place(self, gang: Gang, offer: Offer) -> tuple[Holding, ...]:
        """Add a gang that would start there; returns what it would hold.

        Raises:
            Overcommitted: the offer includes resources that are not free.
            InvalidOffer: the offer does not have exactly one place for each replica.
        """
        holdings = take(self.ledger, gang, offer)
        self.headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
        self.view.add_job(gang, holdings)
        return holdings

    @contextmanager
    def without(self, victims: Iterable[Victim]) -> Iterator[None]:
        """Count what victims hold as free for a while; the view still shows them."""
        with self.ledger.rolled_back():
            release_all(self.ledger, (holding for victim in victims for holding in victim.holdings))
            yield

    def _count(self, tenant: str, holdings: tuple[Holding, ...], sign: int) -> None:
        if self.headroom:
            self.headroom.take(tenant, sign * gpu_milli_of(holdings), sign * cores_of(holdings))
