"""Slurm's jobs and nodes as messages of the public API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cotenant.codec import refusals as refusal_codec
from cotenant.codec import specs
from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.node import Core, Gpu, Inventory
from cotenant.core.model.refusal import Refusal
from cotenant.services.slurm.cluster_watch import VANISHED
from cotenant.services.slurm.placement_view import cores_of
from cotenant.services.slurm.records import CANCELLED, SUCCEEDED, Picture, SlurmJob, SlurmNode
from cotenant.v1 import job_pb2, node_service_pb2

STATES: Mapping[str, str] = MappingProxyType(
    {
        "TIMEOUT": "reached its time limit",
        "NODE_FAIL": "a node failed",
        "OUT_OF_MEMORY": "out of memory",
        "DEADLINE": "could not end by its deadline",
        "BOOT_FAIL": "a node did not boot",
        "LAUNCH_FAILED": "could not be launched",
        "PREEMPTED": "preempted",
        "REVOKED": "another cluster runs it",
        VANISHED: "ended, unknown how: Slurm no longer lists it",
    }
)


def phase_of(job: SlurmJob) -> Phase:
    """Return the phase of ours that a job is in.

    >>> phase_of(SlurmJob("17", 17, "TIMEOUT")).value, phase_of(SlurmJob("17", 17, "COMPLETING")).value
    ('failed', 'stopping')
    """
    if job.paused or job.held:
        return Phase.SUSPENDED
    if job.waits:
        return Phase.QUEUED
    if job.runs:
        steps = {"CONFIGURING": Phase.STARTING, "COMPLETING": Phase.STOPPING}
        return steps.get(job.state, Phase.STOPPING if "COMPLETING" in job.flags else Phase.RUNNING)
    return Phase.SUCCEEDED if job.state in SUCCEEDED else Phase.CANCELLED if job.state in CANCELLED else Phase.FAILED


def reason_of(job: SlurmJob) -> str:
    """Return Slurm's state and reason in plain words."""
    if job.ended:
        words = STATES.get(job.state, "")
        if job.state == "FAILED":
            words = f"exit code {job.exit_code}" + (f", signal {job.signal}" if job.signal else "")
        return words
    if job.paused:
        return "suspended in Slurm"
    if job.held:
        return "held in Slurm"
    restarted = f"requeued {job.restarts} times; " if job.restarts else ""
    return restarted + (f"Slurm: {job.reason}" if job.reason else "")


def job_message(job: SlurmJob, spec: JobSpec, picture: Picture, now: float, refusal: Refusal | None) -> job_pb2.Job:
    """Return a job as the API has it."""
    phase, ran = phase_of(job), job.ran_seconds(now)
    message = job_pb2.Job(
        id=job.id,
        spec=specs.spec_to_wire(spec),
        phase=specs.PHASES.to_wire(phase),
        phase_reason=reason_of(job),
        submitter=job.user,
        attained_gpu_seconds=ran * job.gpus_total,
        attained_core_seconds=ran * cores_of(job.cpus, picture),
        preemptions=job.restarts,
    )
    if job.submitted_seconds:
        message.create_time.CopyFrom(specs.timestamp(job.submitted_seconds))
    if refusal and phase is Phase.QUEUED:
        message.refusal.CopyFrom(refusal_codec.to_text(refusal))
    started = not job.waits and job.started_seconds
    if started and (job.placed or not job.ended):
        message.start_time.CopyFrom(specs.timestamp(job.started_seconds))
        _add_attempt(message, job, phase, picture)
    if job.ended:
        message.run_time.CopyFrom(specs.duration(ran if started else 0.0))
        if job.ended_seconds:
            message.end_time.CopyFrom(specs.timestamp(job.ended_seconds))
    return message


