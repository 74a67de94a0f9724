from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.worlds import shapes, specs

from cotenant.core.estimates import UNKNOWN
from cotenant.core.jobs import JobSpec, Request, Role
from cotenant.core.nodes import NodeShape
from cotenant.policies.proportional import Proportional
from cotenant.policies.requested import Requested


def spec(*roles: Role) -> JobSpec:
    return JobSpec(roles=roles)


def worker(gpu_milli: int, replicas: int = 1, cores: int | None = None, gpu_type: str = "") -> Role:
    return Role("worker", replicas, Request(gpu_milli, cores, gpu_type=gpu_type))


def proportional(job: JobSpec, *shapes: NodeShape) -> tuple[int, ...]:
    return Proportional().size(job, UNKNOWN, shapes).cores


def test_requested_gives_what_was_asked_and_one_where_nothing_was() -> None:
    sizing = Requested().size(spec(worker(1000), worker(1000, cores=5)), UNKNOWN, [])
    assert sizing.cores == (1, 5)
    assert sizing.reason == "1 core per replica that asked for none"
    assert Requested().size(spec(worker(1000, cores=5)), UNKNOWN, []).reason == "as requested"


def test_a_replica_gets_its_gpus_share_of_the_nodes_cores() -> None:
    node = NodeShape(gpus=8, cores=24)
    assert proportional(spec(worker(1000)), node) == (3,)
    assert proportional(spec(worker(8000)), node) == (24,)
    assert proportional(spec(worker(500)), NodeShape(8, 64, shareable=True)) == (4,)
    assert proportional(spec(worker(100)), NodeShape(8, 24, shareable=True)) == (1,)


def test_only_shapes_that_could_hold_the_replica_count_and_of_those_the_least_generous() -> None:
    fat, thin, other = (
        NodeShape(1, 16, gpu_type="A100"),
        NodeShape(8, 24, gpu_type="A100"),
        NodeShape(4, 4, gpu_type="T4"),
    )
    assert proportional(spec(worker(1000, gpu_type="a100")), fat, thin, other) == (3,)
    assert proportional(spec(worker(1000, gpu_type="t4")), fat, thin, other) == (1,)
    assert proportional(spec(worker(8000)), fat, thin) == (24,)


def test_without_a_shape_that_could_hold_it_a_replica_gets_one() -> None:
    assert proportional(spec(worker(1000))) == (1,)
    assert proportional(spec(worker(9000)), NodeShape(8, 24)) == (1,)


def test_cpu_jobs_and_explicit_numbers_are_left_alone() -> None:
    assert proportional(spec(Role("cpu"), worker(1000, cores=11), worker(0, cores=0)), NodeShape(8, 24)) == (1, 11, 0)


def test_workers_leave_cores_to_the_other_roles_where_the_cluster_has_no_more() -> None:
    job = spec(worker(1000, replicas=8), Role("ps", 2, Request(cores=4)))
    assert proportional(job, NodeShape(8, 24)) == (2, 4)
    assert proportional(job, NodeShape(8, 24, count=2)) == (3, 4)
    assert "the cluster has no more" in Proportional().size(job, UNKNOWN, [NodeShape(8, 24)]).reason


@given(specs(), st.lists(shapes(), min_size=1, max_size=3))
def test_a_job_that_could_have_its_cores_is_never_given_more_than_the_cluster_has(
    job: JobSpec, made_of: list[NodeShape]
) -> None:
    least = sum(role.replicas * (1 if role.request.cores is None else role.request.cores) for role in job.roles)
    total = sum(shape.cores * shape.count for shape in made_of)
    given_ = sum(role.replicas * each for role, each in zip(job.roles, proportional(job, *made_of), strict=True))
    if least <= total:
        assert given_ <= total
