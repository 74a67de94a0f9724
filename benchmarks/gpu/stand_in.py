"""A stand-in for NVIDIA's driver library in a rehearsal: the one of the agent's tests, with eight GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.machine import Machine

STATE, LIBRARY_PATH = "FAKE_NVML_STATE", "LD_LIBRARY_PATH"
HELD_BYTES = 1 << 29


def install(directory: Path) -> None:
    """Build the library, and let all processes that are started from now on find it."""
    from tests.unit.node_agent.fake_driver import FakeDriver, compiled  # imports pytest

    driver = FakeDriver(directory / "state")
    os.environ[LIBRARY_PATH] = str(compiled(directory))
    os.environ[STATE] = str(driver.path)


@contextmanager
def foreign_process(machine: Machine, pid: int) -> Iterator[None]:
    """Let the stand-in list a process on its first GPU; a real driver lists the processes of its GPUs by itself."""
    if not machine.rehearsal:
        yield
        return
    from tests.unit.node_agent.fake_driver import FakeDriver

    driver = FakeDriver(Path(os.environ[STATE]))
    driver.say(f"process 0 {pid} {HELD_BYTES}")
    try:
        yield
    finally:
        driver.say()
