"""Index lookups against a full scan of all jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.security import identity
from cotenant.security.identity import ANYONE, Identity
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import PHASES, new_record
from cotenant.services.queue.jobs.visibility import View
from cotenant.v1 import job_service_pb2 as pb

SPEC = JobSpec(name="a", roles=(Role(),))
TENANTS = ("a", "b", "c")
IDS = tuple(f"j{number:02}" for number in range(6))
PHASE = st.sampled_from((Phase.QUEUED, Phase.RUNNING, Phase.SUSPENDED, Phase.FAILED))
CALLERS = (ANYONE, Identity("ann", tenants=frozenset({"a"})), Identity("dean", tenants=frozenset({"b", "c", "d"})))

made = st.tuples(
    st.just("make"), st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(TENANTS)), min_size=1, max_size=6)
)
moved = st.tuples(st.just("move"), st.tuples(st.sampled_from(IDS), PHASE))
removed = st.tuples(st.just("remove"), st.sampled_from(IDS))
steps = st.lists(st.one_of(made, moved, moved, removed), max_size=25)
ASKED: tuple[tuple[Any, ...], ...] = (
    (),
    (PHASES.to_wire(Phase.QUEUED),),
    (PHASES.to_wire(Phase.FAILED), PHASES.to_wire(Phase.RUNNING), 99),
    (99,),
)
FILTERS = [
    pb.JobFilter(tenant=tenant, phases=phases, **more)
    for tenant in ("", "a", "d")
    for phases in ASKED
    for more in ({}, {"labels": {"odd": "yes"}}, {"ids": IDS[:3]}, {"array_id": "none"})
]


@contextmanager
def calling(who: Identity) -> Iterator[None]:
    before = identity._identity.set(who)
    try:
        yield
    finally:
        identity._identity.reset(before)


def take(state: State, step: tuple[str, object]) -> None:
    match step:
        case "make", list(pairs):
            fresh = {job_id: tenant for job_id, tenant in pairs if job_id not in state.records}
            records = []
            for job_id, tenant in fresh.items():
                labels = (("odd", "yes"),) if int(job_id[1:]) % 2 else ()
                records.append(new_record(job_id, replace(SPEC, tenant=tenant, labels=labels), "eve", ""))
            if len(records) == 1:
                state.add(records[0])
            else:
                for _ in state.add_in_slices(records):
                    pass
        case "move", (str(job_id), Phase() as phase) if job_id in state.records:
            record = state.records[job_id]
            if not record.phase.ended:
                record.job.phase = PHASES.to_wire(phase)
                state.sync(record)
        case "remove", str(job_id) if job_id in state.records:
            state.remove(job_id)


@settings(max_examples=examples(60))
@given(steps=steps)
def test_index_lookups_match_a_full_scan(steps: list[tuple[str, object]]) -> None:
    state = State()
    for step in steps:
        take(state, step)
    assert list(state.ids) == sorted(state.records)
    for who in CALLERS:
        with calling(who):
            for asked in FILTERS:
                chosen = JobFilter(asked, View(state))
                slow = [job_id for job_id in sorted(state.records) if chosen.matches(state.records[job_id])]
                assert list(asyncio.run(chosen.matching_ids(state))) == slow, (who.name, asked)
