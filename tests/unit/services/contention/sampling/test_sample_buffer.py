from __future__ import annotations

import pytest

from cotenant.core.policy.protocols import NodeWindow
from cotenant.services.contention.sampling.sample_buffer import Rings, TooManyNodes
from cotenant.v1 import contention_service_pb2 as pb


def keep(rings: Rings, node: str, now: float) -> None:
    rings.keep(pb.NodeSample(node_id=node, cpu_percent=now), NodeWindow(node, now, 5.0, ()))


def test_only_the_last_samples_of_a_node_are_kept() -> None:
    rings = Rings(samples_max=3, nodes_max=10, silent_seconds_max=60)
    for now in (1, 2, 3, 4, 5):
        keep(rings, "n1", now)
    assert [sample.cpu_percent for sample in rings.history("n1")] == [3, 4, 5]
    assert rings.history("n2") == ()


def test_a_silent_node_makes_room_for_a_new_one() -> None:
    rings = Rings(samples_max=3, nodes_max=2, silent_seconds_max=60)
    keep(rings, "silent", 100)
    keep(rings, "talking", 150)
    with pytest.raises(TooManyNodes, match="samples of 2 nodes are kept already"):
        keep(rings, "new", 155)
    keep(rings, "new", 161)
    assert [sample.node_id for sample in rings.last("", now=161)] == ["new", "talking"]
