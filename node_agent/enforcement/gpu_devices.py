"""Shows tasks the GPUs that they hold, and denies them the device files of the others, if the kernel supports it.

CUDA_VISIBLE_DEVICES is advice, which a job can undo. Denied are the files that belong to one GPU: /dev/nvidiaN (major
195 [Linux, devices.txt]) and its DRM devices (/dev/dri). Files that all GPUs share, such as /dev/nvidiactl,
/dev/nvidia-uvm and those of MIG instances, stay accessible, as does everything that is not one of this node's GPUs.

Version 1 has a file for it (`devices.deny`), whose content the kernel never shows; version 2 has a program
(`device_program`), which can be queried.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from cotenant.core.model.lifecycle import LaunchCause
from cotenant.node_agent.enforcement.bpf import attach_device_program
from cotenant.node_agent.enforcement.device_program import Device, deny
from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, NewAttempt
from cotenant.node_agent.supervisor.cgroups import UNIFIED, Group, GroupError, read_text, write_text
from cotenant.v1 import resources_pb2

NVIDIA_MAJOR = 195
TRIAL = "device-trial"
ADVISORY = "GPUs are isolated only by CUDA_VISIBLE_DEVICES, which a job can undo"
GpuDevices = Mapping[str, tuple[Device, ...]]


def gpu_devices(
    gpus: Iterable[resources_pb2.Gpu],
    minors: Mapping[str, int],
    *,
    sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> dict[str, tuple[Device, ...]]:
    """Return the device files of each GPU by UUID. `minors` are from NVML; otherwise the driver's /proc file is used.

    Declared GPUs have none, and GPUs with an unknown minor are left out.
    """
    found = {}
    for gpu in gpus:
        domain, _, rest = gpu.pci_bus_id.lower().partition(":")
        address = f"{domain[-4:]}:{rest}"
        minor = minors.get(gpu.uuid, -1)
        if minor < 0 and rest:
            minor = _minor_from_driver(proc / "driver/nvidia/gpus" / address / "information")
        if minor >= 0 and not gpu.declared:
            shown = _drm_devices(sysfs / "bus/pci/devices" / address / "drm") if rest else []
            found[gpu.uuid] = (Device(NVIDIA_MAJOR, minor), *shown)
    return found


def _minor_from_driver(path: Path) -> int:
    lines = [line.replace(":", " ").split() for line in read_text(str(path)).splitlines()]
    minors = [words[2] for words in lines if words[:2] == ["Device", "Minor"] and len(words) == 3]
    return int(minors[0]) if minors and minors[0].isdigit() else -1


def _drm_devices(directory: Path) -> list[Device]:
    numbers = [read_text(str(path)).partition(":") for path in sorted(directory.glob("*/dev"))]
    return [Device(int(major), int(minor)) for major, _, minor in numbers if major.isdigit() and minor.isdigit()]


def denied_devices(task: resources_pb2.TaskAllocation, devices: GpuDevices) -> set[Device]:
    """Return the devices that a task may not open: those of all GPUs that it does not hold."""
    held = {share.uuid for share in task.gpus}
    own = {device for uuid in held for device in devices.get(uuid, ())}
    return {device for uuid, files in devices.items() if uuid not in held for device in files} - own


def deny_devices(group: Group, devices: Collection[Device]) -> None:
    """Deny these devices to a new group. Raises `GroupError`."""
    if not devices:
        return
    if group.version == 2:
        attach_device_program(group.directories[UNIFIED], deny(devices))
    elif "devices" in group.enforces:
        for device in sorted(devices):
            path = os.path.join(group.directories["devices"], "devices.deny")
            write_text(path, f"c {device.major}:{device.minor} rwm")
    else:
        raise GroupError("no writable devices control group")


def advisory_reason(node_group: Group | None, gpus: Iterable[resources_pb2.Gpu], devices: GpuDevices) -> str | None:
    """Return why the kernel does not isolate GPUs, in one sentence; None if it does or there are no GPUs."""
    real = [gpu.uuid for gpu in gpus if not gpu.declared]
    if not real:
        return None
    if unknown := sorted(set(real) - set(devices)):
        return f"{ADVISORY}: the device files of {', '.join(unknown)} are unknown"
    if node_group is None:
        return f"{ADVISORY}: no writable control group"
    trial = node_group.child(TRIAL)
    try:
        trial.create()
        deny_devices(trial, {device for files in devices.values() for device in files})
    except GroupError as error:
        return f"{ADVISORY}: {error}"
    finally:
        trial.remove(timeout_seconds=0.1)
    return None


class GpuIsolation(EnforcementHook):
    """Shows each task its GPUs, and denies it the device files of the others."""

    launch_cause = LaunchCause.DEVICE

    def __init__(self, devices: GpuDevices | None = None) -> None:
        self._devices = devices or {}

    def open(self, node: EnforcedNode) -> list[str]:
        """Find the device files of the node's GPUs; return why they are not isolated, if so."""
        gpus = node.inventory.gpus
        devices = gpu_devices(gpus, node.gpu_minors)
        advisory = advisory_reason(node.group, gpus, devices)
        self._devices = {} if advisory else devices
        return [advisory] if advisory else []

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Deny a task the GPUs of others."""
        deny_devices(group, denied_devices(task, self._devices))

    def environment(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> dict[str, str]:
        """Name the task's GPUs."""
        gpus = ",".join(share.uuid for share in task.gpus)
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": gpus,  # empty hides all GPUs
            "NVIDIA_VISIBLE_DEVICES": gpus or "void",  # for container runtimes; void means none
        }
