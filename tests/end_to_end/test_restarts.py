"""Across crashes and restarts, running jobs continue, and no acknowledged job is lost or run twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import require_etcd
from tests.end_to_end.meshes import SERVICES, Mesh, Separate
from tests.end_to_end.scripts import Counter, Load
from tests.end_to_end.waiting import until
from tests.support.etcd_server import EtcdServer
from tests.support.properties import amount

from cotenant.core.model.lifecycle import Phase

ONE_CORE = ("--cpus", "1")
ALL_GPUS = ("--gpus", "4", *ONE_CORE)
JOBS_AT_ONCE = 4
KILLED = SERVICES[-amount(3, deep=len(SERVICES)) :]  # in `make test`, those without which jobs do not run
STORE_NOTICED_SECONDS_MAX = 30.0


@pytest.mark.deep
@pytest.mark.parametrize("end", [Mesh.stop, Mesh.kill], ids=["SIGTERM", "kill -9"])
def test_jobs_continue_while_the_mesh_is_down(mesh: Mesh, tmp_path: Path, end: Callable[[Mesh], None]) -> None:
    holder, ended_meanwhile = Counter(tmp_path, "holder"), Counter(tmp_path, "meanwhile")
    held = mesh.cli.submit("--gpus", "3", *ONE_CORE, *holder.command)
    gone = mesh.cli.submit("--gpus", "1", *ONE_CORE, *ended_meanwhile.command)
    for job_id in (held, gone):
        mesh.client.wait_for(job_id, Phase.RUNNING)
    waiting = mesh.cli.submit(*ALL_GPUS, "--", "true")
    end(mesh)
    holder.wait_for_more()
    ended_meanwhile.wait_for_more()
    ended_meanwhile.finish(7)
    assert "cotenant up" in mesh.cli("jobs", code=3).err
    mesh.start()
    assert mesh.client.phase(held) is Phase.RUNNING
    assert "status 7" in mesh.client.wait_for(gone, Phase.FAILED).phase_reason
    assert mesh.client.phase(waiting) is Phase.QUEUED
    holder.wait_for_more()
    holder.finish()
    assert mesh.client.wait_for(held, Phase.SUCCEEDED).attempt.number == 1
    holder.assert_one_life()
    mesh.client.wait_for(waiting, Phase.SUCCEEDED)


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    """Services with separate SQLite files."""
    services = Separate(tmp_path_factory.mktemp("separate"))
    services.start(*SERVICES)
    yield services
    services.close()


@pytest.mark.parametrize("service", KILLED)
def test_a_service_is_killed_under_load(separate: Separate, tmp_path: Path, service: str) -> None:
    killed_under_load(separate, tmp_path, service)


@pytest.fixture(scope="module")
def module_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd shared by the tests of this module."""
    require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def on_etcd(module_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    """Services on one etcd."""
    services = Separate(tmp_path_factory.mktemp("on_etcd"), store=module_etcd.url)
    services.start(*SERVICES)
    yield services
    services.close()


@pytest.mark.deep
@pytest.mark.parametrize("service", KILLED)
def test_a_service_on_etcd_is_killed_under_load(on_etcd: Separate, tmp_path: Path, service: str) -> None:
    killed_under_load(on_etcd, tmp_path, service)


@pytest.mark.deep
def test_the_mesh_survives_a_store_outage(on_etcd: Separate, module_etcd: EtcdServer, tmp_path: Path) -> None:
    counter, load = Counter(tmp_path, "running"), Load(tmp_path, on_etcd.client)
    running = on_etcd.client.wait_for(on_etcd.cli.submit(*ONE_CORE, *counter.command), Phase.RUNNING).id
    load.submit(JOBS_AT_ONCE)
    module_etcd.kill()
    refused = on_etcd.cli("submit", *ONE_CORE, "--", "true", code=3)
    assert "the store is unavailable" in refused.error
    until(
        lambda: not on_etcd.client.serving("cotenant.v1.JobService"), "NOT_SERVING", seconds=STORE_NOTICED_SECONDS_MAX
    )
    assert on_etcd.cli.json("show", running)["phase"] == "running"
    counter.wait_for_more()
    module_etcd.start()
    load.submit(JOBS_AT_ONCE)
    load.wait_until_done()
    until(lambda: on_etcd.client.serving("cotenant.v1.JobService"), "SERVING", seconds=STORE_NOTICED_SECONDS_MAX)
    counter.finish()
    assert on_etcd.client.wait_for(running, Phase.SUCCEEDED).attempt.number == 1
    counter.assert_one_life()


def killed_under_load(services: Separate, directory: Path, service: str) -> None:
    """Kill a service while jobs run, wait and are submitted; restart it; check that no job is lost or run twice."""
    counter, load = Counter(directory, "running"), Load(directory, services.client)
    running = services.client.wait_for(services.cli.submit(*ONE_CORE, *counter.command), Phase.RUNNING).id
    load.submit(JOBS_AT_ONCE)
    services.kill(service)
    counter.wait_for_more()
    if service != "queue":
        load.submit(JOBS_AT_ONCE)
    services.start(service)
    load.submit(JOBS_AT_ONCE)
    load.wait_until_done()
    counter.finish()
    assert services.client.wait_for(running, Phase.SUCCEEDED).attempt.number == 1
    counter.assert_one_life()
