"""What is observed of jobs, what is asked about them, and jobs whose cores may change."""

from __future__ import annotations

from hypothesis import strategies as st

from cotenant.conformance.worlds import specs
from cotenant.core.model.estimate import UNKNOWN, Candidate, Estimate, Observation, Query
from cotenant.core.model.job import Qos
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.prediction.core_curve import Point
from cotenant.core.sizing.resize import ResizableJob, leading_role, resizable

estimates = st.just(UNKNOWN) | st.integers(1, 64).map(
    lambda cores: Estimate(predictable=True, confidence=0.9, remaining_seconds=600.0, cores_useful=cores)
)
observations = st.builds(
    Observation,
    user=st.sampled_from(["ann", "bob"]),
    model=st.sampled_from(["", "bert"]),
    name=st.sampled_from(["", "run/7"]),
    gpu_milli=st.sampled_from([0, 1000]),
    replicas=st.just(1),
    allocation=st.builds(Candidate, cores=st.integers(0, 4), gpu_type=st.sampled_from(["", "A100"])),
    rate_per_second=st.none() | st.floats(1e-3, 1e6),
    run_seconds=st.none() | st.floats(1e-3, 1e9),
    succeeded=st.booleans(),
    job_id=st.sampled_from(["", "j1"]),
    step=st.none() | st.integers(0, 100),
    loss=st.none() | st.floats(),
    batch_size=st.none() | st.integers(1, 64),
    batch_seconds=st.none() | st.floats(1e-6, 10.0),
)
queries = st.builds(
    Query,
    user=st.sampled_from(["ann", "bob"]),
    model=st.sampled_from(["", "bert"]),
    name=st.sampled_from(["", "run/7"]),
    gpu_milli=st.sampled_from([0, 1000]),
    replicas=st.just(1),
    cores=st.none() | st.integers(0, 4),
    run_seconds=st.floats(0, 1e9),
    step=st.integers(0, 100),
    steps_total=st.integers(0, 200),
    expected_seconds=st.none() | st.floats(1.0, 1e9),
    job_id=st.sampled_from(["", "j1"]),
    loss_goal=st.builds(
        LossGoal, st.none() | st.floats(-10, 10), st.sampled_from([0, 10]), st.sampled_from([0.0, 0.1])
    ),
    qos=st.builds(
        Qos,
        latency_seconds=st.floats(0, 1),
        latency_percentile=st.sampled_from([0.0, 99.0]),
        arrivals_per_second=st.floats(0, 1e4),
    ),
    candidates=st.lists(st.builds(Candidate, cores=st.integers(0, 4)), max_size=2).map(tuple),
)
points = st.lists(
    st.builds(Point, st.integers(1, 40), st.floats(0.01, 1e3), windows=st.integers(1, 8)), max_size=6
).map(tuple)


@st.composite
def running(draw: st.DrawFn) -> ResizableJob:
    """Draw a running job with some cores, some of which may be lent."""
    spec = draw(specs(roles_max=2).filter(resizable))
    count, lead = len(spec.roles), leading_role(spec)
    cores = tuple(draw(st.integers(1, 24)) for _ in range(count))
    spare = tuple(draw(st.sampled_from([0, 1, 2, 7, 30])) if number == lead else 0 for number in range(count))
    useful, rest = draw(st.none() | st.integers(1, 64)), draw(st.none() | st.floats(0, 1e7))
    return ResizableJob(
        "job",
        spec,
        Estimate(cores_useful=useful, cores_useful_confidence=0.9 if useful else 0.0, remaining_seconds=rest),
        cores,
        spare,
        draw(points),
        settled_seconds=draw(st.sampled_from([0.0, 90.0, 1e6])),
        node_share=tuple(draw(st.integers(1, 24)) for _ in range(count)),
        lent=tuple(draw(st.integers(0, each - 1)) for each in cores),
        known=draw(points),
    )
