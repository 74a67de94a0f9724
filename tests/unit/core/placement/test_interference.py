from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.placement import interference


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.sampled_from([1, 2, 5]))
def test_many_servers_at_once_leave_a_gang_what_each_of_them_leaves(held: list[tuple[int, int]], servers: int) -> None:
    others, rest = (np.array(column, dtype=np.int64) for column in zip(*held, strict=True))
    one_by_one = [interference.speed(*each, servers=servers) for each in held]
    assert interference.speeds(others, rest, servers=servers).tolist() == pytest.approx(one_by_one)


@pytest.mark.parametrize(("servers", "worst"), [(1, 75.6 / 114.8), (2, 74.1 / 98.0), (3, 74.1 / 98.0)])
def test_the_loss_grows_with_the_part_of_a_server_that_others_hold(servers: int, worst: float) -> None:
    for others, rest, part in ((0, 4, 0.0), (1, 4, 0.25), (4, 4, 1.0), (9, 4, 1.0), (1, 1, 1.0), (1, 0, 0.0)):
        assert interference.speed(others, rest, servers=servers) == pytest.approx(1 - part * (1 - worst))
