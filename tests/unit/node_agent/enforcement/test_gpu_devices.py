"""Device files of GPUs: which tasks may open them, in the program and in the kernel."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node_agent.conditions import need_groups
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.fake_driver import FakeDriver, uuid
from tests.unit.node_agent.jobs import PYTHON, assignment, task
from tests.unit.node_agent.machines import write
from tests.unit.node_agent.placement import Placement

from cotenant.node_agent.enforcement.bpf import attach_device_program
from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts, open_node_group
from cotenant.node_agent.enforcement.device_program import Device, Instruction, deny
from cotenant.node_agent.enforcement.gpu_devices import (
    GpuIsolation,
    advisory_reason,
    denied_devices,
    deny_devices,
    gpu_devices,
)
from cotenant.node_agent.enforcement.hook import NewAttempt
from cotenant.node_agent.runtime.launch import enforce
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.v1 import resources_pb2

ZERO, FULL = Device(1, 5), Device(1, 7)  # /dev/zero and /dev/full: harmless, and nobody in a test needs them
CHARACTER, BLOCK = 2, 1


def run(code: bytes, context: bytes) -> int:
    """Interpret the program's few instructions and return its result."""
    registers = [0] * 11
    place = 0
    for _ in range(len(code)):
        operation, registers_of, offset, value = struct.unpack_from("=BBhi", code, place * 8)
        target, source = registers_of & 15, registers_of >> 4
        place += 1
        if operation == 0x61:
            assert source == 1
            registers[target] = struct.unpack_from("=I", context, offset)[0]
        elif operation == 0x57:
            registers[target] &= value & 0xFFFFFFFFFFFFFFFF
        elif operation == 0xB7:
            registers[target] = value
        elif operation in (0x15, 0x55):
            if (registers[target] == value) is (operation == 0x15):
                place += offset
        elif operation == 0x95:
            return registers[0]
        else:
            raise AssertionError(f"no such operation: {operation:#x}")
    raise AssertionError("it does not end")


DEVICES = st.builds(Device, st.sampled_from([1, 10, 195, 226, 509]), st.integers(0, 9) | st.just((1 << 20) - 1))


@given(st.sets(DEVICES, min_size=1, max_size=30), DEVICES, st.sampled_from([CHARACTER, BLOCK]), st.integers(1, 7))
def test_the_program_denies_only_the_given_devices(denied: set[Device], asked: Device, kind: int, access: int) -> None:
    code = b"".join(each.encode() for each in deny(denied))
    for device in {asked, *denied}:
        answer = run(code, struct.pack("=III", access << 16 | kind, *device))
        assert answer == (0 if kind == CHARACTER and device in denied else 1)


def test_a_task_may_open_only_its_own_gpus() -> None:
    devices = {"GPU-a": (Device(195, 0), Device(226, 128)), "GPU-b": (Device(195, 1),), "GPU-c": (Device(195, 2),)}
    assert denied_devices(task(gpus=["GPU-b"]), devices) == {Device(195, 0), Device(226, 128), Device(195, 2)}
    assert denied_devices(task(), devices) == {device for files in devices.values() for device in files}
    assert denied_devices(task(gpus=["GPU-a", "GPU-b", "GPU-c"]), devices) == set()


def gpu(uuid: str, bus: str = "", *, declared: bool = False) -> resources_pb2.Gpu:
    return resources_pb2.Gpu(uuid=uuid, pci_bus_id=bus, declared=declared)


