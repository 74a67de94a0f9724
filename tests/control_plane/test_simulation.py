"""The control plane under seeded faults: nothing that must always hold is broken, and what is broken is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS, MUTANT_SEEDS = 8, 40


def play(*words: str) -> subprocess.CompletedProcess[str]:
    """Play seeds in a process of their own, where the order of sets is fixed."""
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "tests.control_plane", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_nothing_is_broken_whatever_befalls_it() -> None:
    done = play("--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds" in done.stdout


def test_a_seed_is_replayed_event_by_event() -> None:
    first, second = (play("--seed", "17").stdout for _ in range(2))
    assert len(first.splitlines()) > 100
    assert first == second


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no comparison of terms and epochs in agents", "an agent obeys nothing older than it has seen"),
        ("no idempotency in the queue", "a request makes one job at most"),
        ("no fence in the queue", "nothing is written under an old term"),
        ("no fence in placement", "nothing is written under an old term"),
    ],
)
def test_a_build_that_is_broken_on_purpose_is_caught(name: str, rule: str) -> None:
    done = play("--mutant", name, "--seeds", str(MUTANT_SEEDS))
    assert done.returncode == 1, done.stdout + done.stderr
    assert rule in done.stdout
    assert "python -m tests.control_plane --seed" in done.stdout
