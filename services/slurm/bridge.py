"""The bridge to Slurm, composed from its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from cotenant import plugins
from cotenant.core.model.refusal import about
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.rpc.channel import Channel
from cotenant.rpc.connections import ProcessProblem
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Server
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.services.slurm.acting import ActConfig, Acting
from cotenant.services.slurm.api.cluster import NodeServicer, TenantServicer
from cotenant.services.slurm.api.jobs import ArrayServicer, ContentionServicer, JobServicer, ScheduleServicer
from cotenant.services.slurm.api.refusing import refusing
from cotenant.services.slurm.cluster_watch import INTERVAL_SECONDS, ClusterWatch
from cotenant.services.slurm.commands import SlurmCommands
from cotenant.services.slurm.output_progress import OutputProgress, ProgressPatterns
from cotenant.services.slurm.predictions import Predictions
from cotenant.services.slurm.records import SlurmJob
from cotenant.services.slurm.start_times import StartTimes
from cotenant.v1 import (
    array_service_pb2,
    array_service_pb2_grpc,
    contention_service_pb2,
    contention_service_pb2_grpc,
    folder_service_pb2,
    folder_service_pb2_grpc,
    job_service_pb2,
    job_service_pb2_grpc,
    node_service_pb2,
    node_service_pb2_grpc,
    predictor_service_pb2_grpc,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
    secret_service_pb2,
    secret_service_pb2_grpc,
    tenant_service_pb2,
    tenant_service_pb2_grpc,
)

PLACEMENT = "cotenant.placement_policies"
ALLOCATORS = "cotenant.cpu_allocators"
QUEUES = "cotenant.queue_policies"


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """How the bridge reads Slurm, the policies by which it forecasts, and what it changes."""

    slurm: SlurmCommands = field(default_factory=SlurmCommands)
    interval_seconds: float = INTERVAL_SECONDS
    placement: str = "consolidate"
    allocator: str = "proportional"
    acts: ActConfig = field(default_factory=ActConfig)
    progress: ProgressPatterns | None = None  # by which the output of jobs is read


class Unserved:
    """A service of which every method is refused."""


class Bridge:
    """The parts of a bridge. Its tasks begin with `run`."""

    def __init__(self, server: Server, channel: Channel, policies: PolicyServicer, config: BridgeConfig) -> None:
        placement, allocator = plugins.load(PLACEMENT, config.placement), plugins.load(ALLOCATORS, config.allocator)
        policies.use(PLACEMENT, config.placement)
        policies.use(ALLOCATORS, config.allocator)
        self.progress = OutputProgress(config.progress, config.slurm) if config.progress else None
        self.predictions = Predictions(
            cast(
                "predictor_service_pb2_grpc.PredictorServiceAsyncStub",
                predictor_service_pb2_grpc.PredictorServiceStub(channel),
            ),
            cast(
                "observation_service_pb2_grpc.ObservationServiceAsyncStub",
                observation_service_pb2_grpc.ObservationServiceStub(channel),
            ),
            self.progress,
        )
        self.watch = ClusterWatch(config.slurm, config.interval_seconds, self._ended)
        self.start_times = StartTimes(self.watch, self.predictions, placement)
        chosen = plugins.load(QUEUES, config.acts.policy), plugins.load(PLACEMENT, config.acts.placement)
        self.acting = Acting(config.acts, config.slurm, self.watch, self.start_times, chosen)
        self._tasks: list[asyncio.Task[None]] = []
        server.watch_problems(self.problems)
        job_parts = self.watch, self.predictions, self.start_times, allocator
        add = partial(_add_refusing, server)
        add(job_service_pb2, job_service_pb2_grpc, JobServicer, *job_parts)
        add(array_service_pb2, array_service_pb2_grpc, ArrayServicer)
        add(node_service_pb2, node_service_pb2_grpc, NodeServicer, self.watch)
        add(tenant_service_pb2, tenant_service_pb2_grpc, TenantServicer, self.watch)
        add(schedule_service_pb2, schedule_service_pb2_grpc, ScheduleServicer)
        add(secret_service_pb2, secret_service_pb2_grpc, Unserved)
        add(folder_service_pb2, folder_service_pb2_grpc, Unserved)
        add(contention_service_pb2, contention_service_pb2_grpc, ContentionServicer)

    def run(self) -> None:
        """Begin to read Slurm, and to predict."""
        self._tasks = [
            asyncio.create_task(self.watch.run(), name="slurm-watch"),
            asyncio.create_task(self._predict(), name="slurm-predictions"),
            asyncio.create_task(self._act(), name="slurm-acts"),
        ]

    async def close(self) -> None:
        """End all tasks, and send what the predictor has not learned yet."""
        await cancel_and_wait(*self._tasks)
        await self.acting.close()
        if self.progress:
            self.progress.close()
        await self.predictions.send()

    def problems(self) -> Sequence[ProcessProblem]:
        """Return that Slurm does not answer, and the age of what is shown; else why an act has no effect."""
        problem, age = self.watch.trouble(time.time())
        if not problem:
            return self.acting.problems()
        shown = f"; what is shown is {about(age)} old" if self.watch.picture.taken_seconds else ""
        return (ProcessProblem(f"{problem}{shown}", "start slurmctld, or look at its log"),)

    def _ended(self, jobs: Sequence[SlurmJob]) -> None:
        self.predictions.ended(jobs, self.watch.picture, time.time())
        self.acting.ended(jobs, self.watch.picture)

    async def _predict(self) -> None:
        while True:
            await self.watch.changed()
            await self.predictions.send()
            await self.predictions.renew(self.watch.picture)
            if self.progress:
                await self.progress.renew(self.watch.picture)

    async def _act(self) -> None:
        while True:
            await self.watch.changed()
            await self.acting.renew()


def _add_refusing(server: Server, module: Any, generated: Any, base: type[Any], *parts: object) -> None:
    """Add a service to a server; methods that `base` does not have are refused."""
    (descriptor,) = module.DESCRIPTOR.services_by_name.values()
    servicer = refusing(descriptor, base)(*parts)
    server.add(getattr(generated, f"add_{descriptor.name}Servicer_to_server"), servicer, descriptor.full_name)
