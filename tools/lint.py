"""Static checks: `make lint` runs all of them in parallel and prints one line for each.

The checks are independent, so the total takes as long as the slowest check. A failed check also prints its output.

`make test` gives a command, which is run if the quick checks pass, while the slow ones go on; they are told at its end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # make runs this file, not a module

from tools import protos  # noqa: E402 - the root of the checkout has to be on the path first

BIN = Path(sys.executable).parent
GIT = ("git", "-c", "safe.directory=*")  # the clone may belong to another user


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check."""

    name: str
    passed: bool
    output: str
    seconds: float
    note: str = ""


Check = Callable[[], Verdict]


def command(name: str, *arguments: str) -> Check:
    """Return a check that passes if a command exits with 0."""

    def check() -> Verdict:
        start = time.perf_counter()
        done = run(*arguments)
        return Verdict(name, done.returncode == 0, done.stdout, time.perf_counter() - start)

    return check


def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a tool of this virtual environment in the root of the repository."""
    return subprocess.run(
        [str(BIN / tool), *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def proto_style() -> Verdict:
    """Lint the protos."""
    start = time.perf_counter()
    with protos.workspace() as folder:
        done = protos.lint(folder)
    return Verdict("buf lint", done.returncode == 0, done.stdout, time.perf_counter() - start)


def breaking_changes() -> Verdict:
    """Check the protos for breaking changes since the last release."""
    name, start = "buf breaking", time.perf_counter()
    against = baseline()
    if against is None:
        return Verdict(name, True, "", time.perf_counter() - start, "skipped: no release to compare with")
    with protos_at(against) as released, protos.workspace(released) as before, protos.workspace() as now:
        done = protos.breaking(now, before)
    return Verdict(name, done.returncode == 0, done.stdout, time.perf_counter() - start, f"against {against}")


def baseline() -> str | None:
    """Return the tag of the last release, whose protos clients rely on; None if the clone has none."""
    return git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*") or None


@contextmanager
def protos_at(commit: str) -> Iterator[Path]:
    """Unpack the protos of a commit: buf can read git itself, but not every shallow clone."""
    archive = subprocess.run(
        [*GIT, "archive", "--format=zip", commit, "protos", "buf.yaml"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(BytesIO(archive)) as unpacked:
        unpacked.extractall(directory)
        yield Path(directory)


def git(*arguments: str) -> str:
    """Return the output of a git command, or "" if it fails, as outside of a repository."""
    done = subprocess.run([*GIT, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def site() -> Verdict:
    """Build the documentation site; syntax errors and broken links fail the check."""
    with tempfile.TemporaryDirectory() as directory:
        quiet = ("-q", "-W", "--keep-going", "-b", "dirhtml", "-d", f"{directory}/doctrees")
        return command("docs site", "sphinx-build", *quiet, "docs", f"{directory}/site")()


QUICK: tuple[Check, ...] = (
    command("ruff check", "ruff", "check", "--quiet", "."),
    command("ruff format", "ruff", "format", "--check", "."),
    command("import-linter", "lint-imports", "--no-logo"),
    proto_style,
    command("buf format", "buf", "format", "--diff", "--exit-code"),
    breaking_changes,
)
SLOW: tuple[Check, ...] = (command("mypy", "mypy", "--no-error-summary"), site)


def main() -> int:
    """Run all checks, and a command beside the slow ones if there is one; return the exit status."""
    beside = sys.argv[1:]
    with ThreadPoolExecutor(len(QUICK + SLOW)) as pool:
        slow = [pool.submit(check) for check in SLOW]
        quick = [pool.submit(check) for check in QUICK]
        if not beside:
            return 0 if told([*quick, *slow]) else 1
        if not told(quick):
            told(slow)
            return 1
        print("   … mypy and the docs site go on, and are told after the tests", flush=True)
        status = subprocess.run(beside, check=False).returncode
        print("\n── lint, the rest", flush=True)
        return 0 if told(slow) and status == 0 else status or 1


def told(checks: Iterable[Future[Verdict]]) -> bool:
    """Print a line for each check as it ends, then what those that failed said; return whether none did."""
    verdicts = [show(done.result()) for done in as_completed(checks)]
    failed = [verdict for verdict in verdicts if not verdict.passed]
    for verdict in failed:
        print(f"\n── {verdict.name}\n{verdict.output.strip()}")
    return not failed


def show(verdict: Verdict) -> Verdict:
    """Print the line of a check."""
    mark = "✓" if verdict.passed else "✗"
    print(f"   {mark} {verdict.name:<14}{verdict.seconds:6.1f} s  {verdict.note}".rstrip(), flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
