"""The resources that a pre-run asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import JobSpec, Locality, Request, Role
from cotenant.core.model.pre_run import pre_run_of

requests = st.builds(
    Request,
    gpu_milli=st.sampled_from([0, 250, 500, 1000, 2000, 4000, 8000]),
    cores=st.none() | st.integers(1, 64),
    memory_bytes=st.integers(0, 2**40),
)
roles = st.lists(st.builds(Role, replicas=st.integers(1, 16), request=requests), min_size=1, max_size=3).map(tuple)


@given(roles)
def test_it_is_one_replica_on_one_gpu_at_most_and_never_more_than_its_job(roles: tuple[Role, ...]) -> None:
    spec = JobSpec(roles=roles, locality=Locality.SERVER, pre_run_seconds=300, steps_total=9)
    one = pre_run_of(spec)
    assert (one.replicas, one.locality) == (1, None)
    assert one.gpu_milli <= min(1000, spec.gpu_milli)
    assert bool(one.gpu_milli) == bool(spec.gpu_milli)
    (role,) = one.roles
    whole = next(other for other in roles if other.name == role.name and other.command == role.command)
    assert whole
    assert (one.command, one.environment, one.steps_total) == (spec.command, spec.environment, 9)


def test_it_gets_the_cores_per_gpu_rounded_up_and_all_of_the_memory() -> None:
    worker = Role(replicas=2, request=Request(gpu_milli=8000, cores=20, memory_bytes=2**36))
    (role,) = pre_run_of(JobSpec(roles=(worker,))).roles
    assert role.request == Request(gpu_milli=1000, cores=3, memory_bytes=2**36)


def test_cores_that_the_allocator_decides_stay_its_to_decide() -> None:
    (role,) = pre_run_of(JobSpec(roles=(Role(request=Request(gpu_milli=2000)),))).roles
    assert role.request.cores is None


def test_servers_without_gpus_are_passed_over() -> None:
    server = Role("ps", 2, Request(cores=4))
    worker = Role("worker", 4, Request(gpu_milli=1000, cores=6), command=("train",))
    (role,) = pre_run_of(JobSpec(roles=(server, worker))).roles
    assert (role.name, role.replicas, role.request, role.command) == ("worker", 1, worker.request, ("train",))


def test_what_shares_a_gpu_gets_no_more_of_it() -> None:
    (role,) = pre_run_of(JobSpec(roles=(Role(replicas=4, request=Request(gpu_milli=500, cores=2)),))).roles
    assert role.request == Request(gpu_milli=500, cores=2)
