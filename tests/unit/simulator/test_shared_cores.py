"""Shared cores without isolation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import JobKind, Request, Role
from cotenant.core.model.model_name import model_of
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.options import BadOption
from cotenant.simulator import Cluster, Result, Trace, TraceJob, simulate
from cotenant.simulator.physics import cores
from cotenant.simulator.physics.sharing import efficiency, shares

NODE = Cluster("one", (NodeShape(4, 24),), ("",))
WORK = 1000.0


def job(name: str, model: str, at: float = 0.0, own_cores: int = 6) -> TraceJob:
    return TraceJob(name, at, WORK, (Role("worker", 1, Request(1000, own_cores)),), model=model)


def run(*jobs: TraceJob, isolation: str = "ideal") -> Result:
    options = {"simulator": {"speed": "cores", "isolation": isolation}}
    return simulate(Trace("made up", "none", jobs), NODE, options=options)


def seconds(result: Result, name: str) -> float:
    jct_seconds = next(one for one in result.outcomes if one.id == name).jct_seconds
    assert jct_seconds is not None
    return jct_seconds


def speed(model: str, count: float) -> float:
    known = model_of(model)
    assert known
    return cores.speed(known, gpus=1, cores_per_gpu=count) or 0.0


def test_a_job_alone_on_a_node_uses_all_useful_cores() -> None:
    for isolation in ("ideal", "none"):
        alone = seconds(run(job("a", "lenet", own_cores=1), isolation=isolation), "a")
        assert alone == pytest.approx(WORK / speed("lenet", 20))


def test_two_jobs_share_scarce_cores_equally_until_one_ends() -> None:
    both = run(job("a", "lenet"), job("b", "lenet", at=100.0))
    fast, slow = speed("lenet", 20), speed("lenet", 12)
    until = 100 + (WORK - 100 * fast) / slow  # by then b has done as much as a has since b started
    assert seconds(both, "a") == pytest.approx(until)
    assert seconds(both, "b") == pytest.approx(until - 100 + (WORK - (until - 100) * slow) / fast)


def test_a_job_that_wants_few_cores_gets_them_and_leaves_the_rest() -> None:
    result = run(job("a", "lenet"), job("b", "lenet"), job("talks", "lstm"))
    assert seconds(result, "talks") == pytest.approx(WORK / speed("lstm", 1))


def test_crowding_costs_what_was_measured() -> None:
    a, b = job("a", "lenet"), job("b", "lenet")
    left = 24 * efficiency((24 + 24) / 24)
    assert seconds(run(a, b, isolation="none"), "a") == pytest.approx(WORK / speed("lenet", left / 2), rel=1e-6)


def test_a_job_without_gpus_gets_its_part_too() -> None:
    plain = TraceJob("cpu", 0.0, WORK, (Role("worker", 1, Request(0, 20)),), JobKind.CPU)
    result = simulate(
        Trace("made up", "none", (plain, job("a", "lenet", own_cores=1))),
        NODE,
        options={"simulator": {"speed": "cores", "isolation": "ideal"}},
    )
    while_both = WORK / speed("lenet", 12)
    assert seconds(result, "cpu") == pytest.approx(while_both + WORK - while_both * 12 / 20)


def test_sharing_without_speed_by_cores_makes_no_sense() -> None:
    with pytest.raises(BadOption, match=r"isolation.*cores"):
        simulate(Trace("made up", "none", (job("a", "lenet"),)), NODE, options={"simulator": {"isolation": "none"}})


@given(st.lists(st.floats(0.0, 64.0), max_size=8), st.integers(1, 64))
def test_shares_are_max_min_fair(wants: list[float], count: int) -> None:
    for ideal in (True, False):
        given_ = shares(wants, count, ideal=ideal)
        assert sum(given_) <= min(sum(wants), count) + 1e-6
        assert all(0 <= one <= want + 1e-9 for one, want in zip(given_, wants, strict=True))
        short = [one for one, want in zip(given_, wants, strict=True) if one < want - 1e-9]
        assert all(one >= max(given_) - 1e-6 for one in short)
    assert sum(shares(wants, count, ideal=True)) == pytest.approx(min(sum(wants), count), abs=1e-6)
    assert sum(shares(wants, count)) >= 0.7 * min(sum(wants), count) - 1e-6
