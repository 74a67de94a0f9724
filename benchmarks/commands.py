"""What the client's commands cost: the processor time to start, and whole calls of a mesh on this machine.

    python -m benchmarks.commands [--quick] [--json]

The least of several runs, because whatever disturbs a run only adds to it; the reference is an empty Python program,
and, where Slurm is installed and runs, `sbatch`.
The commands run in this environment: what they do not import costs nothing, however much is installed.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import harness

RUNS, RUNS_QUICK = 20, 5
UNREACHABLE = "127.0.0.1:1"  # nothing listens there: all of `submit` but the answer
IMPORT_MS_MAX, HELP_MS_MAX = 50.0, 200.0
FACADE_MS_MAX = 100.0  # of a command of Slurm's that talks to Cotenant
SUBMIT_MS_MAX, SUBMIT_WALL_MS_MAX, FULL_MS_MAX = 60.0, 180.0, 150.0
NO_SERVER = 3  # the exit status of a command that reaches none
START_SECONDS_MAX = 60.0


def least_ms(words: Sequence[str], runs: int, status: int = 0, env: Mapping[str, str] | None = None) -> list[float]:
    """Return the least processor time and the least wall time of a command over some runs, in milliseconds."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "COTENANT_STATE_DIR": f"{home}/state", **(env or {})}

        def once() -> tuple[float, float]:
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, check=False)
            passed, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == status, done.stderr
            return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime), 1e3 * passed

        once()  # compiles the modules
        return [min(values) for values in zip(*(once() for _ in range(runs)), strict=True)]


@contextmanager
def running_mesh(cotenant: str) -> Iterator[Mapping[str, str]]:
    """A mesh on this machine; yields the environment of its clients."""
    with tempfile.TemporaryDirectory() as state:
        environment = {"COTENANT_STATE_DIR": state}
        words = [cotenant, "up", "--gpus", "fake:8"]
        mesh = subprocess.Popen(
            words, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            ready = [cotenant, "health"]
            until = time.monotonic() + START_SECONDS_MAX
            while subprocess.run(ready, env={**os.environ, **environment}, capture_output=True, check=False).returncode:
                assert mesh.poll() is None, "the mesh has ended"
                assert time.monotonic() < until, "the mesh has not started"
            yield environment
        finally:
            mesh.send_signal(signal.SIGINT)
            mesh.wait(START_SECONDS_MAX)


def slurm_costs(cotenant: str, runs: int, env: Mapping[str, str]) -> Iterator[tuple[Sequence[str], float]]:
    """Yield the least processor time of Slurm's commands that `cotenant slurm` installs, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cotenant, "slurm", "install", folder], capture_output=True, check=True)
        for words in (["sbatch", "-o", "/dev/null", "--wrap", "true"], ["squeue"], ["sacct"]):
            yield words, least_ms([f"{folder}/{words[0]}", *words[1:]], runs, env=env)[0]


def measure(quick: bool) -> list[harness.Row]:
    """Measure an import, `--help`, and submissions and a list with and without a server."""
    runs, cotenant = RUNS_QUICK if quick else RUNS, str(Path(sys.executable).with_name("cotenant"))
    empty, empty_wall = least_ms([sys.executable, "-c", "pass"], runs)

    def row(name: str, value: float, most: float | None = None, reference: float = empty) -> harness.Row:
        bar, holds = ("", None) if most is None else (f"≤ {most:g} ms", value <= most)
        return harness.Row(name, value, "ms", reference, "an empty Python program", bar, holds)

    unreachable = [cotenant, "submit", "--endpoint", UNREACHABLE, "--", "true"]
    rows = [
        row("import cotenant", least_ms([sys.executable, "-c", "import cotenant"], runs)[0], IMPORT_MS_MAX),
        row("cotenant --help", least_ms([cotenant, "--help"], runs)[0], HELP_MS_MAX),
        row("cotenant submit, without a server", least_ms(unreachable, runs, NO_SERVER)[0]),
    ]
    with running_mesh(cotenant) as env:
        submit, wall = least_ms([cotenant, "submit", "--", "true"], runs, env=env)
        full, _ = least_ms([cotenant, "submit", "--deadline", "2h", "--", "true"], runs, env=env)
        rows += [
            row("cotenant submit", submit, SUBMIT_MS_MAX),
            row("cotenant submit, wall time", wall, SUBMIT_WALL_MS_MAX, empty_wall),
            row("cotenant submit, with options that are not plain", full, FULL_MS_MAX),
            row("cotenant jobs", least_ms([cotenant, "jobs"], runs, env=env)[0]),
        ]
        rows += [row(f"Slurm's {words[0]}", cost, FACADE_MS_MAX) for words, cost in slurm_costs(cotenant, runs, env)]
    if shutil.which("sbatch") and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0:
        sbatch, _ = least_ms(["sbatch", "--wrap", "true"], runs)
        rows.append(harness.Row("cotenant submit beside sbatch", submit, "ms", sbatch, "sbatch --wrap true"))
    return rows


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
