"""The node's GPUs: what NVML tells of them, or what an operator declares in place of any."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import structlog

from cotenant.v1 import resources_pb2

log = structlog.get_logger()

NVML_LIBRARY = "libnvidia-ml.so.1"
FAKE = re.compile(r"fake:(\d{1,4})")
FAKE_MODEL = "Fake"
FAKE_MEMORY_BYTES = 16 << 30
VENDOR = re.compile(r"^(NVIDIA|Tesla)\s+")
AFFINITY_SCOPE_NODE = 0
NODE_SET_WORDS = 4  # of 64 bits
UNKNOWN = -1.0


class BadGpus(ValueError):
    """The operator's word for the GPUs is none that we know."""


def declared_gpus(node_id: str, word: str, numa_nodes: Sequence[int], *, shareable: bool) -> list[resources_pb2.Gpu]:
    """GPUs that an operator declares with `fake:N`, spread over the NUMA nodes in equal parts.

    >>> [gpu.numa_node for gpu in declared_gpus("a", "fake:4", [0, 1], shareable=False)]
    [0, 0, 1, 1]
    """
    match = FAKE.fullmatch(word)
    if match is None:
        raise BadGpus(f"GPUs are 'auto' or 'fake:N', not {word!r}")
    count, name = int(match[1]), hashlib.sha256(node_id.encode()).hexdigest()[:12]
    nodes = sorted(numa_nodes) or [-1]
    return [
        resources_pb2.Gpu(
            uuid=f"GPU-fake-{name}-{index}",
            model=FAKE_MODEL,
            memory_bytes=FAKE_MEMORY_BYTES,
            numa_node=nodes[index * len(nodes) // count],
            shareable=shareable,
            declared=True,
        )
        for index in range(count)
    ]


@dataclass(slots=True)
class NvmlGpus:
    """The GPUs that NVML shows, and its connection, which stays open to ask for their utilisation."""

    gpus: list[resources_pb2.Gpu] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    _nvml: ModuleType | None = None
    _handles: dict[str, object] = field(default_factory=dict)

    def utilisation_percent(self, uuids: Sequence[str]) -> float:
        """The mean utilisation of some GPUs, from 0 to 100; -1 where it is not known of all."""
        if self._nvml is None or not uuids or any(uuid not in self._handles for uuid in uuids):
            return UNKNOWN
        try:
            told = [self._nvml.nvmlDeviceGetUtilizationRates(self._handles[uuid]).gpu for uuid in uuids]
        except self._nvml.NVMLError as error:
            log.warning("nvml_utilisation_failed", error=str(error))
            return UNKNOWN
        return float(sum(told)) / len(told)

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                log.info("nvml_shutdown_failed", error=str(error))
            self._nvml = None


def nvml_gpus(sysfs: Path, *, shareable: bool) -> NvmlGpus:
    """All GPUs that the driver shows; no driver at all is no trouble, a broken one is told of."""
    try:
        ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        log.info("nvml_absent")
        return NvmlGpus()
    import pynvml  # type: ignore[import-untyped]  # NVIDIA ships no types; here, because it takes 17 MiB

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        log.error("nvml_failed", error=str(error))
        return NvmlGpus(troubles=[f"GPUs are not used: NVML failed: {error}"])
    found = NvmlGpus(_nvml=pynvml)
    for index in range(count):
        try:
            gpu, handle = _read_gpu(pynvml, index, sysfs)
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            log.error("gpu_unreadable", index=index, error=str(error))
            found.troubles.append(f"GPU {index} is not used: NVML failed: {error}")
            continue
        gpu.shareable = shareable
        found.gpus.append(gpu)
        found._handles[gpu.uuid] = handle
    _number_islands(pynvml, found)
    found.gpus.sort(key=lambda gpu: (gpu.pci_bus_id, gpu.uuid))
    return found


def _number_islands(nvml: ModuleType, found: NvmlGpus) -> None:
    """Number the sets of GPUs that reach each other over NVLink from 1, in the bus's order; 0: it has no peer."""
    gpus = sorted(found.gpus, key=lambda gpu: gpu.pci_bus_id)
    island_of = list(range(len(gpus)))
    for one, other in itertools.combinations(range(len(gpus)), 2):
        if _linked(nvml, found._handles[gpus[one].uuid], found._handles[gpus[other].uuid]):
            joined = island_of[other]
            island_of = [island_of[one] if island == joined else island for island in island_of]
    large = [island for island in dict.fromkeys(island_of) if island_of.count(island) > 1]
    for gpu, island in zip(gpus, island_of, strict=True):
        gpu.island = large.index(island) + 1 if island in large else 0


def _linked(nvml: ModuleType, one: object, other: object) -> bool:
    """Tell whether two GPUs reach each other over NVLink; a driver that does not say is taken to mean no."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _read_gpu(nvml: ModuleType, index: int, sysfs: Path) -> tuple[resources_pb2.Gpu, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    bus_id = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    gpu = resources_pb2.Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        model=VENDOR.sub("", nvml.nvmlDeviceGetName(handle)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        pci_bus_id=bus_id,
        numa_node=next(_numa_nodes(nvml, handle, bus_id, sysfs), -1),
    )
    return gpu, handle


def _numa_nodes(nvml: ModuleType, handle: object, bus_id: str, sysfs: Path) -> Iterator[int]:
    """What each source says of the nearest NUMA node, the kernel first; none where it does not know."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        node = -1
    if node >= 0:
        yield node
    try:
        words = nvml.nvmlDeviceGetMemoryAffinity(handle, NODE_SET_WORDS, AFFINITY_SCOPE_NODE)
    except nvml.NVMLError:
        return
    mask = sum(int(word) << (64 * place) for place, word in enumerate(words))
    if mask:
        yield (mask & -mask).bit_length() - 1
