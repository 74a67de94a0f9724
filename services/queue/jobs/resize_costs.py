"""Measures what resizes cost elastic jobs, by the queue's clock, while their attempts change and report steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.core.sizing.restart_cost import ResizeCost, ResizeCosts
from cotenant.services.queue.jobs.job_record import Record
from cotenant.v1 import job_pb2


@dataclass(slots=True)
class _Resize:
    """A resize in progress: the attempt that was warned, its last step, when that was, and when it had stopped."""

    number: int
    step: int
    warned: float
    stopped: float | None = None


class ResizeMeter:
    """The costs of resizes, and the resizes in progress; those that began before this run of the queue are left out."""

    def __init__(self) -> None:
        self.costs = ResizeCosts()
        self._running: dict[str, int] = {}  # attempts that were seen running, by job
        self._resizes: dict[str, _Resize] = {}  # by job

    def expected(self, spec: JobSpec) -> ResizeCost:
        """Return the expected cost of a resize of a job."""
        return self.costs.expected(_model(spec))

    def forget(self, job_id: str) -> None:
        """Drop what is measured of a job."""
        self._running.pop(job_id, None)
        self._resizes.pop(job_id, None)

    def changed(self, record: Record, now: float) -> None:
        """Note the phase of an elastic job; an end for another reason than the resize ends its measurement."""
        attempt, phase, known = record.job.attempt, record.phase, self._resizes.get(record.id)
        resized = attempt.stop_reason == job_pb2.STOP_REASON_RESIZED
        if phase is Phase.RUNNING:
            self._running[record.id] = attempt.number
        if phase is Phase.STOPPING and resized and known is None:
            if self._running.get(record.id) == attempt.number:
                self._resizes[record.id] = _Resize(attempt.number, record.job.progress.step, now)
        elif known and phase is Phase.QUEUED and resized and attempt.number == known.number:
            known.stopped = known.stopped or now
        elif known and attempt.number != known.number + (phase in (Phase.STARTING, Phase.RUNNING)):
            del self._resizes[record.id]

    def progressed(self, record: Record, now: float) -> None:
        """Complete the measurement of a resize with the first step beyond the last one before it."""
        known, attempt, progress = self._resizes.get(record.id), record.job.attempt, record.job.progress
        if known is None or known.stopped is None or attempt.number != known.number + 1:
            return
        fresh = specs.seconds(progress.step_time) >= specs.seconds(attempt.start_time) > 0
        if record.phase is Phase.RUNNING and fresh and progress.step > known.step:
            del self._resizes[record.id]
            self.costs.observe(_model(record.spec), known.stopped - known.warned, now - known.stopped)


def _model(spec: JobSpec) -> Hashable:
    return spec.tenant, spec.model or spec.name
