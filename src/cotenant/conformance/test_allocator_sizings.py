"""Laws of CPU allocators."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.estimate_worlds import running
from cotenant.conformance.trials import tried
from cotenant.conformance.worlds import NOW, shapes, specs
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.unschedulable import never_fits, room_on
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.sizing.resize import ResizableJob, Resizes


@tried()
@given(specs(), st.lists(shapes(), max_size=3))
def test_every_role_gets_cores_unless_it_requests_none(
    plugin: plugins.Plugin, spec: JobSpec, made_of: list[NodeShape]
) -> None:
    """Every role gets cores, unless it requests none, and the sizing has a reason."""
    allocator: CpuAllocator = plugin.make()
    sizing = allocator.size(spec, UNKNOWN, made_of)
    assert len(sizing.cores) == len(spec.roles)
    assert sizing.reason
    assert plugin.make().size(spec, UNKNOWN, made_of) == sizing
    for role, cores in zip(spec.roles, sizing.cores, strict=True):
        assert cores >= 1 or role.request.cores == 0


@tried()
@given(specs(roles_max=2), st.lists(shapes(), min_size=1, max_size=3), st.none() | st.integers(1, 64))
def test_a_fitting_job_still_fits_with_its_allocated_cores(
    plugin: plugins.Plugin, spec: JobSpec, made_of: list[NodeShape], useful: int | None
) -> None:
    """A job that fits the cluster still fits with the cores that it is given."""
    if never_fits(spec, made_of, elastic=True):
        return
    estimate = Estimate(predictable=useful is not None, confidence=0.9, cores_useful=useful)
    sizing = plugin.make().size(spec, estimate, made_of)
    for role, cores in zip(spec.roles, sizing.cores, strict=True):
        request = dataclasses.replace(role.request, cores=cores)
        assert any(room_on(shape, request) for shape in made_of), f"no node could hold {role} with {cores} cores"


@tried(60)
@given(running())
def test_a_sizing_is_within_bounds_and_deterministic(plugin: plugins.Plugin, job: ResizableJob) -> None:
    """A running job keeps at least one core and gets at most the spare ones, and only its leading role changes."""
    allocator, other = plugin.make(), plugin.make()
    if not isinstance(allocator, Resizes):
        return
    assert allocator.interval_seconds > 0
    assert allocator.measure_seconds > 0
    assert 0 <= allocator.weight(job) < math.inf
    wish = allocator.resize(job, NOW)
    assert other.resize(job, NOW) == wish
    if wish is None:
        return
    assert wish.reason
    for number, (cores, held, spare) in enumerate(zip(wish.cores, job.cores, job.spare, strict=True)):
        assert 1 <= cores <= held + spare
        assert number == job.lead or cores == held, "only the leading role changes"
