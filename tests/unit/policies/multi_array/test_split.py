"""How a cluster is split by what jobs held: against sums over all spans, and over all numbers of nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.node import NodeShape
from cotenant.policies.multi_array.split import Array, Demand, Held, array_of, split

MEMORY_SECONDS = 1000.0
LARGE_GPUS = 4
TYPES = ("", "T4")

amounts = st.integers(0, 8).map(float)
held = st.builds(
    lambda small, large, some, busy: Held(
        {Array.SMALL: small, Array.LARGE: large}, dict(zip(TYPES, some, strict=True)), busy
    ),
    amounts,
    amounts,
    st.tuples(*(st.tuples(amounts, amounts),) * 2),
    st.floats(0, 1),
)
spans = st.lists(st.tuples(st.floats(1, 3000), held), max_size=5)
shapes = st.lists(
    st.builds(
        NodeShape, st.sampled_from([0, 1, 2, 4, 8]), st.sampled_from([4, 12, 31]), gpu_type=st.sampled_from(TYPES)
    ),
    min_size=1,
    max_size=5,
)


def demand_of(spans: list[tuple[float, Held]]) -> Demand:
    demand = Demand(MEMORY_SECONDS)
    for seconds, one in spans:
        demand.add(seconds, one)
    return demand


def weighted(spans: list[tuple[float, Held]]) -> list[tuple[float, Held]]:
    """Return each span with its weight: its length, and a third less for each memory's length that followed it."""
    return [
        (seconds * math.exp(-sum(after for after, _ in spans[number + 1 :]) / MEMORY_SECONDS), one)
        for number, (seconds, one) in enumerate(spans)
    ]


@given(spans)
def test_demand_is_a_mean_in_which_the_past_counts_less(spans: list[tuple[float, Held]]) -> None:
    demand, weights = demand_of(spans), weighted(spans)
    both = sum(weight * sum(one.gpus.values()) for weight, one in weights)
    large = sum(weight * one.gpus[Array.LARGE] for weight, one in weights)
    assert demand.large_share == (pytest.approx(large / both) if both else None)
    for kind in TYPES:
        cores, gpus = (sum(weight * one.by_type[kind][part] for weight, one in weights) for part in (0, 1))
        assert demand.cores_per_gpu(kind) == (pytest.approx(cores / gpus) if gpus else None)
    if not spans:
        assert demand.busy_share == 1.0
        return
    total = sum(weight for weight, _ in weights)
    mean = sum(weight * one.busy for weight, one in weights) / total
    deviation = math.sqrt(sum(weight * (one.busy - mean) ** 2 for weight, one in weights) / total)
    assert demand.busy_share == pytest.approx(min(1.0, mean + 2 * deviation), abs=1e-6)


@given(spans, shapes)
def test_each_gpu_reserves_the_mean_of_its_type_and_without_data_the_whole_node(
    spans: list[tuple[float, Held]], shapes: list[NodeShape]
) -> None:
    demand = demand_of(spans)
    reserved = split(Ledger(shapes), demand, LARGE_GPUS).reserved.tolist()
    for shape, cores in zip(shapes, reserved, strict=True):
        each = demand.cores_per_gpu(shape.gpu_type)
        if not shape.gpus:
            assert cores == 0
        elif each is None:
            assert cores == shape.cores
        else:
            assert cores == min(shape.cores, math.ceil(demand.busy_share * each * shape.gpus - 1e-6))


@given(spans, shapes)
def test_large_gangs_have_the_largest_nodes_and_the_number_nearest_to_their_share(
    spans: list[tuple[float, Held]], shapes: list[NodeShape]
) -> None:
    demand = demand_of(spans)
    parts = split(Ledger(shapes), demand, LARGE_GPUS)
    assert (parts.small == ~parts.large).all()
    share = 0.5 if demand.large_share is None else demand.large_share
    gpus = [shape.gpus for shape in shapes]
    able = [node for node, count in enumerate(gpus) if count >= LARGE_GPUS] or [
        n for n, count in enumerate(gpus) if count
    ]
    order = sorted(able, key=lambda node: (-gpus[node], node))
    distances = [abs(sum(gpus[node] for node in order[:count]) - share * sum(gpus)) for count in range(len(order) + 1)]
    count = distances.index(min(distances))
    assert np.flatnonzero(parts.large).tolist() == sorted(order[:count])


@pytest.mark.parametrize(
    ("milli", "array"), [(0, "cpu"), (1, "small"), (3999, "small"), (4000, "large"), (8000, "large")]
)
def test_a_gang_belongs_to_an_array_by_its_gpus(milli: int, array: str) -> None:
    assert array_of(milli, LARGE_GPUS) == array
