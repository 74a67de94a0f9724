"""Objectives at the command line: the column, the cards, the warning and the refusal at submission."""

from __future__ import annotations

from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobSpec, ObjectiveCheck, Request, Role
from cotenant.v1 import job_pb2

SPEC = JobSpec(name="late", roles=(Role(request=Request(gpu_milli=1000)),), command=("x",))
LATE = job_pb2.ObjectiveStatus(
    kind=job_pb2.OBJECTIVE_KIND_DEADLINE,
    state=job_pb2.OBJECTIVE_STATE_AT_RISK,
    target=1_800_000_000,
    value=1_800_002_400,
    margin=-2400,
    detail="deadline in 2 h; expected to finish 40 min after it",
    remedy="a deadline 2 h 40 min from now or later",
)
SLOW = job_pb2.ObjectiveStatus(
    kind=job_pb2.OBJECTIVE_KIND_RATE, state=job_pb2.OBJECTIVE_STATE_UNKNOWN, target=4, detail="no rate is known yet"
)
DEADLINE = ("submit", "--gpus", "1", "--deadline", "2h", "--expected", "1h")


def test_the_list_has_a_column_of_objectives_if_asked(shell: Shell, standin: Standin) -> None:
    standin.jobs.add(SPEC, objectives=[LATE, SLOW])
    standin.jobs.add(JobSpec(name="plain", roles=SPEC.roles, command=("x",)))
    plain, late = shell("jobs", "--slo").out.splitlines()[1:]
    assert "deadline at risk −40 min, rate unknown" in late
    assert " - " in plain
    assert "OBJECTIVES" not in shell("jobs").out
    ended = shell("jobs", "--slo", "--watch")
    assert (ended.code, "--slo does not go with --watch" in ended.err) == (ExitCode.USAGE, True)


def test_json_has_stable_keys_and_times_of_deadlines(shell: Shell, standin: Standin) -> None:
    standin.jobs.add(SPEC, objectives=[LATE, SLOW], submitted_objectives=[LATE])
    [job] = shell("jobs", "--json").json
    assert job["objectives"] == [
        {
            "kind": "deadline",
            "state": "at_risk",
            "final": False,
            "target": "2027-01-15T08:00:00.000Z",
            "value": "2027-01-15T08:40:00.000Z",
            "margin": -2400.0,
            "detail": LATE.detail,
            "remedy": LATE.remedy,
        },
        {
            "kind": "rate",
            "state": "unknown",
            "final": False,
            "target": 4.0,
            "value": None,
            "margin": None,
            "detail": SLOW.detail,
            "remedy": None,
        },
    ]
    assert job["submitted_objectives"] == job["objectives"][:1]


def test_show_has_the_status_and_what_was_expected(shell: Shell, standin: Standin) -> None:
    job = standin.jobs.add(SPEC, objectives=[SLOW], submitted_objectives=[LATE])
    out = " ".join(shell("show", job.id).out.split())
    assert f"objective unknown: {SLOW.detail}" in out
    assert f"at submission at risk: {LATE.detail}; what would help: {LATE.remedy}" in out


def test_a_submitted_job_that_will_be_late_is_warned_of(shell: Shell, standin: Standin) -> None:
    standin.jobs.expected = [LATE, SLOW]
    ended = shell(*DEADLINE, "--", "x")
    [job_id] = standin.jobs.jobs
    assert (ended.code, ended.out) == (ExitCode.DONE, f"{job_id}\n")
    assert ended.err == f"warning: {job_id}: {LATE.detail}; what would help: {LATE.remedy}\n"
    ended = shell(*DEADLINE, "--dry-run", "--name", "n", "--", "x")
    assert (ended.out, ended.err.startswith("warning: n: deadline in 2 h")) == ("the job is valid\n", True)
    standin.jobs.expected = [SLOW]
    assert not shell(*DEADLINE, "--", "x").err


def test_a_refused_objective_is_an_error_with_what_would_help(shell: Shell, standin: Standin) -> None:
    standin.jobs.required = "a required objective is not expected to be kept: 40 min late"
    ended = shell(*DEADLINE, "--objective-check", "require", "--", "x")
    [request] = standin.jobs.asked
    assert request.spec.objective_check == job_pb2.OBJECTIVE_CHECK_REQUIRE
    assert (ended.code, ended.out, ended.err) == (
        ExitCode.FAILED,
        "",
        f"error: OBJECTIVE_UNREACHABLE: {standin.jobs.required}\nhint: a deadline 2 h from now or later\n",
    )


def test_an_unknown_check_is_named(shell: Shell, standin: Standin) -> None:
    ended = shell(*DEADLINE, "--objective-check", "strict", "--", "x")
    assert ended.code == ExitCode.USAGE
    assert f"must be one of {', '.join(ObjectiveCheck)}, not 'strict'" in ended.err
    assert not standin.jobs.asked
