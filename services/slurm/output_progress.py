"""The progress of Slurm's running jobs, read from the ends of their output files by regular expressions.

Only where told to. A file is read by one thread that does nothing else, at most its last 64 KiB, and only if it is a
regular file of the job's user: a path in Slurm is whatever its user wrote. While that thread waits for a file system
that does not answer, nothing is read, and nothing else waits.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.patterns import Pattern, compile_pattern
from cotenant.services.slurm.commands import SlurmCommands
from cotenant.services.slurm.records import Picture, SlurmJob

log = structlog.get_logger()

LOOK_BACK_BYTES = 64 * 1024
LINE_CHARS_MAX = 4096
LINES_MAX = 500  # from the end
FILES_MAX = 500  # read after one reading of Slurm
READ_SECONDS_MAX = 2.0  # after which no more are begun
LOOKUPS_MAX = 20  # of paths that Slurm's list does not name, per reading
SAMPLES_MAX = 64
SPAN_SECONDS_MIN = 5.0  # between the first and the last sample of a rate
CONFIDENCE = 0.8
LOW, HIGH = 0.8, 1.25  # of the expected rest: 8 of 10 cases [R]
COUNT_MAX = 10**15

DEFAULT = "default"
STEPS = (
    r"(?i)\b(?:step|steps|iter|iteration|batch)s?\b[\s:=#\[(]{0,4}(\d{1,15})\s{0,3}(?:/|of)\s{0,3}(?P<total>\d{1,15})"
)
BAR = r"(\d{1,15})/(?P<total>\d{1,15})\s{0,3}\[[^\]]{0,80}(?:it/s|s/it|it/min|\?)"
EPOCHS = r"(?i)\bepochs?\b[\s:=#\[(]{0,4}(\d{1,9})\s{0,3}(?:/|of)\s{0,3}(?P<total>\d{1,9})"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is: its step, the last one if known (else 0), and the share of its work that is done, if known."""

    step: int
    total: int = 0
    share: float | None = None


class ProgressPatterns:
    """Finds progress in text: by given patterns, or by usual forms of steps, bars and epochs.

    A pattern's first group is the step; a group named `total` the last step. Steps beside an epoch are parts of it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Compile the patterns. Raises `BadPattern`."""
        own = [text for text in texts if text != DEFAULT]
        usual = (STEPS, BAR) if len(own) < len(texts) else ()
        self._patterns: list[Pattern] = [compile_pattern(text) for text in (*own, *usual)]
        self._epochs = compile_pattern(EPOCHS) if usual else None

    def find(self, text: str) -> Progress | None:
        """Return the progress in the last line that has any.

        >>> ProgressPatterns(["default"]).find("step 50/200 loss 0.1\\ndone soon")
        Progress(step=50, total=200, share=0.25)
        >>> ProgressPatterns(["default"]).find("Epoch 2/4:  50%|###  | 50/100 [00:10<00:10,  5.0it/s]").share
        0.375
        >>> ProgressPatterns([r"i=(\\d+)"]).find("i=7")
        Progress(step=7, total=0, share=None)
        """
        lines = text.replace("\r", "\n").split("\n")[-LINES_MAX:]
        for line in reversed(lines):
            if found := self._in_line(line[:LINE_CHARS_MAX]):
                return found
        return None

    def _in_line(self, line: str) -> Progress | None:
        epoch = _counted(self._epochs, line) if self._epochs else None
        for pattern in self._patterns:
            if (found := _counted(pattern, line)) is None:
                continue
            step, total = found
            if epoch and epoch[1] and total:
                done = max(0, epoch[0] - 1) + min(1.0, step / total)
                return Progress(step, total, min(1.0, done / epoch[1]))
            return Progress(step, total, min(1.0, step / total) if total else None)
        if epoch and epoch[1]:
            return Progress(*epoch, min(1.0, epoch[0] / epoch[1]))
        return None


def _counted(pattern: Pattern, line: str) -> tuple[int, int] | None:
    """Return the step and the total of a match, the total 0 if there is none."""
    match = pattern.search(line)
    if not match or pattern.groups < 1:
        return None
    step, total = _count(match[1]), _count(match["total"]) if "total" in pattern.groupindex else 0
    return None if step is None else (step, total or 0)


def _count(text: str | None) -> int | None:
    known = bool(text) and text is not None and text.isascii() and text.isdigit() and len(text) <= 15
    return int(text) if known and text is not None else None


