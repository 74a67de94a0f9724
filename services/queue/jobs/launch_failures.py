"""Launch failures: the job is tried on other nodes, at no cost to the job. No IO.

A node that cannot launch is not the job's fault, so nothing counts against its retries and there is no back-off; the
job only avoids that node for a while. Placement decides how often such a node is tried at all.

The job's own working directory, Python environment, image and mounts are the exceptions. They may be missing on one
node only, such as one that lacks a shared mount, so each node that could hold the job is tried once. When such a node
comes up a second time, none is left: then the attempt has failed like any other for which the infrastructure is not
responsible.

A submitter that is unknown to a node proves nothing about the node, which is not held because of one user. So a job
that comes back to a node it avoids waits before the next try: there is no other node, and it would retry forever. The
same is done where a job's uploaded folder or its secrets could not be fetched, which is not the node's fault.
"""

from __future__ import annotations

from cotenant.codec import specs
from cotenant.services.queue.jobs import node_avoidance
from cotenant.v1 import job_pb2

AVOID_SECONDS = 30.0  # a node that keeps failing is held soon, and a repaired one should be used again
UNKNOWN_USER_SECONDS, UNKNOWN_USER_SECONDS_MAX = 30.0, 600.0  # doubles with each launch failure of the job
DIRECTORY_AVOID_SECONDS = 3600.0
DIRECTORY_NODES_MAX = 8  # this many nodes without the working directory, the environment or the image count as all
NOT_LAUNCHED = "not launched on "  # prefix of the phase reason until the job runs
_OF_THE_JOB = {  # by cause: the prefix of the reason why the node is avoided
    job_pb2.LAUNCH_CAUSE_WORKING_DIRECTORY: "its working directory: ",
    job_pb2.LAUNCH_CAUSE_ENVIRONMENT: "its Python environment: ",
    job_pb2.LAUNCH_CAUSE_IMAGE: "its image: ",
    job_pb2.LAUNCH_CAUSE_MOUNT: "its mounts: ",
}
_PROVES_NOTHING = (  # about the node
    job_pb2.LAUNCH_CAUSE_USER,
    job_pb2.LAUNCH_CAUSE_UPLOAD,
    job_pb2.LAUNCH_CAUSE_SECRET,
)


def can_launch_elsewhere(job: job_pb2.Job, now: float) -> bool:
    """Return whether another node may launch the job's attempt; False if it needs what no node has."""
    failure = job.attempt.launch_failure
    if failure.cause not in _OF_THE_JOB:
        return True
    prefixes = tuple(_OF_THE_JOB.values())
    without = [one.node_id for one in node_avoidance.active(job, now) if one.reason.startswith(prefixes)]
    return failure.node_id not in without and len(without) < DIRECTORY_NODES_MAX - 1


def wait_seconds(job: job_pb2.Job, now: float) -> float:
    """Return how long the job waits before its next try; 0 unless no node is to blame."""
    failure = job.attempt.launch_failure
    avoided = {one.node_id for one in node_avoidance.active(job, now)}
    if failure.cause not in _PROVES_NOTHING or failure.node_id not in avoided:
        return 0.0
    return min(UNKNOWN_USER_SECONDS_MAX, UNKNOWN_USER_SECONDS * 2.0 ** min(job.launch_failures - 1, 30))


def avoid_node(job: job_pb2.Job, now: float) -> str:
    """Make the job avoid the node for a while; returns the detail for its event log."""
    failure = job.attempt.launch_failure
    reason = failure.reason or f"{specs.LAUNCH_CAUSES.names.get(failure.cause, 'unknown')} failed"
    job.launch_failures += 1
    prefix = _OF_THE_JOB.get(failure.cause)
    node_avoidance.avoid(
        job,
        [failure.node_id],
        DIRECTORY_AVOID_SECONDS if prefix else AVOID_SECONDS,
        f"{prefix}{reason}" if prefix else f"it could not launch attempt {job.attempt.number}: {reason}",
        now,
    )
    job.phase_reason = f"{NOT_LAUNCHED}{failure.node_id}: {reason}; tried elsewhere"
    return f"on {failure.node_id}: {reason}; tried elsewhere"
