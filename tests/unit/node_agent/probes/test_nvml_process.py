"""The process that calls NVML: the order in which it answers and listens."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cotenant.node_agent.probes import nvml_process


class FakeNvml:
    """Records what is called, and fails to list GPUs at first."""

    def __init__(self, calls: list[str]) -> None:
        self._calls, self._failures = calls, ["the driver is starting"]

    def gpus(self) -> dict[str, Any]:
        self._calls.append("gpus")
        if self._failures:
            raise RuntimeError(self._failures.pop())
        return {"gpus": []}

    def watch(self) -> None:
        self._calls.append("watch")


def test_events_are_listened_for_once_before_the_gpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Wire(nvml_process.LineWriter):
        def send(self, message: dict[str, Any]) -> None:
            calls.append(message.get("failed", "answer"))

    asked = "".join(json.dumps({"id": number, "ask": "gpus"}) + "\n" for number in range(3))
    monkeypatch.setattr(nvml_process, "_open", lambda sysfs, wire: (FakeNvml(calls), {}))
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    nvml_process.serve(Path("/sys"), Wire())
    assert calls == ["gpus", "the driver is starting", "gpus", "watch", "answer", "gpus", "answer"]
