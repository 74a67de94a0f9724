"""The picture of the cluster, renewed again and again; the last one stays while Slurm does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import structlog

from cotenant.services.slurm.commands import SlurmAway, SlurmCommands, allocates_memory
from cotenant.services.slurm.reader import BadAnswer
from cotenant.services.slurm.records import Picture, Reading, SlurmJob

log = structlog.get_logger()

INTERVAL_SECONDS = 5.0
STALE_INTERVALS = 3  # after so many intervals without an answer, `status` has a problem
LOOKUPS_MAX = 20  # of jobs that vanished, per reading; Slurm is not asked for more
LOOKUP_SECONDS_MAX = 5.0  # after which no more are begun
ENDED_MAX = 10_000  # jobs that ended and are still shown
VANISHED = "VANISHED"  # our state of a job that ended and of whose end Slurm says nothing

Ended = Callable[[Sequence[SlurmJob]], None]


class ClusterWatch:
    """Reads Slurm at an interval. `ended` receives the jobs that ended since the last reading."""

    def __init__(
        self, slurm: SlurmCommands, interval_seconds: float = INTERVAL_SECONDS, ended: Ended = lambda jobs: None
    ) -> None:
        self.picture, self.problem = Picture(), "Slurm has not been read yet"
        self._slurm, self._interval_seconds, self._ended = slurm, interval_seconds, ended
        self._past: dict[str, SlurmJob] = {}  # that ended, the oldest first
        self._said: set[str] = set()
        self._memory_counts: bool | None = None
        self._changed = asyncio.Event()

    def age_seconds(self, now: float) -> float:
        """Return the age of the picture; infinity if there is none yet."""
        return now - self.picture.taken_seconds if self.picture.taken_seconds else float("inf")

    def trouble(self, now: float) -> tuple[str, float]:
        """Return why the picture is older than it should be, "" if it is not; and its age."""
        age = self.age_seconds(now)
        if self.problem or age <= STALE_INTERVALS * self._interval_seconds:
            return self.problem, age
        return "Slurm has not answered yet", age

    async def changed(self) -> None:
        """Return after the next reading."""
        await self._changed.wait()

    async def run(self) -> None:
        """Read forever."""
        while True:
            await self.read()
            await asyncio.sleep(self._interval_seconds)

    async def read(self) -> None:
        """Read the cluster once; keep the last picture if Slurm does not answer."""
        try:
            if self._memory_counts is None:
                self._memory_counts = allocates_memory(await self._slurm.configuration())
            jobs, nodes = await self._slurm.jobs(), await self._slurm.nodes()
        except (SlurmAway, BadAnswer) as error:
            if not self.problem:
                log.warning("slurm_away", error=str(error))
            self.problem = str(error)
        else:
            if self.problem and self.picture.taken_seconds:
                log.info("slurm_back", age_seconds=round(self.age_seconds(time.time()), 1))
            self.problem = ""
            self._say(jobs, nodes)
            await self._take(jobs, nodes)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _say(self, *readings: Reading) -> None:
        """Log once what an answer lacks."""
        for problem in (one for reading in readings for one in reading.problems):
            if problem not in self._said and len(self._said) < ENDED_MAX:
                self._said.add(problem)
                log.warning("slurm_answer_incomplete", problem=problem)

    async def _take(self, read: Reading, nodes: Reading) -> None:
        before, now = self.picture.jobs, time.time()
        jobs = {job.id: job for job in read.jobs}
        vanished = [job for job in before.values() if not job.ended and job.id not in jobs]
        until = time.monotonic() + LOOKUP_SECONDS_MAX
        for number, job in enumerate(vanished):
            asked = number < LOOKUPS_MAX and time.monotonic() < until
            jobs[job.id] = await self._end_of(job, now) if asked else _vanished(job, now)
        ended = [job for job in jobs.values() if job.ended and job.id not in self._past]
        for job in jobs.values():
            if job.ended:
                self._past[job.id] = job
            else:
                self._past.pop(job.id, None)  # it was requeued
        for job_id in list(self._past)[: max(0, len(self._past) - ENDED_MAX)]:
            del self._past[job_id]
        self.picture = Picture(
            now,
            MappingProxyType({node.name: node for node in nodes.nodes}),
            MappingProxyType(self._past | jobs),
            read.version or nodes.version,
            bool(self._memory_counts),
        )
        self._ended([job for job in ended if job.state != VANISHED])

    async def _end_of(self, job: SlurmJob, now: float) -> SlurmJob:
        """Return how a job ended that is no longer listed, from `scontrol` or from the accounting."""
        said = await self._slurm.job(job.id) or await self._slurm.accounted(job.id)
        state = (said.get("JobState") or said.get("State") or "").partition(" ")[0].upper()
        if not state or not replace(job, state=state).ended:
            return _vanished(job, now)
        code, _, signal = said.get("ExitCode", "0:0").partition(":")
        return replace(
            job,
            state=state,
            exit_code=int(code) if code.isdecimal() else 0,
            signal=int(signal) if signal.isdecimal() else 0,
            reason="",
            ended_seconds=now,
        )


def _vanished(job: SlurmJob, now: float) -> SlurmJob:
    return replace(job, state=VANISHED, reason="", ended_seconds=now)
