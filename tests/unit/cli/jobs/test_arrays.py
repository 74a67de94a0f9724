"""Arrays on the command line, against the stand-in's array service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.nodes.test_nodes import completed
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import read_array

Add = Callable[..., str]


@pytest.fixture
def add(standin: Standin, spec: JobSpec) -> Add:
    """Add an array, or a single job without indices; return its id."""

    def added(name: str, indices: str = "") -> str:
        if indices:
            return str(standin.call(standin.arrays.add, replace(spec, name=name, array=read_array(indices))))
        return str(standin.call(standin.jobs.add, replace(spec, name=name)).id)

    return added


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()[1:]]


# Lists -------------------------------------------------------------------------------------------------------


def test_an_array_has_one_row_among_the_jobs(shell: Shell, standin: Standin, add: Add) -> None:
    first, array, last = add("first"), add("sweep", "0-4%2"), add("last")
    standin.call(standin.jobs.run, f"{array}_0")
    standin.call(standin.jobs.run, f"{array}_1")
    standin.call(standin.jobs.finish, f"{array}_1")
    listed = shell("jobs")
    assert listed.err == ""
    assert [row[:2] for row in rows(listed.out)] == [[last, "last"], [array, "sweep"], [first, "first"]]
    words = " ".join(rows(listed.out)[1])
    assert words == f"{array} sweep running 5 × 1 5 × 4 - - 3 queued, 1 running, 1 succeeded"
    wide = " ".join(rows(shell("jobs", "--wide").out)[1])
    assert wide.startswith(f"{array} sweep training default default normal running 5 × 1")


def test_filters_select_arrays_of_which_a_job_matches(shell: Shell, standin: Standin, add: Add) -> None:
    single, array = add("single"), add("sweep", "0-1")
    standin.call(standin.jobs.run, f"{array}_1")
    assert [row[0] for row in rows(shell("jobs", "--phase", "running").out)] == [array]
    assert [row[0] for row in rows(shell("jobs", "--name", "single").out)] == [single]
    for index in (0, 1):
        standin.call(standin.jobs.finish, f"{array}_{index}")
    assert [row[0] for row in rows(shell("jobs").out)] == [single]
    assert [row[0] for row in rows(shell("jobs", "--all").out)] == [array, single]


def test_limits_and_totals_count_arrays_once(shell: Shell, add: Add) -> None:
    ids = [add(f"job{number}", "0-9" if number % 3 else "") for number in range(12)]
    for limit in (1, 5, 11):
        listed = shell("jobs", "--limit", str(limit))
        assert [row[0] for row in rows(listed.out)] == ids[::-1][:limit]
        assert listed.err == f"{12 - limit} more; show them with --limit or --all\n"
    listed = shell("jobs", "--limit", "12")
    assert ([row[0] for row in rows(listed.out)], listed.err) == (ids[::-1], "")


def test_pages_of_jobs_and_arrays_are_merged(
    shell: Shell, standin: Standin, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.cli.jobs.job_pages.PAGE_SIZE_MAX", 2)
    ids = [add(f"job{number}", "0-1" if number in (0, 1, 5, 6, 7, 8) else "") for number in range(12)]
    assert [row[0] for row in rows(shell("jobs", "--all").out)] == ids[::-1]
    assert len([one for one in standin.arrays.asked if one.page_token]) == 2


def test_json_and_expanded_lists_have_each_job(shell: Shell, add: Add) -> None:
    single, array = add("single"), add("sweep", "0-1")
    ids = [f"{array}_1", f"{array}_0", single]
    assert [row[0] for row in rows(shell("jobs", "--expand").out)] == ids
    listed = shell("jobs", "--json").json
    assert [job["id"] for job in listed] == ids
    assert listed[0]["array"] == {"id": array, "index": 1, "count": 2, "running_max": None}


def test_the_jobs_of_an_array_are_listed_by_index(shell: Shell, add: Add) -> None:
    single, array = add("single"), add("sweep", "0-11")
    assert [row[0] for row in rows(shell("jobs", "--array", array[-6:]).out)] == [f"{array}_{n}" for n in range(12)]
    assert len(rows(shell("jobs", "--array", array, "--limit", "3").out)) == 3
    told = shell("jobs", "--array", single)
    assert (told.code, told.err.splitlines()[0]) == (ExitCode.USAGE, f"error: {single} is not an array")


# Submit, show and change -------------------------------------------------------------------------------------


def test_an_array_is_submitted_by_the_array_service(shell: Shell, standin: Standin) -> None:
    submitted = shell("submit", "--name", "sweep", "--array", "0-4%2", "--gpus", "1", "--request-id", "k", "--", "true")
    assert submitted.code == ExitCode.DONE
    [request] = standin.arrays.asked
    assert (request.request_id, request.spec.array.running_max) == ("k", 2)
    assert not standin.jobs.asked
    array_id = submitted.out.strip()
    assert sorted(standin.jobs.jobs) == [f"{array_id}_{index}" for index in range(5)]


def test_a_submitted_array_is_one_item_as_json(shell: Shell, standin: Standin) -> None:
    [array] = shell("submit", "--json", "--array", "0-8:2%2", "--gpus", "1", "--", "true").json
    assert (array["array"], array["jobs"], array["phases"], array["phase"]) == ("0-8:2%2", 5, {"queued": 5}, "queued")
    assert (array["gpus"], array["submitter"], array["end_time"]) == (1, "operator", None)


def test_files_with_jobs_and_arrays_are_checked_and_submitted_in_order(
    shell: Shell, standin: Standin, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "name: evaluate\nafter-ok: sweep\ncommand: [x]\n---\nname: sweep\narray: 0-1\ncommand: [x]\n"
        "---\nname: bad\narray: 0-1\ngpus: 9999999\ncommand: [x]\n"
    )
    told = shell("submit", str(path))
    assert (told.code, not standin.jobs.jobs) == (ExitCode.USAGE, True)
    path.write_text(path.read_text().rpartition("---")[0].rpartition("\n")[0])
    told = shell("submit", "--dry-run", str(path))
    assert (told.out, standin.jobs.jobs) == ("all 2 jobs are valid\n", {})
    evaluate, sweep = shell("submit", str(path)).out.split()
    assert [one.id for one in standin.jobs.jobs[evaluate].spec.dependencies] == [sweep]


def test_waiting_for_an_array_waits_for_all_of_its_jobs(shell: Shell, standin: Standin) -> None:
    standin.jobs.autopilot = True
    told = shell("submit", "--wait", "--array", "0-2", "--gpus", "1", "--", "echo", "done")
    assert (told.code, told.out) == (ExitCode.DONE, "done\n" * 3)
    told = shell("submit", "--follow", "--array", "0-2", "--gpus", "1", "--", "echo", "done")
    assert (told.code, "--follow takes one job" in told.err) == (ExitCode.USAGE, True)


def test_a_card_shows_the_array_as_a_whole(shell: Shell, standin: Standin, add: Add) -> None:
    array = add("sweep", "0-4%2")
    standin.call(standin.jobs.run, f"{array}_0")
    card = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in shell("show", array).out.splitlines()}
    assert (card["array"], card["running at most"], card["jobs"]) == ("5 jobs: 0-4", "2", "4 queued, 1 running")
    assert (card["submitted by"], card["role worker"]) == ("operator", "1 × (1 GPU, 4 cores)")
    shown = shell("show", "--json", array[-8:]).json
    assert list(shown) == ["id", "array", "phases", "jobs"]
    assert (shown["array"], shown["phases"]) == ("0-4%2", {"queued": 4, "running": 1})
    assert [job["array"]["index"] for job in shown["jobs"]] == [0, 1, 2, 3, 4]
    assert "array: 0-4%2" in shell("show", "--file", array).out


def test_an_archived_array_names_where_its_jobs_are(shell: Shell, standin: Standin, add: Add) -> None:
    array = add("sweep", "0-4")
    standin.arrays.archived.add(array)
    told = shell("show", array)
    assert (told.code, told.err.splitlines()[0]) == (ExitCode.USAGE, f"error: array {array} is archived, with 5 jobs")
    assert f"cotenant history --id {array}" in told.err


def test_arrays_and_jobs_are_changed_together(shell: Shell, add: Add) -> None:
    single, array = add("single"), add("sweep", "0-2")
    assert shell("suspend", array, single).out == f"{array} 3 suspended\n{single} suspended\n"
    assert shell("resume", array).out == f"{array} 3 queued\n"
    assert shell("cancel", f"{array}_1").out == f"{array}_1 cancelled\n"
    [told] = shell("cancel", "--json", array).json
    assert (told["id"], told["phases"], told["phase"]) == (array, {"cancelled": 3}, "cancelled")
    refused = shell("suspend", array)
    assert (refused.code, refused.err.split(":")[1].strip()) == (ExitCode.FAILED, "ARRAY_ENDED")


@pytest.mark.parametrize("command", [["explain"], ["move"], ["update", "--priority", "high"]])
def test_commands_for_one_job_name_the_jobs_of_an_array(shell: Shell, add: Add, command: list[str]) -> None:
    array = add("sweep", "3-5")
    told = shell(*command, array)
    assert (told.code, told.out) == (ExitCode.USAGE, "")
    assert told.err == f"error: {array} is an array of 3 jobs\nhint: name one of its jobs, such as {array}_3\n"


def test_arrays_are_found_by_parts_of_their_ids(shell: Shell, add: Add) -> None:
    single, array = add("single"), add("sweep", "0-2")
    assert array in shell("show", array[-4:]).out
    assert f"{array}_2" in shell("show", f"{array[-4:]}_2").out
    told = shell("show", "0000")
    assert told.code == ExitCode.USAGE
    assert [line.split() for line in told.err.splitlines() if "queued" in line] == [
        [array, "queued", "sweep"],
        [single, "queued", "single"],
    ]


def test_ids_of_arrays_and_then_of_their_jobs_are_completed(
    shell: Shell, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, array = add("single"), add("sweep", "0-1")
    monkeypatch.setenv("_COTENANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_CWORD", "2")
    for begun, found in (("", [array, single]), (f"{array}_", [f"{array}_1", f"{array}_0"])):
        monkeypatch.setenv("COMP_WORDS", f"cotenant show {begun}")
        assert completed(shell) == found
