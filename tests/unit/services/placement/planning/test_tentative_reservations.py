"""Tentative reservations, and the running jobs that policies see as movable."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.agents import inventory
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.services.mesh import spec

from cotenant import plugins
from cotenant.codec import specs as specs_module
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import AttemptState, StopReason
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as pb
from cotenant.policies.locality import WaitsForLocality
from cotenant.services.placement.api.server import ALLOCATORS, PLACEMENTS
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt, NodeState
from cotenant.services.placement.planning import planner
from cotenant.services.placement.planning.cluster_view import LiveClusterView, StopCosts
from cotenant.services.placement.planning.tentative_reservations import TentativeReservations
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2

ALLOCATOR: CpuAllocator = plugins.load(ALLOCATORS, "proportional", {})
FIRST_FIT: PlacementPolicy = plugins.load(PLACEMENTS, "first-fit", {})
MOVES = WaitsForLocality(WaitsForLocality.Options(settled_seconds=0.0, gain_min=0.0))
SERVER = job_pb2.LOCALITY_SERVER


def cluster_of(nodes: int, gpus: int = 2) -> Cluster:
    cluster = Cluster()
    for number in range(1, nodes + 1):
        join(cluster, f"n{number}", gpus)
    return cluster


def join(cluster: Cluster, node_id: str, gpus: int = 2) -> None:
    record = records_pb2.StoredNode()
    record.node.id, record.node.state = node_id, NodeState.NODE_STATE_READY
    made_of = specs_module.inventory_from_wire(inventory(gpus, 4 * gpus, node_id=node_id))
    node = cluster.put_node(node_id, made_of, record)
    node.connected = True
    cluster.refresh_open(node)


def request_of(specs: Sequence[job_pb2.JobSpec], name: str = "job", number: int = 1) -> pb.PlanPlacementRequest:
    candidates = [pb.Candidate(job_id=f"{name}{n}", number=number, spec=one) for n, one in enumerate(specs)]
    return pb.PlanPlacementRequest(candidates=candidates)


def as_told(spec: JobSpec, estimate: Estimate) -> Estimate:
    return estimate


def plan(
    cluster: Cluster,
    request: pb.PlanPlacementRequest,
    reservations: TentativeReservations,
    policy: PlacementPolicy = FIRST_FIT,
) -> tuple[cycle.Plan, planner.Decision]:
    """Decide as `PlanRunner` does; started jobs run at once, and stopping jobs stop."""
    now = time.monotonic()
    promised = reservations.valid(cluster, {one.job_id: one.number for one in request.candidates}, now)
    reservations.retain(promised)
    cluster_view = LiveClusterView(cluster, StopCosts(), time.time())
    outcome = planner.plan(cluster, request, policy, ALLOCATOR, as_told, cluster_view, promised)
    decision = planner.decide(cluster, request, outcome, reservations, now)
    for live in decision.starts:
        live.epoch = 1
        live.attempt.state = specs_module.ATTEMPT_STATES.to_wire(AttemptState.RUNNING)
        live.attempt.start_time.GetCurrentTime()
    for live in decision.stops:
        assert cluster.stop(live, StopReason.PREEMPTED)
    for live in decision.moves:
        assert cluster.stop(live, StopReason.MIGRATED)
    return outcome, decision


def stopped(cluster: Cluster, live: LiveAttempt) -> None:
    live.attempt.state = specs_module.ATTEMPT_STATES.to_wire(AttemptState.STOPPED)
    cluster.release(live)


def forgotten(cluster: Cluster, live: LiveAttempt) -> None:
    """Forget an ended attempt, as placement does once the queue has committed its end."""
    if live.state is not AttemptState.STOPPED:
        cluster.release(live)
    cluster.remember_forgotten(live)
    cluster.forget(live.key[0])


def half_taken() -> tuple[Cluster, TentativeReservations]:
    """Two nodes of 2 GPUs, on each of which a single job has one."""
    cluster, reservations = cluster_of(1), TentativeReservations()
    plan(cluster, request_of([spec(), spec()]), reservations)
    join(cluster, "n2")
    plan(cluster, request_of([spec()], "other"), reservations)
    live = cluster.attempts["job1"]
    stopped(cluster, live)
    return cluster, reservations


def moving() -> tuple[Cluster, TentativeReservations, LiveAttempt]:
    """The same cluster, as one job begins to migrate so that a gang of two can start."""
    cluster, reservations = half_taken()
    outcome, decision = plan(cluster, request_of([spec(replicas=2, locality=SERVER)], "gang"), reservations, MOVES)
    (mover,) = decision.moves
    assert outcome.starts[0].moves == (mover.key[0],)
    return cluster, reservations, mover


shapes = st.lists(
    st.builds(lambda gpus, replicas: spec(gpus=gpus, cores=1, replicas=replicas), st.integers(0, 2), st.integers(1, 3)),
    max_size=4,
)


@settings(max_examples=examples(60), deadline=None)
@given(streams=st.lists(shapes, min_size=1, max_size=4), joins=st.integers(0, 4))
def test_a_reserved_place_goes_to_no_other_job(streams: list[list[job_pb2.JobSpec]], joins: int) -> None:
    cluster, reservations, mover = moving()
    kept = {"gang0", mover.key[0]}
    for number, specs in enumerate(streams):
        if number == joins:
            join(cluster, "n0")  # all nodes have other numbers now
        plan(cluster, request_of(specs, f"thief{number}-"), reservations)
        assert set(reservations.valid(cluster, {}, time.monotonic())) == kept
    stopped(cluster, mover)
    request = request_of([spec(replicas=2, locality=SERVER)], "gang")
    request.candidates.add(job_id=mover.key[0], number=2, spec=mover.record.spec)
    _, decision = plan(cluster, request, reservations)
    assert {live.key for live in decision.starts} == {("gang0", 1), (mover.key[0], 2)}
    assert not reservations


def test_a_migrating_job_waits_for_its_reserved_place() -> None:
    cluster, reservations, mover = moving()
    _, decision = plan(cluster, request_of([spec(replicas=2, locality=SERVER)], "gang"), reservations, MOVES)
    assert decision.refusals["gang0"].code == "MAKING_ROOM"
    assert (decision.starts, decision.moves) == ((), ()), "one move is enough"
    (there,) = {"n1", "n2"} - set(mover.nodes)
    assert cluster.claimed == {mover.nodes[0]: 8, there: 4}, "nobody grows there"
    assert mover.state is AttemptState.STOPPING


@pytest.mark.parametrize(
    "lost",
    [
        "its time is over",
        "its node takes no work",
        "it asks for another attempt",
        "it failed",
        "it failed and is forgotten",
        "it runs on",
    ],
)
def test_a_reservation_ends(lost: str) -> None:
    cluster, reservations, mover = moving()
    job_id, now, asking = mover.key[0], time.monotonic(), {}
    (where,) = (reservation.nodes for reservation in reservations if reservation.number == 2)
    if lost == "its time is over":
        now += 1000
    elif lost == "its node takes no work":
        cluster.nodes[where[0]].connected = False
    elif lost == "it asks for another attempt":
        asking = {job_id: 3}
    else:
        state = AttemptState.RUNNING if lost == "it runs on" else AttemptState.FAILED
        mover.attempt.state = specs_module.ATTEMPT_STATES.to_wire(state)
    if lost.endswith("forgotten"):
        forgotten(cluster, mover)
    assert job_id not in reservations.valid(cluster, asking, now)


def test_a_reservation_outlives_the_record_of_the_stopped_attempt() -> None:
    cluster, reservations, mover = moving()
    stopped(cluster, mover)
    forgotten(cluster, mover)
    assert set(reservations.valid(cluster, {}, time.monotonic())) == {"gang0", mover.key[0]}


def test_a_reserved_start_takes_nothing_from_a_preemptors_room() -> None:
    """Victims count those before them in the order; a promised candidate is one of these, though it needs no room."""
    cluster, reservations = half_taken()
    outcome, _ = plan(cluster, request_of([spec(replicas=2, locality=SERVER)], "gang"), reservations, MOVES)
    (move,) = outcome.moves
    mover = cluster.attempts[move.gang.job_id]
    stopped(cluster, mover)
    (stays,) = (live for live in cluster.attempts.values() if live.state is AttemptState.RUNNING)
    request = pb.PlanPlacementRequest()
    request.candidates.add(job_id=mover.key[0], number=2, spec=mover.record.spec)
    request.candidates.add(job_id="below", number=1, spec=spec())
    request.victims.add(job_id=stays.key[0], number=1, ahead=1)
    outcome, decision = plan(cluster, request, reservations)
    assert not outcome.stops, "it outranks whom it would have to make room for"
    assert [live.key for live in decision.starts] == [(mover.key[0], 2)]


def test_policies_see_running_attempts() -> None:
    cluster, _ = half_taken()
    live = cluster.attempts["job0"]
    live.record.estimate.predictable = True
    live.record.estimate.remaining.FromSeconds(100)
    began = specs_module.seconds(live.attempt.start_time)
    moment = LiveClusterView(cluster, StopCosts(checkpoint_seconds=20, restart_seconds=5), began + 40)
    (shown,) = moment.jobs_on(cluster.nodes["n1"].number)
    assert shown == moment.running_jobs()["job0"]
    assert set(moment.running_jobs()) == {"job0", "other0"}
    assert (shown.preemptible, shown.stop_cost_seconds, shown.since_seconds) == (True, 25.0, began)
    assert shown.holdings == live.holdings
    assert shown.gang.gpu_milli == 1000
    assert shown.gang.estimate.remaining_seconds == pytest.approx(60)
    cluster.nodes["n1"].connected = False
    away = LiveClusterView(cluster, StopCosts(), began + 40).running_jobs()["job0"]
    assert (away.preemptible, away.gang) == (False, replace(shown.gang))
    cluster.stop(live, StopReason.CANCELLED)
    assert set(LiveClusterView(cluster, StopCosts(), began).running_jobs()) == {"other0"}
