"""GPU types in the simulator: the choice by speed, and the rule that counts GPUs by what they are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant import simulator
from cotenant.core.model.node import NodeShape
from cotenant.simulator import Trace, TraceJob
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.results import Result
from cotenant.simulator.traces.trace_job import workers

GAN, WORK = "CycleGAN", 1000.0
SLOW = 0.114053321  # of a K80, relative to a V100
PLACE = Cluster("both types", (NodeShape(1, 8, "K80"), NodeShape(1, 8, "V100")), ("", ""))


def simulated(*jobs: TraceJob, types: bool = True, rule: str = "off", place: Cluster = PLACE) -> Result:
    options = {
        "simulator": {"speed": "gpu-type", "fair_share": rule},
        "placement": {"gpu_types": str(types).lower()},
    }
    return simulator.simulate(
        Trace("two types", "none", jobs), place, queue="fifo", placement="locality", options=options
    )


def gan(job_id: str, at: float = 0.0, tenant: str = "default", model: str = GAN) -> TraceJob:
    return TraceJob(job_id, at, WORK, workers(1), model=model, gpu_type="V100", tenant=tenant)


def test_a_job_takes_the_type_on_which_it_is_fastest() -> None:
    assert simulated(gan("a")).avg_jct_seconds == pytest.approx(WORK)
    assert simulated(gan("a"), types=False).avg_jct_seconds == pytest.approx(WORK / SLOW)


def test_a_job_whose_speeds_are_unknown_goes_where_it_fits() -> None:
    assert simulated(gan("a", model="")).avg_jct_seconds == pytest.approx(WORK)


def test_a_tenant_with_the_slow_gpu_is_served_before_that_with_the_fast_one() -> None:
    """Both hold one GPU when a fast one becomes free; by number, that of the earlier job would be first."""
    place = Cluster("three", (*PLACE.shapes, PLACE.shapes[1]), ("",) * 3)
    short = replace(gan("z", 0.0, "other"), work_seconds=500.0)
    jobs = short, gan("a", 1.0, "quick"), gan("b", 2.0, "slow"), gan("c", 3.0, "quick"), gan("d", 4.0, "slow")

    def starts(rule: str) -> dict[str, float]:
        outcomes = simulated(*jobs, rule=rule, place=place).outcomes
        return {one.id: (one.finished_seconds or 0.0) - one.run_seconds for one in outcomes}

    counted, worth = starts("tenants"), starts("throughput")
    assert counted["b"] == pytest.approx(2.0)
    assert worth["b"] == pytest.approx(2.0)
    assert counted["c"] < counted["d"]
    assert worth["d"] < worth["c"]
