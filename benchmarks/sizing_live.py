"""The cost of rebalancing cores in the live services, as a share of a core, by the number of running jobs.

Every job has one GPU, 8 jobs run on each node, and `coda-adaptive` chooses their cores. The recurring work: a check
without changes, once a second; a progress report of each job every second, one per minute of which ends a rate window;
rebalancing of nodes, because each job is checked at least every half hour; and, in the queue, estimates that are
refreshed at least every ten minutes, without the time of the predictor.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks.agents import inventory  # noqa: E402 - likewise

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2  # noqa: E402 - likewise
from cotenant.codec import specs  # noqa: E402 - likewise
from cotenant.core.model.lifecycle import AttemptEvent  # noqa: E402 - likewise
from cotenant.core.model.node import NodeShape  # noqa: E402 - likewise
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2  # noqa: E402 - likewise
from cotenant.leadership.leader_handlers import LeaderHandlers  # noqa: E402 - likewise
from cotenant.policies.coda_adaptive import CodaAdaptive  # noqa: E402 - likewise
from cotenant.policies.consolidate import Consolidate  # noqa: E402 - likewise
from cotenant.services.placement.agents import agent_sessions  # noqa: E402 - likewise
from cotenant.services.placement.api.server import Placement, PlacementConfig  # noqa: E402 - likewise
from cotenant.services.placement.cluster.live_records import LiveAttempt  # noqa: E402 - likewise
from cotenant.services.placement.planning import planner  # noqa: E402 - likewise
from cotenant.services.queue.estimates.estimate_refresh import EstimateRefresh  # noqa: E402 - likewise
from cotenant.services.queue.jobs.queue_state import State  # noqa: E402 - likewise
from cotenant.services.queue.jobs.transitions import Record  # noqa: E402 - likewise
from cotenant.storage.v1 import records_pb2  # noqa: E402 - likewise
from cotenant.store.memory import MemoryStore  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, node_service_pb2, resources_pb2  # noqa: E402 - likewise
from cotenant.v1 import predictor_service_pb2 as predictor_pb2  # noqa: E402 - likewise

SIZES = (400, 2000, 8000)
GPUS, CORES = 8, 24
SHARE_MAX = 0.05  # of a core, for 8,000 jobs
LOOK_SECONDS, RENEW_SECONDS = 1800.0, 600.0
REPORT_SECONDS, WINDOW_SECONDS = 1.0, 60.0
CHANGES = 200


async def full_cluster(jobs: int) -> tuple[Placement, list[LiveAttempt]]:
    """Return a placement with `jobs` running jobs."""
    placement = Placement(LeaderHandlers(), MemoryStore(), PlacementConfig(allocator="coda-adaptive"))
    await placement.leadership.load()
    cluster = placement.cluster
    for number in range(jobs // GPUS):
        node_id = f"n{number:05d}"
        made_of = inventory(GPUS, CORES, node_id=node_id)
        record = records_pb2.StoredNode()
        record.node.id, record.node.state = node_id, node_service_pb2.NODE_STATE_READY
        node = cluster.put_node(node_id, specs.inventory_from_wire(made_of), record)
        node.connected = True
        placement.sessions.open(agent_sessions.Session(node_id, "benchmark"))
    request = placement_pb2.PlanPlacementRequest()
    role = job_pb2.Role(name="worker", replicas=1, resources=resources_pb2.ResourceRequest(gpu_milli=1000))
    for number in range(jobs):
        spec = job_pb2.JobSpec(roles=[role], command=["true"], model=f"model-{number % 50}", tenant="ann")
        request.candidates.add(job_id=f"j{number:05d}", number=1, spec=spec)
    outcome = planner.plan(cluster, request, Consolidate(), CodaAdaptive(), placement.job_classes.enrich)
    candidates = {candidate.job_id: candidate for candidate in request.candidates}
    lives = [planner.assign(cluster, start, candidates[start.gang.job_id]) for start in outcome.starts]
    for live in lives:
        live.epoch = 1
        live.move(AttemptEvent.LAUNCHED)
        live.attempt.start_time.FromNanoseconds(time.time_ns() - 10**12)
    return placement, lives


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begin) / times


def progress(live: LiveAttempt, step: int, at_seconds: int) -> agent_pb2.ProgressReport:
    report = agent_pb2.ProgressReport(job_id=live.key[0], number=1)
    report.progress.step = step
    report.progress.step_time.FromNanoseconds(at_seconds * 10**9)
    return report


async def costs(jobs: int) -> dict[str, float]:
    """Measure the share of a core that each kind of work takes."""
    placement, lives = await full_cluster(jobs)
    assert len(lives) == jobs, f"only {len(lives)} jobs were placed"
    now = time.monotonic()
    placement.rebalancer.tick(now)  # checks all jobs
    idle = seconds(lambda: placement.rebalancer.tick(now), 20)
    attempts = placement.cluster.attempts
    walk = seconds(lambda: [live for live in attempts.values() if live.state.ended and live.target], 20)
    some = lives[:: max(1, jobs // CHANGES)][:CHANGES]
    first = [progress(live, 100 * n, 10**6 + 61 * n) for live in some for n in (0, 1)]
    between = iter([progress(live, 101 + n, 10**6 + 61 + n) for live in some for n in range(10)])
    ending = iter([progress(live, 100 * n, 10**6 + 61 * n) for live in some for n in range(3, 13)])
    for one in first:
        placement.tracker.take_progress(one)
    report = seconds(lambda: placement.tracker.take_progress(next(between)), 10 * len(some))
    window = seconds(lambda: placement.tracker.take_progress(next(ending)), 10 * len(some))
    placement.rebalancer.tick(now)
    spread = iter(some * 2)

    def change_node() -> None:
        placement.cluster.changed_nodes.update(next(spread).nodes)
        placement.rebalancer.tick(now)

    changed_nodes = max(0.0, seconds(change_node, len(some)) - idle)
    await placement.close()
    return {
        "looks that find nothing": idle,
        "reports of progress": report * jobs / REPORT_SECONDS + window * jobs / WINDOW_SECONDS,
        "nodes that are dealt to": changed_nodes * jobs / LOOK_SECONDS,
        "estimates renewed": await refresh_seconds(lives[:CHANGES]) * jobs / RENEW_SECONDS,
        "walk": walk,
    }


class FakeServices:
    """A predictor with eight candidates of each job, and a placement that accepts advice."""

    async def Estimate(  # noqa: N802 - the wire's name
        self, request: predictor_pb2.EstimateRequest, **call: float
    ) -> predictor_pb2.EstimateResponse:
        """Return the same estimate for each job."""
        some = [predictor_pb2.CandidateEstimate(rate_per_second=float(n)) for n in range(1, 9)]
        estimates = [
            predictor_pb2.Estimate(job_id=query.job_id, predictable=True, candidates=some) for query in request.queries
        ]
        return predictor_pb2.EstimateResponse(estimates=estimates)

    async def AdviseAttempts(  # noqa: N802 - the wire's name
        self, request: placement_pb2.AdviseAttemptsRequest, **call: float
    ) -> placement_pb2.AdviseAttemptsResponse:
        """Accept advice."""
        return placement_pb2.AdviseAttemptsResponse()


async def refresh_seconds(lives: Sequence[LiveAttempt]) -> float:
    """Return the CPU seconds of the queue for each refreshed estimate."""
    others: Any = FakeServices()
    state = State()
    state.shapes = (NodeShape(GPUS, CORES, memory_bytes=2**39),)
    estimate_refresh = EstimateRefresh(state, others, others)
    work = asyncio.create_task(estimate_refresh.run())
    for live in lives:
        job = job_pb2.Job(id=live.key[0], spec=live.record.spec, phase=job_pb2.JOB_PHASE_RUNNING, attempt=live.attempt)
        state.add(Record(records_pb2.StoredJob(job=job), specs.spec_from_wire(live.record.spec)))
    begin = time.process_time()
    for record in state.records.values():
        estimate_refresh.observed(record, time.time())
    while any(record.estimate is None for record in state.records.values()):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.01)
    spent = time.process_time() - begin
    work.cancel()
    return spent / len(lives)


def rows(quick: bool) -> Iterator[harness.Row]:
    for jobs in SIZES[: 2 if quick else 3]:
        parts = asyncio.run(costs(jobs))
        walk = 100 * parts.pop("walk")
        for name, share in parts.items():
            beside = (walk, "a walk over all attempts") if "nothing" in name else (None, "")
            yield harness.Row(f"{name}, {jobs} jobs", 100 * share, "% of a core", *beside)
        total, bar = sum(parts.values()), f"at most {100 * SHARE_MAX:g} %"
        yield harness.Row(f"all of it, {jobs} jobs", 100 * total, "% of a core", bar=bar, holds=total <= SHARE_MAX)


def measure(quick: bool) -> Sequence[harness.Row]:
    """Measure at each size."""
    return list(rows(quick))


if __name__ == "__main__":
    harness.main(measure, "The cost of rebalancing cores in the live services")
