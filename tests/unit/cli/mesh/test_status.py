"""`cotenant status`: the state and problems of the whole mesh."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin, node

from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import timestamp
from cotenant.core.model.job import JobSpec
from cotenant.security.validity import Validity
from cotenant.v1 import node_service_pb2 as nodes_pb
from cotenant.v1.process_service_pb2 import GetProcessResponse, Process, Replica, StoreMember

NOW = datetime.now(UTC)
E1, E2, E3 = "etcd-1:2379", "etcd-2:2379", "etcd-3:2379"


@pytest.fixture
def mesh(standin: Standin) -> Standin:
    """One process with all services, a store with three members, and a node."""
    members = [StoreMember(endpoint=one, leads=one == E2, version="3.5", size_bytes=3 * 2**20) for one in (E1, E2, E3)]
    standin.replicas.reported = GetProcessResponse(process=Process(version="1.0"), store_members=members)
    standin.nodes.nodes = {"gpu-1": node("gpu-1")}
    standin.nodes.nodes["gpu-1"].inventory.agent_version = "1.0"
    return standin


def problems(shell: Shell, *flags: str) -> list[tuple[str, str]]:
    reported = shell(*flags, "status", "--json").json
    assert reported["well"] == (not reported["problems"])
    assert all(one["remedy"] for one in reported["problems"])
    return [(one["where"], one["what"]) for one in reported["problems"]]


def ill(mesh: Standin, *endpoints: str, problem: str = "no answer within 1 s") -> None:
    for one in mesh.replicas.reported.store_members:
        if one.endpoint in endpoints:
            one.problem, one.leads = problem, False
            one.ClearField("version")


def test_a_healthy_mesh(shell: Shell, mesh: Standin, spec: JobSpec) -> None:
    mesh.call(mesh.jobs.add, spec)
    ended = shell("status")
    assert (ended.code, ended.err) == (ExitCode.DONE, "")
    assert ended.out.splitlines() == [
        "queue       1 of 1 serving",
        "placement   1 of 1 serving",
        "predictor   1 of 1 serving",
        "contention  1 of 1 serving",
        "store       3 of 3 members up, leader etcd-2:2379, 3MiB",
        "nodes       1 ready; 1.5 of 2 GPUs and 4 of 8 cores in use",
        "jobs        1 queued",
        "release     1.0",
        "problems    none",
    ]
    reported = shell("status", "--json").json
    assert (reported["well"], reported["nodes"], reported["jobs"]) == (True, {"ready": 1}, {"queued": 1})
    assert [one["endpoint"] for one in reported["store"]] == [E1, E2, E3]
    assert {(one["service"], one["state"], one["release"]) for one in reported["processes"]} == {
        (service, "serves", "1.0") for service in ("queue", "placement", "predictor", "contention")
    }


def test_an_unreachable_store_member_is_reported_with_its_consequence(shell: Shell, mesh: Standin) -> None:
    ill(mesh, E3)
    ended = shell("status")
    assert ended.code == ExitCode.FAILED
    assert "store       2 of 3 members" in ended.out
    assert ended.out.splitlines()[-2:] == [
        "problem     store etcd-3:2379: no answer within 1 s",
        "            bring it back: if one more fails, nothing can be written",
    ]
    ill(mesh, E1, E3)
    (first, *others) = problems(shell)
    assert first == ("store", "2 of 3 members are unreachable, so nothing can be written")
    assert len(others) == 2
    mesh.replicas.reported.store_members[1].problem = "it sees no leader"  # for want of the others
    assert len(problems(shell)) == 3
    assert "store       1 of 3 members" in shell("status").out


def test_a_member_that_some_processes_reach_is_up(shell: Shell, mesh: Standin) -> None:
    other = Standin()
    other.replicas.reported.CopyFrom(mesh.replicas.reported)
    ill(other, E1)
    other.start()
    try:
        both = "--endpoint", f"queue={mesh.address}|{other.address},placement={mesh.address}"
        assert problems(shell, *both) == [(f"store {E1}", f"unreachable for {other.address}")]
    finally:
        other.stop()


def replicas(mesh: Standin, **about: Any) -> None:
    mesh.replicas.reported.replicas.append(Replica(service="queue", address=mesh.address, **about))


def test_an_unreachable_process_and_a_service_without_a_leader(shell: Shell, mesh: Standin) -> None:
    replicas(mesh)
    found = dict(problems(shell, "--endpoint", f"queue={mesh.address}|127.0.0.1:1,placement={mesh.address}"))
    assert found["queue"] == "it has no leader"
    assert "connect" in found["queue 127.0.0.1:1"].lower()
    mesh.replicas.reported.replicas[0].leads = True
    mesh.replicas.reported.replicas[0].leader_address = mesh.address
    assert "queue" not in dict(problems(shell))
    assert f"1 of 1 serving, leader {mesh.address}" in shell("status").out


def test_an_unreachable_mesh_has_its_own_exit_code(shell: Shell) -> None:
    ended = shell("--endpoint", "127.0.0.1:1", "status", "--json")
    assert ended.code == ExitCode.UNREACHABLE
    assert (ended.json["nodes"], ended.json["jobs"], ended.json["well"]) == (None, None, False)


def test_a_wrong_token_is_reported(shell: Shell, mesh: Standin) -> None:
    for command in ("status", "replicas"):
        ended = shell("--token", "guessed", command)
        assert (ended.code, ended.out) == (ExitCode.USAGE, "")
        assert "token" in ended.err


def test_a_node_whose_jobs_share_one_user_is_shown(shell: Shell, mesh: Standin) -> None:
    inventory = mesh.nodes.nodes["gpu-1"].inventory
    inventory.shared_user = "bob"
    inventory.not_enforced.extend(["no memory limits", "every job runs as 'bob', the user of the agent: all is shared"])
    ended = shell("status")
    assert ended.code == ExitCode.DONE, "that is no problem to be solved"
    assert "identity    gpu-1: every job runs as 'bob', the user of the agent: all is shared" in ended.out
    assert "no memory limits" not in ended.out


def test_a_node_whose_agent_is_away_is_reported(shell: Shell, mesh: Standin) -> None:
    mesh.nodes.nodes["gpu-2"] = node("gpu-2", state=nodes_pb.NODE_STATE_AWAY, seen_time=timestamp(time.time() - 90))
    mesh.nodes.nodes["gpu-3"] = node("gpu-3", state=nodes_pb.NODE_STATE_CORDONED)  # as somebody wanted
    ((where, what),) = problems(shell)
    assert (where, what.startswith("its agent is away for 1m3")) == ("gpu-2", True)


def test_a_process_of_another_release_is_reported(shell: Shell, mesh: Standin) -> None:
    mesh.nodes.nodes["gpu-1"].inventory.agent_version = "0.9"
    assert problems(shell) == [("gpu-1", "runs release 0.9, but most services run 1.0")]


def test_expiring_certificates_are_reported_in_time(shell: Shell, mesh: Standin) -> None:
    def lasting(days: float) -> Any:
        return Validity(NOW - timedelta(days=300), NOW + timedelta(days=days, hours=1)).to_wire()

    mesh.nodes.nodes["gpu-1"].certificate.CopyFrom(lasting(60))
    mesh.replicas.reported.process.certificate.CopyFrom(lasting(90))
    ended = shell("status")
    assert ended.code == ExitCode.DONE
    assert "certificates  first expires in 60 days" in ended.out
    mesh.nodes.nodes["gpu-1"].certificate.CopyFrom(lasting(20))
    mesh.replicas.reported.process.certificate.CopyFrom(lasting(-1))
    found = problems(shell)
    assert found[0][1].startswith("its certificate expired on ")
    assert found[-1] == ("gpu-1", "its certificate expires in 20 days")
    remedies = [one["remedy"] for one in shell("status", "--json").json["problems"]]
    assert remedies[-1].startswith("`cotenant certs rotate agent/gpu-1`")


def test_a_process_of_an_older_release_serves(shell: Shell, mesh: Standin) -> None:
    mesh.replicas.reported = GetProcessResponse()
    ended = shell("status", "--json")
    assert ended.code == ExitCode.DONE
    assert {one["release"] for one in ended.json["processes"]} == {None}


def test_a_problem_of_a_process_is_reported_once(shell: Shell, mesh: Standin) -> None:
    mesh.replicas.reported.process.problems.add(reason="it is almost out of file descriptors", remedy="raise its limit")
    ((where, what),) = problems(shell)
    assert (where, what) == (
        f"contention, placement, predictor, queue {mesh.address}",
        "it is almost out of file descriptors",
    )
