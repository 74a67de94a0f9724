"""A node loses the control plane: a job that must never run twice at a time does not, even unobserved."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.end_to_end.waiting import lines_of
from tests.support.field_limits import lift
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conftest import end_jobs
from tests.unit.services.mesh import QUICK, Mesh, running, until, without

from cotenant.codec.specs import duration
from cotenant.services.placement.cluster import live_records
from cotenant.v1 import job_service_pb2

STOP_AFTER_SECONDS, GRACE_SECONDS = 2.0, 1.0


def node(mesh: Mesh, tmp_path: Path, node_id: str) -> AgentProcess:
    endpoint = SimpleNamespace(endpoint=f"127.0.0.1:{mesh.ports['placement']}")
    return AgentProcess(endpoint, tmp_path / node_id, node_id=node_id)  # type: ignore[arg-type]  # all that is asked of it


async def connected(mesh: Mesh, node_id: str) -> None:
    nodes = mesh.parts["placement"].service.cluster.nodes
    await until(lambda: node_id in nodes and nodes[node_id].connected)


def lives(path: Path) -> dict[str, list[float]]:
    """Return when each process of a job last reported that it runs, in seconds since boot, by pid."""
    reported: dict[str, list[float]] = {}
    for pid, seconds in (line.split() for line in lines_of(path)):
        reported.setdefault(pid, []).append(float(seconds))
    return reported


@pytest.mark.deep
@pytest.mark.root
async def test_a_job_that_must_not_run_twice_ends_before_it_begins_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lift(monkeypatch, "stop_after_disconnected")
    monkeypatch.setattr(live_records, "KILL_SECONDS_MAX", 1.0)
    async with running(placement_config=without(QUICK, heartbeat_seconds=0.3, lost_after_seconds=1.0)) as mesh:
        agents = {node_id: node(mesh, tmp_path, node_id) for node_id in ("n1", "n2")}
        await agents["n1"].start()
        await connected(mesh, "n1")
        ids = {}
        for name, leash in (("leashed", {"stop_after_disconnected": duration(STOP_AFTER_SECONDS)}), ("free", {})):
            say = f"echo $$ $(cut -d' ' -f1 /proc/uptime) >> {tmp_path}/{name}"
            save = f"for i in 1 2 3 4 5; do {say}; sleep 0.1; done; exit 0"
            script = f"trap '{save}' TERM; while :; do {say}; sleep 0.05; done"
            ids[name] = await mesh.submit(
                gpus=0, cores=1, grace=GRACE_SECONDS, command=["/bin/sh", "-c", script], **leash
            )
            await until(lambda name=name: bool(lives(tmp_path / name)))  # type: ignore[misc]  # binds the loop's own
        await agents["n2"].start()
        await connected(mesh, "n2")
        await agents["n1"].end(signal.SIGKILL)
        for name in ids:
            await until(lambda name=name: len(lives(tmp_path / name)) == 2)  # type: ignore[misc]  # likewise
        first, second = lives(tmp_path / "leashed").values()
        assert max(first) < min(second)
        begun = min(list(lives(tmp_path / "free").values())[1])
        await until(
            lambda: max(next(iter(lives(tmp_path / "free").values()))) > begun
        )  # it runs twice, which is allowed
        job = await mesh.job(ids["leashed"])
        assert (job.failures, job.attempt.number) == (0, 2)
        await agents["n1"].start()
        await connected(mesh, "n1")  # what is still there is stopped
        await until(lambda: not any((tmp_path / "n1" / "attempts").iterdir()))
        for job_id in ids.values():
            await mesh.jobs.CancelJob(job_service_pb2.CancelJobRequest(id=job_id))
            await mesh.reach(job_id, "CANCELLED")
        for node_id, agent in agents.items():
            await agent.end(signal.SIGTERM)
            await end_jobs(tmp_path / node_id)
