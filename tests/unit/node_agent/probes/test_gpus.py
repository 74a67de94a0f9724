"""The real pynvml with a stand-in for the driver's library, in the agent's NVML process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.fake_driver import FakeDriver, uuid
from tests.unit.node_agent.machines import two_sockets, write

from cotenant.node_agent.probes.gpus import BadGpus, declared_gpus, nvml_gpus
from cotenant.node_agent.probes.nvml_link import Event, NvmlLink, NvmlNotFound, NvmlUnresponsive


async def shown(sysfs: Path, monkeypatch: pytest.MonkeyPatch, trouble: str = "") -> tuple[list[Any], list[str]]:
    monkeypatch.setenv("FAKE_NVML", trouble)
    link = NvmlLink(sysfs)
    try:
        return nvml_gpus(await link.gpus(), shareable=True), link.troubles
    finally:
        await link.close()


async def test_gpus_are_listed_in_bus_order_with_their_numa_nodes(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, _ = await shown(two_sockets(tmp_path), monkeypatch)
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    first = gpus[0]
    assert (first.uuid, first.model, first.memory_bytes) == (uuid(0), "V100-SXM2-32GB", 80 << 30)
    assert (first.pci_bus_id, first.shareable, first.declared) == ("00000000:10:00.0", True, False)
    assert gpus[7].model == "A100-SXM4-80GB"


async def test_the_kernels_numa_node_has_priority(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = two_sockets(tmp_path)
    write(root / "bus/pci/devices/0000:10:00.0/numa_node", "1")
    write(root / "bus/pci/devices/0000:20:00.0/numa_node", "-1")
    gpus, _ = await shown(root, monkeypatch)
    assert [gpu.numa_node for gpu in gpus] == [1, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("links", "islands"),
    [("", [1, 1, 1, 1, 2, 2, 2, 2]), ("bridge", [1, 1, 0, 0, 0, 0, 0, 1]), ("lost", [1, 1, 1, 1, 2, 2, 2])],
)
async def test_gpus_with_nvlink_between_them_are_an_island(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str, islands: list[int]
) -> None:
    gpus, _ = await shown(two_sockets(tmp_path), monkeypatch, links)
    assert [gpu.island for gpu in gpus] == islands


async def test_a_lost_gpu_does_not_affect_the_others(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, troubles = await shown(two_sockets(tmp_path), monkeypatch, "lost")
    assert len(gpus) == 7
    assert troubles == ["GPU 2 is not used: NVML failed: GPU is lost"]


async def test_a_missing_driver_is_not_an_error(tmp_path: Path) -> None:
    link = NvmlLink(two_sockets(tmp_path))
    with pytest.raises(NvmlNotFound):
        await link.gpus()
    await link.close()


async def test_a_driver_that_does_not_start_is_retried(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML", "init")
    link = NvmlLink(two_sockets(tmp_path), retry_seconds_first=0.01)
    with pytest.raises(NvmlUnresponsive, match="Driver Not Loaded"):
        await link.gpus()
    monkeypatch.delenv("FAKE_NVML")
    await until(lambda: asyncio.get_running_loop().time() >= link._not_before)
    assert len(await link.gpus()) == 8
    await link.close()


async def test_readings_match_the_driver(driver: FakeDriver, tmp_path: Path) -> None:
    driver.say("process 1 77 1024", "process 1 78 2048", "slow 2 8", "slow 3 32")
    driver.say(*driver.lines, "rows 4 1 0", "recovery 5 2", "lost 6")
    link = NvmlLink(two_sockets(tmp_path))
    there = {uuid(gpu) for gpu in range(8)} - {uuid(6)}
    told = {each["uuid"]: each for each in (await link.gpus() and await link.readings())}
    assert told.keys() == there
    assert told[uuid(1)]["processes"] == [[77, 1024], [78, 2048]]
    assert (told[uuid(0)]["temperature_celsius"], told[uuid(0)]["utilisation_percent"]) == (40, 10)
    assert (told[uuid(2)]["hardware_slowdown"], told[uuid(3)]["thermal_slowdown"]) == (True, True)
    assert (told[uuid(4)]["remap_pending"], told[uuid(4)]["remap_failed"]) == (True, False)
    assert (told[uuid(5)]["recovery"], told[uuid(0)]["recovery"]) == ("reboot", "")
    assert link.minors[uuid(3)] == 3
    driver.say("lost 5")
    lost = {each["uuid"] for each in await link.readings() if each.get("lost")}
    assert lost == {uuid(5)}
    await link.close()


async def test_each_event_is_reported_once_for_the_right_gpu(driver: FakeDriver, tmp_path: Path) -> None:
    driver.xid(1, 13)  # before anybody listened
    events: list[Event] = []
    link = NvmlLink(two_sockets(tmp_path))
    link.events.subscribe(events.append)
    await link.gpus()
    await link.readings()
    driver.xid(3, 79)
    driver.xid(3, 94)
    driver.double_bit(5)
    await until(lambda: len(events) >= 3)
    assert events == [Event(uuid(3), 79), Event(uuid(3), 94), Event(uuid(5), None)]
    await link.close()


async def test_a_hanging_call_only_kills_its_process(driver: FakeDriver, tmp_path: Path) -> None:
    link = NvmlLink(two_sockets(tmp_path), ask_seconds_max=0.2, retry_seconds_first=0.01)
    await link.gpus()
    first = link._process
    driver.say("hang")
    with pytest.raises(NvmlUnresponsive, match="no answer within"):
        await link.readings()
    assert first is not None
    await until(lambda: first.returncode == -9)
    driver.say()
    await until(lambda: asyncio.get_running_loop().time() >= link._not_before)
    link.ask_seconds_max = 5.0
    assert len(await link.readings()) == 8
    assert link._process is not first
    await link.close()


@pytest.mark.parametrize("word", ["fake", "fake:", "fake:-1", "fake:99999", "gpu:2", ""])
def test_invalid_gpu_declarations_are_refused(word: str) -> None:
    with pytest.raises(BadGpus, match="auto"):
        declared_gpus("n", word, [0], shareable=False)
