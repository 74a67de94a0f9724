"""Transitions of a job's record. No IO: the caller commits the result."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.codec import specs
from cotenant.codec.job_events import EVENT_KINDS, EventKind, kind_of
from cotenant.core.failures.retry import RetryRules, Tries, decide
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import AttemptState, JobEvent, Phase, next_phase
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import check_amounts
from cotenant.services.queue.jobs import launch_failures, node_avoidance
from cotenant.services.queue.jobs.failure_classifier import failure, from_wire, in_words, is_failure
from cotenant.services.queue.jobs.job_record import EquivalenceKey as EquivalenceKey
from cotenant.services.queue.jobs.job_record import Prediction
from cotenant.services.queue.jobs.job_record import Record as Record
from cotenant.services.queue.jobs.notification_records import without_secrets
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Entry
from cotenant.v1 import job_pb2

SCHEMA_VERSION = 1
EVENTS_MAX = 40
PAST_ATTEMPTS_MAX = 8
PAST_BYTES_MAX = 256 * 1024  # of past attempts: large gangs have large records
RETRY_RULES_DEFAULT = RetryRules()

PHASES, STATES = specs.PHASES, specs.ATTEMPT_STATES

MOVED = (job_pb2.STOP_REASON_MIGRATED, job_pb2.STOP_REASON_CONTENTION)  # stopped for other jobs' sake, to run elsewhere
WHY_STOPPED = {
    job_pb2.STOP_REASON_PREEMPTED: "jobs before it in the order need what it held",
    job_pb2.STOP_REASON_RECLAIMED: "it ran on resources reserved for other jobs, one of which has arrived",
}
_AGE = {AttemptState.ASSIGNED: 0, AttemptState.RUNNING: 1, AttemptState.STOPPING: 2}  # older states are stale
_AGE_ENDED = 3


@dataclass(slots=True)
class ResourceUsage:
    """GPUs in thousandths and cores."""

    gpu_milli: int = 0
    cores: int = 0

    def add(self, other: ResourceUsage) -> None:
        """Add another usage."""
        self.gpu_milli += other.gpu_milli
        self.cores += other.cores


def held_by(record: Record) -> ResourceUsage:
    """Return what a job's attempt holds for good. Lent cores do not count: they return on demand."""
    tasks = (task for part in record.job.attempt.allocations for task in part.tasks)
    cores = sum(min(len(task.core_ids), task.own_cores or len(task.core_ids)) for task in tasks)
    return ResourceUsage(record.requested_spec.gpu_milli, cores)


def borrows(record: Record) -> bool:
    """Return whether a job's attempt holds resources that placement lent to it; or held, if it has ended."""
    return any(task.reclaimable for part in record.job.attempt.allocations for task in part.tasks)


def new_record(
    job_id: str,
    spec: JobSpec,
    submitter: str,
    trace_parent: str,
    unsatisfiable_reason: str = "",
    expected: Sequence[job_pb2.ObjectiveStatus] = (),
) -> Record:
    """Return the record of a new job; `expected` is the forecast of its objectives.

    With an `unsatisfiable_reason` the job is cancelled at once.
    """
    stored = records_pb2.StoredJob(schema_version=SCHEMA_VERSION)
    job = stored.job
    job.id = job_id
    spec = without_secrets(spec)
    job.spec.CopyFrom(specs.spec_to_wire(spec))
    job.phase = PHASES.to_wire(Phase.QUEUED)
    job.create_time.FromNanoseconds(time.time_ns())
    job.trace_parent, job.submitter = trace_parent, submitter
    job.submitted_objectives.extend(expected)
    add_event(stored, EventKind.QUEUED, f"submitted by {submitter}")
    if spec.hold:
        apply_event(stored, JobEvent.SUSPENDED)
        add_event(stored, EventKind.SUSPENDED, "held at submission")
    if unsatisfiable_reason:
        cancel(stored, unsatisfiable_reason)
    return Record(stored, spec)


def cancel(stored: records_pb2.StoredJob, why: str) -> bool:
    """Cancel a job whose dependencies cannot be met; False if it does not wait."""
    phase = PHASES.from_wire(stored.job.phase)
    if phase.ended or phase.holds_resources:
        return False
    apply_event(stored, JobEvent.CANCELLED)
    stored.job.phase_reason = why
    add_event(stored, EventKind.CANCELLED, why)
    return True


