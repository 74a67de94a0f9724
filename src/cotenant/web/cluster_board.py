"""The cluster page: how busy each node is by its last sample, in whole percent, so that most samples change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cotenant.cli.connection import Mesh
from cotenant.cli.pages import pages
from cotenant.v1.contention_service_pb2 import ListSamplesRequest, NodeSample
from cotenant.web.boards import Ask, BoardKind, part
from cotenant.web.rows import Row

if TYPE_CHECKING:
    from cotenant.v1.contention_service_pb2_grpc import ContentionServiceAsyncStub

SECONDS = 2.0


async def read(ask: Ask) -> Mapping[str, Row]:
    """Return the heat of each node that has a sample, and why there is none."""
    samples = await part(ask(_samples))
    rows: dict[str, Row] = {f"node {one['node']}": one for one in samples.rows}
    return {**rows, "state": {"trouble": samples.trouble}}


KIND = BoardKind(read, SECONDS)


async def _samples(mesh: Mesh) -> list[Row]:
    return [heat(one) for one in await mesh.call_contention_replicas(_listed)]


async def _listed(contention: ContentionServiceAsyncStub) -> Sequence[NodeSample]:
    return [sample async for page in pages(contention.ListSamples, ListSamplesRequest()) for sample in page.samples]


def heat(sample: NodeSample) -> Row:
    """Return a node's use, memory bandwidth and pressure in percent; None where the hardware does not report it.

    >>> sample = NodeSample(node_id="a", cpu_percent=41.6, memory_bandwidth_bytes_per_second=-1)
    >>> sample.cpu.some_avg10 = 12.3
    >>> heat(sample)
    {'node': 'a', 'cpu': 42, 'gpu': None, 'bandwidth': None, 'pressure': 12}
    """
    peak, bandwidth = sample.memory_bandwidth_peak_bytes_per_second, sample.memory_bandwidth_bytes_per_second
    gpus = [one.gpu_utilisation_percent for one in sample.attempts if one.gpu_utilisation_percent >= 0]
    gpus = [] if all(one.cpu_job for one in sample.attempts) else gpus
    pressure = max(sample.cpu.some_avg10, sample.memory.some_avg10, sample.io.some_avg10)
    return {
        "node": sample.node_id,
        "cpu": round(sample.cpu_percent),
        "gpu": round(sum(gpus) / len(gpus)) if gpus else None,
        "bandwidth": round(100 * bandwidth / peak) if peak > 0 and bandwidth >= 0 else None,
        "pressure": round(pressure),
    }
