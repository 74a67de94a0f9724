"""What pages get of jobs and nodes: small, and inert."""

from __future__ import annotations

import json

import pytest

from cotenant.client.errors import InvalidArgument
from cotenant.v1.job_pb2 import Attempt, AttemptState, AvoidedNode, Job, JobKind, JobPhase, JobSpec, Refusal, Role
from cotenant.v1.node_service_pb2 import Node, NodeState
from cotenant.v1.resources_pb2 import (
    Core,
    Gpu,
    GpuShare,
    Inventory,
    NodeAllocation,
    ResourceRequest,
    TaskAllocation,
)
from cotenant.web.actions import changed, read_wanted
from cotenant.web.node_fit import node_fits
from cotenant.web.rows import held, job_row, node_row, ranks, to_json

TWO_GPUS = JobSpec(name="j", roles=[Role(replicas=2, resources=ResourceRequest(gpu_milli=2000, cores=4))])


def test_texts_of_others_are_inert() -> None:
    said = json.loads(to_json({"name": "\x1b[31m\u202etxt", "deep": [{"\u2066x": "a\nb"}], "rate": float("inf")}))
    assert said == {"name": "^[[31m<U+202E>txt", "deep": [{"<U+2066>x": "a^Jb"}], "rate": None}


def test_a_row_says_where_a_job_runs_why_it_waits_or_how_it_ended() -> None:
    waiting = Job(
        id="a", spec=TWO_GPUS, phase=JobPhase.JOB_PHASE_QUEUED, refusal=Refusal(code="CAPACITY", detail="needs")
    )
    assert job_row(waiting) == {
        "id": "a", "name": "j", "phase": "queued", "gpus": 4, "cores": 8, "why": "needs", "code": "CAPACITY",
        "wait": "capacity",
    }  # fmt: skip
    allocations = [NodeAllocation(node_id=f"n{one}") for one in range(5)]
    attempt = Attempt(number=1, state=AttemptState.ATTEMPT_STATE_RUNNING, allocations=allocations)
    running = Job(id="a", phase=JobPhase.JOB_PHASE_RUNNING, attempt=attempt)
    assert job_row(running)["why"] == "n0, n1, n2 and 2 more"
    failed = Job(id="a", phase=JobPhase.JOB_PHASE_FAILED, phase_reason="rank 0 ended with status 3")
    assert job_row(failed)["why"] == "rank 0 ended with status 3"


def test_ranks_are_those_of_the_attempt_with_their_roles_if_there_are_several() -> None:
    def attempt(*roles: str) -> Attempt:
        tasks = [TaskAllocation(rank=rank, role=role) for rank, role in enumerate(roles)]
        parts = [NodeAllocation(node_id="b", tasks=tasks[1:]), NodeAllocation(node_id="a", tasks=tasks[:1])]
        return Attempt(allocations=parts)

    assert ranks(Job(attempt=attempt("worker", "worker"))) == [
        {"rank": 0, "role": "", "node": "a"}, {"rank": 1, "role": "", "node": "b"},
    ]  # fmt: skip
    assert [one["role"] for one in ranks(Job(attempt=attempt("ps", "worker")))] == ["ps", "worker"]
    assert ranks(Job()) == []


