"""A job in the queue's memory: as a message while it changes, as bytes while it is idle.

A protobuf message takes ten times the memory of its bytes, and is parsed from them in a few microseconds. Of very many
jobs, most wait or have ended, and do not change for a long time: their records are compacted. What cycles and counts
need of every job is kept beside the bytes. The record of an ended job never changes, so its message is parsed at each
use; the message of any other job stays, once parsed, until the record is compacted again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from cotenant.codec import specs
from cotenant.codec.estimates import estimate_from_wire
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_table import NO_CODE
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.pre_run import pre_run_of
from cotenant.core.prediction.own_rate import RateTrack
from cotenant.core.sizing import replica_sizing
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2, predictor_service_pb2


class EquivalenceKey:
    """Identifies an equivalence class: jobs that get the same refusals. Freed with the last job of the class.

    `code` numbers the classes of waiting jobs; `fragmented_seconds` is the time in which free resources were too
    fragmented for all of the class, cycle by cycle.
    """

    __slots__ = ("__weakref__", "code", "fragmented_seconds")

    def __init__(self) -> None:
        self.code, self.fragmented_seconds = NO_CODE, 0.0


class Prediction(NamedTuple):
    """A predicted total run time, with the confidence in it, the predictor that made it, and its band if any."""

    seconds: float
    confidence: float
    source: str
    band_seconds: tuple[float, float] | None = None  # the 10th and the 90th percentile


class _CompactRecord(NamedTuple):
    """The fields that are kept of a compacted record."""

    packed: bytes
    phase: Phase
    since: float  # when the job ended, or else when its present wait began
    not_before: float
    avoids: bool
    attempt_number: int
    created: float
    started: float = 0.0
    run_seconds: float = 0.0
    attained_gpu_seconds: float = 0.0


class Record:
    """A job: its stored record, its decoded spec, and the revision of its last commit."""

    __slots__ = (
        "_class_fragmented",
        "_compact",
        "_elastic_spec",
        "_fragmented",
        "_lock",
        "_packed",
        "_stored",
        "counted_as",
        "end_reported",
        "ends_within_seconds",
        "equivalence_key",
        "estimate",
        "estimated_after",
        "estimated_replicas",
        "fragmented_until",
        "id",
        "indexed_phase",
        "ran_before_estimate_seconds",
        "rate_track",
        "refresh_after",
        "refreshed_under",
        "replica_rates",
        "replicas_chosen",
        "replicas_most",
        "resize_note",
        "revision",
        "sequence",
        "spec",
        "start_prediction",
        "usage_counted",
    )

    def __init__(self, stored: records_pb2.StoredJob, spec: JobSpec, revision: int = 0) -> None:
        self._stored: records_pb2.StoredJob | None = stored
        self._compact: _CompactRecord | None = None
        self._packed = b""  # the bytes that the message was parsed from, shared with the store
        self._lock: asyncio.Lock | None = None
        self.id: str = stored.job.id  # one string object for all uses of the id
        self.spec, self.revision = spec, revision
        self.indexed_phase: Phase | None = None  # the phase under which it is indexed
        self.sequence = 0  # order of admission
        self.equivalence_key = EquivalenceKey()  # one object for all jobs of an equivalence class
        self.estimate: predictor_service_pb2.Estimate | None = None
        self.ends_within_seconds: float | None = None  # if it starts now, by that estimate; None until computed
        self.ran_before_estimate_seconds = 0.0  # the estimate's remaining time counts from here
        self.rate_track: RateTrack | None = None  # of its own rate; None before it reports a step
        self.start_prediction: Prediction | None = None  # as `prediction`, when its present run began
        self.estimated_after: int | None = None  # the last attempt before it was estimated while waiting
        self.refreshed_under: tuple[int, ...] = ()  # attempt, epoch and rate when it was last estimated while running
        self.refresh_after = 0.0  # earliest time of the next refresh, in unix seconds
        self.counted_as: EquivalenceKey | None = None  # its key, while the cycle may start it
        self.estimated_replicas = 0  # of its elastic role, for which the estimate was made
        self.replicas_chosen: int | None = None  # for the next start of an elastic job, by the allocator
        self.replicas_most: int | None = None  # for its next start, because more found no room; None: its maximum
        self.replica_rates: dict[int, float] = {}  # measured steps per second, by replicas of its elastic role
        self.resize_note = ""  # why it has its number of replicas, and what one more would bring
        self._elastic_spec: JobSpec | None = None  # of its present or next attempt
        self.usage_counted = 0  # the last ended attempt for which its tenant was charged
        self.end_reported = False  # the policy has learned of its end
        self._fragmented = 0.0  # seconds, but for those of its class beyond `_class_fragmented`
        self._class_fragmented = 0.0
        self.fragmented_until = 0.0  # until when that was counted

    def __repr__(self) -> str:
        return f"Record({self.id!r}, {self.phase.value}, revision={self.revision})"

    # The message ---------------------------------------------------------------------------------------------

    @property
    def stored(self) -> records_pb2.StoredJob:
        """The stored record. Do not change that of an ended job in place: it may be a copy."""
        if self._stored is not None:
            return self._stored
        assert self._compact
        stored = records_pb2.StoredJob.FromString(self._compact.packed)
        if not self._compact.phase.ended:
            self._stored, self._packed, self._compact = stored, self._compact.packed, None
        return stored

    @stored.setter
    def stored(self, stored: records_pb2.StoredJob) -> None:
        self._stored, self._packed, self._compact = stored, b"", None

    @property
    def packed(self) -> bytes:
        """The record as serialized."""
        return self._compact.packed if self._compact else self.stored.SerializeToString()

    def compact(self, like: bytes = b"") -> None:
        """Replace the message by bytes if nothing is in progress; reuse the object `like` if it is equal."""
        stored = self._stored
        if stored is None:
            return
        job = stored.job
        phase, number, created = self.phase, job.attempt.number, specs.seconds(job.create_time)
        if phase.holds_resources or stored.wish or (number and self.migrating):
            return
        packed = stored.SerializeToString()
        known = like if like == packed else self._packed if self._packed == packed else packed
        self._packed = b""
        if phase is Phase.QUEUED and not number:  # nothing else has happened to it: most jobs of a long queue
            self._compact = _CompactRecord(known, phase, created, self.not_before_seconds, self.avoids, 0, created)
        else:
            since = specs.seconds(job.end_time) if phase.ended else self.waiting_since
            self._compact = _CompactRecord(
                known,
                phase,
                since,
                self.not_before_seconds,
                self.avoids,
                number,
                since if since == created else created,  # one object
                self.started_seconds,
                self.run_seconds,
                job.attained_gpu_seconds or 0.0,
            )
        self._stored = None

    @property
    def job(self) -> job_pb2.Job:
        """The job message."""
        return self.stored.job

    def copy_job(self) -> job_pb2.Job:
        """Return a copy of the job message; a compact record stays compact, so that a long list costs no memory."""
        if self._compact:
            return records_pb2.StoredJob.FromString(self._compact.packed).job
        job = job_pb2.Job()
        job.CopyFrom(self.stored.job)
        return job

    @property
    def lock(self) -> asyncio.Lock:
        """Held while the job is changed."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    # Fields --------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The job's phase."""
        if self._stored is None:
            assert self._compact
            return self._compact.phase
        return specs.PHASES.from_wire(self._stored.job.phase)

    @property
    def wish(self) -> job_pb2.JobPhase.ValueType:
        """The phase that the job is to enter once it holds nothing."""
        return job_pb2.JOB_PHASE_UNSPECIFIED if self._compact else self.stored.wish

    @property
    def not_before_seconds(self) -> float:
        """When it may be tried again, in unix seconds; 0 if there is no back-off."""
        return self._compact.not_before if self._compact else specs.seconds(self.stored.not_before_time) or 0.0

    @property
    def avoids(self) -> bool:
        """Whether the record lists avoided nodes, expired or not."""
        return self._compact.avoids if self._compact else bool(self.stored.job.avoided_nodes)

    @property
    def ended_seconds(self) -> float:
        """When it ended, in unix seconds; 0 if it has not."""
        if self._compact:
            return self._compact.since if self._compact.phase.ended else 0.0
        return specs.seconds(self.stored.job.end_time)

    @property
    def created_seconds(self) -> float:
        """When it was acknowledged, in unix seconds."""
        return self._compact.created if self._compact else specs.seconds(self.stored.job.create_time)

    @property
    def started_seconds(self) -> float:
        """When its first attempt ran, in unix seconds; 0 if none has."""
        return self._compact.started if self._compact else specs.seconds(self.stored.job.start_time) or 0.0

    @property
    def run_seconds(self) -> float:
        """How long its ended attempts ran."""
        return self._compact.run_seconds if self._compact else specs.seconds(self.stored.job.run_time) or 0.0

    def attained_gpu_seconds(self, now: float) -> float:
        """Return the GPU service that it has attained by now."""
        if self._compact:
            return self._compact.attained_gpu_seconds
        attained = self.stored.job.attained_gpu_seconds or 0.0
        if self.phase is Phase.RUNNING:
            ran = max(0.0, now - specs.seconds(self.stored.job.attempt.start_time))
            attained += ran * self.requested_spec.gpu_milli / 1000
        return attained

    def ran_seconds(self, now: float) -> float:
        """Return how long it has run over all attempts, including a running one."""
        job = self.stored.job
        runs = job.attempt.HasField("start_time") and not job.attempt.HasField("end_time")
        return self.run_seconds + (max(0.0, now - specs.seconds(job.attempt.start_time)) if runs else 0.0)

    @property
    def waiting_since(self) -> float:
        """When its present wait began, in unix seconds: the end of its last attempt, or else its submission."""
        if self._compact and not self._compact.phase.ended:
            return self._compact.since
        job = self.stored.job
        return specs.seconds(job.attempt.end_time if job.attempt.HasField("end_time") else job.create_time)

    @property
    def attempt_number(self) -> int:
        """The number of the last attempt; 0 before the first."""
        return self._compact.attempt_number if self._compact else self.stored.job.attempt.number

    @property
    def is_new(self) -> bool:
        """Whether it waits as it was submitted: it has no attempt, no back-off and no estimate yet."""
        compact = self._compact
        return (
            compact is not None
            and compact.phase is Phase.QUEUED
            and not (compact.attempt_number or compact.not_before or compact.avoids)
            and self.estimate is None
        )

    @property
    def in_pre_run(self) -> bool:
        """Whether its present or next attempt is its pre-run."""
        if self.spec.pre_run_seconds is None:
            return False
        return self.stored.job.attempt.pre_run if self.phase.holds_resources else not self.stored.pre_run_passed

    @property
    def requested_spec(self) -> JobSpec:
        """The spec of its present or next attempt: the whole gang, or one replica for its pre-run."""
        if self.in_pre_run:
            return pre_run_of(self.spec)
        if self.spec.elastic:
            return self._with_elastic_replicas()
        return self._with_replicas() if self.spec.open else self.spec

    def _with_elastic_replicas(self) -> JobSpec:
        count = self.elastic_replicas
        known = self._elastic_spec
        if known is None or known.roles[known.elastic_role or 0].replicas != count:
            known = self._elastic_spec = self.spec.with_elastic_replicas(count)
        return known

    @property
    def elastic_replicas(self) -> int:
        """The replicas of an elastic job's elastic role: of its present attempt, or else with which it would start."""
        role = self.spec.roles[self.spec.elastic_role or 0]
        if self.phase.holds_resources:
            parts = self.job.attempt.allocations
            return sum(task.role == role.name for part in parts for task in part.tasks) or role.replicas
        if self.replicas_chosen is not None:
            return self.replicas_chosen
        return (self.job.attempt.next_replicas if self.migrating else 0) or role.replicas

    def _with_replicas(self) -> JobSpec:
        """Return an open service's spec with its attempt's replicas; while it waits, with those for its objective."""
        if self.phase.holds_resources and (tasks := sum(len(part.tasks) for part in self.job.attempt.allocations)):
            return self.spec.with_replicas(tasks)
        if not self.estimate:
            return self.spec
        return replica_sizing.with_required_replicas(self.spec, estimate_from_wire(self.estimate))

    @property
    def migrating(self) -> bool:
        """Whether it waits only because it was migrated or resized: placement reserves its new place for a while."""
        if self._compact or self.phase is not Phase.QUEUED:
            return False
        attempt = self.stored.job.attempt
        return attempt.state == job_pb2.ATTEMPT_STATE_STOPPED and attempt.stop_reason in (
            job_pb2.STOP_REASON_MIGRATED,
            job_pb2.STOP_REASON_RESIZED,
        )

    # Estimates and waits -------------------------------------------------------------------------------------

    @property
    def prediction(self) -> Prediction | None:
        """Its predicted total run time; None if it is unpredictable."""
        if self.estimate is None or not self.estimate.predictable:
            return None
        ran, estimate, band = self.ran_before_estimate_seconds, self.estimate, None
        if estimate.HasField("remaining_p10") and estimate.HasField("remaining_p90"):
            band = ran + specs.seconds(estimate.remaining_p10), ran + specs.seconds(estimate.remaining_p90)
        seconds = ran + specs.seconds(estimate.remaining)
        return Prediction(seconds, estimate.confidence, estimate.source.partition(":")[0], band)

    def set_estimate(self, estimate: predictor_service_pb2.Estimate, now: float = 0.0) -> None:
        """Set the estimate, and the run time from which on its remaining time counts.

        `now` is the time of the estimate, for a running job.
        """
        self.estimate, self.ends_within_seconds = estimate, None
        if self.spec.elastic:
            runs = self.phase is Phase.RUNNING
            role = self.spec.roles[self.spec.elastic_role or 0]
            self.estimated_replicas = self.elastic_replicas if runs else role.replicas
        self.ran_before_estimate_seconds = self.run_seconds if self.attempt_number else 0.0
        if self.phase is Phase.QUEUED:
            self.estimated_after = self.attempt_number
        if now and self.phase is Phase.RUNNING:
            self.ran_before_estimate_seconds += max(0.0, now - specs.seconds(self.job.attempt.start_time))

    @property
    def fragmented_seconds(self) -> float:
        """The time of its present wait in which free resources were fragmented, cycle by cycle."""
        if self.counted_as is None:
            return self._fragmented
        return self._fragmented + self.counted_as.fragmented_seconds - self._class_fragmented

    @fragmented_seconds.setter
    def fragmented_seconds(self, seconds: float) -> None:
        self._fragmented = seconds
        self._class_fragmented = self.counted_as.fragmented_seconds if self.counted_as is not None else 0.0

    def count_as(self, key: EquivalenceKey | None) -> None:
        """Set the class as part of which it waits for the cycle; None if it does not."""
        seconds, self.counted_as = self.fragmented_seconds, key
        self.fragmented_seconds = seconds

    def age(self, now: float, *, fragmented: bool, since: float = 0.0) -> None:
        """Count the time since the last count, or since the wait began, as fragmented or not.

        The free resources have been fragmented `since` a time: a job that earlier cycles passed over counts no longer
        than that. A restart of the queue resets the count.
        """
        if self.fragmented_until < self.waiting_since:
            self.fragmented_seconds, self.fragmented_until = 0.0, self.waiting_since
        if fragmented:
            self.fragmented_seconds += max(0.0, now - max(self.fragmented_until, since))
        self.fragmented_until = max(self.fragmented_until, now)
