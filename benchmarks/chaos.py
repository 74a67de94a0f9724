"""1,000 chaos steps on a mesh of real processes; the bar is no violation.

docs/chaos.md describes the faults and the checks. A fault without effect does not count as a step; the reference of
each kind is the number of faults drawn. The reference of the time is the duration of the drawn steps as planned; the
rest was spent on starting processes, on waiting for quiescence, and on other load of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from tests.verification.chaos.plan import DRAWN, plan  # noqa: E402 - likewise

SEED, STEPS, STEPS_QUICK = 7, 1_000, 30
REST_EVERY, PACE = 50, 1.0
MINUTES_MAX = 30


def measure(quick: bool) -> Sequence[harness.Row]:
    """Run the same program as `make chaos`."""
    seed = int(os.environ.get("COTENANT_SEED", SEED))
    steps = int(os.environ.get("COTENANT_STEPS", STEPS_QUICK if quick else STEPS))
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        command = [
            sys.executable,
            "-m",
            "tests.verification.chaos",
            f"--steps={steps}",
            f"--seed={seed}",
            f"--json={report}",
        ]
        command += [f"--rest-every={REST_EVERY}", f"--pace={PACE}"]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        if not report.exists():
            return []  # the reason is on stderr
        outcome = json.loads(report.read_text())
    drawn, did = outcome["drawn"], outcome["faults"]
    total = sum(drawn.values())
    planned_seconds = PACE * sum(step.after_seconds for step in plan(seed, total))
    minutes = outcome["seconds"] / 60
    wrong, done = len(outcome["wrong"]), outcome["steps"]
    points = outcome["points"].values()
    reached = {name.split()[0] for name in outcome["reached"]}
    return [
        harness.Row("steps that did something", done, "", total, "drawn", bar=f">= {steps}", holds=done >= steps),
        *(harness.Row(f"steps: {fault}", did.get(fault, 0), "", drawn[fault], "drawn") for fault in sorted(drawn)),
        harness.Row("fail points at which somebody was killed or halted", len(reached), "", len(DRAWN), "all"),
        harness.Row(
            "fail points that somebody came to", sum(passed > 0 for _, passed, _ in points), "", len(DRAWN), "all"
        ),
        harness.Row(
            "time",
            outcome["seconds"],
            "s",
            planned_seconds,
            "what the plan itself takes, s",
            bar="" if quick else f"<= {MINUTES_MAX} min",
            holds=None if quick else minutes <= MINUTES_MAX,
        ),
        harness.Row("time at rest", outcome["settling_seconds"], "s", outcome["rests"], "rests"),
        harness.Row("jobs that were acknowledged", outcome["jobs"], ""),
        harness.Row("attempts that began", outcome["attempts"], "", outcome["jobs"], "jobs"),
        harness.Row("commits that were checked", outcome["commits"], ""),
        harness.Row("events of edges that were checked", outcome["edges"], ""),
        harness.Row("starts of parts", outcome["starts"], ""),
        harness.Row("all that was wrong", wrong, "", bar="0", holds=not wrong),
    ]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
