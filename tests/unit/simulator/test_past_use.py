"""Past use in simulations: a newcomer goes first, and a tenant that used the cluster is forgiven with time."""

from __future__ import annotations

import pytest

from cotenant.core.model.job import Request, Role
from cotenant.simulator import simulate
from cotenant.simulator.traces import Trace, TraceJob

DAY = 86_400.0
HALF_LIFE = 7 * DAY
ONE_GPU = (Role("worker", 1, Request(gpu_milli=1000)),)
COUNTED = {"simulator": {"fair_share": "tenants", "usage_half_life_seconds": str(HALF_LIFE)}}
NOT_COUNTED = {"simulator": {"fair_share": "tenants"}}


def job(name: str, tenant: str, at: float, seconds: float) -> TraceJob:
    return TraceJob(name, at, seconds, ONE_GPU, tenant=tenant)


def starts(idle_seconds: float, options: dict[str, dict[str, str]]) -> str:
    """Return the tenants of the first four, and of the last four, of eight jobs to start that wait together.

    The tenant `old` used all four GPUs for a week, then none for a while. When both submit, `old` is first.
    """
    week = [job(f"w{day}{gpu}", "old", day * DAY, DAY) for day in range(7) for gpu in range(4)]
    then = HALF_LIFE + idle_seconds
    rush = [job(f"full{gpu}", "other", then, 60.0) for gpu in range(4)]
    waiting = [job(f"{tenant}{number}", tenant, then + 1, 600.0) for tenant in ("old", "new") for number in range(4)]
    trace = Trace("made", "made", (*week, *rush, *waiting))
    found = {one.id: one for one in simulate(trace, "1x4", queue="fifo", options=options).outcomes}
    order = sorted(waiting, key=lambda one: (found[one.id].queue_seconds, waiting.index(one)))
    return " ".join(sorted(one.tenant for one in order[:4])) + " | " + " ".join(sorted(one.tenant for one in order[4:]))


def test_after_a_week_of_use_the_newcomer_goes_first() -> None:
    assert starts(0.0, COUNTED) == "new new new old | new old old old"


def test_without_a_half_life_both_are_equal_at_once() -> None:
    assert starts(0.0, NOT_COUNTED) == "new new old old | new new old old"


@pytest.mark.parametrize(
    ("half_lives", "order"), [(0.5, "new new new old | new old old old"), (3.0, "new new old old | new new old old")]
)
def test_use_is_forgotten_with_time(half_lives: float, order: str) -> None:
    assert starts(half_lives * HALF_LIFE, COUNTED) == order
