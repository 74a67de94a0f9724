"""What events make of a job's record. No IO: whoever calls commits the result."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from cotenant.codec import specs
from cotenant.core.failures.retry import RetryRules, Tries, decide
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import AttemptState, JobEvent, Phase, next_phase
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import check_amounts
from cotenant.services.queue.jobs import launch_failures, node_avoidance
from cotenant.services.queue.jobs.failure_classifier import broke, failure, from_wire, in_words
from cotenant.services.queue.jobs.job_record import Record as Record
from cotenant.services.queue.jobs.job_record import ShapeKey as ShapeKey
from cotenant.store import schema
from cotenant.store.port import Entry
from cotenant.v1 import job_pb2, records_pb2

SCHEMA_VERSION = 1
EVENTS_MAX = 40
PAST_ATTEMPTS_MAX = 8
PAST_BYTES_MAX = 256 * 1024  # of past attempts: large gangs are large records
RETRYING = RetryRules()

PHASES, STATES = specs.PHASES, specs.ATTEMPT_STATES

MOVED = (job_pb2.STOP_REASON_MIGRATED, job_pb2.STOP_REASON_CONTENTION)  # it goes on elsewhere, for others' sake
_AGE = {AttemptState.ASSIGNED: 0, AttemptState.RUNNING: 1, AttemptState.STOPPING: 2}  # news that is older is stale
_AGE_ENDED = 3


@dataclass(slots=True)
class Use:
    """GPUs in thousandths and cores."""

    gpu_milli: int = 0
    cores: int = 0

    def add(self, other: Use) -> None:
        """Count more."""
        self.gpu_milli += other.gpu_milli
        self.cores += other.cores


def held_by(record: Record) -> Use:
    """What a job's attempt holds for good. Cores that are lent to it count for nobody: they come back when asked."""
    tasks = (task for part in record.job.attempt.allocations for task in part.tasks)
    cores = sum(min(len(task.core_ids), task.own_cores or len(task.core_ids)) for task in tasks)
    return Use(record.asks.gpu_milli, cores)


def new_record(job_id: str, spec: JobSpec, submitter: str, trace_parent: str, hopeless: str = "") -> Record:
    """Make the record of a job that has just been taken in; `hopeless` says why it is cancelled at once, if it is."""
    stored = records_pb2.StoredJob(schema_version=SCHEMA_VERSION)
    job = stored.job
    job.id = job_id
    job.spec.CopyFrom(specs.spec_to_wire(spec))
    job.phase = PHASES.to_wire(Phase.QUEUED)
    job.create_time.FromNanoseconds(time.time_ns())
    job.trace_parent, job.submitter = trace_parent, submitter
    note(stored, "queued", f"submitted by {submitter}")
    if hopeless:
        cancel(stored, hopeless)
    return Record(stored, spec)


def cancel(stored: records_pb2.StoredJob, why: str) -> bool:
    """End a job that waits for what can never be; False where it does not wait."""
    phase = PHASES.from_wire(stored.job.phase)
    if phase.ended or phase.holds_resources:
        return False
    move(stored, JobEvent.CANCELLED)
    stored.job.phase_reason = why
    note(stored, "cancelled", why)
    return True


def loaded(entry: Entry) -> Record:
    """Make a record of what was kept; it rests. Whether the job still holds something is for placement to say.

    Raises:
        NewerSchema: a newer version wrote it.
        BadRecord: it is none.
    """
    stored = schema.read(records_pb2.StoredJob, entry)
    with schema.reading(entry):
        if not entry.key.endswith(f"/{stored.job.id}"):
            raise ValueError(f"it says that it is {stored.job.id!r}")
        record = Record(stored, specs.spec_from_wire(stored.job.spec), entry.mod_revision)
        if record.phase.holds_resources:
            stored.job.phase = PHASES.to_wire(Phase.QUEUED)
        if wrong := check_amounts(record.asks):  # no plan that names it would be taken
            raise ValueError("; ".join(f"{one.field} {one.description}" for one in wrong))
        record.rest(like=entry.value)
    return record


def turn(record: Record) -> tuple[str, int]:
    """Jobs by the order in which they were taken in, those of an array by index."""
    task = record.spec.array_task
    return (task.array_id, task.index) if task else (record.id, 0)


def note(stored: records_pb2.StoredJob, what: str, detail: str = "", at: float | None = None) -> None:
    """Add a line to the job's story; the oldest lines go first, but never the first of all."""
    event = stored.events.add(what=what, detail=detail)
    event.time.FromNanoseconds(time.time_ns() if at is None else int(at * 1e9))
    if len(stored.events) > EVENTS_MAX:
        del stored.events[1]


def move(stored: records_pb2.StoredJob, event: JobEvent) -> Phase:
    """Take the job where the table says."""
    job = stored.job
    story = ", ".join(one.what for one in stored.events)
    phase = next_phase(job.id, PHASES.from_wire(job.phase), event, story)
    job.phase = PHASES.to_wire(phase)
    if phase.ended:
        job.end_time.FromNanoseconds(time.time_ns())
    return phase


