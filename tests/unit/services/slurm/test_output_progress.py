"""The progress of Slurm's jobs from the ends of their output files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.services.slurm.pictures import NOW, picture

from cotenant.services.slurm.commands import SlurmCommands
from cotenant.services.slurm.output_progress import (
    DEFAULT,
    LOOK_BACK_BYTES,
    OutputProgress,
    Progress,
    ProgressPatterns,
    Track,
    last_lines,
)
from cotenant.services.slurm.records import SlurmJob

USUAL = ProgressPatterns([DEFAULT])
JOB = SlurmJob("7", 7, "RUNNING", user_id=os.getuid(), started_seconds=NOW - 100)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("step 50/200", 0.25),
        ("[INFO] Step: 50 of 200, loss=0.3", 0.25),
        ("iteration 5/10\nEvaluating", 0.5),
        (" 25%|██▌       | 25/100 [00:05<00:15,  5.00it/s]", 0.25),
        ("\r 1%| | 1/100 [00:01<?, ?it/s]\r 75%|███ | 75/100 [00:05<00:15, 1.2s/it]", 0.75),
        ("Epoch 3/4", 0.75),
        ("Epoch [2/4], Step [50/100], Loss: 0.1", 0.375),
        ("2026/11/28 12:00:01 saved 3/4 files", None),
        ("stepwise 3/4", None),
        ("", None),
    ],
)
def test_usual_forms_are_found(text: str, share: float | None) -> None:
    found = USUAL.find(text)
    assert (found.share if found else None) == share


def test_a_pattern_of_the_operator_goes_first() -> None:
    patterns = ProgressPatterns([r"batch=(\d+) of=(?P<total>\d+)", DEFAULT])
    assert patterns.find("batch=3 of=12 step 1/2") == Progress(3, 12, 0.25)
    assert patterns.find("step 1/2") == Progress(1, 2, 0.5)
    assert ProgressPatterns([r"n=(\d+)"]).find("step 1/2") is None


def test_the_rest_follows_from_the_rate() -> None:
    track = Track()
    track.add(100.0, Progress(10, 100, 0.1))
    first = track.estimate(100.0, ran_seconds=50.0)
    assert first is not None
    assert first.remaining_seconds == pytest.approx(450.0)
    track.add(120.0, Progress(30, 100, 0.3))
    track.add(120.5, Progress(30, 100, 0.3))
    later = track.estimate(130.0, ran_seconds=80.0)
    assert later is not None
    assert later.remaining_seconds == pytest.approx(60.0)
    assert track.steps_per_second() == pytest.approx(1.0)


def test_steps_that_begin_anew_foretell_nothing() -> None:
    track = Track()
    for number, step in enumerate((10, 90, 5, 50)):
        track.add(number * 10.0, Progress(step, 100, step / 100))
    assert track.estimate(40.0, 100.0) is None
    assert track.steps_per_second() == pytest.approx(4.5)


def test_only_the_end_of_a_regular_file_of_the_user_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"x" * 10 * LOOK_BACK_BYTES + b"\nstep 1/2\n")
    text = last_lines(str(path), os.getuid())
    assert len(text) == LOOK_BACK_BYTES
    assert USUAL.find(text) == Progress(1, 2, 0.5)
    assert last_lines(str(path), os.getuid() + 1) == ""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(path)
    for name in ("fifo", "link", "absent", "."):
        assert last_lines(str(tmp_path / name), os.getuid()) == ""
    assert last_lines("out", os.getuid()) == ""
    assert last_lines("/a\0b", os.getuid()) == ""


class Paths(SlurmCommands):
    """Knows where the output of job 7 is."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.calls = path, 0

    async def job(self, job_id: str) -> Mapping[str, str]:
        """Return the path."""
        self.calls += 1
        return {"StdOut": str(self.path)}


async def test_running_jobs_are_read_and_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("step 25/100\n")
    slurm = Paths(path)
    progress = OutputProgress(USUAL, slurm)
    shown = picture([], JOB, replace(JOB, id="8", state="PENDING"))
    while progress.track(JOB) is None:
        await progress.renew(shown)
        await asyncio.sleep(0)
    assert slurm.calls == 1
    found = progress.estimates(shown, NOW)["7"]
    assert found.source == "progress"
    assert progress.estimates(picture([], replace(JOB, restarts=1)), NOW) == {}
    await progress.renew(picture([]))
    assert progress.track(JOB) is None
    progress.close()


async def test_a_file_system_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate = threading.Event()
    monkeypatch.setattr("cotenant.services.slurm.output_progress.last_lines", lambda path, user: gate.wait(60) and "")
    progress = OutputProgress(USUAL, Paths(tmp_path))
    async with asyncio.timeout(5):
        for _ in range(3):
            await progress.renew(picture([], JOB))
    assert progress.track(JOB) is None
    progress.close()
    gate.set()
