"""Charges tenants and users for the attempts of jobs: from their start to their end, for what they hold.

The intervals come from the attempts in the jobs' records, so usage that was not stored yet, or never was, follows from
the jobs that are kept. No IO.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog

from cotenant.codec import specs
from cotenant.core.model.resources import NAMES, WHOLE_GPU_MILLI, Resources
from cotenant.core.scheduling.decayed_usage import DecayedUsage
from cotenant.core.scheduling.usage_ledger import TenantUsage, UsageLedger
from cotenant.services.queue.jobs.job_record import Record
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2

log = structlog.get_logger()

SCHEMA_VERSION = 1
AHEAD_SECONDS_MAX = (
    3600.0  # by which stored usage may lie ahead of the clock; beyond, it is counted again from the jobs
)

# The fields of a stored usage, and the number of each resource's units in one of theirs.
_FIELDS = ("gpu_seconds", "core_seconds", "memory_byte_seconds", "scratch_byte_seconds")
_UNITS = (WHOLE_GPU_MILLI, 1, 1, 1)


class UsageAccounting:
    """The decayed usage of all tenants; empty with a half-life of 0."""

    def __init__(self, half_life_seconds: float = 0.0) -> None:
        self.ledger = UsageLedger(half_life_seconds) if half_life_seconds else None
        self.changed: set[str] = set()  # tenants whose ended attempts are not stored as usage
        self._open: dict[str, int] = {}  # by job, the number of the attempt that is charged now

    def sync(self, record: Record) -> None:
        """Update the charges after a change of a job."""
        ledger = self.ledger
        if ledger is None or record.attempt_number <= record.usage_counted:
            return
        if record.phase.ended and record.ended_seconds <= ledger.counted_until(record.spec.tenant):
            record.usage_counted = record.attempt_number
            return
        now, job = time.time(), record.job
        for attempt in (*job.past_attempts, job.attempt):
            if attempt.number > record.usage_counted and attempt.HasField("end_time"):
                self._settle(ledger, record, attempt, now)
        attempt = job.attempt
        if attempt.number <= record.usage_counted or not attempt.HasField("start_time"):
            return
        if not record.phase.holds_resources:
            if record.id in self._open:  # it ended without a report of when
                self._stop(ledger, record.id, now, now)
                record.usage_counted = attempt.number
                self.changed.add(record.spec.tenant)
            return
        self._follow(ledger, record, attempt, now)

    def _follow(self, ledger: UsageLedger, record: Record, attempt: job_pb2.Attempt, now: float) -> None:
        """Charge a running attempt."""
        if self._open.get(record.id, attempt.number) != attempt.number:  # a later one: the earlier one has ended
            self._stop(ledger, record.id, specs.seconds(attempt.assign_time), now)
        *before, (held, since, _) = intervals(attempt, now)
        if record.id in self._open:
            ledger.change(record.id, held, at=since, now=now)
            return
        tenant, user = record.spec.tenant, record.job.submitter
        for old, began, ended in before:
            ledger.charge(tenant, user, old, (began, ended), now)
        ledger.start(record.id, tenant, user, held, since=since, now=now)
        self._open[record.id] = attempt.number

    def _settle(self, ledger: UsageLedger, record: Record, attempt: job_pb2.Attempt, now: float) -> None:
        """Charge for an ended attempt."""
        end = specs.seconds(attempt.end_time)
        if self._open.get(record.id) == attempt.number:
            self._stop(ledger, record.id, end, now)
        elif attempt.HasField("start_time"):
            for held, since, until in intervals(attempt, end):
                ledger.charge(record.spec.tenant, record.job.submitter, held, (since, until), now)
        record.usage_counted = attempt.number
        self.changed.add(record.spec.tenant)

    def _stop(self, ledger: UsageLedger, job_id: str, until: float, now: float) -> None:
        ledger.stop(job_id, until=until, now=now)
        del self._open[job_id]

    # Records -------------------------------------------------------------------------------------------------

    def restore(self, stored: records_pb2.StoredTenantUsage) -> None:
        """Continue from a stored record, before any job is known.

        Raises:
            ValueError: a figure of it is not finite, or negative.
        """
        if self.ledger is None:
            return
        half_life, at = self.ledger.half_life_seconds, specs.seconds(stored.time)
        own, users = _usage_of(stored.usage, half_life, at), dict[str, DecayedUsage]()
        for one in stored.users:
            users[one.user] = _usage_of(one.usage, half_life, at)
        if at > time.time() + AHEAD_SECONDS_MAX:
            log.warning("usage_from_the_future_ignored", tenant=stored.tenant_id)
            return
        self.ledger.restore(stored.tenant_id, TenantUsage(own, users))

    def stored(self, tenant: str, now: float) -> records_pb2.StoredTenantUsage:
        """Return the record of a tenant's usage, which counts everything until now."""
        assert self.ledger
        usage = self.ledger.usage(tenant, now)
        stored = records_pb2.StoredTenantUsage(schema_version=SCHEMA_VERSION, tenant_id=tenant)
        stored.time.FromNanoseconds(int(usage.own.at_seconds * 1e9))
        _set(stored.usage, usage.own)
        for user, own in sorted(usage.users.items()):
            _set(stored.users.add(user=user).usage, own)
        return stored


def intervals(attempt: job_pb2.Attempt, until: float) -> Iterator[tuple[Resources, float, float]]:
    """Yield what an attempt held, since when and until when; before its last resize the average of its cores."""
    held, start = _held(attempt), specs.seconds(attempt.start_time)
    resized = specs.seconds(attempt.resize_time) if attempt.HasField("resize_time") else start
    if resized > start:
        average = round(attempt.core_seconds / (resized - start))
        yield held._replace(cores=max(0, average)), start, resized
    yield held, max(start, resized), max(start, resized, until)


def _held(attempt: job_pb2.Attempt) -> Resources:
    """Return what an attempt holds for good. Lent cores do not count: they return on demand."""
    tasks = [task for part in attempt.allocations for task in part.tasks]
    return Resources(
        sum(share.milli for task in tasks for share in task.gpus),
        sum(min(len(task.core_ids), task.own_cores or len(task.core_ids)) for task in tasks),
        *(sum(getattr(task, name) for task in tasks) for name in NAMES[2:]),
    )


def _usage_of(stored: records_pb2.StoredUsage, half_life_seconds: float, at: float) -> DecayedUsage:
    amounts = tuple([getattr(stored, name) * units for name, units in zip(_FIELDS, _UNITS, strict=True)])
    return DecayedUsage(half_life_seconds, at, amounts)


def _set(stored: records_pb2.StoredUsage, usage: DecayedUsage) -> None:
    for name, units, amount in zip(_FIELDS, _UNITS, usage.amounts, strict=True):
        setattr(stored, name, amount / units)
