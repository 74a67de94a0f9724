"""Slurm's jobs by the public API: lists, single jobs, watches, explanations and what-ifs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cotenant.codec import errors, specs
from cotenant.codec import refusals as refusal_codec
from cotenant.codec.errors import Violation
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import QUEUE_DEFAULT, JobSpec
from cotenant.core.model.refusal import Refusal, plural
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.scheduling.cycle import Start, gang_of
from cotenant.rpc.paging import PageRequest
from cotenant.security.identity import caller
from cotenant.services.slurm.api.visibility import sees
from cotenant.services.slurm.cluster_watch import ClusterWatch
from cotenant.services.slurm.messages import job_message, phase_of
from cotenant.services.slurm.placement_view import gang_of as slurm_gang_of
from cotenant.services.slurm.placement_view import ruled_out, shape_of
from cotenant.services.slurm.planning import Scene, expected_of
from cotenant.services.slurm.predictions import Predictions
from cotenant.services.slurm.records import SlurmJob
from cotenant.services.slurm.start_times import (
    NAMED_MAX,
    Answers,
    StartTimes,
    ahead,
    forecast_message,
    outlook,
    slurms_estimate,
)
from cotenant.v1 import (
    array_service_pb2,
    array_service_pb2_grpc,
    contention_service_pb2,
    contention_service_pb2_grpc,
    job_pb2,
    job_service_pb2_grpc,
    schedule_service_pb2,
    schedule_service_pb2_grpc,
)
from cotenant.v1 import job_service_pb2 as pb

DELAY_SECONDS_MIN = 1.0  # smaller delays are not reported
NODES_NAMED_MAX = 8
CHANGED = "cotenant: "  # how the comment begins that says what was changed at submission

Key = tuple[float, float, str]
KEY_LENGTH = 3

ORDERS: Mapping[str, Callable[[SlurmJob], float]] = MappingProxyType(
    {
        "create_time": lambda job: job.submitted_seconds,
        "start_time": lambda job: job.started_seconds,
        "end_time": lambda job: job.ended_seconds if job.ended else 0.0,
        "priority": lambda job: float(job.priority),
    }
)


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    """Reads Slurm's jobs."""

    def __init__(
        self, watch: ClusterWatch, predictions: Predictions, start_times: StartTimes, allocator: CpuAllocator
    ) -> None:
        self._watch, self._predictions, self._start_times = watch, predictions, start_times
        self._allocator = allocator

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        """Return a job."""
        answers = await self._answers()
        job = _find(answers.scene, request.id)
        basic = request.view == pb.JOB_VIEW_BASIC
        return pb.GetJobResponse(job=self._message(job, answers, time.time(), basic=basic))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        """Return a page of jobs."""
        violations: list[Violation] = []
        sort_key = _order(request.order_by, violations)
        scope = f"slurm/{request.filter.SerializeToString(deterministic=True).hex()}/{request.order_by}"
        page = PageRequest.check(
            request.page_size, request.page_token, scope, violations, fits=lambda key: len(key) == KEY_LENGTH
        )
        if violations:
            raise errors.invalid(violations)
        answers, now = await self._answers(), time.time()
        keys = sorted(sort_key(job) for job in answers.scene.picture.jobs.values() if _matches(job, request.filter))
        total = len(keys)
        if page.after is not None:
            keys = [key for key in keys if key > page.after]
        basic = request.view != pb.JOB_VIEW_FULL
        jobs = answers.scene.picture.jobs
        filled = await page.fill(keys, lambda job_id: self._message(jobs[job_id], answers, now, basic=basic))
        return pb.ListJobsResponse(jobs=filled.items, next_page_token=filled.next_token, total_size=total)

    async def WatchJobs(self, request: pb.WatchJobsRequest, context: Any) -> AsyncIterator[pb.WatchJobsResponse]:
        """Yield the selected jobs, then each change. A resumed watch starts with all selected jobs again."""
        sent: dict[str, bytes] = {}
        basic, synced = request.view != pb.JOB_VIEW_FULL, False
        first: set[str] | None = None
        while True:
            answers, now = await self._answers(), time.time()
            matching = {job.id: job for job in answers.scene.picture.jobs.values() if _matches(job, request.filter)}
            changed = pb.WatchJobsResponse(revision=str(int(answers.scene.picture.taken_seconds * 1000)))
            for job_id, job in matching.items():
                state = _state_bytes(job)
                if sent.get(job_id) != state:
                    sent[job_id] = state
                    changed.jobs.append(self._message(job, answers, now, basic=basic))
            gone = [job_id for job_id in sent if job_id not in matching]
            for job_id in gone:
                del sent[job_id]
            changed.removed_job_ids.extend(gone)
            if changed.jobs or gone:
                yield changed
            if not synced:
                yield pb.WatchJobsResponse(synced=True, revision=changed.revision)
                synced, first = True, {job.id for job in matching.values() if not job.ended}
            if request.until_ended and first is not None:
                jobs = answers.scene.picture.jobs
                if all(job_id not in jobs or jobs[job_id].ended for job_id in first):
                    return
            await self._watch.changed()

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobResponse:
        """Return why a job is in its state, and when it starts."""
        answers, now = await self._answers(), time.time()
        scene = answers.scene
        job = _find(scene, request.id)
        message = self._message(job, answers, now, basic=False)
        answer = pb.ExplainJobResponse(job=message, waiting=len(scene.waiting), queue_policy="Slurm's priority")
        answer.score = float(-job.priority)
        if estimate := self._predictions.wire(job, now):
            answer.estimate.CopyFrom(estimate)
        if job.waits:
            await self._explain_wait(job, answers, answer, now)
        else:
            answer.summary = f"{phase_of(job)}: {message.phase_reason or f'Slurm says {job.state.lower()}'}"
        if job.admin_comment.startswith(CHANGED):
            answer.summary += f"; {job.admin_comment}"
        return answer

    async def _explain_wait(self, job: SlurmJob, answers: Answers, answer: pb.ExplainJobResponse, now: float) -> None:
        scene, refusal = answers.scene, answers.refusals[job.id]
        order = [one.id for one in scene.waiting]
        answer.position = order.index(job.id) + 1
        nodes = _nodes_in_words(ruled_out(job, scene.specs[job.id], scene.picture, scene.ledger))
        slurm = f"; Slurm says {job.reason}" if job.reason and job.reason not in refusal.detail else ""
        answer.summary = f"waits: {refusal.code}: {refusal.full_detail}{slurm}" + (f". {nodes}" if nodes else "")
        before = [one.id for one in scene.ready][: answer.position]
        before = before[: before.index(job.id)] if job.id in before else before
        answer.ahead.extend(ahead(scene, job_id) for job_id in before[:NAMED_MAX])
        answer.ahead_count = len(before)
        planned = slurms_estimate(job, now)
        if any(one.id == job.id for one in scene.ready):
            message = forecast_message(job.id, await self._start_times.forecast(scene, [job.id]))
            if message:
                answer.forecast.CopyFrom(message)
                answer.ending.extend(ahead(scene, job_id) for job_id in message.ending_job_ids)
                answer.outlook = outlook(message, scene)
        answer.outlook = "; ".join(filter(None, (answer.outlook, planned)))

    async def SimulateJob(self, request: pb.SimulateJobRequest, context: Any) -> pb.SimulateJobResponse:
        """Return whether jobs that were not submitted would start now, and otherwise when."""
        now = time.time()
        asked = [specs.accept_spec(spec, now=now) for spec in (request.spec, *request.more)]
        answers = await self._answers()
        first, *more = [await self._simulated(f"hypothetical-{n}", spec, answers) for n, spec in enumerate(asked)]
        first.more.extend(more)
        return first

    async def _simulated(self, job_id: str, spec: JobSpec, answers: Answers) -> pb.SimulateJobResponse:
        scene = answers.scene
        estimate = await self._predictions.of_spec(specs.spec_to_wire(spec), caller().name)
        shapes = [shape_of(node, memory_counts=scene.picture.memory_counts) for node in scene.picture.nodes.values()]
        gang = gang_of(job_id, spec, estimate, self._allocator, shapes)
        job = _hypothetical(job_id, spec, scene, estimate)
        limited = slurm_gang_of(job, spec, scene.picture, scene.now) if job.partitions else gang
        gang = replace(gang, constraints=limited.constraints)
        expected = expected_of(job, estimate, scene.now)
        gang = replace(gang, estimate=expected)
        scene = replace(scene, estimates={**scene.estimates, job_id: expected})
        place, position = await self._start_times.place(scene, gang, job)
        answer = pb.SimulateJobResponse(position=position, starts_now=isinstance(place, Start))
        if isinstance(place, Refusal):
            answer.refusal.CopyFrom(refusal_codec.to_text(place))
        names = sorted(scene.picture.nodes)
        for holding in place.holdings if isinstance(place, Start) else ():
            allocation = answer.allocations.add(node_id=names[holding.node])
            task = allocation.tasks.add(role=spec.roles[0].name, core_ids=range(holding.cores))
            for index in range(holding.gpus):
                task.gpus.add(uuid=f"SLURM-{names[holding.node]}-any-{index}", milli=1000)
        forecast = await self._start_times.forecast(scene, [job_id], [(gang, job)])
        if message := forecast_message(job_id, forecast):
            answer.forecast.CopyFrom(message)
            answer.ending.extend(ahead(scene, one) for one in message.ending_job_ids)
            answer.outlook = "starts now" if answer.starts_now else outlook(message, scene)
        await self._add_delays(scene, [(gang, job)], answer)
        return answer

    async def _add_delays(
        self, scene: Scene, more: Sequence[tuple[Any, SlurmJob]], answer: pb.SimulateJobResponse
    ) -> None:
        """Add the waiting jobs that would start later, by median run times."""
        names = [job.id for job in scene.ready]
        if not names:
            return
        without = (await self._start_times.forecast(scene, names, draws=0)).expected
        beside = (await self._start_times.forecast(scene, names, more, draws=0)).expected
        later = [
            (beside[name].seconds - without[name].seconds, name)
            for name in names
            if name in beside and name in without and max(beside[name].seconds, without[name].seconds) < float("inf")
        ]
        delayed = sorted(((seconds, name) for seconds, name in later if seconds >= DELAY_SECONDS_MIN), reverse=True)
        for seconds, name in delayed[:NAMED_MAX]:
            one = ahead(scene, name)
            one.later.CopyFrom(specs.duration(seconds))
            answer.delayed.append(one)
        answer.delayed_count = len(delayed)

    async def _answers(self) -> Answers:
        """Return what is known of the last picture.

        Raises:
            Problem: UNAVAILABLE, if Slurm was never read.
        """
        if not self._watch.picture.taken_seconds:
            raise errors.unavailable(self._watch.problem)
        return await self._start_times.answers()

    def _message(self, job: SlurmJob, answers: Answers, now: float, *, basic: bool) -> job_pb2.Job:
        scene = answers.scene
        message = job_message(job, scene.specs[job.id], scene.picture, now, answers.refusals.get(job.id))
        progress = self._predictions.progress
        if progress and (track := progress.track(job)) and track.latest:
            message.progress.step = track.latest.step
            message.progress.rate_per_second = track.steps_per_second()
            message.progress.update_time.CopyFrom(specs.timestamp(track.samples[-1][0]))
        if basic:
            message.spec.ClearField("command")
        elif (estimate := self._predictions.wire(job, now)) and estimate.predictable:
            total = job.ran_seconds(now) + specs.seconds(estimate.remaining)
            message.predicted_run_time.CopyFrom(specs.duration(total))
            message.prediction_confidence = estimate.confidence
            message.prediction_source = estimate.source
        return message


