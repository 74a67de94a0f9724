"""What a simulation that continues a snapshot decides first."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from tests.verification.decisions.world import Decision

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.scheduling.cycle import Admission, Plan, Start
from cotenant.services.placement.planning.cluster_view import STOP_COSTS
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics.world import World
from cotenant.simulator.run import simulate
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.scheduler import Scheduler
from cotenant.simulator.snapshots import Snapshot, state_of

NOTHING = Decision({}, frozenset(), frozenset())


def first_decision(snapshot: Snapshot) -> Decision:
    """Return the first plan of a simulation of the snapshot; nothing if nothing can start."""
    if not snapshot.jobs:
        return NOTHING
    plans: list[Plan] = []
    place = Scheduler._place
    state, _, _ = state_of(snapshot)

    def recorded(self: Scheduler, admission: Admission) -> Plan:
        made = place(self, admission)
        if admission.now == state.now_seconds:
            plans.append(made)
        return made

    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as file,
        mock.patch.object(Scheduler, "_place", recorded),
        mock.patch.object(World, "stop_cost_seconds", _stop_cost_seconds),
    ):
        file.write(snapshot.dump())
        file.flush()
        scenario = Scenario.of_snapshot(Path(file.name))
        simulate(
            scenario.trace,
            scenario.cluster,
            queue=scenario.queue,
            placement=scenario.placement,
            allocator=scenario.allocator,
            predictor=scenario.predictor,
            tenants=scenario.tenants,
            options=scenario.options,
            format_name=scenario.format,
            until_seconds=math.nextafter(state.now_seconds, math.inf),
        )
    if not plans:
        return NOTHING
    first = plans[0]
    return Decision(
        {start.gang.job_id: _places(start, snapshot) for start in first.starts if not start.needs_room},
        frozenset(start.gang.job_id for start in first.starts if start.needs_room),
        frozenset((*first.stops, *first.reclaimed)),
    )


def _stop_cost_seconds(_: World, sim_job: SimulatedJob, now: float) -> float:
    """Return what the live mesh assumes; a simulation knows what a stop costs."""
    return STOP_COSTS.of(now - sim_job.running_since)


def _places(start: Start, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    milli, cores = Counter[str](), Counter[str]()
    for holding in start.holdings:
        node = snapshot.nodes[holding.node].id
        milli[node] += holding.gpus * WHOLE_GPU_MILLI + sum(part for _, part in holding.shares)
        cores[node] += holding.cores
    return {node: (milli[node], cores[node]) for node in cores}
