"""Services with a variable number of replicas, in simulations."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.core.model.job import JobKind, OpenReplicas, Qos, Request
from cotenant.core.model.refusal import Code
from cotenant.core.prediction.batch_queueing import BatchTime
from cotenant.simulator import Result, Trace, TraceJob, simulate
from cotenant.simulator.traces import workers
from cotenant.simulator.traces.trace_job import open_replicas

BATCH = BatchTime(0.001, 0.01)  # 5 replicas answer 99 % of 900 requests a second within 0.03 s


def service(name: str, at: float, seconds: float, rate: float = 900.0, most: int = 8) -> TraceJob:
    roles = open_replicas(OpenReplicas(1, most), Request(gpu_milli=1000, cores=1))
    promise = Qos(0.0, 0.03, 99.0, rate)
    return TraceJob(name, at, seconds, roles, JobKind.INFERENCE, model="bert", qos=promise, batch=BATCH)


def run(*jobs: TraceJob, cluster: str = "1x8", **fields: Any) -> Result:
    return simulate(Trace("made up", "none", jobs), cluster, options={"queue": {"mode": "backfill"}}, **fields)


def finishes(result: Result) -> dict[str, float | None]:
    return {one.id: one.finished_seconds for one in result.outcomes}


def test_a_service_holds_as_many_gpus_as_its_replicas_need() -> None:
    others = TraceJob("three", 0, 10, workers(3)), TraceJob("four", 0, 10, workers(4))
    assert finishes(run(service("s", 0, 20), *others, predictor="oracle")) == {"s": 20.0, "three": 10.0, "four": 30.0}
    few = run(service("s", 0, 20), *others, predictor="none")
    assert finishes(few) == {"s": 20.0, "three": 10.0, "four": 10.0}


def test_learning_from_one_service_sizes_the_next() -> None:
    jobs = service("first", 0, 10), service("second", 20, 10), TraceJob("four", 20, 10, workers(4))
    assert finishes(run(*jobs, predictor="latency")) == {"first": 10.0, "second": 30.0, "four": 40.0}


def test_a_service_with_too_low_a_limit_is_unschedulable_with_a_remedy() -> None:
    result = run(service("s", 0, 20, most=4), predictor="oracle")
    [(name, refusal)] = result.unschedulable
    assert (name, refusal.code) == ("s", Code.NEVER_FITS)
    assert "replicas_max is 5 or more" in refusal.remedy


@pytest.mark.parametrize("placement", ["qos", "consolidate", "locality", "multi-array"])
def test_a_service_beside_neighbours_runs_under_every_placement(placement: str) -> None:
    crowd = [TraceJob(f"t{n}", n, 7, workers(2)) for n in range(12)]
    services = [service(f"s{n}", 3 * n, 11, rate=300.0 + 200 * n) for n in range(4)]
    jobs = sorted([*crowd, *services], key=lambda job: job.submitted_seconds)
    result = run(*jobs, cluster="2x8", placement=placement, predictor="oracle")
    assert all(finishes(result).values())


def test_under_qos_a_disturbed_service_gets_more() -> None:
    jobs = TraceJob("two", 0, 50, workers(2)), service("s", 1, 20, most=12), TraceJob("nine", 2, 10, workers(9))
    plain = run(*jobs, cluster="1x16", placement="consolidate", predictor="oracle")
    assert finishes(plain) == {"two": 50.0, "s": 21.0, "nine": 12.0}
    heeded = run(*jobs, cluster="1x16", placement="qos", predictor="oracle")
    assert finishes(heeded) == {"two": 50.0, "s": 21.0, "nine": 31.0}