class ArrayServicer(array_service_pb2_grpc.ArrayServiceServicer):
    """Slurm's arrays are shown task by task."""

    async def ListArrays(
        self, request: array_service_pb2.ListArraysRequest, context: Any
    ) -> array_service_pb2.ListArraysResponse:
        """Return no arrays."""
        return array_service_pb2.ListArraysResponse()


class ContentionServicer(contention_service_pb2_grpc.ContentionServiceServicer):
    """Contention is not watched: that would take agents on the nodes."""

    async def ListIncidents(
        self, request: contention_service_pb2.ListIncidentsRequest, context: Any
    ) -> contention_service_pb2.ListIncidentsResponse:
        """Return no incidents."""
        return contention_service_pb2.ListIncidentsResponse()


class ScheduleServicer(schedule_service_pb2_grpc.ScheduleServiceServicer):
    """Slurm has no schedules."""

    async def ListSchedules(
        self, request: schedule_service_pb2.ListSchedulesRequest, context: Any
    ) -> schedule_service_pb2.ListSchedulesResponse:
        """Return no schedules."""
        return schedule_service_pb2.ListSchedulesResponse()


def _find(scene: Scene, job_id: str) -> SlurmJob:
    """Return a job that the caller may see.

    Raises:
        Problem: NOT_FOUND.
    """
    jobs = scene.picture.jobs
    job = jobs.get(job_id)
    if job and sees(job.account):
        return job
    parts = [
        one.id for one in jobs.values() if job_id and job_id in (str(one.array), str(one.het)) and sees(one.account)
    ]
    if parts:
        what = f"{job_id} has {plural(len(parts), 'job')}: name one of them, such as {parts[0]}"
        raise errors.failed_precondition("SEVERAL_JOBS", what)
    raise errors.not_found("job", job_id, [one.id for one in jobs.values() if sees(one.account)][:1000])


