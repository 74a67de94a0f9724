"""An agent short of descriptors, processes or memory reports itself: no job fails and no disk is blamed."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.jobs import CPUS, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant import file_descriptors
from cotenant.core.model.health import node_signs
from cotenant.node_agent.probes import node_reading, own_limits
from cotenant.node_agent.probes.node_reading import read_node
from cotenant.node_agent.probes.own_limits import OwnLimits
from cotenant.v1 import job_pb2

NOFILE = resource.RLIMIT_NOFILE


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def reported(placement: Placement) -> list[tuple[str, str]]:
    inventory = placement.inventories[-1] if placement.inventories else placement.hellos[-1].inventory
    return [(problem.check, problem.reason) for problem in inventory.problems]


@pytest.mark.deep
async def test_an_agent_at_its_limit_reports_it_stops_jobs_and_recovers(
    placement: Placement, agent_process: AgentProcess
) -> None:
    assert agent_process.process
    pid = agent_process.process.pid
    placement.assign(shell("before", "exec sleep 60", tasks=[task(cpus=CPUS[:1])]))
    await placement.running("before")
    limits = resource.prlimit(pid, NOFILE)
    resource.prlimit(pid, NOFILE, (open_descriptors(pid) + 1, limits[1]))
    try:
        placement.assign(shell("starved", "exit 0", epoch=11))
        await placement.until(lambda: any("out of file descriptors" in why for _, why in reported(placement)))
        assert {check for check, _ in reported(placement)} == {"descriptors"}
        assert placement.end("starved") is None
        placement.send(stops=[stop_order("before", grace_seconds=0)])
        assert (await placement.ended("before")).state == job_pb2.ATTEMPT_STATE_STOPPED
        placement.assign(shell("given-up", "exit 0", epoch=12))
        placement.send(stops=[stop_order("given-up", epoch=12, grace_seconds=0)])
        assert (await placement.ended("given-up")).state == job_pb2.ATTEMPT_STATE_STOPPED
    finally:
        resource.prlimit(pid, NOFILE, limits)
    assert (await placement.ended("starved")).state == job_pb2.ATTEMPT_STATE_SUCCEEDED
    await placement.until(lambda: not reported(placement))


@pytest.mark.parametrize(
    ("number", "rule"),
    [
        (errno.EMFILE, "descriptors_low"),
        (errno.ENFILE, "descriptors_low"),
        (errno.ENOMEM, "memory_refused"),
        (errno.EAGAIN, "processes_low"),
        (errno.ENOSPC, ""),
        (errno.EDQUOT, ""),
        (errno.EROFS, "disk_refuses"),
        (errno.EIO, "disk_refuses"),
    ],
)
def test_a_failed_write_is_blamed_on_the_disk_only_if_it_is_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, rule: str
) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    signs = {sign.rule for sign in node_signs(read_node(tmp_path))}
    assert signs - {"memory_low", "overload", "disk_low"} == ({rule} if rule else set())


def test_a_node_without_process_ids_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_reading, "thread_error", lambda: "no process or thread can be started")
    signs = {sign.rule: sign.detail for sign in node_signs(read_node(tmp_path))}
    assert signs["processes_low"] == "out of process ids: no process or thread can be started"


def test_a_shortage_ends_at_its_own_threshold(tmp_path: Path) -> None:
    def rules(free: int, *standing: str) -> list[str]:
        reading = read_node(tmp_path, file_descriptors.Usage(1024 - free, 1024))
        return [sign.rule for sign in node_signs(reading, standing) if sign.rule == "descriptors_low"]

    assert [rules(31), rules(40), rules(40, "descriptors_low"), rules(64, "descriptors_low")] == [
        ["descriptors_low"], [], ["descriptors_low"], [],
    ]  # fmt: skip


async def test_a_launch_waits_for_resources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    woken: list[bool] = []
    limits = OwnLimits(lambda: woken.append(True))
    why = ["no process or thread can be started"] * 3
    monkeypatch.setattr(own_limits, "thread_error", lambda: why.pop() if why else "")
    monkeypatch.setattr(own_limits, "LOOK_SECONDS", 0.001)
    with capture_logs() as logs:
        assert await limits.wait_for_resources(lambda: False) == ""
    assert (why, woken, [line["event"] for line in logs]) == ([], [True], ["launch_delayed"])
    limits.close()


async def test_a_launch_is_refused_with_the_shortage_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_limits, "thread_error", lambda: "no process or thread can be started")
    monkeypatch.setattr(own_limits, "SHORTAGE_SECONDS_MAX", 0.01)
    limits = OwnLimits()
    assert await limits.wait_for_resources(lambda: False) == "no process or thread can be started"
    assert await limits.wait_for_resources(lambda: True) == ""
    limits.close()


async def test_a_supervisor_has_the_descriptor_limit_of_jobs(
    placement: Placement, new_process: AgentProcess, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    new_process.descriptors_max = 123
    await new_process.start()
    await placement.connected()
    assert new_process.process
    assert resource.prlimit(new_process.process.pid, NOFILE)[0] == resource.getrlimit(NOFILE)[1]
    placement.assign(shell("limited", f"ulimit -Sn > {told}"))
    assert (await placement.ended("limited")).state == job_pb2.ATTEMPT_STATE_SUCCEEDED
    assert told.read_text().strip() == "123"
