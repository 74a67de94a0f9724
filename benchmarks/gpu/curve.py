"""S(C): rates of three kinds of training by cores, measured by hand, and what `--cpus auto` finds in a mesh."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import Any

from benchmarks.gpu.cores import counts, curve, rate_at, running, useful
from benchmarks.gpu.machine import missing_gpu
from benchmarks.gpu.points import Point, PointRun
from benchmarks.gpu.programs import step_log
from benchmarks.gpu.programs.train import MODELS
from benchmarks.harness import Row
from benchmarks.local_mesh import LocalMesh

SETTINGS = """
predictor = "xiao-piecewise,history"
window_seconds = 2.0
profile_seconds = 60.0
contention = "none"
"""
HAND_SECONDS, SHORT_SECONDS, SETTLED_SECONDS = 3.5, 2.0, 6.0  # at each number of cores; on the cores found
HAND_SHARE = 0.55  # of the time, for curves by hand
REQUESTED_CORES = 4  # what a user who does not know better asks for
REACHED_MIN = 0.98
RUNNING_SECONDS_MAX, PROFILED_SECONDS_MAX = 60.0, 120.0


def measure(run: PointRun) -> Iterator[Row]:
    """Measure the curves, the image model's whole, then let the mesh find its cores."""
    hand_end = run.clock() + HAND_SHARE * run.left()
    curves: dict[str, dict[int, float]] = {}
    for model in MODELS:
        whole = model == MODELS[0]
        if not whole and run.clock() > hand_end:
            run.raw[f"{model}_skipped"] = "no time left"
            continue
        numbers = counts(run.machine.cores)
        numbers = numbers if whole else [number for number in numbers if number & (number - 1) == 0]
        log = run.directory / f"{model}.steps"
        with running(run.machine.train(model, log, "--workers", run.machine.cores), log) as program:
            seconds = HAND_SECONDS if whole else SHORT_SECONDS
            rates = curve(program, numbers, seconds, lambda: run.clock() > hand_end)
        if rates:
            curves[model] = run.raw[f"{model}_rates"] = rates
            yield from hand_rows(model, rates)
    yield from _auto_rows(run, curves[MODELS[0]])


def hand_rows(model: str, rates: Mapping[int, float]) -> Iterator[Row]:
    """Yield a curve, each rate beside the best."""
    best = max(rates.values())
    for number, rate in rates.items():
        yield Row(f"{model}: rate on {number} cores", rate, "steps/s", best, "best")
    yield Row(f"{model}: cores that reach 98 % of the best rate", useful(rates), "cores")


def _auto_rows(run: PointRun, rates: Mapping[int, float]) -> Iterator[Row]:
    """Submit the first model with `--cpus auto`, and wait until its cores are found and given."""
    log = run.directory / "auto.steps"
    command = run.machine.train(MODELS[0], log, "--workers", run.machine.cores)
    with closing(LocalMesh(run.directory, SETTINGS)) as up:
        options = ("--gpus", "1", "--cpus", "auto", "--model", "gpu-check", "--steps", "1000000")
        job = up.submit(*options, "--", *command)
        up.until(lambda: step_log.read(log), "its first step", RUNNING_SECONDS_MAX)
        begin = time.time()
        explained = up.until(lambda: _profiled(up, job), "its profile", PROFILED_SECONDS_MAX)
        found = time.time()
        run.raw["explained"] = explained
        theta = explained["estimate"]["cores_useful"] or 0
        yield Row("auto: cores found", theta, "cores", useful(rates), "by hand")
        yield Row("auto: until they are found", found - begin, "s")
        time.sleep(min(SETTLED_SECONDS, run.left() / 3))  # the allocator follows at its next check
        seconds = min(SETTLED_SECONDS, run.left() / 2)
        settled = time.time()
        time.sleep(seconds)
        entries = step_log.read(log)
        tried = [cores for cores, _ in groupby(entry.cores for entry in entries)]
        run.raw["cores_over_time"] = tried
        yield Row("auto: changes of its cores", len(tried) - 1, "")
        reached = step_log.rate(entries, settled, time.time())
        yield from reached_rows(rates, reached, entries[-1].cores, run.machine.cores)


def _profiled(up: LocalMesh, job: str) -> dict[str, Any]:
    explained: dict[str, Any] = up.json("explain", job)
    done = any(event["kind"] == "profiled" for event in explained["events"])
    return explained if done and explained["estimate"] else {}


def reached_rows(rates: Mapping[int, float], reached: float, held: int, cores: int) -> Iterator[Row]:
    """Yield the rate that was reached beside the best by hand, and what fixed numbers of cores would have reached."""
    best = max(rates.values())
    holds = reached >= REACHED_MIN * best
    bar = f"at least {REACHED_MIN:g} of it"
    yield Row("auto: rate reached", reached, "steps/s", best, "best by hand", bar, holds)
    yield Row("auto: cores held then", held, "cores", cores, "of the machine")
    fixed = {"an equal share": cores, f"{REQUESTED_CORES} cores requested": min(REQUESTED_CORES, cores)}
    for name, number in fixed.items():
        yield Row(f"{name}: rate by hand", rate_at(rates, number), "steps/s", best, "best by hand")


POINT = Point("curve", 165.0, 60.0, measure, missing_gpu)
