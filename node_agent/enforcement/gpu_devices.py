"""Keeps a task's hands off GPUs that it does not hold, where the kernel lets us: by their device files.

CUDA_VISIBLE_DEVICES is advice, which a job can undo. Denied are the files that belong to one GPU: /dev/nvidiaN (major
195 [Linux, devices.txt]) and what the kernel's graphics system shows of it (/dev/dri). What all GPUs share, such as
/dev/nvidiactl, /dev/nvidia-uvm and those of MIG instances, stays as it is, and so does everything that is no GPU of
this node's.

Version 1 has files for it (`devices.deny`), which the kernel never shows again; version 2 has a program
(`device_program`), which it does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from cotenant.node_agent.enforcement.bpf import attach_device_program
from cotenant.node_agent.enforcement.device_program import Device, deny
from cotenant.node_agent.supervisor.cgroups import UNIFIED, Group, GroupError, read_text, write_text
from cotenant.v1 import resources_pb2

NVIDIA_MAJOR = 195
TRIAL = "device-trial"
ADVICE = "GPUs are kept apart by CUDA_VISIBLE_DEVICES alone, which a job can undo"
GpuDevices = Mapping[str, tuple[Device, ...]]


def gpu_devices(
    gpus: Iterable[resources_pb2.Gpu],
    minors: Mapping[str, int],
    *,
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> dict[str, tuple[Device, ...]]:
    """The device files of each GPU by UUID. `minors` is what NVML told, the driver's own word stands in for it.

    Declared GPUs have none, and those that nobody tells of are not named.
    """
    found = {}
    for gpu in gpus:
        domain, _, rest = gpu.pci_bus_id.lower().partition(":")
        address = f"{domain[-4:]}:{rest}"
        minor = minors.get(gpu.uuid, -1)
        if minor < 0 and rest:
            minor = _told_by_driver(proc / "driver/nvidia/gpus" / address / "information")
        if minor >= 0 and not gpu.declared:
            shown = _shown(sysfs / "bus/pci/devices" / address / "drm") if rest else []
            found[gpu.uuid] = (Device(NVIDIA_MAJOR, minor), *shown)
    return found


def _told_by_driver(path: Path) -> int:
    lines = [line.replace(":", " ").split() for line in read_text(str(path)).splitlines()]
    told = [words[2] for words in lines if words[:2] == ["Device", "Minor"] and len(words) == 3]
    return int(told[0]) if told and told[0].isdigit() else -1


def _shown(directory: Path) -> list[Device]:
    numbers = [read_text(str(path)).partition(":") for path in sorted(directory.glob("*/dev"))]
    return [Device(int(major), int(minor)) for major, _, minor in numbers if major.isdigit() and minor.isdigit()]


def denied_to(task: resources_pb2.TaskAllocation, devices: GpuDevices) -> set[Device]:
    """What a task may not open: the files of all GPUs that it does not hold."""
    held = {share.uuid for share in task.gpus}
    own = {device for uuid in held for device in devices.get(uuid, ())}
    return {device for uuid, files in devices.items() if uuid not in held for device in files} - own


def deny_devices(group: Group, devices: Collection[Device]) -> None:
    """Let nothing in a group, which is new, open these devices. Raises `GroupError`."""
    if not devices:
        return
    if group.version == 2:
        attach_device_program(group.directories[UNIFIED], deny(devices))
    elif "devices" in group.enforces:
        for device in sorted(devices):
            path = os.path.join(group.directories["devices"], "devices.deny")
            write_text(path, f"c {device.major}:{device.minor} rwm")
    else:
        raise GroupError("no devices control group can be written")


def why_advisory(node_group: Group | None, gpus: Iterable[resources_pb2.Gpu], devices: GpuDevices) -> str | None:
    """Why GPUs are not kept apart by the kernel, in one sentence; None where they are, or where there are none."""
    real = [gpu.uuid for gpu in gpus if not gpu.declared]
    if not real:
        return None
    if unknown := sorted(set(real) - set(devices)):
        return f"{ADVICE}: the device files of {', '.join(unknown)} are not known"
    if node_group is None:
        return f"{ADVICE}: no control group can be written"
    trial = node_group.child(TRIAL)
    try:
        trial.create()
        deny_devices(trial, {device for files in devices.values() for device in files})
    except GroupError as error:
        return f"{ADVICE}: {error}"
    finally:
        trial.remove(patience_seconds=0.1)
    return None
