"""What the queue asks for, in the core's words: a candidate as a gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from cotenant.codec import errors, estimates, specs
from cotenant.codec.request_limits import spec_violations
from cotenant.codec.spec_cache import SpecCache
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.validation import Violation, check_amounts, shown
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.scheduling import cycle
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.v1 import job_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2

SLICE = 200  # candidates looked at between two turns of others; some milliseconds

Informed = Callable[[JobSpec, Estimate], Estimate]


def gang_of(
    candidate: placement_pb2.Candidate,
    allocator: CpuAllocator,
    shapes: Sequence[NodeShape],
    informed: Informed = lambda _, estimate: estimate,
) -> Gang:
    """Decide a candidate's cores; `informed` adds to its estimate what is remembered of jobs like it."""
    spec = spec_of(candidate.spec)
    return cycle.gang_of(
        candidate.job_id,
        spec,
        informed(spec, estimates.estimate_from_wire(candidate.estimate)),
        allocator,
        shapes,
        specs.seconds(candidate.waited),
        specs.seconds(candidate.fragmented),
        candidate.avoided_nodes,
    )


def spec_of(message: job_pb2.JobSpec) -> JobSpec:
    """Read a spec; small ones are remembered, for who waits is asked about again in each cycle."""
    return _read(message)[0]


async def check_candidates(candidates: Iterable[placement_pb2.Candidate]) -> None:
    """Refuse gangs of nobody, and of amounts that would give where others take, before anything is held for one.

    Raises:
        Problem: INVALID_ARGUMENT, naming each field of each candidate that nobody can count with.
    """
    wrong: list[Violation] = []
    for at, candidate in enumerate(candidates):
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)  # others have their turn
        wrong += [Violation(f"candidates[{at}].{one.field}", one.description) for one in _read(candidate.spec)[1]]
    if wrong:
        raise errors.invalid(wrong)


def check_once(candidates: Sequence[placement_pb2.Candidate]) -> None:
    """Refuse a plan that names a job more than once: it would hold two places for one attempt.

    Raises:
        Problem: INVALID_ARGUMENT, naming each candidate that repeats another.
    """
    seen: set[str] = set()
    wrong: list[Violation] = []
    for at, candidate in enumerate(candidates):
        if candidate.job_id in seen:
            wrong.append(Violation(f"candidates[{at}].job_id", f"{shown(candidate.job_id)} is named before"))
        seen.add(candidate.job_id)
    if wrong:
        raise errors.invalid(wrong)


def _read(message: job_pb2.JobSpec) -> tuple[JobSpec, Sequence[Violation]]:
    """Read a spec, with what is wrong with its amounts."""
    return _specs(message)


def _weighed(message: job_pb2.JobSpec) -> tuple[JobSpec, Sequence[Violation]]:
    if beyond := spec_violations(message):
        return JobSpec(), beyond
    spec = specs.spec_from_wire(message)
    return spec, check_amounts(spec)


_specs = SpecCache(_weighed)


def heeding(
    promised: Mapping[str, cycle.Start], candidates: Sequence[placement_pb2.Candidate], cluster: Cluster
) -> Mapping[str, cycle.Start]:
    """Leave out promised places on nodes that their gangs avoid by now: those gangs ask like any other."""
    avoided = {one.job_id: set(one.avoided_nodes) for one in candidates if one.avoided_nodes}
    return {
        job_id: start
        for job_id, start in promised.items()
        if not any(cluster.node_at(share.node).id in avoided.get(job_id, ()) for share in start.offer)
    }
