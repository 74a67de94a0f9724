"""The rate that the predictor expects of an attempt on exactly what it holds, for whoever watches over it."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.v1 import predictor_service_pb2 as predictor_pb2
from cotenant.v1 import resources_pb2

CONFIDENCE_MIN = 0.5  # below, an expectation says too little to be held against


def expected_rate_per_second(
    estimate: predictor_pb2.Estimate, allocations: Sequence[resources_pb2.NodeAllocation]
) -> float:
    """Find the rate that was judged for as many cores per replica and nodes, in steps per second; 0: there is none.

    Of jobs whose replicas hold different numbers of cores, such as those with parameter servers, nothing is told.
    """
    cores = {len(task.core_ids) for part in allocations for task in part.tasks}
    if len(cores) != 1:
        return 0.0
    fitting = [
        (one.confidence, one.rate_per_second)
        for one in estimate.candidates
        if one.HasField("allocation")
        and one.confidence >= CONFIDENCE_MIN
        and one.allocation.cores in cores
        and not one.allocation.servers
        and max(1, one.allocation.nodes) == len(allocations)
    ]
    return max(fitting, default=(0.0, 0.0))[1]
