"""The life cycles of jobs and attempts, as tables. A missing row is an `InvalidTransition`.

The diagrams in docs/ are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Phase(StrEnum):
    """Where a job is in its life cycle."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the job has ended for good."""
        return self in ENDED

    @property
    def holds_resources(self) -> bool:
        """Whether an attempt of the job may hold resources."""
        return self in HOLDING


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
HOLDING = frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING})


class JobEvent(StrEnum):
    """An event in the life of a job."""

    ASSIGNED = "assigned"  # an attempt was committed
    STARTED = "started"  # all of its processes run
    STOP_ORDERED = "stop_ordered"  # a job that holds resources is cancelled, suspended or preempted
    CANCELLED = "cancelled"  # nothing had to stop, or everything has stopped
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    REQUEUED = "requeued"  # preempted, migrated, resized, drained, lost, or failed with a retry left
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GIVEN_UP = "given_up"  # the queue policy no longer sees any use in running it


JOB_NEXT: Mapping[tuple[Phase, JobEvent], Phase] = MappingProxyType(
    {
        (Phase.QUEUED, JobEvent.ASSIGNED): Phase.STARTING,
        (Phase.QUEUED, JobEvent.CANCELLED): Phase.CANCELLED,
        (Phase.QUEUED, JobEvent.SUSPENDED): Phase.SUSPENDED,
        (Phase.QUEUED, JobEvent.GIVEN_UP): Phase.FAILED,
        (Phase.SUSPENDED, JobEvent.RESUMED): Phase.QUEUED,
        (Phase.SUSPENDED, JobEvent.CANCELLED): Phase.CANCELLED,
        (Phase.STARTING, JobEvent.STARTED): Phase.RUNNING,
        (Phase.STARTING, JobEvent.STOP_ORDERED): Phase.STOPPING,
        (Phase.STARTING, JobEvent.SUCCEEDED): Phase.SUCCEEDED,
        (Phase.STARTING, JobEvent.FAILED): Phase.FAILED,
        (Phase.STARTING, JobEvent.REQUEUED): Phase.QUEUED,
        (Phase.RUNNING, JobEvent.STOP_ORDERED): Phase.STOPPING,
        (Phase.RUNNING, JobEvent.SUCCEEDED): Phase.SUCCEEDED,
        (Phase.RUNNING, JobEvent.FAILED): Phase.FAILED,
        (Phase.RUNNING, JobEvent.REQUEUED): Phase.QUEUED,
        (Phase.STOPPING, JobEvent.STARTED): Phase.STOPPING,
        (Phase.STOPPING, JobEvent.STOP_ORDERED): Phase.STOPPING,
        (Phase.STOPPING, JobEvent.SUCCEEDED): Phase.SUCCEEDED,
        (Phase.STOPPING, JobEvent.FAILED): Phase.FAILED,
        (Phase.STOPPING, JobEvent.CANCELLED): Phase.CANCELLED,
        (Phase.STOPPING, JobEvent.SUSPENDED): Phase.SUSPENDED,
        (Phase.STOPPING, JobEvent.REQUEUED): Phase.QUEUED,
    }
)


class AttemptState(StrEnum):
    """Where an attempt is in its life cycle."""

    ASSIGNED = "assigned"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    NOT_LAUNCHED = "not_launched"

    @property
    def ended(self) -> bool:
        """Whether the attempt no longer holds resources."""
        return self in ATTEMPT_ENDED


ATTEMPT_ENDED = frozenset(
    {
        AttemptState.SUCCEEDED,
        AttemptState.FAILED,
        AttemptState.STOPPED,
        AttemptState.LOST,
        AttemptState.NOT_LAUNCHED,
    }
)


class AttemptEvent(StrEnum):
    """An event in the life of an attempt."""

    LAUNCHED = "launched"  # all of its parts run
    STOP_ORDERED = "stop_ordered"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    NOT_LAUNCHED = "not_launched"  # a node could not launch it; the user's program did not run there


