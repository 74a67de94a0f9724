"""A node for the laws of runtimes: it launches real programs, and keeps every status that the runtime reports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.runtime_port import RecoveredAttempt, Runtime, RuntimeContext
from cotenant.v1 import job_pb2, resources_pb2

T = TypeVar("T")
NODE = f"law-{os.getpid()}"
CPUS = sorted(os.sched_getaffinity(0))
SECONDS_MAX = 30.0 * float(os.environ.get("COTENANT_PATIENCE", "1"))  # a loaded machine is no broken law


def program(code: str) -> list[str]:
    """Return the command of a Python program that starts quickly."""
    return [sys.executable, "-I", "-S", "-c", code]


def assignment_of(
    job_id: str, command: Sequence[str], *, cpus: Sequence[int] = (), ranks: int = 1
) -> agent_pb2.Assignment:
    """Return an assignment of a job's first attempt, each of whose replicas is on this node and holds these CPUs."""
    spec = job_pb2.JobSpec(command=command, roles=[job_pb2.Role(name="worker", replicas=ranks)])
    spec.grace.FromSeconds(10)
    tasks = [
        resources_pb2.TaskAllocation(role="worker", rank=rank, core_ids=cpus, cpu_ids=cpus) for rank in range(ranks)
    ]
    return agent_pb2.Assignment(
        job_id=job_id,
        number=1,
        epoch=10,
        spec=spec,
        allocation=resources_pb2.NodeAllocation(node_id=NODE, tasks=tasks),
        world_size=ranks,
        master_address="127.0.0.1",
        master_port=29500,
    )


async def until(what: Callable[[], T]) -> T:
    """Wait until a condition is true and return its value.

    Raises:
        AssertionError: it took too long.
    """
    try:
        async with asyncio.timeout(SECONDS_MAX):
            while not (value := what()):  # noqa: ASYNC110  # other processes set no events of ours
                await asyncio.sleep(0.005)
            return value
    except TimeoutError:
        raise AssertionError(f"nothing happened within {SECONDS_MAX:g} s") from None


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


class Node:
    """An open runtime, what it recovered, and the statuses that it has reported."""

    def __init__(self, runtime: Runtime, state_dir: Path) -> None:
        self.runtime, self.told, self.recovered = runtime, list[Status](), list[RecoveredAttempt]()
        self.launched: set[AttemptKey] = set()
        cores = [resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in CPUS]
        self.context = RuntimeContext(NODE, state_dir, resources_pb2.Inventory(cores=cores), 1 << 20, 10, 1e9)

    async def launch(self, job_id: str, *command: str, cpus: Sequence[int] = (), ranks: int = 1) -> AttemptKey:
        """Launch a program and return its attempt's key."""
        key = AttemptKey(job_id, 1)
        self.launched.add(key)
        await self.runtime.launch(assignment_of(job_id, command, cpus=cpus, ranks=ranks))
        return key

    def ends(self, key: AttemptKey) -> list[Status]:
        """Return the ends that were reported of an attempt."""
        return [status for status in self.told if status.key == key and status.ended]

    async def stop_all(self) -> None:
        """Stop all attempts that have not ended, and wait for their ends."""
        known = {one.status.key: one.status.ended for one in self.recovered}
        left = {*self.launched, *(key for key, has_ended in known.items() if not has_ended)}
        left -= {status.key for status in self.told if status.ended}
        for key in left:
            self.runtime.stop(key, 0.0)
        for key in left:
            await self.ended(key)

    async def ended(self, key: AttemptKey) -> Status:
        """Wait for an attempt's end."""
        return (await until(lambda: self.ends(key)))[0]

    async def runs(self, key: AttemptKey) -> None:
        """Wait until an attempt is reported as running."""
        await until(lambda: [one for one in self.told if one.key == key and one.state == "RUNNING"])

    def output(self, key: AttemptKey, rank: int = 0) -> str:
        """Return the output of a task; "" if there is none."""
        directory = self.runtime.output_directory(key)
        path = directory / f"output-{rank}.log" if directory else None
        return path.read_text() if path and path.exists() else ""


@asynccontextmanager
async def opened(runtime: Runtime, state_dir: Path, *, leaves: bool = False) -> AsyncIterator[Node]:
    """Yield a node with an open runtime; at the end its attempts are stopped, unless it `leaves` them and succeeds."""
    node = Node(runtime, state_dir)
    node.recovered = list(await runtime.open(node.context, node.told.append))
    try:
        yield node
        if not leaves:
            await node.stop_all()
    except BaseException:
        with suppress(AssertionError):  # the first error says more
            await node.stop_all()
        raise
    finally:
        await runtime.close()