def test_a_node_is_shown_by_numa_node_with_what_its_jobs_hold() -> None:
    task = TaskAllocation(core_ids=[2], gpus=[GpuShare(uuid="g1", milli=500)])
    attempt = Attempt(state=AttemptState.ATTEMPT_STATE_RUNNING, allocations=[NodeAllocation(node_id="n", tasks=[task])])
    parts = held(Job(id="a", spec=TWO_GPUS, attempt=attempt))
    inventory = Inventory(
        cores=[Core(id=number, numa_node=number // 2) for number in range(4)],
        gpus=[Gpu(uuid="g0"), Gpu(uuid="g1", numa_node=1, unhealthy_reason="ECC")],
    )
    row = node_row(Node(id="n", inventory=inventory, state=NodeState.NODE_STATE_READY), parts.values())
    assert [part["cores"] for part in row["numa"]] == [[0, 1], [2, 3]]
    assert [[gpu["uuid"], gpu["ill"]] for part in row["numa"] for gpu in part["gpus"]] == [["g0", ""], ["g1", "ECC"]]
    assert row["jobs"] == [{"id": "a", "name": "j", "cores": [2], "gpus": [["g1", 500]]}]
    assert held(Job(id="a", attempt=Attempt(state=AttemptState.ATTEMPT_STATE_FAILED))) == {}


def node(name: str, *, gpus: int = 8, cores: int = 8, model: str = "A100", ill: str = "", **more: object) -> Node:
    inventory = Inventory(
        cores=[Core(id=number) for number in range(cores)],
        gpus=[Gpu(uuid=f"g{number}", model=model, unhealthy_reason=ill) for number in range(gpus)],
    )
    state = more.pop("state", NodeState.NODE_STATE_READY)
    return Node(id=name, inventory=inventory, state=state, **more)  # type: ignore[arg-type]  # fields of a test


def test_nodes_are_ruled_out_by_name_and_constraint() -> None:
    spec = JobSpec(roles=[Role(replicas=1, resources=ResourceRequest(gpu_milli=4000, cores=4, gpu_type="a100"))])
    job = Job(spec=spec, avoided_nodes=[AvoidedNode(node_id="avoided", reason="failed there")])
    nodes = [
        node("fits"),
        node("avoided"),
        node("cordoned", state=NodeState.NODE_STATE_CORDONED, state_reason="repair"),
        node("away", state=NodeState.NODE_STATE_AWAY),
        node("type", model="H100"),
        node("ill", ill="ECC"),
        node("small", gpus=2),
        node("cores", cores=2),
        node("full", used_gpu_milli=5000),
        node("busy", used_cores=6),
    ]
    assert {fit.node: (fit.constraint, fit.detail) for fit in node_fits(job, nodes)} == {
        "fits": ("", "a replica fits there"),
        "avoided": ("avoided", "failed there"),
        "cordoned": ("cordoned", "takes no new work: repair"),
        "away": ("away", "is disconnected"),
        "type": ("gpu type", "needs a100; has H100"),
        "ill": ("gpu type", "needs a100; has none"),
        "small": ("too small", "a replica needs 4 GPUs; it has 2"),
        "cores": ("too small", "a replica needs 4 cores; it has 2"),
        "full": ("full", "a replica needs 4 GPUs; 3 free"),
        "busy": ("full", "a replica needs 4 cores; 2 free"),
    }
    assert node_fits(job, nodes)[-1].node == "fits"


def test_a_what_if_changes_only_what_was_asked_and_drops_what_is_over() -> None:
    spec = JobSpec(name="j", roles=TWO_GPUS.roles, priority=3, notify=["https://h/…"], hold=True)
    new = changed(spec, {"gpus": 0.5, "priority": 9})
    assert (new.roles[0].resources.gpu_milli, new.roles[0].resources.cores, new.priority) == (500, 4, 9)
    assert not new.notify
    assert not new.hold
    assert spec.notify
    assert changed(spec, {"cores": 7}).roles[0].resources.cores == 7
    service = JobSpec(kind=JobKind.JOB_KIND_INFERENCE, roles=TWO_GPUS.roles)
    assert changed(service, {"gpus": 1}).kind == JobKind.JOB_KIND_INFERENCE
    training = JobSpec(kind=JobKind.JOB_KIND_TRAINING, roles=TWO_GPUS.roles)
    assert changed(training, {"gpus": 0}).kind == JobKind.JOB_KIND_UNSPECIFIED


def test_a_what_if_takes_numbers_only() -> None:
    assert read_wanted(b'{"gpus": 2, "cores": 1.5, "name": "x"}') == {"gpus": 2, "cores": 1.5}
    for body in (b"", b"[]", b"\xff", b"[" * 100_000, b"1" * 10_000):
        with pytest.raises(InvalidArgument, match="a JSON object"):
            read_wanted(body)
    with pytest.raises(InvalidArgument, match=r"gpus, cores, priority: must be a number"):
        read_wanted(b'{"gpus": NaN, "cores": true, "priority": 1e9}')
