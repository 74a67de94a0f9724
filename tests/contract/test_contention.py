"""Contract of every contention policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.contention_node import CpuJob, ModelNode, Trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant import plugins
from cotenant.core.policy.protocols import AttemptWindow, ContentionPolicy, NodeWindow, Throttle

FOUND = plugins.discover("cotenant.contention_policies")
every = pytest.mark.parametrize("plugin", FOUND, ids=[plugin.name for plugin in FOUND])
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


def lawful(policy: ContentionPolicy, again: ContentionPolicy, seen: list[NodeWindow]) -> None:
    """Run the policy over windows, apply its directives, and check each against the contract."""
    done: dict[tuple[str, str, int], Throttle] = {}
    for window in seen:
        here = tuple(
            replace(one, throttle=done.get((window.node_id, one.job_id, one.number), one.throttle))
            for one in window.attempts
        )
        window = replace(window, attempts=here)
        directives = list(policy.judge(window))
        assert list(again.judge(window)) == directives, "the same windows give the same answers"
        ids = [(directive.job_id, directive.number) for directive in directives]
        assert len(set(ids)) == len(ids), "one directive for an attempt"
        by_id = {(one.job_id, one.number): one for one in here}
        with_gpus = {one.job_id for one in here if not one.cpu_job}
        for directive in directives:
            attempt = by_id[directive.job_id, directive.number]
            throttle = directive.throttle
            assert 0 <= directive.share <= 1
            assert directive.reason
            assert "\n" not in directive.reason
            assert attempt.cpu_job, "only CPU jobs are held back"
            assert directive.share == 1 or directive.job_id not in with_gpus, "nor those of a gang with GPUs"
            if throttle is not None:
                assert 10 <= throttle.bandwidth_percent <= 100
                assert attempt.best_effort or not throttle.idle or throttle == attempt.throttle
                each = (attempt.cores or round(attempt.cores_used)) // attempt.tasks
                assert not throttle.cores or throttle == attempt.throttle or 10 * throttle.cores >= each
                assert throttle.free == (directive.share == 1) or not throttle.free
                done[window.node_id, directive.job_id, directive.number] = throttle


@every
@settings(max_examples=examples(50), deadline=None)
@given(st.lists(nodes_seen, max_size=8))
def test_directives_concern_observed_cpu_jobs(plugin: plugins.Plugin, seen: list[NodeWindow]) -> None:
    lawful(plugin.make(), plugin.make(), seen)


@every
@settings(max_examples=examples(60), deadline=None)
@given(stories())
def test_directives_stay_valid_over_any_windows(plugin: plugins.Plugin, story: list[NodeWindow]) -> None:
    lawful(plugin.make(), plugin.make(), story)


@every
@pytest.mark.parametrize("seed", range(3))
def test_an_hour_without_contention_gets_no_directives(plugin: plugins.Plugin, seed: int) -> None:
    trainers = [Trainer(f"dnn-{number}", 10.0 + number) for number in range(4)]
    cpu_jobs = [CpuJob(f"cpu-{number}", demand=5e9, cores=4) for number in range(4)]
    node = ModelNode(trainers, cpu_jobs, seed)
    assert not any(directives for _, directives in node.run(plugin.make(), 720))


@every
def test_a_node_without_cpu_jobs_gets_no_directives(plugin: plugins.Plugin) -> None:
    policy = plugin.make()
    for number in range(100):
        rate = 10.0 if number % 40 < 20 else 1.0
        jobs = tuple(AttemptWindow(name, 1, False, 8.0, rate, cores=8) for name in "ab")
        assert not policy.judge(NodeWindow("n1", 5.0 * number, 5.0, jobs, cpu_some_percent=99, io_some_percent=99))


def _size(thing: object, seen: set[int]) -> int:
    """Return the bytes of an object and everything it references."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    parts: list[Any] = []
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset) or type(thing).__name__ == "deque":
        parts = list(thing)  # type: ignore[call-overload]  # one of those that can be gone through
    parts += vars(thing).values() if hasattr(thing, "__dict__") else ()
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    parts += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    return sys.getsizeof(thing) + sum(_size(part, seen) for part in parts)


def _after(policy: ContentionPolicy, arrivals: int, node: Callable[[int], str]) -> int:
    for number in range(arrivals):
        new = [AttemptWindow(f"{kind}-{number}", 1, kind == "cpu", 4.0, 10.0, cores=4) for kind in ("dnn", "cpu")]
        for part in range(2):
            policy.judge(NodeWindow(node(number), 10.0 * number + 5 * part, 5.0, tuple(new), cpu_some_percent=99.0))
    return _size(policy, set())


@every
@pytest.mark.parametrize("nodes", [1, 50], ids=["one node", "fifty nodes"])
def test_memory_does_not_grow_with_ended_jobs(plugin: plugins.Plugin, nodes: int) -> None:
    def node(number: int) -> str:
        return f"n{number % nodes}"

    assert _after(plugin.make(), 10_000, node) <= 1.2 * _after(plugin.make(), 500, node) + 1000


@every
def test_silent_nodes_are_dropped(plugin: plugins.Plugin) -> None:
    few, many = plugin.make(), plugin.make()
    assert _after(many, 10_000, lambda number: f"n{number}") <= 1.5 * _after(few, 200, lambda number: f"n{number}")
