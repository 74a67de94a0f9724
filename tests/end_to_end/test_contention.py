"""A CPU job that slows down a training job is detected, throttled, reported, and released when it is harmless."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

pytestmark = pytest.mark.calm

# A step takes 20 ms, and twice as long while the other job lives up to its file: what they share here is that file. A
# process that was kept waiting catches up, so that a busy machine makes no difference.
TRAIN = """
import os, sys, time
from cotenant import progress
due = time.monotonic()
while True:
    try: hurt = time.time() - os.stat(sys.argv[1]).st_mtime < 0.05
    except OSError: hurt = False
    due += 0.04 if hurt else 0.02
    time.sleep(max(0.0, due - time.monotonic()))
    progress.step()
"""
# It burns its core and touches the file while it is told to, and sleeps else.
HOG = """
import os, sys, time
file, told = sys.argv[1:]
while True:
    if os.path.exists(told):
        open(file, 'w').close()
        until = time.monotonic() + 0.01
        while time.monotonic() < until: pass
    else:
        time.sleep(0.02)
"""
WINDOW_SECONDS = 0.5


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    config = tmp_path / "config.toml"
    config.write_text(
        f'gpus = "fake:1"\nsample_seconds = {WINDOW_SECONDS}\ncontention = "coda-eliminator"\n'
        "[options.contention]\ncalm_seconds = 1\n"
    )
    mesh = Mesh(tmp_path, "--config", str(config))
    mesh.start()
    yield mesh
    mesh.close()


def test_the_victim_recovers_and_the_suspect_is_released_afterwards(mesh: Mesh, tmp_path: Path) -> None:
    file, reported = tmp_path / "shared", tmp_path / "go"
    python = ["--", sys.executable, "-c"]
    train = mesh.cli.submit("--gpus", "1", "--cpus", "1", "--kind", "training", *python, TRAIN, file)
    hog = mesh.cli.submit("--gpus", "0", "--cpus", "1", "--kind", "cpu", *python, HOG, file, reported)
    for job_id in (train, hog):
        mesh.client.wait_for(job_id, Phase.RUNNING)

    def rate() -> float:
        jobs = {job["id"]: job for job in mesh.cli.json("top", "--once")["jobs"]}
        return float(jobs[train]["rate_per_second"] or 0)

    def incidents(*flags: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = mesh.cli.json("incidents", "--job", hog, *flags)
        return found

    def held_back() -> str:
        return (mesh.cli.json("show", hog)["progress"] or {}).get("throttle") or ""

    def steps() -> int:
        return mesh.client.job(train).progress.step

    until(lambda: steps() > 50 * 11, "enough windows for a baseline")
    baseline = rate()
    assert not incidents()

    reported.touch()
    (noticed,) = until(lambda: incidents("--open"), "an incident")
    assert (noticed["victim"], noticed["suspect"]) == (train, hog)
    assert 0.1 < noticed["slowdown"] < 0.7
    until(lambda: held_back().startswith("suspended"), "throttle shown on the suspect")
    # After a calm second it may run for a while, as a trial whether it still interferes.
    until(lambda: "throttled on" in mesh.cli("jobs").out, "throttle in the list of jobs")
    until(lambda: "throttled by its node: suspended" in mesh.cli("explain", hog).out, "throttle in its explanation")
    until(lambda: rate() > 0.9 * baseline, "recovery")

    reported.unlink()
    until(lambda: not incidents("--open"), "end of the incident")
    first = incidents()[-1]
    assert "it is free again" in first["outcome"]
    until(lambda: not held_back(), "end of the throttle")
    assert mesh.client.job(hog).attempt.number == mesh.client.job(train).attempt.number == 1
