"""Who watches hears of every end that others were told of, except of what is in no list any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.verification.chaos import watching
from tests.verification.chaos.asking import ANSWERS, Asking
from tests.verification.chaos.watching import HEARD_SECONDS_MAX, Watching

from cotenant.v1 import job_pb2


def ended(job_id: str) -> job_pb2.Job:
    return job_pb2.Job(id=job_id, phase=job_pb2.JOB_PHASE_SUCCEEDED)


def test_an_end_is_waited_for_until_it_is_heard_of_or_forgotten(tmp_path: Path) -> None:
    watcher = Watching(Asking(tmp_path, "a"), None)
    watcher.hear(job_pb2.Job(id="runs", phase=job_pb2.JOB_PHASE_RUNNING))
    watcher.hear(ended("before"))
    watcher.expect(["before", "runs", "later", "forgotten"])
    assert set(watcher.awaited) == {"runs", "later", "forgotten"}
    watcher.hear(ended("later"))
    watcher.look({"runs", "before", "later"}, hushed=True)
    assert set(watcher.awaited) == {"runs"}


def test_an_end_that_is_not_heard_of_at_rest_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watching, "clock", lambda: now[0])
    watcher = Watching(Asking(tmp_path, "a"), None)
    watcher.expect(["a"])
    now[0] = 3 * HEARD_SECONDS_MAX
    watcher.look({"a"}, hushed=False)  # who is cut off hears nothing
    watcher.look({"a"}, hushed=True)
    assert watcher.awaited
    now[0] += HEARD_SECONDS_MAX + 1
    watcher.look({"a"}, hushed=True)
    assert not watcher.awaited
    assert json.loads((tmp_path / ANSWERS).read_text())["wrong"] == "nothing of the end of a, who watched"
