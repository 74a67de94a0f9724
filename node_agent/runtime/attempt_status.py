"""Values that describe an attempt on this node."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.specs import LAUNCH_CAUSES
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED
from cotenant.v1 import job_pb2

STATES = {
    "STARTING": job_pb2.ATTEMPT_STATE_ASSIGNED,
    "RUNNING": job_pb2.ATTEMPT_STATE_RUNNING,
    "STOPPING": job_pb2.ATTEMPT_STATE_STOPPING,
    "SUCCEEDED": job_pb2.ATTEMPT_STATE_SUCCEEDED,
    "FAILED": job_pb2.ATTEMPT_STATE_FAILED,
    "STOPPED": job_pb2.ATTEMPT_STATE_STOPPED,
    NOT_LAUNCHED: job_pb2.ATTEMPT_STATE_NOT_LAUNCHED,
}
PID_MAX = 2**31 - 1
TERMINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "STOPPED", NOT_LAUNCHED})


class AttemptKey(NamedTuple):
    """One attempt of one job."""

    job_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.number}"


@dataclass(frozen=True, slots=True)
class Exit:
    """How the task that decided an attempt's outcome ended; `signal` is 0 if it exited by itself with `code`."""

    rank: int
    code: int = 0
    signal: int = 0
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """An attempt's status on this node. Times are seconds since 1970; 0 if not reached."""

    key: AttemptKey
    epoch: int
    state: str
    time: float
    message: str = ""
    exit: Exit | None = None
    start_time: float = 0.0
    end_time: float = 0.0
    cpu_seconds: float = 0.0
    memory_peak_bytes: int = 0
    pid: int = 0
    pid_start_ticks: int = 0
    stop_reason: str = ""  # why it was stopped, the name of a `StopReason`; "" if it was not, or nobody said
    launch_cause: str = ""  # why it was not launched, a value of the core's `LaunchCause`
    system_seconds: float = 0.0  # the kernel's part of `cpu_seconds`

    @property
    def ended(self) -> bool:
        """Whether no process of the attempt runs."""
        return self.state in TERMINAL_STATES

    def to_json(self) -> dict[str, object]:
        """Return the status in the format of a supervisor's state."""
        exit_status = self.exit
        return {
            "job_id": self.key.job_id,
            "number": self.key.number,
            "epoch": self.epoch,
            "state": self.state,
            "time": self.time,
            "message": self.message,
            "start_time": self.start_time,
            "end_time": self.end_time,
            "cpu_seconds": self.cpu_seconds,
            "system_seconds": self.system_seconds,
            "memory_peak_bytes": self.memory_peak_bytes,
            "pid": self.pid,
            "pid_start_ticks": self.pid_start_ticks,
            "stop_reason": self.stop_reason,
            "launch_cause": self.launch_cause,
            "exit": exit_status
            and {
                "rank": exit_status.rank,
                "code": exit_status.code,
                "signal": exit_status.signal,
                "out_of_memory": exit_status.out_of_memory,
            },
        }


def parse_status(text: str | bytes) -> Status:
    """Parse a supervisor's state. Raises `ValueError` if it is malformed or cannot be reported."""
    try:
        status = _status(json.loads(text))
        if not all(map(math.isfinite, (status.start_time, status.end_time))) or not 0 <= status.pid <= PID_MAX:
            raise ValueError("invalid timestamp or pid")
        report(status, "").SerializeToString()
    except (KeyError, TypeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"invalid supervisor state: {error!r}") from error
    return status


def _status(raw: Any) -> Status:
    exit_status = raw["exit"]
    if raw["state"] not in STATES:
        raise ValueError(f"unknown state: {raw['state']!r}")
    return Status(
        key=AttemptKey(str(raw["job_id"]), int(raw["number"])),
        epoch=int(raw["epoch"]),
        state=raw["state"],
        time=float(raw["time"]),
        message=str(raw["message"]),
        exit=Exit(
            int(exit_status["rank"]),
            int(exit_status["code"]),
            int(exit_status["signal"]),
            bool(exit_status["out_of_memory"]),
        )
        if exit_status
        else None,
        start_time=float(raw["start_time"]),
        end_time=float(raw["end_time"]),
        cpu_seconds=float(raw["cpu_seconds"]),
        memory_peak_bytes=int(raw["memory_peak_bytes"]),
        pid=int(raw["pid"]),
        pid_start_ticks=int(raw["pid_start_ticks"]),
        stop_reason=_stop_reason(raw.get("stop_reason", "")),
        launch_cause=_launch_cause(raw.get("launch_cause", "")),
        system_seconds=float(raw.get("system_seconds", 0.0)),  # a supervisor of an earlier release does not say
    )


def _stop_reason(name: str) -> str:
    """Return the name of a stop reason; "" for one of a newer release, whose attempt has stopped all the same."""
    return name if name and f"STOP_REASON_{name}" in job_pb2.StopReason.keys() else ""  # noqa: SIM118  # no mapping


def stop_reason_name(reason: job_pb2.StopReason.ValueType) -> str:
    """Return the name of a stop reason, such as "PREEMPTED"; "" if there is none, or a newer placement's is unknown."""
    if not reason or reason not in job_pb2.StopReason.values():
        return ""
    return job_pb2.StopReason.Name(reason).removeprefix("STOP_REASON_")


def _launch_cause(name: str) -> str:
    return LaunchCause(name).value if name else ""


def timestamp(seconds: float) -> Timestamp:
    """Return seconds since 1970 as a protobuf timestamp."""
    whole = int(seconds // 1)
    return Timestamp(seconds=whole, nanos=int((seconds - whole) * 1e9))


def duration(seconds: float) -> Duration:
    """Return seconds as a protobuf duration."""
    whole = int(seconds // 1)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def report(status: Status, node_id: str) -> agent_pb2.AttemptReport:
    """Return the report of an attempt for placement."""
    exit_status = status.exit
    return agent_pb2.AttemptReport(
        job_id=status.key.job_id,
        number=status.key.number,
        epoch=status.epoch,
        state=STATES[status.state],
        time=timestamp(status.time),
        start_time=timestamp(status.start_time) if status.start_time else None,
        message=status.message,
        cpu_time=duration(status.cpu_seconds),
        system_time=duration(status.system_seconds),
        memory_peak_bytes=status.memory_peak_bytes,
        stop_reason=job_pb2.StopReason.Value(f"STOP_REASON_{status.stop_reason or 'UNSPECIFIED'}"),
        launch_cause=LAUNCH_CAUSES.to_wire(LaunchCause(status.launch_cause))
        if status.launch_cause
        else job_pb2.LAUNCH_CAUSE_UNSPECIFIED,
        exit=None
        if exit_status is None
        else job_pb2.ExitStatus(
            code=exit_status.code,
            signal=exit_status.signal,
            out_of_memory=exit_status.out_of_memory,
            rank=exit_status.rank,
            node_id=node_id,
        ),
    )
