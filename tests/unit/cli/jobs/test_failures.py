from __future__ import annotations

from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import duration
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


def some() -> pb.FailureCount:
    failure = job_pb2.Failure(blame=job_pb2.FAILURE_BLAME_USER, rule="import", evidence="ImportError: x")
    failure.failure_class = "import_error"
    return pb.FailureCount(
        group="n1",
        failure=failure,
        attempts=12,
        jobs=3,
        gpu_seconds=7200.0,
        runtime_p50=duration(67.0),
        runtime_p90=duration(4000.0),
        newest_job_id="0a1",
    )


def test_failures_are_shown_as_a_table(shell: Shell, standin: Standin) -> None:
    standin.jobs.failures = [some()]
    title, row = shell("failures", "--by", "node", "--since", "7d").out.splitlines()
    assert title.split() == ["NODE", "CLASS", "RESPONSIBLE", "ATTEMPTS", "JOBS", "GPU-HOURS", "P50", "P90", "NEWEST"]
    assert row.split()[:8] == ["n1", "import_error", "user", "12", "3", "2.0", "1m07s", "1h06m"]
    assert row.endswith("0a1: ImportError: x")
    asked = standin.jobs.asked[-1]
    assert (asked.by, asked.HasField("since")) == (pb.FAILURE_GROUP_NODE, True)


def test_failures_are_printed_as_json_and_an_empty_list_is_noted(shell: Shell, standin: Standin) -> None:
    assert shell("failures").err == "no failures in 17 finished attempts\n"
    standin.jobs.failures = [some()]
    reported = shell("failures", "--json").json
    assert (reported["attempts"], reported["failures"][0]["class"], reported["failures"][0]["runtime_p50_seconds"]) == (
        17,
        "import_error",
        67.0,
    )
    assert shell("failures", "--since", "once").code == ExitCode.USAGE


def test_a_shortened_summary_is_noted(shell: Shell, standin: Standin) -> None:
    standin.jobs.failures, standin.jobs.failure_groups = [some()], 1200
    assert "showing the 1 most frequent of 1,200 groups" in shell("failures").err
    assert shell("failures", "--json").json["total"] == 1200
