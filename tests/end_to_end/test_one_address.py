"""Separate processes, each of which answers every command: one address is enough."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tests.end_to_end.meshes import SERVICES, Separate
from tests.end_to_end.waiting import until

from cotenant.codec.errors import from_error
from cotenant.v1.job_pb2 import JobSpec
from cotenant.v1.job_service_pb2 import CreateJobRequest
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

PARTS = [service for service in SERVICES if service != "agent"]
GROUPS = {
    "cotenant.queue_policies",
    "cotenant.predictors",
    "cotenant.placement_policies",
    "cotenant.cpu_allocators",
    "cotenant.contention_policies",
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    made = Separate(tmp_path_factory.mktemp("one-address"))
    made.start(*SERVICES)
    try:
        until(lambda: "ready" in made.cli("nodes").out, "node")
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("entry", [PARTS[0], *(pytest.param(part, marks=pytest.mark.deep) for part in PARTS[1:])])
def test_each_service_answers_every_command(mesh: Separate, entry: str) -> None:
    def run(*words: str) -> str:
        return mesh.cli(*words, COTENANT_ENDPOINT=mesh.address(entry)).out

    reported = run("submit", "--gpus", "1", "--name", f"by-{entry}", "--wait", "--", "sh", "-c", "echo hello")
    assert reported.splitlines()[-1] == "hello"
    job_id = next(line.split()[0] for line in run("jobs", "--all").splitlines() if f"by-{entry}" in line)
    assert "hello" in run("logs", job_id)
    assert "Succeeded" in run("show", job_id).title()
    assert "assigned" in run("explain", job_id)
    assert "GPU" in run("whatif", "--gpus", "1", "--", "true")
    assert "ready" in run("nodes")
    assert "default" in run("tenants")
    assert "cores" in run("predict", "job", "--model", "m", "--gpus", "1", "--steps", "100").lower()
    for words in (["incidents"], ["top", "--once"], ["failures"]):
        run(*words)
    status = run("status")
    for service in PARTS:
        assert f"{service} " in status
    assert status.count("1 of 1 serving") == len(PARTS)
    processes = mesh.cli.json("replicas", "--endpoint", mesh.address(entry))
    assert sorted(one["service"] for one in processes) == sorted(PARTS)
    policies = mesh.cli.json("policies", "--endpoint", mesh.address(entry))
    assert {one["group"] for one in policies} == GROUPS
    assert {one["group"] for one in policies if one["active"]} == GROUPS


def test_the_other_services_stay_known_while_one_is_down(mesh: Separate) -> None:
    mesh.kill("predictor")
    try:
        ended = mesh.cli("status", "--endpoint", mesh.address("contention"), code=1)
        assert ended.out.count("1 of 1 serving") == 3
        assert "0 of 1 serving" in ended.out
        refused = mesh.cli("predict", "job", "--gpus", "1", "--endpoint", mesh.address("contention"), code=3)
        assert f"the predictor service at {mesh.address('predictor')} cannot be reached" in refused.err
    finally:
        mesh.start("predictor")


def test_a_stock_client_is_told_what_makes_its_request_large(mesh: Separate) -> None:
    token = (mesh.state_dir / "token").read_text().strip()
    request = CreateJobRequest(spec=JobSpec(environment={"DATA": "x" * 400_000}, command=["true"]))
    told = set()
    for entry in PARTS:
        with grpc.insecure_channel(mesh.address(entry)) as channel, pytest.raises(grpc.RpcError) as refused:
            JobServiceStub(channel).CreateJob(request, metadata=[("authorization", f"Bearer {token}")])
        told.add(from_error(refused.value).message)
    assert told == {
        "request: has 400,024 bytes; 327,680 are allowed at most; "
        "spec.environment: has 400,014 bytes, of 327,680 allowed for the whole request"
    }
