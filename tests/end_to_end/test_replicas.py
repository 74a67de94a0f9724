"""Two replicas of queue and placement on one etcd: either may be killed at any time without loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from tests.conftest import require_etcd
from tests.end_to_end.meshes import REPLICATED, Separate
from tests.end_to_end.scripts import Counter, Load
from tests.end_to_end.waiting import until
from tests.support.etcd_server import EtcdServer
from tests.unit.services.histories import ATTEMPTS, History

from cotenant.core.model.lifecycle import Phase
from cotenant.internal.v1.placement_service_pb2 import GetCapacityRequest
from cotenant.internal.v1.placement_service_pb2_grpc import PlacementServiceStub
from cotenant.storage.v1 import records_pb2
from cotenant.store.etcd import EtcdStore
from cotenant.store.local_store import changes_under
from cotenant.store.port import Changes

TAKEN_OVER_SECONDS_MAX = 3.0
PAUSE_SECONDS = 0.2  # between two jobs: limits the load on the agent
ONE_CORE = ("--cpus", "1")


@pytest.fixture(scope="module")
def etcd_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """The store shared by all parts."""
    require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, etcd_of_all: EtcdServer) -> Iterator[Separate]:
    """A mesh with two replicas of queue and placement."""
    parts = Separate(tmp_path_factory.mktemp("replicated"), store=etcd_of_all.url, parts=REPLICATED)
    parts.start(*REPLICATED)
    yield parts
    parts.close()


async def leader(etcd: EtcdServer, service: str) -> records_pb2.StoredLeader | None:
    store = EtcdStore([etcd.endpoint])
    try:
        entry = await store.get(f"{service}/leader")
        return records_pb2.StoredLeader.FromString(entry.value) if entry else None
    finally:
        await store.close()


async def leading_part(mesh: Separate, etcd: EtcdServer, service: str) -> str:
    found = await leader(etcd, service)
    assert found
    return next(part for part in mesh.ports if mesh.address(part) == found.address)


async def history_of(etcd: EtcdServer) -> History:
    """Return every commit of placement from the start."""
    store, history = EtcdStore([etcd.endpoint]), History()
    last = (await store.list(ATTEMPTS)).revision
    try:
        async for changes in store.watch("", after_revision=1):
            assert isinstance(changes, Changes)
            if under := changes_under(ATTEMPTS, changes):
                history.look(under)
            if changes.revision >= last:
                return history
    finally:
        await store.close()
    raise AssertionError("the store was closed")


def ask_for_capacity(mesh: Separate) -> None:
    """Ask a running placement replica a question that only the leader can answer."""
    token = (mesh.state_dir / "token").read_text().strip()
    with grpc.insecure_channel(mesh.reached("placement")) as channel:
        PlacementServiceStub(channel).GetCapacity(
            GetCapacityRequest(), metadata=(("authorization", f"Bearer {token}"),), timeout=20.0
        )


class Submitting:
    """Submits small jobs one after another until stopped; records when each was acknowledged."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.times: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(PAUSE_SECONDS):
            self.load.submit(1)
            self.times.append(time.monotonic())

    def answered_after(self, at: float) -> float:
        """Wait for the first acknowledgment after a time and return when it came."""
        return until(lambda: next((one for one in self.times if one > at), 0.0), "answer after a leader's death")

    def stop(self) -> None:
        """Stop submitting."""
        self._over.set()
        self._thread.join()


def test_replicas_shows_the_leaders(mesh: Separate) -> None:
    found = mesh.cli.json("replicas")
    states = sorted((one["service"], one["state"]) for one in found)
    assert states == [
        ("contention", "serves"),
        ("placement", "follows"),
        ("placement", "leads"),
        ("predictor", "leads"),
        ("queue", "follows"),
        ("queue", "leads"),
    ]
    assert {one["release"] for one in found} == {metadata.version("cotenant")}
    for one in found[1:]:
        (leader,) = [other for other in found if other["service"] == one["service"] and other["state"] == "leads"]
        assert (one["leader"], one["term"]) == (leader["address"], leader["term"])
        assert (one["revision"] is not None) == (one["state"] == "follows")
    assert mesh.cli("replicas").out.startswith("SERVICE")


@pytest.mark.deep
def test_one_address_is_enough_for_all_replicas(mesh: Separate) -> None:
    def states(*words: str) -> list[tuple[str, str, str, str]]:
        found = mesh.cli.json("replicas", *words)
        return sorted((one["service"], one["address"], one["state"], one["leader"] or "") for one in found)

    def agree(*words: str) -> bool:
        return states(*words) == states()

    for entry in mesh.ports:
        endpoint = ("--endpoint", mesh.address(entry))
        until(partial(agree, *endpoint), "both to tell of the same leaders")
        mesh.cli("submit", *endpoint, *ONE_CORE, "--wait", "--", "true")
        assert mesh.cli.json("nodes", *endpoint)


