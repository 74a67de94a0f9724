"""Decoding of nodes' samples. An invalid sample raises a `ValueError` with the reason."""

from __future__ import annotations

import math

from cotenant.core.model.limits import NAME_LENGTH_MAX
from cotenant.core.model.validation import CORES_MAX, shown
from cotenant.core.policy.protocols import AttemptWindow, NodeWindow, Throttle
from cotenant.v1 import contention_service_pb2 as pb

PAST_SECONDS_MAX = 120.0  # older samples do not show the present state
FUTURE_SECONDS_MAX = 30.0  # allowed clock difference in a cluster
WINDOW_SECONDS_MAX = 3600.0
PERCENT_MAX = 101.0  # allows for kernel counters that are not read at the same instant
ATTEMPTS_MAX = 4096  # on one node
UNKNOWN = -1.0  # on the wire


def window_of(sample: pb.NodeSample, now: float) -> NodeWindow:
    """Return the window of a sample that ended about now.

    Raises:
        ValueError: the sample is invalid; the text has the reason.
    """
    if not sample.HasField("time"):
        raise ValueError("it has no time")
    ended = sample.time.seconds + sample.time.nanos / 1e9
    if not -FUTURE_SECONDS_MAX <= now - ended <= PAST_SECONDS_MAX:
        side = "in the past" if ended < now else "in the future"
        raise ValueError(f"its time is {abs(now - ended):.0f} s {side}; the node's clock may be wrong")
    if len(sample.attempts) > ATTEMPTS_MAX:
        raise ValueError(f"it has {len(sample.attempts)} attempts; the maximum is {ATTEMPTS_MAX}")
    _number("cpu_percent", sample.cpu_percent, PERCENT_MAX)
    _number("memory_used_bytes", sample.memory_used_bytes)
    return NodeWindow(
        sample.node_id,
        now=ended,
        seconds=_window_seconds(sample),
        attempts=tuple(map(_attempt, sample.attempts)),
        cpu_some_percent=_pressure("cpu", sample.cpu),
        memory_some_percent=_pressure("memory", sample.memory),
        io_some_percent=_pressure("io", sample.io),
        memory_bandwidth_bytes_per_second=_optional_number(
            "memory_bandwidth_bytes_per_second", sample.memory_bandwidth_bytes_per_second
        ),
        memory_bandwidth_peak_bytes_per_second=_number(
            "memory_bandwidth_peak_bytes_per_second", sample.memory_bandwidth_peak_bytes_per_second
        )
        or None,
        bandwidth_enforced=sample.bandwidth_enforced,
        cores_of_others=_number("cores_of_others", sample.cores_of_others, CORES_MAX),
    )


def _attempt(sample: pb.AttemptSample) -> AttemptWindow:
    if not 1 <= len(sample.job_id) <= NAME_LENGTH_MAX or sample.number < 1:
        raise ValueError(f"{shown(sample.job_id)} with number {sample.number} is not an attempt of a job")
    job = f"of job {shown(sample.job_id)}"
    _number(f"memory_bytes {job}", sample.memory_bytes)
    return AttemptWindow(
        sample.job_id,
        sample.number,
        sample.cpu_job,
        cores_used=_number(f"cores_used {job}", sample.cores_used, CORES_MAX),
        rate_per_second=_number(f"rate_per_second {job}", sample.rate_per_second) or None,
        gpu_utilisation_percent=_optional_number(
            f"gpu_utilisation_percent {job}", sample.gpu_utilisation_percent, PERCENT_MAX
        ),
        memory_bandwidth_bytes_per_second=_optional_number(
            f"memory_bandwidth_bytes_per_second {job}", sample.memory_bandwidth_bytes_per_second
        ),
        cores=int(_number(f"cores {job}", sample.cores, CORES_MAX)),
        tasks=int(_number(f"tasks {job}", sample.tasks)) or 1,
        cache_bytes=_optional_number(f"cache_bytes {job}", sample.cache_bytes) or None,
        throttle=_throttle(sample.throttle, job),
        best_effort=sample.best_effort,
        expected_rate_per_second=_number(f"expected_rate_per_second {job}", sample.expected_rate_per_second) or None,
        phase=sample.phase,
        steady=sample.steady,
        cpu_some_percent=_pressure(f"cpu {job}", sample.cpu) if sample.HasField("cpu") else None,
        memory_some_percent=_pressure(f"memory {job}", sample.memory) if sample.HasField("memory") else None,
    )


def _throttle(throttle: pb.Throttle, job: str) -> Throttle:
    return Throttle(
        int(_number(f"throttle.bandwidth_percent {job}", throttle.bandwidth_percent, 100)) or 100,
        int(_number(f"throttle.cores {job}", throttle.cores, CORES_MAX)),
        throttle.idle,
        throttle.suspended,
    )


def _window_seconds(sample: pb.NodeSample) -> float:
    seconds = sample.window.seconds + sample.window.nanos / 1e9
    if not 0 < seconds <= WINDOW_SECONDS_MAX:
        raise ValueError(f"its window is {seconds:g} s; it must be above 0 and at most {WINDOW_SECONDS_MAX:g} s")
    return seconds


def _pressure(what: str, pressure: pb.Pressure) -> float:
    _number(f"{what}.full_avg10", pressure.full_avg10, PERCENT_MAX)
    return _number(f"{what}.some_avg10", pressure.some_avg10, PERCENT_MAX)


def _optional_number(what: str, figure: float, at_most: float = math.inf) -> float | None:
    return None if figure == UNKNOWN else _number(what, figure, at_most)


def _number(what: str, figure: float, at_most: float = math.inf) -> float:
    """Return a number after checking that it is finite, not negative and not too large."""
    if not 0 <= figure <= at_most or math.isinf(figure):
        bound = "" if math.isinf(at_most) else f" and at most {at_most:g}"
        raise ValueError(f"{what} is {figure:g}; it must be finite, not negative{bound}")
    return figure
