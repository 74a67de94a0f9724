"""What is known of an attempt on this node, as values."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec.specs import LAUNCH_CAUSES
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED
from cotenant.v1 import job_pb2, node_service_pb2

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
ENDS = frozenset({"SUCCEEDED", "FAILED", "STOPPED", NOT_LAUNCHED})


class AttemptKey(NamedTuple):
    """One attempt of one job."""

    job_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.number}"


@dataclass(frozen=True, slots=True)
class Exit:
    """How the task that decided an attempt ended; `signal` is 0 where it ended by itself with `code`."""

    rank: int
    code: int = 0
    signal: int = 0
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """Where an attempt stands on this node. Times are seconds since 1970, 0 while they have not come."""

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
    stop_reason: str = ""  # why it stopped without an order, as `StopReason` has it: "DISCONNECTED"
    launch_cause: str = ""  # why it was not launched, as the core's `LaunchCause` has it

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in ENDS

    def to_json(self) -> dict[str, object]:
        """Write it as a supervisor would."""
        told = self.exit
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
            "memory_peak_bytes": self.memory_peak_bytes,
            "pid": self.pid,
            "pid_start_ticks": self.pid_start_ticks,
            "stop_reason": self.stop_reason,
            "launch_cause": self.launch_cause,
            "exit": told
            and {
                "rank": told.rank,
                "code": told.code,
                "signal": told.signal,
                "out_of_memory": told.out_of_memory,
            },
        }


def parse_status(text: str | bytes) -> Status:
    """Read a supervisor's state. Raises `ValueError` where it is none, or has a value that cannot be told on."""
    try:
        status = _status(json.loads(text))
        if not all(map(math.isfinite, (status.start_time, status.end_time))) or not 0 <= status.pid <= PID_MAX:
            raise ValueError("a time or a process that cannot be")
        report(status, "").SerializeToString()
    except (KeyError, TypeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a supervisor's state: {error!r}") from error
    return status


def _status(raw: Any) -> Status:
    told = raw["exit"]
    if raw["state"] not in STATES:
        raise ValueError(f"no such state: {raw['state']!r}")
    return Status(
        key=AttemptKey(str(raw["job_id"]), int(raw["number"])),
        epoch=int(raw["epoch"]),
        state=raw["state"],
        time=float(raw["time"]),
        message=str(raw["message"]),
        exit=Exit(int(told["rank"]), int(told["code"]), int(told["signal"]), bool(told["out_of_memory"]))
        if told
        else None,
        start_time=float(raw["start_time"]),
        end_time=float(raw["end_time"]),
        cpu_seconds=float(raw["cpu_seconds"]),
        memory_peak_bytes=int(raw["memory_peak_bytes"]),
        pid=int(raw["pid"]),
        pid_start_ticks=int(raw["pid_start_ticks"]),
        stop_reason=_stop_reason(raw.get("stop_reason", "")),
        launch_cause=_launch_cause(raw.get("launch_cause", "")),
    )


def _stop_reason(name: str) -> str:
    if name and f"STOP_REASON_{name}" not in job_pb2.StopReason.keys():  # noqa: SIM118  # no mapping
        raise ValueError(f"no such reason to stop: {name!r}")
    return name


def stop_reason_name(reason: job_pb2.StopReason.ValueType) -> str:
    """Name a reason to stop; a newer placement's reason keeps its number."""
    return job_pb2.StopReason.Name(reason) if reason in job_pb2.StopReason.values() else str(reason)


def _launch_cause(name: str) -> str:
    return LaunchCause(name).value if name else ""


def timestamp(seconds: float) -> Timestamp:
    """Seconds since 1970 as protobuf has them."""
    whole = int(seconds // 1)
    return Timestamp(seconds=whole, nanos=int((seconds - whole) * 1e9))


def duration(seconds: float) -> Duration:
    """A length of time as protobuf has it."""
    whole = int(seconds // 1)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def report(status: Status, node_id: str) -> node_service_pb2.AttemptReport:
    """Tell placement of an attempt."""
    told = status.exit
    return node_service_pb2.AttemptReport(
        job_id=status.key.job_id,
        number=status.key.number,
        epoch=status.epoch,
        state=STATES[status.state],
        time=timestamp(status.time),
        message=status.message,
        cpu_time=duration(status.cpu_seconds),
        memory_peak_bytes=status.memory_peak_bytes,
        stop_reason=job_pb2.StopReason.Value(f"STOP_REASON_{status.stop_reason or 'UNSPECIFIED'}"),
        launch_cause=LAUNCH_CAUSES.to_wire(LaunchCause(status.launch_cause))
        if status.launch_cause
        else job_pb2.LAUNCH_CAUSE_UNSPECIFIED,
        exit=None
        if told is None
        else job_pb2.ExitStatus(
            code=told.code,
            signal=told.signal,
            out_of_memory=told.out_of_memory,
            rank=told.rank,
            node_id=node_id,
        ),
    )
