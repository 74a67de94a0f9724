"""A training loop beside CPU jobs of stress-ng, on real cores, with the eliminator off and on in the same run.

The loop is bound by memory (numpy, larger than the last-level cache) and holds a core of its own; the CPU job holds
another. What they share is the cache and the memory; where others take CPU time from the loop, its rate follows that
and nothing is judged: the CPU time that it had is shown. Speeds are medians of what the agent samples; a window is
`WINDOW_SECONDS`. Needs root's control groups, two cores and stress-ng (`apt-get install stress-ng`; or say where it
is: STRESS_NG=/path/to/stress-ng).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Row, main

COTENANT = str(Path(sys.executable).with_name("cotenant"))
WINDOW_SECONDS = 1.5
BASELINE_WINDOWS, WATCHED_WINDOWS = 14, 12
NOTICED_WINDOWS_MAX, RECOVERED_WINDOWS_MAX, RECOVERED_MIN, KEPT_MIN = 3, 6, 0.95, 0.1
QUIET_MIN = 0.9  # of its core, which the loop never leaves idle; with less, others are on it
HURT_MIN = 0.05  # who loses less is no victim
LOADS = {
    "stream": ["--stream", "1"],
    "cache": ["--cache", "1"],
    "cpu": ["--cpu", "1"],
}
TRAIN = """
import numpy as np
from cotenant import progress
one, other = np.ones(6_000_000), np.ones(6_000_000)
while True:
    np.add(one, other, out=other)
    progress.step()
