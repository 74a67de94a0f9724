"""The check on a real GPU, without one: its times, its results, and a rehearsal of a point on a real mesh."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import assignment, contention, cores, curve, inference, machine, mixed, points, wheels
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.points import Point, PointRun, Runner
from benchmarks.gpu.programs import inputs, service, step_log
from benchmarks.harness import Row
from tests.support.paths import ROOT

from cotenant.core.model.job import JobKind
from cotenant.core.model.node import NodeShape

HERE = Machine(2)
MODULES = (assignment, contention, cores, curve, inference, machine, mixed, points, service, step_log, wheels)


def point(
    name: str, measure: Callable[[PointRun], Iterator[Row]], seconds: float = 60.0, at_least: float = 0.0
) -> Point:
    return Point(name, seconds, at_least, measure)


def one_row(run: PointRun) -> Iterator[Row]:
    run.raw["left"] = run.left()
    yield Row("a figure", 1.0, "s")


def runner(out: Path, seconds: float = 1000.0, clock: Callable[[], float] = lambda: 0.0) -> tuple[Runner, list[str]]:
    said: list[str] = []
    return Runner(HERE, out, seconds, said.append, {"rehearsal": False}, clock), said


def written(out: Path, name: str = "results") -> Any:
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_examples_are_right(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


def test_time_that_a_point_does_not_use_goes_to_later_ones(tmp_path: Path) -> None:
    now = [0.0]

    def short(run: PointRun) -> Iterator[Row]:
        now[0] += 10.0
        yield from one_row(run)

    run, _ = runner(tmp_path, 300.0, lambda: now[0])
    run.run([point("first", short, 100.0), point("second", one_row, 50.0), point("third", one_row, 150.0)])
    assert [result.raw["left"] for result in run.results] == [90.0, 72.5, 290.0]


def test_a_point_is_skipped_with_the_reason(tmp_path: Path) -> None:
    run, said = runner(tmp_path, 30.0)
    lacking = Point("lacking", 60.0, 0.0, one_row, lambda machine: "torch is not installed")
    assert run.run([lacking, point("long", one_row, at_least=31.0), point("short", one_row)])
    first, second, third = written(tmp_path)["points"]
    assert (first["status"], first["why"], first["rows"]) == ("skipped", "torch is not installed", [])
    assert (second["status"], second["why"]) == (
        "skipped",
        "no time left: it takes at least 31 s, and 15 s are left for it",
    )
    assert third["status"] == "measured"
    assert "lacking: skipped in 0 s: torch is not installed" in said


def test_results_are_written_after_each_point_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    seen: list[Any] = []

    def fails(run: PointRun) -> Iterator[Row]:
        seen.append(written(tmp_path)["points"])
        (run.directory / "up.log").write_text("the reason")
        yield Row("before", 2.0, "s")
        raise RuntimeError("no mesh")

    run, said = runner(tmp_path)
    assert run.run([point("one", one_row), point("two", fails), point("three", one_row)])
    assert [[one["name"] for one in points] for points in seen] == [["one"]]
    assert [one["status"] for one in written(tmp_path)["points"]] == ["measured", "failed", "measured"]
    two = written(tmp_path, "two")
    assert (two["why"], [row["name"] for row in two["rows"]]) == ("RuntimeError: no mesh", ["before"])
    assert two["raw"]["end of up.log"] == "the reason"
    assert "  before: 2 s" in said
    assert len(list(tmp_path.iterdir())) == 4, "no temporary file is left"


def test_a_point_out_of_time_is_ended_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "CLEANUP_SECONDS", 0.0)
    ended: list[str] = []

    def endless(run: PointRun) -> Iterator[Row]:
        yield Row("before", 2.0, "s")
        try:
            while True:
                signal.pause()
        finally:
            ended.append("cleaned up")

    before = signal.getitimer(signal.ITIMER_REAL)[0]
    handler = signal.getsignal(signal.SIGALRM)
    run, _ = runner(tmp_path, 0.2, time.monotonic)
    assert run.run([point("endless", endless), point("next", one_row)])
    assert ended == ["cleaned up"]
    (endless_result, _) = written(tmp_path)["points"]
    assert (endless_result["status"], len(endless_result["rows"])) == ("out of time", 1)
    assert signal.getsignal(signal.SIGALRM) == handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before > 0), "a timer of the caller goes on"


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    def interrupted(run: PointRun) -> Iterator[Row]:
        yield Row("before", 2.0, "s")
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()

    run, _ = runner(tmp_path)
    assert not run.run([point("one", interrupted), point("two", one_row)])
    (one,) = written(tmp_path)["points"]
    assert (one["status"], len(one["rows"])) == ("interrupted", 1)


def test_everything_of_a_rehearsal_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say = command.saying(rehearsal=True, to_stderr=False)
    run = Runner(Machine(2, rehearsal=True), tmp_path, 60.0, say)
    run.run([point("one", one_row)])
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("REHEARSAL") for line in lines)
    one = written(tmp_path, "one")
    assert one["rehearsal"]
    assert all(row["rehearsal"] for row in [*one["rows"], *run.rows()])


def test_all_points_fit_into_one_call_and_unknown_ones_are_named() -> None:
    assert sum(one.seconds for one in command.POINTS) <= 60 * 10.5
    assert [one.name for one in command.chosen("mixed, nvml")] == ["nvml", "mixed"]
    assert len(command.chosen("")) == len(command.POINTS) == 7
    with pytest.raises(ValueError, match="unknown point: mush; known are nvml, assignment, "):
        command.chosen("mush,nvml")


def test_points_without_a_gpu_say_what_is_missing() -> None:
    for one in command.POINTS:
        assert "GPU" in one.missing(Machine(2, torch="2.0")), one.name
        assert not one.missing(Machine(2, rehearsal=True)), one.name


@pytest.mark.parametrize(
    ("enforced", "with_gpu", "without", "holds"),
    [
        (True, ["opened", "EPERM"], ["EPERM", "EPERM"], [True, True]),
        (True, ["opened", "opened"], ["EPERM", "opened"], [False, False]),
        (False, ["opened", "opened"], ["opened", "opened"], [True, True]),
        (False, ["EPERM", "EPERM"], ["EPERM", "EPERM"], [False, False]),
    ],
)
def test_device_files_have_to_be_denied_exactly_where_the_node_enforces_it(
    enforced: bool, with_gpu: list[str], without: list[str], holds: list[bool]
) -> None:
    def found(answers: list[str]) -> dict[str, Any]:
        return {"files": {f"/dev/nvidia{minor}": answer for minor, answer in enumerate(answers)}, "made": {}}

    rows = assignment.isolation_rows(found(with_gpu), found(without), enforced=enforced)
    assert [row.holds for row in rows] == holds


def test_the_reached_rate_is_compared_with_the_best_by_hand() -> None:
    rates = {1: 10.0, 2: 20.0, 4: 30.0, 8: 30.0}
    reached, held, equal, requested = curve.reached_rows(rates, 29.0, 3, 8)
    assert reached.ratio == pytest.approx(0.967, abs=0.001)
    assert reached.holds is False
    assert (held.value, equal.value, requested.value) == (3, 30.0, 30.0)


def test_a_served_load_is_compared_with_the_latency_model() -> None:
    def answer(size: int) -> None:
        time.sleep(0.002 + 0.0002 * size)

    found: dict[str, Any] = {
        "most_per_second": 5000.0,
        "calibration": [(size, 0.002 + 0.0002 * size) for size in (1, 2, 4, 8) for _ in range(4)],
        "loads": {"0.5": service.serve(answer, 400.0, 0.3, seed=1)},
    }
    served = found["loads"]["0.5"]
    assert len(served["latencies"]) == sum(size for size, _ in served["batches"])
    most, mean, p95, p99 = inference.latency_rows(found)
    assert most.value == 5000.0
    assert mean.value <= p95.value <= p99.value
    assert mean.reference
    assert p99.reference
    assert mean.reference < p99.reference


def test_a_mix_that_waits_as_simulated_has_a_ratio_of_one() -> None:
    jobs = [mixed.MixedJob(0.0, JobKind.TRAINING, 1, 1, ("true",)) for _ in range(2)]
    ran = [mixed.Ran(100.0, 100.0, 110.0), mixed.Ran(100.0, 110.0, 120.0)]
    jct, makespan, waited, preemptions = mixed.compared(jobs, ran, NodeShape(1, 2))
    assert [jct.value, jct.reference] == pytest.approx([15.0, 15.0])
    assert jct.holds
    assert [makespan.value, makespan.reference] == pytest.approx([20.0, 20.0])
    assert (waited.value, preemptions.value) == (5.0, 0)


def test_a_line_of_a_step_log_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "steps"
    assert step_log.read(log) == []
    log.write_text("10.0 1 2\n11.0 3 2\n12.0 5")
    assert [entry.steps for entry in step_log.read(log)] == [1, 3]


@pytest.mark.parametrize("pillow", [True, False])
@pytest.mark.parametrize("model", ["image", "text", "audio"])
def test_batches_are_made_with_and_without_pillow(model: str, pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pillow and inputs.pictures is None:
        pytest.skip("needs Pillow")
    if not pillow:
        monkeypatch.setattr(inputs, "pictures", None)
    shape = inputs.shape_of(model, small=True)
    batch = inputs.make_batch(model, shape, 3)
    assert len(batch) == shape.batch
    assert np.array_equal(batch, inputs.make_batch(model, shape, 3)), "a batch is the same each time"
    assert not np.array_equal(batch, inputs.make_batch(model, shape, 4))


def test_wheels_are_those_of_the_locks_without_what_the_machine_has() -> None:
    texts = [(ROOT / "locks" / f"{name}.txt").read_text() for name in wheels.LOCKS]
    wanted = wheels.requirements(texts, ["NumPy", "scipy"])
    assert {"aetcd", "grpcio", "nvidia-ml-py", "psutil"} <= wanted.keys()
    assert not {"numpy", "scipy", "torch"} & wanted.keys()
    assert all("--hash=sha256:" in line and ";" not in line for line in wanted.values())
    assert "2.5" in wheels.requirements(texts, [], "3.12")["numpy"]


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_a_rehearsal_reads_the_stand_in_through_a_mesh(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearsal", "--only", "nvml", "--out", out, "--minutes-max", "4"],
        cwd=ROOT,
        env=os.environ | {"COTENANT_SHARE_MACHINE": "1", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.startswith("REHEARSAL") for line in done.stdout.splitlines())
    (nvml,) = written(out)["points"]
    assert (nvml["status"], nvml["why"]) == ("measured", "")
    figures = {row["name"]: row for row in nvml["rows"]}
    assert figures["GPUs of the node"]["value"] == 8
    assert figures["an absent driver is reported as absent"]["holds"]
    assert figures["processes left behind by a job that ended"]["holds"]
    if "not checked" not in str(written(out, "nvml")["raw"]["busy"]):
        assert figures["its pid is in the report"]["holds"]
