"""Gives containers exactly the GPUs that their task holds, by the node's CDI specs.

A GPU's device is the one of its UUID, or else the only one whose device nodes include the GPU's own /dev/nvidiaN and no
other GPU's: `nvidia-ctk` numbers devices in an order that is not the driver's minors. Specs are read at each launch, as
tools write them again when the driver changes. They may name programs that run as root, so only root may have written
them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from cotenant.node_agent.containers.cdi import NO_EDITS, BadCdiSpec, CdiMount, CdiSpec, ContainerEdits, read_spec
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

DIRECTORIES = (Path("/var/run/cdi"), Path("/etc/cdi"))  # specs of the first hide those of the second
SUFFIXES = (".json", ".yaml", ".yml")
SPEC_BYTES_MAX = 4 << 20
CLASS = "/gpu"  # end of the kinds of GPUs
NODE_TYPES = {stat.S_IFCHR: "c", stat.S_IFBLK: "b", stat.S_IFIFO: "p"}
NODE_PREFIX = "/dev/nvidia"
HOW = "write one with `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"


class NoDevice(Exception):
    """A container cannot have a GPU on this node, for this reason."""


class ContainerGpus:
    """The GPUs of a node as its containers get them. `minors` returns the N of each GPU's /dev/nvidiaN by UUID."""

    def __init__(
        self,
        inventory: resources_pb2.Inventory,
        minors: Callable[[], Mapping[str, int]] = dict,
        directories: Sequence[Path] = DIRECTORIES,
        owner_uid: int = 0,
    ) -> None:
        self._inventory, self._minors = inventory, minors
        self._directories, self._owner_uid = directories, owner_uid

    def edits(self, uuids: Iterable[str]) -> ContainerEdits:
        """Return what a container needs for these GPUs. Blocks.

        A declared GPU that has no device in a spec needs nothing.

        Raises:
            NoDevice: one of them has no device, or the specs cannot be used.
        """
        found, specs, wanted = NO_EDITS, None, list(uuids)
        for uuid in wanted:
            specs = specs if specs is not None else _Specs(self._directories, self._owner_uid)
            found += self._edits(uuid, specs)
        return _of_this_node(found)

    def state_of_specs(self) -> tuple[object, ...]:
        """Return what differs once a spec was written, changed or removed. Blocks."""
        found: list[object] = []
        for path in (path for directory in self._directories for path in _files(directory)):
            with suppress(OSError):
                status = path.stat()
                found.append((path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return tuple(found)

    def why_none(self) -> str:
        """Return why containers get no GPUs here, in one sentence; "" if they get them. Blocks."""
        try:
            self.edits(gpu.uuid for gpu in self._inventory.gpus)
        except NoDevice as error:
            return str(error)
        return ""

    def _edits(self, uuid: str, specs: _Specs) -> ContainerEdits:
        for spec in specs.of_gpus:
            if uuid in spec.devices:
                return spec.edits(uuid)
        if any(gpu.uuid == uuid and gpu.declared for gpu in self._inventory.gpus):
            return NO_EDITS
        minor = self._minors().get(uuid, -1)
        own = f"{NODE_PREFIX}{minor}"
        if minor >= 0:
            for spec in specs.of_gpus:
                for name in sorted(spec.devices):
                    if _gpu_nodes(spec.devices[name]) == {own}:
                        return spec.edits(name)
        raise NoDevice(specs.why_missing(uuid, own if minor >= 0 else ""))


def _gpu_nodes(edits: ContainerEdits) -> set[str]:
    paths = (device.source for device in edits.devices)
    return {path for path in paths if path.startswith(NODE_PREFIX) and path.removeprefix(NODE_PREFIX).isdigit()}


class _Specs:
    """The specs of a node, the most important first, and what is wrong with others."""

    def __init__(self, directories: Sequence[Path], owner_uid: int) -> None:
        self._directories = directories
        self.of_gpus: list[CdiSpec] = []
        self.faults: list[str] = []
        for path in [path for directory in directories for path in _files(directory)]:
            try:
                spec = read_spec(_read(path, owner_uid))
            except BadCdiSpec as error:
                self.faults.append(f"the CDI spec {path} cannot be used: {error}")
                log.warning("cdi_spec_unusable", path=str(path), error=str(error))
            else:
                self.of_gpus += [spec] if spec.kind.endswith(CLASS) else []

    def why_missing(self, uuid: str, node: str) -> str:
        """Return why a GPU has no device, and what to do."""
        if self.faults:
            return f"{self.faults[0]}; correct it, or {HOW}"
        gpu = f"the GPU {uuid}" + (f" ({node})" if node else "")
        if not self.of_gpus:
            places = " and ".join(str(place) for place in self._directories)
            return f"containers have no GPUs on this node: no CDI spec in {places}; {HOW}"
        return f"no CDI spec has a device of its own for {gpu}; {HOW}"


def _files(directory: Path) -> list[Path]:
    """Return the files of a directory that may be specs; the directory itself if it cannot be read."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [directory]


def _of_this_node(edits: ContainerEdits) -> ContainerEdits:
    """Return edits whose device nodes have all numbers; a plain file is mounted. Raises `NoDevice`."""
    devices, mounts = [], list(edits.mounts)
    for device in edits.devices:
        try:
            found = os.stat(device.source)
        except OSError as error:
            if device.major is not None and device.minor is not None and device.type:
                devices.append(device)
                continue
            raise NoDevice(f"the device {device.source} of its CDI spec is missing: {error.strerror}; {HOW}") from error
        if (kind := NODE_TYPES.get(stat.S_IFMT(found.st_mode))) is None:
            mounts.append(CdiMount(device.source, device.path, ("rbind", "nosuid", "nodev")))
            continue
        numbers = {"type": kind, "major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}
        rights = {"mode": stat.S_IMODE(found.st_mode), "uid": found.st_uid, "gid": found.st_gid}
        given = {name: getattr(device, name) for name in (*numbers, *rights)}
        filled = {**numbers, **rights, **{name: value for name, value in given.items() if value not in (None, "")}}
        devices.append(replace(device, **filled))
    return replace(edits, devices=tuple(devices), mounts=tuple(mounts))


def _read(path: Path, owner_uid: int) -> bytes:
    """Return a file that nobody but its owner may write. Raises `BadCdiSpec`."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadCdiSpec("it is no file")
            if found.st_uid != owner_uid or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise BadCdiSpec("others than root may write it: chown root:root and chmod 644 it")
            data = file.read(SPEC_BYTES_MAX + 1)
    except OSError as error:
        raise BadCdiSpec(error.strerror or str(error)) from error
    if len(data) > SPEC_BYTES_MAX:
        raise BadCdiSpec(f"it has more than {SPEC_BYTES_MAX >> 20} MiB")
    return data
