"""Reports attempts' progress to placement, with the throttle that explains a low rate."""

from __future__ import annotations

import time

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.control.progress import ProgressTracker
from cotenant.node_agent.control.throttles import Throttles
from cotenant.node_agent.runtime.attempt_status import AttemptKey, timestamp
from cotenant.v1 import job_pb2


class ProgressReports:
    """Makes a report of what a job has told."""

    def __init__(self, outbox: PlacementOutbox, throttles: Throttles) -> None:
        self._outbox, self._throttles = outbox, throttles

    def report(self, key: AttemptKey, track: ProgressTracker, rate_per_second: float, now: float) -> None:
        """Queue a report of an attempt's progress at a time in seconds since 1970."""
        progress = job_pb2.Progress(
            step=track.step,
            rate_per_second=rate_per_second,
            update_time=timestamp(now),
            phase=track.phase,
            phase_step=track.phase_step if track.phase else 0,
            throttle=self._throttles.describe(key),
            tracked_runs=track.runs,
        )
        if (age_seconds := track.seconds_since_step(time.monotonic())) is not None:
            progress.step_time.CopyFrom(timestamp(now - age_seconds))
        if track.loss is not None:
            progress.loss = track.loss
        if track.batch is not None:
            progress.batch_size, seconds = track.batch
            progress.batch_time.FromNanoseconds(round(seconds * 1e9))
            track.batch = None
        self._outbox.report_progress(agent_pb2.ProgressReport(job_id=key.job_id, number=key.number, progress=progress))