@dataclass
class Track:
    """The progress of one run of a job over time. Times are unix seconds."""

    samples: deque[tuple[float, Progress]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    restarted: bool = False

    def add(self, now: float, progress: Progress) -> None:
        """Record progress. A share that falls is not of the whole run, so no end is forecast from it."""
        if self.samples:
            last = self.samples[-1][1]
            if progress == last:
                return
            if progress.step < last.step and (progress.share or 0.0) <= (last.share or 0.0):
                self.restarted |= progress.share is not None
                self.samples.clear()
        self.samples.append((now, progress))

    @property
    def latest(self) -> Progress | None:
        """The last progress."""
        return self.samples[-1][1] if self.samples else None

    def steps_per_second(self) -> float:
        """Return the rate over the samples; 0 if unknown."""
        if len(self.samples) < 2:
            return 0.0
        (first, before), (last, after) = self.samples[0], self.samples[-1]
        return max(0, after.step - before.step) / (last - first) if last - first >= SPAN_SECONDS_MIN else 0.0

    def estimate(self, now: float, ran_seconds: float) -> Estimate | None:
        """Return how long the run will still take; None if that is unknown."""
        if self.restarted or not self.samples or self.samples[-1][1].share is None:
            return None
        (first, before), (last, after) = self.samples[0], self.samples[-1]
        done, begun = after.share or 0.0, before.share or 0.0
        if last - first >= SPAN_SECONDS_MIN and done > begun:
            per_second = (done - begun) / (last - first)
        elif ran_seconds - (now - last) >= SPAN_SECONDS_MIN and done > 0:
            per_second = done / (ran_seconds - (now - last))
        else:
            return None
        rest = max(0.0, (1.0 - done) / per_second - (now - last))
        return Estimate(True, CONFIDENCE, rest, rest * LOW, rest * HIGH, source="progress")


class OutputProgress:
    """The progress of all running jobs, renewed after each reading of Slurm."""

    def __init__(self, patterns: ProgressPatterns, slurm: SlurmCommands) -> None:
        self._patterns, self._slurm = patterns, slurm
        self._tracks: dict[tuple[str, int], Track] = {}
        self._paths: dict[tuple[str, int], str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slurm-output")
        self._reading: asyncio.Future[Mapping[tuple[str, int], Progress]] | None = None

    async def renew(self, picture: Picture) -> None:
        """Record what the thread has read, and start its next reading."""
        now = time.time()
        running = {(job.id, job.restarts): job for job in picture.jobs.values() if job.runs and job.user_id is not None}
        self._tracks = {run: track for run, track in self._tracks.items() if run in running}
        self._paths = {run: path for run, path in self._paths.items() if run in running}
        if self._reading and not self._reading.done():
            return
        if self._reading:
            for run, progress in self._reading.result().items():
                if run in running:
                    self._tracks.setdefault(run, Track()).add(now, progress)
        await self._find_paths(running)
        wanted = [(run, path, job.user_id or 0) for run, job in running.items() if (path := self._paths.get(run))]
        wanted.sort(key=lambda one: self._tracks[one[0]].samples[-1][0] if one[0] in self._tracks else 0.0)
        self._reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read, wanted[:FILES_MAX])

    async def _find_paths(self, running: Mapping[tuple[str, int], SlurmJob]) -> None:
        """Look up the paths of output files that Slurm's list does not name, a few at a time."""
        unknown = [run for run in running if run not in self._paths]
        for run in unknown:
            if path := running[run].output:
                self._paths[run] = path
        for run in [run for run in unknown if run not in self._paths][:LOOKUPS_MAX]:
            self._paths[run] = (await self._slurm.job(run[0])).get("StdOut", "")

    def _read(self, wanted: Sequence[tuple[tuple[str, int], str, int]]) -> dict[tuple[str, int], Progress]:
        found, until = {}, time.monotonic() + READ_SECONDS_MAX
        for run, path, user_id in wanted:
            if time.monotonic() > until:
                break
            if progress := self._patterns.find(last_lines(path, user_id)):
                found[run] = progress
        return found

    def estimates(self, picture: Picture, now: float) -> Mapping[str, Estimate]:
        """Return the estimates of running jobs that follow from their progress, by their ids."""
        found = {}
        for (job_id, restarts), track in self._tracks.items():
            job = picture.jobs.get(job_id)
            if job and job.runs and job.restarts == restarts:
                estimate = track.estimate(now, job.ran_seconds(now))
                if estimate:
                    found[job_id] = estimate
        return found

    def track(self, job: SlurmJob) -> Track | None:
        """Return the progress of a job's present run."""
        return self._tracks.get((job.id, job.restarts))

    def close(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def last_lines(path: str, user_id: int) -> str:
    """Return the end of a regular file of a user; "" if it is none, or cannot be read."""
    if not path.startswith("/") or "\0" in path:
        return ""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != user_id:
            return ""
        begin = max(0, status.st_size - LOOK_BACK_BYTES)
        return os.pread(descriptor, LOOK_BACK_BYTES, begin).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
