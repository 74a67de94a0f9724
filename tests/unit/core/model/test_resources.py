"""The vector of resources: its arithmetic, which is written out by component, counts every resource."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.gang import Demand
from cotenant.core.model.resources import (
    AMOUNTS,
    KINDS,
    NAMES,
    Amounts,
    KnownAmounts,
    Resources,
    amounts_of,
    amounts_times,
    numbers_of,
    times,
)

numbers = st.integers(-(2**50), 2**50)
vectors = st.builds(Resources, *[numbers for _ in NAMES])


def test_every_resource_of_the_table_has_its_component_and_its_fields() -> None:
    assert Resources._fields == NAMES == tuple(kind.name for kind in KINDS)
    assert tuple(Amounts.__dataclass_fields__) == tuple(KnownAmounts.__dataclass_fields__) == AMOUNTS


@given(vectors, vectors, st.integers(-5, 5))
def test_sums_differences_and_multiples_are_those_of_each_component(
    one: Resources, other: Resources, count: int
) -> None:
    pairs = list(zip(one, other, strict=True))
    assert one + other == Resources(*[a + b for a, b in pairs])
    assert one - other == Resources(*[a - b for a, b in pairs])
    assert one * count == times(one, count) == Resources(*[a * count for a in one])
    assert one.fits(other) == (one.lacking(other) == []) == all(a <= b for a, b in pairs)
    assert all(type(result) is Resources for result in (one + other, one - other, one * count))


@given(vectors, st.integers(0, 5))
def test_a_record_counts_as_its_vector(vector: Resources, count: int) -> None:
    demand = Demand(vector.gpu_milli, vector.cores, **amounts_of(vector))
    assert Resources.of(demand) == numbers_of(demand) == vector
    assert times(demand, count) == vector * count
    assert amounts_times(demand, count) == amounts_of(vector * count)
