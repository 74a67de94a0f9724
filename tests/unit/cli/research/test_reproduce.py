"""`cotenant reproduce`: the quick version of each paper, as users see it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cotenant.cli.main import run
from cotenant.reproduction import papers
from cotenant.reproduction.model import Asked, Case, Claim, Done, Figures, Findings, Stopped, Table
from cotenant.reproduction.papers import NAMES, xiao


def test_an_unknown_paper_lists_the_known_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "nobody"]) == 2
    assert ", ".join(NAMES) in capsys.readouterr().err


def test_a_missing_directory_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["reproduce", "xiao", "--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.deep
def test_a_report_and_figures_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xiao, "SWEEPS", ())  # which takes long
    report = tmp_path / "xiao.html"
    assert run(["reproduce", "xiao", "--quick", "--seeds", "1", "--jobs", "1", "--json", "--report", str(report)]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["complete"]
    assert "LeNet" in [row[0] for table in reported["tables"] for row in table["rows"]]
    assert "<h1>Scheduling CPU for GPU-based Deep Learning Jobs</h1>" in report.read_text()


def test_a_report_of_all_papers_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "all", "--report", "a.html"]) == 2
    assert "--report takes one paper" in capsys.readouterr().err


@pytest.mark.parametrize("paper", ["coda", "genie", "philly", "xiao", "aiturbo"])
def test_a_trace_in_another_format_reports_missing_columns(
    paper: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("openb/openb_pod_list_default.csv", "itp/cluster10.csv", "philly/0e4a51.csv", "philly/2869ce.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("apples,pears\n1,2\n")
    (tmp_path / "synergy").mkdir()
    (tmp_path / "synergy" / "static_100job_6_3_1100.0").write_text("")
    asked = ["reproduce", paper, "--quick", "--seeds", "1", "--jobs", "1", "--data", str(tmp_path)]
    assert run(asked) == 2
    reported = capsys.readouterr().err
    assert "is not the expected trace: it has no column" in reported
    assert str(tmp_path) in reported.replace("\n", "")
    assert "Traceback" not in reported


def test_an_invalid_number_is_reported_with_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "itp").mkdir()
    (tmp_path / "itp" / "cluster10.csv").write_text("num_gpu,duration\n1,long\n")
    assert run(["reproduce", "genie", "--quick", "--seeds", "1", "--jobs", "1", "--data", str(tmp_path)]) == 2
    assert "could not convert string to float: 'long'" in capsys.readouterr().err


@dataclass(frozen=True, slots=True)
class Interrupting:
    """A case during which the user presses Ctrl-C, if it is the second."""

    number: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Run the case."""
        if stopped():
            return None
        if self.number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return Figures({"number": float(self.number)})


class Small:
    """A paper of three cases."""

    name, title, reference = "small", "A small paper", "nobody, never"
    claims: Sequence[Claim] = ()
    assumptions: Sequence[str] = ()
    unsaid: Sequence[str] = ()

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return three cases."""
        return [Case("numbers", "itself", number, Interrupting(number)) for number in (1, 2, 3)]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the numbers of the finished cases."""
        rows = tuple((one.values["number"],) for one in done.of("numbers", "itself").values())
        return Findings((), (Table("numbers", "Numbers", ("number",), (".0f",), rows),))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(papers, "NAMES", ("small",))
    monkeypatch.setattr(papers, "paper", lambda name: Small())
    return "small"


def test_results_before_ctrl_c_are_cached_and_printed(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", small, "--jobs", "1"]) == 130
    reported = capsys.readouterr().out
    assert "cut short: 2 of 3 runs were done, and only they count" in reported
    assert [line for line in reported.splitlines() if line.strip().isdigit()] == ["     1", "     2"]
    assert run(["reproduce", small, "--jobs", "1", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["cases"]) == (False, {"done": 2, "of": 3, "kept": 0})


def test_the_next_run_continues_from_the_cache(small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["reproduce", small, "--jobs", "1", "--keep", str(tmp_path / "kept")]
    assert run(asked) == 130
    capsys.readouterr()
    assert run(asked) == 0
    assert "3 runs with seeds 0, 1, 2, 3, 4, 2 of them from the cache" in capsys.readouterr().out


def test_an_unwritable_cache_directory_is_reported(
    small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["reproduce", small, "--keep", str(tmp_path / "file")]) == 2
    assert "figures cannot be cached in" in capsys.readouterr().err


def test_too_little_memory_reduces_the_processes_with_a_note(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_100 << 20))
    run(["reproduce", small, "--jobs", "9"])
    assert "9 processes would need 4.4 GiB of memory and 1.1 GiB is available; 2 are used" in capsys.readouterr().err


def test_the_plots_of_two_papers_do_not_overwrite_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xiao, "SWEEPS", ())
    monkeypatch.setattr(xiao.Xiao, "cases", lambda paper, asked: ())
    assert run(["reproduce", "xiao", "--quick", "--markdown", "--png", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["xiao-cores.png", "xiao-jct.png"]
    assert "The quick version: 0 runs with seeds 0, 1, 2, 3, 4; 0 s, 0 s of CPU time." in capsys.readouterr().out
