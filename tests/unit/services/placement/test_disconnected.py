"""Jobs that stop when disconnected: no failure counts, and they do not start elsewhere too early."""

from __future__ import annotations

import time

import pytest
from tests.support.field_limits import lift
from tests.unit.services.mesh import QUICK, Mesh, running, until, without

from cotenant.codec.specs import duration
from cotenant.services.placement.cluster import live_records
from cotenant.services.placement.cluster.live_records import LiveAttempt, may_outlive_contact_seconds
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2

STOPPED, FAILED = job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.ATTEMPT_STATE_FAILED
DISCONNECTED = job_pb2.STOP_REASON_DISCONNECTED


async def gang_on_two(mesh: Mesh, *, leashed: bool = True) -> str:
    """A gang with a replica on each of two nodes."""
    for node_id in ("n1", "n2"):
        await mesh.agent(node_id, gpus=1)
    spec = {"stop_after_disconnected": duration(60)} if leashed else {}
    job_id = await mesh.submit(replicas=2, **spec)
    await mesh.reach(job_id, "RUNNING")
    return job_id


async def test_a_job_that_stopped_while_disconnected_is_requeued_without_a_failure() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        job_id = await mesh.submit(stop_after_disconnected=duration(60))
        await mesh.reach(job_id, "RUNNING")
        agent.report((job_id, 1), STOPPED, stop_reason=DISCONNECTED)
        job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
        assert (job.failures, job.preemptions, job.migrations) == (0, 0, 0)
        assert job.past_attempts[0].stop_reason == DISCONNECTED


@pytest.mark.parametrize("first", ["n1", "n2"], ids=["the stop is told first", "the failure is told first"])
async def test_failures_of_its_peers_do_not_count_either(first: str) -> None:
    """The replica on n1 stopped; the one on n2 lost its peer, and may report first."""
    async with running() as mesh:
        job_id = await gang_on_two(mesh)
        mesh.agents["n2"].refuses_to_stop = True
        for node_id in (first, "n1" if first == "n2" else "n2"):
            if node_id == "n1":
                mesh.agents["n1"].report((job_id, 1), STOPPED, stop_reason=DISCONNECTED)
            else:
                mesh.agents["n2"].report((job_id, 1), FAILED, code=1)
        job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
        assert job.failures == 0
        assert job.past_attempts[0].stop_reason == DISCONNECTED


async def test_the_peers_of_a_disconnected_replica_are_stopped() -> None:
    async with running() as mesh:
        job_id = await gang_on_two(mesh)
        mesh.agents["n1"].report((job_id, 1), STOPPED, stop_reason=DISCONNECTED)
        await until(lambda: bool(mesh.agents["n2"].stops))
        assert mesh.agents["n2"].stops[0].reason == DISCONNECTED


async def test_a_lost_node_keeps_a_job_until_it_must_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    lift(monkeypatch, "stop_after_disconnected")
    monkeypatch.setattr(live_records, "KILL_SECONDS_MAX", 0.2)
    config = without(QUICK, heartbeat_seconds=0.1, lost_after_seconds=0.4)
    async with running(placement_config=config) as mesh:
        agent = await mesh.agent("n1")
        ids = {
            "leashed": await mesh.submit(stop_after_disconnected=duration(1.5), gpus=1, cores=1),
            "free": await mesh.submit(gpus=1, cores=1),
        }
        for job_id in ids.values():
            await mesh.reach(job_id, "RUNNING")
        await agent.stop()
        last_heard = mesh.parts["placement"].service.cluster.nodes["n1"].seen_seconds
        await mesh.agent("n2")
        await mesh.reach(ids["free"], "RUNNING", lambda job: job.attempt.number == 2)
        await mesh.reach(ids["leashed"], "RUNNING", lambda job: job.attempt.number == 2)
        assert time.monotonic() >= last_heard + 1.5 + 0.2 + 3 * 0.1


def test_the_wait_includes_grace_and_kill_time() -> None:
    def live(**spec: object) -> LiveAttempt:
        stored = records_pb2.StoredAttempt(spec=job_pb2.JobSpec(**spec))  # type: ignore[arg-type]  # passed on
        return LiveAttempt(stored, ())

    kill = live_records.KILL_SECONDS_MAX + 3 * 5.0
    assert may_outlive_contact_seconds(live(), 300, 5.0) == 300
    assert may_outlive_contact_seconds(live(stop_after_disconnected=duration(60)), 300, 5.0) == 300
    assert may_outlive_contact_seconds(live(stop_after_disconnected=duration(600)), 300, 5.0) == 630 + kill
    assert (
        may_outlive_contact_seconds(live(stop_after_disconnected=duration(600), grace=duration(5)), 300, 5.0)
        == 605 + kill
    )
