from __future__ import annotations

from dataclasses import replace

from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import CREATED, TOKEN, Standin, allocation

from cotenant.cli.views import job_view
from cotenant.codec.specs import ATTEMPT_STATES, PHASES, duration, spec_to_wire, timestamp
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.v1.job_pb2 import Attempt, Job
from cotenant.v1.policy_service_pb2 import Policy

NOW = CREATED + 100


def job(phase: Phase, state: AttemptState | None = None) -> Job:
    """A job with two replicas and auto cores, submitted 100 s ago."""
    spec = JobSpec(roles=(Role(replicas=2, request=Request(gpu_milli=500)),), command=("true",))
    made = Job(id="a", spec=spec_to_wire(spec), phase=PHASES.to_wire(phase), create_time=timestamp(CREATED))
    if state:
        attempt = Attempt(number=2, state=ATTEMPT_STATES.to_wire(state), start_time=timestamp(CREATED + 60))
        attempt.allocations.extend([allocation("n2"), allocation("n1")])
        made.MergeFrom(Job(attempt=attempt, start_time=timestamp(CREATED + 30), run_time=duration(7)))
    return made


def test_a_waiting_job_shows_its_wait_time_and_requests() -> None:
    view = job_view(job(Phase.QUEUED), NOW)
    assert (view["wait_seconds"], view["run_seconds"]) == (100, 0)
    assert (view["replicas"], view["gpus"], view["cores"], view["nodes"]) == (2, 1, None, [])


def test_a_running_job_shows_its_resources_and_total_run_time() -> None:
    view = job_view(job(Phase.RUNNING, AttemptState.RUNNING), NOW)
    assert (view["wait_seconds"], view["run_seconds"]) == (30, 47)
    assert (view["cores"], view["nodes"]) == (8, ["n1", "n2"])


def test_a_preempted_job_holds_nothing_and_stops_counting_run_time() -> None:
    view = job_view(job(Phase.QUEUED, AttemptState.STOPPED), NOW)
    assert (view["run_seconds"], view["cores"], view["nodes"]) == (7, None, [])


def test_a_phase_of_a_newer_server_keeps_its_number() -> None:
    assert job_view(Job(id="a", phase=99), NOW)["phase"] == "phase 99"  # type: ignore[arg-type]  # as it may come


def test_a_reason_in_the_summary_is_not_repeated(shell: Shell, standin: Standin, spec: JobSpec) -> None:
    made = standin.call(standin.jobs.add, replace(spec, name="x"))
    made.refusal.detail, made.refusal.remedy = "8 GPUs are asked for and 5 are free", "a job ends"
    out = shell("explain", made.id).out
    assert out.count("8 GPUs are asked for and 5 are free") == 1
    assert out.count("a job ends") == 1


def test_a_policy_used_by_any_service_is_active(shell: Shell, standin: Standin) -> None:
    policy = Policy(group="cotenant.predictors", name="history", package="cotenant", healthy=True)
    other = Standin()
    other.start()
    try:
        standin.policies.policies = [policy]
        other.policies.policies = [Policy(active=True)]
        other.policies.policies[0].MergeFrom(policy)
        endpoints = f"queue={standin.address},predictor={other.address}"
        [reported] = shell("--endpoint", endpoints, "--token", TOKEN, "policies", "--json").json
    finally:
        other.stop()
    assert reported["active"]


def test_a_time_without_a_date_is_unknown() -> None:
    job = Job(id="a", attempt=Attempt(start_time=timestamp(1e15)))
    job.end_time.seconds = -(1 << 62)
    view = job_view(job, 5.0)
    assert (view["end_time"], view["attempt"]["start_time"]) == (None, None)
