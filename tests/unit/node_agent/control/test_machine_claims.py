"""Agents of one user on one machine detect each other; other users cannot block them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node_agent.jobs import CPUS
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.control import machine_claims
from cotenant.node_agent.control.agent import Agent, AgentConfig
from cotenant.node_agent.control.machine_claims import Claim, MachineClaimConflict, acquire_claim, claims_directory
from cotenant.node_agent.control.state_directory import AgentAlreadyRunning
from cotenant.node_agent.supervisor.lease import boot_id

HERE = Claim("a", "/state/a", 100, (0, 1), 4 << 30, 8 << 30)


def test_a_second_agent_with_the_same_node_id_is_refused(tmp_path: Path) -> None:
    held = acquire_claim(tmp_path, HERE)
    with pytest.raises(AgentAlreadyRunning, match=r"already runs node 'a' \(process 100, state in /state/a\)"):
        acquire_claim(tmp_path, replace(HERE, state_dir="/state/other", cpus=(2, 3)))
    os.close(held)
    os.close(acquire_claim(tmp_path, HERE))


def test_an_agent_that_offers_held_cpus_is_refused_with_a_hint(tmp_path: Path) -> None:
    held = acquire_claim(tmp_path, HERE)
    with pytest.raises(
        MachineClaimConflict, match=r"would offer 1 CPU that node 'a' already offers .*--cpus.*--share-machine"
    ):
        acquire_claim(tmp_path, replace(HERE, node_id="b", cpus=(1, 2)))
    os.close(held)


def test_memory_cannot_be_offered_twice(tmp_path: Path) -> None:
    held = [acquire_claim(tmp_path, HERE), acquire_claim(tmp_path, replace(HERE, node_id="b", cpus=(2,)))]
    with pytest.raises(MachineClaimConflict, match=r"with node 'a', 'b' it would offer 12.0 GiB of memory, of 8.0 GiB"):
        acquire_claim(tmp_path, replace(HERE, node_id="c", cpus=(3,)))
    for descriptor in held:
        os.close(descriptor)


def test_the_claim_of_a_killed_agent_is_free(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        acquire_claim(tmp_path, HERE)
        os.write(writer, b"x")
        os._exit(0)
    os.read(reader, 1)
    os.waitpid(pid, 0)
    os.close(acquire_claim(tmp_path, replace(HERE, node_id="b")))
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_damaged_claims_are_ignored(tmp_path: Path) -> None:
    held = acquire_claim(tmp_path, HERE)
    (path,) = tmp_path.glob("*.json")
    path.write_text('{"node_id": 7}')
    os.close(acquire_claim(tmp_path, replace(HERE, node_id="b")))
    os.close(held)


@given(
    st.lists(
        st.builds(
            replace, st.just(HERE), node_id=st.sampled_from("abcd"),
            cpus=st.sets(st.integers(0, 7), max_size=3).map(tuple), memory_bytes=st.integers(0, 8 << 30),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_held_claims_never_overlap(wanted: list[Claim]) -> None:
    held: list[Claim] = []
    for claim in wanted:
        if not claim.conflict(held):
            held.append(claim)
    cpus = [cpu for claim in held for cpu in claim.cpus]
    assert len(cpus) == len(set(cpus))
    assert len({claim.node_id for claim in held}) == len(held)
    assert len(held) < 2 or sum(claim.memory_bytes for claim in held) <= HERE.machine_memory_bytes


def test_a_directory_writable_by_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    squatted = tmp_path / "run"
    (squatted / "cotenant").mkdir(parents=True)  # of somebody else than 4321
    environment = {"XDG_RUNTIME_DIR": str(squatted), "XDG_CACHE_HOME": str(tmp_path / "absent")}
    assert claims_directory(environment, "boot") is None


def test_each_boot_and_each_user_has_claims_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_claims, "_is_our_own", lambda path, uid: path.stat().st_mode & 0o077 == 0)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "cotenant").mkdir(mode=0o700)
    first, second = claims_directory(environment, "boot-1"), claims_directory(environment, "boot-2")
    assert first
    assert second
    assert first != second
    assert first.parent == tmp_path / "cotenant"


async def test_a_second_agent_starts_only_if_sharing_is_allowed(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would offer all cores as free although the other agent's jobs hold some."""
    monkeypatch.setattr(machine_claims, "claims_directory", lambda environment, boot: tmp_path)
    config = AgentConfig("claimed", tmp_path / "one", placement.endpoint, gpus="fake:0", share_machine=False)
    stop = asyncio.Event()
    first = asyncio.create_task(Agent(config).run(stop))
    hello = await placement.connected()
    assert hello.inventory.machine == boot_id()
    with pytest.raises(AgentAlreadyRunning, match="already runs node 'claimed'"):
        await Agent(replace(config, state_dir=tmp_path / "two")).run(asyncio.Event())
    with pytest.raises(AgentAlreadyRunning, match=f"would offer {len(CPUS)} CPUs that node 'claimed' already offers"):
        await Agent(replace(config, node_id="other", state_dir=tmp_path / "two")).run(asyncio.Event())
    sharing = replace(config, node_id="other", state_dir=tmp_path / "two", share_machine=True)
    second = asyncio.create_task(Agent(sharing).run(stop))
    assert (await placement.connected(2)).inventory.machine == ""
    stop.set()
    await asyncio.gather(first, second)


async def test_agents_of_a_divided_machine_do_not_conflict(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    monkeypatch.setattr(machine_claims, "claims_directory", lambda environment, boot: tmp_path)
    stop = asyncio.Event()
    configs = [
        AgentConfig(f"part-{number}", tmp_path / str(number), placement.endpoint, gpus="fake:0", cpus=(cpu,),
                    share_machine=False, machine_parts=2)
        for number, cpu in enumerate(CPUS[:2])
    ]  # fmt: skip
    tasks = [asyncio.create_task(Agent(config).run(stop)) for config in configs]
    await placement.connected(2)
    assert len({hello.inventory.memory_bytes for hello in placement.hellos}) == 1
    stop.set()
    await asyncio.gather(*tasks)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_entries_that_are_not_files_are_ignored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "planted.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    held = acquire_claim(tmp_path, HERE)
    with pytest.raises(MachineClaimConflict):
        acquire_claim(tmp_path, replace(HERE, node_id="b"))
    os.close(held)


def test_an_unreadable_held_claim_is_not_truncated(tmp_path: Path) -> None:
    held = acquire_claim(tmp_path, HERE)
    (path,) = tmp_path.glob("*.json")
    path.write_text('{"node_id": 7}')
    with pytest.raises(BlockingIOError):
        acquire_claim(tmp_path, HERE)
    assert path.read_text() == '{"node_id": 7}'
    assert [number for number in descriptors() if leads_to(number, tmp_path)] == [held]
    os.close(held)


def descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def leads_to(descriptor: int, directory: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # other threads close theirs
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(directory)
    return False
