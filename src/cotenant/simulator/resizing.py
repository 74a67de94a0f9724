"""Resizing of running jobs' cores: queried from the allocator, rebalanced, and applied.

The allocator's decisions and the distribution of spare cores come from `cotenant.core.sizing.resize` and
`cotenant.core.sizing.core_rebalance`, as in the live mesh; this module decides when they are called, what was measured
in between, and applies the result. The ledger holds the jobs' firm cores. Lent cores are free on the ledger, so that a
starting job takes them back at the same instant.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.estimate import UNKNOWN, Candidate, Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_table import JobTable
from cotenant.core.model.tenancy import Headroom, Tenancy
from cotenant.core.prediction.job_class_memory import Key
from cotenant.core.scheduling.cycle import Start
from cotenant.core.sizing.core_rebalance import NO_LIMITS, CoreClaim, CoreGrant, rebalance_cores, room
from cotenant.core.sizing.rate_history import RateHistories, RateHistory, job_class_of
from cotenant.core.sizing.resize import (
    ResizableJob,
    Resizes,
    leading_role,
    next_look_seconds,
    node_share_of,
    resizable,
    resized,
    validated_cores,
)
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.prediction_arms import Arm, update_total
from cotenant.simulator.recording.events import EventLog, Place, places_of
from cotenant.simulator.traces import TraceJob

ROUNDING_SECONDS = 1e-6  # a window that lacks no more than this is complete


@dataclass(slots=True)
class Run:
    """A running job that may be resized. Cores are per replica of the leading role, whose replicas are `on` nodes.

    `firm` are its own cores, `lent` the borrowed ones, `wish` what it could use. `since` is when its cores or its rate
    last changed, `changes` counts these changes, `gap_seconds` is the time between two queries.
    """

    sim_job: SimulatedJob
    spec: JobSpec
    kind: Key
    lead: int
    shares: tuple[int, ...]
    cores: tuple[int, ...]  # by role, as it started
    offer: Offer  # where its replicas are, one share for each holding
    places: tuple[Place, ...]  # the same, as recorded
    on: Mapping[int, int]
    firm: int
    since: float
    counted_at: float
    rate: float
    gap_seconds: float
    estimate: Estimate
    lent: int = 0
    wish: int = 0
    reason: str = ""
    changes: int = 0
    windows: int = 0
    version: int = 0  # of the rate history when it started
    last_rate: float | None = None
    track: RateHistory = field(default_factory=RateHistory)

    @property
    def replicas(self) -> int:
        """Replicas of the leading role."""
        return sum(self.on.values())

    def by_role(self, cores: int) -> tuple[int, ...]:
        """Return cores by role for this many cores per replica of the leading role."""
        return (*self.cores[: self.lead], cores, *self.cores[self.lead + 1 :])


@dataclass(slots=True)
class ResizeFigures:
    """Totals of resizing: number of changes, and core-seconds lent, slimmed, and beyond the classes' cores."""

    resizes: int = 0
    lent_core_seconds: float = 0.0
    slimmed_core_seconds: float = 0.0
    beyond_core_seconds: float = 0.0


