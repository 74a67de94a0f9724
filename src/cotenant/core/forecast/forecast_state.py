"""Which jobs hold what at one moment of a forecast, for policies and reservations that need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.estimate import as_of
from cotenant.core.model.gang import Gang
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.cluster_view import ClusterView, Occupancy, RunningJob
from cotenant.core.prediction.remaining_time import RemainingTime
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, ReservationRules


@dataclass(frozen=True, slots=True)
class RunningEntry:
    """A job that holds resources, and its remaining time.

    `running_job` is what policies see of it; without that, only its holdings are known, and it is never moved. `array`
    is the array that it belongs to, if that has a limit.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    rest: RemainingTime
    tenant: str = ""
    running_job: RunningJob | None = None
    array: str = ""


@dataclass(frozen=True, slots=True)
class WaitingEntry:
    """A waiting job, and its expected run time.

    `array` is the array that it belongs to, if at most `running_max` of the array's jobs may hold resources at once.
    """

    gang: Gang
    run: RemainingTime
    array: str = ""
    running_max: int = 0


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The state a forecast starts from: what `holders` have is taken on the ledger; `waiters` are in the queue's order.

    `reserving` says which gangs get a reservation. `stoppable` names holders that may be stopped for others, first to
    go first, with the number of waiters before each. `now` is on the clock of what policies see.
    """

    ledger: Ledger
    holders: Sequence[RunningEntry]
    waiters: Sequence[WaitingEntry]
    strict: bool = False
    headroom: Headroom = field(default_factory=lambda: Headroom(()))
    reserving: ReservationRules = NO_RESERVATIONS
    stoppable: Mapping[str, int] = field(default_factory=dict)
    now: float = 0.0


class ForecastState(ClusterView):
    """The cluster view of one forecast run: `played` seconds of it have passed, and `now` is the policies' time."""

    def __init__(self, begins: float) -> None:
        self.played, self.now = 0.0, begins
        self._begins = begins
        self._there: dict[str, tuple[RunningEntry, float]] = {}  # with the time of its estimate
        self._stays: dict[str, Occupancy] = {}
        self._by_node: dict[int, dict[str, None]] = {}

    def advance_to(self, played: float) -> None:
        """Advance the time."""
        self.played, self.now = played, self._begins + played

    def enter(self, holder: RunningEntry, estimated_at: float | None = None) -> None:
        """Add a job that holds resources from now on; its estimate is of the time `estimated_at`, or of now."""
        self._there[holder.job_id] = holder, self.played if estimated_at is None else estimated_at
        seen = holder.running_job
        self._stays[holder.job_id] = (
            Occupancy(seen.gang.gpu_milli, holder.holdings, seen.since_seconds, seen.reclaimable)
            if seen
            else Occupancy(0, holder.holdings, self._begins)
        )
        for holding in holder.holdings:
            self._by_node.setdefault(holding.node, {})[holder.job_id] = None

    def leave(self, job_id: str) -> tuple[RunningEntry, float]:
        """Remove a job; returns its entry, and the time of its estimate."""
        holder, estimated_at = self._there.pop(job_id)
        del self._stays[job_id]
        for node in {holding.node for holding in holder.holdings}:
            del self._by_node[node][job_id]
        return holder, estimated_at

    def get(self, job_id: str) -> RunningEntry | None:
        """Return a job's entry; None if it holds nothing."""
        found = self._there.get(job_id)
        return found[0] if found else None

    def running_jobs(self) -> Mapping[str, RunningJob]:
        """Return all jobs that hold resources, by id."""
        return {job_id: self.running_job(job_id) for job_id in self._there}

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        """Return the jobs on a node."""
        return [self.running_job(job_id) for job_id in self._by_node.get(node, ())]

    def occupancies(self) -> Mapping[str, Occupancy]:
        """Return the occupancy of each job."""
        return self._stays

    def running_job(self, job_id: str) -> RunningJob:
        """Return one of them."""
        holder, estimated_at = self._there[job_id]
        if holder.running_job is None:
            return RunningJob(Gang(job_id, ()), holder.holdings, self._begins, preemptible=False)
        gang = holder.running_job.gang
        if gang.estimate.predictable and self.played > estimated_at:
            gang = replace(gang, estimate=as_of(gang.estimate, self.played - estimated_at))
        return replace(holder.running_job, gang=gang, holdings=holder.holdings)
