from __future__ import annotations

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import seconds
from cotenant.core.model.job import JobSpec


@pytest.fixture
def job(standin: Standin, spec: JobSpec) -> str:
    return str(standin.call(standin.jobs.add, spec).id)


def test_duplicate_ids_cancel_a_job_once(shell: Shell, standin: Standin, job: str, spec: JobSpec) -> None:
    other = standin.call(standin.jobs.add, spec).id
    ended = shell("cancel", job, other, job[-4:])
    assert (ended.code, ended.out.splitlines()) == (ExitCode.DONE, [f"{job} cancelled", f"{other} cancelled"])


def test_cancelling_a_running_job_reports_that_it_stops_first(
    shell: Shell, standin: Standin, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.call(standin.jobs.run, job)
    monkeypatch.setattr(standin.jobs, "move", lambda job_id, phase: None)
    assert shell("cancel", job).out == f"{job} stopping, then cancelled: running on gpu-1\n"
    assert shell("suspend", job).out == f"{job} stopping, then suspended: running on gpu-1\n"


def test_an_ambiguous_id_cancels_nothing(shell: Shell, standin: Standin, job: str) -> None:
    ended = shell("cancel", job, "nowhere")
    assert ended.code == ExitCode.USAGE
    assert shell("show", "--json", job).json["phase"] == "queued"


def test_other_jobs_are_changed_and_printed_when_one_is_refused(
    shell: Shell, standin: Standin, job: str, spec: JobSpec
) -> None:
    ended_jobs = [standin.call(standin.jobs.add, spec).id for _ in range(2)]
    for one in ended_jobs:
        shell("cancel", one)
    ended = shell("suspend", ended_jobs[0], job, ended_jobs[1])
    assert (ended.code, ended.out) == (ExitCode.FAILED, f"{job} suspended\n")
    assert "2 jobs were not changed" in ended.err
    assert f"{ended_jobs[0]}: JOB_ENDED" in ended.err


def test_a_job_is_suspended_and_resumed(shell: Shell, job: str) -> None:
    assert shell("suspend", job).out == f"{job} suspended\n"
    assert shell("resume", job).out.startswith(f"{job} queued")
    assert shell("suspend", "--json", job).json[0]["phase"] == "suspended"


def test_a_refusal_of_the_queue_fails_with_its_reason(shell: Shell, job: str) -> None:
    shell("cancel", job)
    ended = shell("suspend", job)
    assert ended.code == ExitCode.FAILED
    assert ended.err.startswith(f"error: JOB_ENDED: job {job} has ended")


def test_an_update_changes_only_the_given_fields(shell: Shell, standin: Standin, job: str) -> None:
    ended = shell("update", job, "--priority", "5", "--deadline", "2030-01-01T00:00:00Z", "--not-preemptible")
    assert ended.code == ExitCode.DONE
    request = standin.jobs.asked[-1]
    assert list(request.update_mask.paths) == ["spec.priority", "spec.deadline", "spec.preemptible"]
    spec = standin.jobs.jobs[job].spec
    assert (spec.priority, spec.preemptible, seconds(spec.deadline), spec.name) == (
        5,
        False,
        1_893_456_000,
        "resnet",
    )


def test_an_update_can_remove_a_deadline_and_a_label(shell: Shell, standin: Standin, job: str) -> None:
    shell("update", job, "--deadline", "2h", "--label", "team=a")
    shell("update", job, "--deadline", "none", "--label", "project=", "--label", "team=b")
    spec = standin.jobs.jobs[job].spec
    assert not spec.HasField("deadline")
    assert dict(spec.labels) == {"team": "b"}


def test_an_update_changes_the_objectives_of_a_service(shell: Shell, standin: Standin, job: str) -> None:
    assert shell("update", job, "--arrivals", "900", "--latency", "50ms").code == ExitCode.DONE
    request = standin.jobs.asked[-1]
    assert list(request.update_mask.paths) == ["spec.qos.latency_seconds", "spec.qos.arrivals_per_second"]
    assert (request.job.spec.qos.latency_seconds, request.job.spec.qos.arrivals_per_second) == (0.05, 900.0)


@pytest.mark.parametrize(
    "arguments", [(), ("--deadline", "soon"), ("--priority", "99999999"), ("--arrivals", "many"), ("--latency", "soon")]
)
def test_an_empty_or_invalid_update_is_bad_usage(shell: Shell, job: str, arguments: tuple[str, ...]) -> None:
    assert shell("update", job, *arguments).code == ExitCode.USAGE


def test_a_running_job_is_moved_by_its_attempt(shell: Shell, standin: Standin, job: str) -> None:
    standin.call(standin.jobs.run, job)
    ended = shell("move", job, "--reason", "node 7 smells", "--avoid", "90m")
    assert (ended.code, ended.out) == (ExitCode.DONE, f"{job} migrating: running on gpu-1\n")
    asked = standin.jobs.asked[-1]
    assert (asked.number, asked.reason, seconds(asked.avoid)) == (1, "node 7 smells", 5400.0)


def test_a_job_that_does_not_run_is_not_moved(shell: Shell, standin: Standin, job: str) -> None:
    ended = shell("move", job)
    assert ended.code == ExitCode.FAILED
    assert "attempt 1" in ended.err
    assert shell("move", job, "--avoid", "soon").code == ExitCode.USAGE
