from __future__ import annotations

import csv
import io
from pathlib import Path

import pyarrow.parquet
import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.v1 import job_service_pb2 as pb


@pytest.fixture(autouse=True)
def _used(standin: Standin) -> None:
    standin.jobs.usage = pb.SummarizeUsageResponse(
        counts=[
            pb.UsageCount(group="vision", jobs=3, failed_jobs=1, gpu_seconds=7.2e6, core_seconds=3600.0),
            pb.UsageCount(group="speech", jobs=1, core_seconds=1800.0),
        ],
        total=pb.UsageCount(jobs=4, failed_jobs=1, gpu_seconds=7.2e6, core_seconds=5400.0),
        total_size=2,
    )


def test_usage_is_a_table_with_totals(shell: Shell, standin: Standin) -> None:
    told = shell("usage", "--since", "30d", "--tenant", "vision")
    assert [line.split() for line in told.out.splitlines()] == [
        ["TENANT", "GPU-HOURS", "CORE-HOURS", "JOBS", "FAILED"],
        ["vision", "2,000.00", "1.00", "3", "1"],
        ["speech", "0.00", "0.50", "1", "0"],
        ["total", "2,000.00", "1.50", "4", "1"],
    ]
    asked = standin.jobs.asked[-1]
    assert (asked.by, asked.tenant, asked.HasField("since"), asked.HasField("until")) == (
        pb.USAGE_GROUP_TENANT,
        "vision",
        True,
        False,
    )


def test_usage_is_written_for_programs(shell: Shell, tmp_path: Path) -> None:
    told = shell("usage", "--by", "job-class", "--json").json
    assert told["usage"][0] == {
        "job-class": "vision",
        "gpu_hours": 2000.0,
        "core_hours": 1.0,
        "jobs": 3,
        "failed_jobs": 1,
    }
    assert told["total"]["core_hours"] == 1.5
    rows = [*csv.DictReader(io.StringIO(shell("usage", "--csv").out))]
    assert [(row["tenant"], row["gpu_hours"]) for row in rows] == [("vision", "2000.0"), ("speech", "0.0")]
    path = tmp_path / "usage.parquet"
    assert shell("usage", "--by", "user", "--parquet", str(path)).out == ""
    assert pyarrow.parquet.read_table(path).to_pylist()[1] == {
        "user": "speech",
        "gpu_hours": 0.0,
        "core_hours": 0.5,
        "jobs": 1,
        "failed_jobs": 0,
    }


def test_what_is_missing_is_noted(shell: Shell, standin: Standin) -> None:
    standin.jobs.usage.total_size, standin.jobs.usage.missing_archives = 1200, 2
    told = shell("usage").err
    assert "showing 2 of 1,200 groups" in told
    assert "2 archives of other queues cannot be read" in told
    standin.jobs.usage.Clear()
    assert shell("usage").err == "no job ran in that time\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--since", "1d", "--until", "2d"), "--since 1d is not before --until 2d"),
        (("--since", "2999-01-01"), "--since 2999-01-01 is not before now"),
        (("--since", "once"), "--since must be a time such as"),
        (("--csv", "--json"), "choose one of --csv, --json and --parquet"),
    ],
)
def test_a_period_that_cannot_be_is_one_clear_error(shell: Shell, options: tuple[str, ...], error: str) -> None:
    told = shell("usage", *options)
    assert told.code == ExitCode.USAGE
    assert error in told.err
