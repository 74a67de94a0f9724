"""The configuration of a task's container, as OCI runtimes read it: a pure function of the task and its image.

A container isolates a job's files, and nothing else: its processes have the node's network, process ids and IPC, as
without an image. So replicas on one node share memory and GPUs with each other, and the agent sees and signals their
processes as always. The program keeps no capability and cannot gain any.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.node_agent.containers.cdi import NO_EDITS, CdiHook, CdiMount, ContainerEdits, DeviceNode
from cotenant.node_agent.containers.container_runtime import Runtime

OCI_VERSION = "1.0.2"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of images that set none
MASKED = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
    "/proc/timer_list", "/proc/timer_stats", "/sys/firmware",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
HOST_FILES = ("/etc/hosts", "/etc/resolv.conf")  # the network is the node's
SHARED_MEMORY, TEMPORARY = (os.path.join(os.sep, *parts) for parts in (("dev", "shm"), ("tmp",)))  # in a container
PRIVATE = ("nosuid", "noexec", "nodev")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about the program to run: its variables, and a command for jobs that have none."""

    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """An unpacked image on this node.

    `of_user`: it is opened with the rights of the job's user. `digest`: its name in the cache; "" if it is not there.
    """

    root: str
    of_user: bool = False
    config: ImageConfig = ImageConfig()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file of the node that a container sees at `target`."""

    source: str
    target: str
    read_only: bool = False

    def to_oci(self) -> dict[str, Any]:
        """Return the mount as runtimes read it."""
        access = "ro" if self.read_only else "rw"
        options = ["rbind", "nosuid", "nodev", access]
        return {"destination": self.target, "type": "none", "source": self.source, "options": options}


@dataclass(frozen=True, slots=True)
class ContainerPlace:
    """Where a task's container is kept: the directory of its bundle, and that of the runtime's records."""

    bundle: str
    state: str


def container_spec(
    runtime: Runtime,
    place: ContainerPlace,
    image: Image,
    binds: Iterable[Bind],
    task: Mapping[str, Any],
    edits: ContainerEdits = NO_EDITS,
) -> dict[str, object]:
    """Return what the supervisor needs to start a task, of which it has this spec, in a container.

    `edits` are for its devices; their variables are in the task's environment already.
    """
    return {
        "runtime": runtime.command(place.state),
        "name": place.bundle.rpartition("/")[2],
        "bundle": place.bundle,
        "image": image.root,
        "image_of_user": image.of_user,
        "starts_in_folder": task["directory_is_ours"],
        "config": {
            "ociVersion": OCI_VERSION,
            "process": {
                "terminal": False,
                "user": _user(task["user"], edits.groups),
                "cwd": task["directory"],
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": "root"},
            "mounts": [*_system_mounts(), *map(_cdi_mount, edits.mounts), *(bind.to_oci() for bind in binds)],
            "hooks": _hooks(edits.hooks),
            "linux": {
                "namespaces": [{"type": "mount"}],
                "devices": list(map(_device, edits.devices)),
                "maskedPaths": list(MASKED),
                "readonlyPaths": list(READ_ONLY),
            },
        },
    }


def _user(user: Mapping[str, Any] | None, groups: Iterable[int]) -> dict[str, object]:
    if user is None:
        return {"uid": 0, "gid": 0, "additionalGids": list(groups)}
    return {"uid": user["uid"], "gid": user["gid"], "additionalGids": [*user["groups"], *groups]}


def _device(device: DeviceNode) -> dict[str, object]:
    numbers = {"major": device.major, "minor": device.minor, "fileMode": device.mode}
    # "source" is no key of OCI: without root, a device file cannot be made, and that of the node is mounted.
    owner = {"uid": device.uid, "gid": device.gid}
    return {"path": device.path, "source": device.source, "type": device.type, **numbers, **owner}


def _cdi_mount(mount: CdiMount) -> dict[str, object]:
    bound = [] if {"bind", "rbind"} & set(mount.options) or mount.type not in ("", "bind", "none") else ["rbind"]
    kind = mount.type or "none"
    return {"destination": mount.target, "type": kind, "source": mount.source, "options": [*bound, *mount.options]}


def _hooks(hooks: Iterable[CdiHook]) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {}
    for hook in hooks:
        limit = {} if hook.timeout_seconds is None else {"timeout": hook.timeout_seconds}
        entry = {"path": hook.path, "args": list(hook.arguments), "env": list(hook.environment), **limit}
        found.setdefault(hook.name, []).append(entry)
    return found


def variables_of(edits: ContainerEdits) -> dict[str, str]:
    """Return the variables that devices need.

    >>> variables_of(ContainerEdits(("NVIDIA_VISIBLE_DEVICES=void",)))
    {'NVIDIA_VISIBLE_DEVICES': 'void'}
    """
    return {name: value for name, _, value in (word.partition("=") for word in edits.environment)}


def _system_mounts() -> list[dict[str, Any]]:
    def of(kind: str, target: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": kind, "source": kind, "options": list(options)}

    return [
        of("proc", "/proc", *PRIVATE),
        of("tmpfs", "/dev", "nosuid", "noexec", "mode=755", "size=64k"),
        of("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        Bind(SHARED_MEMORY, SHARED_MEMORY).to_oci(),
        of("sysfs", "/sys", *PRIVATE, "ro"),
        of("tmpfs", TEMPORARY, "nosuid", "nodev", "mode=1777"),
    ]


def container_environment(
    base: Mapping[str, str], image: ImageConfig, home: str, names: Sequence[str] = ("LANG", "LC_ALL", "TZ")
) -> dict[str, str]:
    """Return the variables that a job in a container begins with: few of the node's, then the image's.

    The home directory of the job's user is not in the image: HOME is the directory in which the job starts.

    >>> container_environment({"LANG": "C", "SHELL": "/bin/zsh", "USER": "ada"}, ImageConfig({"PATH": "/bin"}), "/w")
    {'PATH': '/bin', 'LANG': 'C', 'USER': 'ada', 'HOME': '/w'}
    """
    kept = {name: base[name] for name in (*names, "USER", "LOGNAME") if name in base}
    return {"PATH": PATH, **kept, "HOME": home, **image.environment}
