"""The place of the audit log is checked now and then, without losing a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cotenant.security.audit import Audit


async def test_the_place_of_the_log_is_checked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = [0.0], 0
    path = tmp_path / "audit.jsonl"
    audit = Audit(path, "queue", bytes_max=1_000_000, clock=lambda: clock[0])
    for call in ("stat", "fstat"):
        whole = getattr(os, call)

        def counted(*given: Any, whole: Any = whole, **named: Any) -> Any:
            nonlocal looks
            looks += 1
            return whole(*given, **named)

        monkeypatch.setattr(os, call, counted)
    await audit.append({"number": 0})
    first = looks
    for number in range(1, 50):
        await audit.append({"number": number})
    assert looks == first
    clock[0] = 1.0
    await audit.append({"number": 50})
    assert looks > first
    assert len(path.read_text().splitlines()) == 51


async def test_lines_written_before_a_rename_or_removal_is_noticed_are_not_lost(
    tmp_path: Path,
) -> None:
    clock, path = [0.0], tmp_path / "audit.jsonl"
    audit = Audit(path, "queue", clock=lambda: clock[0])

    async def append(*numbers: int) -> None:
        for number in numbers:
            await audit.append({"number": number})

    def numbers(of: Path) -> list[int]:
        return [json.loads(line)["number"] for line in of.read_text().splitlines()]

    await append(1)
    path.rename(tmp_path / "moved")
    await append(2)
    assert not path.exists()
    clock[0] = 1.0
    await append(3)
    assert (numbers(tmp_path / "moved"), numbers(path)) == ([1, 2], [3])
    path.unlink()
    await append(4)
    clock[0] = 2.0
    await append(5)
    assert numbers(path) == [3, 4, 5]
