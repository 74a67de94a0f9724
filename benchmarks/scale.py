"""How far one mesh goes: the cost of connected nodes and of waiting tasks, and which limit they reach first.

Simulated agents, which have the real stream and no processes, connect to a mesh of one process per service on an etcd
of three members: how long until all are known, what an idle node costs per second, what placement remembers of it.
Then tasks of arrays wait: what one costs the queue in memory, the store in bytes, and the mesh in CPU time to accept.
From the figures at the largest size the last rows compute the size at which each limit is reached; they are straight
lines through zero, not measurements.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.cluster import sizes, spec  # noqa: E402 - likewise
from benchmarks.processes import GPUS, Cluster, cluster, status_bytes  # noqa: E402 - likewise

from cotenant.v1 import array_service_pb2 as pb  # noqa: E402 - likewise

NODES, QUICK_NODES = (100, 1_000, 4_000), (20, 100)
TASKS, QUICK_TASKS = 10_000, 1_000
ARRAY = 1_000  # tasks of an array
IDLE_SECONDS, QUICK_IDLE_SECONDS = 20.0, 5.0
SETTLE_SECONDS = 2.0
STORE_BYTES_MAX = 2 * 2**30  # etcd's default quota
MEMORY_BYTES_MAX = 8 * 2**30  # of the queue's process, on a server of 16 GiB for the services
CALL_SECONDS_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What one more of something costs: CPU seconds by process, and bytes of memory and of the store."""

    cpu_seconds: Mapping[str, float]
    memory_bytes: float
    store_bytes: float = 0.0

    @property
    def busiest(self) -> str:
        """The process that needs the most CPU time; etcd's are several."""
        own = {name: seconds for name, seconds in self.cpu_seconds.items() if name != "etcd"}
        return max(own, key=lambda name: own[name])


async def idle_nodes(bench: Cluster, empty_bytes: float, seconds: float) -> Costs:
    """Return what an idle node costs per second, and in placement's memory."""
    nodes = len(bench.agents)
    await asyncio.sleep(SETTLE_SECONDS)
    before, began = bench.processes.processor_seconds(), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    used = {name: (now - before[name]) / took / nodes for name, now in bench.processes.processor_seconds().items()}
    return Costs(used, (status_bytes(bench.processes.pids["placement"], "VmRSS") - empty_bytes) / nodes)


async def waiting_tasks(bench: Cluster, tasks: int) -> Costs:
    """Return what a task costs that is accepted and waits: the first one has all GPUs, and runs on."""
    for agent in bench.agents:
        agent.run_seconds = None
    one = spec(gpus=GPUS, replicas=len(bench.agents))
    pid = bench.processes.pids["queue"]
    await asyncio.sleep(SETTLE_SECONDS)
    cpu, memory, stored = (
        bench.processes.processor_seconds(),
        status_bytes(pid, "VmRSS"),
        sum((await sizes(bench)).values()),
    )
    for number in range(tasks // ARRAY):
        request = pb.CreateArrayRequest(spec=one, request_id=f"array-{number}")
        request.spec.array.ranges.add(first=0, last=ARRAY - 1)
        await bench.arrays.CreateArray(request, timeout=CALL_SECONDS_MAX)
    await asyncio.sleep(SETTLE_SECONDS)
    used = {name: (now - cpu[name]) / tasks for name, now in bench.processes.processor_seconds().items()}
    more = status_bytes(pid, "VmRSS") - memory
    return Costs(used, more / tasks, (sum((await sizes(bench)).values()) - stored) / tasks)


async def measure_size(nodes: int, tasks: int, seconds: float) -> tuple[list[harness.Row], Costs, Costs]:
    """Measure a cluster of this many nodes."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        async with cluster(1, Path(directory) / "empty") as bench:
            empty = status_bytes(bench.processes.pids["placement"], "VmRSS")
            started = time.perf_counter() - began
        began = time.perf_counter()
        async with cluster(nodes, Path(directory) / "full") as bench:
            connected = max(0.0, time.perf_counter() - began - started)
            node = await idle_nodes(bench, empty, seconds)
            task = await waiting_tasks(bench, tasks)
    where = f"{nodes:,} nodes"
    reference = "of a core"
    rows = [
        harness.Row(f"{where}: until all are known, beyond the start of a mesh of one", connected, "s"),
        *(
            harness.Row(f"{where}: CPU of {name}, idle", 100 * cost * nodes, "%", 100.0, reference)
            for name, cost in node.cpu_seconds.items()
        ),
        harness.Row(f"{where}: placement's memory for a node", node.memory_bytes / 1024, "KiB"),
        *(
            harness.Row(f"{where}: CPU of {name} to accept a task of an array", 1e3 * cost, "ms")
            for name, cost in task.cpu_seconds.items()
        ),
        harness.Row(f"{where}: the queue's memory for a waiting task", task.memory_bytes / 1024, "KiB"),
        harness.Row(f"{where}: the store's bytes for a waiting task", task.store_bytes, "B"),
    ]
    return rows, node, task


def limits(node: Costs, task: Costs) -> Iterator[harness.Row]:
    """Yield at which size each limit is reached."""
    yield harness.Row(
        f"computed: nodes at which {node.busiest} has a core busy with idle ones",
        1 / node.cpu_seconds[node.busiest],
        "",
    )
    yield harness.Row(
        f"computed: waiting tasks that fill {MEMORY_BYTES_MAX / 2**30:g} GiB of the queue",
        MEMORY_BYTES_MAX / task.memory_bytes,
        "",
    )
    yield harness.Row(
        f"computed: waiting tasks that fill a store of {STORE_BYTES_MAX / 2**30:g} GiB",
        STORE_BYTES_MAX / task.store_bytes,
        "",
    )
    yield harness.Row(
        f"computed: minutes to accept 1,000,000 tasks, by {task.busiest}", 1e6 * task.cpu_seconds[task.busiest] / 60, ""
    )


def measure(quick: bool) -> list[harness.Row]:
    """Measure at three sizes, and compute the limits from the last."""
    rows: list[harness.Row] = []
    tasks, seconds = (QUICK_TASKS, QUICK_IDLE_SECONDS) if quick else (TASKS, IDLE_SECONDS)
    for nodes in QUICK_NODES if quick else NODES:
        some, node, task = asyncio.run(measure_size(nodes, tasks, seconds))
        rows += some
    return [*rows, *limits(node, task)]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
