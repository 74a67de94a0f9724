from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin, node

from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import timestamp
from cotenant.core.model.job import JobSpec
from cotenant.security.validity import Validity
from cotenant.v1 import contention_service_pb2 as contention_pb
from cotenant.v1 import node_service_pb2 as nodes_pb
from cotenant.v1.policy_service_pb2 import Policy
from cotenant.v1.resources_pb2 import HEALTH_ACTION_QUARANTINE, Gpu, Inventory


@pytest.fixture
def nodes(standin: Standin) -> Standin:
    away = node("gpu-2", state=nodes_pb.NODE_STATE_AWAY, seen_time=timestamp(0.0))
    away.inventory.MergeFrom(Inventory(gpus=[Gpu(uuid="GPU-c", unhealthy_reason="XID 79")], not_enforced=["memory"]))
    standin.nodes.nodes = {"gpu-1": node("gpu-1"), "gpu-2": away}
    return standin


def test_nodes_are_listed_with_used_and_total_resources(shell: Shell, nodes: Standin) -> None:
    ended = shell("nodes")
    assert ended.code == ExitCode.DONE
    head, first, second = ended.out.splitlines()
    assert head.split() == ["NODE", "STATE", "GPUS", "CORES", "MEMORY", "MODEL", "JOBS", "NOTES"]
    assert first.split() == ["gpu-1", "ready", "1.5/2", "4/8", "3GiB/64GiB", "fake", "(declared)", "0"]
    assert "away" in second
    assert "1 GPUs unhealthy: XID 79; last seen" in second
    assert "gpu-2: not enforced: memory" in ended.err


def test_nodes_json_has_the_documented_keys(shell: Shell, nodes: Standin) -> None:
    first, second = shell("nodes", "--json").json
    assert (first["id"], first["state"], first["gpus"], first["gpus_used"]) == ("gpu-1", "ready", 2, 1.5)
    assert (first["gpus_declared"], first["gpu_models"], first["cores_used"]) == (2, ["fake"], 4)
    assert second["gpus_unhealthy"] == {"GPU-c": "XID 79"}


def test_a_node_is_shown_with_its_gpus_and_problems(shell: Shell, ill: Standin) -> None:
    begins, ends = datetime.now(UTC) - timedelta(days=350), datetime.now(UTC) + timedelta(days=14, hours=1)
    ill.nodes.nodes["gpu-1"].certificate.CopyFrom(Validity(begins, ends).to_wire())
    card = dict(line.split(maxsplit=1) for line in shell("nodes", "1").out.splitlines() if line.startswith(("G", "pr")))
    assert card["problem"].startswith("GPU-a: quarantine: XID 79: off the bus, since 1970")
    assert card["GPU"].startswith("GPU-b, fake (declared)")
    assert "certificate  expires in 14 days" in shell("nodes", "gpu-1").out
    assert "certificate expires in 14 days" in shell("nodes").out
    reported = shell("nodes", "gpu-1", "--json").json
    assert (reported["id"], [one["uuid"] for one in reported["gpu_list"]]) == ("gpu-1", ["GPU-a", "GPU-b"])
    assert reported["certificate"]["expire_time"] == ends.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert "not found" in shell("nodes", "gpu-7").err


def test_an_empty_node_list_is_noted_on_stderr(shell: Shell, standin: Standin) -> None:
    ended = shell("nodes")
    assert (ended.code, ended.out) == (ExitCode.DONE, "")
    assert "no node has registered yet" in ended.err


def test_a_node_is_drained_cordoned_and_uncordoned(shell: Shell, nodes: Standin) -> None:
    assert shell("drain", "gpu-1", "--reason", "new fan").out == "gpu-1 draining\n"
    assert nodes.nodes.nodes["gpu-1"].state_reason == "new fan"
    assert shell("uncordon", "1").out == "gpu-1 ready\n"
    assert shell("cordon", "--json", "gpu-1").json["state"] == "cordoned"


