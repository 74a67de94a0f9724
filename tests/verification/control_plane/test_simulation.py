"""The control plane under seeded faults: it violates no invariant, and broken builds are detected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.paths import ROOT
from tests.verification.control_plane.mutants import MUTANTS

from cotenant.fail_points import POINTS
from cotenant.history.checker import Rule

pytestmark = pytest.mark.timeout(300)  # of CPU time it takes about ten on a busy machine

SEEDS, MUTANT_SEEDS = 12, 150


def run_seeds(*words: str) -> subprocess.CompletedProcess[str]:
    """Run seeds in a separate process with a fixed hash seed."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "tests.verification.control_plane", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_no_rule_is_violated_and_each_seed_repeats_its_history() -> None:
    done = run_seeds("--seeds", str(SEEDS), "--digests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds" in done.stdout
    played = [point for point in POINTS if point.startswith(("election.", "queue.", "array.", "placement."))]
    missed = [point for point in played if f" {point} " not in done.stdout]
    assert missed == []
    (digest,) = (line for line in done.stdout.splitlines() if line.startswith(f"seed {SEEDS - 1}:"))
    again = run_seeds("--first", str(SEEDS - 1), "--seeds", "1", "--digests")
    assert digest in again.stdout.splitlines()


@pytest.mark.deep
def test_broken_builds_are_detected() -> None:
    done = run_seeds("--mutants", "--seeds", str(MUTANT_SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    for name, mutant in MUTANTS.items():
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name}: detected"))
        assert f"({mutant.rule})" in line


def test_the_page_lists_every_rule_fail_point_and_broken_build() -> None:
    page = (ROOT / "docs" / "proof.md").read_text()
    for word in (*Rule, *(f"`{point}` | {what}" for point, what in POINTS.items())):
        assert f"| {word} |" in page
    for name, mutant in MUTANTS.items():
        assert f"| {name} | {mutant.rule} |" in page
