"""Checks that refused launches cost a job nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase
from cotenant.history.events import AttemptPut, JobPut

OF_THE_JOB = (LaunchCause.WORKING_DIRECTORY, LaunchCause.ENVIRONMENT, LaunchCause.IMAGE, LaunchCause.MOUNT)


class Launches:
    """Tracks attempts that were not launched, and failed attempts by job. `fault` is called with each violation."""

    def __init__(self, fault: Callable[[str], None]) -> None:
        self._fault = fault
        self._not_launched: set[tuple[str, int]] = set()
        self._failed: set[tuple[str, int]] = set()
        self._failures: Counter[str] = Counter()  # by job: attempts that failed by themselves

    def put_attempt(self, attempt: AttemptPut) -> None:
        """Record how an attempt ended. What a job needs of a node's folders is its own failure."""
        key = (attempt.job_id, attempt.number)
        own = attempt.launch_cause in OF_THE_JOB
        if attempt.state is AttemptState.NOT_LAUNCHED and not own:
            self._not_launched.add(key)
        elif attempt.state in (AttemptState.FAILED, AttemptState.NOT_LAUNCHED) and key not in self._failed:
            self._failed.add(key)
            self._failures[attempt.job_id] += 1

    def put_job(self, job: JobPut, revision: int) -> None:
        """Check a job's record against its earlier attempts."""
        if job.phase is Phase.FAILED and (job.job_id, job.attempt) in self._not_launched:
            self._fault(f"at {revision} {job.job_id} failed, and {job.attempt} was not launched")
        if job.failures > self._failures[job.job_id]:
            counted = f"{job.failures} failures are counted, of {self._failures[job.job_id]} attempts that failed"
            self._fault(f"at {revision} {job.job_id} pays for what was not launched: {counted}")
