from __future__ import annotations

import pytest

from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.fifo import Fifo


def test_strict_is_the_default_and_backfill_lets_others_pass() -> None:
    assert Fifo().strict
    assert not Fifo(parse(Fifo.Options, {"mode": "backfill"})).strict
    assert not Fifo().preemptive


def test_there_is_no_third_mode() -> None:
    with pytest.raises(BadOption, match="must be one of strict, backfill"):
        parse(Fifo.Options, {"mode": "easy"})


def test_jobs_of_one_moment_keep_their_sequence_and_priority_comes_first() -> None:
    table = JobTable()
    for sequence, (job_id, priority) in enumerate([("a", 0), ("b", 0), ("urgent", 1)]):
        table.add(JobRow(job_id, arrival_seconds=5.0, sequence=sequence, priority=priority))
    jobs = table.jobs(9.0)
    ranked = rank(jobs, Fifo().order(jobs, 9.0), running_first=Fifo.running_first)
    assert [table.ids[row] for row in ranked] == ["urgent", "a", "b"]