"""
# the CPU job's own measure of its speed would need its own words; its CPU time stands for it
STARTER = """
import os, sys, time
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Mesh:
    """`cotenant up` with one policy, and what its agent samples."""

    def __init__(self, directory: Path, policy: str) -> None:
        self.had: list[float] = []  # cores that the training job was busy on, look by look
        self.environment = {**os.environ, "COTENANT_STATE_DIR": str(directory)}
        config = directory / "config.toml"
        config.write_text(f'gpus = "fake:1"\nsample_seconds = {WINDOW_SECONDS}\ncontention = "{policy}"\n')
        self.log = (directory / "up.log").open("w")
        self.process = subprocess.Popen(
            [COTENANT, "up", "--config", str(config)], env=self.environment, stdout=self.log, stderr=self.log
        )
        while "the mesh is up" not in (directory / "up.log").read_text():
            time.sleep(0.05)

    def run(self, *arguments: str) -> str:
        """Run a command."""
        return subprocess.run(
            [COTENANT, *arguments], env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def submit(self, *arguments: str) -> str:
        """Submit a job; its id."""
        return self.run("submit", *arguments).split()[0]

    def json(self, *arguments: str) -> Any:
        """Run a command that prints JSON."""
        return json.loads(self.run(*arguments, "--json"))

    def look(self, train: str, hog: str) -> tuple[float, float]:
        """The training job's rate, and the cores that the other keeps busy.

        Raises:
            SystemExit: one of them does not run.
        """
        jobs = {job["id"]: job for job in self.json("top", "--once")["jobs"]}
        for id in (train, hog):
            if id not in jobs:
                raise SystemExit(f"{id} does not run: {self.run('show', id)}")
        self.had.append(float(jobs[train]["cores_busy"] or 0))
        return float(jobs[train]["rate_per_second"] or 0), float(jobs[hog]["cores_busy"] or 0)


@contextmanager
def mesh(policy: str) -> Iterator[Mesh]:
    """A mesh whose jobs end with it."""
    with tempfile.TemporaryDirectory() as directory:
        up = Mesh(Path(directory), policy)
        try:
            yield up
        finally:
            for job in up.json("jobs"):
                up.run("cancel", job["id"])
            while up.json("jobs"):
                time.sleep(0.1)
            up.process.terminate()
            up.process.wait()
            up.log.close()


def windows(up: Mesh, train: str, hog: str, count: int) -> list[tuple[float, float]]:
    """What is seen in so many windows."""
    found, began = [], time.monotonic()
    for number in range(1, count + 1):
        time.sleep(max(0.0, began + number * WINDOW_SECONDS - time.monotonic()))
        found.append(up.look(train, hog))
    return found


def beside(policy: str, load: Sequence[str], stress: str, directory: Path) -> dict[str, float]:
    """Train alone, then beside a load; rates as shares of that alone. Windows are counted from the load's start."""
    with mesh(policy) as up:
        go = directory / f"go-{policy}-{load[0]}"
        python = ["--", sys.executable, "-c"]
        train = up.submit("--gpus", "1", "--cpus", "1", "--kind", "training", *python, TRAIN)
        hog = up.submit("--gpus", "0", "--cpus", "1", "--kind", "cpu", *python, STARTER, str(go), stress, *load)
        windows(up, train, hog, 7)  # a job's first windows are not judged
        baseline = statistics.median(rate for rate, _ in windows(up, train, hog, BASELINE_WINDOWS))
        go.touch()
        began = time.time()
        seen = windows(up, train, hog, WATCHED_WINDOWS)
        incidents = [one for one in up.json("incidents") if one["victim"] == train]
        first = min((one["began_seconds_ago"] for one in incidents), default=None)
        noticed = float("inf") if first is None else (time.time() - first - began) / WINDOW_SECONDS
        rates = [rate / baseline for rate, _ in seen]
        return {
            "noticed": noticed,
            "hurt": min(statistics.median(rates[:4]), statistics.median(rates)),
            "late": statistics.median(rates[RECOVERED_WINDOWS_MAX:]),
            "kept": statistics.median(cores for _, cores in seen[RECOVERED_WINDOWS_MAX:]),
            "had alone": statistics.median(up.had[-WATCHED_WINDOWS - BASELINE_WINDOWS : -WATCHED_WINDOWS]),
            "had": statistics.median(up.had[RECOVERED_WINDOWS_MAX - WATCHED_WINDOWS :]),
            "suspended": float(any("suspended" in action for one in incidents for action in one["actions"])),
        }


def measure(quick: bool) -> Sequence[Row]:
    """Each load, off and on."""
    stress = shutil.which(os.environ.get("STRESS_NG") or "stress-ng")
    if stress is None:
        raise SystemExit("stress-ng is needed: apt-get install stress-ng, or say where it is with STRESS_NG")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ["stream"] if quick else list(LOADS):
            off = beside("none", LOADS[name], stress, Path(scratch))
            on = beside("coda-eliminator", LOADS[name], stress, Path(scratch))
            rows += rows_of(name, off, on)
    return rows


def rows_of(name: str, off: dict[str, float], on: dict[str, float]) -> list[Row]:
    """Three bars for a load that hurts; one that does not has nothing to be noticed, and says how little it does.

    A load hurts by what the loop loses while it has its core, not by the time on it that others take.
    """
    quiet = min(off["had alone"], off["had"], on["had alone"]) >= QUIET_MIN
    harm = 1 - off["late"] / max(0.01, min(1.0, off["had"] / max(0.01, off["had alone"])))
    hurts = harm >= HURT_MIN
    note = "off, in the same run" if hurts else f"off, in the same run: it takes {max(0.0, harm):.0%} of the rate"
    judged = hurts and quiet
    why = "" if judged else ", not judged: " + ("others took the CPU time" if hurts else "no measurable harm here")
    rows = [
        Row(f"{name}: noticed after", on["noticed"], "windows", bar=f"≤ {NOTICED_WINDOWS_MAX} windows{why}",
            holds=on["noticed"] <= NOTICED_WINDOWS_MAX if judged else None),
        Row(f"{name}: the victim's rate from window {RECOVERED_WINDOWS_MAX} on", on["late"], "of its baseline",
            off["late"], note, f"≥ {RECOVERED_MIN:g} of its baseline{why}",
            on["late"] >= RECOVERED_MIN if judged else None),
        Row(f"{name}: the CPU job keeps", on["kept"], "cores", off["kept"], note, f"≥ 10 % unless suspended{why}",
            bool(on["suspended"]) or on["kept"] >= KEPT_MIN * off["kept"] if judged else None),
    ]  # fmt: skip
    return [
        *rows,
        Row(f"{name}: what the load takes of the rate by itself", 100 * max(0.0, harm), "%"),
        Row(f"{name}: the victim's CPU time then", on["had"], "cores", off["had"], note),
    ]


if __name__ == "__main__":
    main(measure, __doc__ or "")