def test_device_files_come_from_nvml_the_driver_and_the_kernel(tmp_path: Path) -> None:
    told = "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-b\nDevice Minor: \t 3\nGPU Excluded:\t No"
    write(tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0/information", told)
    write(tmp_path / "sys/bus/pci/devices/0000:3b:00.0/drm/renderD129/dev", "226:129")
    write(tmp_path / "sys/bus/pci/devices/0000:3b:00.0/drm/card1/dev", "226:1")
    gpus = [gpu("GPU-a", "00000000:10:00.0"), gpu("GPU-b", "00000000:3B:00.0"), gpu("GPU-c"), gpu("F", declared=True)]
    found = gpu_devices(gpus, {"GPU-a": 7, "F": 1}, sysfs=tmp_path / "sys", proc=tmp_path / "proc")
    assert found == {
        "GPU-a": (Device(195, 7),),
        "GPU-b": (Device(195, 3), Device(226, 1), Device(226, 129)),
    }


def test_advisory_gpu_isolation_is_reported() -> None:
    fake, real = gpu("F", declared=True), gpu("GPU-a")
    devices = {"GPU-a": (ZERO,)}
    assert advisory_reason(None, [fake], {}) is None
    assert "GPU-a are unknown" in str(advisory_reason(None, [real], {}))
    assert "no writable control group" in str(advisory_reason(None, [real], devices))


def test_a_missing_devices_controller_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    node = Group(1, {"memory": str(tmp_path / "node")}, ("memory",))
    assert str(advisory_reason(node, [gpu("GPU-a")], {"GPU-a": (ZERO,)})).endswith("no writable devices control group")
    assert not (tmp_path / "node/device-trial").exists()


def opens(group: Group, path: Path) -> bool:
    """Return whether a process in the group may open a file."""
    procs = " ".join(f"{directory}/cgroup.procs" for directory in group.paths())
    script = f"for file in {procs}; do echo $$ > $file || exit 9; done; exec 3< {path}"
    status = subprocess.run(["/bin/sh", "-c", script], check=False, capture_output=True).returncode
    assert status != 9
    return status == 0


@pytest.fixture
def files(tmp_path: Path) -> dict[Device, Path]:
    """Device files of our own that can be opened here."""
    if os.getuid() != 0:
        pytest.skip("needs root to make device files")
    made = {}
    for device in (ZERO, FULL):
        made[device] = tmp_path / f"{device.major}-{device.minor}"
        try:
            os.mknod(made[device], stat.S_IFCHR | 0o666, os.makedev(*device))
            made[device].open("rb").close()
        except OSError as error:
            pytest.skip(f"needs device files: {error}")
    return made


@pytest.fixture
def unified(request: pytest.FixtureRequest) -> Iterator[Group]:
    """A group of version 2, with or without controllers."""
    mount = next((mount for mount in find_mounts() if mount.version == 2), None)
    if os.getuid() != 0 or mount is None:
        pytest.skip("needs root and a mounted hierarchy of version 2")
    group = Group(2, {"unified": f"{mount.root}/test-{request.node.name[-40:]}-{os.getpid()}"}, ())
    try:
        group.create()
    except GroupError as error:
        pytest.skip(f"needs a writable hierarchy of version 2: {error}")
    yield group
    assert group.remove()


@pytest.mark.root
def test_version_2_denies_with_a_program(unified: Group, files: dict[Device, Path]) -> None:
    assert all(opens(unified, path) for path in files.values())
    try:
        deny_devices(unified, {ZERO})
    except GroupError as error:
        if "not permitted" in str(error) or "not implemented" in str(error):
            pytest.skip(f"needs the right to load programs: {error}")
        raise
    assert {device: opens(unified, path) for device, path in files.items()} == {ZERO: False, FULL: True}
    inner = unified.child("inner")
    inner.create()
    deny_devices(inner, {FULL})
    assert not any(opens(inner, path) for path in files.values())


@pytest.mark.root
def test_a_program_that_the_kernel_rejects_is_an_error_with_its_reason(unified: Group) -> None:
    with pytest.raises(GroupError, match="cannot attach a device program"):
        attach_device_program(unified.paths()[0], [Instruction(0x95)])  # an answer that was never written
    with pytest.raises(GroupError, match="No such file"):
        attach_device_program(f"{unified.paths()[0]}/absent", deny([ZERO]))


@pytest.mark.root
def test_tasks_of_one_attempt_open_only_their_own_gpus(tmp_path: Path, files: dict[Device, Path]) -> None:
    need_groups()
    node = open_node_group(f"test-devices-{os.getpid()}")
    assert node is not None
    devices = {"GPU-a": (ZERO,), "GPU-b": (FULL,)}
    attempt = node.child("attempt")
    try:
        if why := advisory_reason(node, [gpu("GPU-a"), gpu("GPU-b")], devices):
            pytest.skip(why)
        job = assignment("job", ["true"], tasks=[task(0, gpus=["GPU-a"]), task(1, gpus=["GPU-b"]), task(2)])
        attempt.create()
        enforce([GpuIsolation(devices)], NewAttempt("attempt", tmp_path, attempt, job), ExitStack())
        seen = [[opens(attempt.child(f"task-{rank}"), files[device]) for device in (ZERO, FULL)] for rank in range(3)]
        assert seen == [[True, False], [False, True], [False, False]]
    finally:
        attempt.remove()
        assert node.remove()


@pytest.mark.root
async def test_a_job_cannot_open_another_jobs_gpu_by_changing_its_environment(
    driver: FakeDriver, placement: Placement, agent: RunningAgent, tmp_path: Path, files: dict[Device, Path]
) -> None:
    need_groups()
    nodes = [tmp_path / f"nvidia{minor}" for minor in range(3)]
    for minor, node in enumerate(nodes):
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, minor))
    await agent.stop()
    await agent.start(gpus="auto")
    await placement.connected(2)
    inventory = placement.hellos[-1].inventory
    assert not any("not known" in text for text in inventory.not_enforced)
    if advisory := [text for text in inventory.not_enforced if "CUDA_VISIBLE_DEVICES" in text]:
        pytest.skip(advisory[0])
    show = (
        "import errno, os\nfor path in %r:\n    try: os.open(path, 0)\n    except OSError as error: print(error.errno)"
    )
    program = show % [str(node) for node in nodes]
    placement.assign(assignment("one", [*PYTHON, program], tasks=[task(gpus=[uuid(1)])]))
    placement.assign(assignment("none", [*PYTHON, program]))
    seen = {}
    for job_id in ("one", "none"):
        await placement.ended(job_id)
        seen[job_id] = (agent.config.state_dir / "attempts" / f"{job_id}-1" / "output-0.log").read_text().split()
    denied, absent = str(errno.EPERM), str(errno.ENXIO)  # which the kernel says where there is no driver
    assert seen == {"one": [denied, absent, denied], "none": [denied] * 3}
