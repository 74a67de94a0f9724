from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.cli.conftest import COTENANT, Shell
from tests.unit.cli.standin import CREATED, Standin, node

from cotenant.cli.jobs.job_file import read_jobs
from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobKind, JobSpec, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import ATTEMPT_STATE_LOST, Attempt, Job, Progress
from cotenant.v1.job_pb2 import JobSpec as WireSpec
from cotenant.v1.predictor_service_pb2 import CandidateEstimate, Estimate, LatencyEstimate


@pytest.fixture
def jobs(standin: Standin, spec: JobSpec) -> list[str]:
    """A queued job, a running job and a finished job."""
    ids = [standin.call(standin.jobs.add, replace(spec, name=name)).id for name in ("waits", "runs", "ended")]
    standin.call(standin.jobs.run, ids[1])
    standin.call(standin.jobs.run, ids[2])
    standin.call(standin.jobs.finish, ids[2])
    return ids


def test_live_jobs_are_listed_newest_first(shell: Shell, jobs: list[str]) -> None:
    ended = shell("jobs")
    assert ended.code == ExitCode.DONE
    head, *rows = ended.out.splitlines()
    assert head.split()[:7] == ["ID", "NAME", "PHASE", "GPUS", "CORES", "WAIT", "RUN"]
    assert [row.split()[:5] for row in rows] == [
        [jobs[1], "runs", "running", "1", "4"],
        [jobs[0], "waits", "queued", "1", "4"],
    ]
    assert rows[0].endswith("gpu-1")
    assert rows[1].endswith("CAPACITY")


def test_all_lists_jobs_that_have_ended(shell: Shell, jobs: list[str]) -> None:
    assert [row.split()[0] for row in shell("jobs", "--all").out.splitlines()[1:]] == jobs[::-1]
    assert [row.split()[1] for row in shell("jobs", "--phase", "succeeded").out.splitlines()[1:]] == ["ended"]


@pytest.mark.parametrize(
    ("option", "value", "names"),
    [
        ("--name", "runs", ["runs"]),
        ("--node", "gpu-1", ["runs"]),
        ("--label", "project=vision", ["runs", "waits"]),
        ("--label", "project=speech", []),
        ("--tenant", "nobody", []),
        ("--queue", "default", ["runs", "waits"]),
    ],
)
def test_filters_are_applied_by_the_queue(
    shell: Shell, jobs: list[str], option: str, value: str, names: list[str]
) -> None:
    assert [job["name"] for job in shell("jobs", "--json", option, value).json] == names


def test_json_has_the_documented_keys(shell: Shell, jobs: list[str]) -> None:
    [running, waiting] = shell("jobs", "--json").json
    assert running["nodes"] == ["gpu-1"]
    assert (running["phase"], running["tenant"], running["gpus"], running["cores"]) == ("running", "default", 1, 4)
    assert running["run_seconds"] >= 0
    assert running["reason"] is None
    assert waiting["wait_seconds"] == 0  # the stand-in's clock is ahead
    assert waiting["create_time"] == "2027-01-15T08:00:00.000Z"
    assert waiting["reason"] == {
        "code": "CAPACITY",
        "detail": "needs 1 GPU; 0 of 8 are free",
        "remedy": "a job ends",
        "numbers": {},
        "wait": "capacity",
        "locality": None,
        "since": None,
        "holds_seconds": None,
    }
    assert CREATED == 1_800_000_000


