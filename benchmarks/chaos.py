"""1,000 steps of chaos to a mesh of real processes, and what was broken by them: nothing must be.

What is done, and what is judged, is in docs/chaos.md. A fault that did nothing is no step; beside each kind stands how
many were drawn. The reference of the time is that of the steps drawn alone, as the plan has them: what is above that
was spent on starting, on waiting for rest, and on a machine that had other things to do.
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
    """Run as `make chaos` does."""
    seed = int(os.environ.get("COTENANT_SEED", SEED))
    steps = int(os.environ.get("COTENANT_STEPS", STEPS_QUICK if quick else STEPS))
    with tempfile.TemporaryDirectory() as place:
        told = Path(place) / "told.json"
        command = [
            sys.executable,
            "-m",
            "tests.verification.chaos",
            f"--steps={steps}",
            f"--seed={seed}",
            f"--json={told}",
        ]
        command += [f"--rest-every={REST_EVERY}", f"--pace={PACE}"]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        if not told.exists():
            return []  # it has said why
        came_of_it = json.loads(told.read_text())
    drawn, did = came_of_it["drawn"], came_of_it["faults"]
    total = sum(drawn.values())
    planned_seconds = PACE * sum(step.after_seconds for step in plan(seed, total))
    minutes = came_of_it["seconds"] / 60
    wrong, done = len(came_of_it["wrong"]), came_of_it["steps"]
    points = came_of_it["points"].values()
    reached = {name.split()[0] for name in came_of_it["reached"]}
    return [
        harness.Row("steps that did something", done, "", total, "drawn", bar=f">= {steps}", holds=done >= steps),
        *(harness.Row(f"steps: {fault}", did.get(fault, 0), "", drawn[fault], "drawn") for fault in sorted(drawn)),
        harness.Row("fail points at which somebody was killed or halted", len(reached), "", len(DRAWN), "all"),
        harness.Row(
            "fail points that somebody came to", sum(passed > 0 for _, passed, _ in points), "", len(DRAWN), "all"
        ),
        harness.Row(
            "time",
            came_of_it["seconds"],
            "s",
            planned_seconds,
            "what the plan itself takes, s",
            bar="" if quick else f"<= {MINUTES_MAX} min",
            holds=None if quick else minutes <= MINUTES_MAX,
        ),
        harness.Row("time at rest", came_of_it["settling_seconds"], "s", came_of_it["rests"], "rests"),
        harness.Row("jobs that were acknowledged", came_of_it["jobs"], ""),
        harness.Row("attempts that began", came_of_it["attempts"], "", came_of_it["jobs"], "jobs"),
        harness.Row("commits that were checked", came_of_it["commits"], ""),
        harness.Row("events of edges that were checked", came_of_it["edges"], ""),
        harness.Row("starts of parts", came_of_it["starts"], ""),
        harness.Row("all that was wrong", wrong, "", bar="0", holds=not wrong),
    ]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