def _hypothetical(job_id: str, spec: JobSpec, scene: Scene, estimate: Estimate) -> SlurmJob:
    """Return a job that was not submitted: behind all that wait, unless its priority is given."""
    lowest = min((job.priority for job in scene.waiting if job.priority), default=1)
    priority = lowest - 1 + spec.priority if spec.priority else lowest - 1
    partition = () if spec.queue == QUEUE_DEFAULT else (spec.queue,)
    return SlurmJob(
        job_id, 0, priority=priority, partitions=partition, time_limit_seconds=spec.time_limit_seconds, name=spec.name
    )


def _state_bytes(job: SlurmJob) -> bytes:
    return repr(job).encode()


def _order(order_by: str, violations: list[Violation]) -> Callable[[SlurmJob], Key]:
    """Return the sort key of an order: one field, then the newest first."""
    name, _, direction = (order_by.split(",")[0].strip() or "create_time desc").partition(" ")
    if name not in ORDERS or direction.strip() not in ("", "asc", "desc"):
        violations.append(Violation("order_by", f"must be one of {', '.join(ORDERS)}, or one with desc"))
        name = "create_time"
    sign, value = -1.0 if direction.strip() == "desc" else 1.0, ORDERS[name]
    return lambda job: (
        sign * value(job),
        -float((job.array or job.het or job.number) * 100_000 - (job.task or 0)),
        job.id,
    )