class RecordLoader:
    """Reads records from the store; a spec that many jobs have in common is checked once."""

    def __init__(self) -> None:
        self._checked: dict[int, JobSpec] = {}  # valid specs by identity

    def load(self, entry: Entry) -> Record:
        """Return a compacted record from a store entry. Placement reports later whether the job still holds resources.

        Raises:
            NewerSchema: a newer version wrote it.
            BadRecord: it is invalid.
        """
        stored = schema.read(records_pb2.StoredJob, entry)
        with schema.reading(entry):
            record = Record(stored, specs.spec_from_wire(stored.job.spec), entry.mod_revision)
            if not entry.key.endswith(f"/{record.id}"):
                raise ValueError(f"its id is {record.id!r}")
            if record.phase.holds_resources:
                stored.job.phase = PHASES.to_wire(Phase.QUEUED)
            if id(record.spec) not in self._checked:
                requested = record.requested_spec
                if wrong := check_amounts(requested):  # no plan with such a job would be accepted
                    raise ValueError("; ".join(f"{one.field} {one.description}" for one in wrong))
                if requested is record.spec:  # otherwise it is of this job alone
                    self._checked[id(requested)] = requested
            record.compact(like=entry.value)
        return record


def load_record(entry: Entry) -> Record:
    """Return a compacted record from a store entry; see `RecordLoader.load`."""
    return RecordLoader().load(entry)


def submission_order(record: Record) -> tuple[str, int]:
    """Sort key by submission; jobs of an array by index."""
    task = record.spec.array_task
    return (task.array_id, task.index) if task else (record.id, 0)


def add_event(stored: records_pb2.StoredJob, kind: EventKind, detail: str = "", at: float | None = None) -> None:
    """Append an event to the job's event log; beyond the limit the oldest are dropped, but never the first."""
    event = stored.events.add(kind=EVENT_KINDS.to_wire(kind), detail=detail)
    event.time.FromNanoseconds(time.time_ns() if at is None else int(at * 1e9))
    if len(stored.events) > EVENTS_MAX:
        del stored.events[1]


def apply_event(stored: records_pb2.StoredJob, event: JobEvent) -> Phase:
    """Move the job to the phase that the lifecycle table gives for an event."""
    job = stored.job
    story = ", ".join(kind_of(one) for one in stored.events)
    phase = next_phase(job.id, PHASES.from_wire(job.phase), event, story)
    job.phase = PHASES.to_wire(phase)
    if phase.ended:
        job.end_time.FromNanoseconds(time.time_ns())
        job.phase_reason = ""  # the reason of an earlier phase, such as a drain, does not explain the end
    return phase


def apply_attempt(
    stored: records_pb2.StoredJob, attempt: job_pb2.Attempt, retrying: RetryRules = RETRY_RULES_DEFAULT
) -> bool:
    """Apply the state of an attempt to its job; False if nothing is new. Repeats and stale states change nothing."""
    job = stored.job
    phase, state = PHASES.from_wire(job.phase), STATES.from_wire(attempt.state)
    if phase.ended or attempt.number < job.attempt.number:
        return False
    if attempt.number == job.attempt.number and not _is_newer(phase, STATES.from_wire(job.attempt.state), state):
        return _apply_resize(stored, attempt)
    later = attempt.number > job.attempt.number
    if not state.ended and (phase is Phase.SUSPENDED or (later and phase.holds_resources)):
        return False  # it is being stopped, or belongs to a queue that this one replaced
    if later:
        _archive(job)
    job.attempt.CopyFrom(attempt)
    if phase is Phase.SUSPENDED:
        _credit(job)  # its number is kept, so that no other attempt ever gets it
        if stored.wish == job_pb2.JOB_PHASE_CANCELLED:
            apply_event(stored, JobEvent.CANCELLED)
            add_event(stored, EventKind.CANCELLED)
        return True
    if phase is Phase.QUEUED:
        _assigned(stored)
    if state is AttemptState.RUNNING:
        _started(stored)
    elif state is AttemptState.STOPPING:
        apply_event(stored, JobEvent.STOP_ORDERED)
        add_event(stored, EventKind.STOPPING, _reason(attempt))
    elif state.ended:
        _ended(stored, state, retrying)
    return True


