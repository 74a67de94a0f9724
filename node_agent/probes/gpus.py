"""The node's GPUs: those that NVML reports, or those that the operator declares instead."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cotenant.v1 import resources_pb2

FAKE = re.compile(r"fake:(\d{1,4})")
FAKE_MODEL = "Fake"
FAKE_MEMORY_BYTES = 16 << 30
AUTO = "auto"


class BadGpus(ValueError):
    """The operator's declaration of GPUs is invalid."""


def declared_gpus(node_id: str, word: str, numa_nodes: Sequence[int], *, shareable: bool) -> list[resources_pb2.Gpu]:
    """Return the GPUs that an operator declares with `fake:N`, spread evenly over the NUMA nodes.

    >>> [gpu.numa_node for gpu in declared_gpus("a", "fake:4", [0, 1], shareable=False)]
    [0, 0, 1, 1]
    """
    match = FAKE.fullmatch(word)
    if match is None:
        raise BadGpus(f"invalid GPUs: {word!r}; hint: use 'auto' or 'fake:N'")
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


def nvml_gpus(reported: Iterable[Mapping[str, Any]], *, shareable: bool) -> list[resources_pb2.Gpu]:
    """Return the GPUs that the NVML process reported, in bus order."""
    gpus = [
        resources_pb2.Gpu(
            uuid=gpu["uuid"],
            model=gpu["model"],
            memory_bytes=gpu["memory_bytes"],
            pci_bus_id=gpu["pci_bus_id"],
            numa_node=gpu["numa_node"],
            island=gpu["island"],
            shareable=shareable,
        )
        for gpu in reported
    ]
    return sorted(gpus, key=lambda gpu: (gpu.pci_bus_id, gpu.uuid))
