"""Objectives over the real mesh: a gang that would break a neighbor's objective waits until that job has ended."""

from __future__ import annotations

import time
from dataclasses import replace

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import QUICK, running

from cotenant.v1 import job_service_pb2 as pb


def moment(seconds: float) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(int(seconds * 1e9))
    return made


async def test_a_gang_waits_if_it_would_break_a_neighbors_deadline() -> None:
    async with running(placement_config=replace(QUICK, placement="qos")) as mesh:
        await mesh.agent("n1", gpus=8, cores=24)
        tight = await mesh.submit(
            gpus=1, replicas=2, expected_duration=Duration(seconds=1000), deadline=moment(time.time() + 1100)
        )
        job = await mesh.reach(tight, "RUNNING")
        assert job.attempt.allocations[0].node_id == "n1"
        other = await mesh.submit(gpus=1, replicas=4)
        waiting = await mesh.refused(other, "QOS")
        assert f"would slow {tight} below its objective" in waiting.refusal.detail
        single = await mesh.submit(gpus=1)
        await mesh.reach(single, "RUNNING")
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=tight))
        await mesh.reach(other, "RUNNING")


async def test_objectives_hold_after_a_restart() -> None:
    async with running(placement_config=replace(QUICK, placement="qos")) as mesh:
        await mesh.agent("n1", gpus=8, cores=24)
        tight = await mesh.submit(
            gpus=1, replicas=2, expected_duration=Duration(seconds=1000), deadline=moment(time.time() + 1100)
        )
        await mesh.reach(tight, "RUNNING")
        await mesh.restart("placement")
        other = await mesh.submit(gpus=1, replicas=4)
        waiting = await mesh.refused(other, "QOS")
        assert tight in waiting.refusal.detail
