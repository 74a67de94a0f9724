"""Failure classes and their consequences: over the real mesh, with agents without processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.unit.services.mesh import BACKFILL, Mesh, running, until

from cotenant.codec.job_events import kind_of
from cotenant.core.failures.retry import RetryRules
from cotenant.services.queue.api.failure_summary import COUNTS_MAX, FailureSummary
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

AT_ONCE = RetryRules(back_off_seconds=0.02, infrastructure_retries=2, untold_back_off_seconds=0.02)
IMPORT = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torhc'\n"
NCCL = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)\n"
RESET = "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://example.org\n"


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running(queue_config=replace(BACKFILL, retrying=AT_ONCE)) as mesh:
        yield mesh


def on(job: job_pb2.Job) -> str:
    return job.attempt.allocations[0].node_id


async def fail(mesh: Mesh, job_id: str, number: int, tail: str, signs: Sequence[str] = ()) -> job_pb2.Job:
    """Wait until an attempt runs, then fail it with some output."""
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == number)
    mesh.agents[on(job)].fail((job_id, number), tail, signs=signs)
    return job


async def story(mesh: Mesh, job_id: str) -> list[str]:
    told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return [f"{kind_of(event)}: {event.detail}" for event in told.events]


async def test_a_user_failure_is_not_retried(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=5)
    await fail(mesh, job_id, 1, IMPORT)
    job = await mesh.reach(job_id, "FAILED")
    failure = job.attempt.failure
    assert (failure.failure_class, failure.blame) == ("import_error", job_pb2.FAILURE_BLAME_USER)
    assert failure.evidence == "ModuleNotFoundError: No module named 'torhc'"
    assert "import error (user): ModuleNotFoundError: No module named 'torhc'" in job.phase_reason
    assert (job.attempt.number, job.failures) == (1, 1)


async def test_a_node_fault_is_retried_elsewhere_and_does_not_count(mesh: Mesh) -> None:
    await mesh.agent("n1")
    await mesh.agent("n2")
    job_id = await mesh.submit(retries_max=0)
    first = await fail(mesh, job_id, 1, NCCL)
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert on(job) != on(first)
    assert job.failures == 0
    assert [one.node_id for one in job.avoided_nodes] == [on(first)]
    assert "attempt 1 failed there: nccl error (infrastructure)" in job.avoided_nodes[0].reason
    past = job.past_attempts[0].failure
    assert (past.rule, past.transient, past.node_at_fault) == ("nccl-timeout", True, True)
    assert any("tried" not in line and "the next attempt starts in" in line for line in await story(mesh, job_id))


async def test_infrastructure_retries_are_used_before_the_users(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=1)
    for number in (1, 2, 3, 4):
        await fail(mesh, job_id, number, RESET)
    job = await mesh.reach(job_id, "FAILED")
    assert (job.attempt.number, job.failures) == (4, 2)


async def test_an_unclassified_failure_uses_the_users_retries(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=1)
    for number in (1, 2):
        await fail(mesh, job_id, number, "giving up\n")
    job = await mesh.reach(job_id, "FAILED")
    assert (job.attempt.failure.failure_class, job.failures) == ("unclassified", 2)
    assert job.attempt.failure.evidence == "giving up"


async def test_a_health_sign_overrides_the_jobs_output(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=0)
    await fail(mesh, job_id, 1, "RuntimeError: CUDA error: out of memory\n", signs=["xid 79 on GPU-1"])
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.past_attempts[0].failure.rule == "xid-gpu-lost"


async def test_a_failed_gpu_does_not_exclude_the_nodes_other_gpus(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=2)
    job_id = await mesh.submit(retries_max=0)
    first = await mesh.reach(job_id, "RUNNING")
    (part,) = first.attempt.allocations
    uuid = part.tasks[0].gpus[0].uuid
    agent = mesh.agents[part.node_id]
    ill = next(gpu for gpu in agent.inventory.gpus if gpu.uuid == uuid)
    ill.unhealthy_reason = "XID 79"
    agent.send(inventory=agent.inventory)
    await fail(mesh, job_id, 1, "", signs=[f"xid 79 on {uuid}"])
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert not job.avoided_nodes
    assert job.attempt.allocations[0].tasks[0].gpus[0].uuid != uuid


async def test_used_retries_survive_a_queue_restart(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=0)
    for number in (1, 2):
        await fail(mesh, job_id, number, RESET)
    await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 3)
    await mesh.restart("queue")
    await fail(mesh, job_id, 3, RESET)
    assert (await mesh.reach(job_id, "FAILED")).attempt.number == 3


async def test_a_long_output_tail_is_cut_and_not_stored(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit()
    await fail(mesh, job_id, 1, "x" * 1_000_000 + "\n" + IMPORT)
    await mesh.reach(job_id, "FAILED")
    (entry,) = (await mesh.store.list("queue/jobs/")).entries
    assert len(entry.value) < 4096


async def test_evidence_survives_until_another_queue_classifies_the_failure(mesh: Mesh) -> None:
    """Placement changes its leader too, after its agent has been told to forget the attempt."""
    agent = await mesh.agent("n1", gpus=2)
    by_output, by_sign = [await mesh.submit(retries_max=0) for _ in range(2)]
    for job_id in (by_output, by_sign):
        await mesh.reach(job_id, "RUNNING")
    await mesh.kill("queue")
    agent.fail((by_output, 1), IMPORT)
    agent.fail((by_sign, 1), "CUDA error: out of memory\n", signs=["xid 79 on GPU-1"])
    await until(lambda: len(agent.acked) == 2)
    await mesh.restart("placement")
    await mesh.start("queue")
    assert (await mesh.reach(by_output, "FAILED")).attempt.failure.failure_class == "import_error"
    retried = await mesh.reach(by_sign, "RUNNING", lambda job: job.attempt.number == 2)
    assert retried.past_attempts[0].failure.rule == "xid-gpu-lost"


async def test_a_node_that_fails_several_jobs_is_logged(mesh: Mesh) -> None:
    await mesh.agent("n1")
    with capture_logs() as logs:
        for _ in range(3):
            job_id = await mesh.submit()
            await fail(mesh, job_id, 1, NCCL)
            await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
            await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
            await mesh.reach(job_id, "CANCELLED")
    told = [line for line in logs if line["event"] == "node_suspected"]
    assert [(line["node"], line["jobs"]) for line in told] == [("n1", 3)]


async def test_failures_are_summarized_by_class_and_group(mesh: Mesh) -> None:
    await mesh.agent("n1")
    for tail, model in ((IMPORT, "resnet"), (IMPORT, "bert"), ("giving up\n", "bert")):
        job_id = await mesh.submit(model=model)
        await fail(mesh, job_id, 1, tail)
        await mesh.reach(job_id, "FAILED")
    good = await mesh.submit()
    await mesh.reach(good, "RUNNING")
    mesh.agents["n1"].finish((good, 1))
    await mesh.reach(good, "SUCCEEDED")
    told = await mesh.jobs.SummarizeFailures(pb.SummarizeFailuresRequest())
    assert [(one.failure.failure_class, one.attempts, one.jobs) for one in told.counts] == [
        ("import_error", 2, 2),
        ("unclassified", 1, 1),
    ]
    assert told.attempts == 4
    assert told.counts[0].gpu_seconds >= 0
    by_model = await mesh.jobs.SummarizeFailures(pb.SummarizeFailuresRequest(by=pb.FAILURE_GROUP_MODEL))
    assert [(one.group, one.attempts) for one in by_model.counts] == [("bert", 1), ("bert", 1), ("resnet", 1)]
    by_node = await mesh.jobs.SummarizeFailures(pb.SummarizeFailuresRequest(by=pb.FAILURE_GROUP_NODE))
    assert {one.group for one in by_node.counts} == {"n1"}
    later = pb.SummarizeFailuresRequest()
    later.since.FromSeconds(4_000_000_000)
    assert not (await mesh.jobs.SummarizeFailures(later)).counts
    assert not (await mesh.jobs.SummarizeFailures(pb.SummarizeFailuresRequest(tenant="other"))).counts


def test_a_summary_has_at_most_a_thousand_counts_the_most_frequent_first() -> None:
    def job(number: int, attempts: int) -> job_pb2.Job:
        failed = job_pb2.Attempt(job_id=f"j{number}", state=job_pb2.ATTEMPT_STATE_FAILED)
        failed.failure.rule = "import"
        return job_pb2.Job(spec=job_pb2.JobSpec(model=f"m{number:05}"), past_attempts=[failed] * attempts)

    request = pb.SummarizeFailuresRequest(by=pb.FAILURE_GROUP_MODEL)
    told = FailureSummary(request).add(job(number, 2 if number == 1500 else 1) for number in range(COUNTS_MAX + 501))
    answer = told.response
    assert (len(answer.counts), answer.total_size, answer.attempts) == (1000, 1501, 1502)
    assert [one.group for one in answer.counts[:2]] == ["m01500", "m00000"]
