"""Every queue policy against a naive scheduler with a cycle every second, over random small workloads."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import numpy as np
import pytest
from tests.support.properties import amount
from tests.unit.simulator.naive_orders import ARMS, CORES, GPUS
from tests.unit.simulator.oracle import Job, replay

from cotenant import plugins
from cotenant.core.model.job import Request, Role
from cotenant.plugins import POLICY_GROUPS as GROUPS
from cotenant.simulator import Trace, TraceJob, simulate

WORLDS = amount(12, deep=30)
PREDICTABLE = {"predictable": "0.6", "spread": "0"}  # the others are unpredictable
IDS = [f"{name}-{'-'.join(f'{key}={value}' for key, value in options.items())}" for name, options, _, _ in ARMS]


def workload(seed: int) -> list[Job]:
    """Draw jobs with many ties, and deadlines between whole seconds, so that none is missed by rounding."""
    rng, known = random.Random(seed), np.random.default_rng([seed, 1])
    now, jobs = 0, list[Job]()
    for number in range(rng.randint(1, 16)):
        now += rng.choice([0, 0, 1, 3, 9]) if number else 0
        gpus = rng.choice([0, 0, 0, 1, 1, 2, 3, 4])
        job = Job(
            number, now, rng.choice([1, 5, rng.randint(1, 40)]), gpus, 0 if gpus else 3 * rng.choice([1, 1, 2, 3])
        )
        job.tenant = rng.choice(["ann", "bob", "cat"])
        job.deadline = rng.choice([inf, now + job.work + rng.randint(-2, 60) + 0.999])
        jobs.append(job)
    for job, drawn in zip(jobs, known.random(len(jobs)), strict=True):
        job.known = bool(drawn < float(PREDICTABLE["predictable"]))
    return jobs


def trace_of(jobs: list[Job]) -> Trace:
    def told(job: Job) -> TraceJob:
        request = Request(gpu_milli=1000, cores=0) if job.gpus else Request(cores=1)
        deadline = None if job.deadline == inf else job.deadline
        roles = (Role("worker", job.gpus or job.cores, request),)
        return TraceJob(
            f"j{job.number}", float(job.came), float(job.work), roles, tenant=job.tenant, deadline_seconds=deadline
        )

    return Trace("made up", "none", tuple(told(job) for job in jobs))


@pytest.mark.parametrize(("name", "options", "order", "kind"), ARMS, ids=IDS)
def test_a_policy_does_what_its_naive_definition_does(
    name: str, options: dict[str, str], order: Any, kind: dict[str, bool]
) -> None:
    for seed in range(WORLDS):
        jobs = workload(seed)
        given = {"queue": options, "predictor": PREDICTABLE}
        result = simulate(
            trace_of(jobs),
            f"1x{GPUS}x{CORES}",
            queue=name,
            placement="count",
            predictor="noisy-oracle",
            options=given,
            seed=seed,
        )
        replay(jobs, GPUS, CORES, order, **kind)
        found = [(one.finished_seconds, one.given_up_seconds) for one in result.outcomes]
        wanted = [(job.over, job.dropped) for job in jobs]
        assert found == [pytest.approx(one, abs=1e-6) for one in wanted], f"seed {seed}"
        assert [one.preemptions for one in result.outcomes] == [job.stops for job in jobs], f"seed {seed}"


def test_no_policy_of_ours_goes_without_a_naive_definition() -> None:
    ours = {plugin.name for plugin in plugins.discover(GROUPS["queue"]) if plugin.package == "cotenant"}
    assert ours == {name for name, *_ in ARMS}
