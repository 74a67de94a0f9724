"""`cotenant plan`: the table, JSON of all of it, and one clear error for each kind of bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict
from tests.unit.simulator.commands import cotenant
from tests.unit.simulator.test_snapshot_plan import BUSY
from tests.unit.simulator.test_snapshots import saved

from cotenant.cli.research import plan
from cotenant.simulator.snapshots import Job, Part
from cotenant.v1.advice_service_pb2 import PlanJobsResponse


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(tmp_path, replace(BUSY, jobs=(*BUSY.jobs, Job("big", 995, (Part(gpu_milli=9000),)))))


def test_the_table_has_the_order_the_places_the_reasons_and_the_starts(path: Path) -> None:
    told = cotenant("plan", path)
    assert told.exit_code == 0
    lines = [line.split() for line in told.stdout.splitlines()]
    assert [line[0] for line in lines] == ["#", "1", "2", "3", "big"]
    assert lines[1][1:] == ["w1", "2", "2", "now", "a"]
    assert "CAPACITY: needs 2 GPUs, 0 of 4 free" in told.stdout
    assert "NEVER_FITS" in told.stdout


def test_json_has_everything(path: Path) -> None:
    view = json.loads(cotenant("plan", path, "--json").stdout)
    first, second, *_, last = view["jobs"]
    assert first["places"][0]["node_id"] == "a"
    assert second["refusal"]["code"] == "CAPACITY"
    assert second["start"] == {
        "start": "30.000s", "start_p10": "30.000s", "start_p90": "30.000s", "of_unknown": False,
        "after_job_ids": ["w1"],
    }  # fmt: skip
    assert (last["order"], "start" in last) == (0, False)


def test_other_policies_are_chosen_by_options(path: Path) -> None:
    view = json.loads(cotenant("plan", path, "--profile", "paper:genie", "--json").stdout)
    assert view["policies"]["queue"] == "swaf"
    assert json.loads(cotenant("plan", path, "--queue", "las", "--json").stdout)["policies"]["queue"] == "las"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--profile", "fulll"], "there is no profile 'fulll'; did you mean full?"),
        (["--queue", "fifoo"], "did you mean fifo?"),
        (["--option", "queue.moed=strict"], "queue.moed"),
        (["--seconds", "-1"], "--seconds: must be from 0 to 3600, not -1"),
    ],
)
def test_a_bad_choice_is_one_error(path: Path, arguments: list[str], what: str) -> None:
    told = cotenant("plan", path, *arguments)
    assert told.exit_code == 2
    assert what in told.stderr


def test_a_damaged_snapshot_is_one_error_with_its_place(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"cotenant_snapshot": 1,\n  "nodes": [}')
    assert f"{damaged}:2:13: invalid JSON" in cotenant("plan", damaged).stderr
    damaged.write_text(BUSY.dump().replace('"gpus": 4', '"gpus": "four"'))
    told = cotenant("plan", damaged)
    assert told.exit_code == 2
    assert "nodes[0].gpus: must be a whole number, not 'four'" in told.stderr


def test_a_snapshot_is_read_from_standard_input(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(path.read_bytes())))
    assert json.loads(cotenant("plan", "-", "--json").stdout) == json.loads(cotenant("plan", path, "--json").stdout)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"{")))
    assert "standard input:1:2: invalid JSON" in cotenant("plan", "-").stderr


def test_the_answer_of_a_mesh_is_shown_as_a_plan_made_here_is(path: Path) -> None:
    view = json.loads(cotenant("plan", path, "--json").stdout)
    answer = ParseDict(view, PlanJobsResponse())
    rows = [plan._remote_row(job) for job in answer.jobs]
    lines = cotenant("plan", path).stdout.splitlines()[1:]
    assert [row[1] for row in rows] == [
        line.split()[1] if row[0] else line.split()[0] for line, row in zip(lines, rows, strict=True)
    ]
    assert rows[0] == ("1", "w1", "2", "2", "now", "", "a")
    assert rows[1][-1].startswith("CAPACITY: needs 2 GPUs")
