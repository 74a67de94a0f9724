"""`cotenant reproduce`: each paper's small form, as users see it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotenant.cli.main import run
from cotenant.reproduction.papers import NAMES, xiao


def test_a_paper_that_nobody_knows_is_told_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "nobody"]) == 2
    assert ", ".join(NAMES) in capsys.readouterr().err


def test_a_directory_that_is_missing_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["reproduce", "xiao", "--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_report_and_figures_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xiao, "SWEEPS", ())  # which takes long
    report = tmp_path / "xiao.html"
    assert run(["reproduce", "xiao", "--quick", "--seeds", "1", "--jobs", "1", "--json", "--report", str(report)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["complete"]
    assert "LeNet" in [row[0] for table in told["tables"] for row in table["rows"]]
    assert "<h1>Scheduling CPU for GPU-based Deep Learning Jobs</h1>" in report.read_text()


def test_a_report_of_all_papers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "all", "--report", "a.html"]) == 2
    assert "a report is of one paper" in capsys.readouterr().err