def apply_end(
    stored: records_pb2.StoredJob,
    attempt: job_pb2.Attempt,
    retrying: RetryRules,
    prediction: Prediction | None,
    latency_seconds: float | None = None,
) -> bool:
    """Apply the end of an attempt, and note with an ended job what was predicted of it; False if nothing is new.

    The order learns from it, also after a restart: how long the job ran, and how right the prediction was. Of a service
    the latency of its last replicas is kept, which says whether it met its target.
    """
    if not apply_attempt(stored, attempt, retrying):
        return False
    ended = PHASES.from_wire(stored.job.phase).ended
    if latency_seconds is not None and ended:
        stored.job.ended_latency.CopyFrom(specs.duration(min(latency_seconds, specs.DURATION_SECONDS_MAX)))
    if prediction and ended:
        stored.job.predicted_run_time.CopyFrom(specs.duration(prediction.seconds))
        stored.job.prediction_confidence, stored.job.prediction_source = prediction.confidence, prediction.source
        if prediction.band_seconds:
            low, high = map(specs.duration, prediction.band_seconds)
            stored.job.predicted_run_time_p10.CopyFrom(low)
            stored.job.predicted_run_time_p90.CopyFrom(high)
    return True


def _is_newer(phase: Phase, known: AttemptState, reported: AttemptState) -> bool:
    """Return whether the reported state of an attempt is newer than the known one.

    A queued job with an unfinished attempt was read from the store: placement knows the attempt's state.
    """
    if known.ended or phase is Phase.QUEUED:
        return not known.ended
    return _AGE.get(reported, _AGE_ENDED) > _AGE[known]


def _apply_resize(stored: records_pb2.StoredJob, attempt: job_pb2.Attempt) -> bool:
    """Apply a change of an attempt's cores; False if nothing is new.

    A resize starts with a new epoch and ends under the same epoch, with the time of the change.
    """
    known = stored.job.attempt
    if attempt.state != known.state or attempt.epoch < known.epoch or attempt == known:
        return False
    before, after = (_cores(one) for one in (known, attempt))
    if attempt.resize_time != known.resize_time:
        why = f": {attempt.sizing}" if attempt.sizing else ""
        changed = f"from {plural(before, 'core')} to {after}{why}"
        add_event(stored, EventKind.RESIZED, changed, specs.seconds(attempt.resize_time))
    elif _resizing(known) and _resizing(attempt):
        add_event(stored, EventKind.NOT_RESIZED, attempt.sizing)
    known.CopyFrom(attempt)
    return True


def _resizing(attempt: job_pb2.Attempt) -> bool:
    return any(task.target_cores for part in attempt.allocations for task in part.tasks)


def _cores(attempt: job_pb2.Attempt) -> int:
    return sum(len(task.core_ids) for part in attempt.allocations for task in part.tasks)


def _archive(job: job_pb2.Job) -> None:
    """Append the last attempt to the past attempts, which are bounded; attempts that never launched are not kept."""
    if job.attempt.number and job.attempt.state != job_pb2.ATTEMPT_STATE_NOT_LAUNCHED:
        job.past_attempts.append(job.attempt)
    past = job.past_attempts
    while len(past) > PAST_ATTEMPTS_MAX or (past and sum(one.ByteSize() for one in past) > PAST_BYTES_MAX):
        del past[0]


def _assigned(stored: records_pb2.StoredJob) -> None:
    attempt = stored.job.attempt
    stored.ClearField("not_before_time")  # its back-off is over, whatever a clock says after it has been set
    apply_event(stored, JobEvent.ASSIGNED)
    nodes, at = node_avoidance.nodes_of(attempt), specs.seconds(attempt.assign_time)
    back = [one.node_id for one in node_avoidance.active(stored.job, at) if one.node_id in nodes]
    returned = f"; no other node could hold it, so it no longer avoids {', '.join(back)}" if back else ""
    what = f"attempt {attempt.number}" + (", the pre-run," if attempt.pre_run else "")
    add_event(stored, EventKind.ASSIGNED, f"{what} on {', '.join(nodes)}{returned}", at)


