"""NVML: what the agent reads of GPUs and at what cost, an absent driver, a busy GPU, a process that a job leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.points import Point, PointRun
from benchmarks.gpu.stand_in import foreign_process
from benchmarks.harness import Row
from benchmarks.local_mesh import ROOT, LocalMesh

from cotenant.node_agent.control.node_health import PROCESSES_UNKNOWN
from cotenant.node_agent.probes.nvml_link import NvmlLink, NvmlNotFound
from cotenant.node_agent.probes.nvml_process import LIBRARY

READINGS, CORE_PERCENT_MAX, AGENT_MIB_MAX = 20, 1.0, 80.0  # the bars of benchmarks/agent.py
OPTIONAL = ("utilisation_percent", "temperature_celsius")  # None if the driver does not support them
NOTICED_SECONDS_MAX, RELEASED_SECONDS_MAX = 60.0, 60.0
IDLE_SECONDS, REHEARSED_IDLE_SECONDS = 15.0, 2.0
START_SECONDS_MAX = 60.0  # of a program that imports torch
MIB = 1 << 20


def measure(run: PointRun) -> Iterator[Row]:
    """Read NVML directly, then look at a mesh that uses it."""
    yield from asyncio.run(_link_rows(run))
    yield asyncio.run(_absent_row(run))
    with closing(LocalMesh(run.directory, "")) as up:
        yield Row("`cotenant up` takes to start", up.start_seconds, "s")
        yield from _inventory_rows(run, up)
        yield from _cost_rows(run, up)
        yield from _busy_rows(run, up)
        yield from _outlived_rows(run, up)


async def _link_rows(run: PointRun) -> list[Row]:
    link = NvmlLink(Path("/sys"))
    try:
        gpus = await link.gpus()
        begin = time.perf_counter()
        for _ in range(READINGS):
            readings = await link.readings()
        milliseconds = 1000 * (time.perf_counter() - begin) / READINGS
    finally:
        await link.close()
    run.raw |= {"gpus": gpus, "readings": readings, "troubles": link.troubles, "without_events": link.unwatched}
    supported = sum(reading.get(name) is not None for reading in readings for name in OPTIONAL)
    failed = sum("error" in reading for reading in readings)
    watched = len(gpus) - len(link.unwatched)
    return [
        Row("GPUs that NVML lists", len(gpus), "", bar="at least 1", holds=bool(gpus)),
        Row("one reading of all GPUs", milliseconds, "ms"),
        Row("GPUs that cannot be read", failed, "", bar="none", holds=not failed),
        Row("optional sensors supported", supported, "", len(OPTIONAL) * len(gpus), "all"),
        Row("GPUs whose XIDs are watched", watched, "", len(gpus), "all", "all", watched == len(gpus)),
    ]


async def _absent_row(run: PointRun) -> Row:
    """Hide the driver's library from one process, behind an empty file of its name."""
    hidden = run.directory / "hidden"
    hidden.mkdir()
    (hidden / LIBRARY).touch()
    with _variable("LD_LIBRARY_PATH", str(hidden)):
        link = NvmlLink(Path("/sys"))
        try:
            gpus = await link.gpus()
            found = f"{len(gpus)} GPUs"
        except NvmlNotFound:
            found = ""
        finally:
            await link.close()
    run.raw["without_library"] = found or "not found"
    return Row("an absent driver is reported as absent", float(not found), "", bar="1", holds=not found)


def _inventory_rows(run: PointRun, up: LocalMesh) -> Iterator[Row]:
    (node,) = up.json("nodes")
    card = run.raw["node"] = up.json("nodes", node["id"])
    ours = {gpu["uuid"]: gpu for gpu in card["gpu_list"]}
    driver = {gpu.uuid: gpu for gpu in run.machine.gpus}
    run.raw["nvidia_smi"] = [asdict(gpu) for gpu in run.machine.gpus]
    same = ours.keys() & driver.keys()
    holds = ours.keys() == driver.keys() if driver else None
    yield Row("GPUs of the node", len(ours), "", len(driver), "nvidia-smi", "the same UUIDs", holds)
    if same:
        off = max(abs(ours[uuid]["memory_bytes"] / MIB - driver[uuid].memory_mib) for uuid in same)
        yield Row("their memory, largest difference", off, "MiB", bar="at most 1", holds=off <= 1)
    healthy = len(ours) - len(node["gpus_unhealthy"])
    yield Row("healthy GPUs", healthy, "", len(ours), "all", "all", healthy == len(ours))


