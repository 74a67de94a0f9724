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


def test_every_benchmark_is_run_once() -> None:
    modules = (bench.ROOT / "benchmarks").glob("*.py")
    runnable = {path.stem for path in modules if re.search("^if __name__", path.read_text(), re.MULTILINE)}
    assert sorted(runnable) == sorted((*bench.discover(), *bench.PARTS))


def test_every_other_module_is_one_that_others_use() -> None:
    folders = ("benchmarks", "tests", "tools")
    texts = {path: path.read_text() for folder in folders for path in (bench.ROOT / folder).rglob("*.py")}
    for path in (bench.ROOT / "benchmarks").glob("*.py"):
        used = re.compile(rf"benchmarks(\.| import [^\n]*\b){path.stem}\b")
        runs = path.stem in (*bench.discover(), *bench.PARTS)
        assert runs or any(used.search(text) for other, text in texts.items() if other != path), path.name


def test_all_together_take_thirteen_minutes_at_most_and_what_stands_apart_is_none_of_them() -> None:
    assert set(bench.FORMS) == set(bench.discover()), "a benchmark is in the table, and has its seconds there"
    names = bench.parse_names("")
    assert sum(bench.form_of(name).seconds for name in names) <= 13 * 60
    assert sorted([*names, *bench.excluded()]) == sorted(bench.discover())
    assert bench.parse_names("chaos") == ("chaos",), "who asks for it by name gets it"


def test_what_no_time_is_left_for_is_not_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "REPORT", tmp_path)
    monkeypatch.setattr(bench, "FORMS", {"mesh": bench.Form(0.0), "kills": bench.Form(3600.0)})
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen(script("print('[]')"), **more))
    plan = bench.RunPlan(("kills", "mesh"), 1, 60.0, minutes_max=15.0)
    assert bench.run_benchmarks(plan, {"chaos": "it stands apart"}, save_it=False, strict=False) == 0
    told = capsys.readouterr().out
    assert "not run: chaos: it stands apart" in told
    assert "not run: kills: there was no time left for it in 15 minutes" in told
    assert "1 benchmarks in" in told
    assert "- kills: there was no time" in (tmp_path / "bench.md").read_text()
    assert list(json.loads((tmp_path / "bench.json").read_text())["left_out"]) == ["chaos", "kills"]


def test_one_runs_in_the_form_that_the_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FORMS", {"mesh": bench.Form(), "migration": bench.Form(long_form=True)})
    plan = bench.RunPlan(("mesh", "migration", "new"), 1, 60.0)
    assert ["--quick" in plan.of(name) for name in plan.names] == [True, False, True]
    assert "--quick" not in bench.RunPlan(("mesh",), 1, 60.0, long=True).of("mesh")


@pytest.mark.parametrize(
    ("wrong", "strict", "saved", "code"),
    [
        ({}, True, False, 0),
        ({bench.MISSED: 30}, False, False, 0),
        ({bench.MISSED: 30}, True, False, 1),
        ({bench.WORSE: 1}, False, False, 1),
        ({bench.WORSE: 1}, False, True, 0),
        ({bench.FAILED: 1}, False, True, 1),
    ],
)
def test_it_ends_with_1_where_something_failed_or_is_worse(
    problems: dict[str, int], strict: bool, saved: bool, code: int
) -> None:
    assert bench.exit_status(Counter(problems), strict=strict, saved=saved) == code


def row(ratio: float) -> str:
    row = {"name": "a", "value": 1.0, "unit": "1", "reference": 1.0, "reference_name": "b", "ratio": ratio}
    return json.dumps([row | {"bar": "less", "holds": False}])


def test_what_is_saved_is_compared_with_and_what_failed_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = f"print({row(9.0)!r})"
    texts, popen = iter([f"print({row(2.0)!r})", worse, "raise ValueError('no')", worse]), subprocess.Popen
    monkeypatch.setattr(bench, "REPORT", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "BASELINE", tmp_path / "results.json")
    monkeypatch.setattr(bench, "found", lambda: ("mesh",))
    monkeypatch.setattr(comparing, "better_way", lambda _: comparing.LESS)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen(script(next(texts)), **more))
    for arguments, code in (["--save"], 0), ([], 1), (["--save"], 1), ([], 1):
        monkeypatch.setattr(sys, "argv", ["bench", "--only", "mesh", *arguments])
        assert bench.main() == code, arguments
    said = capsys.readouterr().out
    assert said.count("worse: mesh: a: 2 → 9") == 2
    assert "bar missed: mesh: a" in said
    assert "failed: mesh: ended with 1: ValueError: no" in said
    assert list(tmp_path.glob(".*.new")) == []


def test_rows_count_also_where_a_bar_does_not_hold(tmp_path: Path) -> None:
    result = bench.run(script(f"print('''{ROWS}'''); raise SystemExit(1)"), tmp_path / "log", 60)
    assert (result.error, result.rows[0]["value"]) == ("", 1.0)


def test_one_that_breaks_says_its_last_words(tmp_path: Path) -> None:
    result = bench.run(script("raise ValueError('the reason')"), tmp_path / "log", 60)
    assert (result.rows, result.error) == ([], "ended with 1: ValueError: the reason")


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        f"print('''{ROWS}''', flush=True); time.sleep(600)"
    )
    result = bench.run(script(text), tmp_path / "log", 2)
    assert (result.rows, result.error) == ([], "it was not done after 2 s")
    child = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text(), "its end")


def test_unknown_names_are_all_told() -> None:
    assert bench.parse_names("mesh, placement") == ("mesh", "placement")
    with pytest.raises(ValueError, match="no benchmark mush, plaice; there are agent, "):
        bench.parse_names("mush,mesh,plaice")


def test_an_interruption_keeps_what_is_done(
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
    assert "what is done is kept" in capsys.readouterr().err
