"""A training loop next to CPU jobs of stress-ng, on real cores, with the eliminator off and on in the same run.

The loop (numpy) is bound by memory, with arrays three times as large as the last-level cache; next to the load that
thrashes the cache, it is bound by the cache, with arrays half as large. The loop and the CPU job have a core each and
share the cache and the memory. If other processes take CPU time from the loop, its rate drops for that reason: its CPU
time is shown, and no bar applies. To avoid disturbing the loop itself, the benchmark reads the agent's samples over
one connection and runs commands only between two loads. Speeds are medians of the agent's samples; a window is
`WINDOW_SECONDS`, and windows are counted from the start of a load. Needs root for control groups, two cores and
stress-ng (`apt-get install stress-ng`, or set STRESS_NG=/path/to/stress-ng).
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Row, main
from benchmarks.local_mesh import SECONDS_MAX, LocalMesh, MeshFailed

from cotenant.v1 import contention_service_pb2 as pb

WINDOW_SECONDS = 1.0
NOTICED_WINDOWS_MAX, RECOVERED_WINDOWS_MAX, RECOVERED_MIN, KEPT_MIN = 3, 6, 0.95, 0.1
WARM_WINDOWS = {"none": 4, "coda-eliminator": 13}  # after the agent reports the job as steady; a baseline takes 12
ALONE_WINDOWS, BETWEEN_WINDOWS = 5, 2
WATCHED_WINDOWS = {"none": 8, "coda-eliminator": 11}
QUIET_MIN = 0.9  # of its core, which the loop keeps busy; less means that other processes run on it
HURT_MIN = 0.05  # a job that loses less is no victim
LOADS = {  # by what limits the training loop
    "memory": {"stream": ["--stream", "1"], "cpu": ["--cpu", "1"]},
    "cache": {"cache": ["--cache", "1"]},
}
LOAD = ("--gpus", "0", "--kind", "cpu")
LAST_LEVEL_CACHES = {"memory": 3.0, "cache": 0.5}  # total size of the loop's two arrays
STEP_BYTES = 96 << 20  # bytes read in a step
TRAIN = """
import sys
import numpy as np
from cotenant import progress
doubles, times = map(int, sys.argv[1:])
one, other = np.ones(doubles), np.ones(doubles)
while True:
    for _ in range(times):
        np.add(one, other, out=other)
    progress.step()
