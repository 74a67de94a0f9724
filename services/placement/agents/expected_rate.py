"""Expected rate of an attempt on its present allocation, for contention detection on the node."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.model.node import matches_gpu_type
from cotenant.v1 import predictor_service_pb2 as predictor_pb2
from cotenant.v1 import resources_pb2

CONFIDENCE_MIN = 0.5  # below, an estimate is too uncertain to compare measured rates with


def expected_rate_per_second(
    estimate: predictor_pb2.Estimate, allocations: Sequence[resources_pb2.NodeAllocation]
) -> float:
    """Return the predicted rate for these cores per replica and nodes, in steps per second; 0: none is known.

    None is known for jobs whose replicas hold different numbers of cores, such as jobs with parameter servers.
    """
    cores = {len(task.core_ids) for part in allocations for task in part.tasks}
    if len(cores) != 1:
        return 0.0
    gpu_type = next((part.gpu_type for part in allocations if part.gpu_type), "")
    judged = [
        (bool(one.allocation.gpu_type), one.confidence, one.rate_per_second)  # a rate for its type comes first
        for one in estimate.candidates
        if one.HasField("allocation")
        and one.confidence >= CONFIDENCE_MIN
        and one.allocation.cores in cores
        and not one.allocation.servers
        and max(1, one.allocation.nodes) == len(allocations)
        and (not one.allocation.gpu_type or matches_gpu_type(gpu_type, one.allocation.gpu_type))
    ]
    return max(judged, default=(False, 0.0, 0.0))[-1]
