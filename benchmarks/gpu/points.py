"""The run: points one after another, each within its share of the time, its results written as soon as it is done."""

from __future__ import annotations

import json
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.harness import Row

CLEANUP_SECONDS = 8.0  # of a point's time, to end its jobs and its mesh
MEASURED, SKIPPED, FAILED, OUT_OF_TIME, INTERRUPTED = "measured", "skipped", "failed", "out of time", "interrupted"


class OutOfTime(Exception):
    """The time of a point is used up; the figures that it has are kept."""


@dataclass(slots=True)
class PointRun:
    """What a point may use: the machine, a folder of its own, and its time. `raw` is written beside its rows."""

    machine: Machine
    directory: Path
    deadline: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    raw: dict[str, Any] = field(default_factory=dict)

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self.deadline - self.clock())


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the list: its usual time, the least that it is started with, and what yields its figures.

    `missing` returns why the machine cannot measure it; empty if it can.
    """

    name: str
    seconds: float
    seconds_min: float
    measure: Callable[[PointRun], Iterator[Row]]
    missing: Callable[[Machine], str] = lambda machine: ""


@dataclass(slots=True)
class PointResult:
    """The result of a point, with the reason if it was not measured to its end."""

    name: str
    status: str
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


def share_of_time(point: Point, later: Sequence[Point], left: float) -> float:
    """Return the seconds that a point may take: its share of what is left, so that time not used goes to later ones.

    >>> def none(run): yield from ()
    >>> one, two = Point("one", 60, 10, none), Point("two", 120, 10, none)
    >>> share_of_time(one, [two], 90.0), share_of_time(two, [], 70.0)
    (30.0, 70.0)
    """
    return left * point.seconds / (point.seconds + sum(other.seconds for other in later))


@dataclass(slots=True)
class Runner:
    """Measures points within `seconds_max` and writes their results into `out`."""

    machine: Machine
    out: Path
    seconds_max: float
    say: Callable[[str], None]
    about: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    results: list[PointResult] = field(default_factory=list)

    def run(self, points: Sequence[Point]) -> bool:
        """Measure the points; return False if the run was interrupted."""
        self.out.mkdir(parents=True, exist_ok=True)
        end = self.clock() + self.seconds_max
        for number, point in enumerate(points):
            share = share_of_time(point, points[number + 1 :], max(0.0, end - self.clock()))
            result = self._one(point, share)
            self.results.append(result)
            self._write(result)
            why = f": {result.why}" if result.why else ""
            self.say(f"{point.name}: {result.status} in {result.seconds:.0f} s{why}")
            for row in result.rows:
                self.say(f"  {line_of(row)}")
            if result.status == INTERRUPTED:
                return False
        return True

    def _one(self, point: Point, share: float) -> PointResult:
        why = point.missing(self.machine)
        if not why and share < point.seconds_min:
            why = f"no time left: it takes at least {point.seconds_min:g} s, and {share:.0f} s are left for it"
        if why:
            return PointResult(point.name, SKIPPED, why)
        self.say(f"{point.name}: has {share:.0f} s")
        result, begin = PointResult(point.name, MEASURED), self.clock()
        with tempfile.TemporaryDirectory(prefix=f"cotenant-gpu-{point.name}-") as directory:
            run = PointRun(self.machine, Path(directory), begin + share, self.say, self.clock, result.raw)
            try:
                with _limited(max(0.01, share - CLEANUP_SECONDS)):
                    for row in point.measure(run):
                        result.rows.append(row)  # one by one: those before an error are kept
            except OutOfTime:
                result.status, result.why = OUT_OF_TIME, f"its {share:.0f} s are used up"
            except KeyboardInterrupt:
                result.status, result.why = INTERRUPTED, "interrupted"
            except Exception as error:  # any: the other points are measured all the same
                result.status, result.why = FAILED, f"{type(error).__name__}: {error}"
                result.raw["traceback"] = traceback.format_exc()
            finally:
                result.raw |= _logs(Path(directory)) if result.status != MEASURED else {}
        result.seconds = self.clock() - begin
        return result

    def _write(self, result: PointResult) -> None:
        own = self._view(result)
        _write(self.out / f"{result.name}.json", own | {"raw": result.raw})
        _write(self.out / "results.json", self.about | {"points": [self._view(one) for one in self.results]})

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows for JSON, each with the name of its point."""
        views = [self._view(result) for result in self.results]
        return [row | {"name": f"{view['name']}: {row['name']}"} for view in views for row in view["rows"]]

    def _view(self, result: PointResult) -> dict[str, Any]:
        """Return a result for JSON; each row of a rehearsal says so."""
        label = {"rehearsal": True} if self.machine.rehearsal else {}
        rows = [label | asdict(row) | {"ratio": row.ratio} for row in result.rows]
        return label | {
            "name": result.name,
            "status": result.status,
            "why": result.why,
            "seconds": round(result.seconds, 1),
            "rows": rows,
        }


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after some seconds; a timer that was set before goes on afterwards."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, expire)
    begin = time.monotonic()
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, before - (time.monotonic() - begin)))


def line_of(row: Row) -> str:
    """Return a figure in one line.

    >>> line_of(Row("the rate", 9.0, "1/s", 10.0, "alone", "at least 0.95 of it", False))
    'the rate: 9 1/s, alone: 10, ratio 0.9; at least 0.95 of it: missed'
    """
    beside = "" if row.reference is None else f", {row.reference_name}: {row.reference:.4g}"
    ratio = "" if row.ratio is None else f", ratio {row.ratio:.3g}"
    verdict = {None: "", True: ": met", False: ": missed"}[row.holds]
    bar = f"; {row.bar}{verdict}" if row.bar else ""
    return f"{row.name}: {row.value:.4g} {row.unit}".rstrip() + beside + ratio + bar


def _logs(directory: Path) -> dict[str, str]:
    """Return the ends of the logs in a folder, by name."""
    logs = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*.log")) if path.is_file()}
    return {f"end of {name}": path.read_text(errors="replace")[-4000:] for name, path in logs.items()}


def _write(path: Path, value: object) -> None:
    """Write JSON atomically."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")
    beside.replace(path)
