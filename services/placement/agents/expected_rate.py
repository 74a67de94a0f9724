"""Expected rate of an attempt on its present allocation, for contention detection on the node."""

from __future__ import annotations

from collections.abc import Sequence

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
    cpu_hotplug = [
        (one.confidence, one.rate_per_second)
        for one in estimate.candidates
        if one.HasField("allocation")
        and one.confidence >= CONFIDENCE_MIN
        and one.allocation.cores in cores
        and not one.allocation.servers
        and max(1, one.allocation.nodes) == len(allocations)
    ]
    return max(cpu_hotplug, default=(0.0, 0.0))[1]
