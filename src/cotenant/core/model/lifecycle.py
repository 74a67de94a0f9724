"""The lives of jobs and of attempts, as tables. A missing row is an `InvalidTransition`.

The diagrams in docs/ are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Phase(StrEnum):
    """Where a job stands."""

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
        """Whether nothing more can happen to the job."""
        return self in ENDED

    @property
    def holds_resources(self) -> bool:
        """Whether an attempt of the job may hold something."""
        return self in HOLDING


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
HOLDING = frozenset({Phase.STARTING, Phase.RUNNING, Phase.STOPPING})


class JobEvent(StrEnum):
    """What can happen to a job."""

    ASSIGNED = "assigned"  # an attempt was committed
    STARTED = "started"  # all of its processes run
    STOP_ORDERED = "stop_ordered"  # a cancel, a suspend or a preemption of what holds resources
    CANCELLED = "cancelled"  # nothing to stop, or all has stopped
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    REQUEUED = "requeued"  # preempted, moved, drained, lost, or a failure with a retry left
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GIVEN_UP = "given_up"  # the queue policy sees no use in running it any more


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
    """Where an attempt stands."""

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
        """Whether the attempt holds nothing any more."""
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
    """What can happen to an attempt."""

    LAUNCHED = "launched"  # every part of it runs
    STOP_ORDERED = "stop_ordered"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    NOT_LAUNCHED = "not_launched"  # a node could not launch it; the user's program was never executed there


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
    """Why an attempt was told to stop."""

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


class LaunchCause(StrEnum):
    """Which part of a launch failed, before the user's program was executed."""

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


class InvalidTransition(Exception):
    """An event that the table does not know for this phase; carries the whole story."""

    def __init__(self, subject: str, phase: StrEnum, event: StrEnum, story: str = "") -> None:
        super().__init__(f"{subject} is {phase} and cannot be {event}" + (f"; its story: {story}" if story else ""))
        self.subject, self.phase, self.event = subject, phase, event


def next_phase(job_id: str, phase: Phase, event: JobEvent, story: str = "") -> Phase:
    """Look up where an event takes a job.

    >>> next_phase("a", Phase.QUEUED, JobEvent.ASSIGNED)
    <Phase.STARTING: 'starting'>

    Raises:
        InvalidTransition: the table has no such row.
    """
    try:
        return JOB_NEXT[phase, event]
    except KeyError:
        raise InvalidTransition(f"job {job_id}", phase, event, story) from None


def next_state(attempt: str, state: AttemptState, event: AttemptEvent, story: str = "") -> AttemptState:
    """Look up where an event takes an attempt.

    Raises:
        InvalidTransition: the table has no such row.
    """
    try:
        return ATTEMPT_NEXT[state, event]
    except KeyError:
        raise InvalidTransition(f"attempt {attempt}", state, event, story) from None
