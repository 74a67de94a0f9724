"""Who holds what at one moment of a future that is played through, for policies and reservations that look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.estimate import as_of
from cotenant.core.model.gang import Gang
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.cluster_view import Resident, Scene, Stay
from cotenant.core.prediction.remaining_time import Rest
from cotenant.core.scheduling.reservations import NO_RESERVING, Reserving


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds something, and for how long yet.

    `resident` is what policies see of it; without that nothing is known of it but what it holds, and nobody moves it.
    `array` is the one that it belongs to, where that has a limit.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    rest: Rest
    tenant: str = ""
    resident: Resident | None = None
    array: str = ""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job that waits, and how long it will run.

    `array` is the one that it belongs to, where at most `running_max` of its jobs may hold resources at once.
    """

    gang: Gang
    run: Rest
    array: str = ""
    running_max: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """How things stand: what the holders have is taken on the ledger; waiters are in the order of the queue.

    `reserving` says who gets a reservation. `stoppable` names holders that may be stopped for others, those first that
    go first, with how many of the waiters come before each. `now` is on the clock of what policies see.
    """

    ledger: Ledger
    holders: Sequence[Holder]
    waiters: Sequence[Waiter]
    strict: bool = False
    headroom: Headroom = field(default_factory=lambda: Headroom(()))
    reserving: Reserving = NO_RESERVING
    stoppable: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0


class Cast(Scene):
    """The holders of one future, as a scene: `played` seconds of it have passed, and `now` is the policies' time."""

    def __init__(self, begins: float) -> None:
        self.played, self.now = 0.0, begins
        self._begins = begins
        self._there: dict[str, tuple[Holder, float]] = {}  # with when what is estimated of it was told
        self._stays: dict[str, Stay] = {}
        self._by_node: dict[int, dict[str, None]] = {}

    def turn(self, played: float) -> None:
        """Let it be later."""
        self.played, self.now = played, self._begins + played

    def enter(self, holder: Holder, told: float | None = None) -> None:
        """A job holds something from now on; what is estimated of it was `told` then, or is now."""
        self._there[holder.job_id] = holder, self.played if told is None else told
        seen = holder.resident
        self._stays[holder.job_id] = (
            Stay(seen.gang.gpu_milli, holder.holdings, seen.since_seconds, seen.reclaimable)
            if seen
            else Stay(0, holder.holdings, self._begins)
        )
        for holding in holder.holdings:
            self._by_node.setdefault(holding.node, {})[holder.job_id] = None

    def leave(self, job_id: str) -> tuple[Holder, float]:
        """It holds nothing any more; gives what it was, and when what is estimated of it was told."""
        holder, told = self._there.pop(job_id)
        del self._stays[job_id]
        for node in {holding.node for holding in holder.holdings}:
            del self._by_node[node][job_id]
        return holder, told

    def get(self, job_id: str) -> Holder | None:
        """Give a holder; None where it holds nothing."""
        found = self._there.get(job_id)
        return found[0] if found else None

    def residents(self) -> Mapping[str, Resident]:
        """Give all that hold something, by id."""
        return {job_id: self.resident(job_id) for job_id in self._there}

    def on(self, node: int) -> Sequence[Resident]:
        """Give those on a node."""
        return [self.resident(job_id) for job_id in self._by_node.get(node, ())]

    def stays(self) -> Mapping[str, Stay]:
        """Say of all what they hold."""
        return self._stays

    def resident(self, job_id: str) -> Resident:
        """Give one of them."""
        holder, told = self._there[job_id]
        if holder.resident is None:
            return Resident(Gang(job_id, ()), holder.holdings, self._begins, preemptible=False)
        gang = holder.resident.gang
        if gang.estimate.predictable and self.played > told:
            gang = replace(gang, estimate=as_of(gang.estimate, self.played - told))
        return replace(holder.resident, gang=gang, holdings=holder.holdings)