def test_more_jobs_than_a_page_are_counted(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    for _ in range(7):
        standin.call(standin.jobs.add, spec)
    ended = shell("jobs", "--limit", "3")
    assert len(ended.out.splitlines()) == 4
    assert "4 more" in ended.err


def test_a_limit_holds_with_all_too(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    for _ in range(3):
        standin.call(standin.jobs.add, spec)
    assert len(shell("jobs", "-a", "--limit", "1").out.splitlines()) == 2
    assert len(shell("jobs", "-a", "--limit", "1", "--json").json) == 1


def test_all_reads_every_page(shell: Shell, standin: Standin, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.cli.jobs.list_jobs.PAGE_SIZE_MAX", 2)
    for _ in range(7):
        standin.call(standin.jobs.add, spec)
    assert len(shell("jobs", "--all", "--json").json) == 7
    assert [request.page_token for request in standin.jobs.asked] == ["", "2", "4", "6"]


def test_an_empty_list_is_noted_on_stderr(shell: Shell, standin: Standin) -> None:
    ended = shell("jobs")
    assert (ended.code, ended.out) == (ExitCode.DONE, "")
    assert "no jobs" in ended.err


def test_a_wide_table_shows_kind_tenant_and_queue(shell: Shell, jobs: list[str]) -> None:
    assert shell("jobs", "--wide").out.splitlines()[1].split()[2:5] == ["training", "default", "default"]


def test_a_label_without_a_value_is_bad_usage(shell: Shell) -> None:
    assert shell("jobs", "--label", "project").code == ExitCode.USAGE


def test_an_unknown_phase_is_bad_usage(shell: Shell) -> None:
    ended = shell("jobs", "--phase", "sleeping")
    assert ended.code == ExitCode.USAGE
    assert "sleeping" in ended.err


def test_watch_prints_a_line_per_change(standin: Standin, jobs: list[str]) -> None:
    watching = subprocess.Popen(
        [*COTENANT, "jobs", "--watch", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    first = [json.loads(watching.stdout.readline())["name"] for _ in range(2)]
    standin.call(standin.jobs.move, jobs[0], Phase.CANCELLED)
    changed = json.loads(watching.stdout.readline())
    watching.terminate()
    watching.communicate(timeout=60)
    assert sorted(first) == ["runs", "waits"]
    assert (changed["name"], changed["phase"]) == ("waits", "cancelled")


def test_show_prints_everything_about_a_job(shell: Shell, jobs: list[str]) -> None:
    ended = shell("show", jobs[1])
    assert ended.code == ExitCode.DONE
    card = dict(line.split("  ", 1) for line in ended.out.splitlines())
    assert card["id"].strip() == jobs[1]
    assert card["rank 0"].strip() == "gpu-1: cores 0-2,5; GPU-a"
    assert "1 × (1 GPU, 4 cores)" in card["role worker"]


def test_show_marks_lent_cores_and_a_resize_in_progress(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    task = standin.jobs.jobs[jobs[1]].attempt.allocations[0].tasks[0]
    task.own_cores, task.target_cores = 3, 2
    assert "gpu-1: cores 0-2,5 (1 lent), resizing to 2 cores; GPU-a" in shell("show", jobs[1]).out
    (reported,) = shell("show", "--json", jobs[1]).json["attempt"]["allocations"][0]["tasks"]
    assert (reported["cores"], reported["lent_cores"], reported["target_cores"]) == ([0, 1, 2, 5], 1, 2)
    task.target_cores = 0
    assert "being changed" not in shell("show", jobs[1]).out


def test_show_explains_why_a_job_waits(shell: Shell, jobs: list[str]) -> None:
    ended = shell("show", jobs[0])
    assert "CAPACITY: needs 1 GPU; 0 of 8 are free" in ended.out
    assert "a job ends" in ended.out


def test_show_json_is_one_object(shell: Shell, jobs: list[str]) -> None:
    assert shell("show", "--json", jobs[2]).json["attempt"]["exit"]["code"] == 0


def test_show_writes_a_job_file_of_the_same_job(shell: Shell, standin: Standin) -> None:
    spec = JobSpec(
        name="x", kind=JobKind.CPU, roles=(Role("a", 2), Role("b", command=("b",))), command=("sh", "-c", "x\n")
    )
    job = standin.call(standin.jobs.add, spec)
    [draft] = read_jobs(shell("show", "--file", job.id).out, "x", now=0.0)
    assert draft.spec == spec


def test_a_job_is_found_by_a_prefix_or_suffix_of_its_id(shell: Shell, jobs: list[str]) -> None:
    assert shell("show", "--json", jobs[1][:8]).json["id"] == jobs[1]
    assert shell("show", "--json", jobs[1][-4:]).json["id"] == jobs[1]


def test_all_pages_are_searched_for_a_job(shell: Shell, jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.cli.name_lookup.PAGE_SIZE", 1)
    assert shell("show", "--json", jobs[0][-4:]).json["id"] == jobs[0]


def test_an_exact_id_does_not_list_all_jobs(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    shell("show", jobs[0])
    assert not standin.jobs.asked


def test_an_ambiguous_id_lists_the_matching_jobs(shell: Shell, jobs: list[str]) -> None:
    ended = shell("cancel", "0000")
    assert ended.code == ExitCode.USAGE
    assert "'0000' matches 3 jobs" in ended.err
    for job_id, phase in zip(jobs, ("queued", "running", "succeeded"), strict=True):
        assert f"{job_id}  {phase}" in ended.err


def test_an_unknown_job_is_bad_input(shell: Shell, jobs: list[str]) -> None:
    ended = shell("show", jobs[0][:-1] + "7")
    assert ended.code == ExitCode.USAGE
    assert "not found" in ended.err
    assert "did you mean" in ended.err


def test_explain_shows_position_events_and_sizing(shell: Shell, jobs: list[str]) -> None:
    ended = shell("explain", jobs[0])
    assert ended.code == ExitCode.DONE
    assert ended.out.startswith(f"{jobs[0]} waits because 8 GPUs are asked for and 5 are free\n")
    assert "2 of 7 waiting jobs, level 1, score 3250.5 by las" in ended.out
    assert "6 cores per replica, by proportional" in ended.out
    assert "taken in by default" in ended.out


def test_explain_json_has_the_same(shell: Shell, jobs: list[str]) -> None:
    reported = shell("explain", "--json", jobs[0]).json
    assert (reported["position"], reported["waiting"], reported["queue_policy"], reported["level"]) == (2, 7, "las", 1)
    assert reported["events"] == [
        {"time": "2027-01-15T08:00:00.000Z", "kind": "queued", "detail": "taken in by default"}
    ]
    assert reported["job"]["id"] == jobs[0]


KEYS = {
    "job": (
        "id name kind phase phase_reason tenant queue priority priority_class submitter labels secrets mounts "
        "notify notify_on python_environment replicas gpus cores "
        "memory_bytes scratch_bytes nodes create_time start_time end_time wait_seconds run_seconds deadline "
        "objectives submitted_objectives dependencies array reason attempt past_attempts progress failures "
        "launch_failures avoided_nodes retries preemptions migrations attained_gpu_seconds attained_core_seconds "
        "archived estimate"
    ),
    "reason": "code detail remedy numbers wait locality since holds_seconds",
    "attempt": (
        "number state pre_run assign_time start_time end_time message next_replicas stop_detail exit failure "
        "launch_failure allocations"
    ),
    "exit": "code signal out_of_memory rank node",
    "allocation": "node tasks",
    "task": "role rank cores gpus memory_bytes scratch_bytes reclaimable lent_cores target_cores",
    "explained": "job summary position waiting queue_policy level score votes sizing estimate wait"
    " forecast outlook ahead ahead_count ending events",
    "node": (
        "id state state_reason state_owner gpus gpus_used gpu_models gpus_declared gpus_unhealthy problems cores "
        "cores_used memory_bytes memory_used_bytes scratch_bytes scratch_used_bytes rack address attempts not_enforced "
        "shared_user container_runtime container_gpus_missing capabilities outer_job available_until agent_version "
        "certificate create_time seen_seconds silence_seconds heartbeat_seconds loop_lag clock_offset_seconds"
    ),
}


def test_json_keys_are_stable(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    standin.nodes.nodes = {"gpu-1": node("gpu-1")}
    waiting, ended = shell("show", "--json", jobs[0]).json, shell("show", "--json", jobs[2]).json
    allocation = ended["attempt"]["allocations"][0]
    reported = {
        "job": waiting,
        "reason": waiting["reason"],
        "attempt": ended["attempt"],
        "exit": ended["attempt"]["exit"],
        "allocation": allocation,
        "task": allocation["tasks"][0],
        "explained": shell("explain", "--json", jobs[0]).json,
        "node": shell("nodes", "--json").json[0],
    }
    assert {name: " ".join(view) for name, view in reported.items()} == KEYS


def test_progress_is_shown_with_the_remaining_time(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    progress = Progress(step=30, rate_per_second=2.5, loss=0.25)
    past = Attempt(number=1, state=ATTEMPT_STATE_LOST, message="its node was away")
    standin.jobs.jobs[jobs[1]].MergeFrom(Job(progress=progress, past_attempts=[past], spec=WireSpec(steps_total=100)))
    out = shell("show", jobs[1]).out
    assert "step 30 of 100, 2.5 per second, loss 0.25" in out
    assert "lost; its node was away" in out


def test_show_and_explain_include_the_estimate(shell: Shell, standin: Standin, jobs: list[str]) -> None:
    tails = LatencyEstimate(replicas=2, mean_max_seconds=0.02, p95_seconds=0.04, p99_seconds=0.05, replicas_needed=3)
    standin.jobs.estimates[jobs[0]] = Estimate(
        predictable=True,
        confidence=0.8,
        remaining=Duration(seconds=90),
        remaining_p10=Duration(seconds=60),
        remaining_p90=Duration(seconds=150),
        cores_useful=6,
        cores_useful_confidence=0.9,
        candidates=[CandidateEstimate(latency=tails)],
        source="history: 5 similar runs",
    )
    standin.jobs.estimates[jobs[1]] = Estimate(source="history: no similar job has succeeded yet")
    for command in ("show", "explain"):
        out = shell(command, jobs[0]).out
        assert "1m30s (1m00s to 2m30s), confidence 80 %" in out
        assert "6 per replica (θ), confidence 90 %" in out
        assert "95th percentile 40 ms, 99th 50 ms, for 2 replicas" in out
        assert "3 to meet the latency objective" in out
        assert "history: 5 similar runs" in out
        reported = shell(command, "--json", jobs[0]).json["estimate"]
        assert (reported["remaining_p90_seconds"], reported["candidates"][0]["latency"]["p99_seconds"]) == (150, 0.05)
        out = shell(command, jobs[1]).out
        assert re.search(r"^remaining +unknown$", out, re.MULTILINE)
        assert "no similar job has succeeded yet" in out
        assert shell(command, "--json", jobs[1]).json["estimate"]["remaining_seconds"] is None
    assert shell("show", "--json", jobs[2]).json["estimate"] is None


def test_times_and_order_are_asked_of_the_queue(shell: Shell, standin: Standin) -> None:
    ended = shell("jobs", "--since", "2030-01-01T00:00:00Z", "--until", "2030-01-02T00:00:00Z", "--sort=-priority,name")
    assert ended.code == ExitCode.DONE
    asked = standin.jobs.asked[-1]
    assert (asked.filter.created_since.seconds, asked.filter.created_before.seconds) == (1893456000, 1893542400)
    assert (asked.order_by, list(asked.filter.phases)) == ("priority desc,name", [])
    assert "--since must be a time such as 2d" in shell("jobs", "--since", "yesterday").err
    assert "--sort does not go with --watch" in shell("jobs", "--sort", "name", "--watch").err
