"""What a queue policy has to do with jobs' ends: it learns from them, and it may bring them about."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import structlog

from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import JobEvent, Phase
from cotenant.core.model.refusal import given_up
from cotenant.core.policy.protocols import Ended, Learns, QueuePolicy
from cotenant.rpc.task_group import Background
from cotenant.services.queue.jobs.job_store import Keeper
from cotenant.services.queue.jobs.transitions import PHASES, Record, cancel, move, note
from cotenant.store.port import StoreUnavailable
from cotenant.v1 import records_pb2

log = structlog.get_logger()


class Endings:
    """Tells the policy of every job that ended, and ends those that the policy gives up."""

    def __init__(self, policy: QueuePolicy, keeper: Keeper, background: Background) -> None:
        self.ending: dict[str, None] = {}  # jobs that are being given up: nothing of them is started any more
        self._policy, self._keeper, self._background = policy, keeper, background
        self._learner = policy if isinstance(policy, Learns) else None

    def learn_all(self, records: Iterable[Record]) -> None:
        """Tell the policy of what the store knows of ends, oldest first: so a restart learns again."""
        if self._learner is None:
            return
        ended = [record for record in records if record.phase.ended]
        for record in sorted(ended, key=lambda record: (record.ended_seconds, record.id)):
            self.learn(record)

    def learn(self, record: Record) -> None:
        """Tell the policy of a job that ended, if it ever ran."""
        if self._learner is None:
            return
        spec, attained = record.spec, specs.seconds(record.job.run_time)
        if attained <= 0:
            return
        cores = sum(role.replicas * (role.request.cores or 1) for role in spec.roles)
        ended = Ended(spec.gpu_milli, cores, spec.replicas, attained, attained * spec.gpu_milli / 1000)
        try:
            self._learner.learn(ended)
        except Exception:  # a policy's bug must not keep a job from ending
            log.exception("learning_failed", job=record.id, policy=self._policy.name)

    def give_up(self, job_ids: Iterable[str]) -> None:
        """Begin to end waiting jobs that the policy will not run any more."""
        for job_id in job_ids:
            if job_id not in self.ending and (record := self._keeper.state.records.get(job_id)):
                self.ending[job_id] = None
                self._background.start(self._give_up(record))

    def cancel(self, record: Record, why: str) -> None:
        """Begin to end a job that waits for what can never be."""
        if record.id not in self.ending:
            self.ending[record.id] = None
            self._background.start(self._cancel(record, why))

    async def _cancel(self, record: Record, why: str) -> None:
        """End a job durably, however long the store is away: nobody would do it later."""
        try:
            if await self._keeper.insist(record, lambda stored: cancel(stored, why), instead=_leave):
                log.info("job_cancelled_unmet", job=record.id, why=why)
        finally:
            del self.ending[record.id]

    async def _give_up(self, record: Record) -> None:
        """End a job durably; where that fails the next cycle tries again, if it is still to be given up."""
        why = given_up(self._policy.name).detail
        if record.job.spec.HasField("deadline"):
            deadline = datetime.fromtimestamp(specs.seconds(record.job.spec.deadline), UTC)
            why += f"; its deadline is {deadline.isoformat(timespec='seconds')}"
        try:
            if await self._keeper.change(record, lambda stored: _end(stored, why), instead=_leave):
                log.info("job_given_up", job=record.id, policy=self._policy.name)
        except (StoreUnavailable, errors.Problem) as error:
            log.warning("giving_up_delayed", job=record.id, error=str(error))
        finally:
            del self.ending[record.id]


def _leave(stored: records_pb2.StoredJob) -> bool:
    """Do nothing to a job that has begun to run."""
    return False


def _end(stored: records_pb2.StoredJob, why: str) -> bool:
    if PHASES.from_wire(stored.job.phase) is not Phase.QUEUED:
        return False
    move(stored, JobEvent.GIVEN_UP)
    stored.job.phase_reason = why
    note(stored, "given up", why)
    return True
