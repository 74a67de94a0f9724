"""Checks Cotenant on this machine's GPU: seven points within a time, with results as JSON in a folder.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --only curve,contention --minutes-max 5
    python -m benchmarks.gpu --out DIR --rehearsal      without a GPU: a stand-in for NVML, small programs

`results.json` has the figures of all points, `POINT.json` also what they were computed from. Both are written after
each point. A point is skipped, with the reason, when something is missing or no time is left for it. docs/gpu.md
describes the points. Everything that a rehearsal prints or writes is marked as such: it says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.gpu import assignment, contention, curve, inference, machine, mixed, nvml, sharing, stand_in
from benchmarks.gpu.points import FAILED, Point, Runner
from benchmarks.local_mesh import ROOT

from cotenant import telemetry

POINTS: Sequence[Point] = tuple(
    module.POINT for module in (nvml, assignment, curve, contention, sharing, inference, mixed)
)
MINUTES_MAX, MINUTES_MAX_QUICK = 9.0, 4.0
LABEL = "REHEARSAL, no GPU: "
INTERRUPTED = 130


def chosen(only: str) -> list[Point]:
    """Return the points of a comma-separated list, in the usual order; all if it is empty.

    Raises:
        ValueError: a name is unknown.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [point.name for point in POINTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown point: {', '.join(unknown)}; known are {', '.join(known)}")
    return [point for point in POINTS if not names or point.name in names]


def saying(*, rehearsal: bool, to_stderr: bool) -> Callable[[str], None]:
    """Return the function that prints lines; each line of a rehearsal is marked."""

    def say(text: str) -> None:
        for line in text.splitlines():
            print(f"{LABEL if rehearsal else ''}{line}", file=sys.stderr if to_stderr else sys.stdout, flush=True)

    return say


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "report" / "gpu", metavar="DIR", help="report/gpu")
    parser.add_argument("--only", default="", metavar="POINT,…", help=", ".join(point.name for point in POINTS))
    parser.add_argument("--minutes-max", type=float, metavar="M", help=f"of the whole run; {MINUTES_MAX:g}")
    parser.add_argument("--seconds-spent", type=float, default=0.0, metavar="S", help="of these minutes, before")
    parser.add_argument("--rehearsal", action="store_true", help="without a GPU; the results say so")
    parser.add_argument("--quick", action="store_true", help=f"within {MINUTES_MAX_QUICK:g} minutes")
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON array; progress goes to stderr")
    arguments = parser.parse_args()
    try:
        arguments.points = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    usual = MINUTES_MAX_QUICK if arguments.quick else MINUTES_MAX
    arguments.seconds_max = 60 * (arguments.minutes_max or usual) - arguments.seconds_spent
    if arguments.seconds_max <= 0:
        parser.error("no time is left: --minutes-max has to be more than --seconds-spent")
    return arguments


def main() -> int:
    """Run the points and return the exit status: 1 if one failed, 130 if interrupted; missed bars are only reported."""
    arguments = _parsed()
    os.environ.setdefault("COTENANT_LOG", "error")
    telemetry.setup("benchmark")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a limit of the caller: keep what there is
    say = saying(rehearsal=arguments.rehearsal, to_stderr=arguments.json)
    with tempfile.TemporaryDirectory(prefix="cotenant-gpu-nvml-") as directory:
        if arguments.rehearsal:
            stand_in.install(Path(directory))
        seen = machine.look(rehearsal=arguments.rehearsal)
        say(f"{seen.cores} cores, torch {seen.torch or 'missing'}, GPU {seen.torch_gpu or 'none'}")
        about = {
            "rehearsal": arguments.rehearsal,
            "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": asdict(seen),
            "conditions": machine.conditions(),
        }
        runner = Runner(seen, arguments.out, arguments.seconds_max, say, about)
        complete = runner.run(arguments.points)
    if arguments.json:
        print(json.dumps(runner.rows(), indent=2))
    say(f"results: {arguments.out}")
    if not complete:
        return INTERRUPTED
    return int(any(result.status == FAILED for result in runner.results))


if __name__ == "__main__":
    sys.exit(main())
