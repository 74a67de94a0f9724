"""A job with an image is placed where containers run, under every placement policy, and a refusal says so."""

from __future__ import annotations

import numpy as np
import pytest

from cotenant import plugins
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import Container, JobSpec, Request, Role
from cotenant.core.model.node import Inventory, NodeShape, shape_of
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement import constraints
from cotenant.core.placement.container_nodes import RunsContainers
from cotenant.core.placement.job_constraints import constraints_by
from cotenant.core.policy.cluster_view import EmptyClusterView, UsesClusterView
from cotenant.policies.count import Count

FOUND = plugins.discover("cotenant.placement_policies")
IN_CONTAINER = constraints_by(JobSpec(container=Container("dir:/images/root")))
RNG = np.random.default_rng(0)


def ledger_of(*containers: bool) -> Ledger:
    return Ledger([NodeShape(gpus=4, cores=8, containers=able) for able in containers])


def gang(replicas: int = 1) -> Gang:
    return Gang("job", (Part("worker", replicas, Demand(gpu_milli=1000, cores=1)),), constraints=IN_CONTAINER)


def refused(ledger: Ledger, replicas: int = 1) -> Refusal:
    answer = constraints.place(Count(), gang(replicas), ledger, RNG)
    assert isinstance(answer, Refusal)
    return answer


@pytest.mark.parametrize("plugin", FOUND, ids=[plugin.name for plugin in FOUND])
def test_a_job_with_an_image_is_on_nodes_with_a_runtime(plugin: plugins.Plugin) -> None:
    policy = plugin.make()
    if isinstance(policy, UsesClusterView):
        policy.begin_cycle(EmptyClusterView())
    ledger = ledger_of(False, False, True, False)
    offer = constraints.place(policy, gang(2), ledger, RNG)
    assert not isinstance(offer, Refusal)
    assert {share.node for share in offer} == {2}
    assert ledger.open.all()  # as before


def test_a_job_without_an_image_has_no_such_constraint() -> None:
    assert not any(isinstance(one, RunsContainers) for one in constraints_by(JobSpec()))


def test_without_any_runtime_the_refusal_says_so() -> None:
    answer = refused(ledger_of(False, False))
    assert answer.code is Code.NEVER_FITS
    assert "runs in a container; 2 servers with room have no container runtime" in answer.detail
    assert "container runtime is installed" in answer.remedy


def test_a_refusal_counts_the_nodes_without_a_runtime() -> None:
    answer = refused(ledger_of(True, False), replicas=8)
    assert answer.detail.endswith("1 server has no container runtime for its image")


def test_a_node_tells_its_runtime() -> None:
    assert shape_of(Inventory(container_runtime="crun 1.8.1")).containers
    assert not shape_of(Inventory()).containers


def test_a_job_with_an_image_and_gpus_is_where_containers_get_them() -> None:
    on_gpus = constraints_by(
        JobSpec(container=Container("dir:/images/root"), roles=(Role(request=Request(gpu_milli=1000)),))
    )
    wanted = Gang("job", (Part("worker", 1, Demand(gpu_milli=1000, cores=1)),), constraints=on_gpus)
    able = NodeShape(gpus=4, cores=8)
    unable = NodeShape(gpus=4, cores=8, container_gpus=False)
    offer = constraints.place(Count(), wanted, Ledger([unable, able]), RNG)
    assert not isinstance(offer, Refusal)
    assert {share.node for share in offer} == {1}
    refusal = constraints.place(Count(), wanted, Ledger([unable]), RNG)
    assert isinstance(refusal, Refusal)
    assert "runs in a container; 1 server with room gives containers no GPUs" in refusal.detail
    assert "nvidia-ctk cdi generate" in refusal.remedy
    assert not isinstance(constraints.place(Count(), gang(), Ledger([unable]), RNG), Refusal)  # asks for no GPU inside


def test_the_shape_of_a_node_says_whether_its_containers_get_gpus() -> None:
    assert shape_of(Inventory(container_runtime="crun 1.8")).container_gpus
    assert not shape_of(Inventory(container_runtime="crun 1.8", container_gpus_missing="no CDI spec")).container_gpus
