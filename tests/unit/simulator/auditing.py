"""An auditor of simulations: counts from the recording and from each run's holdings, without trusting a ledger."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from tests.unit.simulator.combinations import Case
from tests.unit.simulator.histories import History
from tests.unit.simulator.naming import Names

from cotenant.core.model.node import matches_gpu_type
from cotenant.core.scheduling.admission import Preemption
from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.recording.events import Event, Kind
from cotenant.simulator.traces import TraceJob

STOPS = (Kind.PREEMPTED, Kind.RECLAIMED, Kind.MIGRATED)
ROUNDING_SECONDS = 1e-6


@dataclass
class Auditor:
    """Records a simulation and checks it after every step."""

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
        running = [sim_job for sim_job in simulation.sim_jobs if sim_job.running]
        assert {sim_job.job.id for sim_job in running} == set(self.history.running)
        self._nothing_twice(running)
        self._within_limits(running)
        self.names.follow(running, self.history.running)
        self._nobody_lost(simulation)
        return True

    # Recorded events -------------------------------------------------------------------------------------------------

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
        """A gang has all its replicas, each with its request, on GPUs of the requested type."""
        job = self.jobs[event.job_id]
        replicas: Counter[str] = Counter()
        for place in event.nodes:
            request = next(role.request for role in job.roles if role.name == place.role)
            replicas[place.role] += place.replicas
            assert place.gpu_milli == place.replicas * request.gpu_milli
            assert place.memory_bytes == place.replicas * request.memory_bytes
            shape = self.case.cluster.shapes[place.node]
            if request.gpu_milli:
                assert not request.gpu_type or matches_gpu_type(shape.gpu_type, request.gpu_type)
                assert shape.shareable or request.gpu_milli % 1000 == 0
            if request.cores is not None and self.case.names["allocator"] == "requested":
                assert place.cores == place.replicas * request.cores
        assert replicas == {role.name: role.replicas for role in job.roles}
        if job.locality == "server" and self.case.names["placement"] != "count":  # it counts, and nothing else
            assert len({place.node for place in event.nodes}) == 1
        nodes = {place.node for place in event.nodes}
        racks = {self.case.cluster.racks[node] for node in nodes}
        if job.locality == "rack":
            assert len(racks) == 1
        assert len(racks if job.spread.by == "rack" else nodes) >= job.spread.least

    def _may_be_stopped(self, event: Event) -> None:
        job, moved = self.jobs[event.job_id], event.kind is Kind.MIGRATED
        for_contention = moved and not event.by
        assert job.preemptible or for_contention, f"{event.job_id} may not be stopped"
        assert event.ran_seconds is not None
        given_back = event.kind is Kind.RECLAIMED or (moved and self.case.names["placement"] == "multi-array")
        if not (
            for_contention or given_back
        ):  # lent resources are reclaimed at once, and their holder may move instead
            assert event.ran_seconds >= self.rules.run_seconds_min - ROUNDING_SECONDS
        if event.kind is Kind.PREEMPTED:
            assert self.rules.preemption is not Preemption.NEVER
            if not self.enforced:
                assert any(self._may_claim(by, event.job_id) for by in event.by), "nobody of them had a right to it"
        if for_contention:
            assert not job.spec().gpu_milli, "the protected one was sent away"

    def _may_claim(self, by: str, job_id: str) -> bool:
        """Return whether one job may stop another against its order: by priority, or because its tenant reclaims."""
        ahead = self.jobs[by].priority > self.jobs[job_id].priority
        if self.rules.preemption is Preemption.PRIORITY and ahead:
            return True
        return self.rules.reclaim and self._guaranteed(by) and not self._all_guaranteed(self.jobs[job_id].tenant)

    def _all_guaranteed(self, tenant: str) -> bool:
        """Return whether a tenant's guarantee of GPUs covers all its running and waiting jobs: then none borrows."""
        own = [*self.history.running, *self.history.waiting_since]
        specs = [self.jobs[job_id].spec() for job_id in own if self.jobs[job_id].tenant == tenant]
        known = self.tenants.get(tenant)
        if known is None or known.quota_cores is not None or not all(spec.gpu_milli for spec in specs):
            return False  # variable cores are not known
        return sum(spec.gpu_milli for spec in specs) <= (known.quota_gpu_milli or 0)

    def _guaranteed(self, job_id: str) -> bool:
        """Return whether a guarantee of a job's tenant, or of an ancestor, could cover the job."""
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

    # Checks ----------------------------------------------------------------------------------------------------------

    def _nothing_twice(self, running: list[SimulatedJob]) -> None:
        """Return what runs hold, node by node and GPU by GPU."""
        whole: Counter[int] = Counter()
        cores: Counter[int] = Counter()
        memory: Counter[int] = Counter()
        parts: dict[int, Counter[int]] = defaultdict(Counter)
        for sim_job in running:
            for held in sim_job.holdings:
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

    def _within_limits(self, running: list[SimulatedJob]) -> None:
        milli: Counter[str] = Counter()
        cores: Counter[str] = Counter()
        for sim_job in running:
            name, met = sim_job.job.tenant, set[str]()
            while name and name not in met:
                met.add(name)
                milli[name] += sim_job.job_class.gpu_milli
                cores[name] += sum(held.cores for held in sim_job.holdings)
                name = self.tenants[name].parent if name in self.tenants else ""
        for tenant in self.tenants.values():
            assert tenant.limit_gpu_milli is None or milli[tenant.id] <= tenant.limit_gpu_milli
            assert tenant.limit_cores is None or cores[tenant.id] <= tenant.limit_cores

    def _nobody_lost(self, simulation: Simulation) -> None:
        """Each submitted job runs, has finished, was given up, can never run, or waits with a reason."""
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
            return  # a job was migrated, and the next cycle comes before any time passes
        for job_id in history.waiting_since:
            assert history.reasons.get(job_id), f"{job_id} waits, and nobody says why"

    def done(self, simulation: Simulation) -> None:
        """At the end, each job that still waits has no place under the policies in the present state."""
        assert not self.history.running, "it runs, and nothing will ever happen"
        assert all(math.isfinite(sim_job.rest_seconds) for sim_job in simulation.sim_jobs)
