"""A watcher receives the end of every job that other clients know, unless the job is no longer listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.verification.chaos import end_watcher
from tests.verification.chaos.call_log import ANSWERS, CallLog
from tests.verification.chaos.end_watcher import REPORTED_SECONDS_MAX, EndWatcher

from cotenant.v1 import job_pb2


def ended(job_id: str) -> job_pb2.Job:
    return job_pb2.Job(id=job_id, phase=job_pb2.JOB_PHASE_SUCCEEDED)


def test_an_end_is_awaited_until_it_is_received_or_the_job_removed(tmp_path: Path) -> None:
    watcher = EndWatcher(CallLog(tmp_path, "a"), None)
    watcher.observe(job_pb2.Job(id="runs", phase=job_pb2.JOB_PHASE_RUNNING))
    watcher.observe(ended("before"))
    watcher.expect(["before", "runs", "later", "forgotten"])
    assert set(watcher.awaited) == {"runs", "later", "forgotten"}
    watcher.observe(ended("later"))
    watcher.poll({"runs", "before", "later"}, quiescing=True)
    assert set(watcher.awaited) == {"runs"}


def test_an_end_that_is_not_received_at_rest_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(end_watcher, "clock", lambda: now[0])
    watcher = EndWatcher(CallLog(tmp_path, "a"), None)
    watcher.expect(["a"])
    now[0] = 3 * REPORTED_SECONDS_MAX
    watcher.poll({"a"}, quiescing=False)  # a disconnected watcher receives nothing
    watcher.poll({"a"}, quiescing=True)
    assert watcher.awaited
    now[0] += REPORTED_SECONDS_MAX + 1
    watcher.poll({"a"}, quiescing=True)
    assert not watcher.awaited
    assert json.loads((tmp_path / ANSWERS).read_text())["wrong"] == "no end of a on the watch"
