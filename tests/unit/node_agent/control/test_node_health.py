"""An agent with a driver that the test controls: what it reports, refuses and remembers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.unit.node_agent.conftest import RunningAgent, end_jobs
from tests.unit.node_agent.fake_driver import FakeDriver, uuid
from tests.unit.node_agent.jobs import NODE, assignment, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control import agent, node_health
from cotenant.node_agent.control.agent import AgentConfig
from cotenant.node_agent.probes import node_reading, nvml_link
from cotenant.rpc.events import Event
from cotenant.v1 import resources_pb2

HOLD, QUARANTINE = resources_pb2.HEALTH_ACTION_HOLD, resources_pb2.HEALTH_ACTION_QUARANTINE


@pytest.fixture
async def node(
    placement: Placement, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningAgent]:
    """An agent with eight GPUs that looks often and has little patience; not started yet."""
    patient = partial(
        node_health.NodeHealth, gpu_release_seconds=0.5, knows_pids=True
    )  # NVML's pids are those that a test says
    monkeypatch.setattr(agent, "NodeHealth", patient)
    running = RunningAgent(
        AgentConfig(
            node_id=NODE,
            state_dir=tmp_path / "state",
            placement_endpoint=placement.endpoint,
            health_interval_seconds=0.05,
        )
    )
    yield running
    await running.stop()
    await end_jobs(running.config.state_dir)


def newest(placement: Placement) -> resources_pb2.Inventory:
    inventory = placement.inventories[-1] if placement.inventories else placement.hellos[-1].inventory
    assert isinstance(inventory, resources_pb2.Inventory)
    return inventory


def ill(placement: Placement) -> dict[str, str]:
    return {gpu.uuid: gpu.unhealthy_reason for gpu in newest(placement).gpus if gpu.unhealthy_reason}


async def test_an_xid_quarantines_its_gpu_until_it_is_released(
    node: RunningAgent, placement: Placement, driver: FakeDriver
) -> None:
    await node.start()
    hello = await placement.connected()
    assert len(hello.inventory.gpus) == 8
    assert not hello.inventory.problems
    driver.xid(3, 31)
    driver.xid(2, 79)
    await placement.until(lambda: ill(placement) and len(newest(placement).problems) == 2)
    assert ill(placement) == {uuid(2): "XID 79: the GPU has fallen off the bus"}
    problem = next(one for one in newest(placement).problems if one.gpu_uuid == uuid(2))
    assert (problem.check, problem.action) == ("xid", QUARANTINE)
    assert "reboot" in problem.remedy
    placement.send(released_gpus=[uuid(2)])
    await placement.until(lambda: not ill(placement))


async def test_an_end_reports_the_signs_seen_on_its_gpus(
    node: RunningAgent, placement: Placement, driver: FakeDriver
) -> None:
    await node.start()
    await placement.connected()
    for name, gpu in (("hit", 2), ("beside", 1)):
        placement.assign(assignment(name, ["sleep", "1000"], tasks=[task(gpus=[uuid(gpu)])], grace_seconds=0))
        await placement.running(name)
    driver.xid(2, 31)  # the program's own, which its output tells better
    driver.xid(2, 79)
    await placement.until(lambda: ill(placement))
    placement.assign(assignment("after", ["false"], tasks=[task(gpus=[uuid(2)])]))
    placement.send(stops=[stop_order(name, grace_seconds=0) for name in ("hit", "beside")])
    assert [list((await placement.ended(name)).signs) for name in ("hit", "beside", "after")] == [
        [f"xid 79 on {uuid(2)}"],
        [],
        [],
    ]


async def test_quarantine_survives_a_restart_and_ends_with_a_reboot(
    node: RunningAgent, placement: Placement, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.start()
    await placement.connected()
    driver.xid(2, 48)
    await placement.until(lambda: ill(placement))
    await node.stop()
    await node.start()
    hello = await placement.connected(2)
    assert [gpu.uuid for gpu in hello.inventory.gpus if gpu.unhealthy_reason] == [uuid(2)]
    await node.stop()
    era = node_reading.read_era
    monkeypatch.setattr(node_health, "read_era", lambda sysfs: type(era(sysfs))("another boot", ""))
    await node.start()
    hello = await placement.connected(3)
    assert not [gpu.uuid for gpu in hello.inventory.gpus if gpu.unhealthy_reason]


async def test_a_lost_gpu_stays_known_and_gets_no_work(
    node: RunningAgent, placement: Placement, driver: FakeDriver
) -> None:
    await node.start()
    await placement.connected()
    driver.say("lost 5")
    await placement.until(lambda: uuid(5) in ill(placement))
    await node.stop()
    await node.start()  # NVML cannot even open it now
    hello = await placement.connected(2)
    await placement.until(lambda: uuid(5) in ill(placement))
    assert len(hello.inventory.gpus) == 8
    driver.say()
    placement.send(released_gpus=[uuid(5)])
    await placement.until(lambda: not ill(placement))


async def test_while_nvml_hangs_all_gpus_are_held_and_none_recovers(
    node: RunningAgent, placement: Placement, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_link, "RETRY_SECONDS_MAX", 0.05)
    monkeypatch.setattr(agent, "NvmlLink", partial(nvml_link.NvmlLink, ask_seconds_max=1.0, retry_seconds_first=0.05))
    await node.start()
    await placement.connected()
    driver.xid(2, 95)
    await placement.until(lambda: ill(placement))
    driver.say("hang")
    await placement.until(lambda: len(ill(placement)) == 8)
    assert "no answer within" in ill(placement)[uuid(0)]
    assert {problem.action for problem in newest(placement).problems if problem.check == "nvml"} == {HOLD}
    driver.say()
    await placement.until(lambda: len(ill(placement)) == 1)
    assert set(ill(placement)) == {uuid(2)}


async def test_an_agent_that_starts_while_nvml_hangs_holds_its_known_gpus(
    node: RunningAgent, placement: Placement, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.start()
    await placement.connected()
    await node.stop()
    monkeypatch.setattr(node_health, "FIRST_CHECK_SECONDS_MAX", 0.3)
    monkeypatch.setattr(agent, "NvmlLink", partial(nvml_link.NvmlLink, start_seconds_max=2.0, retry_seconds_first=0.05))
    driver.say("hang_init")
    await node.start()
    hello = await placement.connected(2)
    assert len([gpu for gpu in hello.inventory.gpus if gpu.unhealthy_reason]) == 8
    driver.say()
    await placement.until(lambda: placement.inventories and len(newest(placement).gpus) == 8 and not ill(placement))


async def test_a_gpu_with_a_foreign_process_is_not_allocated_until_it_exits(
    node: RunningAgent, placement: Placement, driver: FakeDriver
) -> None:
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    try:
        await node.start()
        await placement.connected()
        driver.say(f"process 1 {stranger.pid} 4194304")
        placement.assign(assignment("taken", ["true"], tasks=[task(gpus=[uuid(1)])]))
        end = await placement.ended("taken")
        assert end.message.startswith(f"gpu_busy: {uuid(1)} is held by pid {stranger.pid} (python")
        assert "with 4 MiB, not started by us" in end.message
        await placement.until(lambda: set(ill(placement)) == {uuid(1)})
        placement.assign(assignment("free", ["true"], tasks=[task(gpus=[uuid(0)])]))
        assert (await placement.ended("free")).message == ""
    finally:
        stranger.kill()
        await stranger.wait()
    driver.say()
    await placement.until(lambda: not ill(placement))


async def test_a_process_that_an_attempt_leaves_on_its_gpu_holds_the_gpu(
    node: RunningAgent, placement: Placement, driver: FakeDriver
) -> None:
    await node.start()
    await placement.connected()
    placement.assign(assignment("leaky", ["sleep", "1000"], tasks=[task(gpus=[uuid(4)])]))
    await placement.running("leaky")
    [process] = [int(name) for name in os.listdir("/proc") if name.isdigit() and _belongs_to(int(name), "leaky")]
    driver.say(f"process 4 {process} 1024")  # and NVML still says so when it is gone
    await asyncio.sleep(0)
    assert not ill(placement)
    os.kill(process, signal.SIGTERM)
    await placement.ended("leaky")
    assert set(ill(placement)) == {uuid(4)}
    assert "which is gone" in ill(placement)[uuid(4)]
    driver.say()
    await placement.until(lambda: not ill(placement))


def _belongs_to(pid: int, job_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"COTENANT_JOB_ID={job_id}".encode() in environment
    except OSError:
        return False


async def test_the_agent_itself_never_loads_nvml(node: RunningAgent, placement: Placement, driver: FakeDriver) -> None:
    await node.start()
    await placement.connected()
    assert "pynvml" not in sys.modules
    assert "libnvidia-ml" not in await asyncio.to_thread(Path("/proc/self/maps").read_text)


class Told:
    """NVML's answers without NVML: these GPUs and no others."""

    troubles: tuple[str, ...] = ()

    def __init__(self, *uuids: str) -> None:
        self.minors = {uuid: number for number, uuid in enumerate(uuids)}
        self.events: Event[[nvml_link.Event]] = Event()

    async def gpus(self) -> list[dict[str, object]]:
        return [
            {"uuid": uuid, "model": "A100", "memory_bytes": 1, "numa_node": 0, "island": 0, "pci_bus_id": ""}
            for uuid in self.minors
        ]

    async def readings(self) -> list[dict[str, object]]:
        return [{"uuid": uuid} for uuid in self.minors]


async def test_a_lost_gpu_that_is_released_before_the_first_check_is_removed(tmp_path: Path) -> None:
    async def looked_after(*uuids: str, released: str = "") -> dict[str, bool]:
        inventory = resources_pb2.Inventory()
        watched = node_health.NodeHealth(
            inventory, tmp_path, link=Told(*uuids), attempts={}, report=lambda inventory: None,  # type: ignore[arg-type]  # all it asks
            interval_seconds=1.0, sysfs=tmp_path,
        )  # fmt: skip
        await watched.open()
        if released:
            watched.release([released])
        await watched.check()
        return {gpu.uuid: not gpu.unhealthy_reason for gpu in inventory.gpus}

    assert await looked_after("one", "two") == {"one": True, "two": True}
    assert await looked_after("one") == {"one": True, "two": False}
    assert await looked_after("one", released="two") == {"one": True}
