"""Laws of queue policies within a cycle: a job that others outrank starts once they are gone."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.cases import taught
from cotenant.conformance.trials import tried
from cotenant.conformance.worlds import NOW, histories, tables
from cotenant.core.model.job_table import JobTable
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.resources import NAMES
from cotenant.core.policy.protocols import EndedJob
from cotenant.core.scheduling.admission import Choice, Rules, choose


def chosen(plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], rules: Rules) -> Choice:
    """Return who runs."""
    jobs, policy = table.jobs(NOW), taught(plugin, history)
    return choose(jobs, policy, policy.order(jobs, NOW), table.capacity, now=NOW, rules=rules)


@tried(15)
@given(tables(), histories, st.sampled_from([Rules(), Rules(run_seconds_min=100.0)]))
def test_an_outranked_job_starts_once_the_jobs_ahead_are_gone(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], rules: Rules
) -> None:
    """An outranked job starts once the jobs that its refusal names are gone."""
    choice, jobs, ids = chosen(plugin, table, history, rules), table.jobs(NOW), list(table.ids)
    if choice.outrankers is None:
        assert not len(choice.outranked)
        return
    assert choice.selected is not None
    waiting = choice.ranked[~jobs.running[choice.ranked]].tolist()
    staying = set(np.flatnonzero(rules.protects(jobs, NOW)).tolist())
    for row in choice.outranked.tolist():
        place_of = waiting.index(row)
        refusal = choice.outrankers.refusal(place_of, ids)
        needs = {name: int(column[row]) for name, column in zip(NAMES, jobs.needs, strict=True)}
        ahead = waiting[:place_of]
        assert refusal.numbers["ahead"] == len(ahead)
        if ahead:
            assert refusal.numbers["ahead_gpu_milli"] == int(jobs.gpu_milli[ahead].sum())
            near = (
                "has score"
                if f"{refusal.numbers['nearest_score']:.6g}" != f"{refusal.numbers['score']:.6g}"
                else "has nearly"
            )
            assert f"the nearest, {ids[ahead[-1]]}, {near}" in refusal.detail
        if "head_cores" in refusal.numbers:
            beyond_the_head(plugin, table, history, rules, refusal, row)
            continue
        assert any(need > refusal.numbers[f"left_{name}"] for name, need in needs.items()), refusal
        ranked = choice.ranked.tolist()
        before = {one for one in ranked[: ranked.index(row)] if choice.selected[one]} | staying
        named = choice.outrankers.before(place_of)
        assert set(named) <= before
        assert len(named) == min(2, len(before))
        if any(need > getattr(table.capacity, name) for name, need in needs.items()):
            continue  # it fits into no cluster of this size, and is refused for that elsewhere
        fewer = deepcopy(table)
        for job_id in [ids[one] for one in before]:
            fewer.remove(job_id)
        after, left = chosen(plugin, fewer, history, rules), fewer.row(ids[row])
        assert after.selected is not None
        if not after.selected[left]:  # an order may put others before it once those are gone
            still = after.ranked[~fewer.jobs(NOW).running[after.ranked]].tolist().index(left)
            assert after.outrankers is not None
            assert after.outrankers.before(still), "it waits for nobody, and yet does not run"


def beyond_the_head(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], rules: Rules, refusal: Refusal, row: int
) -> None:
    """A strict order names the job that does not fit; once that job is gone, the jobs that waited only for it run."""
    choice, ids = chosen(plugin, table, history, rules), list(table.ids)
    assert choice.outrankers
    assert choice.outrankers.head
    head = ids[choice.outrankers.head[1]]
    assert f"no further than {head}, " in refusal.detail
    numbers = refusal.numbers
    assert any(numbers[f"head_{name}"] > numbers[f"left_{name}"] for name in NAMES), refusal
    fewer = deepcopy(table)
    fewer.remove(head)
    after, left = chosen(plugin, fewer, history, rules), fewer.row(ids[row])
    assert after.selected is not None
    if not after.selected[left]:  # another one is in its way by now, which it is told
        still = after.ranked[~fewer.jobs(NOW).running[after.ranked]].tolist().index(left)
        assert after.outrankers
        now = after.outrankers.refusal(still, list(fewer.ids))
        assert f"no further than {head}, " not in now.detail
