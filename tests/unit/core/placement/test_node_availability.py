"""A job with a time limit is placed on nodes that are available for that long, under every placement policy."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant import plugins
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement import constraints
from cotenant.core.placement.job_constraints import constraints_by
from cotenant.core.policy.cluster_view import EmptyClusterView, UsesClusterView
from cotenant.policies.count import Count

FOUND = plugins.discover("cotenant.placement_policies")
RNG = np.random.default_rng(0)


def ledger_of(*seconds_left: float) -> Ledger:
    ledger = Ledger([NodeShape(gpus=4, cores=8) for _ in seconds_left])
    ledger.seconds_left = np.array(seconds_left)
    return ledger


def gang(limit_seconds: float | None, replicas: int = 1) -> Gang:
    limits = constraints_by(JobSpec(time_limit_seconds=limit_seconds))
    return Gang("job", (Part("worker", replicas, Demand(gpu_milli=1000, cores=1)),), constraints=limits)


@pytest.mark.parametrize("plugin", FOUND, ids=[plugin.name for plugin in FOUND])
def test_a_job_is_on_nodes_that_are_available_for_long_enough(plugin: plugins.Plugin) -> None:
    policy = plugin.make()
    if isinstance(policy, UsesClusterView):
        policy.begin_cycle(EmptyClusterView())
    ledger = ledger_of(60.0, 3599.0, np.inf, 600.0)
    offer = constraints.place(policy, gang(3600.0, 2), ledger, RNG)
    assert not isinstance(offer, Refusal)
    assert {share.node for share in offer} == {2}
    assert ledger.open.all()  # as before


def test_a_job_without_a_limit_may_start_anywhere() -> None:
    assert not isinstance(constraints.place(Count(), gang(None), ledger_of(1.0), RNG), Refusal)


def test_a_refusal_tells_how_many_nodes_end_too_soon() -> None:
    answer = constraints.place(Count(), gang(3600.0), ledger_of(60.0, 600.0), RNG)
    assert isinstance(answer, Refusal)
    assert "has a time limit; 2 servers with room end before it would be over" in answer.detail
    assert "shorter time limit" in answer.remedy
    answer = constraints.place(Count(), gang(3600.0, 8), ledger_of(60.0, np.inf), RNG)
    assert isinstance(answer, Refusal)
    assert answer.detail.endswith("1 server ends before its time limit")
    assert answer.numbers["servers_ending_too_soon"] == 1
