"""Sharing: two small trainings with half a GPU each, alone and together, against what the interference model says."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

from benchmarks.gpu.machine import Machine, missing_gpu
from benchmarks.gpu.points import Point, PointRun
from benchmarks.gpu.programs import step_log
from benchmarks.harness import Row
from benchmarks.local_mesh import LocalMesh

from cotenant.core.placement.interference import SHARED_GPU

SETTINGS = 'shareable_gpus = true\ncontention = "none"\n'
MODELS = ("text", "audio")
MPS = "nvidia-cuda-mps-control"
STARTED_SECONDS_MAX, MPS_SECONDS_MAX = 60.0, 10.0
WARM_SECONDS, MEASURED_SECONDS = 2.0, 6.0
MPS_SECONDS = 40.0  # for the same once more beneath MPS


def measure(run: PointRun) -> Iterator[Row]:
    """Measure by time slices, as the driver shares a GPU by itself; then beneath MPS, where it starts."""
    with closing(LocalMesh(run.directory, SETTINGS)) as up:
        yield from share_rows("", *_rates(run, up, "slices", {}))
        if run.left() < MPS_SECONDS:
            run.raw["mps"] = "no time left"
            return
        with _mps(run.machine, run.directory) as variables:
            run.raw["mps"] = "started" if variables else f"{MPS} is missing or does not start"
            if variables:
                yield from share_rows("MPS: ", *_rates(run, up, "mps", variables))


def _rates(
    run: PointRun, up: LocalMesh, name: str, variables: Mapping[str, str]
) -> tuple[dict[str, float], dict[str, float], bool]:
    """Return each model's rate alone and beside the other, and whether both were on one GPU."""
    seconds = min(MEASURED_SECONDS, run.left() / 8)
    first, second = MODELS
    log, job, _ = _submit(run, up, f"{name}-alone", first, variables)
    alone = {first: _rate(log, seconds)}
    up.run("cancel", job)
    up.wait_for_end(job)
    logs = {}
    logs[second], job, gpu = _submit(run, up, f"{name}-{second}", second, variables)
    alone[second] = _rate(logs[second], seconds)
    logs[first], other, other_gpu = _submit(run, up, f"{name}-{first}", first, variables)
    time.sleep(WARM_SECONDS)
    begin = time.time()
    time.sleep(seconds)
    end = time.time()
    together = {model: step_log.rate(step_log.read(log), begin, end) for model, log in logs.items()}
    run.raw[f"{name}_rates"] = {"alone": alone, "together": together, "gpus": [gpu, other_gpu]}
    up.run("cancel", job, other)
    up.wait_for_end(job)
    up.wait_for_end(other)
    return alone, together, gpu == other_gpu


def _submit(run: PointRun, up: LocalMesh, name: str, model: str, variables: Mapping[str, str]) -> tuple[Path, str, str]:
    """Start a training with half a GPU, wait for its first steps, and return its log, its id and its GPU."""
    log = run.directory / f"{name}.steps"
    environment = chain.from_iterable(("--env", f"{key}={value}") for key, value in variables.items())
    cores = max(1, run.machine.cores // 4)
    words = ["--gpus", "0.5", "--cpus", str(cores), "--profile", "never", *environment]
    job = up.submit(*words, "--", *run.machine.train(model, log, "--workers", cores))
    up.until(lambda: len(step_log.read(log)) > 1, f"the first steps of {name}", STARTED_SECONDS_MAX)
    (allocation,) = up.json("show", job)["attempt"]["allocations"]
    return log, job, allocation["tasks"][0]["gpus"][0]["uuid"]


def _rate(log: Path, seconds: float) -> float:
    time.sleep(WARM_SECONDS)
    begin = time.time()
    time.sleep(seconds)
    return step_log.rate(step_log.read(log), begin, time.time())


def share_rows(name: str, alone: Mapping[str, float], together: Mapping[str, float], same_gpu: bool) -> Iterator[Row]:
    """Yield what each training keeps of its rate beside the other, and what the model assumes."""
    yield Row(f"{name}both trainings on one GPU", float(same_gpu), "", bar="1", holds=same_gpu)
    for model, rate in alone.items():
        yield Row(f"{name}{model}: rate alone", rate, "steps/s")
        kept = together[model] / rate if rate else 0.0
        yield Row(f"{name}{model}: kept beside the other", kept, "of its rate alone", SHARED_GPU, "the model")
    total = sum(together[model] / rate for model, rate in alone.items() if rate)
    yield Row(f"{name}done by both, of a GPU's work", total, "", 2 * SHARED_GPU, "the model")


@contextmanager
def _mps(machine: Machine, directory: Path) -> Iterator[dict[str, str]]:
    """Run an MPS server with pipes of its own; yield the variables of its clients, none if it does not start."""
    command = shutil.which(MPS)
    if machine.rehearsal or command is None:
        yield {}
        return
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(directory / "mps")}
    (directory / "mps").mkdir()
    environment = os.environ | variables
    try:
        started = subprocess.run([command, "-d"], env=environment, timeout=MPS_SECONDS_MAX, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        started = False
    try:
        yield variables if started else {}
    finally:
        if started:
            subprocess.run([command], input=b"quit\n", env=environment, timeout=MPS_SECONDS_MAX, check=False)


POINT = Point("sharing", 60.0, 35.0, measure, missing_gpu)