class Resizing:
    """The running jobs that may be resized, and the next time one is due for a query."""

    def __init__(
        self,
        allocator: Resizes,
        ledger: Ledger,
        arm: Arm,
        world: World,
        tenancy: Tenancy,
        table: JobTable,
        moved: Callable[[SimulatedJob, int, float], None],
        event_log: EventLog | None = None,
    ) -> None:
        self.tracks = RateHistories()
        self.figures = ResizeFigures()
        self.freed = False  # cores were freed after the queries: a waiting job may fit now
        self._allocator, self._ledger, self._arm, self._world, self._event_log = (
            allocator,
            ledger,
            arm,
            world,
            event_log,
        )
        self._tenancy, self._table = tenancy, table
        self._moved = moved  # called with the change of a job's cores on the ledger
        self._gpu_types = sorted({shape.gpu_type for shape in ledger.shapes})
        self._estimates: dict[int, Estimate] = {}  # as given at submission
        self._runs: dict[int, Run] = {}  # by the job's sequence
        self._on: dict[int, dict[int, Run]] = {}  # by node and sequence
        self._touched: set[int] = set()
        self._stopped_since_news = 0  # runs stopped after something was learned
        self._sizing_state = (0, 0)
        self._due: list[tuple[float, int, int]] = []  # time, sequence, and the run's change counter

    def next_seconds(self) -> float:
        """Return when the next query is due."""
        while self._due and not self._current(self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def _current(self, due: tuple[float, int, int]) -> bool:
        run = self._runs.get(due[1])
        return run is not None and run.changes == due[2]

    def started(self, sim_job: SimulatedJob, start: Start, now: float) -> None:
        """Add a started run."""
        for share in start.offer:
            self._touched.add(share.node)
        spec = sim_job.job.spec()
        if not resizable(spec):
            return
        lead = leading_role(spec)
        shapes = {share.node: self._ledger.shapes[share.node] for share in start.offer}
        on: dict[int, int] = {}
        for share in start.offer:
            if share.part == lead:
                on[share.node] = on.get(share.node, 0) + share.replicas
        cores = tuple(part.demand.cores for part in start.gang.parts)
        run = Run(
            sim_job,
            spec,
            job_class_of(spec, shapes[next(iter(on))].gpu_type),
            lead,
            node_share_of(spec, start.offer, shapes),
            cores,
            start.offer,
            tuple(places_of(start)),
            on,
            firm=cores[lead],
            wish=cores[lead],
            reason=start.gang.sizing,
            since=now,
            counted_at=now,
            rate=sim_job.rate,
            gap_seconds=self._window_seconds,
            estimate=self._estimates.get(sim_job.sequence, UNKNOWN),
            version=self.tracks.version,
        )
        self._runs[sim_job.sequence] = run
        for node in on:
            self._on.setdefault(node, {})[sim_job.sequence] = run
        self._changed(run, now)

    @property
    def _window_seconds(self) -> float:
        return self._allocator.warm_up_seconds + self._allocator.measure_seconds

    def _changed(self, run: Run, now: float) -> None:
        """Restart the measurement of a run."""
        run.since, run.rate = now, run.sim_job.rate
        run.gap_seconds = self._window_seconds
        run.changes += 1
        heapq.heappush(self._due, (now + self._window_seconds, run.sim_job.sequence, run.changes))

    def released(self, sim_job: SimulatedJob, now: float) -> int:
        """Remove a run; returns how many more cores it holds on the ledger than its class."""
        self._touched.update(holding.node for holding in sim_job.holdings)
        run = self._runs.pop(sim_job.sequence, None)
        if run is None:
            return 0
        self._stopped_since_news += self.tracks.version > run.version  # its next run may be sized differently
        self._count(run, now)
        for node in run.on:
            del self._on[node][sim_job.sequence]
        return (run.firm - run.cores[run.lead]) * run.replicas

    def _count(self, run: Run, now: float) -> None:
        """Add up what it held since the last count."""
        seconds, figures = (now - run.counted_at) * run.replicas, self.figures
        figures.lent_core_seconds += seconds * run.lent
        figures.slimmed_core_seconds += seconds * max(0, run.shares[run.lead] - run.firm)
        figures.beyond_core_seconds += seconds * (run.firm + run.lent - run.cores[run.lead])
        run.counted_at = now

    def counted(self, now: float) -> ResizeFigures:
        """Return the totals of all runs, including running ones."""
        for run in self._runs.values():
            self._count(run, now)
        return self.figures

    def measure(self, now: float) -> None:
        """Record the rates of runs whose windows are complete, and mark them for a query."""
        while self.next_seconds() <= now:
            _, sequence, _ = heapq.heappop(self._due)
            run = self._runs[sequence]
            self._measure(run, now)
            self._touched.update(run.on)

    def _measure(self, run: Run, now: float) -> None:
        run.windows += 1
        run.last_rate = rate = self._world.measured(run.sim_job, run.windows)
        seconds, held = self._allocator.measure_seconds, run.firm + run.lent
        if not run.track.add(held, rate, seconds, contended=self._world.disturbed(run.sim_job)):
            self._schedule_next_window(run, now)
            return
        if not run.track.drifted:
            self.tracks.add(run.kind, held, rate)
        request = run.spec.roles[run.lead].request
        kind = Candidate(held, request.gpu_milli, len(run.on), run.kind[-1])
        self._arm.window(run.sim_job.job, kind, rate, seconds, now)
        self._schedule_next_window(run, now)

    def _schedule_next_window(self, run: Run, now: float) -> None:
        """Schedule the next window, later and later as long as nothing changes."""
        run.gap_seconds = next_look_seconds(run.gap_seconds, self._allocator.interval_seconds)
        run.changes += 1
        heapq.heappush(self._due, (now + run.gap_seconds, run.sim_job.sequence, run.changes))

    def rebalance(self, now: float) -> Iterator[tuple[SimulatedJob, float]]:
        """Query the runs affected by changes and distribute spare cores; yields jobs whose end has changed, and when.

        Raises:
            PolicyFailed: the allocator raised an error, or returned an invalid answer.
        """
        runs, free = self._affected_runs()
        self._touched.clear()
        self.freed = False
        if not runs:
            return
        parties = [self._ask(run, free, now) for run in runs]
        hands = rebalance_cores(parties, free, self._allocator.weight, self._headroom(now))
        for run, hand in zip(runs, hands, strict=True):
            before = run.firm + run.lent
            self._commit(run, hand, now)
            if hand.cores != before:
                yield run.sim_job, self._apply(run, now)

    def _headroom(self, now: float) -> Headroom:
        """Return the headroom of tenants with limits, by firm cores."""
        if not self._tenancy.limits:
            return NO_LIMITS
        jobs = self._table.jobs(now)
        return self._tenancy.headroom(jobs, jobs.running)

    def _affected_runs(self) -> tuple[list[Run], dict[int, int]]:
        """Return all runs on touched nodes, and the cores without a firm owner on the nodes of these runs.

        Cores lent to other runs on a gang's further nodes stay lent.
        """
        runs = {sequence: run for node in self._touched for sequence, run in self._on.get(node, {}).items()}
        nodes = {node for run in runs.values() for node in run.on}
        free = {node: int(self._ledger.free_cores[node]) for node in nodes}
        for node in nodes - self._touched:
            free[node] -= sum(
                run.lent * run.on[node] for sequence, run in self._on[node].items() if sequence not in runs
            )
        return [runs[sequence] for sequence in sorted(runs)], free

    def _lent(self, run: Run) -> tuple[int, ...]:
        return tuple(run.lent if number == run.lead else 0 for number in range(len(run.cores)))

    def _ask(self, run: Run, free: Mapping[int, int], now: float) -> CoreClaim:
        sim_job = run.sim_job
        attained = sim_job.attained_seconds + now - sim_job.running_since
        run.estimate = self._arm.updated_estimate(
            sim_job.sequence, sim_job.job, self._estimates.get(sim_job.sequence, UNKNOWN), attained
        )
        spare = max(0, room(free, run.on) - run.lent)
        running = ResizableJob(
            sim_job.job.id,
            run.spec,
            run.estimate,
            run.by_role(run.firm + run.lent),
            tuple(spare if number == run.lead else 0 for number in range(len(run.cores))),
            run.track.points(),
            run.last_rate,
            now - run.since + ROUNDING_SECONDS,
            run.shares,
            self._lent(run),
            () if run.track.drifted else self.tracks.points(run.kind),
        )
        try:
            wish = self._allocator.resize(running, now)
            validated_cores(running, wish)
        except Exception as error:  # third-party code may raise anything
            raise PolicyFailed(
                "allocation", self._allocator, sim_job.job.id, f"{type(error).__name__}: {error}"
            ) from error
        if wish is not None:
            run.wish, run.reason = wish.cores[run.lead], wish.reason
        return CoreClaim(running, run.wish, run.on)

    def _commit(self, run: Run, hand: CoreGrant, now: float) -> None:
        """Apply the distribution to a run and its firm cores to the ledger."""
        if hand == CoreGrant(run.firm, run.lent):
            return
        self._count(run, now)
        sim_job, more = run.sim_job, hand.firm - run.firm
        run.firm, run.lent = hand.firm, hand.lent
        if more:
            holdings = resized(run.offer, sim_job.holdings, run.by_role(hand.firm))
            for old, new in zip(sim_job.holdings, holdings, strict=True):
                self._ledger.release(old)
                self._ledger.hold(new)
            sim_job.holdings = holdings
            self.freed |= more < 0
            self._moved(sim_job, more * run.replicas, now)

    def _apply(self, run: Run, now: float) -> float:
        """Continue a run with other cores; returns its new end."""
        sim_job = run.sim_job
        self.figures.resizes += 1
        each = run.firm + run.lent
        rate = self._world.resized(sim_job, resized(run.offer, sim_job.holdings, run.by_role(each)))
        finish = sim_job.retime(now, rate)
        update_total(self._arm, sim_job, self._table, now)
        self._changed(run, now)
        if self._event_log:
            held = [each * share.replicas if share.part == run.lead else None for share in run.offer]
            places = tuple(
                place if cores is None else replace(place, cores=cores)
                for place, cores in zip(run.places, held, strict=True)
            )
            self._event_log.resized(sim_job, places, run.lent * run.replicas, run.reason, now)
        return finish

    def rate_changed(self, sim_job: SimulatedJob, now: float) -> None:
        """Restart the measurement of a run whose rate its neighbors have changed."""
        if (run := self._runs.get(sim_job.sequence)) and run.rate != sim_job.rate:
            self._changed(run, now)

    def sizing_changed(self) -> bool:
        """Return whether waiting jobs may be sized differently than at the last call."""
        before, self._sizing_state = self._sizing_state, (self.tracks.version, self._stopped_since_news)
        return self._sizing_state != before

    def reestimated(self, sim_job: SimulatedJob) -> Estimate:
        """Return a waiting job's estimate, updated by what is now known of similar jobs."""
        return self.informed(sim_job.sequence, sim_job.job, self._estimates.get(sim_job.sequence, UNKNOWN))

    def informed(self, sequence: int, job: TraceJob, estimate: Estimate) -> Estimate:
        """Return a submitted job's estimate, updated by what is known of similar jobs."""
        self._estimates[sequence] = estimate
        spec = job.spec()
        return self.tracks.informed(spec, estimate, self._gpu_types) if resizable(spec) else estimate