def take_attempt(stored: records_pb2.StoredJob, attempt: job_pb2.Attempt, retrying: RetryRules = RETRYING) -> bool:
    """Let the job follow its attempt; False where it says nothing new. Repeats and stale news change nothing."""
    job = stored.job
    phase, state = PHASES.from_wire(job.phase), STATES.from_wire(attempt.state)
    if phase.ended or attempt.number < job.attempt.number:
        return False
    if attempt.number == job.attempt.number and not _news(phase, STATES.from_wire(job.attempt.state), state):
        return _resized(stored, attempt)
    later = attempt.number > job.attempt.number
    if not state.ended and (phase is Phase.SUSPENDED or (later and phase.holds_resources)):
        return False  # it is being stopped; or it is of a queue that has replaced this one
    if later:
        _archive(job)
    job.attempt.CopyFrom(attempt)
    if phase is Phase.SUSPENDED:
        _credit(job)  # and its number is kept, so that no other attempt ever has it
        if stored.wish == job_pb2.JOB_PHASE_CANCELLED:
            move(stored, JobEvent.CANCELLED)
            note(stored, "cancelled")
        return True
    if phase is Phase.QUEUED:
        _assigned(stored)
    if state is AttemptState.RUNNING:
        _started(stored)
    elif state is AttemptState.STOPPING:
        move(stored, JobEvent.STOP_ORDERED)
        note(stored, "stopping", _reason(attempt))
    elif state.ended:
        _ended(stored, state, retrying)
    return True


def _news(phase: Phase, known: AttemptState, told: AttemptState) -> bool:
    """Whether what is told of an attempt is more than is known of it.

    A job that waits although its attempt has not ended was read from the store: placement says how far that has come.
    """
    if known.ended or phase is Phase.QUEUED:
        return not known.ended
    return _AGE.get(told, _AGE_ENDED) > _AGE[known]


def _resized(stored: records_pb2.StoredJob, attempt: job_pb2.Attempt) -> bool:
    """Take in that an attempt's cores change, or have changed; False where it says nothing new.

    A resize begins with an epoch of its own and ends under the same, with the time of the change.
    """
    known = stored.job.attempt
    if attempt.state != known.state or attempt.epoch < known.epoch or attempt == known:
        return False
    before, after = (_cores(one) for one in (known, attempt))
    if attempt.resize_time != known.resize_time:
        why = f": {attempt.sizing}" if attempt.sizing else ""
        changed = f"from {plural(before, 'core')} to {after}{why}"
        note(stored, "resized", changed, specs.seconds(attempt.resize_time))
    elif _resizing(known) and _resizing(attempt):
        note(stored, "not resized", attempt.sizing)
    known.CopyFrom(attempt)
    return True


def _resizing(attempt: job_pb2.Attempt) -> bool:
    return any(task.target_cores for part in attempt.allocations for task in part.tasks)


def _cores(attempt: job_pb2.Attempt) -> int:
    return sum(len(task.core_ids) for part in attempt.allocations for task in part.tasks)


def _archive(job: job_pb2.Job) -> None:
    """Put the last attempt to the past ones, of which only the newest are kept; one that was not launched is none."""
    if job.attempt.number and job.attempt.state != job_pb2.ATTEMPT_STATE_NOT_LAUNCHED:
        job.past_attempts.append(job.attempt)
    past = job.past_attempts
    while len(past) > PAST_ATTEMPTS_MAX or (past and sum(one.ByteSize() for one in past) > PAST_BYTES_MAX):
        del past[0]


def _assigned(stored: records_pb2.StoredJob) -> None:
    attempt = stored.job.attempt
    move(stored, JobEvent.ASSIGNED)
    nodes, at = node_avoidance.nodes_of(attempt), specs.seconds(attempt.assign_time)
    back = [one.node_id for one in node_avoidance.live(stored.job, at) if one.node_id in nodes]
    told = f"; nothing else could hold it, so it no longer keeps away from {', '.join(back)}" if back else ""
    what = f"attempt {attempt.number}" + (", the pre-run," if attempt.pre_run else "")
    note(stored, "assigned", f"{what} on {', '.join(nodes)}{told}", at)


def _started(stored: records_pb2.StoredJob) -> None:
    job = stored.job
    if move(stored, JobEvent.STARTED) is Phase.RUNNING:
        note(stored, "running", f"attempt {job.attempt.number}", specs.seconds(job.attempt.start_time))
    if job.phase_reason.startswith(launch_failures.NOT_LAUNCHED):
        job.phase_reason = ""
    if not job.HasField("start_time"):
        job.start_time.CopyFrom(job.attempt.start_time)


