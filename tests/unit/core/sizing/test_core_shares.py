"""Shares of a node's cores: proportional to GPUs on the node that has the fewest, and reduced evenly if need be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.sizing.core_shares import most_on_a_node, share_of, shares_of, trimmed

NODE = NodeShape(gpus=8, cores=24, memory_bytes=100)

roles = st.builds(
    lambda replicas, gpus, cores: Role(replicas=replicas, request=Request(1000 * gpus, cores)),
    st.integers(1, 4),
    st.integers(0, 4),
    st.none() | st.integers(1, 6),
)


def role(gpu_milli: int = 0, cores: int | None = None, memory_bytes: int = 0, gpu_type: str = "") -> Role:
    return Role(request=Request(gpu_milli, cores, gpu_type, memory_bytes=memory_bytes))


@pytest.mark.parametrize(
    ("one", "shapes", "share"),
    [
        (role(2000), [NODE], 6),
        (role(8000), [NODE], 24),
        (role(2000, cores=9), [NODE], 9),
        (role(2000, cores=0), [NODE], 0),
        (role(), [NODE], 1),
        (role(500), [NodeShape(8, 24, shareable=True)], 1),
        (role(1000), [NodeShape(8, 31)], 3),
        (role(1000), [NodeShape(8, 7)], 1),
        (role(1000), [NODE, NodeShape(4, 64)], 3),
        (role(1000), [NodeShape(0, 2), NodeShape(4, 64)], 16),
        (role(4000), [NodeShape(2, 4), NodeShape(4, 64)], 64),
        (role(1000, memory_bytes=101), [NODE, NodeShape(4, 64, memory_bytes=101)], 16),
        (role(1000, gpu_type="A100"), [NODE, NodeShape(4, 64, gpu_type="A100")], 16),
        (role(9000), [NODE], 1),
        (role(1000), [], 1),
    ],
)
def test_a_replica_gets_its_gpus_share_of_the_poorest_node_that_could_hold_it(
    one: Role, shapes: list[NodeShape], share: int
) -> None:
    assert share_of(one, shapes) == share


@pytest.mark.parametrize(
    ("one", "shapes", "most"),
    [
        (role(), [NODE], 24),
        (role(1000), [NODE, NodeShape(2, 12), NodeShape(0, 4)], 12),
        (role(9000), [NODE], 1),
        (role(), [], 1),
    ],
)
def test_a_replica_could_have_all_cores_of_any_node_that_could_hold_it(
    one: Role, shapes: list[NodeShape], most: int
) -> None:
    assert most_on_a_node(one, shapes) == most


def total(spec: JobSpec, cores: tuple[int, ...]) -> int:
    return sum(one.replicas * each for one, each in zip(spec.roles, cores, strict=True))


@given(st.lists(roles, min_size=1, max_size=3), st.lists(st.integers(1, 12), min_size=3, max_size=3), st.data())
def test_cores_are_reduced_evenly_to_what_the_cluster_has_and_never_below_the_first(
    some: list[Role], wanted: list[int], data: st.DataObject
) -> None:
    spec = JobSpec(roles=tuple(some))
    cores = tuple(
        each if one.request.cores is None else one.request.cores for one, each in zip(some, wanted, strict=False)
    )
    nodes = data.draw(st.integers(1, 4))
    each_has = data.draw(st.integers(1, max(2, total(spec, cores) // nodes + 1)))
    has = nodes * each_has
    got = trimmed(spec, cores, [NodeShape(0, each_has, count=nodes)])
    if total(spec, cores) <= has:
        assert got == cores, "with enough cores nothing is taken"
        return
    fixed = [one.request.cores is not None for one in some]
    least = tuple(each if kept else 1 for each, kept in zip(cores, fixed, strict=True))
    assert all(low <= each <= wish for low, each, wish in zip(least, got, cores, strict=True))
    if total(spec, least) >= has:
        assert got == least
        return
    assert total(spec, got) <= has
    share = (has - total(spec, least)) / (total(spec, cores) - total(spec, least))
    for low, each, wish in zip(least, got, cores, strict=True):
        assert 0 <= low + share * (wish - low) - each < 1 + 1e-9


def test_shares_are_those_of_the_roles_together() -> None:
    spec = JobSpec(roles=(role(8000), role(cores=4)))
    assert shares_of(spec, [NODE]) == (20, 4)
    assert shares_of(spec, [NodeShape(8, 24, memory_bytes=100, count=2)]) == (24, 4)
