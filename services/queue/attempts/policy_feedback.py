"""Connects the queue policy with job ends: it learns from them, and may give jobs up."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

import structlog

from cotenant.codec import errors, specs
from cotenant.codec.job_events import EventKind
from cotenant.core.model.lifecycle import JobEvent, Phase
from cotenant.core.model.refusal import given_up
from cotenant.core.policy.protocols import EndedJob, Learns, QueuePolicy
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.transitions import PHASES, Record, add_event, apply_event, cancel
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import StoreUnavailable

log = structlog.get_logger()

AHEAD_SECONDS_MAX = 3600.0  # by which an end may lie ahead of the clock; beyond, the clock or the history is wrong


class PolicyFeedback:
    """Reports every ended job to the policy, and ends jobs that the policy gives up."""

    def __init__(self, policy: QueuePolicy, job_store: JobStore, background: BackgroundTasks) -> None:
        self.ending: dict[str, None] = {}  # jobs that are being given up, and must not start
        self._policy, self._job_store, self._background = policy, job_store, background
        self._learner = policy if isinstance(policy, Learns) else None
        self._events = job_store.state.events
        self._events.unsatisfiable.subscribe(self.cancel)

    def start(self, records: Iterable[Record]) -> None:
        """Report stored ends to the policy, oldest first, so that it learns again after a restart; then new ones.

        If some of them lie in the future, none are reported: the policy starts from what it assumes without any.
        """
        if self._learner is None:
            return
        ended = [record for record in records if record.phase.ended]
        if any(record.ended_seconds > time.time() + AHEAD_SECONDS_MAX for record in ended):
            log.warning("history_from_the_future_ignored", jobs=len(ended), policy=self._policy.name)
            ended = []
        for record in sorted(ended, key=lambda record: (record.ended_seconds, record.id)):
            self.learn(record)
        self._events.ended.subscribe(self.learn)

    def learn(self, record: Record) -> None:
        """Report an ended job to the policy, if it ever ran."""
        if self._learner is None:
            return
        spec, attained = record.spec, specs.seconds(record.job.run_time)
        if attained <= 0:
            return
        cores = sum(role.replicas * (role.request.cores or 1) for role in spec.roles)
        job = record.job
        predicted = specs.seconds(job.predicted_run_time) if job.HasField("predicted_run_time") else None
        ended = EndedJob(
            spec.gpu_milli,
            cores,
            spec.replicas,
            attained,
            attained * spec.gpu_milli / 1000,
            predicted,
            job.prediction_confidence,
        )
        try:
            self._learner.learn(ended)
        except Exception:  # a bug in a policy must not keep a job from ending
            log.exception("learning_failed", job=record.id, policy=self._policy.name)

    def give_up(self, job_ids: Iterable[str]) -> None:
        """Start to end waiting jobs that the policy gives up."""
        for job_id in job_ids:
            if job_id not in self.ending and (record := self._job_store.state.records.get(job_id)):
                self.ending[job_id] = None
                self._background.start(self._give_up(record))

    def cancel(self, record: Record, why: str) -> None:
        """Start to cancel a job whose dependencies cannot be met."""
        if record.id not in self.ending:
            self.ending[record.id] = None
            self._background.start(self._cancel(record, why))

    async def _cancel(self, record: Record, why: str) -> None:
        """Cancel a job durably, retrying while the store is unavailable: nothing else would do it later."""
        try:
            if await self._job_store.change_with_retry(record, lambda stored: cancel(stored, why), instead=_leave):
                log.info("job_cancelled_unmet", job=record.id, why=why)
        finally:
            del self.ending[record.id]

    async def _give_up(self, record: Record) -> None:
        """Fail a job durably; on an error the next cycle tries again, if the policy still gives the job up."""
        why = given_up(self._policy.name).detail
        if record.job.spec.HasField("deadline"):
            deadline = datetime.fromtimestamp(specs.seconds(record.job.spec.deadline), UTC)
            why += f"; its deadline is {deadline.isoformat(timespec='seconds')}"
        try:
            if await self._job_store.change(record, lambda stored: _end(stored, why), instead=_leave):
                log.info("job_given_up", job=record.id, policy=self._policy.name)
        except (StoreUnavailable, errors.Problem) as error:
            log.warning("job_give_up_delayed", job=record.id, error=str(error))
        finally:
            del self.ending[record.id]


def _leave(stored: records_pb2.StoredJob) -> bool:
    """Leave a job alone that has started."""
    return False


def _end(stored: records_pb2.StoredJob, why: str) -> bool:
    if PHASES.from_wire(stored.job.phase) is not Phase.QUEUED:
        return False
    apply_event(stored, JobEvent.GIVEN_UP)
    stored.job.phase_reason = why
    add_event(stored, EventKind.GIVEN_UP, why)
    return True