def test_status_shows_the_whole_mesh_and_its_store(mesh: Separate, etcd_of_all: EtcdServer) -> None:
    reported = mesh.cli.json("status")
    assert (reported["well"], reported["problems"]) == (True, [])
    (member,) = reported["store"]
    assert (member["endpoint"], member["leads"], member["problem"]) == (etcd_of_all.endpoint, True, None)
    assert sum(reported["nodes"].values()) == 1


@pytest.mark.deep
def test_a_rolling_restart_of_all_parts_does_not_affect_jobs(mesh: Separate, tmp_path: Path) -> None:
    holder, load = Counter(tmp_path, "holder"), Load(tmp_path, mesh.client)
    held = mesh.cli.submit(*ONE_CORE, *holder.command)
    mesh.client.wait_for(held, Phase.RUNNING)
    submitting = Submitting(load)
    for part in ("queue-a", "queue-b", "placement-a", "placement-b"):
        process = mesh.processes.pop(part)
        asked = time.monotonic()
        assert process.terminate() == 0
        submitting.answered_after(asked)
        mesh.start(part)
    submitting.stop()
    load.wait_until_done()
    assert mesh.client.job(held).attempt.number == 1
    holder.finish()
    mesh.client.wait_for(held, Phase.SUCCEEDED)
    holder.assert_one_life()


@pytest.mark.parametrize("service", ["queue", "placement"])
async def test_a_killed_leader_is_replaced_under_load(
    mesh: Separate, etcd_of_all: EtcdServer, tmp_path: Path, service: str
) -> None:
    holder, load = Counter(tmp_path, "holder"), Load(tmp_path, mesh.client)
    held = mesh.cli.submit(*ONE_CORE, *holder.command)
    mesh.client.wait_for(held, Phase.RUNNING)
    submitting = Submitting(load)
    until(lambda: len(submitting.times) >= 3, "some jobs")
    part = await leading_part(mesh, etcd_of_all, service)
    process = mesh.processes.pop(part)  # the client uses the other replica from now on
    killed = time.monotonic()
    process.kill()
    if service == "queue":
        took_seconds = submitting.answered_after(killed + 0.1) - killed
    else:
        ask_for_capacity(mesh)
        took_seconds = time.monotonic() - killed
    print(f"{service}: another process led and answered {took_seconds:.2f} s after the leader was killed")
    submitting.stop()
    assert took_seconds <= TAKEN_OVER_SECONDS_MAX
    mesh.start(part)
    load.wait_until_done()
    holder.wait_for_more()
    assert mesh.client.job(held).attempt.number == 1
    holder.finish()
    mesh.client.wait_for(held, Phase.SUCCEEDED)
    holder.assert_one_life()
    history = await history_of(etcd_of_all)
    assert history.wrong == []
    assert history.revisions > len(load.acknowledged)


@pytest.mark.deep
@pytest.mark.timeout(300)
async def test_a_schedule_that_is_due_while_its_leader_is_killed_runs_once(
    mesh: Separate, etcd_of_all: EtcdServer
) -> None:
    made = mesh.cli("submit", "--every", "* * * * *", "--name", "tick", "--workdir", "none", *ONE_CORE, "--", "true")
    schedule_id = made.out.strip()
    due = datetime.fromisoformat(mesh.cli.json("schedules", "show", schedule_id)["next"]).timestamp()
    name = f"tick-{datetime.fromtimestamp(due, UTC):%Y%m%dT%H%M%SZ}"
    first = await leading_part(mesh, etcd_of_all, "queue")
    until(lambda: due - time.time() < 1.0, "the last second before it is due", seconds=90.0)
    mesh.processes[first].freeze()
    until(lambda: time.time() > due, "the due time")
    mesh.kill(first)

    def named() -> list[dict[str, str]]:
        listed: list[dict[str, str]] = mesh.cli.json("jobs", "--all", "--label", f"schedule={schedule_id}")
        return [job for job in listed if job["name"] == name]

    try:
        until(named, "the job of the due time")
        mesh.start(first)
        until(lambda: last_time(mesh, schedule_id) > due, "the next due time", seconds=90.0)
        assert len(named()) == 1
    finally:
        until(lambda: is_deleted(mesh, schedule_id), "a leader that deletes the schedule")


def last_time(mesh: Separate, schedule_id: str) -> float:
    found = mesh.cli.json("schedules", "show", schedule_id)["last"]
    return datetime.fromisoformat(found).timestamp() if found else 0.0


def is_deleted(mesh: Separate, schedule_id: str) -> bool:
    """Delete a schedule; return whether there was a leader to do so, which may have changed once more."""
    ended = mesh.cli._run(["schedules", "delete", schedule_id], "", 60.0, {})
    assert ended.returncode == 0 or "NO_LEADER" in ended.stderr, ended.stderr
    return ended.returncode == 0
