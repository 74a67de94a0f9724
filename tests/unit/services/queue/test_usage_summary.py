"""What jobs used in a period: by the attempts that ran, against a slow count second by second."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.mesh import BACKFILL, running

from cotenant.codec import specs
from cotenant.services.queue.api.usage_summary import COUNTS_MAX, UsageSummary
from cotenant.services.queue.jobs.archive import Archive
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

DAY = 86_400
BEGIN = int(datetime(2030, 1, 5, 23, tzinfo=UTC).timestamp())  # an hour before a Sunday
NOW = BEGIN + 3 * DAY


def attempt(number: int, gpus: int, cores: int, since: int, ended: int | None) -> job_pb2.Attempt:
    made = job_pb2.Attempt(number=number)
    task = made.allocations.add(node_id="n1").tasks.add(core_ids=range(cores))
    for _ in range(gpus):
        task.gpus.add(milli=500)
    made.start_time.FromSeconds(since)
    if ended is not None:
        made.end_time.FromSeconds(ended)
    return made


def job(job_id: str, *attempts: job_pb2.Attempt, tenant: str = "a", failed: bool = False) -> job_pb2.Job:
    made = job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(tenant=tenant, name=job_id), submitter=f"user-of-{tenant}")
    made.past_attempts.extend(attempts[:-1])
    made.attempt.CopyFrom(attempts[-1])
    made.start_time.CopyFrom(attempts[0].start_time)
    if failed:
        made.phase = job_pb2.JOB_PHASE_FAILED
        made.end_time.CopyFrom(attempts[-1].end_time)
    return made


def summed(
    jobs: list[job_pb2.Job], by: pb.UsageGroup.ValueType, since: int = 0, until: int = NOW
) -> pb.SummarizeUsageResponse:
    request = pb.SummarizeUsageRequest(by=by)
    if since:
        request.since.CopyFrom(specs.timestamp(since))
    request.until.CopyFrom(specs.timestamp(until))
    summary = UsageSummary(request, NOW)
    summary.add(jobs)
    return summary.response(0)


steps = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4
)


@given(st.lists(steps, min_size=1, max_size=4), st.integers(0, 72), st.integers(1, 72), st.booleans())
def test_use_is_that_of_a_count_hour_by_hour(
    plans: list[list[tuple[int, int, int, int]]], first: int, length: int, running: bool
) -> None:
    jobs, hours = [], defaultdict[str, list[float]](lambda: [0.0, 0.0])
    since, end = BEGIN + first * 3600, min(NOW, BEGIN + (first + length) * 3600)
    for index, plan in enumerate(plans):
        at, attempts = 0, []
        for number, (wait, ran, gpus, cores) in enumerate(plan, 1):
            began, over = at + wait, at + wait + ran
            last = number == len(plan)
            attempts.append(
                attempt(number, gpus, cores, BEGIN + began * 3600, None if running and last else BEGIN + over * 3600)
            )
            for hour in range(began, 72 if running and last else over):
                begin = BEGIN + hour * 3600
                if since <= begin < end:
                    day = datetime.fromtimestamp(begin, UTC).date().isoformat()
                    hours[day][0] += gpus / 2
                    hours[day][1] += cores
            at = over
        jobs.append(job(f"j{index}", *attempts))
    if since >= end or (running and any(one.attempt.start_time.seconds > NOW for one in jobs)):
        return
    answer = summed(jobs, pb.USAGE_GROUP_DAY, since, end)
    found = {one.group: [one.gpu_seconds / 3600, one.core_seconds / 3600] for one in answer.counts}
    for day, used in hours.items():
        assert found.pop(day) == pytest.approx(used)
    assert all(used == [0.0, 0.0] for used in found.values())  # attempts that ended at once
    assert answer.total.core_seconds == pytest.approx(sum(one.core_seconds for one in answer.counts))


def test_weeks_begin_on_monday_and_a_job_counts_once_in_the_total() -> None:
    long = job("long", attempt(1, 2, 1, BEGIN, BEGIN + 2 * DAY), failed=True)
    answer = summed([long], pb.USAGE_GROUP_WEEK)
    assert [(one.group, one.gpu_seconds / 3600, one.jobs, one.failed_jobs) for one in answer.counts] == [
        ("2029-12-31", 25.0, 1, 0),
        ("2030-01-07", 23.0, 1, 1),
    ]
    assert (answer.total.jobs, answer.total.failed_jobs, answer.total.gpu_seconds) == (1, 1, 48 * 3600)


def test_groups_are_sorted_by_use_and_a_failure_after_the_period_does_not_count() -> None:
    jobs = [
        job("a1", attempt(1, 0, 2, BEGIN, BEGIN + 3600)),
        job("b1", attempt(1, 2, 1, BEGIN, BEGIN + 3600), tenant="b"),
        job("b2", attempt(1, 2, 1, BEGIN + DAY, BEGIN + 2 * DAY), tenant="b", failed=True),
    ]
    answer = summed(jobs, pb.USAGE_GROUP_TENANT, until=BEGIN + DAY + 3600)
    assert [(one.group, one.gpu_seconds, one.core_seconds, one.jobs, one.failed_jobs) for one in answer.counts] == [
        ("b", 7200.0, 7200.0, 2, 0),
        ("a", 0.0, 7200.0, 1, 0),
    ]
    assert [one.group for one in summed(jobs, pb.USAGE_GROUP_SUBMITTER).counts] == ["user-of-b", "user-of-a"]
    assert [one.group for one in summed(jobs, pb.USAGE_GROUP_MODEL).counts] == ["b2", "b1", "a1"]


def test_the_use_of_attempts_that_are_not_kept_is_not_lost() -> None:
    kept = job("j", attempt(7, 2, 1, BEGIN + DAY, BEGIN + DAY + 3600), attempt(8, 2, 1, BEGIN + DAY + 3600, None))
    kept.start_time.FromSeconds(BEGIN)
    kept.attained_gpu_seconds, kept.attained_core_seconds = 5 * 3600, 5 * 3600
    answer = summed([kept], pb.USAGE_GROUP_UNSPECIFIED, until=BEGIN + DAY + 7200)
    assert answer.total.gpu_seconds == pytest.approx(6 * 3600)
    before = summed([kept], pb.USAGE_GROUP_UNSPECIFIED, until=BEGIN + DAY // 2)
    assert before.total.gpu_seconds == pytest.approx(2 * 3600)  # half of the four hours that are known as a sum


def test_a_job_that_began_long_ago_fills_at_most_a_thousand_days() -> None:
    answer = summed([job("old", attempt(1, 1, 1, 0, None))], pb.USAGE_GROUP_DAY)
    assert answer.total_size == len(answer.counts) == COUNTS_MAX


async def test_the_mesh_sums_up_stored_and_archived_jobs_of_visible_tenants(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.sqlite")
    old = job("zzzzzzzzzzzz", attempt(1, 2, 1, BEGIN - 9000 * DAY, BEGIN - 9000 * DAY + 3600), tenant="old")
    old.end_time.CopyFrom(old.attempt.end_time)
    old.phase, old.spec.kind = job_pb2.JOB_PHASE_SUCCEEDED, job_pb2.JOB_KIND_CPU
    await archive.add([old])
    async with running(queue_config=replace(BACKFILL, archive=archive.path)) as mesh:
        await mesh.agent("n1")
        job_id = await mesh.submit(tenant="new")
        await mesh.reach(job_id, "RUNNING")
        mesh.agents["n1"].finish((job_id, 1))
        await mesh.reach(job_id, "SUCCEEDED")
        answer = await mesh.jobs.SummarizeUsage(pb.SummarizeUsageRequest(by=pb.USAGE_GROUP_TENANT))
        assert [one.group for one in answer.counts] == ["old", "new"]
        assert answer.counts[0].gpu_seconds == 3600
        only = await mesh.jobs.SummarizeUsage(pb.SummarizeUsageRequest(by=pb.USAGE_GROUP_TENANT, tenant="new"))
        assert [(one.group, one.jobs) for one in only.counts] == [("new", 1)]
