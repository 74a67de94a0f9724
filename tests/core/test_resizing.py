"""What can be spared for a running job, and what an allocator may answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.estimates import UNKNOWN
from cotenant.core.jobs import JobSpec, Request, Role
from cotenant.core.ledger import Holding, Share
from cotenant.core.policy import Sizing
from cotenant.core.resizing import BadSizing, Running, agreed, lent_of, resized, spare_of

SHARES = st.lists(
    st.builds(Share, node=st.integers(0, 3), part=st.integers(0, 2), replicas=st.integers(1, 3)), max_size=6
)


@given(SHARES, st.lists(st.integers(0, 20), min_size=4, max_size=4), st.lists(st.booleans(), min_size=3, max_size=3))
def test_what_is_spare_is_there_on_every_node_and_no_role_could_get_more(
    places: list[Share], free: list[int], fixed: list[bool]
) -> None:
    spec = JobSpec(roles=tuple(Role(str(n), request=Request(cores=1 if one else None)) for n, one in enumerate(fixed)))
    spare = spare_of(spec, places, dict(enumerate(free)))

    def taken(cores: tuple[int, ...]) -> list[int]:
        return [sum(cores[share.part] * share.replicas for share in places if share.node == node) for node in range(4)]

    assert all(used <= there for used, there in zip(taken(spare), free, strict=True))
    assert all(cores == 0 for cores, one in zip(spare, fixed, strict=True) if one)
    for role in {share.part for share in places if not fixed[share.part]}:
        more = tuple(cores + (number == role) for number, cores in enumerate(spare))
        assert any(used > there for used, there in zip(taken(more), free, strict=True)), "some was left"


def running(cores: tuple[int, ...] = (4, 1), spare: tuple[int, ...] = (2, 0)) -> Running:
    roles = (Role("worker", request=Request(gpu_milli=1000)), Role("ps", request=Request(cores=1)))
    return Running("a", JobSpec(roles=roles), UNKNOWN, cores, spare)


def test_an_allocator_may_take_what_is_spare_and_give_back_all_but_one_core() -> None:
    assert agreed(running(), Sizing((6, 1), "")) == (6, 1)
    assert agreed(running(), Sizing((1, 1), "")) == (1, 1)
    assert agreed(running(), Sizing((4, 1), "")) is None
    assert agreed(running(), None) is None


@pytest.mark.parametrize(
    ("cores", "why"),
    [((7, 1), "spare"), ((0, 1), "needs a core"), ((4, 2), "user asked"), ((4,), "not its roles")],
)
def test_an_allocator_that_wants_what_it_may_not_is_told_so(cores: tuple[int, ...], why: str) -> None:
    with pytest.raises(BadSizing, match=why):
        agreed(running(), Sizing(cores, ""))


def test_only_cores_change_in_what_is_held() -> None:
    places, held = [Share(3, 1, 2), Share(1, 0, 1)], [Holding(3, 2, 8, 5), Holding(1, cores=1, shares=((0, 500),))]
    assert resized(places, held, (7, 3)) == (Holding(3, 2, 6, 5), Holding(1, cores=7, shares=((0, 500),)))
    assert lent_of((3, 7), (4, 5)) == (0, 2)
