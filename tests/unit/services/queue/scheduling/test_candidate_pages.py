"""Pages with few jobs of each class decide as one page with all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.codec import refusals, specs
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import Resources
from cotenant.core.placement.gang_allocation import hold_all
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.policies.consolidate import Consolidate
from cotenant.services.placement.cluster.request_decoding import check_order, gang_of
from cotenant.services.queue.jobs import transitions
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.scheduling import scheduler
from cotenant.services.queue.scheduling.candidate_pages import CandidatePages
from cotenant.services.queue.scheduling.wait_metrics import count_waits, wait_of
from cotenant.v1 import job_pb2

FIFO = plugins.load("cotenant.queue_policies", "fifo", {"mode": "backfill"})
AS_ASKED = plugins.load("cotenant.cpu_allocators", "requested", {})


@dataclass(frozen=True)
class World:
    """Nodes with GPUs, and gangs as (replicas, GPUs of each); `counted` are the GPUs that the queue knows of."""

    nodes: Sequence[int]
    gangs: Sequence[tuple[int, int]]
    counted: int


class Mesh:
    """A queue's scheduler, on a placement that is the core's `place` on a ledger."""

    def __init__(self, world: World) -> None:
        self.state, self.asked, self.started = State(), 0, list[str]()
        self.ledger = Ledger([NodeShape(gpus, 100) for gpus in world.nodes])
        self.state.capacity = Resources(1000 * world.counted, 100 * len(world.nodes), 2**60, 2**60)
        for number, (replicas, gpus) in enumerate(world.gangs):
            spec = JobSpec(command=("true",), roles=(Role(replicas=replicas, request=Request(1000 * gpus, 1)),))
            self.state.add(transitions.new_record(f"job-{number}", spec, "ann", ""))
        self.state.unestimated.clear()
        watcher = SimpleNamespace(ending={}, connections=0, capacity_changes=0, apply_attempt=self._apply)
        self.scheduler = scheduler.Scheduler(
            self.state,
            cast("Any", watcher),
            scheduler.SchedulerConfig(FIFO),
            cast("Any", SimpleNamespace(PlanPlacement=self._plan)),
            cast("Any", None),
            cast("Any", SimpleNamespace(ending={}, give_up=lambda job_ids: None)),
        )

    async def _plan(self, request: placement_pb2.PlanPlacementRequest, **_: float) -> Any:
        check_order(request.candidates)
        following = {one.job_id: one.next_of_class for one in request.candidates if one.HasField("next_of_class")}
        self.asked += len(request.candidates)
        plan = cycle.place(
            [gang_of(one, AS_ASKED, ()) for one in request.candidates],
            self.ledger,
            Consolidate(),
            np.random.default_rng(0),
            next_of_class=following,
        )
        response = placement_pb2.PlanPlacementResponse()
        response.capacity.CopyFrom(placement_pb2.Capacity(total_gpu_milli=self.state.capacity.gpu_milli))
        for start in plan.starts:
            assert hold_all(self.ledger, start.holdings)
            state = specs.ATTEMPT_STATES.to_wire(AttemptState.ASSIGNED)
            response.placed.add(attempt=job_pb2.Attempt(job_id=start.gang.job_id, number=1, state=state))
        for job_id, refusal in plan.refusals.items():
            response.refused.add(job_id=job_id, refusal=refusals.to_wire(refusal))
        return response

    def _apply(self, attempt: job_pb2.Attempt, evidence: object) -> None:
        record = self.state.records[attempt.job_id]
        self.started.append(record.id)
        transitions.apply_attempt(record.stored, attempt)
        self.state.sync(record)

    def cycle(self) -> None:
        """Run one cycle."""
        asyncio.run(self.scheduler.cycle())


def sent_whole(world: World) -> Mesh:
    """Run one cycle with a single page of all jobs."""
    mesh, page = Mesh(world), CandidatePages.page

    async def whole(self: CandidatePages, *given: Any, **_: Any) -> Any:
        return await page(self, *given, whole=True)

    with mock.patch.object(CandidatePages, "page", whole), mock.patch.object(scheduler, "PAGE_MIN", 1_000):
        mesh.cycle()
    return mesh


GANGS = st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (1, 0)])
worlds = st.builds(
    World,
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=4),
    st.lists(GANGS, min_size=2, max_size=30),
    st.sampled_from([0, 0, 4, 8, 40]),
)


@example(World([4], [(1, 2), (1, 2), (2, 1)], counted=0), (32, 256))
@given(worlds, st.sampled_from([(1, 1), (2, 4), (32, 256)]))
def test_pages_by_class_decide_as_one_page_with_all_jobs(world: World, sizes: tuple[int, int]) -> None:
    mesh, other = Mesh(world), sent_whole(world)
    with mock.patch.multiple(scheduler, PAGE_MIN=sizes[0], PAGE_MAX=sizes[1]):
        mesh.cycle()
    assert mesh.started == other.started
    waits = (wait_of(mesh.state, record) for record in mesh.state.records.values())
    assert count_waits(mesh.state) == Counter((wait.value, "default") for wait in waits if wait)
    for record in mesh.state.records.values():
        if record.phase is Phase.QUEUED:
            assert mesh.state.refusal(record)[0].code is other.state.refusal(other.state.records[record.id])[0].code


def test_of_a_class_without_room_one_job_is_asked_about() -> None:
    mesh = Mesh(World([4], [(1, 4), *[(1, 1), (1, 2), (2, 2)] * 500], 4))
    mesh.cycle()
    assert mesh.started == ["job-0"]
    assert mesh.asked == 4


def test_a_class_that_finds_room_is_asked_about_in_turn() -> None:
    mesh = Mesh(World([8], [(1, 2), (1, 1)] * 200, 8))
    mesh.cycle()
    assert mesh.started == [f"job-{number}" for number in range(5)]
    assert mesh.asked == 5 + 2
