"""Compiles the tests before they are run: `python -m tests.support.compile`.

Pytest rewrites each assertion when it first imports a file. In a fresh checkout all processes of a run would do that
for all files at the same time; here each file is compiled once, in as many processes as there are cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.scheduler import cores

SUFFIX = f".{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
FILES_MIN = 50  # fewer are compiled by the run itself


def uncompiled(root: Path) -> list[Path]:
    """Return the test files that have no compiled form, or an older one."""
    return [file for file in sorted(root.rglob("test_*.py")) if not _is_compiled(file)]


def _is_compiled(file: Path) -> bool:
    compiled = file.parent / "__pycache__" / (file.stem + SUFFIX)
    return compiled.exists() and compiled.stat().st_mtime >= file.stat().st_mtime


def main() -> int:
    """Compile what is not compiled yet; errors are left for the run to report."""
    files = [str(file.relative_to(ROOT)) for file in uncompiled(ROOT / "tests")]
    if sys.dont_write_bytecode or len(files) < FILES_MIN:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen([*command, *files[number :: cores()]], cwd=ROOT, stdout=subprocess.DEVNULL)
        for number in range(cores())
    ]
    for process in running:
        process.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
