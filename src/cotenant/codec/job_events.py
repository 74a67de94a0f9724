"""The kinds of events in a job's history, on the wire and as text."""

from __future__ import annotations

from enum import StrEnum

from cotenant.codec.specs import EnumMap
from cotenant.v1 import job_service_pb2 as pb


class EventKind(StrEnum):
    """The kind of an event; `cotenant/v1/job_service.proto` documents them."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    RUNNING = "running"
    STOPPING = "stopping"
    RESIZED = "resized"
    NOT_RESIZED = "not_resized"
    NOT_LAUNCHED = "not_launched"
    REQUEUED = "requeued"
    PRE_RUN_PASSED = "pre_run_passed"
    CANCEL_REQUESTED = "cancel_requested"
    SUSPEND_REQUESTED = "suspend_requested"
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    UPDATED = "updated"
    MIGRATION_REQUESTED = "migration_requested"
    MIGRATED = "migrated"
    PROFILING = "profiling"
    PROFILED = "profiled"
    NOT_PROFILED = "not_profiled"
    GIVEN_UP = "given_up"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STORE_ACCEPTED = "store_accepted"
    NOTIFIED = "notified"
    NOT_NOTIFIED = "not_notified"


EVENT_KINDS = EnumMap(EventKind, pb.JobEventKind, "JOB_EVENT_KIND")


def kind_of(event: pb.JobEvent) -> str:
    """Return the kind of an event; "" if this version does not know it.

    >>> kind_of(pb.JobEvent(kind=pb.JOB_EVENT_KIND_CANCEL_REQUESTED))
    'cancel_requested'
    """
    return EVENT_KINDS.names.get(event.kind, "")
