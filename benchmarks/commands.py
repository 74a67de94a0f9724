"""The processor time that the client's commands need to start: what a user waits for at each of them.

    python -m benchmarks.commands [--quick] [--json]

The least of several runs, because whatever disturbs a run only adds to it; the reference is an empty Python program.
The commands run in this environment: what they do not import costs nothing, however much is installed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness

RUNS, RUNS_QUICK = 20, 5
UNREACHABLE = "127.0.0.1:1"  # nothing listens there: all of `submit` but the answer
IMPORT_MS_MAX, HELP_MS_MAX = 50.0, 200.0
NO_SERVER = 3  # the exit status of a command that reaches none


def processor_ms(words: Sequence[str], runs: int, status: int = 0) -> float:
    """Return the least processor time of a command over some runs, in milliseconds."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "COTENANT_STATE_DIR": f"{home}/state"}

        def once() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == status, done.stderr
            return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)

        once()  # compiles the modules
        return min(once() for _ in range(runs))


def measure(quick: bool) -> list[harness.Row]:
    """Measure an import, `--help` and a submission that finds no server."""
    runs, cotenant = RUNS_QUICK if quick else RUNS, str(Path(sys.executable).with_name("cotenant"))
    empty = processor_ms([sys.executable, "-c", "pass"], runs)
    imported = processor_ms([sys.executable, "-c", "import cotenant"], runs)
    helped = processor_ms([cotenant, "--help"], runs)
    submitted = processor_ms([cotenant, "submit", "--endpoint", UNREACHABLE, "--", "true"], runs, NO_SERVER)

    def row(name: str, value: float, most: float | None = None) -> harness.Row:
        bar, holds = ("", None) if most is None else (f"≤ {most:g} ms", value <= most)
        return harness.Row(name, value, "ms", empty, "an empty Python program", bar, holds)

    return [
        row("import cotenant", imported, IMPORT_MS_MAX),
        row("cotenant --help", helped, HELP_MS_MAX),
        row("cotenant submit, without a server", submitted),
    ]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
