"""`status` reports parts that are slow but alive within 30 s, and stops once they recover."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Separate
from tests.end_to_end.slow_wire import SlowWire
from tests.end_to_end.waiting import until
from tests.support.etcd_server import EtcdServer

NAMED_SECONDS, WELL_SECONDS = 30.0, 60.0
ANSWER_SECONDS = 15.0  # for `status` itself, on a machine that has other things to do
STOPPED_SECONDS, RUNNING_SECONDS = 1.6, 0.3
SLOW_SECONDS = 0.15  # each way


@pytest.fixture
def wire(etcd: EtcdServer) -> Iterator[SlowWire]:
    wire = SlowWire(int(etcd.endpoint.rpartition(":")[2]))
    yield wire
    wire.close()


@pytest.fixture
def mesh(tmp_path: Path, wire: SlowWire) -> Iterator[Separate]:
    (tmp_path / "mesh").mkdir()  # the etcd, which outlives it, is beside it
    mesh = Separate(tmp_path / "mesh", store=f"etcd://127.0.0.1:{wire.port}")
    try:
        mesh.start(*mesh.parts)
        yield mesh
    finally:
        mesh.close()


@contextmanager
def stuttering(*pids: int) -> Iterator[None]:
    """Pause and resume processes repeatedly."""
    over = threading.Event()

    def send(what: signal.Signals) -> None:
        for pid in pids:
            os.kill(pid, what)

    def run() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            over.wait(STOPPED_SECONDS)
            send(signal.SIGCONT)
            over.wait(RUNNING_SECONDS)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def problems(mesh: Separate) -> list[str]:
    return [f"{one['where']}: {one['what']}" for one in mesh.cli.json_of_any_end("status")["problems"]]


@pytest.mark.deep
def test_a_slow_process_agent_and_store_are_reported_within_30_s_and_cleared_afterwards(
    mesh: Separate, wire: SlowWire
) -> None:
    contention = f"contention {mesh.address('contention')}"

    def named(*beginnings: str) -> bool:
        reported = problems(mesh)
        return all(any(one.startswith(beginning) for one in reported) for beginning in beginnings)

    until(lambda: not problems(mesh), "healthy mesh")
    with stuttering(mesh.processes["contention"].pid, mesh.processes["agent"].pid):
        agent = f"{mesh.cli.json('nodes')[0]['id']}: its agent"
        loop = f"{contention}: its event loop was behind by up to "
        until(lambda: named(loop, agent), "reports of the stuttering parts", seconds=NAMED_SECONDS + ANSWER_SECONDS)
    wire.delay_seconds = SLOW_SECONDS
    until(lambda: named("store: slow to answer"), "report of the slow store", seconds=NAMED_SECONDS + ANSWER_SECONDS)
    wire.delay_seconds = 0.0
    until(lambda: not problems(mesh), "recovery of the mesh", seconds=WELL_SECONDS)
