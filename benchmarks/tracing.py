"""The cost of a span while tracing is off, which every call pays, beside an empty `with` statement."""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness

from cotenant import telemetry

SPAN_MICROSECONDS_MAX = 2.0
CALLS, REPEATS, REPEATS_QUICK = 20_000, 25, 9


def empty() -> None:
    """Enter and leave a context that does nothing."""
    with nullcontext():
        pass


def span() -> None:
    """Enter and leave a span."""
    with telemetry.span("plan", jobs=3):
        pass


def record() -> None:
    """Record a span that has ended."""
    telemetry.record("run", "", 1.0, 2.0, job="a")


def measure(quick: bool) -> Sequence[harness.Row]:
    """Return the rows."""
    repeats = REPEATS_QUICK if quick else REPEATS

    def microseconds(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=CALLS, repeat=repeats)) / CALLS * 1e6

    reference = microseconds(empty)
    calls = {"a span": span, "a recorded span": record, "the current span": telemetry.current}
    costs = {name: microseconds(call) for name, call in calls.items()}
    return [
        harness.Row(
            f"{name}, tracing off",
            cost,
            "µs",
            reference,
            "an empty with statement",
            f"<= {SPAN_MICROSECONDS_MAX:g}",
            cost <= SPAN_MICROSECONDS_MAX,
        )
        for name, cost in costs.items()
    ]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
