"""Ends pre-runs that have passed: the job reported its first step, or ran for the whole pre-run time.

The pass is committed before the attempt is stopped, and the stop is repeated until it is seen. So if the queue or
placement dies in between, the next process that watches the attempt continues from the stored state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import structlog

from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import Phase, StopReason
from cotenant.core.model.refusal import about
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.transitions import PHASES, Record, pass_pre_run
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2

log = structlog.get_logger()

STOP_AGAIN_SECONDS = 0.5
STOPPED = "passed its pre-run"
GOING = frozenset({Phase.STARTING, Phase.RUNNING})

Stop = Callable[[Record, int, StopReason, str], Awaitable[None]]


class PreRuns:
    """Watches pre-runs in progress."""

    def __init__(self, job_store: JobStore, stop: Stop, background: BackgroundTasks) -> None:
        self._job_store, self._stop, self._background = job_store, stop, background
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[str] = set()  # jobs whose pre-run is being ended

    def follow(self, record: Record) -> None:
        """Apply a change of a job's attempt."""
        if not record.in_pre_run or record.phase not in GOING:
            self.drop(record.id)
        elif record.stored.pre_run_passed:
            self._begin_end(record, "")
        elif record.phase is Phase.RUNNING and record.id not in self._timers:
            most = record.spec.pre_run_seconds or 0.0
            left = specs.seconds(record.job.attempt.start_time) + most - time.time()
            left = min(max(0.0, left), most)  # bounded against clock skew of nodes
            timer = asyncio.get_running_loop().call_later(left, self._time_over, record, record.attempt_number)
            self._timers[record.id] = timer

    def drop(self, job_id: str) -> None:
        """Stop watching a job's pre-run: its attempt has ended."""
        if timer := self._timers.pop(job_id, None):
            timer.cancel()

    def progressed(self, record: Record, progress: job_pb2.Progress) -> None:
        """Handle progress of a job in its pre-run; progress from before this attempt is ignored."""
        attempt = record.job.attempt
        trains = progress.HasField("step_time") and progress.step > 0 and not progress.phase
        mine = specs.seconds(progress.step_time) >= specs.seconds(attempt.start_time)
        if trains and mine and record.phase is Phase.RUNNING:
            self._begin_end(record, f"it reported step {progress.step}")

    def _time_over(self, record: Record, number: int) -> None:
        self._timers.pop(record.id, None)
        if record.phase is Phase.RUNNING and record.attempt_number == number:
            self._begin_end(record, f"it still ran after {about(record.spec.pre_run_seconds or 0.0)}")

    def _begin_end(self, record: Record, why: str) -> None:
        if record.id not in self._ending:
            self._ending.add(record.id)
            self._background.start(self._end(record, record.attempt_number, why))

    async def _end(self, record: Record, number: int, why: str) -> None:
        """Commit that the pre-run has passed, then stop it."""
        try:
            if await self._job_store.change_with_retry(record, lambda stored: _passed(stored, number, why)):
                log.info("pre_run_passed", job=record.id, attempt=number, why=why)
            while record.phase in GOING and record.attempt_number == number and record.stored.pre_run_passed:
                try:
                    await self._stop(record, number, StopReason.SUPERSEDED, STOPPED)
                except grpc.aio.AioRpcError as error:
                    log.info("stop_delayed", job=record.id, error=errors.from_error(error).message)
                await asyncio.sleep(STOP_AGAIN_SECONDS)
        finally:
            self._ending.discard(record.id)


def _passed(stored: records_pb2.StoredJob, number: int, why: str) -> bool:
    going = PHASES.from_wire(stored.job.phase) in GOING and stored.job.attempt.number == number
    if stored.pre_run_passed or not going:
        return False
    pass_pre_run(stored, why)
    return True