"""
# the CPU job reports no speed, so its CPU time is used instead
STARTER = """
import os, sys, time
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
os.execvp(sys.argv[2], sys.argv[2:])
"""


Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class WindowRates:
    """The agent's sample of a window: the training job's rate, and the cores used by it and by the CPU job."""

    rate: float
    cores: float
    load_cores: float


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of the first CPU; 32 MiB if the kernel does not report it."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=32 << 20)


class Mesh(LocalMesh):
    """A mesh with a contention policy, and the rates of its jobs."""

    def __init__(self, directory: Path, policy: str, settings: str = 'gpus = "fake:1"\n') -> None:
        own = f'sample_seconds = {WINDOW_SECONDS}\ncontention = "{policy}"\n'
        super().__init__(directory, settings + own)

    def incidents_between(self, victim: str, suspect: str) -> list[pb.Incident]:
        """Return the incidents between this victim and this suspect, also trials."""
        wanted = victim, suspect
        return [one for one in self.incidents() if (one.victim_job_id, one.suspect_job_id) == wanted]

    def windows(self, count: int, train: str, load: str = "") -> list[WindowRates]:
        """Return the samples of the next windows.

        Raises:
            MeshFailed: a job is not running.
        """
        found = []
        for _ in range(count):
            here = self.sample()
            for id in filter(None, (train, load)):
                if id not in here:
                    raise MeshFailed(f"job {id} is not running: {self.run('show', id)}")
            found.append(
                WindowRates(here[train].rate_per_second, here[train].cores_used, here[load].cores_used if load else 0.0)
            )
        return found

    def wait_for(self, *ids: str, steady: str = "", seconds_max: float = SECONDS_MAX) -> None:
        """Wait until exactly these jobs are sampled, and the job `steady` is reported as steady."""
        deadline = time.monotonic() + seconds_max
        while (here := self.sample()).keys() != set(ids) or (steady and not here[steady].steady):
            if time.monotonic() > deadline:
                raise MeshFailed(f"running jobs are {', '.join(here)}, not {', '.join(ids)}: {self.run('jobs')}")


@contextmanager
def mesh(policy: str, settings: str = 'gpus = "fake:1"\n') -> Iterator[Mesh]:
    """Run a mesh; its jobs are cancelled at the end."""
    with tempfile.TemporaryDirectory() as directory, closing(Mesh(Path(directory), policy, settings)) as up:
        yield up


def train_and_load(bound_by: str, stress: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the arguments that submit the loop, and those of each load."""
    doubles = int(LAST_LEVEL_CACHES[bound_by] * last_level_cache_bytes()) // 16
    loop = [sys.executable, "-c", TRAIN, str(doubles), str(max(1, STEP_BYTES // (16 * doubles)))]
    train = ["--gpus", "1", "--cpus", "1", "--kind", "training", "--", *loop]
    loads = {name: [*LOAD, "--cpus", "1", "--", stress, *words] for name, words in LOADS[bound_by].items()}
    return train, loads


def beside(
    up: Mesh,
    policy: str,
    train: Sequence[str],
    loads: Mapping[str, Sequence[str]],
    start_seconds_max: float | None = None,
) -> dict[str, Figures]:
    """Train alone, next to a load, alone again, next to the next load; return rates relative to those alone.

    `train` and `loads` are arguments of `cotenant submit`. The rates alone are measured before and after each load,
    because the speed of machines varies over minutes. `start_seconds_max`, for a training that takes long to start, is
    how long to wait for a steady rate, whatever the policy.
    """
    found = {}
    training = up.submit(*train)
    waits = policy != "none" or start_seconds_max is not None
    up.wait_for(training, steady=training if waits else "", seconds_max=start_seconds_max or SECONDS_MAX)
    up.windows(WARM_WINDOWS[policy], training)
    for name, words in loads.items():
        go = up.directory / f"go-{name}"
        before = words.index("--") + 1
        load = up.submit(*words[:before], sys.executable, "-c", STARTER, str(go), *words[before:])
        up.wait_for(training, load)
        up.windows(BETWEEN_WINDOWS, training, load)
        alone = up.windows(ALONE_WINDOWS, training, load)
        go.touch()
        began = time.time()
        seen = up.windows(WATCHED_WINDOWS[policy], training, load)
        incidents = up.incidents_between(training, load)
        up.run("cancel", load)
        up.wait_for(training)
        alone += up.windows(BETWEEN_WINDOWS + ALONE_WINDOWS, training)[BETWEEN_WINDOWS:]
        found[name] = _summary(alone, seen, incidents, began)
        print(f"{policy}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _summary(alone: list[WindowRates], seen: list[WindowRates], incidents: list[pb.Incident], began: float) -> Figures:
    baseline = statistics.median(window.rate for window in alone)
    first = min((one.start_time.ToNanoseconds() / 1e9 for one in incidents), default=float("inf"))
    late = seen[RECOVERED_WINDOWS_MAX - 1 :]
    return {
        "noticed": (first - began) / WINDOW_SECONDS,
        "late": statistics.median(window.rate for window in late) / baseline,
        "kept": statistics.median(window.load_cores for window in late),
        "had alone": statistics.median(window.cores for window in alone),
        "had": statistics.median(window.cores for window in late),
        "suspended": float(any("suspended" in action for one in incidents for action in one.actions)),
    }


def measure(quick: bool) -> Sequence[Row]:
    """Measure each load with the eliminator off and on."""
    stress = shutil.which(os.environ.get("STRESS_NG") or "stress-ng")
    if stress is None:
        raise SystemExit("error: stress-ng not found; run: apt-get install stress-ng, or set STRESS_NG to its path")
    rows = []
    for bound_by, loads in LOADS.items() if not quick else [("memory", ["stream"])]:
        train, all_loads = train_and_load(bound_by, stress)
        wanted = {name: all_loads[name] for name in loads}
        off, on = (_measured(policy, train, wanted) for policy in ("none", "coda-eliminator"))
        rows += [row for name in loads for row in rows_of(name, off[name], on[name])]
    return rows


def _measured(policy: str, train: Sequence[str], loads: Mapping[str, Sequence[str]]) -> dict[str, Figures]:
    with mesh(policy) as up:
        return beside(up, policy, train, loads)


def rows_of(name: str, off: Figures, on: Figures, quiet_cores: float = QUIET_MIN) -> list[Row]:
    """Return three bars for a harmful load; for a harmless load, return how little it slows the loop.

    Harm is the rate that the loop loses while it has its cores, not the CPU time that other processes take. Less CPU
    time than `quiet_cores` means that other processes took it.
    """
    quiet = min(off["had alone"], off["had"], on["had alone"]) >= quiet_cores
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
