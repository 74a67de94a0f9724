"""Load outside of attempts: it may slow down a training job, but no CPU job is throttled for it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from cotenant.core.policy.protocols import AttemptWindow, Directive, NodeWindow
from cotenant.policies.coda_eliminator.policy import CodaEliminator

HOUR_WINDOWS, NOISE = 720, 0.05


@dataclass(frozen=True, slots=True)
class Kernel:
    """Reported figures: each attempt's own waiting (version 2), and the node's load outside of attempts."""

    of_attempts: bool
    of_others: bool


def bursts(seed: int, kernel: Kernel, hours: int = 4) -> list[Directive]:
    """A training job beside a CPU job with a constant load, each on its own cores.

    Every ten minutes outside processes run for one minute on the training job's cores, and take 30 % of its rate.
    """
    rng, policy = random.Random(seed), CodaEliminator()
    directives: list[Directive] = []
    for number in range(hours * HOUR_WINDOWS):
        slowed = number % 120 >= 108
        rate = 10 * (0.7 if slowed else 1.0) * rng.gauss(1, NOISE)
        waits = (60.0 if slowed else 0.0, 0.0) if kernel.of_attempts else (None, None)
        training = AttemptWindow("dnn", 1, False, 8.0, rate, cores=8, cpu_some_percent=waits[0])
        other = AttemptWindow("innocent", 1, True, 8.0, cores=8, cpu_some_percent=waits[1])
        others = 4.0 if slowed and kernel.of_others else 0.0
        window = NodeWindow(
            "n1", 5.0 * number, 5.0, (training, other), cpu_some_percent=60.0 if slowed else 2.0, cores_of_others=others
        )
        directives += policy.judge(window)
    return directives


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("of_attempts", [True, False])
def test_an_idle_job_is_not_throttled_for_outside_processes(seed: int, of_attempts: bool) -> None:
    assert bursts(seed, Kernel(of_attempts, of_others=True)) == []
    assert bursts(seed, Kernel(of_attempts=False, of_others=False)), "where nothing is told, it is tried"


def pressed(memory: float | None, cpu: float | None, seed: int = 0) -> list[Directive]:
    """A training job that falls permanently while a resource is short; its own waiting is reported or not."""
    rng, policy = random.Random(seed), CodaEliminator()
    directives: list[Directive] = []
    for number in range(60):
        slowed = number >= 48
        rate = 10 * (0.6 if slowed else 1.0) * rng.gauss(1, 0.01)
        training = AttemptWindow("dnn", 1, False, 8, rate, cores=8, cpu_some_percent=cpu, memory_some_percent=memory)
        other = AttemptWindow("hog", 1, True, 8, cores=8, cpu_some_percent=cpu, memory_some_percent=memory)
        node = NodeWindow("n1", 5.0 * number, 5.0, (training, other), memory_some_percent=50.0 if memory != -1 else 0)
        directives += policy.judge(node)
    return directives


def test_a_memory_shortage_without_effect_on_the_victim_is_ignored() -> None:
    assert pressed(memory=0.0, cpu=0.0) == []
    assert pressed(memory=40.0, cpu=0.0)[0].job_id == "hog"
    assert pressed(memory=None, cpu=None)[0].job_id == "hog"


def test_others_that_have_been_there_for_long_explain_nothing() -> None:
    rng, policy = random.Random(1), CodaEliminator()
    directives: list[Directive] = []
    for number in range(180):
        slowed = number >= 168
        rate = 10 * (0.6 if slowed else 1.0) * rng.gauss(1, 0.01)
        training = AttemptWindow("dnn", 1, False, 8, rate, cores=8)
        other = AttemptWindow("hog", 1, True, 8, cores=8)
        node = NodeWindow(
            "n1", 5.0 * number, 5.0, (training, other), cpu_some_percent=60.0 if slowed else 0.0, cores_of_others=3.0
        )
        directives += policy.judge(node)
    assert directives[0].job_id == "hog"


def test_noise_beside_outside_processes_gives_at_most_one_false_alarm_a_day() -> None:
    """Eight training jobs, a constant CPU job, and outside processes that come and go without effect."""
    rng, policy = random.Random(7), CodaEliminator()
    directives: list[Directive] = []
    hours = 6
    for number in range(hours * HOUR_WINDOWS):
        busy = number % 60 >= 30
        jobs = tuple(
            AttemptWindow(f"dnn{each}", 1, False, 4, 10 * rng.gauss(1, NOISE), cores=4, cpu_some_percent=1.0)
            for each in range(8)
        )
        hog = AttemptWindow("cpu", 1, True, 8, cores=8, cpu_some_percent=90.0)
        directives += policy.judge(
            NodeWindow(
                "n1", 5.0 * number, 5.0, (*jobs, hog), cpu_some_percent=95.0, cores_of_others=6.0 if busy else 0.0
            )
        )
    assert len([one for one in directives if one.share < 1]) <= 1
