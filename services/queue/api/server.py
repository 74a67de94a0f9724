"""The servicer of the public job API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

import grpc
import structlog

from cotenant import plugins
from cotenant.codec import errors
from cotenant.codec import specs as specs_module
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.scheduling.fair_share import FairShare
from cotenant.internal.v1 import observation_service_pb2_grpc, placement_service_pb2_grpc
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Host, Server
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.identity import caller
from cotenant.services.queue.api.arrays import ArrayServicer
from cotenant.services.queue.api.failure_summary import FailureSummary
from cotenant.services.queue.api.folders import FolderServicer
from cotenant.services.queue.api.job_pages import list_jobs
from cotenant.services.queue.api.job_watch import JobWatch
from cotenant.services.queue.api.objective_admission import ObjectiveAdmission
from cotenant.services.queue.api.output import JobOutput
from cotenant.services.queue.api.schedules import ScheduleServicer
from cotenant.services.queue.api.secrets import SecretServicer
from cotenant.services.queue.api.session import JobSessions
from cotenant.services.queue.api.submission import Submission
from cotenant.services.queue.api.tenants import TenantServicer
from cotenant.services.queue.api.usage_summary import UsageSummary
from cotenant.services.queue.api.what_if import simulate
from cotenant.services.queue.attempts import migration
from cotenant.services.queue.attempts.attempt_watcher import AttemptWatcher
from cotenant.services.queue.attempts.policy_feedback import PolicyFeedback
from cotenant.services.queue.config import QueueConfig as QueueConfig
from cotenant.services.queue.estimates.estimate_refresh import EstimateRefresh
from cotenant.services.queue.estimates.observation_sink import ObservationSink
from cotenant.services.queue.estimates.prediction_outcomes import PredictionOutcomes
from cotenant.services.queue.estimates.profiling import Profiling
from cotenant.services.queue.folders.folder_store import FolderStore
from cotenant.services.queue.jobs.admission_control import accept
from cotenant.services.queue.jobs.archive import Archive
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.compaction import Compaction
from cotenant.services.queue.jobs.delays import Delays
from cotenant.services.queue.jobs.desired_state import (
    cancel_or_suspend,
    check_not_ended,
    resume,
    set_wish,
)
from cotenant.services.queue.jobs.failure_classifier import FailureClassifier, read_rules
from cotenant.services.queue.jobs.grouped_store import GroupedStore
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import CREATE, JobStore, idempotency_key_of
from cotenant.services.queue.jobs.job_views import is_basic, view_violations
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.retention import Retention
from cotenant.services.queue.jobs.store_admission import StoreAdmission
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.services.queue.jobs.updates import apply_update, changes_estimate, changes_time_limit, check_update
from cotenant.services.queue.jobs.usage_store import UsageStore
from cotenant.services.queue.jobs.visibility import View
from cotenant.services.queue.notifications.notifier import Notifier
from cotenant.services.queue.scheduling import explain, start_forecast
from cotenant.services.queue.scheduling.objective_tracker import ObjectiveTracker
from cotenant.services.queue.scheduling.scheduler import Scheduler, SchedulerConfig
from cotenant.services.queue.scheduling.usage_metrics import UsageMetrics
from cotenant.services.queue.scheduling.wait_metrics import WaitMetrics
from cotenant.store.port import Store, StoreUnavailable
from cotenant.v1 import (
    array_service_pb2_grpc,
    folder_service_pb2_grpc,
    job_pb2,
    job_service_pb2_grpc,
    predictor_service_pb2_grpc,
    schedule_service_pb2_grpc,
    secret_service_pb2_grpc,
    tenant_service_pb2_grpc,
)
from cotenant.v1 import job_service_pb2 as pb

log = structlog.get_logger()

QUEUES, ALLOCATORS = "cotenant.queue_policies", "cotenant.cpu_allocators"
JOB = "cotenant.v1.JobService"
ARRAY = "cotenant.v1.ArrayService"
TENANT = "cotenant.v1.TenantService"
FOLDER = "cotenant.v1.FolderService"
SECRETS = "cotenant.v1.SecretService"
SCHEDULE = "cotenant.v1.ScheduleService"
SERVICES = (JOB, ARRAY, TENANT, FOLDER, SECRETS, SCHEDULE)
STORE_PROBE_SECONDS = 2.0
SUMMED_AT_ONCE = 500  # jobs counted before other calls get a turn


class JobQueue(job_service_pb2_grpc.JobServiceServicer):
    """Serves jobs from memory, commits changes to the store, and runs the scheduling cycle."""

    def __init__(
        self,
        host: Host,
        store: Store,
        config: QueueConfig,
        placement: grpc.aio.Channel,
        predictor: grpc.aio.Channel,
        term: int = 0,
    ) -> None:
        """Compose the queue, and add its services to a server that has not started, or to its stand-in."""
        self.store, self.config = (store := GroupedStore(store)), config
        self.placement = _placement_stub(placement)
        predictor_stub = _predictor_stub(predictor)
        self.background = BackgroundTasks()
        worth = config.rules.fair_share is FairShare.THROUGHPUT
        self.state = State(config.rules.usage_half_life_seconds, counts_worth=worth)
        self.job_store = JobStore(store, self.state)
        self.arrays = JobArrays(self.job_store)
        self.archived_jobs = ArchivedJobs(store, Archive(config.archive) if config.archive else None)
        self.retention = Retention(
            self.state, self.arrays, self.archived_jobs, config.ended_kept_max, config.ended_kept_seconds
        )
        self.admission = StoreAdmission(
            store, self.state, self.retention, config.tenant_jobs_max, config.tenant_bytes_max
        )
        self.observations = ObservationSink(_observation_stub(predictor), self.state.events, config.window_seconds)
        self.estimate_refresh = EstimateRefresh(self.state, self.placement, predictor_stub)
        self.profiles = Profiling(self.state, self.placement, predictor_stub, self.observations, self.estimate_refresh)
        failure_classifier = FailureClassifier(read_rules(config.failure_rules), config.retrying)
        self.attempt_watcher = AttemptWatcher(
            self.state, self.job_store, self.placement, self.observations, self.profiles, failure_classifier, term
        )
        options = config.options.get(config.policy, {})
        self.policy: QueuePolicy = plugins.load(QUEUES, config.policy, options)
        self.policy_feedback = PolicyFeedback(self.policy, self.job_store, self.background)
        allocator = plugins.load(ALLOCATORS, config.allocator, config.allocator_options) if config.allocator else None
        cycle = SchedulerConfig(self.policy, config.debounce_seconds, config.rules, config.seed, allocator, term)
        self.scheduler = Scheduler(
            self.state, self.attempt_watcher, cycle, self.placement, predictor_stub, self.policy_feedback
        )
        self.waits = WaitMetrics(self.state)
        self.output = JobOutput(self.state, self.placement)
        self.sessions = JobSessions(self.state, self.archived_jobs, self.placement)
        objectives = ObjectiveAdmission(self.state, self.scheduler)
        self.folders = FolderServicer(self.state, FolderStore(config.folders))
        self.secrets = SecretServicer(self.job_store, config.secret_keys)
        self.submission = Submission(
            self.job_store, self.arrays, self.archived_jobs, self.admission, objectives, config.notifications,
            self.folders.check, self.secrets.check,
        )  # fmt: skip
        self.schedules = ScheduleServicer(self.job_store, self.submission, self._cancel)
        self.objectives = ObjectiveTracker(self.state, self.scheduler)
        self.notifier = Notifier(self.job_store, config.notifications)
        stop_by_wish = self.attempt_watcher.stop_by_wish
        arrays = ArrayServicer(self.arrays, self.archived_jobs, self.submission, stop_by_wish)
        tenants = TenantServicer(self.job_store, self.admission, config.policy, options, config.rules)
        self.delays = Delays(self.state.sync_known)
        self.outcomes = PredictionOutcomes(self.state)
        self.state.events.delay_began.subscribe(lambda record, seconds: self.delays.add(record.id, seconds))
        self._host = host
        host.add(job_service_pb2_grpc.add_JobServiceServicer_to_server, self, JOB)
        host.add(array_service_pb2_grpc.add_ArrayServiceServicer_to_server, arrays, ARRAY)
        host.add(tenant_service_pb2_grpc.add_TenantServiceServicer_to_server, tenants, TENANT)
        host.add(folder_service_pb2_grpc.add_FolderServiceServicer_to_server, self.folders, FOLDER)
        host.add(secret_service_pb2_grpc.add_SecretServiceServicer_to_server, self.secrets, SECRETS)
        host.add(schedule_service_pb2_grpc.add_ScheduleServiceServicer_to_server, self.schedules, SCHEDULE)

    # Start and stop ------------------------------------------------------------------------------------------

    async def start(self, known: Mapping[str, Record] | None = None) -> None:
        """Load the state, except `known` jobs that have not changed; `run` starts to watch and schedule."""
        await self.job_store.load(known or {})
        await self.arrays.discard_orphans()
        await self.archived_jobs.start()
        self.policy_feedback.start(self.state.records.values())
        await self.outcomes.start(self.state.records.values())

    def run(self) -> None:
        """Start to watch placement and to schedule."""
        for name, work in (
            ("queue-follower", self.attempt_watcher.run),
            ("queue-forget", self.attempt_watcher.forget),
            ("queue-capacity", self.attempt_watcher.follow_capacity),
            ("queue-settle", self.job_store.settle),
            ("queue-delays", self.delays.run),
            ("queue-scheduler", self.scheduler.run),
            ("queue-observations", self.observations.run),
            ("queue-profiles", self.profiles.run),
            ("queue-renewals", self.estimate_refresh.run),
            ("queue-sweep", self.retention.run),
            ("queue-waits", self.waits.run),
            ("queue-usage", self._store_usage),
            ("queue-usage-metrics", UsageMetrics(self.state).run),
            ("queue-objectives", self.objectives.run),
            ("queue-resting", Compaction(self.state).run),
            ("queue-probe", self._probe),
            ("queue-admission", self.admission.run),
            ("queue-notifications", self.notifier.run),
            ("queue-folders", self.folders.run),
            ("queue-secrets", self.secrets.run),
            ("queue-schedules", self.schedules.run),
        ):
            self.background.forever(name, work)

    async def close(self) -> None:
        """Stop scheduling; jobs keep running."""
        await self.background.close()
        await self.attempt_watcher.close()
        self.outcomes.close()

    async def _store_usage(self) -> None:
        """Store decayed usage forever."""
        watcher = self.attempt_watcher
        await UsageStore(self.store, self.state).run(watcher.synced, watcher.ending)

    async def _probe(self) -> None:
        """Report through the health service whether the store is available."""
        while True:
            await asyncio.sleep(STORE_PROBE_SECONDS)
            try:
                await self.store.get("queue/probe")
                serving = True
            except StoreUnavailable:
                serving = False
            for service in SERVICES:
                self._host.set_serving(service, serving)

    # Submission ----------------------------------------------------------------------------------------------

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        """Check a job, commit it, acknowledge it."""
        record = await self.submission.submit(request, CREATE)
        if request.validate_only:
            return pb.CreateJobResponse(job=record.job)
        view = View(self.state)
        return pb.CreateJobResponse(job=view.message(view.job(record.id)))

    # Reads ---------------------------------------------------------------------------------------------------

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """Return one job."""
        if found := view_violations(request.view):
            raise errors.invalid(found)
        view, basic = View(self.state), is_basic(request.view, unset=pb.JOB_VIEW_FULL)
        record = await self.archived_jobs.get(view, request.id, "GetArray")
        return pb.GetJobResponse(job=view.message(record, basic=basic))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """Return jobs, newest first, page by page."""
        return await list_jobs(self.state, request)

    async def WatchJobs(self, request: pb.WatchJobsRequest, context: Any) -> AsyncIterator[pb.WatchJobsResponse]:
        """Yield the selected jobs, or what has changed since a revision, then each change."""
        watch = JobWatch(self.state, self.job_store, self.archived_jobs, request)
        async with aclosing(watch.responses()) as responses:
            async for response in responses:
                yield response

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobResponse:
        """Return why a job is in its present state."""
        view, scheduler = View(self.state), self.scheduler
        record = await self.archived_jobs.get(view, request.id)
        answer = explain.explain(self.state, record, self.config.policy)
        await start_forecast.add_forecast(self.state, scheduler.config, self.placement, record, answer)
        explain.add_objectives(self.state, record, answer)
        view.redact(answer)
        return answer

    async def SimulateJob(self, request: pb.SimulateJobRequest, context: Any) -> pb.SimulateJobResponse:
        """Return whether jobs that were not submitted would start now, and otherwise when."""
        specs, view = [], View(self.state)
        for asked in (request.spec, *request.more):
            await asyncio.sleep(0)  # other calls get a turn
            before = await self.archived_jobs.find_dependencies(view, asked)
            specs.append(accept(self.state, asked, before))
            self.archived_jobs.check_known(view, before)
            if why := before.unsatisfiable_reason(specs[-1]):
                raise errors.failed_precondition("DEPENDENCY_FAILED", f"the job would be cancelled at once: it {why}")
        names = ["whatif", *(f"whatif-{number}" for number in range(2, len(specs) + 1))]
        records = [new_record(name, spec, caller().name, "") for name, spec in zip(names, specs, strict=True)]
        answer = await simulate(self.state, self.scheduler, records)
        View(self.state).redact(answer)
        return answer

    async def ReadLogs(self, request: pb.ReadLogsRequest, context: Any) -> AsyncIterator[pb.ReadLogsResponse]:
        """Yield a job's output; with `follow` through all of its attempts."""
        async for response in self.output.read(await self.archived_jobs.get(View(self.state), request.id), request):
            yield response

    async def ReadFiles(self, request: pb.ReadFilesRequest, context: Any) -> AsyncIterator[pb.ReadFilesResponse]:
        """Yield files of a job's working directory."""
        record = await self.archived_jobs.get(View(self.state), request.id)
        async for response in self.output.read_files(record, request):
            yield response

    async def OpenSession(
        self, requests: AsyncIterator[pb.OpenSessionRequest], context: Any
    ) -> AsyncIterator[pb.OpenSessionResponse]:
        """Carry a session in a running job."""
        async with aclosing(self.sessions.open(requests)) as responses:
            async for response in responses:
                yield response

    async def SummarizeFailures(
        self, request: pb.SummarizeFailuresRequest, context: Any
    ) -> pb.SummarizeFailuresResponse:
        """Summarize how attempts failed."""
        view, summary = View(self.state), FailureSummary(request)
        records = list(self.state.records.values())
        for start in range(0, len(records), SUMMED_AT_ONCE):
            summary.add(one.job for one in records[start : start + SUMMED_AT_ONCE] if view.sees(one))
            await asyncio.sleep(0)
        return summary.response

    async def SummarizeUsage(self, request: pb.SummarizeUsageRequest, context: Any) -> pb.SummarizeUsageResponse:
        """Sum up what jobs used in a period."""
        view, summary = View(self.state), UsageSummary(request, time.time())
        records = list(self.state.records.values())
        kept = {record.id for record in records}
        for start in range(0, len(records), SUMMED_AT_ONCE):
            some = records[start : start + SUMMED_AT_ONCE]
            summary.add(one.job for one in some if one.started_seconds and view.sees(one))
            await asyncio.sleep(0)
        missing = self.archived_jobs.missing_archives
        try:
            async for jobs in self.archived_jobs.ended_since(view, summary.since, summary.until):
                summary.add(job for job in jobs if job.id not in kept)
        except OSError as error:
            log.warning("archive_unreadable", error=str(error))
            missing += 1
        return summary.response(missing)

    # Changes -------------------------------------------------------------------------------------------------

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        """Cancel a job; a running job ends once its attempt has stopped."""
        record = await self._wish(request, "CancelJob", "CancelArray", job_pb2.JOB_PHASE_CANCELLED)
        return pb.CancelJobResponse(job=View(self.state).message(record))

    async def SuspendJob(self, request: pb.SuspendJobRequest, context: Any) -> pb.SuspendJobResponse:
        """Suspend a job; a running job is suspended once its attempt has stopped."""
        record = await self._wish(request, "SuspendJob", "SuspendArray", job_pb2.JOB_PHASE_SUSPENDED)
        return pb.SuspendJobResponse(job=View(self.state).message(record))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        """Requeue a suspended job."""
        key = idempotency_key_of("ResumeJob", request.request_id, request)
        record = await self.archived_jobs.get(View(self.state), request.id, "ResumeArray")
        if not await self.job_store.find_result(key):
            check_not_ended(record)
            await self.job_store.change(record, resume, request=key, etag=request.etag)
        return pb.ResumeJobResponse(job=View(self.state).message(record))

    async def _cancel(self, record: Record) -> None:
        """Cancel a job in the name of the caller."""
        await self._wish(pb.CancelJobRequest(id=record.id), "CancelJob", "CancelArray", job_pb2.JOB_PHASE_CANCELLED)

    async def _wish(self, request: Any, method: str, array_call: str, wish: job_pb2.JobPhase.ValueType) -> Record:
        key = idempotency_key_of(method, request.request_id, request)
        record = await self.archived_jobs.get(View(self.state), request.id, array_call)
        if not await self.job_store.find_result(key):
            if wish == job_pb2.JOB_PHASE_SUSPENDED:
                check_not_ended(record)
            await self.job_store.change(
                record,
                lambda stored: cancel_or_suspend(stored, wish),
                request=key,
                etag=request.etag,
                instead=lambda stored: set_wish(stored, wish),
            )
        self.attempt_watcher.stop_by_wish(record)
        return record

    async def MoveJob(self, request: pb.MoveJobRequest, context: Any) -> pb.MoveJobResponse:
        """Migrate a running job to other nodes."""
        key = idempotency_key_of("MoveJob", request.request_id, request)
        record = await self.archived_jobs.get(View(self.state), request.id)
        await migration.migrate(self.job_store, self.attempt_watcher, record, request, key)
        return pb.MoveJobResponse(job=View(self.state).message(record))

    async def UpdateJob(self, request: pb.UpdateJobRequest, context: Any) -> pb.UpdateJobResponse:
        """Change the mutable fields of a job that has not ended."""
        record = await self.archived_jobs.get(View(self.state), request.job.id)
        key = idempotency_key_of("UpdateJob", request.request_id, request)
        if not await self.job_store.find_result(key):
            check_not_ended(record)
            changed = check_update(record, request)
            await self.admission.check_growth(record, changed)
            if request.validate_only:
                preview = View(self.state).message(record)
                preview.spec.CopyFrom(specs_module.spec_to_wire(changed))
                return pb.UpdateJobResponse(job=preview)
            await self.job_store.change(
                record, lambda stored: apply_update(stored, request), request=key, etag=request.job.etag
            )
            if changes_time_limit(request):
                self.attempt_watcher.change_time_limit(record)
            record.spec = specs_module.spec_from_wire(record.job.spec)
            self.state.refresh_row(record, estimate=changes_estimate(request))
            if changes_estimate(request):
                self.estimate_refresh.request([record.id])
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
    """Load the state and add the queue to a server that has not started; `run` it once the other services are up.

    `term` is the term of the elected leader; 0 if the queue has the store to itself.

    Raises:
        UnknownPolicy: the policy is not installed, or broken.
        BadOption: the policy does not take an option.
        StoreUnavailable: the state cannot be read.
    """
    queue = JobQueue(server, store, config, placement, predictor, term)
    policies.use(QUEUES, config.policy, options=config.options)
    await queue.start()
    return queue


def _placement_stub(channel: grpc.aio.Channel) -> placement_service_pb2_grpc.PlacementServiceAsyncStub:
    stub: Any = placement_service_pb2_grpc.PlacementServiceStub(channel)
    return cast("placement_service_pb2_grpc.PlacementServiceAsyncStub", stub)


def _predictor_stub(channel: grpc.aio.Channel) -> predictor_service_pb2_grpc.PredictorServiceAsyncStub:
    stub: Any = predictor_service_pb2_grpc.PredictorServiceStub(channel)
    return cast("predictor_service_pb2_grpc.PredictorServiceAsyncStub", stub)


def _observation_stub(channel: grpc.aio.Channel) -> observation_service_pb2_grpc.ObservationServiceAsyncStub:
    stub: Any = observation_service_pb2_grpc.ObservationServiceStub(channel)
    return cast("observation_service_pb2_grpc.ObservationServiceAsyncStub", stub)
