"""The cost of the cluster view and of planning a migration in placement: CPU time by the number of attempts.

    python -m benchmarks.migration [--quick] [--json]

Servers with nine GPUs, eight of them used by single jobs; a gang of two needs one server, so one job has to move. The
reference is the same plan by the same policy without moves and with an empty cluster view, in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks import harness
from benchmarks.agents import inventory

from cotenant import plugins
from cotenant.codec import specs
from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as pb
from cotenant.policies.locality import WaitsForLocality
from cotenant.services.placement.api.server import ALLOCATORS
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt, NodeState
from cotenant.services.placement.planning import planner
from cotenant.services.placement.planning.cluster_view import STOP_COSTS, LiveClusterView
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2, resources_pb2

ATTEMPTS = (1_024, 4_096, 8_192)
TAKEN, GPUS, CORES = 8, 9, 36
SHARE_MAX = 1.5  # of the plan without moves
MOVES = WaitsForLocality.Options(settled_seconds=0.0, gain_min=0.0)


def spec(replicas: int) -> job_pb2.JobSpec:
    """Return a job with one GPU and four cores per replica; several replicas need the same server."""
    request = resources_pb2.ResourceRequest(gpu_milli=1000, cores=4)
    locality = job_pb2.LOCALITY_SERVER if replicas > 1 else job_pb2.LOCALITY_UNSPECIFIED
    return job_pb2.JobSpec(
        name="job", roles=[job_pb2.Role(name="worker", replicas=replicas, resources=request)], locality=locality
    )


def occupied_cluster(attempts: int) -> Cluster:
    """Return servers with `attempts` running single jobs."""
    cluster = Cluster()
    for number in range(attempts // TAKEN):
        record = records_pb2.StoredNode()
        record.node.id, record.node.state = f"n{number:05}", NodeState.NODE_STATE_READY
        made_of = specs.inventory_from_wire(inventory(GPUS, CORES, node_id=record.node.id))
        cluster.put_node(record.node.id, made_of, record).connected = True
    for number in range(attempts):
        cluster.add(running(cluster, f"job-{number}", f"n{number // TAKEN:05}", number % TAKEN))
    return cluster


def running(cluster: Cluster, job_id: str, node_id: str, place: int) -> LiveAttempt:
    """Return a single job that runs in one slot of a server."""
    task = resources_pb2.TaskAllocation(role="worker", rank=0, core_ids=range(4 * place, 4 * place + 4))
    task.gpus.add(uuid=f"GPU-{node_id}-{place}", milli=1000)
    record = records_pb2.StoredAttempt(spec=spec(1))
    record.attempt.job_id, record.attempt.number = job_id, 1
    record.attempt.state = job_pb2.ATTEMPT_STATE_RUNNING
    record.attempt.start_time.GetCurrentTime()
    record.attempt.allocations.add(node_id=node_id, tasks=[task])
    allocation: tuple[NodeAllocation, ...] = tuple(map(specs.allocation_from_wire, record.attempt.allocations))
    return LiveAttempt(record, allocation, epoch=1)


def cpu_ms(work: Callable[[], object], times: int) -> float:
    """Return the CPU time of one call in milliseconds, after a warm-up call."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return 1e3 * (time.process_time() - began) / times


def measure(quick: bool) -> Iterator[harness.Row]:
    """Plan one gang with and without moves, at each size."""
    allocator = plugins.load(ALLOCATORS, "proportional")
    moving = WaitsForLocality(MOVES)
    still = WaitsForLocality(WaitsForLocality.Options(moves_max=0))
    request = pb.PlanPlacementRequest(candidates=[pb.Candidate(job_id="gang", number=1, spec=spec(2))])
    for attempts in ATTEMPTS:
        cluster, now = occupied_cluster(attempts), time.time() + 1

        live_view = partial(LiveClusterView, cluster, STOP_COSTS, now)

        def plan(
            policy: WaitsForLocality, cluster_view: Callable[[], ClusterView], cluster: Cluster = cluster
        ) -> cycle.Plan:
            return planner.plan(cluster, request, policy, allocator, unchanged, cluster_view())

        assert len(plan(moving, live_view).moves) == 1, "no job moves"
        times = 5 if quick else 20
        without_moves = cpu_ms(partial(plan, still, lambda: EMPTY_CLUSTER), times)
        took = cpu_ms(partial(plan, moving, live_view), times)
        name = f"a plan with one move among {attempts:,} attempts"
        most = SHARE_MAX * without_moves if attempts == max(ATTEMPTS) else None
        bar, holds = ("", None) if most is None else (f"≤ {SHARE_MAX:g} of one without", took <= most)
        yield harness.Row(name, took, "ms", without_moves, "plan without moves", bar, holds)
        view_ms = cpu_ms(partial(_all_running, live_view), times)
        yield harness.Row(f"all {attempts:,} residents", view_ms, "ms", without_moves, "plan without moves")


def _all_running(live_view: Callable[[], ClusterView]) -> object:
    return live_view().running_jobs()


def unchanged(spec: JobSpec, estimate: Estimate) -> Estimate:
    """Return the estimate unchanged."""
    return estimate


if __name__ == "__main__":
    harness.main(lambda quick: list(measure(quick)), __doc__ or "")
