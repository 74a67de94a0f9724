"""Lent resources are reclaimed at once for those they are reserved for: every queue policy, every lending placement."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.simulator.histories import History, Tape

from cotenant import plugins
from cotenant.core.model.job import JobKind, Request, Role
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import Reclaims
from cotenant.plugins import POLICY_GROUPS as GROUPS
from cotenant.simulator import Trace, TraceJob, parse_cluster, simulate
from cotenant.simulator.recording.events import Event, Kind

QUEUES = sorted(plugin.name for plugin in plugins.discover(GROUPS["queue"]) if plugin.healthy)
LENDING = sorted(
    plugin.name
    for plugin in plugins.discover(GROUPS["placement"])
    if plugin.healthy and capability_of(plugin.make(), Reclaims) is not None
)
every_queue = pytest.mark.parametrize("queue", QUEUES)
every_lender = pytest.mark.parametrize("placement", LENDING)


def job(name: str, gpus: int, cores: int, at: float = 0.0, work: float = 20_000.0) -> TraceJob:
    kind = JobKind.TRAINING if gpus else JobKind.CPU
    roles = (Role("worker", 1, Request(1000 * gpus, cores)),)
    return TraceJob(name, at, work, roles, kind=kind, deadline_seconds=at + 2 * work if gpus else None)


def run(jobs: Sequence[TraceJob], cluster: str, queue: str, placement: str) -> list[Event]:
    tape = Tape()
    trace = Trace("made up", "none", tuple(jobs))
    result = simulate(trace, cluster, queue=queue, placement=placement, recorder=tape)
    history = History(parse_cluster(cluster))
    for event in tape.events:
        history.take(event)
    history.agrees(result)
    return tape.events


def times(events: Sequence[Event], kind: Kind, job_id: str) -> list[float]:
    return [event.at_seconds for event in events if event.kind is kind and event.job_id == job_id]


def test_some_placement_lends() -> None:
    assert "multi-array" in LENDING


@every_queue
@every_lender
def test_lent_cores_return_at_once_and_stay_with_the_job_they_are_reserved_for(queue: str, placement: str) -> None:
    events = run([job("cpu", 0, 16), job("gpu", 4, 24, at=100.0)], "1x4x32", queue, placement)
    assert times(events, Kind.STARTED, "gpu") == [100.0]
    assert times(events, Kind.RECLAIMED, "cpu") == [100.0]
    assert times(events, Kind.STARTED, "cpu") == [0.0, 20_100.0]


@every_queue
@every_lender
def test_lent_gpus_return_at_once(queue: str, placement: str) -> None:
    small = [job(f"small-{number}", 1, 2, at=float(number)) for number in range(8)]
    events = run([*small, job("large", 4, 8, at=100.0)], "2x4x32", queue, placement)
    assert times(events, Kind.STARTED, "large")[0] == 100.0


@every_queue
@every_lender
def test_a_job_does_not_stop_another_to_borrow_what_it_held(queue: str, placement: str) -> None:
    later = [job(f"cpu-{number}", 0, 16, at=1000.0 * number, work=100.0) for number in range(1, 5)]
    events = run([job("gpu", 4, 24), *later], "1x4x32", queue, placement)
    assert times(events, Kind.STARTED, "gpu") == [0.0]
