"""Fair share in simulations: off by default, and without effect for a single tenant."""

from __future__ import annotations

import pytest

from cotenant import plugins
from cotenant.core.model.job import Request, Role
from cotenant.core.model.tenancy import Tenant
from cotenant.simulator import simulate
from cotenant.simulator.traces import Trace, TraceJob

QUEUES = [plugin.name for plugin in plugins.discover("cotenant.queue_policies")]
ON = {"simulator": {"fair_share": "tenants"}}


def trace_of(*tenants: str, gpus: int = 1) -> Trace:
    """Jobs of several tenants, queued one after another, with different run times."""
    roles = (Role("worker", 1, Request(gpu_milli=1000 * gpus)),)
    jobs = (
        TraceJob(f"{number:03}", float(number), 100.0 + 37 * (number % 11), roles, tenant=tenant)
        for number, tenant in enumerate(tenants)
    )
    return Trace("made", "made", tuple(jobs))


def waits(trace: Trace, tenant: str, **more: object) -> float:
    """Return the mean wait of a tenant's jobs."""
    result = simulate(trace, "1x4", queue="las", **more)  # type: ignore[arg-type]  # what a simulation takes
    own = [job.queue_seconds for job in result.outcomes if job.tenant == tenant]
    return sum(own) / len(own)


@pytest.mark.parametrize("queue", QUEUES)
def test_a_tenant_alone_starts_all_jobs_when_it_would_without_fair_shares(queue: str) -> None:
    trace = trace_of(*["a"] * 40)
    without, shared = simulate(trace, "2x4", queue=queue), simulate(trace, "2x4", queue=queue, options=ON)
    assert without.outcomes == shared.outcomes


def test_a_small_tenant_waits_less_and_its_weight_counts() -> None:
    trace = trace_of(*["large"] * 60, *["small"] * 8)
    alone, shared = waits(trace, "small"), waits(trace, "small", options=ON)
    weighed = waits(trace, "small", options=ON, tenants=[Tenant("small", weight=3.0)])
    assert weighed < shared < alone / 2


def test_waits_for_a_fair_share_count_separately() -> None:
    trace = trace_of(*["large"] * 60, *["small"] * 8)
    without, shared = (simulate(trace, "1x4", options=options).waits for options in ({}, ON))
    assert without["fair_share"] == 0
    assert shared["fair_share"] > 0
