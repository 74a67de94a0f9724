"""Windows of samples from nodes, as contention policies see them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cotenant.core.policy.protocols import AttemptWindow, NodeWindow, Throttle

WINDOWS = 40

throttles = st.builds(
    Throttle, st.sampled_from((100, 50, 20, 10)), st.sampled_from((0, 0, 1, 4)), st.booleans(), st.booleans()
)
attempts = st.builds(
    AttemptWindow,
    job_id=st.sampled_from(["a", "b", "c", "d"]),
    number=st.integers(1, 2),
    cpu_job=st.booleans(),
    cores_used=st.floats(0, 64),
    rate_per_second=st.none() | st.floats(0, 1e4),
    gpu_utilisation_percent=st.none() | st.floats(0, 100),
    memory_bandwidth_bytes_per_second=st.none() | st.floats(0, 1e12),
    cores=st.integers(0, 64),
    tasks=st.integers(1, 4),
    cache_bytes=st.none() | st.floats(0, 1e9),
    throttle=st.just(Throttle()) | throttles,
    best_effort=st.booleans(),
    expected_rate_per_second=st.none() | st.floats(0, 1e4),
    phase=st.sampled_from(("", "eval")),
    steady=st.booleans(),
)
nodes_seen = st.builds(
    NodeWindow,
    node_id=st.sampled_from(("n1", "n2")),
    now=st.floats(0, 1e6),
    seconds=st.sampled_from((0.5, 5.0, 60.0)),
    attempts=st.lists(attempts, max_size=6, unique_by=lambda one: (one.job_id, one.number)).map(tuple),
    cpu_some_percent=st.floats(0, 100),
    memory_some_percent=st.floats(0, 100),
    io_some_percent=st.floats(0, 100),
    memory_bandwidth_bytes_per_second=st.none() | st.floats(0, 1e12),
    memory_bandwidth_peak_bytes_per_second=st.none() | st.floats(1, 1e12),
    bandwidth_enforced=st.booleans(),
)


@st.composite
def stories(draw: st.DrawFn) -> list[NodeWindow]:
    """Consecutive windows of one node with erratic rates and usage, where directives are applied."""
    few = draw(st.lists(attempts, min_size=1, max_size=5, unique_by=lambda one: (one.job_id, one.number)))
    levels = draw(st.lists(st.sampled_from((0.1, 0.4, 0.7, 1.0)), min_size=2, max_size=6))
    node = draw(nodes_seen)
    story = []
    for number in range(WINDOWS):
        level = levels[number * len(levels) // WINDOWS]
        here = tuple(
            replace(
                one,
                cores_used=one.cores_used * (1 if not one.cpu_job else 1 - level),
                rate_per_second=None if one.rate_per_second is None else one.rate_per_second * level,
                steady=True,
            )
            for one in few
        )
        story.append(replace(node, now=5.0 * number, seconds=5.0, attempts=here))
    return story
