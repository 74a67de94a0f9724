"""Submission of jobs and arrays: check, make space, commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from cotenant import telemetry
from cotenant.codec import errors
from cotenant.core.model.job import JobSpec
from cotenant.security.identity import caller
from cotenant.services.queue.api.objective_admission import ObjectiveAdmission
from cotenant.services.queue.api.resubmission import with_secrets
from cotenant.services.queue.jobs.admission_control import accept
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import CREATE_ARRAY, JobStore, idempotency_key_of
from cotenant.services.queue.jobs.store_admission import StoreAdmission, size_of
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.services.queue.jobs.visibility import View
from cotenant.services.queue.notifications.rules import NotificationRules, violations
from cotenant.v1 import job_pb2

log = structlog.get_logger()


class Submission:
    """Creates jobs and arrays for callers."""

    def __init__(
        self,
        job_store: JobStore,
        arrays: JobArrays,
        archived_jobs: ArchivedJobs,
        admission: StoreAdmission,
        objectives: ObjectiveAdmission,
        notifications: NotificationRules,
        check_upload: Callable[[str, str], Awaitable[None]],
        check_secrets: Callable[[JobSpec], None],
    ) -> None:
        self._job_store, self._arrays, self._archived_jobs = job_store, arrays, archived_jobs
        self._admission, self._objectives, self._notifications = admission, objectives, notifications
        self._check_upload, self._check_secrets = check_upload, check_secrets

    async def submit(self, request: Any, method: str) -> Record:
        """Return the job that a call creates or has created; of an array, its first job.

        `request` is a CreateJobRequest or CreateArrayRequest, `method` the name of the call. With `validate_only`
        nothing is created, and the job has no id.

        Raises:
            Problem: the job is invalid, can never run, requires objectives that it would not keep, or there is no
                space for it.
        """
        state, array = self._job_store.state, method == CREATE_ARRAY
        with telemetry.span("submit", job_name=request.spec.name) as span:
            key = idempotency_key_of(method, request.request_id, request.spec)
            try:
                asked = await with_secrets(self._job_store, self._archived_jobs, request.spec, request.like)
                before = await self._archived_jobs.find_dependencies(View(state), asked)
                spec = accept(state, asked, before, array=array)
                if wrong := [*violations(spec.notify, self._notifications)]:
                    raise errors.invalid(wrong)
                self._check_secrets(spec)
                await self._check_upload(spec.tenant, spec.upload)
                size = size_of(asked, len(spec.array.indices) if spec.array else 1)
                await self._admission.prepare(spec.tenant, size)
                self._archived_jobs.check_known(View(state), before)
                self._admission.check(spec, size)
            except errors.Problem:
                if not request.validate_only and (made := await self._job_store.find_result(key)):
                    return made
                raise
            unsatisfiable, expected = before.unsatisfiable_reason(spec), list[job_pb2.ObjectiveStatus]()
            if self._objectives.wanted(spec) and not unsatisfiable:
                if not request.validate_only and (made := await self._job_store.find_result(key)):
                    return made  # with what was expected then
                expected = await self._objectives.check(spec)
            if request.validate_only:
                return new_record("", spec, caller().name, "", unsatisfiable, expected)
            with self._admission.reserve(spec, size), state.dependency_gate.pin(spec.dependencies):
                if array:
                    record = await self._arrays.create(spec, caller().name, span.trace_parent, key, unsatisfiable)
                else:
                    record = await self._job_store.create(
                        spec, caller().name, span.trace_parent, key, unsatisfiable, expected
                    )
            span.set(job=record.id)
            gpus = spec.gpu_milli / 1000
            log.info("job_created", job=record.id, name=spec.name, tenant=spec.tenant, gpus=gpus)
            return record