@pytest.fixture
def ill(nodes: Standin) -> Standin:
    nodes.nodes.nodes["gpu-1"].inventory.problems.add(
        check="xid", gpu_uuid="GPU-a", action=HEALTH_ACTION_QUARANTINE, reason="XID 79: off the bus", remedy="reboot",
        since=timestamp(1.0),
    )  # fmt: skip
    return nodes


def test_problems_are_noted_with_their_remedies(shell: Shell, ill: Standin) -> None:
    assert "gpu-1 GPU-a: quarantine: XID 79: off the bus; reboot" in shell("nodes").err
    [problem] = shell("nodes", "--json").json[0]["problems"]
    assert problem == {
        "check": "xid",
        "gpu_uuid": "GPU-a",
        "action": "quarantine",
        "reason": "XID 79: off the bus",
        "since": "1970-01-01T00:00:01.000Z",
        "remedy": "reboot",
    }


def test_a_gpu_is_released_by_a_part_of_its_uuid(shell: Shell, ill: Standin) -> None:
    done = shell("release", "gpu-1", "U-a")
    assert (done.err, done.out) == ("", "gpu-1 ready\n")
    assert shell("nodes", "--json").json[0]["problems"] == []
    unknown = shell("release", "gpu-1", "GPU-x")
    assert (unknown.code, "has no GPU 'GPU-x'; it has GPU-a, GPU-b" in unknown.err) == (ExitCode.USAGE, True)
    assert "matches 2 GPUs" in shell("release", "gpu-1", "GPU").err


def test_an_unknown_node_is_bad_input(shell: Shell, nodes: Standin) -> None:
    ended = shell("drain", "gpu-7")
    assert ended.code == ExitCode.USAGE
    assert "node 'gpu-7' not found" in ended.err
    assert "did you mean gpu-2 or gpu-1?" in ended.err


def test_an_ambiguous_node_is_rejected(shell: Shell, nodes: Standin) -> None:
    ended = shell("drain", "gpu")
    assert ended.code == ExitCode.USAGE
    assert "'gpu' matches 2 nodes" in ended.err


@pytest.fixture
def busy(nodes: Standin, spec: JobSpec) -> str:
    """A job that keeps 3.5 cores busy according to the last sample."""
    job = str(nodes.call(nodes.jobs.add, spec).id)
    nodes.call(nodes.jobs.run, job)
    attempt = contention_pb.AttemptSample(
        job_id=job, number=1, cores_used=3.5, gpu_utilisation_percent=87, rate_per_second=12.25
    )
    pressure = contention_pb.Pressure(some_avg10=20)
    nodes.contention.samples = [
        contention_pb.NodeSample(
            node_id="gpu-1", cpu=pressure, cpu_percent=55, memory_used_bytes=2**32, attempts=[attempt]
        )
    ]
    return job


def test_top_shows_busy_cores(shell: Shell, busy: str) -> None:
    ended = shell("top")
    assert ended.code == ExitCode.DONE
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[1] == ["gpu-1", "ready", "1.5/2", "4/8", "3.5", "55", "20", "4GiB/64GiB", "0"]
    assert lines[2][4] == "-"
    assert lines[5][:7] == [busy, "resnet", "1", "87", "4", "3.5", "12.2/s"]


def test_top_json_has_nodes_and_jobs(shell: Shell, busy: str) -> None:
    reported = shell("top", "--json").json
    assert reported["nodes"][0]["cores_busy"] == 3.5
    assert reported["nodes"][1]["cores_busy"] is None
    assert (reported["jobs"][0]["id"], reported["jobs"][0]["gpu_percent"]) == (busy, 87)


def test_policies_of_all_services_are_merged(shell: Shell, standin: Standin) -> None:
    standin.policies.policies = [
        Policy(group="cotenant.queue_policies", name="las", package="cotenant", version="0.1.0", healthy=True,
               active=True, summary="Least attained service first"),
        Policy(group="cotenant.predictors", name="broken", package="mine", version="2", error="no module named x"),
    ]  # fmt: skip
    ended = shell("policies")
    assert ended.code == ExitCode.DONE
    head, first, second = ended.out.splitlines()
    assert head.split()[:6] == ["GROUP", "NAME", "PACKAGE", "VERSION", "OK", "ACTIVE"]
    assert first.split()[:5] == ["predictors", "broken", "mine", "2", "no"]
    assert first.endswith("no module named x")
    assert second.split()[:6] == ["queue_policies", "las", "cotenant", "0.1.0", "yes", "*"]
    [only] = shell("policies", "--group", "queue_policies", "--json").json
    assert (only["name"], only["healthy"], only["active"]) == ("las", True, True)


