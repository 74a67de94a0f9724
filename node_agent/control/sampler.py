"""Samples resource usage of the node and of each attempt over time windows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.control.attempt import Attempt, Attempts
from cotenant.node_agent.probes.memory_bandwidth import NodeBandwidth, rate_between
from cotenant.node_agent.probes.pressure import read_pressure
from cotenant.node_agent.runtime.attempt_status import AttemptKey, duration, timestamp
from cotenant.node_agent.runtime.runtime_port import Runtime, ThrottleState, Usage
from cotenant.v1 import contention_service_pb2, job_pb2

UNKNOWN = -1.0
WINDOWS_TO_WARM_UP = 6  # after the job, or the agent that found it, has started
WINDOWS_TO_SETTLE = 2  # after its allocation has changed


def is_cpu_job(attempt: Attempt) -> bool:
    """Return whether an attempt is of a cpu job: by its declared kind, or if it declares none, by holding no GPU."""
    kind = attempt.assignment.spec.kind
    if kind != job_pb2.JOB_KIND_UNSPECIFIED:
        return kind == job_pb2.JOB_KIND_CPU
    return not any(task.gpus for task in attempt.assignment.allocation.tasks)


@dataclass(frozen=True, slots=True)
class UsageReading:
    """An attempt's usage at a moment of the monotonic clock."""

    time: float
    usage: Usage

    @property
    def moved(self) -> tuple[float, int | None]:
        """The time and the bytes moved to and from memory by then."""
        return self.time, self.usage.moved_bytes


@dataclass(frozen=True, slots=True)
class SampleSources:
    """What the sampler reads; per attempt unless noted otherwise."""

    attempts: Attempts  # all of the node
    rate_over: Callable[[AttemptKey, float], tuple[float, str]]  # over the last seconds; with the phase
    profiled: Callable[[AttemptKey], bool]
    throttle: Callable[[AttemptKey], ThrottleState]
    gpu_utilisation_percent: Callable[[Sequence[str]], float]  # of some GPUs by UUID


class Sampler:
    """Samples the node; each window starts where the previous one ended."""

    def __init__(
        self, node_id: str, runtime: Runtime, bandwidth: NodeBandwidth, sight: SampleSources, *, window_seconds: float
    ) -> None:
        """`window_seconds` is the approximate length of a window; a changed job is unsteady for some windows."""
        self._node_id, self._runtime, self._bandwidth, self._sight = node_id, runtime, bandwidth, sight
        self._window_seconds = window_seconds
        self._readings: dict[AttemptKey, UsageReading] = {}
        self._window_began = time.monotonic()
        psutil.cpu_percent()  # the first call only starts the window

    async def sample(self) -> contention_service_pb2.NodeSample:
        """End the window and return its sample."""
        now = time.monotonic()
        window_seconds, self._window_began = now - self._window_began, now
        live = {key: attempt for key, attempt in self._sight.attempts.items() if not attempt.status.ended}
        self._readings = {key: reading for key, reading in self._readings.items() if key in live}
        attempts = [await self._attempt_sample(key, attempt, window_seconds) for key, attempt in sorted(live.items())]
        samples, cpu_percent = [sample for sample in attempts if sample], psutil.cpu_percent()
        busy = cpu_percent / 100 * (psutil.cpu_count() or 1)
        return contention_service_pb2.NodeSample(
            node_id=self._node_id,
            time=timestamp(time.time()),
            window=duration(window_seconds),
            cpu=read_pressure("cpu"),
            memory=read_pressure("memory"),
            io=read_pressure("io"),
            cpu_percent=cpu_percent,
            memory_used_bytes=psutil.virtual_memory().used,
            memory_bandwidth_bytes_per_second=_or_unknown(self._bandwidth.window()),
            memory_bandwidth_peak_bytes_per_second=self._bandwidth.peak_bytes_per_second,
            bandwidth_enforced=self._bandwidth.enforced,
            attempts=samples,
            cores_of_others=max(0.0, busy - sum(sample.cores_used for sample in samples)),
        )

    async def _attempt_sample(
        self, key: AttemptKey, attempt: Attempt, window_seconds: float
    ) -> contention_service_pb2.AttemptSample | None:
        usage = await self._runtime.usage(key)
        if usage is None:
            return None
        before, now = self._readings.get(key), UsageReading(time.monotonic(), usage)
        self._readings[key] = now
        tasks = attempt.assignment.allocation.tasks
        uuids = [share.uuid for task in tasks for share in task.gpus]
        rate, phase = self._sight.rate_over(key, window_seconds)
        throttle = self._sight.throttle(key).throttle
        return contention_service_pb2.AttemptSample(
            job_id=key.job_id,
            number=key.number,
            cores_used=_cores_used(before, now),
            memory_bytes=usage.memory_bytes,
            rate_per_second=rate,
            gpu_utilisation_percent=self._sight.gpu_utilisation_percent(uuids) if uuids else UNKNOWN,
            memory_bandwidth_bytes_per_second=_or_unknown(rate_between(before.moved, now.moved) if before else None),
            cpu_job=is_cpu_job(attempt),
            cores=sum(len(task.core_ids) for task in tasks),
            cache_bytes=UNKNOWN if usage.cache_bytes is None else usage.cache_bytes,
            throttle=None if throttle == FREE else throttle_message(throttle),
            best_effort=attempt.assignment.spec.best_effort,
            expected_rate_per_second=attempt.assignment.expected_rate_per_second,
            phase=phase,
            tasks=len(tasks),
            steady=not self._unsteady(key, attempt, now.time),
            cpu=usage.cpu_pressure,
            memory=usage.memory_pressure,
        )

    def _unsteady(self, key: AttemptKey, attempt: Attempt, now: float) -> bool:
        return (
            self._sight.profiled(key)
            or now - attempt.began < WINDOWS_TO_WARM_UP * self._window_seconds
            or now - attempt.changed < WINDOWS_TO_SETTLE * self._window_seconds
        )


def throttle_message(throttle: Throttle) -> contention_service_pb2.Throttle:
    """Return a throttle as a protobuf message."""
    return contention_service_pb2.Throttle(
        bandwidth_percent=throttle.bandwidth_percent,
        cores=throttle.cores,
        idle=throttle.idle,
        suspended=throttle.suspended,
    )


def _cores_used(before: UsageReading | None, now: UsageReading) -> float:
    if before is None or now.time <= before.time:
        return 0.0
    return max(0.0, now.usage.cpu_seconds - before.usage.cpu_seconds) / (now.time - before.time)


def _or_unknown(figure: float | None) -> float:
    return UNKNOWN if figure is None else figure