ATTEMPT_NEXT: Mapping[tuple[AttemptState, AttemptEvent], AttemptState] = MappingProxyType(
    {
        (AttemptState.ASSIGNED, AttemptEvent.LAUNCHED): AttemptState.RUNNING,
        (AttemptState.ASSIGNED, AttemptEvent.STOP_ORDERED): AttemptState.STOPPING,
        (AttemptState.ASSIGNED, AttemptEvent.SUCCEEDED): AttemptState.SUCCEEDED,
        (AttemptState.ASSIGNED, AttemptEvent.FAILED): AttemptState.FAILED,
        (AttemptState.ASSIGNED, AttemptEvent.STOPPED): AttemptState.STOPPED,
        (AttemptState.ASSIGNED, AttemptEvent.LOST): AttemptState.LOST,
        (AttemptState.ASSIGNED, AttemptEvent.NOT_LAUNCHED): AttemptState.NOT_LAUNCHED,
        (AttemptState.RUNNING, AttemptEvent.STOP_ORDERED): AttemptState.STOPPING,
        (AttemptState.RUNNING, AttemptEvent.SUCCEEDED): AttemptState.SUCCEEDED,
        (AttemptState.RUNNING, AttemptEvent.FAILED): AttemptState.FAILED,
        (AttemptState.RUNNING, AttemptEvent.STOPPED): AttemptState.STOPPED,
        (AttemptState.RUNNING, AttemptEvent.LOST): AttemptState.LOST,
        (AttemptState.STOPPING, AttemptEvent.LAUNCHED): AttemptState.STOPPING,
        (AttemptState.STOPPING, AttemptEvent.STOP_ORDERED): AttemptState.STOPPING,
        (AttemptState.STOPPING, AttemptEvent.SUCCEEDED): AttemptState.SUCCEEDED,
        (AttemptState.STOPPING, AttemptEvent.FAILED): AttemptState.FAILED,
        (AttemptState.STOPPING, AttemptEvent.STOPPED): AttemptState.STOPPED,
        (AttemptState.STOPPING, AttemptEvent.LOST): AttemptState.LOST,
        (AttemptState.STOPPING, AttemptEvent.NOT_LAUNCHED): AttemptState.NOT_LAUNCHED,
    }
)


class StopReason(StrEnum):
    """Why an attempt was stopped."""

    CANCELLED = "cancelled"
    SUSPENDED = "suspended"
    PREEMPTED = "preempted"
    DRAINED = "drained"
    GANG_BROKEN = "gang_broken"
    SUPERSEDED = "superseded"
    MIGRATED = "migrated"
    RECLAIMED = "reclaimed"
    CONTENTION = "contention"
    UNHEALTHY = "unhealthy"
    DISCONNECTED = "disconnected"
    TIME_LIMIT = "time_limit"
    RESIZED = "resized"


class LaunchCause(StrEnum):
    """The step of a launch that failed before the user's program was executed."""

    CGROUP = "cgroup"
    DIRECTORY = "directory"
    DEVICE = "device"
    PROCESS = "process"
    USER = "user"
    DISK = "disk"
    LIMIT = "limit"
    CPUS = "cpus"
    ORDER = "order"
    WORKING_DIRECTORY = "working_directory"
    OTHER = "other"
    UPLOAD = "upload"
    ENVIRONMENT = "environment"
    IMAGE = "image"
    SECRET = "secret"  # noqa: S105 - the step, not a value
    MOUNT = "mount"


class InvalidTransition(Exception):
    """An event that is not allowed in the present phase; carries the history so far."""

    def __init__(self, subject: str, phase: StrEnum, event: StrEnum, story: str = "") -> None:
        super().__init__(f"{subject} is {phase} and cannot be {event}" + (f"; history: {story}" if story else ""))
        self.subject, self.phase, self.event = subject, phase, event


def next_phase(job_id: str, phase: Phase, event: JobEvent, story: str = "") -> Phase:
    """Return the phase of a job after an event.

    >>> next_phase("a", Phase.QUEUED, JobEvent.ASSIGNED)
    <Phase.STARTING: 'starting'>

    Raises:
        InvalidTransition: the event is not allowed in this phase.
    """
    try:
        return JOB_NEXT[phase, event]
    except KeyError:
        raise InvalidTransition(f"job {job_id}", phase, event, story) from None


def next_state(attempt: str, state: AttemptState, event: AttemptEvent, story: str = "") -> AttemptState:
    """Return the state of an attempt after an event.

    Raises:
        InvalidTransition: the event is not allowed in this phase.
    """
    try:
        return ATTEMPT_NEXT[state, event]
    except KeyError:
        raise InvalidTransition(f"attempt {attempt}", state, event, story) from None