def test_installed_policies_need_no_mesh(shell: Shell) -> None:
    ended = shell("--endpoint", "127.0.0.1:1", "policies", "--here", "--group", "queue_policies", "--json")
    assert {"fifo", "borda-mlfq"} <= {policy["name"] for policy in ended.json}
    assert not any(policy["active"] for policy in ended.json)
    wrong = shell("policies", "--here", "--group", "queue")
    assert wrong.code == 2
    assert "did you mean cotenant.queue_policies" in wrong.err


def test_without_a_mesh_installed_policies_are_listed(shell: Shell) -> None:
    ended = shell("--endpoint", "127.0.0.1:1", "policies", "--group", "queue_policies", "--json")
    assert ended.code == ExitCode.DONE
    assert {"fifo", "borda-mlfq"} <= {policy["name"] for policy in ended.json}
    assert not any(policy["active"] for policy in ended.json)
    assert "policies installed here, without active marks" in ended.err


def test_services_whose_policies_are_unavailable_are_noted(shell: Shell, standin: Standin) -> None:
    standin.policies.policies = [Policy(group="cotenant.queue_policies", name="las", healthy=True)]
    ended = shell("--endpoint", f"queue={standin.address},predictor=127.0.0.1:1", "policies", "--json")
    assert ended.code == ExitCode.DONE
    assert [policy["name"] for policy in ended.json] == ["las"]
    assert "cannot list policies of predictor" in ended.err


def test_a_service_without_an_address_is_reached_through_another(shell: Shell, standin: Standin) -> None:
    ended = shell("--endpoint", f"queue={standin.address},predictor=127.0.0.1:1", "nodes", "--json")
    assert ended.code == ExitCode.DONE
    ended = shell("--endpoint", "queue=127.0.0.1:1", "nodes")
    assert ended.code == ExitCode.UNREACHABLE


def test_whatif_shows_where_a_job_would_run(shell: Shell, standin: Standin) -> None:
    ended = shell("whatif", "--gpus", "1", "--", "python3", "train.py")
    assert ended.code == ExitCode.DONE
    assert ended.out.splitlines() == [
        "starts now     yes",
        "would preempt  old",
        "rank 0         gpu-1: cores 0-2,5; GPU-a",
    ]
    assert not standin.jobs.jobs


def test_whatif_needs_no_command_and_shows_a_remedy(shell: Shell, standin: Standin) -> None:
    [reported] = shell("whatif", "--gpus", "8", "--json").json
    assert (reported["starts_now"], reported["position"], reported["reason"]["code"]) == (False, 3, "CAPACITY")
    assert "needs 8 GPUs; 4 of 8 are free" in shell("whatif", "--gpus", "8").out
    assert shell("whatif", "--gpus", "8.5").code == ExitCode.USAGE


def test_ids_are_completed_from_the_mesh(
    shell: Shell, nodes: Standin, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = nodes.call(nodes.jobs.add, spec).id
    monkeypatch.setenv("_COTENANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cotenant show 00")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert completed(shell) == [job]
    monkeypatch.setenv("COMP_WORDS", "cotenant drain gpu")
    assert completed(shell) == ["gpu-1", "gpu-2"]
    monkeypatch.setenv("COMP_WORDS", "cotenant sub")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert completed(shell) == ["submit"]


def test_completion_is_empty_without_a_mesh(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_COTENANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cotenant show 00")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert completed(shell) == []


def completed(shell: Shell) -> list[str]:
    """Return a shell's completions."""
    with pytest.raises(SystemExit):
        shell("unused")
    out, _ = shell._capture.readouterr()
    return out.split()
