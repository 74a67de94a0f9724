"""A stand-in for NVIDIA's driver that a test controls while the agent runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

XID, DOUBLE_BIT = 8, 2
LIBRARY = "libnvidia-ml.so.1"


def compiled(directory: Path) -> Path:
    """The folder in which the stand-in library lies: as `make test-vm` brought it along, or made here."""
    if (brought := Path(__file__).with_name(LIBRARY)).exists():
        return brought.parent
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(directory / LIBRARY), str(source)], check=True)
    return directory


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-00000000000{gpu}"


class FakeDriver:
    """The stand-in's scripted state; see fake_nvml.c."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events: list[str] = []
        self.lines: list[str] = []
        self._write()

    def say(self, *lines: str) -> None:
        """Replace the scripted state."""
        self.lines = list(lines)
        self._write()

    def xid(self, gpu: int, number: int) -> None:
        self._events.append(f"event {gpu} {XID} {number}")
        self._write()

    def double_bit(self, gpu: int) -> None:
        self._events.append(f"event {gpu} {DOUBLE_BIT} 0")
        self._write()

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in [*self._events, *self.lines]))
        new.rename(self.path)
