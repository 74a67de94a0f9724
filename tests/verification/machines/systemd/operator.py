"""An operator's actions on a machine with systemd, and the views of systemd and the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.support.paths import DEPLOY

T = TypeVar("T")

PATIENCE = float(os.environ.get("COTENANT_PATIENCE", "1"))
WAIT_SECONDS_MAX = 60.0 * PATIENCE
WHEELS = Path("/opt/wheels")
ETC = Path("/etc/cotenant")
NODE = "cotenant-vm"
SCOPE = f"cotenant-{NODE}.scope"
SERVICES = ("queue", "placement", "predictor", "contention")
UNITS = (*(f"cotenant@{service}" for service in SERVICES), "cotenant-agent")
ASKING = ("logs", "show", "nodes", "jobs")
COUNT = "cat /proc/self/cgroup; echo $$; i=0; while :; do i=$((i+1)); echo count $i; sleep 1; done"
TROUBLE = (
    "Traceback (most recent call last)",
    '"level": "error"',
    '"level": "critical"',
    "timed out. Killing",
    "status=203",
)


def run(*words: str, **more: str) -> str:
    """Run a command that must succeed, with additional environment variables, and return its output."""
    done = subprocess.run(
        words, env=os.environ | more, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def install(*parts: str) -> str:
    """Install without a network as docs/deploying.md describes."""
    (wheel,) = WHEELS.glob("cotenant-*.whl")
    offline = {"COTENANT_PACKAGE": str(wheel), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS)}
    return run("sh", str(DEPLOY / "install.sh"), *parts, **offline)


def cotenant(*words: str) -> str:
    """Run an operator's command with root's settings; commands that only query are retried.

    An emulated processor may be too slow for a leader to keep its lease, and calls are then refused temporarily.
    """
    command = ("sh", "-c", 'set -a; . /etc/cotenant/environment; exec cotenant "$@"', "sh", *words)
    return until(lambda: [run(*command)], f"answer to {words[0]}")[0] if words[0] in ASKING else run(*command)


def told(*words: str) -> Any:
    """Run a command with JSON output and return it."""
    return json.loads(cotenant(*words, "--json"))


def shown(unit: str, name: str) -> str:
    """Return a property of a unit."""
    return run("systemctl", "show", "--value", "-p", name, unit).strip()


def until(condition: Callable[[], T], what: str) -> T:
    """Return the first true value of a condition. A command that fails counts as false."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            if value := condition():
                return value
            failed = ""
        except AssertionError as error:
            failed = str(error)
        assert time.monotonic() < deadline, (
            f"within {WAIT_SECONDS_MAX:g} s there was no {what}; {failed}{journal()[-4000:]}"
        )
        time.sleep(0.5)


def counted(job: str) -> int:
    """Return how far a job has counted, from its retained output."""
    return max((int(line.split()[1]) for line in cotenant("logs", job).splitlines() if line[:6] == "count "), default=0)


def counts_on(job: str) -> None:
    """Wait until a job's count has increased, in its first attempt."""
    before = counted(job)
    until(lambda: counted(job) > before, "more counted")
    assert told("show", job)["attempt"]["number"] == 1


def journal(*words: str) -> str:
    """Return the journal of all units."""
    return run("journalctl", "--no-pager", "-o", "short-monotonic", "-u", "cotenant*", *words)


def troubles(*words: str) -> list[str]:
    """Return the errors in the journal."""
    return [line for line in journal(*words).splitlines() if any(word in line for word in TROUBLE)]
