"""The process runtime without an agent: the guarantees of its port."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import alive, until
from tests.unit.node_agent.jobs import CPUS, NODE, shell

from cotenant import plugins
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.process_runtime import ProcessRuntime
from cotenant.node_agent.runtime.runtime_port import RuntimeContext
from cotenant.node_agent.supervisor.process_table import open_process
from cotenant.v1 import resources_pb2


class Opened:
    """A runtime and the statuses it has reported."""

    def __init__(self, state_dir: Path) -> None:
        self.runtime = ProcessRuntime()
        self.told: list[Status] = []
        cores = [resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in CPUS]
        self.context = RuntimeContext(NODE, state_dir, resources_pb2.Inventory(cores=cores), 1 << 20, 10, 1e9)

    def end(self, job_id: str) -> Status | None:
        return next((status for status in self.told if status.ended and status.key.job_id == job_id), None)

    async def ended(self, job_id: str) -> Status:
        status = await until(lambda: self.end(job_id))
        assert status
        return status


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    opened = Opened(tmp_path)
    assert not await opened.runtime.open(opened.context, opened.told.append)
    yield opened
    for status in opened.told:
        opened.runtime.stop(status.key, 0)
        await opened.ended(status.key.job_id)
    await opened.runtime.close()


def test_the_runtime_is_found_by_its_name() -> None:
    assert isinstance(plugins.load("cotenant.runtimes", "process"), ProcessRuntime)


async def test_a_stop_right_after_the_launch_is_carried_out(opened: Opened) -> None:
    for number in range(5):
        await opened.runtime.launch(shell(f"brief-{number}", "sleep 60"))
        opened.runtime.stop(AttemptKey(f"brief-{number}", 1), 5)
        ended = await opened.ended(f"brief-{number}")
        assert (ended.state, ended.message) == ("STOPPED", "")


async def test_a_stop_during_the_launch_is_carried_out(opened: Opened) -> None:
    launching = asyncio.create_task(opened.runtime.launch(shell("brief", "sleep 60")))
    await asyncio.sleep(0)
    opened.runtime.stop(AttemptKey("brief", 1), 5)
    await launching
    assert (await opened.ended("brief")).state == "STOPPED"


async def test_an_end_is_reported_once(opened: Opened) -> None:
    await opened.runtime.launch(shell("job", "exit 2"))
    await opened.ended("job")
    await opened.runtime.forget(AttemptKey("job", 1))  # returns once the supervisor is gone
    assert not alive(opened.told[-1].pid)
    assert [status.state for status in opened.told if status.ended] == ["FAILED"]


async def test_a_launch_that_never_started_is_removed_by_the_next_agent(opened: Opened, tmp_path: Path) -> None:
    directory = AttemptDirectory(tmp_path / "attempts", AttemptKey("stillborn", 1))
    directory.create(shell("stillborn", "true"))
    second = Opened(tmp_path)
    assert not await second.runtime.open(second.context, second.told.append)
    await second.runtime.close()
    assert not directory.path.exists()


async def test_unknown_entries_in_the_state_directory_are_skipped(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "attempts" / "lost+found").mkdir()
    (tmp_path / "attempts" / "file-1").write_text("x")
    broken = AttemptDirectory(tmp_path / "attempts", AttemptKey("broken", 1))
    broken.create(shell("broken", "true"))
    (broken.path / "assignment").write_bytes(b"\xff\xff\xff")
    (broken.path / "state.json").write_text("{")
    second = Opened(tmp_path)
    assert not await second.runtime.open(second.context, second.told.append)
    await second.runtime.close()


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    assert open_process(os.getpid(), 1) is None
    assert open_process(0, 0) is None
