from __future__ import annotations

from typing import Any

from cotenant.services.placement.agents.expected_rate import expected_rate_per_second
from cotenant.v1.predictor_service_pb2 import CandidateAllocation, CandidateEstimate, Estimate
from cotenant.v1.resources_pb2 import NodeAllocation, TaskAllocation


def judged(cores: int, rate: float, confidence: float = 0.9, **more: Any) -> CandidateEstimate:
    allocation = CandidateAllocation(cores=cores, **more)
    return CandidateEstimate(rate_per_second=rate, confidence=confidence, allocation=allocation)


def on(*nodes: tuple[int, ...]) -> list[NodeAllocation]:
    """Allocations with so many cores per task."""
    return [NodeAllocation(tasks=[TaskAllocation(core_ids=range(cores)) for cores in tasks]) for tasks in nodes]


def test_the_expected_rate_is_that_of_the_present_allocation() -> None:
    estimate = Estimate(
        candidates=[judged(2, 10.0), judged(4, 15.0), judged(4, 25.0, nodes=2), judged(8, 40.0, confidence=0.2)]
    )
    assert expected_rate_per_second(estimate, on((2,))) == 10
    assert expected_rate_per_second(estimate, on((4, 4))) == 15
    assert expected_rate_per_second(estimate, on((4,), (4,))) == 25
    for unknown in (on((3,)), on((8,)), on((2,), (2,)), on((2, 4)), on()):
        assert expected_rate_per_second(estimate, unknown) == 0


def test_a_rate_on_the_present_gpu_type_comes_before_that_on_any_and_on_another() -> None:
    estimate = Estimate(
        candidates=[judged(2, 50.0), judged(2, 10.0, 0.6, gpu_type="T4"), judged(2, 50.0, gpu_type="A100")]
    )
    (here,) = on((2,))
    here.gpu_type = "T4"
    assert expected_rate_per_second(estimate, [here]) == 10
    here.gpu_type = "V100"
    assert expected_rate_per_second(estimate, [here]) == 50, "nothing better is known"


def test_the_most_confident_estimate_counts_unless_there_are_parameter_servers() -> None:
    estimate = Estimate(candidates=[judged(2, 10.0, 0.6), judged(2, 12.0, 0.8), judged(2, 30.0, 0.9, servers=1)])
    assert expected_rate_per_second(estimate, on((2,))) == 12
    bare = CandidateEstimate(rate_per_second=9.0, confidence=1.0)
    assert expected_rate_per_second(Estimate(candidates=[bare]), on((2,))) == 0
