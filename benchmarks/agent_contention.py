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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Row, main

from cotenant.rpc.access import find
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1.contention_service_pb2_grpc import ContentionServiceStub

COTENANT = str(Path(sys.executable).with_name("cotenant"))
WINDOW_SECONDS = 1.0
NOTICED_WINDOWS_MAX, RECOVERED_WINDOWS_MAX, RECOVERED_MIN, KEPT_MIN = 3, 6, 0.95, 0.1
WARM_WINDOWS = {"none": 4, "coda-eliminator": 13}  # after the agent reports the job as steady; a baseline takes 12
ALONE_WINDOWS, BETWEEN_WINDOWS = 5, 2
WATCHED_WINDOWS = {"none": 8, "coda-eliminator": 11}
QUIET_MIN = 0.9  # of its core, which the loop keeps busy; less means that other processes run on it
HURT_MIN = 0.05  # a job that loses less is no victim
SECONDS_MAX = 30.0  # for steps that should take one second
LOADS = {  # by what limits the training loop
    "memory": {"stream": ["--stream", "1"], "cpu": ["--cpu", "1"]},
    "cache": {"cache": ["--cache", "1"]},
}
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


class Mesh:
    """`cotenant up` with a contention policy, and the samples of its agent."""

    def __init__(self, directory: Path, policy: str) -> None:
        self.directory = directory
        self.environment = {**os.environ, "COTENANT_STATE_DIR": str(directory)}
        config = directory / "config.toml"
        config.write_text(f'gpus = "fake:1"\nsample_seconds = {WINDOW_SECONDS}\ncontention = "{policy}"\n')
        self.log = (directory / "up.log").open("w")
        self.process = subprocess.Popen(
            [COTENANT, "up", "--config", str(config)], env=self.environment, stdout=self.log, stderr=self.log
        )
        while "the mesh is up" not in (directory / "up.log").read_text():
            time.sleep(0.05)
        access = find(directory, {})
        self._token = (("authorization", f"Bearer {access.token}"),)
        self._channel = grpc.insecure_channel(access.endpoints.contention)
        self._contention = ContentionServiceStub(self._channel)
        self._last = 0.0

    def close(self) -> None:
        """Stop the mesh."""
        self._channel.close()
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def run(self, *arguments: str) -> str:
        """Run a command and return its output."""
        return subprocess.run(
            [COTENANT, *arguments], env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def submit(self, *arguments: str) -> str:
        """Submit a job and return its id."""
        return self.run("submit", *arguments).split()[0]

    def sample(self) -> dict[str, pb.AttemptSample]:
        """Wait for the next window and return its sample of each job."""
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            for sample in self._contention.ListSamples(pb.ListSamplesRequest(), metadata=self._token).samples:
                ended = sample.time.ToNanoseconds() / 1e9
                if ended > self._last:
                    self._last = ended
                    return {attempt.job_id: attempt for attempt in sample.attempts}
            time.sleep(0.1)
        raise SystemExit(
            f"error: no samples from the agent for {SECONDS_MAX:g} s: {(self.directory / 'up.log').read_text()[-2000:]}"
        )

    def incidents(self, victim: str, suspect: str) -> list[pb.Incident]:
        """Return the incidents between this victim and this suspect, also trials."""
        response = self._contention.ListIncidents(pb.ListIncidentsRequest(page_size=100), metadata=self._token)
        return [
            incident
            for incident in response.incidents
            if (incident.victim_job_id, incident.suspect_job_id) == (victim, suspect)
        ]

    def windows(self, count: int, train: str, load: str = "") -> list[WindowRates]:
        """Return the samples of the next windows.

        Raises:
            SystemExit: a job is not running.
        """
        found = []
        for _ in range(count):
            here = self.sample()
            for id in filter(None, (train, load)):
                if id not in here:
                    raise SystemExit(f"error: job {id} is not running: {self.run('show', id)}")
            found.append(
                WindowRates(here[train].rate_per_second, here[train].cores_used, here[load].cores_used if load else 0.0)
            )
        return found

    def wait_for(self, *ids: str, steady: str = "") -> None:
        """Wait until exactly these jobs are sampled, and the job `steady` is reported as steady."""
        deadline = time.monotonic() + SECONDS_MAX
        while (here := self.sample()).keys() != set(ids) or (steady and not here[steady].steady):
            if time.monotonic() > deadline:
                raise SystemExit(f"error: running jobs are {', '.join(here)}, not {', '.join(ids)}: {self.run('jobs')}")


@contextmanager
def mesh(policy: str) -> Iterator[Mesh]:
    """Run a mesh; its jobs are cancelled at the end."""
    with tempfile.TemporaryDirectory() as directory:
        up = Mesh(Path(directory), policy)
        try:
            yield up
        finally:
            for job in up.sample():
                up.run("cancel", job)
            while up.sample():
                pass
            up.close()


def beside(policy: str, bound_by: str, names: Sequence[str], stress: str) -> dict[str, dict[str, float]]:
    """Train alone, next to a load, alone again, next to the next load; return rates relative to those alone.

    The rates alone are measured before and after each load, because the speed of machines varies over minutes.
    """
    found = {}
    python = ["--", sys.executable, "-c"]
    with mesh(policy) as up:
        doubles = int(LAST_LEVEL_CACHES[bound_by] * last_level_cache_bytes()) // 16
        loop = [TRAIN, str(doubles), str(max(1, STEP_BYTES // (16 * doubles)))]
        train = up.submit("--gpus", "1", "--cpus", "1", "--kind", "training", *python, *loop)
        up.wait_for(train, steady=train if policy != "none" else "")
        up.windows(WARM_WINDOWS[policy], train)
        for name in names:
            go = up.directory / f"go-{name}"
            command = [*python, STARTER, str(go), stress, *LOADS[bound_by][name]]
            load = up.submit("--gpus", "0", "--cpus", "1", "--kind", "cpu", *command)
            up.wait_for(train, load)
            up.windows(BETWEEN_WINDOWS, train, load)
            alone = up.windows(ALONE_WINDOWS, train, load)
            go.touch()
            began = time.time()
            seen = up.windows(WATCHED_WINDOWS[policy], train, load)
            incidents = up.incidents(train, load)
            up.run("cancel", load)
            up.wait_for(train)
            alone += up.windows(BETWEEN_WINDOWS + ALONE_WINDOWS, train)[BETWEEN_WINDOWS:]
            found[name] = _summary(alone, seen, incidents, began)
            print(f"{policy}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _summary(
    alone: list[WindowRates], seen: list[WindowRates], incidents: list[pb.Incident], began: float
) -> dict[str, float]:
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
        off, on = (beside(policy, bound_by, list(loads), stress) for policy in ("none", "coda-eliminator"))
        rows += [row for name in loads for row in rows_of(name, off[name], on[name])]
    return rows


def rows_of(name: str, off: dict[str, float], on: dict[str, float]) -> list[Row]:
    """Return three bars for a harmful load; for a harmless load, return how little it slows the loop.

    Harm is the rate that the loop loses while it has its core, not the CPU time that other processes take.
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
