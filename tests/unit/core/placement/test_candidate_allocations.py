from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import Candidate
from cotenant.core.model.job import JobKind, JobSpec, Qos, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.candidate_allocations import CANDIDATES_MAX, largest_role, standard_candidates

SHAPES = [NodeShape(gpus=8, cores=64, count=4), NodeShape(gpus=4, cores=16, count=2)]
REQUESTS = st.builds(Request, st.sampled_from((0, 500, 1000, 2000, 8000)), st.none() | st.integers(1, 40))
ROLES = st.lists(
    st.builds(Role, st.sampled_from(("worker", "ps")), st.integers(1, 16), REQUESTS), min_size=1, max_size=2
)
SPECS = st.builds(
    JobSpec,
    kind=st.sampled_from(JobKind),
    roles=ROLES.map(tuple),
    qos=st.sampled_from((Qos(), Qos(arrivals_per_second=10.0))),
)


def gang(replicas: int = 1, gpu_milli: int = 1000, cores: int | None = 4) -> JobSpec:
    return JobSpec(roles=(Role("worker", replicas, Request(gpu_milli, cores)),))


@given(SPECS, st.sampled_from(([], SHAPES)), st.none() | st.integers(1, 64))
def test_few_are_worth_judging_each_once_and_the_jobs_own_first(
    spec: JobSpec, shapes: list[NodeShape], useful: int | None
) -> None:
    worth = standard_candidates(spec, shapes, useful)
    assert 1 <= len(worth) == len(set(worth)) <= CANDIDATES_MAX
    own, request = worth[0], largest_role(spec).request
    assert own.gpu_milli == request.gpu_milli
    assert request.cores is None or own.cores == request.cores
    for one in worth:
        assert one.nodes >= 1
        assert one.cores >= (own.cores > 0)
        assert one.workers >= 0
        assert (one.servers > 0) == (own.servers > 0)


@given(SPECS)
def test_nothing_is_worth_judging_that_no_cluster_of_these_nodes_holds(spec: JobSpec) -> None:
    own, *others = standard_candidates(spec, SHAPES)
    assert all(one.nodes <= max(6, own.nodes) or one.workers == spec.replicas for one in others)
    assert all(one.cores <= max(64, own.cores) for one in others)


def test_a_gang_is_asked_about_on_more_nodes_and_other_cores() -> None:
    worth = standard_candidates(gang(replicas=8), SHAPES)
    assert [(one.nodes, one.cores) for one in worth] == [(1, 4), (2, 4), (4, 4), (1, 8), (1, 2), (1, 16), (1, 1)]


def test_cores_left_open_stand_around_what_is_useful_or_around_a_share_of_the_node() -> None:
    assert [one.cores for one in standard_candidates(gang(cores=None), SHAPES, 6)] == [6, 12, 3, 24, 2, 1]
    assert [one.cores for one in standard_candidates(gang(cores=None), SHAPES)] == [4, 8, 2, 16, 1]
    assert [one.cores for one in standard_candidates(gang(cores=None))] == [0]


def test_a_service_is_asked_about_with_other_numbers_of_replicas() -> None:
    spec = JobSpec(kind=JobKind.INFERENCE, roles=(Role("replica", 5, Request(1000, 4)),))
    assert [(one.workers, one.nodes) for one in standard_candidates(spec, SHAPES)][:3] == [(5, 1), (1, 1), (2, 1)]
    few = standard_candidates(spec, [NodeShape(gpus=2, cores=8)])
    assert [one.workers for one in few] == [5, 1, 2]


def test_a_team_is_asked_about_with_one_worker_or_server_more_or_less() -> None:
    roles = (Role("worker", 4, Request(1000, 4)), Role("ps", 1, Request(0, 2)))
    worth = standard_candidates(JobSpec(roles=roles), SHAPES)
    assert worth[0] == Candidate(4, 1000, 1, "", 4, 1, 2)
    assert [(one.workers, one.servers) for one in worth[:5]] == [(4, 1), (5, 1), (4, 2), (3, 1), (5, 2)]


def test_the_command_of_a_role_is_not_kept_with_its_candidates() -> None:
    word = "".join(["command-", "of-", "one-", "role"])
    standard_candidates(JobSpec(roles=(Role("worker", 7, Request(1000, 4), (word,)),)), SHAPES)
    assert not any(word in one.command for one in gc.get_objects() if isinstance(one, Role))
