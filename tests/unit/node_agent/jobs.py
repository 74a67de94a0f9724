"""Assignments for tests: real commands with cores and GPUs of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.v1 import job_pb2, resources_pb2

NODE = os.environ.get("COTENANT_TEST_NODE") or f"test-node-{os.getpid()}"  # runs share the tree of control groups
CPUS = sorted(os.sched_getaffinity(0))
PYTHON = [sys.executable, "-I", "-S", "-c"]


def task(
    rank: int = 0,
    *,
    cpus: Sequence[int] = (),
    cores: Sequence[int] = (),
    gpus: Sequence[str] = (),
    memory_bytes: int = 0,
    role: str = "worker",
) -> resources_pb2.TaskAllocation:
    return resources_pb2.TaskAllocation(
        role=role,
        rank=rank,
        core_ids=cores or cpus,
        cpu_ids=cpus,
        gpus=[resources_pb2.GpuShare(uuid=uuid, milli=1000) for uuid in gpus],
        memory_bytes=memory_bytes,
    )


def assignment(
    job_id: str,
    command: Sequence[str],
    *,
    tasks: Sequence[resources_pb2.TaskAllocation] = (),
    number: int = 1,
    epoch: int = 10,
    spec: job_pb2.JobSpec | None = None,
    grace_seconds: float = 10.0,
    node_id: str = NODE,
) -> agent_pb2.Assignment:
    tasks = list(tasks) or [task()]
    filled = job_pb2.JobSpec(command=command)
    filled.grace.FromMicroseconds(int(grace_seconds * 1e6))
    if spec:
        filled.MergeFrom(spec)
    filled.roles.extend(job_pb2.Role(name=name, replicas=1) for name in sorted({task.role for task in tasks}))
    return agent_pb2.Assignment(
        job_id=job_id,
        number=number,
        epoch=epoch,
        spec=filled,
        allocation=resources_pb2.NodeAllocation(node_id=node_id, tasks=tasks),
        world_size=len(tasks),
        master_address="127.0.0.1",
        master_port=29500,
    )


def shell(job_id: str, script: str, **more: object) -> agent_pb2.Assignment:
    return assignment(job_id, ["/bin/sh", "-c", script], **more)  # type: ignore[arg-type]  # passed on as they are


def resize_order(
    job_id: str, *tasks: resources_pb2.TaskAllocation, epoch: int, number: int = 1
) -> agent_pb2.ResizeOrder:
    allocation = resources_pb2.NodeAllocation(node_id=NODE, tasks=tasks)
    return agent_pb2.ResizeOrder(job_id=job_id, number=number, epoch=epoch, allocation=allocation)


def profile_order(
    job_id: str, *cores: int, epoch: int = 10, steps: int = 10, budget_seconds: float = 60.0
) -> agent_pb2.ProfileOrder:
    order = agent_pb2.ProfileOrder(job_id=job_id, number=1, epoch=epoch, cores=cores, steps=steps)
    order.budget.FromMicroseconds(int(budget_seconds * 1e6))
    return order


def stop_order(
    job_id: str,
    *,
    number: int = 1,
    epoch: int = 10,
    grace_seconds: float,
    reason: job_pb2.StopReason.ValueType = job_pb2.STOP_REASON_PREEMPTED,
) -> agent_pb2.StopOrder:
    order = agent_pb2.StopOrder(job_id=job_id, number=number, epoch=epoch, reason=reason)
    order.grace.FromMicroseconds(int(grace_seconds * 1e6))
    return order
