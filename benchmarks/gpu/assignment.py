"""Assignment: which GPUs jobs see and can open, with a GPU and without, against what the node says it enforces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import missing_gpu
from benchmarks.gpu.points import Point, PointRun
from benchmarks.harness import Row
from benchmarks.local_mesh import LocalMesh, MeshFailed

from cotenant.node_agent.enforcement.gpu_devices import ADVISORY

JOB_SECONDS_MAX = 60.0  # it imports torch twice
STAND_IN_GPUS = 8
DENIED = "EPERM"


def measure(run: PointRun) -> Iterator[Row]:
    """Run a job with a GPU and one without, and compare what they find."""
    with closing(LocalMesh(run.directory, "")) as up:
        (node,) = up.json("nodes")
        advisory = [sentence for sentence in node["not_enforced"] if ADVISORY in sentence]
        run.raw["not_enforced"] = node["not_enforced"]
        yield Row("the kernel isolates GPUs, says the node", float(not advisory), "")
        with_gpu = run.raw["with_gpu"] = _findings(run, up, "1")
        without = run.raw["without_gpu"] = _findings(run, up, "0")
        yield from seen_rows(with_gpu)
        yield from isolation_rows(with_gpu["found"], without["found"], enforced=not advisory)


def _findings(run: PointRun, up: LocalMesh, gpus: str) -> dict[str, Any]:
    """Run a job that looks, and return what it found and the GPUs that it was assigned."""
    out = run.directory / f"devices-{gpus}.json"
    options = ["--make-minors", STAND_IN_GPUS] if run.machine.rehearsal else ["--torch"]
    command = run.machine.program("devices", "--out", out, *options)
    job = up.submit("--gpus", gpus, "--cpus", "1", "--", *command)
    view = up.wait_for_end(job, JOB_SECONDS_MAX)
    if not out.exists():
        raise MeshFailed(f"job {job} {view['phase']}: {view['phase_reason']}: {up.run('logs', job)[-1000:]}")
    attempt = view["attempt"] or {}
    tasks = [task for allocation in attempt.get("allocations", []) for task in allocation["tasks"]]
    return {"assigned": [gpu["uuid"] for task in tasks for gpu in task["gpus"]], "found": read(out)}


def read(path: Path) -> dict[str, Any]:
    """Return the findings of a job."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def seen_rows(job: dict[str, Any]) -> Iterator[Row]:
    """Yield whether a job with a GPU sees the one that it was assigned, and no other."""
    shown = job["found"]["variables"]["CUDA_VISIBLE_DEVICES"]
    same = shown == ",".join(job["assigned"])
    yield Row("CUDA_VISIBLE_DEVICES has the assigned UUID", float(same), "", bar="1", holds=same)
    if isinstance(seen := job["found"].get("torch"), list):
        names = {uuid.removeprefix("GPU-") for uuid in seen}
        same = names == {uuid.removeprefix("GPU-") for uuid in job["assigned"]}
        yield Row("GPUs that torch sees", len(seen), "", len(job["assigned"]), "assigned", "the same", same)
    elif seen is not None:
        yield Row("GPUs that torch sees", 0, "", len(job["assigned"]), "assigned", "the same", False)


def isolation_rows(with_gpu: dict[str, Any], without: dict[str, Any], *, enforced: bool) -> Iterator[Row]:
    """Yield which device files the kernel denies; where it isolates GPUs, it has to deny what a job does not hold."""
    own = {**with_gpu["files"], **with_gpu["made"]}
    others = {**without["files"], **without["made"]}
    denied = sum(answer == DENIED for answer in others.values())
    expected = len(others) if enforced else 0
    yield Row(
        "device files denied to a job without GPUs", denied, "", len(others), "tried",
        "all where it is enforced, else none", denied == expected,
    )  # fmt: skip
    open_to_it = sum(answer != DENIED for answer in own.values())
    wanted = 1 if enforced else len(own)
    yield Row(
        "device files not denied to a job with one GPU", open_to_it, "", len(own), "tried",
        "one where it is enforced, else all", open_to_it == wanted,
    )  # fmt: skip
    if "undone" in without:
        count = len(without["undone"]) if isinstance(without["undone"], list) else 0
        name, bar = "GPUs for a job without any that removes the variables", "none where it is enforced"
        yield Row(name, count, "", bar=bar, holds=not (enforced and count))


POINT = Point("assignment", 45.0, 25.0, measure, missing_gpu)