def _started(stored: records_pb2.StoredJob) -> None:
    job = stored.job
    if apply_event(stored, JobEvent.STARTED) is Phase.RUNNING:
        add_event(stored, EventKind.RUNNING, f"attempt {job.attempt.number}", specs.seconds(job.attempt.start_time))
    if job.phase_reason.startswith(launch_failures.NOT_LAUNCHED):
        job.phase_reason = ""
    if not job.HasField("start_time"):
        job.start_time.CopyFrom(job.attempt.start_time)


def _ended(stored: records_pb2.StoredJob, state: AttemptState, retrying: RetryRules) -> None:
    job = stored.job
    if job.attempt.HasField("start_time") and not job.HasField("start_time"):  # it ran while the queue was away
        job.start_time.CopyFrom(job.attempt.start_time)
    _credit(job)
    probed = job.attempt.pre_run and state is AttemptState.SUCCEEDED  # the job itself has not succeeded by that
    if probed and not stored.pre_run_passed:
        pass_pre_run(stored, "it exited with status 0")
    if state is AttemptState.SUCCEEDED and not probed:
        apply_event(stored, JobEvent.SUCCEEDED)
        add_event(stored, EventKind.SUCCEEDED)
    elif stored.wish == job_pb2.JOB_PHASE_CANCELLED:
        _stopping(stored)
        apply_event(stored, JobEvent.CANCELLED)
        add_event(stored, EventKind.CANCELLED)
    elif stored.wish == job_pb2.JOB_PHASE_SUSPENDED:
        _stopping(stored)
        apply_event(stored, JobEvent.SUSPENDED)
        stored.wish = job_pb2.JOB_PHASE_UNSPECIFIED
        add_event(stored, EventKind.SUSPENDED)
    elif state is AttemptState.NOT_LAUNCHED and launch_failures.can_launch_elsewhere(job, time.time()):
        _not_launched(stored)
    elif is_failure(job.attempt) or state is AttemptState.NOT_LAUNCHED:
        _failed(stored, retrying)
    else:
        _requeued(stored, state)


def _not_launched(stored: records_pb2.StoredJob) -> None:
    now = time.time()
    wait_seconds = launch_failures.wait_seconds(stored.job, now)
    apply_event(stored, JobEvent.REQUEUED)
    add_event(stored, EventKind.NOT_LAUNCHED, launch_failures.avoid_node(stored.job, now))
    if wait_seconds:
        stored.not_before_time.FromNanoseconds(int((now + wait_seconds) * 1e9))
        add_event(stored, EventKind.REQUEUED, f"no other node knows its submitter; next try in {wait_seconds:.3g} s")


def _stopping(stored: records_pb2.StoredJob) -> None:
    if PHASES.from_wire(stored.job.phase) is not Phase.STOPPING:
        apply_event(stored, JobEvent.STOP_ORDERED)


def _failed(stored: records_pb2.StoredJob, retrying: RetryRules) -> None:
    job, attempt = stored.job, stored.job.attempt
    known = from_wire(attempt.failure)
    how = failure(attempt)
    classified = in_words(known) if known.evidence != how else ""
    why = "; ".join(filter(None, ("in its pre-run" * attempt.pre_run, how, classified)))
    tries = Tries(job.failures, job.spec.retries_max, stored.infrastructure_failures)
    retry = decide(known, tries, retrying, _draw(job))
    job.failures += retry.counts
    stored.infrastructure_failures += not retry.counts
    if not retry.again:
        apply_event(stored, JobEvent.FAILED)
        job.phase_reason = why
        add_event(stored, EventKind.FAILED, why)
        return
    if retry.avoid_node_seconds and attempt.exit.node_id:
        reason = f"attempt {attempt.number} failed there: {in_words(known)}"
        node_avoidance.avoid(job, [attempt.exit.node_id], retry.avoid_node_seconds, reason, time.time())
    apply_event(stored, JobEvent.REQUEUED)
    stored.not_before_time.FromNanoseconds(int((time.time() + retry.wait_seconds) * 1e9))
    job.phase_reason = f"{why}; will be retried, {retry.left} tries left" + (
        "" if retry.counts else " for infrastructure failures"
    )
    add_event(
        stored, EventKind.REQUEUED, f"{why}; the next attempt starts in {retry.wait_seconds:.3g} s at the earliest"
    )


