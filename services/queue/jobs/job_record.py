"""A job as the queue holds it in memory: as a message while things happen to it, as bytes while it rests.

A message of protocol buffers takes ten times the memory of its bytes, and is made of them in a few microseconds. Most
of very many jobs wait or have ended, and nothing happens to them for long: those rest. What cycles and counts ask of
all jobs is kept beside the bytes. What has ended changes no more in place, so its message is made anew whenever it is
asked for; any other job's stays once it has been asked for, until the job is put to rest again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.pre_run import pre_run_of
from cotenant.services.queue.jobs import replica_count
from cotenant.v1 import job_pb2, predictor_service_pb2, records_pb2


class ShapeKey:
    """Stands for a shape: jobs that are refused for the same reasons. Gone when the last job of the shape is."""

    __slots__ = ("__weakref__",)


class _Rest(NamedTuple):
    """What is known of a job that rests."""

    packed: bytes
    phase: Phase
    since: float  # when it ended, or else when it last began to wait
    not_before: float
    avoids: bool
    attempt_number: int


class Record:
    """A job: its record as kept, the spec in the core's words, and the revision of the last commit."""

    __slots__ = (
        "_lock",
        "_packed",
        "_rest",
        "_stored",
        "aged_to",
        "ends_within_seconds",
        "estimate",
        "estimated_after",
        "fragmented_seconds",
        "id",
        "listed",
        "ran_before_estimate_seconds",
        "renew_after",
        "renewed_under",
        "revision",
        "sequence",
        "shape",
        "spec",
        "told_ended",
        "waits_as",
    )

    def __init__(self, stored: records_pb2.StoredJob, spec: JobSpec, revision: int = 0) -> None:
        self._stored: records_pb2.StoredJob | None = stored
        self._rest: _Rest | None = None
        self._packed = b""  # what the message was made of, which the store holds too
        self._lock: asyncio.Lock | None = None
        self.id: str = stored.job.id  # one string, wherever the job is named
        self.spec, self.revision = spec, revision
        self.listed: Phase | None = None  # the phase under which it is listed
        self.sequence = 0  # the order in which jobs were taken in
        self.shape = ShapeKey()  # one object for all jobs of one shape
        self.estimate: predictor_service_pb2.Estimate | None = None
        self.ends_within_seconds: float | None = None  # if it starts now, by that estimate; None until somebody asks
        self.ran_before_estimate_seconds = 0.0  # of which that estimate tells the rest
        self.estimated_after: int | None = None  # the last attempt before it was estimated while it waited
        self.renewed_under = (0, 0)  # the attempt and its epoch when it was last estimated while it ran
        self.renew_after = 0.0  # when it may be so again, in unix seconds
        self.waits_as: ShapeKey | None = None  # its shape, while the cycle may start it
        self.told_ended = False  # whoever learns from ends has been told
        self.fragmented_seconds = 0.0  # of its present wait, those in which its places were in fragments, by cycles
        self.aged_to = 0.0  # up to when these were counted

    def __repr__(self) -> str:
        return f"Record({self.id!r}, {self.phase.value}, revision={self.revision})"

    # The message ---------------------------------------------------------------------------------------------

    @property
    def stored(self) -> records_pb2.StoredJob:
        """The record as kept. That of a job that has ended is not to be changed in place: it may be a copy."""
        if self._stored is not None:
            return self._stored
        assert self._rest
        stored = records_pb2.StoredJob.FromString(self._rest.packed)
        if not self._rest.phase.ended:
            self._stored, self._packed, self._rest = stored, self._rest.packed, None
        return stored

    @stored.setter
    def stored(self, stored: records_pb2.StoredJob) -> None:
        self._stored, self._packed, self._rest = stored, b"", None

    @property
    def packed(self) -> bytes:
        """The record as it is written down."""
        return self._rest.packed if self._rest else self.stored.SerializeToString()

    def rest(self, like: bytes = b"") -> None:
        """Keep bytes instead of the message, where nothing is under way; the same object where they are `like` some."""
        stored = self._stored
        if stored is None:
            return
        phase = self.phase
        if phase.holds_resources or stored.wish or self.moving:
            return
        packed = stored.SerializeToString()
        known = next((one for one in (like, self._packed) if one == packed), packed)
        self._packed = b""
        self._rest = _Rest(
            known,
            phase,
            specs.seconds(stored.job.end_time) if phase.ended else self.waiting_since,
            self.not_before_seconds,
            self.avoids,
            stored.job.attempt.number,
        )
        self._stored = None

    @property
    def job(self) -> job_pb2.Job:
        """The job's message."""
        return self.stored.job

    @property
    def lock(self) -> asyncio.Lock:
        """Held by whoever changes the job."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    # What it says --------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        if self._stored is None:
            assert self._rest
            return self._rest.phase
        return specs.PHASES.from_wire(self._stored.job.phase)

    @property
    def wish(self) -> job_pb2.JobPhase.ValueType:
        """What is to become of the job once it holds nothing any more."""
        return job_pb2.JOB_PHASE_UNSPECIFIED if self._rest else self.stored.wish

    @property
    def not_before_seconds(self) -> float:
        """When it may be tried again, in unix seconds; 0 where that is no matter of time."""
        return self._rest.not_before if self._rest else specs.seconds(self.stored.not_before_time) or 0.0

    @property
    def avoids(self) -> bool:
        """Whether it keeps away from nodes, or did."""
        return self._rest.avoids if self._rest else bool(self.stored.job.avoided_nodes)

    @property
    def ended_seconds(self) -> float:
        """When it ended, in unix seconds; 0 of one that has not."""
        if self._rest:
            return self._rest.since if self._rest.phase.ended else 0.0
        return specs.seconds(self.stored.job.end_time)

    @property
    def waiting_since(self) -> float:
        """When it last began to wait, in unix seconds: when its last attempt ended, or else at its submission."""
        if self._rest and not self._rest.phase.ended:
            return self._rest.since
        job = self.stored.job
        return specs.seconds(job.attempt.end_time if job.attempt.HasField("end_time") else job.create_time)

    @property
    def attempt_number(self) -> int:
        """The number of the last attempt; 0 before the first."""
        return self._rest.attempt_number if self._rest else self.stored.job.attempt.number

    @property
    def pre_runs(self) -> bool:
        """Whether what it holds, or else waits for, is its pre-run."""
        if self.spec.pre_run_seconds is None:
            return False
        return self.stored.job.attempt.pre_run if self.phase.holds_resources else not self.stored.pre_run_passed

    @property
    def asks(self) -> JobSpec:
        """What it holds, or else waits for: all that its user wants, or one replica of it for its pre-run."""
        if self.pre_runs:
            return pre_run_of(self.spec)
        return replica_count.decided(self) if self.spec.open else self.spec

    @property
    def moving(self) -> bool:
        """Whether it waits only because it was moved, and its new place is kept for it for a while."""
        if self._rest or self.phase is not Phase.QUEUED:
            return False
        attempt = self.stored.job.attempt
        return attempt.state == job_pb2.ATTEMPT_STATE_STOPPED and attempt.stop_reason == job_pb2.STOP_REASON_MIGRATED

    # What is learnt of it ------------------------------------------------------------------------------------

    def expect(self, estimate: predictor_service_pb2.Estimate, now: float = 0.0) -> None:
        """Keep what the predictor says, and from when on: the rest that it tells shrinks while the job runs.

        `now` is when it was told, of a job that runs.
        """
        self.estimate, self.ends_within_seconds = estimate, None
        self.ran_before_estimate_seconds = specs.seconds(self.job.run_time) if self.attempt_number else 0.0
        if self.phase is Phase.QUEUED:
            self.estimated_after = self.attempt_number
        if now and self.phase is Phase.RUNNING:
            self.ran_before_estimate_seconds += max(0.0, now - specs.seconds(self.job.attempt.start_time))

    def age(self, now: float, *, fragmented: bool, since: float = 0.0) -> None:
        """Count the time since it was last counted, or since it began to wait: its places may have been in fragments.

        They have been `since` some time: a job that was passed over before is counted for no longer. After a restart of
        the queue this begins anew.
        """
        if self.aged_to < self.waiting_since:
            self.fragmented_seconds, self.aged_to = 0.0, self.waiting_since
        if fragmented:
            self.fragmented_seconds += max(0.0, now - max(self.aged_to, since))
        self.aged_to = max(self.aged_to, now)
