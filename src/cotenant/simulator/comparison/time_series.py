"""Time series of a simulation, with a bounded number of points."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from cotenant.core.model.job_table import Floats
from cotenant.simulator.recording.events import Event, Kind

POINTS_MAX = 1_000
BARS_MAX = 4_000
STOPS = frozenset({Kind.PREEMPTED, Kind.MIGRATED, Kind.RECLAIMED, Kind.RESCALED, Kind.FINISHED, Kind.ATTEMPT_FAILED})


@dataclass(frozen=True, slots=True)
class Bar:
    """A run's time on one node."""

    job_id: str
    node: int
    begin_seconds: float
    end_seconds: float
    gpu_milli: int
    cores: int


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """Means over spans of equal length, from `since_seconds` on: held GPUs and cores, and waiting jobs."""

    span_seconds: float
    gpus: Floats
    cores: Floats
    waiting: Floats
    bars: tuple[Bar, ...] = ()
    since_seconds: float = 0.0


def merged(values: Floats, span_seconds: float, most: int) -> tuple[Floats, float]:
    """Return the means over longer spans, at most so many, and the length of these spans.

    >>> values, span_seconds = merged(np.array([1.0, 3.0, 4.0]), 10.0, 2)
    >>> values.tolist(), span_seconds
    ([2.0, 4.0], 20.0)
    """
    while len(values) > most:
        odd = values[len(values) - len(values) % 2 :]
        values = np.append(values[: len(values) // 2 * 2].reshape(-1, 2).mean(axis=1), odd)
        span_seconds *= 2
    return values, span_seconds


@dataclass(slots=True)
class Sampler:
    """A recorder that keeps sums over spans of time; if there are too many it merges pairs. It begins at a moment.

    >>> sampler = Sampler(bars=False)
    >>> sampler.record(Event(0.0, Kind.SUBMITTED, "a"))
    >>> sampler.record(Event(3.0, Kind.STARTED, "a", gpu_milli=2000, cores=0))
    >>> sampler.record(Event(4.0, Kind.FINISHED, "a"))
    >>> sampler.series().gpus.tolist(), sampler.series().waiting.tolist()
    ([0.0, 0.0, 0.0, 2.0], [1.0, 1.0, 1.0, 0.0])
    """

    bars: bool = True
    since_seconds: float = 0.0
    _now: float = 0.0  # since then
    _span_seconds: float = 1.0
    _level: Floats = field(default_factory=lambda: np.zeros(3))
    _sums: Floats = field(default_factory=lambda: np.zeros((POINTS_MAX, 3)))
    _running: dict[str, Event] = field(default_factory=dict)
    _bars: list[Bar] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Add an event."""
        if (now := event.at_seconds - self.since_seconds) > self._now:
            self._pass(now)
        if event.kind is Kind.SUBMITTED:
            self._level[2] += 1
        elif event.kind is Kind.STARTED:
            self._level += _held(event, 1)
            self._level[2] -= 1
            self._running[event.job_id] = event
        elif event.kind is Kind.RESIZED and (start := self._running.get(event.job_id)):
            self._level[1] += (event.cores or 0) - (start.cores or 0)
            self._running[event.job_id] = replace(start, cores=event.cores)
        elif event.kind in STOPS:
            self._stop(event)
        elif event.kind is Kind.GIVEN_UP:
            self._level[2] -= 1

    def _stop(self, event: Event) -> None:
        start = self._running.pop(event.job_id, None)
        if start is None:
            return
        self._level += _held(start, -1)
        self._level[2] += event.kind is not Kind.FINISHED
        self._draw(start, event.at_seconds)

    def _draw(self, start: Event, until: float) -> None:
        if self.bars and len(self._bars) < BARS_MAX:
            self._bars += [
                Bar(start.job_id, place.node, start.at_seconds, until, place.gpu_milli, place.cores)
                for place in start.nodes
            ]

    def _pass(self, until: float) -> None:
        while until > POINTS_MAX * self._span_seconds:
            self._sums = np.concatenate([self._sums[0::2] + self._sums[1::2], np.zeros((POINTS_MAX // 2, 3))])
            self._span_seconds *= 2
        first, last = self._now / self._span_seconds, until / self._span_seconds
        begin, end = int(first), min(int(last), POINTS_MAX - 1)
        if begin == end:
            self._sums[begin] += self._level * (until - self._now)
        else:
            self._sums[begin] += self._level * (begin + 1 - first) * self._span_seconds
            self._sums[begin + 1 : end] += self._level * self._span_seconds
            self._sums[end] += self._level * (last - end) * self._span_seconds
        self._now = until

    def series(self) -> TimeSeries:
        """Return the means so far."""
        whole = int(np.ceil(self._now / self._span_seconds))
        spans = np.full(whole, self._span_seconds)
        if whole:
            spans[-1] = self._now - (whole - 1) * self._span_seconds
        means = self._sums[:whole] / spans[:, None]
        gpus, cores, waiting = means.T
        return TimeSeries(self._span_seconds, gpus, cores, waiting, tuple(self._bars), self.since_seconds)


def _held(event: Event, sign: int) -> Floats:
    return np.array([sign * (event.gpu_milli or 0) / 1000, sign * (event.cores or 0), 0.0])
