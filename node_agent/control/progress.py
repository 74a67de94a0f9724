"""Parses and tracks a job's reported progress: pure, and tolerant of any input."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from dataclasses import dataclass

LINE_BYTES_MAX = 4096
LINES_MAX, TAIL_BYTES_MAX = 64, 2 * LINE_BYTES_MAX  # per datagram
BATCH_SIZE_MAX = 1_000_000
BATCH_SECONDS_MAX = 86_400.0
STEP_MAX = 2**63 - 1
PHASE = re.compile(r"[\w.-]{1,64}")
WINDOW_SECONDS = 30.0
SILENCE_SECONDS_MAX = 120.0
RESTART_SECONDS = 60.0
SAMPLE_SECONDS = 0.2
PHASES_MAX = 16  # remembered per attempt
TRACKERS = ("mlflow", "wandb")
RUN = re.compile(r"(?a)[\w.-]{1,128}")
Runs = tuple[tuple[str, str], ...]  # ids of runs in experiment trackers


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """The progress in one line; each field may be missing."""

    step: int | None = None
    loss: float | None = None
    batch: tuple[int, float] | None = None  # requests, and the seconds for all of them
    phase: str = ""  # phase of the step; empty means training
    runs: Runs = ()


def newest_lines(datagram: bytes) -> list[bytes]:
    r"""Return the last lines of a datagram: a job may put tens of thousands of lines into one.

    >>> newest_lines(b"step=1\nstep=2"), len(newest_lines(b"step=1\n" * 9000))
    ([b'step=1', b'step=2'], 64)
    """
    tail = datagram[-TAIL_BYTES_MAX:]
    lines = tail.splitlines()
    if len(tail) < len(datagram) and len(lines) > 1:
        del lines[0]  # a partial line
    return lines[-LINES_MAX:]


def parse_line(line: bytes) -> ProgressUpdate | None:
    """Parse `step=12 loss=0.3`, `batch=8 batch_seconds=0.02` or the same as a JSON object; None for any other line.

    >>> parse_line(b"step=12 loss=0.5 phase=validation"), parse_line(b"hello")
    (ProgressUpdate(step=12, loss=0.5, batch=None, phase='validation', runs=()), None)
    >>> parse_line(b'{"batch": 8, "batch_seconds": 0.02}').batch, parse_line(b"mlflow_run=1f3c").runs
    ((8, 0.02), (('mlflow', '1f3c'),))
    """
    text = line[:LINE_BYTES_MAX].decode(errors="replace").strip()
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
    else:
        fields = dict(word.split("=", 1) for word in text.replace(",", " ").split() if "=" in word)
    if not isinstance(fields, dict):
        return None
    batch = fields.get("batch"), fields.get("batch_seconds")
    named = ((tracker, fields.get(f"{tracker}_run")) for tracker in TRACKERS)
    runs = tuple((tracker, run) for tracker, run in named if isinstance(run, str) and RUN.fullmatch(run))
    return progress_update(fields.get("step"), fields.get("loss"), *batch, fields.get("phase"), runs)


def progress_update(
    step: object,
    loss: object,
    batch: object = None,
    batch_seconds: object = None,
    phase: object = None,
    runs: Runs = (),
) -> ProgressUpdate | None:
    """Return an update from a step, a loss and a batch of any types, and runs; None if none of them is usable."""
    number, value = _number(step), _number(loss)
    whole = int(number) if number is not None and math.isfinite(number) and 0 <= number <= STEP_MAX else None
    requests = _batch(_number(batch), _number(batch_seconds))
    if whole is None and value is None and requests is None and not runs:
        return None
    return ProgressUpdate(whole, value, requests, "" if whole is None else _phase(phase), runs)


def _phase(phase: object) -> str:
    """Return the phase if it is a valid name; anything else counts as training."""
    return phase if isinstance(phase, str) and PHASE.fullmatch(phase) else ""


def _batch(size: float | int | None, seconds: float | int | None) -> tuple[int, float] | None:
    if size is None or seconds is None or not (1 <= size <= BATCH_SIZE_MAX and 0 < seconds <= BATCH_SECONDS_MAX):
        return None
    return int(size), float(seconds)


def _number(value: object) -> float | int | None:
    if isinstance(value, str):
        try:
            return int(value) if value.isdecimal() and len(value) < 20 else float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if isinstance(value, float) or abs(value) <= STEP_MAX else None  # JSON integers are unbounded


class ProgressTracker:
    """One attempt's progress. Times are seconds on any monotonic clock."""

    def __init__(self) -> None:
        self.step = 0  # of training
        self.loss: float | None = None
        self.batch: tuple[int, float] | None = None  # since the last report
        self.phase = ""
        self.phase_step = 0  # of the current phase
        self.runs: dict[str, str] = {}  # the latest of each tracker
        self._points: deque[tuple[float, int]] = deque()
        self._reached: dict[str, tuple[int, float]] = {}  # by phase: its last step, and when it was reported

    def update(self, line: ProgressUpdate, now: float) -> None:
        """Record the progress in one line.

        Each phase counts its own steps and has a rate of its own. Replicas of a gang report the same steps, some later
        than others: a step that is not beyond the last one of its phase is ignored, unless the phase has not advanced
        for so long that the job must have started it again.
        """
        self.runs.update(line.runs)
        if line.batch is not None:
            self.batch = line.batch
        last, reached = self._reached.get(line.phase, (-1, -math.inf))
        old = line.step is None or (line.step <= last and now - reached < RESTART_SECONDS)
        new_phase = not old and line.phase != self.phase
        if new_phase or (line.loss is not None and (line.step is None or line.phase == self.phase)):
            self.loss = line.loss  # not the loss of another phase
        if old or line.step is None or (line.step == last and not new_phase):
            return
        if new_phase or line.step < last:
            self._points.clear()
        self._enter(line.phase, line.step, now)
        self._add_point(now)

    def _enter(self, phase: str, step: int, now: float) -> None:
        self._reached.pop(phase, None)
        self._reached[phase] = step, now
        if len(self._reached) > PHASES_MAX:
            del self._reached[next(iter(self._reached))]
        self.phase, self.phase_step = phase, step
        if not phase:
            self.step = step

    def _add_point(self, now: float) -> None:
        """Add a point; keep few points, at least two, that span the window."""
        points = self._points
        if len(points) >= 2 and now - points[-2][0] < SAMPLE_SECONDS:
            points.pop()
        points.append((now, self.phase_step))
        while len(points) > 2 and now - points[1][0] >= WINDOW_SECONDS:
            points.popleft()

    def seconds_since_step(self, now: float) -> float | None:
        """Return the seconds since the last step; None before the first."""
        return now - self._points[-1][0] if self._points else None

    def forget_rate(self) -> None:
        """Reset the rate: after a change of cores the old rate is meaningless."""
        self._points.clear()

    def rate_per_second(self, now: float) -> float:
        """Return the steps per second over the last window; 0 while unknown or after a long silence."""
        if len(self._points) < 2 or now - self._points[-1][0] > SILENCE_SECONDS_MAX:
            return 0.0
        (first_time, first_step), (last_time, last_step) = self._points[0], self._points[-1]
        return (last_step - first_step) / (last_time - first_time) if last_time > first_time else 0.0

    def rate_over(self, now: float, seconds: float) -> float:
        """Return the steps per second over about the last `seconds`, longer if nothing was reported at their beginning.

        0 while unknown. Once the next step is overdue, the rate falls continuously until it arrives.
        """
        points = self._points
        if len(points) < 2:
            return 0.0
        last_time, last_step = points[-1]
        since = now - max(seconds, 1e-9)
        first_time, first_step = next(
            (point for point in reversed(points) if point[0] <= since and point[0] < last_time), points[0]
        )
        if last_time <= first_time:
            return 0.0
        rate = (last_step - first_step) / (last_time - first_time)
        stride = last_step - points[-2][1]
        return min(rate, stride / (now - last_time)) if now > last_time else rate