def _cost_rows(run: PointRun, up: LocalMesh) -> Iterator[Row]:
    """Measure the agent and its process for NVML while nothing runs."""
    own = _agent_processes(up)
    begin, before = time.monotonic(), {name: sum(process.cpu_times()[:2]) for name, process in own.items()}
    time.sleep(REHEARSED_IDLE_SECONDS if run.machine.rehearsal else min(IDLE_SECONDS, run.left() / 4))
    seconds = time.monotonic() - begin
    spent = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in own.items()}
    for name in own:
        yield Row(f"{name}, idle: processor", 100 * spent[name] / seconds, "% of a core")
    total = 100 * sum(spent.values()) / seconds
    bar = f"at most {CORE_PERCENT_MAX:g}"
    yield Row("both: processor", total, "% of a core", bar=bar, holds=total <= CORE_PERCENT_MAX)
    unique = {name: process.memory_full_info().uss / MIB for name, process in own.items()}
    for name, mebibytes in unique.items():
        yield Row(f"{name}: private memory", mebibytes, "MiB")
    total = sum(unique.values())
    yield Row("both: private memory", total, "MiB", bar=f"at most {AGENT_MIB_MAX:g}", holds=total <= AGENT_MIB_MAX)


def _agent_processes(up: LocalMesh) -> dict[str, psutil.Process]:
    """Return the agent and its process for NVML."""
    marks = {"agent": "cotenant.node_agent", "process for NVML": "nvml_process.py"}
    below = psutil.Process(up.process.pid).children(recursive=True)
    found = {}
    for name, mark in marks.items():
        found[name] = next(process for process in below if any(mark in word for word in process.cmdline()))
    return found


def _busy_rows(run: PointRun, up: LocalMesh) -> Iterator[Row]:
    """Let a process that is no job hold a GPU, and see that the node reports it until it has gone."""
    if PROCESSES_UNKNOWN in up.json("nodes")[0]["not_enforced"]:
        run.raw["busy"] = f"not checked: {PROCESSES_UNKNOWN}"
        return
    told = run.directory / "foreign"
    device = "cuda" if run.machine.device == "cuda" else "none"
    command = run.machine.program("hold", "--device", device, "--pid-file", told)
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        up.until(told.exists, "a process that holds the GPU", START_SECONDS_MAX)
        begin = time.monotonic()
        with foreign_process(run.machine, process.pid):
            reason = up.until(lambda: _unhealthy(up), "the busy GPU to be reported", NOTICED_SECONDS_MAX)
            noticed = time.monotonic() - begin
            run.raw["busy"] = reason
            names = str(process.pid) in reason
            process.kill()
            process.wait()
        yield Row("a process of somebody else is reported after", noticed, "s")
        yield Row("its pid is in the report", float(names), "", bar="1", holds=names)
        begin = time.monotonic()
        up.until(lambda: not _unhealthy(up), "the GPU to be free again", RELEASED_SECONDS_MAX)
        yield Row("the GPU is free again after", time.monotonic() - begin, "s")
    finally:
        process.kill()
        process.wait()


def _unhealthy(up: LocalMesh) -> str:
    return "; ".join(up.json("nodes")[0]["gpus_unhealthy"].values())


def _outlived_rows(run: PointRun, up: LocalMesh) -> Iterator[Row]:
    """Run a job that leaves a process behind, and see that it has gone when the job has ended."""
    told = run.directory / "outliving"
    device = "cuda" if run.machine.device == "cuda" else "none"
    command = run.machine.program("hold", "--device", device, "--pid-file", told, "--outlive")
    job = up.submit("--gpus", "1", "--cpus", "1", "--", *command)
    up.until(told.exists, "a job that holds the GPU", START_SECONDS_MAX)
    view = up.wait_for_end(job, START_SECONDS_MAX)
    alive = sum(str(told) in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    run.raw["outlived"] = {"phase": view["phase"], "reason": view["phase_reason"], "unhealthy": _unhealthy(up)}
    yield Row("processes left behind by a job that ended", alive, "", bar="none", holds=not alive)
    free = not _unhealthy(up)
    yield Row("GPUs free after it", float(free), "", bar="1", holds=free)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def missing(machine: Machine) -> str:
    """Return why NVML cannot be checked here; empty if it can."""
    return "" if machine.rehearsal or machine.gpus else "nvidia-smi lists no GPU"


POINT = Point("nvml", 60.0, 30.0, measure, missing)
