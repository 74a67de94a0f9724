"""Earliest deadline first: the order, and that nothing else counts."""

from __future__ import annotations

import math

from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.policy.options import parse
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.edf import Edf


def test_the_earliest_deadline_comes_first_and_jobs_without_one_last() -> None:
    table = JobTable()
    jobs = (
        ("free", math.inf, 1.0),
        ("late", 90.0, 1.0),
        ("soon", 20.0, 500.0),
        ("past", 5.0, 1.0),
        ("also", 20.0, 1.0),
    )
    for sequence, (job_id, deadline, remaining) in enumerate(jobs):
        table.add(JobRow(job_id, arrival_seconds=float(sequence), sequence=sequence, deadline_seconds=deadline))
        table.update(job_id, remaining_seconds=remaining)
    seen = table.jobs(9.0)
    ranked = rank(seen, Edf().order(seen, 9.0), running_first=Edf.running_first)
    assert [table.ids[row] for row in ranked] == ["past", "soon", "also", "late", "free"]


def test_strict_is_the_default_and_backfill_lets_others_pass() -> None:
    assert Edf().strict
    assert not Edf(parse(Edf.Options, {"mode": "backfill"})).strict
