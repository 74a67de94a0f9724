"""The public job API: gRPC in, effects out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import grpc
import structlog

from cotenant import plugins, telemetry
from cotenant.codec import errors
from cotenant.codec import specs as specs_module
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Host, Server
from cotenant.rpc.task_group import Background
from cotenant.security.identity import caller
from cotenant.services.queue.api.failure_summary import Summary
from cotenant.services.queue.api.job_filter import Filter
from cotenant.services.queue.api.job_pages import list_jobs
from cotenant.services.queue.api.output import Output
from cotenant.services.queue.api.tenants import Tenants
from cotenant.services.queue.api.what_if import simulate
from cotenant.services.queue.attempts import migration
from cotenant.services.queue.attempts.attempt_watcher import Follower, wished
from cotenant.services.queue.attempts.policy_feedback import Endings
from cotenant.services.queue.config import QueueConfig as QueueConfig
from cotenant.services.queue.estimates.estimate_refresh import Renewals
from cotenant.services.queue.estimates.observation_sink import Observations
from cotenant.services.queue.estimates.profiling import Profiles
from cotenant.services.queue.jobs.admission_control import accept
from cotenant.services.queue.jobs.archive import Archive
from cotenant.services.queue.jobs.archived_jobs import Past
from cotenant.services.queue.jobs.compaction import Resting
from cotenant.services.queue.jobs.desired_state import check_alive, check_array_alive, hold_back, resume, want
from cotenant.services.queue.jobs.failure_classifier import Failing, read_rules
from cotenant.services.queue.jobs.group_commit import GroupedStore
from cotenant.services.queue.jobs.job_arrays import Arrays
from cotenant.services.queue.jobs.job_store import CREATE, Keeper, request_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.retention import Forgetting
from cotenant.services.queue.jobs.store_admission import StoreAdmission, size_of
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.services.queue.jobs.updates import apply_update, changes_promise, check_update
from cotenant.services.queue.jobs.visibility import View
from cotenant.services.queue.scheduling import explain, start_forecast
from cotenant.services.queue.scheduling.scheduler import Scheduler, SchedulerConfig
from cotenant.services.queue.scheduling.wait_metrics import Waits
from cotenant.store.port import Store, StoreUnavailable
from cotenant.v1 import (
    job_pb2,
    job_service_pb2_grpc,
    placement_service_pb2_grpc,
    predictor_service_pb2_grpc,
    tenant_service_pb2_grpc,
)
from cotenant.v1 import job_service_pb2 as pb

log = structlog.get_logger()

QUEUES = "cotenant.queue_policies"
JOB = "cotenant.v1.JobService"
TENANT = "cotenant.v1.TenantService"
SERVICES = (JOB, TENANT)
STORE_PROBE_SECONDS = 2.0
SUMMED_AT_ONCE = 500  # jobs, between two looks at whether others need the queue


class JobQueue(job_service_pb2_grpc.JobServiceServicer):
    """Serves jobs from one picture of them all, and runs the scheduling cycle."""

    def __init__(
        self, store: Store, config: QueueConfig, placement: grpc.aio.Channel, predictor: grpc.aio.Channel, term: int = 0
    ):
        self.store, self.config = (store := GroupedStore(store)), config
        stub: Any = placement_service_pb2_grpc.PlacementServiceStub(placement)
        self.placement = cast("placement_service_pb2_grpc.PlacementServiceAsyncStub", stub)
        predictor_stub = cast(
            "predictor_service_pb2_grpc.PredictorServiceAsyncStub",
            predictor_service_pb2_grpc.PredictorServiceStub(predictor),
        )
        self.state = State()
        self.keeper = Keeper(store, self.state)
        self.arrays = Arrays(self.keeper)
        archive = Archive(config.archive) if config.archive else None
        self.past = Past(store, archive)
        self.forgetting = Forgetting(
            self.state, self.arrays, self.past, config.ended_kept_max, config.ended_kept_seconds
        )
        self.admission = StoreAdmission(
            store, self.state, self.forgetting, config.tenant_jobs_max, config.tenant_bytes_max
        )
        self.observations = Observations(predictor_stub, config.window_seconds)
        self.renewals = Renewals(self.state, self.placement, predictor_stub)
        self.observations.on_seen = self.renewals.seen
        self.profiles = Profiles(self.state, self.placement, predictor_stub, self.observations, self.renewals)
        self.observations.on_profile_wanted = self.profiles.want
        failing = Failing(read_rules(config.failure_rules), config.retrying)
        self.follower = Follower(
            self.state, self.keeper, self.placement, self.observations, self.profiles, failing, term
        )
        self.policy: QueuePolicy = plugins.load(QUEUES, config.policy, config.options.get(config.policy, {}))
        cycle = SchedulerConfig(self.policy, config.debounce_seconds, config.rules, config.seed, term)
        self.background = Background()
        self.endings = Endings(self.policy, self.keeper, self.background)
        self.scheduler = Scheduler(self.state, self.follower, cycle, self.placement, predictor_stub, self.endings)
        self.waits = Waits(self.state)
        self.state.wake = self.scheduler.wake
        self.state.later = self._sync_later
        self.state.hopeless = self.endings.cancel
        self.keeper.on_reread = self._stop_unwanted
        self.output = Output(self.state, self.placement)
        self.tenants = Tenants(
            self.keeper, self.admission, config.policy, config.options.get(config.policy, {}), config.rules
        )
        self._host: Host | None = None

    # Life ----------------------------------------------------------------------------------------------------

    def add_to(self, host: Host) -> None:
        """Serve this on a server that has not started yet, or on what stands in for one."""
        self._host = host
        host.add(job_service_pb2_grpc.add_JobServiceServicer_to_server, self, JOB)
        host.add(tenant_service_pb2_grpc.add_TenantServiceServicer_to_server, self.tenants, TENANT)

    async def start(self, known: Mapping[str, Record] | None = None) -> None:
        """Read the state, but for `known` jobs that are still so; nothing is followed or scheduled before `run`."""
        await self.keeper.load(known or {})
        await self.arrays.discard(self.keeper.orphans)
        await self.past.start()
        self.endings.learn_all(self.state.records.values())
        self.state.ended = self.endings.learn

    def run(self) -> None:
        """Follow placement and schedule."""
        for name, work in (
            ("queue-follower", self.follower.run),
            ("queue-forget", self.follower.forget),
            ("queue-capacity", self.follower.follow_capacity),
            ("queue-settle", self.keeper.settle),
            ("queue-scheduler", self.scheduler.run),
            ("queue-observations", self.observations.run),
            ("queue-profiles", self.profiles.run),
            ("queue-renewals", self.renewals.run),
            ("queue-sweep", self.forgetting.run),
            ("queue-waits", self.waits.run),
            ("queue-resting", Resting(self.state).run),
            ("queue-probe", self._probe),
            ("queue-admission", self.admission.run),
        ):
            self.background.forever(name, work)

    async def close(self) -> None:
        """Stop scheduling; jobs run on."""
        await self.background.close()
        await self.follower.close()

    def _sync_later(self, seconds: float, record: Record) -> None:
        """Look at a job again once it may be tried again."""
        asyncio.get_running_loop().call_later(max(0.0, seconds) + 0.001, self.state.sync, record)

    async def _probe(self) -> None:
        """Tell by the health protocol whether the store is there."""
        while True:
            await asyncio.sleep(STORE_PROBE_SECONDS)
            try:
                await self.store.get("queue/probe")
                serving = True
            except StoreUnavailable:
                serving = False
            if self._host:
                for service in SERVICES:
                    self._host.set_serving(service, serving)

    # Jobs in -------------------------------------------------------------------------------------------------

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        """Check, commit, acknowledge."""
        with telemetry.span("submit", job_name=request.spec.name) as span:
            once = request_of(CREATE, request.request_id, request.spec)
            try:
                before = await self.past.before(View(self.state), request.spec)
                spec = accept(self.state, request.spec, before)
                size = size_of(request.spec, len(spec.array.indices) if spec.array else 1)
                await self.admission.prepare(spec.tenant, size)
                self.past.check(View(self.state), before)
                self.admission.check(spec, size)
            except errors.Problem:
                if not request.validate_only and (made := await self.keeper.repeated(once)):
                    return pb.CreateJobResponse(job=View(self.state).message(View(self.state).job(made.id)))
                raise
            if request.validate_only:
                record = new_record("", spec, caller().name, "", before.hopeless(spec))
                return pb.CreateJobResponse(job=record.job)
            with self.admission.taking_in(spec, size), self.state.gates.pinned(spec.dependencies):
                create = self.arrays.create if spec.array else self.keeper.create
                record = await create(spec, caller().name, span.trace_parent, once, before.hopeless(spec))
            span.set(job=record.id)
            log.info("job_created", job=record.id, name=spec.name, tenant=spec.tenant, gpus=spec.gpu_milli / 1000)
            view = View(self.state)
            return pb.CreateJobResponse(job=view.message(view.job(record.id)))

    # Jobs out ------------------------------------------------------------------------------------------------

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """Tell of one job."""
        view = View(self.state)
        return pb.GetJobResponse(job=view.message(await self.past.job(view, request.id)))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """Tell of jobs, newest first, page by page."""
        return await list_jobs(self.state, request)

    async def WatchJobs(self, request: pb.WatchJobsRequest, context: Any) -> AsyncIterator[pb.WatchJobsResponse]:
        """Tell of jobs as they are, then of each change."""
        view = View(self.state)
        chosen = Filter(request.filter, view)
        watcher = self.state.watch()
        try:
            open_ids, gone = set(), dict.fromkeys(request.filter.ids)
            for job_id in list(await chosen.found(self.state)):
                if record := self.state.records.get(job_id):
                    gone.pop(job_id, None)
                    if not record.phase.ended:
                        open_ids.add(job_id)
                    yield pb.WatchJobsResponse(job=view.message(record))
            for record in await self.past.named(view, gone):
                if chosen.takes(record):
                    yield pb.WatchJobsResponse(job=view.message(record))
            yield pb.WatchJobsResponse(synced=True)
            if request.until_ended and not open_ids:
                return
            async for job_id in watcher.changes():
                known = self.state.records.get(job_id)
                if known and (job_id in open_ids or chosen.takes(known)):
                    yield pb.WatchJobsResponse(job=view.message(known))
                if known is None or known.phase.ended:
                    open_ids.discard(job_id)
                    if request.until_ended and not open_ids:
                        return
        finally:
            self.state.unwatch(watcher)

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobResponse:
        """Tell why a job stands where it stands."""
        view, scheduler = View(self.state), self.scheduler
        record = await self.past.job(view, request.id)
        answer = explain.explain(self.state, record, self.config.policy)
        await start_forecast.explained(self.state, scheduler.config, self.placement, record, answer)
        view.redact(answer)
        return answer

    async def SimulateJob(self, request: pb.SimulateJobRequest, context: Any) -> pb.SimulateJobResponse:
        """Ask placement whether jobs that were not submitted would start now, and when else."""
        specs, view = [], View(self.state)
        for asked in (request.spec, *request.more):
            await asyncio.sleep(0)  # others have their turn
            before = await self.past.before(view, asked)
            specs.append(accept(self.state, asked, before))
            self.past.check(view, before)
            if why := before.hopeless(specs[-1]):
                raise errors.failed_precondition("DEPENDENCY_FAILED", f"it would be cancelled at once: it {why}")
        names = ["whatif", *(f"whatif-{number}" for number in range(2, len(specs) + 1))]
        records = [new_record(name, spec, caller().name, "") for name, spec in zip(names, specs, strict=True)]
        answer = await simulate(self.state, self.scheduler, records)
        View(self.state).redact(answer)
        return answer

    async def ReadLogs(self, request: pb.ReadLogsRequest, context: Any) -> AsyncIterator[pb.ReadLogsResponse]:
        """Pass a job's output on; with `follow` through all of its attempts."""
        async for response in self.output.read(await self.past.job(View(self.state), request.id), request):
            yield response

    async def SummarizeFailures(
        self, request: pb.SummarizeFailuresRequest, context: Any
    ) -> pb.SummarizeFailuresResponse:
        """Sum up how attempts failed."""
        view, summary = View(self.state), Summary(request)
        records = list(self.state.records.values())
        for start in range(0, len(records), SUMMED_AT_ONCE):
            summary.add(one.job for one in records[start : start + SUMMED_AT_ONCE] if view.sees(one))
            await asyncio.sleep(0)
        return summary.told

    # Changes -------------------------------------------------------------------------------------------------

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        """End a job, or begin to."""
        record = await self._wish(request, "CancelJob", job_pb2.JOB_PHASE_CANCELLED)
        return pb.CancelJobResponse(job=View(self.state).message(record))

    async def SuspendJob(self, request: pb.SuspendJobRequest, context: Any) -> pb.SuspendJobResponse:
        """Hold a job back, or begin to."""
        record = await self._wish(request, "SuspendJob", job_pb2.JOB_PHASE_SUSPENDED)
        return pb.SuspendJobResponse(job=View(self.state).message(record))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        """Let a suspended job queue again."""
        once = request_of("ResumeJob", request.request_id, request)
        view = View(self.state)
        if array := view.array(request.id):
            check_array_alive(array, request.etag)
            return pb.ResumeJobResponse(job=view.message(await self.arrays.change(array, resume, once)))
        record = await self.past.job(view, request.id)
        if not await self.keeper.repeated(once):
            check_alive(record)
            await self.keeper.change(record, resume, request=once, etag=request.etag)
        return pb.ResumeJobResponse(job=View(self.state).message(record))

    async def _wish(self, request: Any, method: str, wish: job_pb2.JobPhase.ValueType) -> Record:
        once = request_of(method, request.request_id, request)
        view = View(self.state)
        if array := view.array(request.id):
            if wish == job_pb2.JOB_PHASE_SUSPENDED or request.etag:
                check_array_alive(array, request.etag)
            record = await self.arrays.change(
                array, lambda stored: hold_back(stored, wish), once, instead=lambda stored: want(stored, wish)
            )
            for job_id in array.ids:
                self._stop_unwanted(self.state.records[job_id])
            return record
        record = await self.past.job(view, request.id)
        if not await self.keeper.repeated(once):
            if wish == job_pb2.JOB_PHASE_SUSPENDED:
                check_alive(record)
            await self.keeper.change(
                record,
                lambda stored: hold_back(stored, wish),
                request=once,
                etag=request.etag,
                instead=lambda stored: want(stored, wish),
            )
        self._stop_unwanted(record)
        return record

    def _stop_unwanted(self, record: Record) -> None:
        """Have what runs against its owner's wish stopped; its end comes as any news of attempts."""
        if record.phase.holds_resources and record.stored.wish:
            self.background.start(self.follower.stop(record, record.attempt_number, wished(record)))

    async def MoveJob(self, request: pb.MoveJobRequest, context: Any) -> pb.MoveJobResponse:
        """Let a job go on elsewhere."""
        once = request_of("MoveJob", request.request_id, request)
        record = await self.past.job(View(self.state), request.id)
        await migration.move(self.keeper, self.follower, record, request, once)
        return pb.MoveJobResponse(job=View(self.state).message(record))

    async def UpdateJob(self, request: pb.UpdateJobRequest, context: Any) -> pb.UpdateJobResponse:
        """Change what may be changed of a job that has not ended."""
        record = await self.past.job(View(self.state), request.job.id)
        once = request_of("UpdateJob", request.request_id, request)
        if not await self.keeper.repeated(once):
            check_alive(record)
            changed = check_update(record, request)
            await self.admission.check_growth(record, changed)
            if request.validate_only:
                preview = View(self.state).message(record)
                preview.spec.CopyFrom(specs_module.spec_to_wire(changed))
                return pb.UpdateJobResponse(job=preview)
            await self.keeper.change(
                record, lambda stored: apply_update(stored, request), request=once, etag=request.job.etag
            )
            record.spec = specs_module.spec_from_wire(record.job.spec)
            self.state.renew(record, estimate=changes_promise(request))
        return pb.UpdateJobResponse(job=View(self.state).message(record))


async def start(
    server: Server,
    store: Store,
    policies: PolicyServicer,
    config: QueueConfig,
    placement: grpc.aio.Channel,
    predictor: grpc.aio.Channel,
    term: int = 0,
) -> JobQueue:
    """Read the state and add the queue to a server that has not started yet; `run` it once the others can be reached.

    `term` is that of who was elected to lead; 0 of who has the store alone.

    Raises:
        UnknownPolicy: the policy is not installed, or broken.
        BadOption: it does not take an option.
        StoreUnavailable: the state cannot be read.
    """
    queue = JobQueue(store, config, placement, predictor, term)
    policies.use(QUEUES, config.policy, options=config.options)
    queue.add_to(server)
    await queue.start()
    return queue
