"""The condition of processes and agents (loop lag, store latency, clock offset) as `--json` prints it."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from cotenant.codec.specs import seconds
from cotenant.v1.condition_pb2 import LoopLag
from cotenant.v1.node_service_pb2 import Node
from cotenant.v1.process_service_pb2 import Process

View = dict[str, Any]


def agent_view(node: Node, now: float) -> View:
    """Return when a node's agent was last heard, its heartbeat interval and its condition."""
    return {
        "seen_seconds": max(0.0, now - seconds(node.seen_time)) if node.HasField("seen_time") else None,
        "silence_seconds": _seconds(node.silence) if node.HasField("silence") else None,
        "heartbeat_seconds": _seconds(node.heartbeat_interval) if node.HasField("heartbeat_interval") else None,
        "loop_lag": lag_view(node.loop_lag) if node.HasField("loop_lag") else None,
        "clock_offset_seconds": _seconds(node.clock_offset) if node.HasField("clock_offset") else None,
    }


def process_view(process: Process, asked: float, answered: float) -> View:
    """Return the condition of a process; it was asked and answered at these times of the local wall clock."""
    latency = process.store_latency
    clock = seconds(process.wall_time) - (asked + answered) / 2 if process.HasField("wall_time") else None
    return {
        "loop_lag": lag_view(process.loop_lag) if process.HasField("loop_lag") else None,
        "store_latency": {
            "median_seconds": _seconds(latency.median),
            "longest_seconds": _seconds(latency.longest),
            "calls": latency.calls,
        }
        if process.HasField("store_latency")
        else None,
        "clock_offset_seconds": clock,
        "clock_error_seconds": None if clock is None else max(0.0, answered - asked) / 2,
    }


def lag_view(lag: LoopLag) -> View:
    """Return the lag of an event loop."""
    return {
        "longest_seconds": _seconds(lag.longest),
        "median_seconds": _seconds(lag.median),
        "behind_share": lag.behind_share,
        "windows_behind": lag.windows_behind,
    }


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


EMPTY_PROCESS_VIEW = process_view(Process(), 0.0, 0.0)
