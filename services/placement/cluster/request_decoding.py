"""Decoding and validation of the queue's requests: candidates become gangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cotenant.codec import errors, estimates, specs
from cotenant.codec.request_limits import spec_violations
from cotenant.codec.spec_cache import SpecCache
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.model.validation import Violation, check_amounts, shown
from cotenant.core.placement.capable_nodes import HasCapabilities
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.v1 import job_pb2

SLICE = 200  # candidates checked before yielding to other tasks; a few milliseconds

PRE_RUNS = HasCapabilities((Capability.PRE_RUNS,))

Enrich = Callable[[JobSpec, Estimate], Estimate]


def gang_of(
    candidate: placement_pb2.Candidate,
    allocator: CpuAllocator,
    shapes: Sequence[NodeShape],
    enrich: Enrich = lambda _, estimate: estimate,
) -> Gang:
    """Return a candidate's gang, with its cores chosen; `enrich` adds the rates of its job class to its estimate."""
    spec = spec_of(candidate.spec)
    gang = cycle.gang_of(
        candidate.job_id,
        spec,
        enrich(spec, estimates.estimate_from_wire(candidate.estimate)),
        allocator,
        shapes,
        specs.seconds(candidate.waited),
        specs.seconds(candidate.fragmented),
        candidate.avoided_nodes,
    )
    return replace(gang, constraints=(*gang.constraints, PRE_RUNS)) if candidate.pre_run else gang


def spec_of(message: job_pb2.JobSpec) -> JobSpec:
    """Decode a spec; small ones are cached, because a waiting job is sent again in each cycle."""
    return _read(message)[0]


async def check_candidates(candidates: Iterable[placement_pb2.Candidate]) -> None:
    """Reject empty gangs and negative or excessive amounts before anything is held.

    Raises:
        Problem: INVALID_ARGUMENT, naming each invalid field of each candidate.
    """
    wrong: list[Violation] = []
    for at, candidate in enumerate(candidates):
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)  # yield to other tasks
        wrong += [Violation(f"candidates[{at}].{one.field}", one.description) for one in _read(candidate.spec)[1]]
    if wrong:
        raise errors.invalid(wrong)


def check_resizes(resizes: Sequence[placement_pb2.ReplicaResize]) -> None:
    """Reject resizes of jobs that are not elastic, out of their range, or of one job twice.

    Raises:
        Problem: INVALID_ARGUMENT, naming each invalid field of each resize.
    """
    wrong: list[Violation] = []
    seen: set[str] = set()
    for at, resize in enumerate(resizes):
        spec, amounts = _read(resize.next.spec)
        where, number = f"resizes[{at}]", spec.elastic_role
        wrong += [Violation(f"{where}.next.{one.field}", one.description) for one in amounts]
        if resize.next.job_id in seen:
            wrong.append(Violation(f"{where}.next.job_id", f"{shown(resize.next.job_id)} is a duplicate"))
        seen.add(resize.next.job_id)
        span = None if number is None else spec.roles[number].elastic
        if number is None or span is None:
            wrong.append(Violation(f"{where}.next.spec.roles", "needs a role with a range of replicas"))
        elif not span.least <= resize.replicas <= span.most or spec.roles[number].replicas != resize.replicas:
            what = f"must be in {span} and that of the role, not {resize.replicas}"
            wrong.append(Violation(f"{where}.replicas", what))
    if wrong:
        raise errors.invalid(wrong)


def check_order(candidates: Sequence[placement_pb2.Candidate]) -> None:
    """Reject a plan that names a job twice, which would hold two allocations for one attempt, or that stops too early.

    Raises:
        Problem: INVALID_ARGUMENT, naming each candidate that repeats another or ends the plan at or before itself.
    """
    seen: set[str] = set()
    wrong: list[Violation] = []
    for at, candidate in enumerate(candidates):
        if candidate.HasField("next_of_class") and candidate.next_of_class <= at:  # the plan would not get further
            wrong.append(Violation(f"candidates[{at}].next_of_class", f"must be above {at}"))
        if candidate.job_id in seen:
            wrong.append(Violation(f"candidates[{at}].job_id", f"{shown(candidate.job_id)} is a duplicate"))
        seen.add(candidate.job_id)
    if wrong:
        raise errors.invalid(wrong)


def remove_candidate(request: placement_pb2.PlanPlacementRequest, candidate: placement_pb2.Candidate) -> None:
    """Remove a candidate from a plan; the indexes of those behind it change."""
    place = list(request.candidates).index(candidate)
    del request.candidates[place]
    for other in request.candidates:
        if other.HasField("next_of_class") and other.next_of_class > place:
            other.next_of_class -= 1


def _read(message: job_pb2.JobSpec) -> tuple[JobSpec, Sequence[Violation]]:
    """Return a decoded spec and the violations of its amounts."""
    return _specs(message)


def _decode_checked(message: job_pb2.JobSpec) -> tuple[JobSpec, Sequence[Violation]]:
    if beyond := spec_violations(message):
        return JobSpec(), beyond
    spec = specs.spec_from_wire(message)
    return spec, check_amounts(spec)


_specs = SpecCache(_decode_checked)


def without_avoided(
    promised: Mapping[str, cycle.Start], candidates: Sequence[placement_pb2.Candidate], cluster: Cluster
) -> Mapping[str, cycle.Start]:
    """Return the reserved starts without those on nodes that their gangs avoid now; these gangs compete like others."""
    avoided = {one.job_id: set(one.avoided_nodes) for one in candidates if one.avoided_nodes}
    return {
        job_id: start
        for job_id, start in promised.items()
        if not any(cluster.node_at(share.node).id in avoided.get(job_id, ()) for share in start.offer)
    }
