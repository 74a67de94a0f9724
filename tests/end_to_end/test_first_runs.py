"""The remaining time of a real job in its first run, and of jobs of which nothing is known."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.codec.specs import seconds
from cotenant.core.model.lifecycle import Phase

PROGRAM = """
import time
from cotenant import progress
due = time.monotonic()
while True:
    due += 0.05
    time.sleep(max(0.0, due - time.monotonic()))
    progress.step()
"""
ALONE = ("--gpus", "1", "--cpus", "1")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    config = tmp_path / "config.toml"
    config.write_text('predictor = "history"\ngpus = "fake:1"\nwindow_seconds = 1.0\n')
    mesh = Mesh(tmp_path, "--config", str(config))
    mesh.start()
    yield mesh
    mesh.close()


def test_a_job_that_reports_steps_has_a_remaining_time_in_its_first_run(mesh: Mesh) -> None:
    job_id = mesh.cli.submit(*ALONE, "--steps", "200000", "--", sys.executable, "-c", PROGRAM)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    waits = mesh.cli.submit(*ALONE, "--", "true")
    until(lambda: mesh.client.explain(job_id).estimate.source.startswith("progress: "), "its own rate counts")
    estimate = mesh.client.explain(job_id).estimate
    low, middle, high = map(seconds, (estimate.remaining_p10, estimate.remaining, estimate.remaining_p90))
    assert 0 < low < middle < high
    assert middle == pytest.approx(10_000, rel=0.5)
    out = mesh.cli("explain", job_id).out
    assert re.search(r"^remaining +\S+ \(\S+ to \S+\), confidence \d+ %$", out, re.MULTILINE)
    assert mesh.cli.json("explain", waits)["forecast"]["start_seconds"] == pytest.approx(middle, rel=0.5)


@pytest.mark.deep
def test_nothing_is_invented_of_a_job_of_which_nothing_is_known(mesh: Mesh) -> None:
    job_id = mesh.cli.submit(*ALONE, "--", "sleep", "1000")
    mesh.client.wait_for(job_id, Phase.RUNNING)
    waits = mesh.cli.submit(*ALONE, "--", "true")
    until(lambda: mesh.cli.json("explain", waits)["forecast"], "there is a forecast")
    told = mesh.cli.json("explain", waits)
    assert told["forecast"]["of_unknown"]
    assert [told["forecast"][f"{name}_seconds"] for name in ("start", "start_p10", "start_p90", "finish")] == [None] * 4
    assert told["outlook"].startswith("start time unknown: it depends on jobs of unknown length, once")
    assert mesh.cli.json("explain", job_id)["estimate"]["remaining_seconds"] is None
    out = mesh.cli("explain", job_id).out
    assert re.search(r"^remaining +unknown$", out, re.MULTILINE)
    assert "no similar job has succeeded yet" in out
