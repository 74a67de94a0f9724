"""Schedules on the command line."""

from __future__ import annotations

import json

from tests.end_to_end.commands import Cli


def test_a_job_recurs_can_be_run_now_and_paused(cli: Cli) -> None:
    words = ("--every", "@daily", "--time-zone", "Europe/Berlin", "--overlap", "queue")
    assert cli("submit", *words, "--dry-run", "--cpus", "1", "--", "true").out == "the schedule is valid\n"
    made = cli("submit", *words, "--name", "report", "--workdir", "none", "--cpus", "1", "--", "echo", "done")
    schedule_id = made.out.strip()
    assert "the first job is submitted at" in made.err
    job_id = cli("schedules", "run-now", schedule_id).out.strip()
    cli("wait", job_id)
    assert cli("logs", job_id).out == "done\n"
    [job] = json.loads(cli("jobs", "--all", "--json", "--label", f"schedule={schedule_id}").out)
    assert job["name"].startswith("report-now-")
    assert cli("schedules", "pause", schedule_id).out == f"{schedule_id}: paused\n"
    [listed] = json.loads(cli("schedules", "--json").out)
    assert (listed["id"], listed["every"], listed["time_zone"]) == (schedule_id, "@daily", "Europe/Berlin")
    assert (listed["overlap"], listed["paused"], listed["next"]) == ("queue", True, None)
    assert "paused" in cli("schedules").out
    assert f"{schedule_id}: next at" in cli("schedules", "resume", schedule_id).out
    assert "@daily (Europe/Berlin)" in cli("schedules", "show", schedule_id).out
    cli("schedules", "delete", schedule_id)
    assert json.loads(cli("schedules", "list", "--json").out) == []


def test_what_cannot_be_is_refused_with_the_field(cli: Cli) -> None:
    for words, wrong in (
        (("--every", "61 * * * *"), "every: its minute '61'"),
        (("--every", "0 0 31 2 *"), "is never due"),
        (("--every", "1h", "--time-zone", "Mars/Base"), "no time zone 'Mars/Base'"),
        (("--every", "1h", "--overlap", "both"), "--overlap must be one of skip, queue, replace"),
        (("--overlap", "skip"), "need --every"),
        (("--every", "1h", "--wait"), "cannot be combined with --wait"),
        (("--every", "1h", "--array", "0-3"), "array"),
    ):
        assert wrong in cli("submit", *words, "--cpus", "1", "--", "true", code=2).err
    assert "there is no schedule 'nothing'" in cli("schedules", "show", "nothing", code=2).err
