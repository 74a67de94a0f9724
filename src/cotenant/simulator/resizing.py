"""Cores of running jobs that change: asked of the allocator, handed out, and given.

What an allocator decides and who gets the spare cores is decided by `core.sizing.resizing` and `core.sizing.dealing`,
as in the live mesh; here is when they are asked, what was measured meanwhile, and what comes of it. The ledger knows
what jobs hold for good. What is lent beyond that is free for it, so that whoever starts takes it back in the same
instant.
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
from cotenant.core.sizing.core_rebalance import NO_LIMITS, Hand, Party, deal, room
from cotenant.core.sizing.rate_history import Track, Tracks, kind_of
from cotenant.core.sizing.resize import (
    Resizes,
    Running,
    agreed,
    later_seconds,
    leading_role,
    node_share_of,
    resizable,
    resized,
)
from cotenant.simulator.job import Life
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.prediction_arms import Arm
from cotenant.simulator.recording.events import Place, Story, places_of
from cotenant.simulator.traces import TraceJob

ROUNDING_SECONDS = 1e-6  # a window that lacks no more than that is complete


@dataclass(slots=True)
class Run:
    """A running job whose cores may change. Cores are per replica of the leading role, which has `on` each node some.

    `firm` are its own, `lent` what it has beside them, `wish` what it could make use of. `since` is when its cores or
    its rate last changed, `turn` counts these changes, `gap_seconds` lie between two questions.
    """

    life: Life
    spec: JobSpec
    kind: Key
    lead: int
    shares: tuple[int, ...]
    cores: tuple[int, ...]  # by role, as it started
    offer: Offer  # where its replicas are, one share for each holding
    places: tuple[Place, ...]  # the same, in a recording's words
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
    turn: int = 0
    windows: int = 0
    version: int = 0  # of what was known when it started
    last_rate: float | None = None
    track: Track = field(default_factory=Track)

    @property
    def replicas(self) -> int:
        """Replicas of the leading role."""
        return sum(self.on.values())

    def by_role(self, cores: int) -> tuple[int, ...]:
        """Give cores by role where each replica of the leading role has so many."""
        return (*self.cores[: self.lead], cores, *self.cores[self.lead + 1 :])


@dataclass(slots=True)
class Figures:
    """What came of resizing: how often cores changed, and core-seconds lent, slimmed, and held beyond the shapes'."""

    resizes: int = 0
    lent_core_seconds: float = 0.0
    slimmed_core_seconds: float = 0.0
    beyond_core_seconds: float = 0.0


