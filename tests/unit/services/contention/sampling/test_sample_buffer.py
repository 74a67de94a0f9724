from __future__ import annotations

import pytest

from cotenant.core.policy.protocols import NodeWindow
from cotenant.services.contention.sampling.sample_buffer import SampleBuffer, TooManyNodes
from cotenant.v1 import contention_service_pb2 as pb


def keep(sample_buffer: SampleBuffer, node: str, now: float) -> None:
    sample_buffer.add(pb.NodeSample(node_id=node, cpu_percent=now), NodeWindow(node, now, 5.0, ()))


def test_only_the_last_samples_of_a_node_are_kept() -> None:
    sample_buffer = SampleBuffer(samples_max=3, nodes_max=10, silent_seconds_max=60)
    for now in (1, 2, 3, 4, 5):
        keep(sample_buffer, "n1", now)
    assert [sample.cpu_percent for sample in sample_buffer.history("n1")] == [3, 4, 5]
    assert sample_buffer.history("n2") == ()


def test_a_silent_node_is_replaced_by_a_new_one() -> None:
    sample_buffer = SampleBuffer(samples_max=3, nodes_max=2, silent_seconds_max=60)
    keep(sample_buffer, "silent", 100)
    keep(sample_buffer, "talking", 150)
    with pytest.raises(TooManyNodes, match="samples of 2 nodes are already buffered"):
        keep(sample_buffer, "new", 155)
    keep(sample_buffer, "new", 161)
    assert sample_buffer.nodes(now=161) == ["new", "talking"]
    assert sample_buffer.last("new").node_id == "new"
