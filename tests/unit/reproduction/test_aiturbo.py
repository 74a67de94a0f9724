"""AITurbo's effects, with another seed than in the tables: their sign, and approximate size."""

from __future__ import annotations

import pytest

from cotenant.reproduction.model import Asked, Data, Done, Figures, Verdict
from cotenant.reproduction.papers.aiturbo import PAPER
from cotenant.reproduction.papers.aiturbo_arms import (
    BACKFILL,
    BORDA,
    FIFO,
    ITP,
    ITP_FASTER,
    ITP_SERVERS,
    LAS,
    LEARNED,
    OPTIMUS,
    PERFECT,
    SMALL,
    SRTF,
    Replayed,
)

ARMS = (FIFO, LAS, SRTF.knowing(LEARNED), OPTIMUS.knowing(LEARNED), BORDA.knowing(LEARNED), BORDA.knowing(PERFECT))
BASELINES = (FIFO, BACKFILL, LAS)


@pytest.fixture(scope="module")
def figures() -> dict[str, Figures]:
    found = {
        arm.name: Replayed(ITP, arm, Data(), seed=11).run(lambda: False) for arm in dict.fromkeys((*ARMS, *BASELINES))
    }
    return {name: one for name, one in found.items() if one is not None}


@pytest.mark.deep
def test_ours_beats_equal_requests_and_perfect_knowledge_beats_ours(
    figures: dict[str, Figures],
) -> None:
    fifo, las, srtf, optimus, ours, sure = (figures[arm.name].values["avg_jct_hours"] for arm in ARMS)
    assert fifo > 1.1 * ours
    assert srtf > 1.02 * ours
    assert optimus > ours
    assert las > 1.05 * sure
    assert ours > sure


def test_findings_are_complete_for_a_single_workload(figures: dict[str, Figures]) -> None:
    asked = Asked(quick=True, seeds=(11,))
    findings = PAPER.findings(asked, Done({(ITP.name, name, 11): one for name, one in figures.items()}))
    assert {one.verdict for one in findings.measured if one.workload == SMALL.name} == {Verdict.OPEN}
    learned = [one for one in findings.measured if one.workload == ITP.name and one.learned]
    assert all(one.ours for one in learned)
    assert {one.base for one in learned if one.claim.name == "jct"} >= {arm.name for arm in BASELINES}
    assert all(len(row) == len(table.columns) == len(table.formats) for table in findings.tables for row in table.rows)


@pytest.mark.deep
def test_where_jobs_come_faster_the_same_jobs_wait_longer_and_ours_gains_more_on_srtf() -> None:
    faster = ITP_FASTER[0]
    slow, fast = (load.jobs(Data(), 11).jobs for load in (ITP, faster))
    assert [job.work_seconds for job in slow] == [job.work_seconds for job in fast]
    assert fast[-1].submitted_seconds == slow[-1].submitted_seconds / 2
    found = [Replayed(faster, arm, Data(), seed=11).run(lambda: False) for arm in (ARMS[2], ARMS[4])]
    srtf, ours = (one.values["avg_jct_hours"] for one in found if one)
    assert srtf > 1.3 * ours


def test_a_virtual_cluster_begins_with_its_own_first_job_and_its_names_depend_on_the_seed() -> None:
    jobs = SMALL.jobs(Data(), seed=1)
    assert (len(jobs), jobs.jobs[0].submitted_seconds) == (422, 0)
    assert jobs == SMALL.jobs(Data(), seed=1)
    assert [job.name for job in jobs.jobs] != [job.name for job in SMALL.jobs(Data(), seed=2).jobs]


def test_parameter_servers_leave_the_gpus_of_a_job_as_they_were() -> None:
    plain, served = (
        [sum(role.replicas * role.request.gpu_milli for role in job.roles) for job in load.jobs(Data(), 0).jobs]
        for load in (ITP, ITP_SERVERS)
    )
    assert plain == served
