"""A small random cluster with random jobs, served by a live mesh whose scheduling cycles run one by one.

Some worlds are left out, because their decisions differ for a reason:
- a workload that `fgd` learns is in no snapshot;
- where resources are counted, for fair shares or to enforce an order, the queue counts an open number of cores as one,
  while a simulation knows what placement chooses;
- a tenant at its limit waits until its victims have stopped, if they were found on an earlier page;
- a job that exceeds its tenant's limit alone waits for a higher limit, while a simulation sets it aside;
- `optimus` updates its order at fixed times of the clock, and a simulation's clock begins with the first submission.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import grpc
from tests.unit.services.mesh import Mesh, until

from cotenant import plugins
from cotenant.cli.connection import Mesh as Connection
from cotenant.cli.research.snapshot import read_snapshot
from cotenant.codec import specs
from cotenant.codec.specs import duration
from cotenant.core.failures.retry import RetryRules
from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.core.scheduling.admission import FairShare, Preemption, Rules
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.api.server import PlacementConfig
from cotenant.services.queue.api import server
from cotenant.services.queue.config import QueueConfig
from cotenant.services.queue.scheduling import scheduler
from cotenant.simulator.snapshots import Snapshot
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2, policy_service_pb2_grpc, predictor_service_pb2_grpc
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2 as tenants_pb

QUEUES: dict[str, dict[str, str]] = {
    "fifo": {},
    "fifo, backfill": {"mode": "backfill"},
    "las": {"thresholds": "0.01,7200"},
    "sjf": {},
    "srtf": {},
    "srsf": {},
    "drf": {},
    "edf": {},
}
PLACEMENTS: dict[str, dict[str, str]] = {
    "consolidate": {},
    "spread": {},
    "first-fit": {},
    "fgd": {"workload": "1000/2/2,2000/4/1,4000/4/1"},  # otherwise it learns one, which no snapshot contains
}
LENDING_QUEUES: dict[str, dict[str, str]] = {
    "las": {"thresholds": "0.01,7200"},
    "srtf": {},
    "drf": {},
    "borda-mlfq": {"cadence_seconds": "86400"},  # its ticks too are times of the clock: none while a world lasts
}
LENDING: dict[str, dict[str, str]] = {"multi-array": {"trial_cores": "0"}}
LENDING_SHARE = 0.3  # of the worlds
CARRYING_OUT_MAX = 5  # cycles until jobs that borrow have left
WHOLE = (32, 256)
PAGES = (WHOLE, (1, 1), (2, 4))  # of the candidates in a plan request, from and to
RULES = (
    Rules(),
    Rules(preemption=Preemption.PRIORITY),
    Rules(preemption=Preemption.NEVER),
    Rules(fair_share=FairShare.TENANTS),
    Rules(reserve_after_seconds=0.0),
)
TENANTS = ("default", "vision", "speech")


@dataclass(frozen=True, slots=True)
class Decision:
    """What one cycle decides: places by job, jobs whose place must be freed first, and jobs that stop."""

    placed: dict[str, dict[str, tuple[int, int]]]  # thousandths of GPUs, and cores, by node
    making_room: frozenset[str]
    stopped: frozenset[str]


class World:
    """A live mesh. `step` changes something at random; `decide` runs one cycle."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(seed)
        name, where = rng.choice(list(QUEUES)), ""
        apart = Random(f"lending {seed}")  # so that seeds known to reveal something still draw the same
        if lends := apart.random() < LENDING_SHARE:
            name, where = apart.choice(list(LENDING_QUEUES)), apart.choice(list(LENDING))
        self._lends = lends
        self.rules = rng.choice(RULES)
        policy = name.partition(",")[0]
        retrying = RetryRules(back_off_seconds=0.0, untold_back_off_seconds=0.0)
        chosen = (LENDING_QUEUES if lends else QUEUES)[name]
        options = {policy: chosen} if chosen else {}
        self.queue = QueueConfig(policy=policy, options=options, rules=self.rules, retrying=retrying)
        usual = rng.choice(list(PLACEMENTS))
        where = where or usual
        self.placement = PlacementConfig(
            placement=where,
            options={where: (PLACEMENTS | LENDING)[where]},
            heartbeat_seconds=0.5,
            lost_after_seconds=60.0,
        )
        self._pages = rng.choice(PAGES)
        self._mesh = Mesh(MemoryStore(), queue_config=self.queue, placement_config=self.placement)
        self.description = f"{name}, {where}, pages of {self._pages}, {self.rules}"
        shares = policy == "drf" or self.rules.fair_share is FairShare.TENANTS
        self._counts = shares or plugins.load(server.QUEUES, policy).preemptive
        self._limits: dict[str, int] = {}  # of GPUs, in thousandths
        self._plans: list[tuple[placement_pb2.PlanPlacementRequest, placement_pb2.PlanPlacementResponse]] = []
        self._cycle: Callable[[], Awaitable[float]]

    async def start(self) -> None:
        """Start the services and the nodes; no cycle runs by itself."""
        mesh, rng = self._mesh, self._rng
        for name in ("predictor", "placement", "queue"):
            await mesh.start(name)
        queue = mesh.parts["queue"].service
        self._cycle, plan = queue.scheduler.cycle, queue.scheduler.placement.PlanPlacement
        queue.scheduler.cycle = _nothing

        async def recorded(request: Any, **given: Any) -> Any:
            response = await plan(request, **given)
            self._plans.append((request, response))
            return response

        queue.scheduler.placement = SimpleNamespace(PlanPlacement=recorded)
        for number in range(rng.randint(1, 4)):
            await mesh.agent(f"n{number}", gpus=rng.choice([0, 2, 4]), cores=rng.choice([4, 8, 12]))
        for tenant in TENANTS[1:]:
            limit = rng.choice([None, None, 2000, 4000]) if self._pages == WHOLE else None
            wanted = tenants_pb.Tenant(id=tenant, weight=rng.choice([1.0, 2.0]))
            if limit is not None:
                wanted.limit_gpu_milli = self._limits[tenant] = limit
            await mesh.tenants.CreateTenant(tenants_pb.CreateTenantRequest(tenant=wanted))

    async def close(self) -> None:
        """Stop everything."""
        await self._mesh.close()

    async def step(self) -> None:
        """Let some running jobs finish, cancel some, and submit others."""
        state, rng = self._mesh.parts["queue"].service.state, self._rng
        ending = []
        for record in list(state.records.values()):
            if record.phase is Phase.RUNNING and rng.random() < 0.25:
                ending.append(record.id)
                self._finish(record.id, record.attempt_number)
            elif record.phase is Phase.QUEUED and rng.random() < 0.1:
                with suppress(grpc.aio.AioRpcError):
                    await self._mesh.jobs.CancelJob(pb.CancelJobRequest(id=record.id))
        await until(lambda: all(state.records[job_id].phase.ended for job_id in ending))
        for _ in range(rng.randint(1, 5)):
            with suppress(grpc.aio.AioRpcError):  # it can never fit
                await self._submit()
        await self._settle()

    async def _submit(self) -> None:
        rng = self._rng
        gpus, replicas, tenant = rng.choice([0, 1, 1, 2, 4]), rng.choice([1, 1, 1, 2, 3]), rng.choice(TENANTS)
        if gpus * replicas * 1000 > self._limits.get(tenant, math.inf):
            return
        await self._mesh.submit(
            gpus=gpus,
            cores=rng.choice([1, 2, 4, 1 if self._counts else None]) if gpus else rng.choice([1, 2, 4, 6]),
            replicas=replicas,
            tenant=tenant,
            priority=rng.choice([0, 0, 1, 2]),
            preemptible=rng.random() < 0.8,
            expected_duration=duration(rng.choice([600, 3600, 7200, 90_000]) * rng.uniform(1.0, 1.3)),
        )

    def _finish(self, job_id: str, number: int) -> None:
        for agent in self._mesh.agents.values():
            agent.finish((job_id, number))

    async def _settle(self) -> None:
        """Wait until every job waits, runs or has ended, and placement and the queue agree."""
        queue, cluster = self._mesh.parts["queue"].service, self._mesh.parts["placement"].service.cluster

        def settled() -> bool:
            records = queue.state.records.values()
            running = {record.id for record in records if record.phase is Phase.RUNNING}
            still = all(record.phase.ended or record.phase in (Phase.QUEUED, Phase.RUNNING) for record in records)
            lives = {job_id for job_id, live in cluster.attempts.items() if live.state is AttemptState.RUNNING}
            return still and not queue.attempt_watcher.ending and running == lives == set(cluster.attempts)

        await until(settled)

    async def snapshot(self) -> Snapshot:
        """Return what `cotenant snapshot` would write now."""
        mesh = self._mesh
        connection = SimpleNamespace(
            jobs=mesh.jobs,
            nodes=mesh.nodes,
            tenants=mesh.tenants,
            predictor=predictor_service_pb2_grpc.PredictorServiceStub(mesh.channel("predictor")),
            policies=lambda: {
                name: policy_service_pb2_grpc.PolicyServiceStub(mesh.channel(name)) for name in mesh.parts
            },
        )
        return await read_snapshot(cast("Connection", connection))

    async def decide(self) -> Decision:
        """Run one cycle, and wait until it is carried out."""
        decision = last = await self._decide()
        for _ in range(CARRYING_OUT_MAX):  # a snapshot does not contain places reserved until borrowers have left
            if not (self._lends and last.making_room):
                break
            last = await self._decide()
        return decision

    async def _decide(self) -> Decision:
        self._plans.clear()
        for agent in self._mesh.agents.values():
            agent.refuses_to_stop = True  # all of a cycle is decided before any job has stopped
        least, most = self._pages
        with mock.patch.multiple(scheduler, PAGE_MIN=least, PAGE_MAX=most):
            await self._cycle()
        placed: dict[str, dict[str, tuple[int, int]]] = {}
        making_room, stopped = set[str](), set[str]()
        for _, response in self._plans:
            for one in response.placed:
                parts = map(specs.allocation_from_wire, one.attempt.allocations)
                placed[one.attempt.job_id] = {
                    part.node_id: (sum(share.milli for task in part.tasks for share in task.gpus), part.cores)
                    for part in parts
                }
            making_room |= {one.job_id for one in response.refused if one.refusal.code == "MAKING_ROOM"}
            stopped |= {one.job_id for one in response.preempted}
        self._end_stopped()
        await self._settle()
        return Decision(placed, frozenset(making_room), frozenset(stopped))

    def _end_stopped(self) -> None:
        for agent in self._mesh.agents.values():
            agent.refuses_to_stop = False
            for order in agent.stops:
                if (key := (order.job_id, order.number)) in agent.attempts:
                    agent.end(key, job_pb2.ATTEMPT_STATE_STOPPED, stop_reason=order.reason)


async def _nothing() -> float:
    return math.inf
