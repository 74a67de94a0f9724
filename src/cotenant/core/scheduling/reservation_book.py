"""The reservations of a cycle: made for gangs that have waited long, and respected by the gangs after them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from cotenant.core.capacity.ledger import Holding, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement.gang_allocation import release_all
from cotenant.core.policy.cluster_view import ClusterView
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.earliest_start import Departure, departure_of, departures_of
from cotenant.core.scheduling.reservations import Reservation, ReservationRules, groups, relaxations, reserve
from cotenant.core.scheduling.tentative_cluster import TentativeCluster

RESERVABLE = frozenset({Code.CAPACITY, Code.FRAGMENTED, Code.QOS, Code.RESERVED})
Query = Callable[[Gang, Collection[str], Sequence[Reservation]], Offer | Refusal]  # without the named jobs


class ReservationBook:
    """The reservations made so far, at most `rules.most`, after at most `rules.tries` attempts.

    Invariant: a gang that starts takes nothing that is kept for a reservation that binds it. Those that do not bind it
    know that it will have left by then.
    """

    def __init__(self, rules: ReservationRules, cluster: TentativeCluster, initial_view: ClusterView) -> None:
        self.reservations: list[Reservation] = []
        self._rules, self._cluster, self._initial_view = rules, cluster, initial_view
        self._tries_left = rules.tries
        self._started: list[Departure] = []
        self._moved: list[Departure] = []

    def binding(self, gang: Gang) -> list[Reservation]:
        """Return the reservations that a gang must respect."""
        return [one for one in self.reservations if one.binds(gang)] if self.reservations else []

    @contextmanager
    def kept(self, reservations: Iterable[Reservation], gone: Collection[str] = ()) -> Iterator[None]:
        """Take what must stay free for some reservations for a while, when the jobs in `gone` have left."""
        ledger, held = self._cluster.ledger, list[Holding]()
        away = self._cluster.displaced.union(gone)
        for reservation in reservations:
            for holding in reservation.kept(ledger, away):
                ledger.hold(holding)
                held.append(holding)
        try:
            yield
        finally:
            release_all(ledger, held)

    def note_start(self, gang: Gang, holdings: tuple[Holding, ...]) -> None:
        """Note a gang that starts: it will have left before the reservations that do not bind it."""
        for reservation in self.reservations:
            if not reservation.binds(gang):
                nodes = {holding.node for holding in reservation.holdings}
                reservation.back |= groups([Departure(gang.job_id, holdings)], nodes)
        if self._rules:
            self._started.append(departure_of(gang.job_id, holdings, gang.estimate, 0.0))

    def note_move(self, gang: Gang, holdings: tuple[Holding, ...]) -> None:
        """Note a running job that will hold something else."""
        if self._rules:
            self._moved.append(departure_of(gang.job_id, holdings, gang.estimate, 0.0))

    def reserve(self, gang: Gang, refusal: Refusal, policy: PlacementPolicy, query: Query) -> Refusal:
        """Reserve places for a refused gang that has waited long, if that helps; returns the refusal to report.

        `query` asks for places after some jobs have left.
        """
        rule = self._rules
        useful = bool(rule) and refusal.code in RESERVABLE and rule.starves(gang)
        if not useful or len(self.reservations) >= rule.most or not self._tries_left:
            return refusal
        self._tries_left -= 1

        def ask(gang: Gang, gone: Collection[str]) -> Offer | None:
            offer = query(gang, gone, self.reservations)
            return None if isinstance(offer, Refusal) else offer

        ages = relaxations(gang, policy) if refusal.code is Code.FRAGMENTED else ()
        found = reserve(gang, self._cluster.ledger, ask, self._departures(), rule, ages)
        if found is None:
            return refusal
        self.reservations.append(found)
        return found.annotate(refusal)

    def _departures(self) -> list[Departure]:
        """Return the expected departures of jobs that run now or start in this cycle."""
        displaced = self._cluster.displaced
        staying = [one for one in departures_of(self._initial_view) if one.job_id not in displaced]
        return [*staying, *self._started, *self._moved]
