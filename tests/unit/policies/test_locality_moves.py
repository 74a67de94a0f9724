"""Which running jobs `locality` moves so that a gang can start, and which it leaves in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.simulator.histories import Tape

from cotenant.conformance.worlds import picture, rng
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobKind, Locality
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView, RunningJob
from cotenant.core.scheduling import cycle
from cotenant.policies.locality import WaitsForLocality
from cotenant.simulator import Trace, TraceJob, parse_cluster, simulate
from cotenant.simulator.traces.trace_job import workers as roles_of

NOW = 10_000.0
OPTIONS = WaitsForLocality.Options(moves_max=2, settled_seconds=600.0, gain_min=2.0)


@dataclass
class Told(ClusterView):
    """A cluster view with given jobs."""

    there: list[RunningJob]
    now: float = NOW

    def running_jobs(self) -> Mapping[str, RunningJob]:
        return {running_job.gang.job_id: running_job for running_job in self.there}

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        return [one for one in self.there if any(holding.node == node for holding in one.holdings)]


def gang_of(job_id: str, gpus: int, **fields: Any) -> Gang:
    return Gang(job_id, (Part("worker", gpus, Demand(1000)),), **fields)


def taken(ledger: Ledger, job_id: str, nodes: Sequence[int], ran: float = 5000.0, **fields: Any) -> RunningJob:
    """Run a job of one GPU on each listed node for some seconds."""
    holdings = tuple(ledger.take(node, Demand(1000), list(nodes).count(node)) for node in sorted(set(nodes)))
    return RunningJob(gang_of(job_id, len(nodes)), holdings, NOW - ran, **fields)


def two_servers(**fields: Any) -> tuple[Ledger, list[RunningJob]]:
    """Two servers of 4 GPUs with 3 and 2 free, in total enough for a gang of 4."""
    ledger = Ledger([NodeShape(4, 24)] * 2)
    return ledger, [taken(ledger, "single", [0], **fields), taken(ledger, "pair", [1, 1], preemptible=False)]


def planned(
    ledger: Ledger, there: list[RunningJob], gang: Gang, options: WaitsForLocality.Options = OPTIONS
) -> cycle.Plan:
    before = picture(ledger)
    plan = cycle.place([gang], ledger, WaitsForLocality(options), rng(), cluster_view=Told(there))
    assert picture(ledger) == before
    return plan


def test_a_single_job_goes_elsewhere_so_that_a_gang_has_its_server() -> None:
    ledger, there = two_servers()
    plan = planned(ledger, there, gang_of("gang", 4))
    (start,), (move,) = plan.starts, plan.moves
    assert (start.gang.job_id, start.moves, start.needs_room) == ("gang", ("single",), True)
    assert {share.node for share in start.offer} == {0}
    assert (move.gang.job_id, [share.node for share in move.offer]) == ("single", [1])
    assert not plan.stops


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("it may not be preempted", {"preemptible": False}),
        ("it started a moment ago", {"ran": 599.0}),
        ("it costs more than half of what the gang is spared", {"stop_cost_seconds": 601.0}),
    ],
)
def test_a_job_stays(why: str, fields: Mapping[str, Any]) -> None:
    plan = planned(*two_servers(**fields), gang_of("gang", 4))
    assert not plan.moves, why
    assert plan.refusals["gang"].code is Code.FRAGMENTED


def test_a_job_that_will_be_done_in_time_and_a_service_stay() -> None:
    ledger, (single, pair) = two_servers()
    done = replace(single.gang, estimate=Estimate(predictable=True, remaining_seconds=299.0))
    service = replace(single.gang, kind=JobKind.INFERENCE)
    for gang in (done, service):
        assert not planned(ledger, [replace(single, gang=gang), pair], gang_of("gang", 4)).moves
    longer = replace(single.gang, estimate=Estimate(predictable=True, remaining_seconds=301.0))
    assert planned(ledger, [replace(single, gang=longer), pair], gang_of("gang", 4)).moves


def test_no_job_is_moved_without_need_or_if_moves_are_disabled() -> None:
    ledger, there = two_servers()
    content = planned(ledger, there, gang_of("gang", 4, locality=Locality.ANYWHERE))
    assert content.starts and not content.moves  # noqa: PT018  # it starts without
    assert not planned(ledger, there, gang_of("gang", 4), replace(OPTIONS, moves_max=0)).moves


def test_the_cheaper_of_two_is_moved() -> None:
    ledger = Ledger([NodeShape(4, 24)] * 3)
    dear, cheap = (
        taken(ledger, "dear", [0], stop_cost_seconds=20.0),
        taken(ledger, "cheap", [1], stop_cost_seconds=10.0),
    )
    full = taken(ledger, "full", [2, 2, 2], preemptible=False)
    plan = planned(ledger, [dear, cheap, full], gang_of("gang", 4))
    assert [move.gang.job_id for move in plan.moves] == ["cheap"]


jobs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from([0.0, 1e4]), st.booleans()), max_size=8)


@settings(max_examples=examples(150))
@given(jobs, st.integers(2, 6), st.sampled_from([0.0, 300.0]))
def test_moves_happen_only_if_a_gang_starts_and_all_jobs_have_places(
    made: list[tuple[int, int, float, bool]], gpus: int, fragmented: float
) -> None:
    ledger, there = Ledger([NodeShape(4, 24)] * 4, "aabb"), []
    for number, (node, count, ran, preemptible) in enumerate(made):
        if ledger.free_gpus[node] >= count:
            there.append(taken(ledger, f"j{number}", [node] * count, ran, preemptible=preemptible))
    gang = gang_of("gang", gpus, fragmented_seconds=fragmented)
    alone = cycle.place([gang], ledger, WaitsForLocality(OPTIONS), rng(), cluster_view=EMPTY_CLUSTER)
    plan = planned(ledger, there, gang)
    if not plan.moves:
        assert plan == alone
        return
    assert isinstance(alone.refusals["gang"], Refusal), "it could have started without"
    level = alone.refusals["gang"].locality
    assert (
        len({ledger.racks[share.node] if level is Locality.RACK else share.node for share in plan.starts[0].offer}) == 1
    )
    movers = {move.gang.job_id for move in plan.moves}
    assert movers == set(plan.starts[0].moves)
    assert len(movers) == len(plan.moves) <= OPTIONS.moves_max
    for running_job in (one for one in there if one.gang.job_id in movers):
        assert running_job.preemptible
        assert NOW - running_job.since_seconds >= OPTIONS.settled_seconds
        for holding in running_job.holdings:
            ledger.release(holding)
    for holding in (holding for start in (*plan.starts, *plan.moves) for holding in start.holdings):
        ledger.hold(holding)  # raises if it is not free
    settled = [
        replace(one, holdings=move.holdings, since_seconds=NOW)
        for one in there
        for move in plan.moves
        if move.gang.job_id == one.gang.job_id
    ]
    again = cycle.place(
        [replace(gang, job_id="next")], ledger, WaitsForLocality(OPTIONS), rng(), cluster_view=Told(settled)
    )
    assert not again.moves, "who has just been moved stays"


def test_a_simulated_move_costs_a_restart_and_is_recorded() -> None:
    trace = Trace(
        "made up",
        "none",
        (
            TraceJob("a", 0.0, 4000.0, roles_of(3)),
            TraceJob("b", 0.0, 9000.0, roles_of(2)),
            TraceJob("c", 1.0, 9000.0, roles_of(1)),
            TraceJob("gang", 5000.0, 1000.0, roles_of(4)),
        ),
    )
    tape = Tape()
    given = {"placement": {"dedicated_share": "2"}, "simulator": {"preemption_cost_seconds": "7"}}
    result = simulate(trace, parse_cluster("2x4"), placement="locality", options=given, recorder=tape)
    assert (result.migrations, result.preemptions) == (1, 0)
    (moved,) = (event for event in tape.events if event.kind == "migrated")
    assert (moved.at_seconds, moved.job_id, moved.by) == (5000.0, "c", ("gang",))
    ends = {one.id: one.finished_seconds for one in result.outcomes}
    assert ends == {"a": 4000.0, "b": 9000.0, "c": 9001.0 + 7, "gang": 6000.0}


def test_a_simulated_gang_relaxes_level_by_level_and_its_waits_count_by_level() -> None:
    fill = [TraceJob(f"j{number}", 0.0, 900.0, roles_of(3)) for number in range(3)]
    trace = Trace("made up", "none", (*fill, TraceJob("gang", 10.0, 100.0, roles_of(3))))
    given = {"placement": {"server_seconds": "7", "rack_seconds": "11.25", "moves_max": "0"}}
    cluster = replace(parse_cluster("3x4"), racks=("a", "a", "b"))
    result = simulate(trace, cluster, placement="locality", options=given)
    assert result.outcomes[3].finished_seconds == 10 + 7 + 11.25 + 100
    assert result.fragmentation_seconds == {"server": 7.0, "rack": 11.25, "anywhere": 0.0}
    assert result.waits_by_gpus["2-4"]["fragmentation"] == 1