class Resizing:
    """Who runs and may change its cores, and the next moment at which anybody is asked."""

    def __init__(
        self,
        allocator: Resizes,
        ledger: Ledger,
        arm: Arm,
        world: World,
        tenancy: Tenancy,
        table: JobTable,
        moved: Callable[[Life, int], None],
        story: Story | None = None,
    ) -> None:
        self.tracks = Tracks()
        self.figures = Figures()
        self.freed = False  # cores were freed after everybody was asked: somebody might start
        self._allocator, self._ledger, self._arm, self._world, self._story = allocator, ledger, arm, world, story
        self._tenancy, self._table = tenancy, table
        self._moved = moved  # hears that a job holds so many cores more on the ledger
        self._gpu_types = sorted({shape.gpu_type for shape in ledger.shapes})
        self._estimates: dict[int, Estimate] = {}  # as they were given at submission
        self._runs: dict[int, Run] = {}  # by the job's sequence
        self._on: dict[int, dict[int, Run]] = {}  # by node and sequence
        self._touched: set[int] = set()
        self._came_back = 0  # runs during which something became known
        self._sized_by = (0, 0)
        self._due: list[tuple[float, int, int]] = []  # when, who, and as of which turn

    def next_seconds(self) -> float:
        """Tell when somebody is to be asked next."""
        while self._due and not self._current(self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def _current(self, due: tuple[float, int, int]) -> bool:
        run = self._runs.get(due[1])
        return run is not None and run.turn == due[2]

    def started(self, life: Life, start: Start, now: float) -> None:
        """Take a run in."""
        for share in start.offer:
            self._touched.add(share.node)
        spec = life.job.spec()
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
            life,
            spec,
            kind_of(spec, shapes[next(iter(on))].gpu_type),
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
            rate=life.rate,
            gap_seconds=self._window_seconds,
            estimate=self._estimates.get(life.sequence, UNKNOWN),
            version=self.tracks.version,
        )
        self._runs[life.sequence] = run
        for node in on:
            self._on.setdefault(node, {})[life.sequence] = run
        self._changed(run, now)

    @property
    def _window_seconds(self) -> float:
        return self._allocator.warm_up_seconds + self._allocator.measure_seconds

    def _changed(self, run: Run, now: float) -> None:
        """Measure anew from now on."""
        run.since, run.rate = now, run.life.rate
        run.gap_seconds = self._window_seconds
        run.turn += 1
        heapq.heappush(self._due, (now + self._window_seconds, run.life.sequence, run.turn))

    def released(self, life: Life, now: float) -> int:
        """Let a run go; returns how many cores more than its shape's it holds on the ledger."""
        self._touched.update(holding.node for holding in life.holdings)
        run = self._runs.pop(life.sequence, None)
        if run is None:
            return 0
        self._came_back += self.tracks.version > run.version  # it might be sized otherwise, if it runs again
        self._count(run, now)
        for node in run.on:
            del self._on[node][life.sequence]
        return (run.firm - run.cores[run.lead]) * run.replicas

    def _count(self, run: Run, now: float) -> None:
        """Add up what it held since that was last done."""
        seconds, figures = (now - run.counted_at) * run.replicas, self.figures
        figures.lent_core_seconds += seconds * run.lent
        figures.slimmed_core_seconds += seconds * max(0, run.shares[run.lead] - run.firm)
        figures.beyond_core_seconds += seconds * (run.firm + run.lent - run.cores[run.lead])
        run.counted_at = now

    def counted(self, now: float) -> Figures:
        """Give the figures of all runs, those under way too."""
        for run in self._runs.values():
            self._count(run, now)
        return self.figures

    def measure(self, now: float) -> None:
        """Note the rates of those whose windows are complete, and have them asked."""
        while self.next_seconds() <= now:
            _, sequence, _ = heapq.heappop(self._due)
            run = self._runs[sequence]
            self._measure(run, now)
            self._touched.update(run.on)

    def _measure(self, run: Run, now: float) -> None:
        run.windows += 1
        run.last_rate = rate = self._world.measured(run.life, run.windows)
        seconds, held = self._allocator.measure_seconds, run.firm + run.lent
        if not run.track.add(held, rate, seconds, contended=self._world.disturbed(run.life)):
            self._look_again(run, now)
            return
        if not run.track.drifted:
            self.tracks.add(run.kind, held, rate)
        request = run.spec.roles[run.lead].request
        kind = Candidate(held, request.gpu_milli, len(run.on), run.kind[-1])
        self._arm.window(run.life.job, kind, rate, seconds, now)
        self._look_again(run, now)

    def _look_again(self, run: Run, now: float) -> None:
        """While nothing changes, look ever less often."""
        run.gap_seconds = later_seconds(run.gap_seconds, self._allocator.interval_seconds)
        run.turn += 1
        heapq.heappush(self._due, (now + run.gap_seconds, run.life.sequence, run.turn))

    def settle(self, now: float) -> Iterator[tuple[Life, float]]:
        """Ask those whose neighbours came or went, hand out what is spare; gives who ends at another time, and when.

        Raises:
            PolicyFailed: the allocator raised an error, or answered nonsense.
        """
        runs, free = self._concerned()
        self._touched.clear()
        self.freed = False
        if not runs:
            return
        parties = [self._ask(run, free, now) for run in runs]
        hands = deal(parties, free, self._allocator.weight, self._headroom(now))
        for run, hand in zip(runs, hands, strict=True):
            before = run.firm + run.lent
            self._take(run, hand, now)
            if hand.cores != before:
                yield run.life, self._apply(run, now)

    def _headroom(self, now: float) -> Headroom:
        """Count what tenants with limits hold for good."""
        if not self._tenancy.limits:
            return NO_LIMITS
        jobs = self._table.jobs(now)
        return self._tenancy.headroom(jobs, jobs.running)

    def _concerned(self) -> tuple[list[Run], dict[int, int]]:
        """Find all runs on nodes that were touched, and what nobody has for good on the nodes of these runs.

        What is lent to others, of a gang's further nodes, stays theirs.
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

    def _ask(self, run: Run, free: Mapping[int, int], now: float) -> Party:
        life = run.life
        attained = life.attained_seconds + now - life.running_since
        run.estimate = self._arm.later(life.sequence, life.job, self._estimates.get(life.sequence, UNKNOWN), attained)
        spare = max(0, room(free, run.on) - run.lent)
        running = Running(
            life.job.id,
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
            agreed(running, wish)
        except Exception as error:  # whatever a stranger's code does
            raise PolicyFailed(
                "allocation", self._allocator, life.job.id, f"{type(error).__name__}: {error}"
            ) from error
        if wish is not None:
            run.wish, run.reason = wish.cores[run.lead], wish.reason
        return Party(running, run.wish, run.on)

    def _take(self, run: Run, hand: Hand, now: float) -> None:
        """Let a job have what was dealt to it; the ledger knows what it has for good."""
        if hand == Hand(run.firm, run.lent):
            return
        self._count(run, now)
        life, more = run.life, hand.firm - run.firm
        run.firm, run.lent = hand.firm, hand.lent
        if more:
            holdings = resized(run.offer, life.holdings, run.by_role(hand.firm))
            for old, new in zip(life.holdings, holdings, strict=True):
                self._ledger.release(old)
                self._ledger.hold(new)
            life.holdings = holdings
            self.freed |= more < 0
            self._moved(life, more * run.replicas)

    def _apply(self, run: Run, now: float) -> float:
        """Let a run go on with other cores; returns when it ends now."""
        life = run.life
        self.figures.resizes += 1
        each = run.firm + run.lent
        rate = self._world.resized(life, resized(run.offer, life.holdings, run.by_role(each)))
        finish = life.retime(now, rate)
        self._arm.takes(life.sequence, life.total_seconds(now))
        self._changed(run, now)
        if self._story:
            held = [each * share.replicas if share.part == run.lead else None for share in run.offer]
            places = tuple(
                place if cores is None else replace(place, cores=cores)
                for place, cores in zip(run.places, held, strict=True)
            )
            self._story.resized(life, places, run.lent * run.replicas, run.reason, now)
        return finish

    def rate_changed(self, life: Life, now: float) -> None:
        """Measure a run anew whose rate its neighbours have changed."""
        if (run := self._runs.get(life.sequence)) and run.rate != life.rate:
            self._changed(run, now)

    def news(self) -> bool:
        """Tell whether those that wait might be sized otherwise than when this was last asked."""
        before, self._sized_by = self._sized_by, (self.tracks.version, self._came_back)
        return self._sized_by != before

    def informed_anew(self, life: Life) -> Estimate:
        """Add what is remembered now of jobs like one that waits to the estimate of its submission."""
        return self.informed(life.sequence, life.job, self._estimates.get(life.sequence, UNKNOWN))

    def informed(self, sequence: int, job: TraceJob, estimate: Estimate) -> Estimate:
        """Add what is remembered of jobs like one that is submitted."""
        self._estimates[sequence] = estimate
        spec = job.spec()
        return self.tracks.informed(spec, estimate, self._gpu_types) if resizable(spec) else estimate
