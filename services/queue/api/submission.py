"""Submission of jobs and arrays: check, make space, commit."""

from __future__ import annotations

from typing import Any

import structlog

from cotenant import telemetry
from cotenant.codec import errors
from cotenant.security.identity import caller
from cotenant.services.queue.jobs.admission_control import accept
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import CREATE_ARRAY, JobStore, idempotency_key_of
from cotenant.services.queue.jobs.store_admission import StoreAdmission, size_of
from cotenant.services.queue.jobs.transitions import Record, new_record
from cotenant.services.queue.jobs.visibility import View
from cotenant.services.queue.notifications.rules import NotificationRules, violations

log = structlog.get_logger()


class Submission:
    """Creates jobs and arrays for callers."""

    def __init__(
        self,
        job_store: JobStore,
        arrays: JobArrays,
        archived_jobs: ArchivedJobs,
        admission: StoreAdmission,
        notifications: NotificationRules,
    ) -> None:
        self._job_store, self._arrays = job_store, arrays
        self._archived_jobs, self._admission, self._notifications = archived_jobs, admission, notifications

    async def submit(self, request: Any, method: str) -> Record:
        """Return the job that a call creates or has created; of an array, its first job.

        `request` is a CreateJobRequest or CreateArrayRequest, `method` the name of the call. With `validate_only`
        nothing is created, and the job has no id.

        Raises:
            Problem: the job is invalid, can never run, or there is no space for it.
        """
        state, array = self._job_store.state, method == CREATE_ARRAY
        with telemetry.span("submit", job_name=request.spec.name) as span:
            key = idempotency_key_of(method, request.request_id, request.spec)
            try:
                before = await self._archived_jobs.find_dependencies(View(state), request.spec)
                spec = accept(state, request.spec, before, array=array)
                if wrong := [*violations(spec.notify, self._notifications)]:
                    raise errors.invalid(wrong)
                size = size_of(request.spec, len(spec.array.indices) if spec.array else 1)
                await self._admission.prepare(spec.tenant, size)
                self._archived_jobs.check_known(View(state), before)
                self._admission.check(spec, size)
            except errors.Problem:
                if not request.validate_only and (made := await self._job_store.find_result(key)):
                    return made
                raise
            unsatisfiable = before.unsatisfiable_reason(spec)
            if request.validate_only:
                return new_record("", spec, caller().name, "", unsatisfiable)
            with self._admission.reserve(spec, size), state.dependency_gate.pin(spec.dependencies):
                create = self._arrays.create if array else self._job_store.create
                record = await create(spec, caller().name, span.trace_parent, key, unsatisfiable)
            span.set(job=record.id)
            gpus = spec.gpu_milli / 1000
            log.info("job_created", job=record.id, name=spec.name, tenant=spec.tenant, gpus=gpus)
            return record
