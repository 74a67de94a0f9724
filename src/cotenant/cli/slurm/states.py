"""The states of jobs, and the reasons why they wait, in Slurm's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cotenant.cli.slurm.outcome import SlurmError
from cotenant.v1 import job_pb2 as pb


class State(NamedTuple):
    """A state: its long and its short name."""

    name: str
    code: str


PENDING, CONFIGURING = State("PENDING", "PD"), State("CONFIGURING", "CF")
RUNNING, COMPLETING = State("RUNNING", "R"), State("COMPLETING", "CG")
COMPLETED, FAILED, CANCELLED = State("COMPLETED", "CD"), State("FAILED", "F"), State("CANCELLED", "CA")
TIMEOUT, NODE_FAIL = State("TIMEOUT", "TO"), State("NODE_FAIL", "NF")
OUT_OF_MEMORY = State("OUT_OF_MEMORY", "OOM")
UNKNOWN = State("UNKNOWN", "UN")
OTHERS = (  # which no job of Cotenant has
    *(State("SUSPENDED", "S"), State("PREEMPTED", "PR"), State("STOPPED", "ST"), State("BOOT_FAIL", "BF")),
    *(State("DEADLINE", "DL"), State("REQUEUED", "RQ"), State("RESIZING", "RS"), State("REVOKED", "RV")),
)

_OF_PHASE: Mapping[pb.JobPhase.ValueType, State] = {
    pb.JOB_PHASE_QUEUED: PENDING,
    pb.JOB_PHASE_STARTING: CONFIGURING,
    pb.JOB_PHASE_RUNNING: RUNNING,
    pb.JOB_PHASE_STOPPING: COMPLETING,
    pb.JOB_PHASE_SUSPENDED: PENDING,  # it holds nothing, as a job that Slurm holds
    pb.JOB_PHASE_SUCCEEDED: COMPLETED,
    pb.JOB_PHASE_FAILED: FAILED,
    pb.JOB_PHASE_CANCELLED: CANCELLED,
}
_BY_NAME = {
    word: state for state in (*_OF_PHASE.values(), TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, *OTHERS) for word in state
}
ENDED_PHASES = (pb.JOB_PHASE_SUCCEEDED, pb.JOB_PHASE_FAILED, pb.JOB_PHASE_CANCELLED)
LIVE_PHASES = tuple(phase for phase in _OF_PHASE if phase not in ENDED_PHASES)

_REASONS: Mapping[str, str] = {  # by the code of a refusal
    "ARRAY_LIMIT": "JobArrayTaskLimit",
    "BACK_OFF": "BeginTime",
    "BEGIN_TIME": "BeginTime",
    "BEHIND": "Priority",
    "DEPENDENCY": "Dependency",
    "NEVER_FITS": "BadConstraints",
    "NODES_HELD": "ReqNodeNotAvail",
    "NO_NODES": "ReqNodeNotAvail",
    "NOT_YET_CONSIDERED": "None",
    "OUTRANKED": "Priority",
    "QUOTA": "AssocGrpLimit",
    "RESERVED": "Reservation",
    "SECRETS": "Dependency",
    "SUSPENDED": "JobHeldUser",
}
_RESOURCES = "Resources"
_OF_END: Mapping[State, str] = {
    FAILED: "NonZeroExitCode", TIMEOUT: "TimeLimit", OUT_OF_MEMORY: "OutOfMemory", NODE_FAIL: "NodeDown"
}  # fmt: skip


def state_of(job: pb.Job) -> State:
    """Return the state of a job."""
    state = _OF_PHASE.get(job.phase, UNKNOWN)
    if state is not FAILED:
        return state
    attempt = job.attempt
    if attempt.stop_reason == pb.STOP_REASON_TIME_LIMIT:
        return TIMEOUT
    if attempt.exit.out_of_memory:
        return OUT_OF_MEMORY
    return NODE_FAIL if attempt.state == pb.ATTEMPT_STATE_LOST else FAILED


def reason_of(job: pb.Job) -> str:
    """Return why a job waits, or why it did not succeed; "None" if neither is so."""
    state = state_of(job)
    if job.phase == pb.JOB_PHASE_SUSPENDED:
        return "JobHeldUser"
    if state is PENDING and job.HasField("refusal"):
        return _REASONS.get(job.refusal.code, _RESOURCES)
    return _OF_END.get(state, "None")


def read_states(text: str) -> frozenset[State] | None:
    """Return the states that a list names; None for all.

    >>> sorted(state.code for state in read_states("pd,RUNNING"))
    ['PD', 'R']

    Raises:
        SlurmError: a state does not exist.
    """
    words = [word for word in text.upper().split(",") if word]
    if "ALL" in words:
        return None
    for word in words:
        if word not in _BY_NAME:
            valid = ",".join(sorted({state.name for state in _BY_NAME.values()}))
            raise SlurmError(f"Invalid job state specified: {word}", f"Valid job states include: {valid}")
    return frozenset(_BY_NAME[word] for word in words)
