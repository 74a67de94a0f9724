"""An auditor of simulations: counts anew, from the recording and from what each run holds, and trusts no ledger."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from tests.unit.simulator.combinations import Case
from tests.unit.simulator.histories import History
from tests.unit.simulator.naming import Names

from cotenant.core.model.node import is_of_type
from cotenant.core.scheduling.admission import Preemption
from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import Life
from cotenant.simulator.recording.events import Event, Kind
from cotenant.simulator.traces import TraceJob

STOPS = (Kind.PREEMPTED, Kind.RECLAIMED, Kind.MIGRATED)
ROUNDING_SECONDS = 1e-6


@dataclass
class Auditor:
    """Listens to a simulation and looks at it after every step."""

    case: Case
    events: list[Event] = field(default_factory=list)
    heard: int = 0

    def __post_init__(self) -> None:
        self.history = History(self.case.cluster)
        self.names = Names(self.case.cluster)
        self.jobs: dict[str, TraceJob] = {}
        self.rules = self.case.settings.rules
        self.tenants = {tenant.id: tenant for tenant in self.case.tenants}
        self.began: dict[str, float] = {}
        self.unschedulable: set[str] = set()
        self.enforced = False  # the order itself stops jobs

    def record(self, event: Event) -> None:
        self.events.append(event)

    def look(self, simulation: Simulation) -> bool:
        self.jobs = self.jobs or {job.id: job for job in simulation.trace.jobs}
        self.enforced = simulation._scheduler._enforced
        for event in self.events[self.heard :]:
            self.hear(event)
        self.heard = len(self.events)
        running = [life for life in simulation.lives if life.running]
        assert {life.job.id for life in running} == set(self.history.running)
        self._nothing_twice(running)
        self._within_limits(running)
        self.names.follow(running, self.history.running)
        self._nobody_lost(simulation)
        return True

    # What is heard ----------------------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        self.history.take(event)
        if event.kind is Kind.STARTED:
            self._whole(event)
            self.began[event.job_id] = event.at_seconds
        if event.kind in STOPS:
            self._may_be_stopped(event)
        if event.kind is Kind.UNSCHEDULABLE:
            assert event.detail
            assert event.remedy
            self.unschedulable.add(event.job_id)

    def _whole(self, event: Event) -> None:
        """A gang has all its replicas, each with what was asked for, on GPUs of the type that was asked for."""
        job = self.jobs[event.job_id]
        replicas: Counter[str] = Counter()
        for place in event.nodes:
            request = next(role.request for role in job.roles if role.name == place.role)
            replicas[place.role] += place.replicas
            assert place.gpu_milli == place.replicas * request.gpu_milli
            assert place.memory_bytes == place.replicas * request.memory_bytes
            shape = self.case.cluster.shapes[place.node]
            if request.gpu_milli:
                assert not request.gpu_type or is_of_type(shape.gpu_type, request.gpu_type)
                assert shape.shareable or request.gpu_milli % 1000 == 0
            if request.cores is not None and self.case.names["allocator"] == "requested":
                assert place.cores == place.replicas * request.cores
        assert replicas == {role.name: role.replicas for role in job.roles}
        if job.locality == "server" and self.case.names["placement"] != "count":  # which counts, and nothing else
            assert len({place.node for place in event.nodes}) == 1
        if job.locality == "rack":
            assert len({self.case.cluster.racks[place.node] for place in event.nodes}) == 1

    def _may_be_stopped(self, event: Event) -> None:
        job, moved = self.jobs[event.job_id], event.kind is Kind.MIGRATED
        for_contention = moved and not event.by
        assert job.preemptible or for_contention, f"{event.job_id} may not be stopped"
        assert event.ran_seconds is not None
        given_back = event.kind is Kind.RECLAIMED or (moved and self.case.names["placement"] == "multi-array")
        if not (for_contention or given_back):  # what was lent is asked back at once, and its holder may move instead
            assert event.ran_seconds >= self.rules.run_seconds_min - ROUNDING_SECONDS
        if event.kind is Kind.PREEMPTED:
            assert self.rules.preemption is not Preemption.NEVER
            if not self.enforced:
                assert any(self._may_claim(by, event.job_id) for by in event.by), "nobody of them had a right to it"
        if for_contention:
            assert not job.spec().gpu_milli, "the protected one was sent away"

    def _may_claim(self, by: str, job_id: str) -> bool:
        """Whether one may stop another whose order does not say so: by its rank, or where its tenant takes back."""
        ahead = self.jobs[by].priority > self.jobs[job_id].priority
        if self.rules.preemption is Preemption.PRIORITY and ahead:
            return True
        return self.rules.reclaim and self._guaranteed(by) and not self._all_guaranteed(self.jobs[job_id].tenant)

    def _all_guaranteed(self, tenant: str) -> bool:
        """Whether a tenant's guarantee of GPUs holds all of its jobs that run or wait: then none of them borrows."""
        own = [*self.history.running, *self.history.waiting_since]
        specs = [self.jobs[job_id].spec() for job_id in own if self.jobs[job_id].tenant == tenant]
        known = self.tenants.get(tenant)
        if known is None or known.quota_cores is not None or not all(spec.gpu_milli for spec in specs):
            return False  # cores that are left open are not known
        return sum(spec.gpu_milli for spec in specs) <= (known.quota_gpu_milli or 0)

    def _guaranteed(self, job_id: str) -> bool:
        """Whether a guarantee of a job's tenant, or of one that this belongs to, could hold the job."""
        spec, name, met = self.jobs[job_id].spec(), self.jobs[job_id].tenant, set[str]()
        cores = sum(role.replicas * (role.request.cores or 0) for role in spec.roles)
        while (tenant := self.tenants.get(name)) and name not in met:
            of_cores = tenant.quota_cores if tenant.quota_cores is not None or spec.gpu_milli else 0
            holds_gpus = spec.gpu_milli <= (tenant.quota_gpu_milli or 0)
            if holds_gpus and (of_cores is None or cores <= of_cores):
                return True
            met.add(name)
            name = tenant.parent
        return False

    # What is seen -----------------------------------------------------------------------------------------------------

    def _nothing_twice(self, running: list[Life]) -> None:
        """Sum up what runs hold, node by node and GPU by GPU."""
        whole: Counter[int] = Counter()
        cores: Counter[int] = Counter()
        memory: Counter[int] = Counter()
        parts: dict[int, Counter[int]] = defaultdict(Counter)
        for life in running:
            for held in life.holdings:
                whole[held.node] += 0 if held.shares else held.gpus
                cores[held.node] += held.cores
                memory[held.node] += held.memory_bytes
                for index, milli in held.shares:
                    parts[held.node][index] += milli
        for node, shape in enumerate(self.case.cluster.shapes):
            assert all(0 < taken <= 1000 and index < shape.gpus for index, taken in parts[node].items())
            assert whole[node] + len(parts[node]) <= shape.gpus
            assert cores[node] <= shape.cores
            assert memory[node] <= shape.memory_bytes or not shape.memory_bytes

    def _within_limits(self, running: list[Life]) -> None:
        milli: Counter[str] = Counter()
        cores: Counter[str] = Counter()
        for life in running:
            name, met = life.job.tenant, set[str]()
            while name and name not in met:
                met.add(name)
                milli[name] += life.shape.gpu_milli
                cores[name] += sum(held.cores for held in life.holdings)
                name = self.tenants[name].parent if name in self.tenants else ""
        for tenant in self.tenants.values():
            assert tenant.limit_gpu_milli is None or milli[tenant.id] <= tenant.limit_gpu_milli
            assert tenant.limit_cores is None or cores[tenant.id] <= tenant.limit_cores

    def _nobody_lost(self, simulation: Simulation) -> None:
        """Each job that came runs, is done, was given up or can never run, or waits and there is a reason."""
        history = self.history
        came = {job.id for job in self.case.jobs[: simulation.submitted]}
        ends: list[Collection[str]] = [
            history.running,
            history.finished,
            history.given_up,
            self.unschedulable,
            history.waiting_since,
        ]
        assert sum(map(len, ends)) == len(came)
        assert set().union(*ends) == came
        if simulation._scheduler.order_expires <= simulation.now:
            return  # somebody was sent elsewhere, and it is decided anew before any time passes
        for job_id in history.waiting_since:
            assert history.reasons.get(job_id), f"{job_id} waits, and nobody says why"

    def done(self, simulation: Simulation) -> None:
        """Nothing happens any more: whoever still waits is one whom the policies place nowhere as things stand."""
        assert not self.history.running, "it runs, and nothing will ever happen"
        assert all(math.isfinite(life.rest_seconds) for life in simulation.lives)