def _draw(job: job_pb2.Job) -> float:
    """Return a number from 0 to 1, constant per attempt, so that jobs that fail together spread out."""
    digest = hashlib.blake2b(f"{job.id}/{job.attempt.number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


def pass_pre_run(stored: records_pb2.StoredJob, why: str) -> None:
    """Record that a job has passed its pre-run."""
    stored.pre_run_passed = True
    add_event(stored, EventKind.PRE_RUN_PASSED, why)


def _requeued(stored: records_pb2.StoredJob, state: AttemptState) -> None:
    job = stored.job
    apply_event(stored, JobEvent.REQUEUED)
    if job.attempt.pre_run and stored.pre_run_passed:
        job.phase_reason = "its pre-run passed; the whole gang is next"
        add_event(stored, EventKind.REQUEUED, job.phase_reason)
        return
    reason = job.attempt.message if state is AttemptState.LOST else _reason(job.attempt)
    if state is AttemptState.STOPPED and job.attempt.stop_reason == job_pb2.STOP_REASON_RESIZED:
        _resized(stored)
        return
    moved = state is AttemptState.STOPPED and job.attempt.stop_reason in MOVED
    job.migrations += moved
    taken = (job_pb2.STOP_REASON_PREEMPTED, job_pb2.STOP_REASON_RECLAIMED)
    job.preemptions += job.attempt.stop_reason in taken
    job.phase_reason = reason
    if state is AttemptState.STOPPED and job.attempt.stop_reason == job_pb2.STOP_REASON_UNHEALTHY:
        _avoid_unhealthy(job)
    add_event(
        stored,
        EventKind.MIGRATED if moved else EventKind.REQUEUED,
        (job.attempt.stop_detail if moved else "") or reason,
    )


def _resized(stored: records_pb2.StoredJob) -> None:
    """Record that an elastic job goes on with another number of replicas: no failure, and no preemption."""
    attempt = stored.job.attempt
    stored.job.phase_reason = resize_in_words(stored.job.spec, attempt)
    add_event(stored, EventKind.RESIZED, stored.job.phase_reason, specs.seconds(attempt.end_time))


def resize_in_words(spec: job_pb2.JobSpec, attempt: job_pb2.Attempt) -> str:
    """Return the resize for which an attempt of an elastic job was stopped."""
    role = next((role.name for role in spec.roles if role.HasField("elastic")), "")
    before = sum(task.role == role for part in attempt.allocations for task in part.tasks)
    why = f": {attempt.stop_detail}" if attempt.stop_detail else ""
    return f"replicas {before} → {attempt.next_replicas}{why}"


def _avoid_unhealthy(job: job_pb2.Job) -> None:
    """Avoid the unhealthy node; of several nodes only if the attempt names it."""
    where = [job.attempt.exit.node_id] if job.attempt.exit.node_id else node_avoidance.nodes_of(job.attempt)
    if len(where) == 1:
        reason = job.attempt.stop_detail or "it was unhealthy"
        node_avoidance.avoid(job, where, RETRY_RULES_DEFAULT.avoid_seconds, reason, time.time())


def _credit(job: job_pb2.Job) -> None:
    """Add the attempt's run time and resources to the job's attained service."""
    attempt = job.attempt
    if not attempt.HasField("start_time"):
        return
    ran = max(0.0, specs.seconds(attempt.end_time) - specs.seconds(attempt.start_time))
    job.run_time.FromNanoseconds(int((specs.seconds(job.run_time) + ran) * 1e9))
    tasks = [task for allocation in attempt.allocations for task in allocation.tasks]
    job.attained_gpu_seconds += ran * sum(share.milli for task in tasks for share in task.gpus) / 1000
    since = attempt.resize_time if attempt.HasField("resize_time") else attempt.start_time
    last = max(0.0, specs.seconds(attempt.end_time) - specs.seconds(since))
    job.attained_core_seconds += attempt.core_seconds + last * _cores(attempt)


def _reason(attempt: job_pb2.Attempt) -> str:
    names = specs.STOP_REASONS.names
    reason = names.get(attempt.stop_reason, "stopped").replace("_", " ")
    detail = attempt.stop_detail or WHY_STOPPED.get(attempt.stop_reason, "")
    return f"{reason}: {detail}" if detail else reason
