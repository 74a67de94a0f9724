from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from benchmarks import comparing
from tests.end_to_end.waiting import until
from tools import bench

ROWS = '[{"name": "a", "value": 1.0, "holds": true}]'


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_every_benchmark_runs_once() -> None:
    modules = (bench.ROOT / "benchmarks").glob("*.py")
    runnable = {path.stem for path in modules if re.search("^if __name__", path.read_text(), re.MULTILINE)}
    runnable |= {path.parent.name for path in (bench.ROOT / "benchmarks").glob("*/__main__.py")}
    assert sorted(runnable) == sorted((*bench.discover(), *bench.PARTS))


def test_every_other_module_is_used() -> None:
    folders = ("benchmarks", "tests", "tools")
    texts = {path: path.read_text() for folder in folders for path in (bench.ROOT / folder).rglob("*.py")}
    for path in (bench.ROOT / "benchmarks").glob("*.py"):
        used = re.compile(rf"benchmarks(\.| import [^\n]*\b){path.stem}\b")
        runs = path.stem in (*bench.discover(), *bench.PARTS)
        assert runs or any(used.search(text) for other, text in texts.items() if other != path), path.name


def test_the_default_set_takes_at_most_thirteen_minutes_and_has_no_excluded_benchmark() -> None:
    assert set(bench.FORMS) == set(bench.discover()), "every benchmark has an entry with its duration"
    names = bench.parse_names("")
    assert sum(bench.form_of(name).seconds for name in names) <= 13 * 60
    assert sorted([*names, *bench.excluded()]) == sorted(bench.discover())
    assert bench.parse_names("chaos") == ("chaos",), "an excluded benchmark can be selected by name"


def test_a_benchmark_without_time_left_is_skipped_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "REPORT", tmp_path)
    monkeypatch.setattr(bench, "FORMS", {"mesh": bench.Form(0.0), "kills": bench.Form(3600.0)})
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen(script("print('[]')"), **more))
    plan = bench.RunPlan(("kills", "mesh"), 1, 60.0, minutes_max=15.0)
    assert bench.run_benchmarks(plan, {"chaos": "needs root"}, save_it=False, strict=False) == 0
    output = capsys.readouterr().out
    assert "skipped: chaos: needs root" in output
    assert "skipped: kills: no time left within 15 minutes" in output
    assert "1 benchmarks in" in output
    assert "- kills: no time left" in (tmp_path / "bench.md").read_text()
    assert list(json.loads((tmp_path / "bench.json").read_text())["left_out"]) == ["chaos", "kills"]


def test_a_benchmark_runs_in_the_form_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FORMS", {"mesh": bench.Form(), "migration": bench.Form(long_form=True)})
    plan = bench.RunPlan(("mesh", "migration", "new"), 1, 60.0)
    assert ["--quick" in plan.of(name) for name in plan.names] == [True, False, True]
    assert "--quick" not in bench.RunPlan(("mesh",), 1, 60.0, long=True).of("mesh")


@pytest.mark.parametrize(
    ("problems", "strict", "saved", "code"),
    [
        ({}, True, False, 0),
        ({bench.MISSED: 30}, False, False, 0),
        ({bench.MISSED: 30}, True, False, 1),
        ({bench.WORSE: 1}, False, False, 1),
        ({bench.WORSE: 1}, False, True, 0),
        ({bench.FAILED: 1}, False, True, 1),
    ],
)
def test_the_exit_status_is_1_for_a_failure_or_a_worse_figure(
    problems: dict[str, int], strict: bool, saved: bool, code: int
) -> None:
    assert bench.exit_status(Counter(problems), strict=strict, saved=saved) == code


def row(ratio: float) -> str:
    row = {"name": "a", "value": 1.0, "unit": "1", "reference": 1.0, "reference_name": "b", "ratio": ratio}
    return json.dumps([row | {"bar": "less", "holds": False}])


def test_saved_results_become_the_baseline_and_a_failed_benchmark_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = f"print({row(9.0)!r})"
    texts, popen = iter([f"print({row(2.0)!r})", worse, "raise ValueError('no')", worse]), subprocess.Popen
    monkeypatch.setattr(bench, "REPORT", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "BASELINE", tmp_path / "results.json")
    monkeypatch.setattr(bench, "discover", lambda: ("mesh",))
    monkeypatch.setattr(comparing, "better_direction", lambda _: comparing.LESS)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen(script(next(texts)), **more))
    for arguments, code in (["--save"], 0), ([], 1), (["--save"], 1), ([], 1):
        monkeypatch.setattr(sys, "argv", ["bench", "--only", "mesh", *arguments])
        assert bench.main() == code, arguments
    output = capsys.readouterr().out
    assert output.count("worse: mesh: a: 2 → 9") == 2
    assert "bar missed: mesh: a" in output
    assert "failed: mesh: exit status 1: ValueError: no" in output
    assert list(tmp_path.glob(".*.new")) == []


def test_rows_count_even_if_a_bar_is_missed(tmp_path: Path) -> None:
    result = bench.run(script(f"print('''{ROWS}'''); raise SystemExit(1)"), tmp_path / "log", 60)
    assert (result.error, result.rows[0]["value"]) == ("", 1.0)


def test_a_failed_benchmark_reports_its_last_line_of_stderr(tmp_path: Path) -> None:
    result = bench.run(script("raise ValueError('the reason')"), tmp_path / "log", 60)
    assert (result.rows, result.error) == ([], "exit status 1: ValueError: the reason")


def test_a_hanging_benchmark_is_killed_with_its_children(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        f"print('''{ROWS}''', flush=True); time.sleep(600)"
    )
    result = bench.run(script(text), tmp_path / "log", 2)
    assert (result.rows, result.error) == ([], "timed out after 2 s")
    child = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(), "its end")


def test_all_unknown_names_are_reported() -> None:
    assert bench.parse_names("mesh, placement") == ("mesh", "placement")
    with pytest.raises(ValueError, match="unknown benchmark: mush, plaice; known are agent, "):
        bench.parse_names("mush,mesh,plaice")


def test_an_interrupted_run_keeps_completed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "second"
    texts = iter([f"print('''{ROWS}''')", f"open({str(log)!r}, 'w'); import time; time.sleep(600)"])
    popen = subprocess.Popen
    monkeypatch.setattr(bench, "REPORT", tmp_path)
    monkeypatch.setattr(bench, "BASELINE", tmp_path / "none")
    monkeypatch.setattr(comparing, "markdown", lambda *_: "")
    monkeypatch.setattr(comparing, "changes", lambda *_: ())
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen(script(next(texts)), **more))
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "mesh,kills"])

    def interrupt() -> None:
        until(log.exists, "the second benchmark")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert bench.main() == 130
    assert '"mesh"' in (tmp_path / "bench.json").read_text()
    assert '"kills"' not in (tmp_path / "bench.json").read_text()
    assert "completed results are kept" in capsys.readouterr().err