def _add_attempt(message: job_pb2.Job, job: SlurmJob, phase: Phase, picture: Picture) -> None:
    attempt = message.attempt
    attempt.job_id, attempt.number = job.id, job.restarts + 1
    attempt.state = {
        Phase.STARTING: job_pb2.ATTEMPT_STATE_ASSIGNED,
        Phase.RUNNING: job_pb2.ATTEMPT_STATE_RUNNING,
        Phase.STOPPING: job_pb2.ATTEMPT_STATE_STOPPING,
        Phase.SUCCEEDED: job_pb2.ATTEMPT_STATE_SUCCEEDED,
        Phase.FAILED: job_pb2.ATTEMPT_STATE_FAILED,
    }.get(phase, job_pb2.ATTEMPT_STATE_STOPPED)
    for field in (attempt.assign_time, attempt.start_time):
        field.CopyFrom(specs.timestamp(job.started_seconds))
    if job.ended:
        attempt.exit.code, attempt.exit.signal = job.exit_code, job.signal
        attempt.exit.out_of_memory = job.state == "OUT_OF_MEMORY"
        if job.ended_seconds:
            attempt.end_time.CopyFrom(specs.timestamp(job.ended_seconds))
    for rank, placed in enumerate(job.placed):
        node = picture.nodes.get(placed.node)
        cores = tuple(_core_id(core, node) for core in placed.cores) if node else ()
        gpus = tuple(GpuShare(gpu_id(placed.node, index)) for index in placed.gpus)
        memory = job.memory_bytes // len(job.placed) if picture.memory_counts else 0
        task = TaskAllocation("task", rank, cores, gpus=gpus, memory_bytes=memory)
        kind = node.gpu_type if node and gpus else ""
        attempt.allocations.append(specs.allocation_to_wire(NodeAllocation(placed.node, (task,), kind)))


def _core_id(core: int, node: SlurmNode) -> int:
    """Return the number of a core on its node, from its socket in thousands and its number on that."""
    return core // 1000 * (node.cores // node.sockets) + core % 1000


def gpu_id(node: str, index: int) -> str:
    """Return the id of a GPU, of which Slurm says only the index on its node."""
    return f"SLURM-{node}-{index}"


def node_message(node: SlurmNode, picture: Picture, now: float) -> node_service_pb2.Node:
    """Return a node as the API has it, with what jobs hold of it."""
    per_socket = max(1, node.cores // node.sockets)
    inventory = Inventory(
        cores=tuple(
            Core(core, tuple(range(core * node.threads, (core + 1) * node.threads)), socket, socket)
            for core in range(node.cores)
            for socket in (min(core // per_socket, node.sockets - 1),)
        ),
        gpus=tuple(Gpu(gpu_id(node.name, index), node.gpu_type, declared=True) for index in range(node.gpus)),
        address=node.address,
        memory_bytes=node.memory_bytes,
    )
    message = node_service_pb2.Node(
        id=node.name, inventory=specs.inventory_to_wire(inventory), state=_state(node), state_reason=_reason(node)
    )
    if picture.taken_seconds and not node.away:
        message.seen_time.CopyFrom(specs.timestamp(picture.taken_seconds))
    for job in picture.jobs.values():
        for placed in job.placed if job.runs or job.paused else ():
            if placed.node == node.name:
                message.attempts.append(f"{job.id}/{job.restarts + 1}")
                message.used_cores += 0 if job.paused else len(placed.cores)
                message.used_gpu_milli += 1000 * len(placed.gpus)
                message.used_memory_bytes += job.memory_bytes // len(job.placed) if picture.memory_counts else 0
    return message


def _state(node: SlurmNode) -> node_service_pb2.NodeState.ValueType:
    if node.away:
        return node_service_pb2.NODE_STATE_AWAY
    if node.open:
        return node_service_pb2.NODE_STATE_READY
    draining = node.states & {"DRAIN", "DRAINING"} and node.states & {"ALLOCATED", "MIXED", "DRAINING"}
    return node_service_pb2.NODE_STATE_DRAINING if draining else node_service_pb2.NODE_STATE_CORDONED


def _reason(node: SlurmNode) -> str:
    if node.open:
        return ""
    said = f"Slurm: {'+'.join(sorted(state.lower() for state in node.states))}"
    return f"{said}: {node.reason}" if node.reason else said
