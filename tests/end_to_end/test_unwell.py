"""A GPU fails under a job: it is held, the job continues on another GPU, and all commands agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.unit.node_agent.fake_driver import FakeDriver, compiled, uuid

from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2


@pytest.mark.deep
def test_a_job_of_a_gpu_that_fell_off_the_bus_moves_to_another_and_all_views_agree(tmp_path: Path) -> None:
    library = tmp_path / "driver"
    library.mkdir()
    driver = FakeDriver(tmp_path / "told")
    mesh = Mesh(tmp_path, "--gpus", "auto")
    mesh.cli.environment.update(LD_LIBRARY_PATH=str(compiled(library)), FAKE_NVML_STATE=str(driver.path))
    mesh.start()
    try:
        job_id = mesh.cli.submit("--gpus", "1", "--cpus", "1", "--", "sleep", "1000")
        (share,) = mesh.client.wait_for(job_id, Phase.RUNNING).attempt.allocations[0].tasks[0].gpus
        driver.xid([uuid(gpu) for gpu in range(8)].index(share.uuid), 79)
        until(lambda: mesh.client.job(job_id).attempt.number == 2, "a second attempt")
        job = mesh.client.wait_for(job_id, Phase.RUNNING)
        assert job.attempt.allocations[0].tasks[0].gpus[0].uuid != share.uuid
        (first,) = job.past_attempts
        failure = first.failure
        assert (first.stop_reason, failure.rule) == (job_pb2.STOP_REASON_UNHEALTHY, "xid-gpu-lost")
        assert (failure.evidence, failure.blame) == (f"xid 79 on {share.uuid}", job_pb2.FAILURE_BLAME_INFRASTRUCTURE)
        assert job.failures == 0
        (reported,) = mesh.cli.json("failures")["failures"]
        assert (reported["class"], reported["blame"]) == ("gpu_hardware", "infrastructure")
        (node,) = mesh.cli.json("nodes")
        assert node["gpus_unhealthy"] == {share.uuid: "XID 79: the GPU has fallen off the bus"}
        mesh.cli("release", node["id"], share.uuid)
        until(lambda: not mesh.cli.json("nodes")[0]["gpus_unhealthy"], "the GPU being given back")
    finally:
        mesh.close()
