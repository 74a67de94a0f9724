"""What decides in a simulation: the jobs, the free resources, and the very cycle that the live mesh runs.

Decisions come from `core.queueing.cycle` and the policies and from nothing else. What is added here saves questions
whose answers are known:
- while nobody waits there is nothing to decide;
- what was refused stays refused, for all gangs of its shape, until something is freed, and so does what needs more
  than is free in sum. Where nobody may be stopped for others, such gangs are not asked about, and where there is no
  other gang there is no cycle;
- a strict queue is asked about its gangs one by one, up to the first that does not fit.
That holds for every policy whose refusals depend on the gang's shape and on what is free. Where they depend on how long
it has waited too (`policy.Discerns`), a waiting gang is of a later shape from when on that makes a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cotenant.core.capacity.ledger import Holding, Overcommitted
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import Capacity, Ints, Jobs, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal, Wait, given_up
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling import cycle
from cotenant.core.scheduling.admission import RULES, Rules
from cotenant.core.sizing.resize import Resizes
from cotenant.simulator import service_scaling
from cotenant.simulator.cluster_view import Moment, Occupants
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.cycle_candidates import Candidates, victims_of
from cotenant.simulator.free_resources import Free, with_node
from cotenant.simulator.job import Life, Shape, row_of
from cotenant.simulator.physics.rates import FULL
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import AskedPlacement, Policies, PolicyFailed, ordered, teach
from cotenant.simulator.prediction_arms import Arm
from cotenant.simulator.recording.events import Kind, Story
from cotenant.simulator.resizing import Resizing
from cotenant.simulator.wait_labels import Labels
from cotenant.simulator.wait_reasons import Chosen, Listening
from cotenant.simulator.wait_times import CAUSE_OF, Cause, cause_of
from cotenant.simulator.waiting_jobs import Waiting

VALID_SECONDS_MIN = 0.001  # an order is asked for anew no sooner than this, so that rounding cannot stop the clock


class Scheduler:
    """The jobs that run or wait, and what is free. `order_expires` is when the order may change by itself."""

    def __init__(
        self,
        cluster: Cluster,
        policies: Policies,
        arm: Arm,
        *,
        jobs: int,
        seed: int,
        world: World,
        rules: Rules = RULES,
        tenancy: Tenancy = NO_TENANTS,
        story: Story | None = None,
    ) -> None:
        self.order_expires, self.given_up = math.inf, 0
        self._queue = policies.queue
        self._placement = AskedPlacement(policies.placement)
        self._gives_up = False  # the queue policy is one that gives jobs up
        self._rules, self._tenancy = rules, tenancy
        self._tenants = {tenant.id: number for number, tenant in enumerate(tenancy.tenants)}
        self._enforced = rules.enforces(policies.queue)
        self._stops = self._enforced or rules.claims(policies.queue, tenancy)
        self._reserves = bool(rules.reserving)  # then gangs of one shape may get different answers
        self._shares = tenancy.guarantees or tenancy.limits  # whether somebody's share may be why a job waits
        self._by_shape = not (self._enforced or policies.queue.strict)  # most gangs of one shape wait for one reason
        self._alike = self._by_shape and not (self._stops or self._shares or self._reserves)  # all do
        self._labels = Labels(by_shape=self._by_shape)
        self._arm, self._story, self._world = arm, story, world
        self._choice: Chosen | None = None  # of the present cycle, while somebody listens
        self._counted: cycle.Choice | None = None  # of the present cycle
        self.rng = np.random.default_rng(seed)
        self._ledger = cluster.ledger()
        self._table = JobTable()
        whole = self._ledger.total_gpu_milli, cluster.cores, int(self._ledger.total_memory.sum())
        self._capacity = self._table.capacity = Capacity(*whole)
        self._free = Free(*whole)
        self._lives, self._by_id, self._occupants = dict[int, Life](), dict[str, Life](), Occupants()
        self._waiting, self._headroom = Waiting(self._placement, jobs), Headroom(())  # the latter: of the present cycle
        self._asked_all = self._asked_able = False  # whether the present cycle asked about all, or all with some hope
        changes = isinstance(policies.allocator, Resizes) and policies.allocator
        shown = self._ledger, arm, world, tenancy, self._table, self._moved, story
        self.resizing = Resizing(changes, *shown) if changes else None
        self._over_share: frozenset[int] = frozenset()  # waiting jobs beyond their tenant's share, by sequence

    def submit(self, life: Life, now: float) -> None:
        """Take a job in; it waits."""
        self._enter(life)
        if self._story:
            self._story.submitted(life, now)
        self._wait(life, now)

    def adopt(self, life: Life, holdings: tuple[Holding, ...], since: float, now: float) -> float:
        """Take a job in that has run on something since some time; returns when it will finish if nobody stops it."""
        self._enter(life)
        self._table.attain(life.job.id, life.attained_seconds)
        finish = self._run(life, holdings, since)
        if self._story:
            self._story.adopted(life, now)
        return finish

    def cordon(self, node: int) -> None:
        """Give a node no new work; what runs there runs on."""
        ledger = self._ledger
        gpus, cores, memory = ledger.free_gpus[node], ledger.free_cores[node], ledger.free_memory[node]
        ledger.open[node] = False
        self._resize(NodeShape(int(gpus), int(cores), int(memory)), -1)

    def _enter(self, life: Life) -> None:
        job, shape = life.job, life.shape
        self._waiting.join(life, shape)
        self._lives[life.sequence] = life
        self._by_id[job.id] = life
        tenant = self._tenants.setdefault(job.tenant, len(self._tenants))
        self._table.add(row_of(life, tenant, self._tenancy.weight(tenant)))

    def finish(self, life: Life, now: float) -> None:
        """Let a job go that is done; a queue policy that learns is told of it."""
        self._release(life, now)
        ran_seconds = now - life.running_since
        life.finish(now)
        if self._story:
            self._story.finished(life, ran_seconds, now)
        self._leave(life)
        teach(self._queue, life)

    def _leave(self, life: Life) -> None:
        self._table.remove(life.job.id)
        del self._lives[life.sequence], self._by_id[life.job.id]

    def fail(self, life: Life, wait_seconds: float, now: float) -> None:
        """Let a job go whose attempt failed, until it is tried again; for that it waits."""
        if self._story:
            self._story.attempt_failed(life, life.failure, now)
            self._story.backs_off(life, wait_seconds, now)
        self._release(life, now)
        life.stop(now, self._world.restart_seconds(life), saved=False)
        self._leave(life)
        self._labels.begin_apart(life, Wait.DEPENDENCY, now)

    def retry(self, life: Life, now: float) -> None:
        """Take a failed job in again, with what it attained."""
        life.end_wait(now)
        self._enter(life)
        self._table.attain(life.job.id, life.attained_seconds)
        self._table.update(life.job.id, waiting_since=now)
        self._arm.takes(life.sequence, life.total_seconds(now))
        self._wait(life, now)

    def close(self, node: int, now: float) -> None:
        """Give a node that failed no more work; the jobs on it wait again."""
        lost = [life for life in self._lives.values() if any(holding.node == node for holding in life.holdings)]
        for life in lost:
            if self._story:
                self._story.attempt_failed(life, "node_down", now, node)
            life.crashes += 1
            self._requeue(life, now, self._world.restart_seconds(life), saved=False)
        self._ledger.open[node] = False
        self._resize(self._ledger.shapes[node], -1)

    def reopen(self, node: int) -> None:
        """Give a node work again."""
        self._ledger.open[node] = True
        self._resize(self._ledger.shapes[node], +1)
        self._waiting.hope()

    def _resize(self, shape: NodeShape, times: int) -> None:
        self._free.add(shape, times)
        self._capacity = self._table.capacity = with_node(self._capacity, shape, times)

    def decide(self, now: float) -> list[tuple[Life, float]]:
        """Decide, and do it: returns who was started and when each will finish if nobody stops it.

        Raises:
            PolicyFailed: a policy raised an error, or answered nonsense.
        """
        refusals: Mapping[str, Refusal] = {}
        started: list[tuple[Life, float]] = []
        if self._placement.discerns:
            for life in self._waiting.grow_older(now):
                self._turned(life, now)
            self._waiting.doubt(now)
        if not self._may_start():
            self.order_expires = math.inf
            self._asked_all, self._over_share = False, frozenset()
        else:
            jobs, order = self._order(now)
            while self._give_up(jobs, order, now):
                jobs, order = self._order(now)
            plan = self._plan(jobs, order, now, self._rules)
            choice = None if plan.starts or plan.stops or plan.moves or plan.reclaimed else self._counted
            started, refusals = self._carry_out(plan, jobs, now), plan.refusals
            while plan.moves or plan.reclaimed or (plan.stops and not self._enforced):  # all may find room left over
                jobs, order = self._order(now)
                plan = self._plan(jobs, order, now, self._rules.stopping_nobody)
                started, refusals = started + self._carry_out(plan, jobs, now), {**refusals, **plan.refusals}
            if plan.starts and self._waiting:  # those who run now may change the order sooner than those who ran before
                jobs, order = self._order(now)
            self._note_shares(jobs, order, now, choice)
            valid_seconds = self._rules.valid_seconds(jobs, order, now) if self._stops else order.valid_seconds
            self.order_expires = now + max(min(valid_seconds, plan.keeps_seconds), VALID_SECONDS_MIN)
        if self._placement.discerns:
            relaxes_at = now + max(self._waiting.watch(refusals, self._free, now), VALID_SECONDS_MIN)
            self.order_expires = min(self.order_expires, relaxes_at, self._waiting.hopes_at(refusals.values(), now))
        self._label(refusals, now)
        if self._story:
            self._tell_reasons(self._story, refusals, now)
        return started

    def _tell_reasons(self, story: Story, refusals: Mapping[str, Refusal], now: float) -> None:
        listening = Listening(story, self._lives, self._ledger, self._free, self._over_share)
        if self._alike:
            listening.by_shape(self._waiting.shapes, now)
        elif self._by_shape:
            listening.by_job(refusals if self._asked_all else {}, now)
        else:
            listening.in_order(self._queue, refusals, self._choice, now)
        self._choice = None

    def _carry_out(self, plan: cycle.Plan, jobs: Jobs, now: float) -> list[tuple[Life, float]]:
        """Stop and start; returns who was started and when each will finish."""
        if self._story:
            self._story.planned(plan, int((~jobs.running).sum()), now)
        stops = [*((one, Kind.PREEMPTED) for one in plan.stops), *((one, Kind.RECLAIMED) for one in plan.reclaimed)]
        for job_id, kind in (*stops, *((move.gang.job_id, Kind.MIGRATED) for move in plan.moves)):
            self.preempt(job_id, plan.starts, now, kind)
        return [self._start(start, now) for start in (*plan.starts, *plan.moves)]

    def _may_start(self) -> bool:
        """Tell whether any waiting gang might get a place, as far as that can be told without asking."""
        if self._stops or self._shares or self._gives_up or self._reserves:
            return bool(self._waiting)
        if self._queue.strict:
            return any(not self._free.lacks(shape) for shape in self._waiting.shapes)
        return any(shape.refusal is None and not self._free.lacks(shape) for shape in self._waiting.shapes)

    def _order(self, now: float) -> tuple[Jobs, Order]:
        jobs = self._arm.know(self._table.jobs(now))
        return jobs, ordered(self._queue, jobs, now)

    def _give_up(self, jobs: Jobs, order: Order, now: float) -> bool:
        """Let those go whom the order gives up; tells whether there were any, so that the others are ordered anew."""
        self._gives_up = order.given_up is not None
        if order.given_up is None:
            return False
        sequences = jobs.sequence[order.given_up & ~jobs.running].tolist()
        for sequence in sequences:
            life = self._lives[sequence]
            if self._story:
                self._story.given_up(life, given_up(self._queue.name), now)
            life.give_up(now)
            self.given_up += 1
            self._waiting.remove(life)
            self._leave(life)
        return bool(sequences)

    def _plan(self, jobs: Jobs, order: Order, now: float, rules: Rules) -> cycle.Plan:
        choice = cycle.choose(jobs, self._queue, order, self._capacity, now=now, rules=rules, tenancy=self._tenancy)
        self._headroom, self._counted = self._tenancy.headroom(jobs, jobs.running), choice
        self._asked_able = self._reserves and not (self._enforced or len(choice.victims))
        self._asked_all = self._asked_able or self._enforced or len(choice.victims) > 0
        if self._story:
            self._choice = Chosen.of(choice, jobs, self._table.ids)
        try:
            return cycle.place(
                self._gangs(jobs.sequence[choice.starts], now),
                self._ledger,
                self._placement,
                self.rng,
                victims=victims_of(self._lives, jobs, choice, self._world.stop_cost_seconds, now),
                strict=self._queue.strict,
                headroom=self._headroom,
                scene=Moment(self._lives, self._occupants, jobs, self._table.row, self._world.stop_cost_seconds, now),
                reserving=rules.reserving,
            )
        except (Overcommitted, cycle.BrokenGang) as error:
            why = f"it made no offer that can be taken: {error}"
            raise PolicyFailed("placement", self._placement, f"the cycle at {now:.3f} s", why) from error

    def _gangs(self, sequences: Ints, now: float) -> Iterator[Gang]:
        """Make gangs of jobs in their order, one by one as they are asked for, without those whose answer is known."""
        if self._asked_all and not self._asked_able:
            return (self._lives[sequence].gang(now) for sequence in sequences.tolist())
        some = Candidates(self._lives, self._waiting, self._placement, self._free, self._headroom, now)
        if self._asked_able:
            return some.able_or_starving(sequences, self._rules.reserving)
        if self._queue.strict:
            return some.up_to_a_refusal(sequences)
        return some.hopeful(sequences)

    def _start(self, start: cycle.Start, now: float) -> tuple[Life, float]:
        life = self._by_id[start.gang.job_id]
        self._waiting.remove(life)
        life.reclaimable = start.reclaimable
        service_scaling.scale(life, start.gang, self._table)
        finish = self._run(life, start.holdings, now)
        if self.resizing:
            self.resizing.started(life, start, now)
        if self._story:
            self._story.started(life, start, now)
        return life, finish

    def _run(self, life: Life, holdings: tuple[Holding, ...], since: float) -> float:
        for holding in holdings:
            self._ledger.hold(holding)
        self._free.take(life.shape, not life.reclaimable)
        self._table.start(life.job.id, since)
        rate = self._world.started(life, holdings)
        finish = life.start(holdings, since, rate)
        self._occupants.enter(life)
        if rate is not FULL:
            self._arm.takes(life.sequence, life.total_seconds(since))
        return finish

    def preempt(self, job_id: str, starts: Sequence[cycle.Start], now: float, kind: Kind) -> None:
        """Stop a job for others, which waits again; one that migrates starts again at this instant if it can."""
        life = self._by_id[job_id]
        if self._story:
            self._story.preempted(life, starts, now, kind)
        life.stopped(kind is Kind.MIGRATED, kind is Kind.RECLAIMED)
        self._requeue(life, now, self._world.preemption_seconds(life), saved=self._world.settings.preemption_grace)

    def _requeue(self, life: Life, now: float, restart_seconds: float, *, saved: bool) -> None:
        self._release(life, now)
        self._table.stop(life.job.id, now)
        life.stop(now, restart_seconds, saved=saved)
        self._arm.takes(life.sequence, life.total_seconds(now))
        self._wait(life, now)

    def _release(self, life: Life, now: float) -> None:
        if self.resizing and (cores := self.resizing.released(life, now)):
            self._free.cores += cores
            self._table.update(life.job.id, cores=life.shape.cores)
        self._world.released(life)
        self._occupants.leave(life)
        for holding in life.holdings:
            self._ledger.release(holding)
        self._free.take(life.shape, -(not life.reclaimable))
        self._waiting.hope()

    def _moved(self, life: Life, cores: int) -> None:
        """Count cores that a running job has got or given back."""
        self._occupants.enter(life)
        self._free.cores -= cores
        self._table.update(life.job.id, cores=sum(holding.cores for holding in life.holdings))
        if cores < 0:
            self._waiting.hope()

    def _wait(self, life: Life, now: float) -> None:
        if again := life.shape.first:
            self._waiting.join(life, again)
            service_scaling.count(life, self._table)
        life.waiting_since, life.fragmented_mark = now, life.shape.fragmented.read(now)
        self._labels.begin(life, now)
        self._waiting.add(life)
        if self._story:
            self._story.waits(life)

    def size_anew(self, size: Callable[[Life], Shape | None], now: float) -> None:
        """Let those be of another shape that wait and would be sized otherwise now; None: as they are."""
        for life in self._waiting.size_anew(self._lives.values(), size, now):
            service_scaling.count(life, self._table)
            self._turned(life, now)

    def _turned(self, life: Life, now: float) -> None:
        self._labels.follow(life, now)
        if self._story:
            self._story.waits(life, anew=True)

    def _note_shares(self, jobs: Jobs, order: Order, now: float, choice: cycle.Choice | None) -> None:
        """Note which waiting jobs are beyond their tenants' shares, where anybody knows of shares."""
        beyond = cycle.beyond_share(
            jobs, self._queue, order, now=now, rules=self._rules, tenancy=self._tenancy, choice=choice
        )
        if beyond is not None:
            self._shares, self._alike = True, False
        self._over_share = frozenset(() if beyond is None else jobs.sequence[beyond & ~jobs.running].tolist())

    def _label(self, refusals: Mapping[str, Refusal], now: float) -> None:
        """Say for what each waiting job waits from now on."""
        self._labels.turn(self._waiting.shapes, self._free.known, now)
        apart: dict[int, tuple[Life, Cause]] = {}
        if self._asked_all or not self._by_shape:
            for life, refusal in ((self._by_id[job_id], refusal) for job_id, refusal in refusals.items()):
                if self._by_shape or refusal.wait is not Wait.CAPACITY:
                    apart[life.sequence] = life, cause_of(refusal)
        for sequence in sorted(self._over_share):
            apart[sequence] = self._lives[sequence], CAUSE_OF[Wait.FAIR_SHARE]
        self._labels.set_apart(apart, now)