def _matches(job: SlurmJob, wanted: pb.JobFilter) -> bool:
    """Return whether a job matches a filter, and the caller may see it."""
    conditions = (
        sees(job.account),
        not wanted.phases or specs.PHASES.to_wire(phase_of(job)) in wanted.phases,
        wanted.tenant in ("", job.account or "default"),
        wanted.name in ("", job.name),
        not wanted.ids or job.id in wanted.ids,
        wanted.array_id in ("", str(job.array)),
        not wanted.node_id or any(one.node == wanted.node_id for one in job.placed),
        not wanted.own_only or job.user == caller().name,
        wanted.queue in ("", QUEUE_DEFAULT) or wanted.queue in job.partitions,
        _within(wanted, "created", job.submitted_seconds),
        _within(wanted, "ended", job.ended_seconds if job.ended else None),
    )
    return all(conditions)


def _within(wanted: pb.JobFilter, what: str, seconds: float | None) -> bool:
    since, before = f"{what}_since", f"{what}_before"
    given = [name for name in (since, before) if wanted.HasField(name)]  # type: ignore[arg-type]  # fields of it
    if not given:
        return True
    if seconds is None:
        return False
    low = specs.seconds(getattr(wanted, since)) if since in given else 0.0
    return low <= seconds and (before not in given or seconds < specs.seconds(getattr(wanted, before)))


def _nodes_in_words(reasons: Mapping[str, str]) -> str:
    """Return which nodes are ruled out and why, nodes with one reason together."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for node, reason in reasons.items():
        by_reason[reason].append(node)
    said = []
    for reason, nodes in sorted(by_reason.items(), key=lambda one: -len(one[1])):
        more = f" and {len(nodes) - NODES_NAMED_MAX} more" if len(nodes) > NODES_NAMED_MAX else ""
        said.append(f"{', '.join(nodes[:NODES_NAMED_MAX])}{more}: {reason}")
    return "; ".join(said[:NODES_NAMED_MAX])
