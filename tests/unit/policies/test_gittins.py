"""Gittins' index by the history of jobs that got as far; without history, least attained service."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.policy.protocols import EndedJob
from cotenant.policies.gittins import EDGES, Gittins

QUANTUM = 100.0
EDGE = [QUANTUM * 2**k for k in range(EDGES)]


def ended(gpu_seconds: float, gpus: int = 1) -> EndedJob:
    return EndedJob(gpus * 1000, 0, gpus, gpu_seconds / gpus, gpu_seconds)


def taught(*gpu_seconds: float, history_min: int = 1) -> Gittins:
    policy = Gittins(Gittins.Options(quantum_gpu_seconds=QUANTUM, history_min=history_min))
    for service in gpu_seconds:
        policy.learn(ended(service))
    return policy


def attained(*gpu_seconds: float) -> JobTable:
    table = JobTable()
    for number, service in enumerate(gpu_seconds):
        table.add(JobRow(f"{number}", 0.0, number, gpu_milli=1000))
        table.attain(f"{number}", service)
    return table


def levels(policy: Gittins, *gpu_seconds: float) -> list[int]:
    found: list[int] = policy.order(attained(*gpu_seconds).jobs(0.0), 0.0).level.tolist()
    return found


def index(history: list[float], had: float) -> float:
    """The definition, with Δ up to each edge and infinite."""
    left = [whole - had for whole in history if whole > had]
    spans = [edge - had for edge in EDGE if edge > had] + [math.inf]
    worth = [sum(x <= span for x in left) / sum(min(x, span) for x in left) for span in spans if left]
    return round(max(worth, default=0.0), 12)


@given(st.lists(st.integers(1, 10_000_000), max_size=30))
@example([int(3 * EDGE[-1])])
@example([10, int(3 * EDGE[-1])] * 3)
@example([int(EDGE[-1]), 150, int(1.5 * EDGE[-1]), 900])
def test_steps_are_ordered_by_the_index_as_it_is_defined(history: list[int]) -> None:
    past = [float(service) for service in history]
    starts = [0.0, *EDGE[:12], *EDGE[-2:]]
    found = levels(taught(*past), *starts)
    worth = [index(past, start) for start in starts]
    for before, level in zip(worth, found, strict=True):
        for after, other in zip(worth, found, strict=True):
            assert not (before > after * (1 + 1e-6) and level > other), "worth more, and yet later"


def test_until_enough_have_ended_the_order_is_least_attained_service() -> None:
    shuffled = [0.0, 5000.0, 100.0, 99.0, 1e6]
    few = taught(*[150.0] * 9, history_min=10)
    assert np.argsort(levels(few, *shuffled), kind="stable").tolist() == [0, 3, 2, 1, 4]
    few.learn(ended(150.0))
    assert levels(few, 100.0) < levels(few, 0.0), "all end soon after 100"


def test_steps_of_which_history_knows_nothing_come_last_by_service() -> None:
    policy = taught(50.0, 60.0)
    assert levels(policy, 0.0, 100.0, 5000.0) == [0, 1, 6]


def test_the_order_is_valid_until_a_running_job_reaches_a_new_step() -> None:
    table = attained(0.0, 350.0)
    table.update("1", gpu_milli=2000, attained_gpu_seconds=700.0)
    for job_id in table.ids:
        table.start(job_id, now=0.0)
    policy = taught(5.0)
    assert policy.order(table.jobs(0.0), 0.0).valid_seconds == 50.0
    assert policy.order(table.jobs(50.0), 50.0).valid_seconds == 50.0
    assert policy.order(table.jobs(100.0), 100.0).valid_seconds == 100.0


def test_a_job_that_ends_at_an_edge_ends_within_the_step() -> None:
    assert levels(taught(100.0, 100.0, 100.0, 9000.0), 0.0, 100.0) == [0, 7]


def test_jobs_without_gpus_are_charged_their_cores_in_history_too() -> None:
    by_cores, by_gpus = taught(), taught(1200.0, 300.0)
    for service in (1200.0, 300.0):
        by_cores.learn(EndedJob(0, 6, 1, service / 2, 0.0))
    steps = [0.0, *EDGE[:8]]
    assert levels(by_cores, *steps) == levels(by_gpus, *steps)


@given(st.lists(st.floats(0, 1e12), max_size=20), st.randoms(use_true_random=False))
def test_the_order_in_which_jobs_ended_does_not_matter(history: list[float], shuffle: object) -> None:
    again = sorted(history)
    steps = [0.0, *EDGE[:20]]
    assert levels(taught(*history), *steps) == levels(taught(*again), *steps)


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({"quantum_gpu_seconds": "0.5"}, "quantum_gpu_seconds"),
        ({"quantum_gpu_seconds": "inf"}, "quantum_gpu_seconds"),
        ({"history_min": "0"}, "history_min"),
        ({"cores_per_gpu": "0"}, "cores_per_gpu"),
    ],
)
def test_options_that_make_no_sense_are_named(given_: dict[str, str], field: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse(Gittins.Options, given_)
    assert [violation.field for violation in caught.value.violations] == [field]
