"""Laws of contention policies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance.contention_node import CpuJob, ModelNode, Trainer
from cotenant.conformance.node_windows import nodes_seen, stories
from cotenant.conformance.trials import tried
from cotenant.core.policy.protocols import AttemptWindow, ContentionPolicy, NodeWindow, Throttle


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


@tried(50)
@given(st.lists(nodes_seen, max_size=8))
def test_directives_concern_observed_cpu_jobs(plugin: plugins.Plugin, seen: list[NodeWindow]) -> None:
    """Directives concern CPU jobs that were observed, one each, with a share from 0 to 1 and a reason."""
    lawful(plugin.make(), plugin.make(), seen)


@tried(60)
@given(stories())
def test_directives_stay_valid_over_any_windows(plugin: plugins.Plugin, story: list[NodeWindow]) -> None:
    """Directives stay valid over any windows of a node on which they are applied."""
    lawful(plugin.make(), plugin.make(), story)


@pytest.mark.parametrize("seed", range(3))
def test_an_hour_without_contention_gets_no_directives(plugin: plugins.Plugin, seed: int) -> None:
    """An hour without contention gets no directives."""
    trainers = [Trainer(f"dnn-{number}", 10.0 + number) for number in range(4)]
    cpu_jobs = [CpuJob(f"cpu-{number}", demand=5e9, cores=4) for number in range(4)]
    node = ModelNode(trainers, cpu_jobs, seed)
    assert not any(directives for _, directives in node.run(plugin.make(), 720))


def test_a_node_without_cpu_jobs_gets_no_directives(plugin: plugins.Plugin) -> None:
    """A node without CPU jobs gets no directives."""
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


@pytest.mark.parametrize("nodes", [1, 50], ids=["one node", "fifty nodes"])
def test_memory_does_not_grow_with_ended_jobs(plugin: plugins.Plugin, nodes: int) -> None:
    """The memory of a policy does not grow with jobs that have ended."""

    def node(number: int) -> str:
        return f"n{number % nodes}"

    assert _after(plugin.make(), 4_000, node) <= 1.2 * _after(plugin.make(), 500, node) + 1000


def test_silent_nodes_are_dropped(plugin: plugins.Plugin) -> None:
    """The memory of a policy does not grow with nodes that are silent."""
    few, many = plugin.make(), plugin.make()
    assert _after(many, 10_000, lambda number: f"n{number}") <= 1.5 * _after(few, 200, lambda number: f"n{number}")