def _ended(stored: records_pb2.StoredJob, state: AttemptState, retrying: RetryRules) -> None:
    job = stored.job
    _credit(job)
    probed = job.attempt.pre_run and state is AttemptState.SUCCEEDED  # of the job itself that says nothing
    if probed and not stored.pre_run_passed:
        pass_pre_run(stored, "it ended by itself with status 0")
    if state is AttemptState.SUCCEEDED and not probed:
        move(stored, JobEvent.SUCCEEDED)
        note(stored, "succeeded")
    elif stored.wish == job_pb2.JOB_PHASE_CANCELLED:
        _stopping(stored)
        move(stored, JobEvent.CANCELLED)
        note(stored, "cancelled")
    elif stored.wish == job_pb2.JOB_PHASE_SUSPENDED:
        _stopping(stored)
        move(stored, JobEvent.SUSPENDED)
        stored.wish = job_pb2.JOB_PHASE_UNSPECIFIED
        note(stored, "suspended")
    elif state is AttemptState.NOT_LAUNCHED and launch_failures.goes_elsewhere(job, time.time()):
        _not_launched(stored)
    elif broke(job.attempt) or state is AttemptState.NOT_LAUNCHED:
        _failed(stored, retrying)
    else:
        _requeued(stored, state)


def _not_launched(stored: records_pb2.StoredJob) -> None:
    now = time.time()
    wait_seconds = launch_failures.wait_seconds(stored.job, now)
    move(stored, JobEvent.REQUEUED)
    note(stored, "not launched", launch_failures.take(stored.job, now))
    if wait_seconds:
        stored.not_before_time.FromNanoseconds(int((now + wait_seconds) * 1e9))
        note(stored, "requeued", f"no other node knows its submitter; the next try is in {wait_seconds:.3g} s")


def _stopping(stored: records_pb2.StoredJob) -> None:
    if PHASES.from_wire(stored.job.phase) is not Phase.STOPPING:
        move(stored, JobEvent.STOP_ORDERED)


def _failed(stored: records_pb2.StoredJob, retrying: RetryRules) -> None:
    job, attempt = stored.job, stored.job.attempt
    told = from_wire(attempt.failure)
    why = "; ".join(filter(None, ("in its pre-run" * attempt.pre_run, failure(attempt), in_words(told))))
    tries = Tries(job.failures, job.spec.retries_max, stored.infrastructure_failures)
    retry = decide(told, tries, retrying, _draw(job))
    job.failures += retry.counts
    stored.infrastructure_failures += not retry.counts
    if not retry.again:
        move(stored, JobEvent.FAILED)
        job.phase_reason = why
        note(stored, "failed", why)
        return
    if retry.avoid_node_seconds and attempt.exit.node_id:
        reason = f"attempt {attempt.number} failed there: {in_words(told)}"
        node_avoidance.avoid(job, [attempt.exit.node_id], retry.avoid_node_seconds, reason, time.time())
    move(stored, JobEvent.REQUEUED)
    stored.not_before_time.FromNanoseconds(int((time.time() + retry.wait_seconds) * 1e9))
    job.phase_reason = f"{why}; tried again, {retry.left} tries left" + (
        "" if retry.counts else " for the machines' sake"
    )
    note(stored, "requeued", f"{why}; the next attempt starts in {retry.wait_seconds:.3g} s at the earliest")


def _draw(job: job_pb2.Job) -> float:
    """A number from 0 to 1 that is always the same for an attempt, so that jobs which fail together spread out."""
    digest = hashlib.blake2b(f"{job.id}/{job.attempt.number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


def pass_pre_run(stored: records_pb2.StoredJob, why: str) -> None:
    """Keep that a job's pre-run has shown that it runs."""
    stored.pre_run_passed = True
    note(stored, "pre-run passed", why)


def _requeued(stored: records_pb2.StoredJob, state: AttemptState) -> None:
    job = stored.job
    move(stored, JobEvent.REQUEUED)
    if job.attempt.pre_run and stored.pre_run_passed:
        job.phase_reason = "its pre-run has passed; the whole gang comes next"
        note(stored, "requeued", job.phase_reason)
        return
    reason = job.attempt.message if state is AttemptState.LOST else _reason(job.attempt)
    moved = state is AttemptState.STOPPED and job.attempt.stop_reason in MOVED
    job.migrations += moved
    taken = (job_pb2.STOP_REASON_PREEMPTED, job_pb2.STOP_REASON_RECLAIMED)
    job.preemptions += job.attempt.stop_reason in taken
    job.phase_reason = reason
    if state is AttemptState.STOPPED and job.attempt.stop_reason == job_pb2.STOP_REASON_UNHEALTHY:
        _avoid_unhealthy(job)
    note(stored, "migrated" if moved else "requeued", (job.attempt.stop_detail if moved else "") or reason)


def _avoid_unhealthy(job: job_pb2.Job) -> None:
    """Keep away from the node that was not well; of several nobody knows here which one that was, unless it is said."""
    where = [job.attempt.exit.node_id] if job.attempt.exit.node_id else node_avoidance.nodes_of(job.attempt)
    if len(where) == 1:
        reason = job.attempt.stop_detail or "it was not well"
        node_avoidance.avoid(job, where, RETRYING.avoid_seconds, reason, time.time())


def _credit(job: job_pb2.Job) -> None:
    """Add what the attempt ran to what the job has attained."""
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
    return f"{reason}: {attempt.stop_detail}" if attempt.stop_detail else reason
