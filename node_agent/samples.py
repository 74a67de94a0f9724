"""What the node and each attempt did in a window of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from cotenant.node_agent.orders import Attempt
from cotenant.node_agent.records import AttemptKey, duration, timestamp
from cotenant.node_agent.runtime import Runtime, Usage
from cotenant.v1 import contention_service_pb2, job_pb2

UNKNOWN = -1.0
PRESSURE = Path("/proc/pressure")


def parse_pressure(text: str) -> contention_service_pb2.Pressure:
    """Read a file of /proc/pressure; what it does not say is 0.

    >>> parse_pressure("some avg10=1.50 avg60=0 avg300=0 total=9").some_avg10
    1.5
    """
    shares = {"some": 0.0, "full": 0.0}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        for word in rest.split():
            name, _, value = word.partition("=")
            if kind in shares and name == "avg10":
                try:
                    shares[kind] = float(value)
                except ValueError:
                    continue
    return contention_service_pb2.Pressure(some_avg10=shares["some"], full_avg10=shares["full"])


def read_pressure(resource: str, root: Path = PRESSURE) -> contention_service_pb2.Pressure:
    """The pressure on `cpu`, `memory` or `io`; zeros where the kernel does not tell."""
    try:
        return parse_pressure((root / resource).read_text())
    except OSError:
        return contention_service_pb2.Pressure()


def is_cpu_job(attempt: Attempt) -> bool:
    """Whether a job is a cpu job: as it says, or where it does not say, if it holds no GPU."""
    kind = attempt.assignment.spec.kind
    if kind != job_pb2.JOB_KIND_UNSPECIFIED:
        return kind == job_pb2.JOB_KIND_CPU
    return not any(task.gpus for task in attempt.assignment.allocation.tasks)


@dataclass(frozen=True, slots=True)
class Reading:
    """An attempt's account at a moment of the monotonic clock."""

    time: float
    usage: Usage


class Sampler:
    """Samples the node; each window begins where the one before ended."""

    def __init__(
        self,
        node_id: str,
        runtime: Runtime,
        attempts: Callable[[], dict[AttemptKey, Attempt]],
        rate_per_second: Callable[[AttemptKey], float],
        gpu_utilisation_percent: Callable[[Sequence[str]], float],
    ) -> None:
        self._node_id, self._runtime, self._attempts = node_id, runtime, attempts
        self._rate_per_second, self._gpu_utilisation_percent = rate_per_second, gpu_utilisation_percent
        self._readings: dict[AttemptKey, Reading] = {}
        self._window_began = time.monotonic()
        psutil.cpu_percent()  # the first call only begins the window

    async def sample(self) -> contention_service_pb2.NodeSample:
        """End the window and tell what was in it."""
        now = time.monotonic()
        window_seconds, self._window_began = now - self._window_began, now
        live = {key: attempt for key, attempt in self._attempts().items() if not attempt.status.ended}
        self._readings = {key: reading for key, reading in self._readings.items() if key in live}
        samples = [await self._attempt_sample(key, attempt) for key, attempt in sorted(live.items())]
        return contention_service_pb2.NodeSample(
            node_id=self._node_id,
            time=timestamp(time.time()),
            window=duration(window_seconds),
            cpu=read_pressure("cpu"),
            memory=read_pressure("memory"),
            io=read_pressure("io"),
            cpu_percent=psutil.cpu_percent(),
            memory_used_bytes=psutil.virtual_memory().used,
            memory_bandwidth_bytes_per_second=UNKNOWN,
            attempts=[sample for sample in samples if sample],
        )

    async def _attempt_sample(self, key: AttemptKey, attempt: Attempt) -> contention_service_pb2.AttemptSample | None:
        usage = await self._runtime.usage(key)
        if usage is None:
            return None
        before, now = self._readings.get(key), Reading(time.monotonic(), usage)
        self._readings[key] = now
        cores = 0.0
        if before and now.time > before.time:
            cores = max(0.0, usage.cpu_seconds - before.usage.cpu_seconds) / (now.time - before.time)
        uuids = [share.uuid for task in attempt.assignment.allocation.tasks for share in task.gpus]
        return contention_service_pb2.AttemptSample(
            job_id=key.job_id,
            number=key.number,
            cores_used=cores,
            memory_bytes=usage.memory_bytes,
            rate_per_second=self._rate_per_second(key),
            gpu_utilisation_percent=self._gpu_utilisation_percent(uuids) if uuids else UNKNOWN,
            memory_bandwidth_bytes_per_second=UNKNOWN,
            cpu_job=is_cpu_job(attempt),
        )
