from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.paths import ROOT
from tests.support.properties import examples

from cotenant import plugins, simulator
from cotenant.conformance.worlds import World, gangs, picture, replicas_of, rng, worlds
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.scored_policy import SUM_MAX, ScoredPolicy
from cotenant.core.placement.scores import Candidates, Scores, free_cores, free_gpus
from cotenant.core.scheduling.cycle import take
from cotenant.policies.first_fit import FirstFit
from cotenant.simulator import PolicyFailed, Trace, TraceJob
from cotenant.simulator.traces import workers

LEDGER = Ledger([NodeShape(4, 32), NodeShape(2, 16), NodeShape(3, 8)])
ONE = Gang("job", (Part("worker", 1, Demand(1000)),))


def node_of(policy: ScoredPolicy, ledger: Ledger = LEDGER, gang: Gang = ONE) -> int:
    answer = policy.place(gang, ledger, rng())
    assert not isinstance(answer, Refusal)
    return answer[0].node


def test_weights_trade_one_scorer_against_another() -> None:
    assert node_of(ScoredPolicy({})) == 0
    assert node_of(ScoredPolicy({free_gpus: 1, free_cores: 0.001})) == 1
    assert node_of(ScoredPolicy({free_gpus: 1, free_cores: 1})) == 2
    assert node_of(ScoredPolicy({free_gpus: -1})) == 0


def test_weights_of_zero_decide_nothing_and_negative_ones_turn_a_scorer_round() -> None:
    assert node_of(ScoredPolicy({free_gpus: 0, free_cores: 0.0})) == node_of(ScoredPolicy({}))
    assert node_of(ScoredPolicy({free_cores: -1.0})) == 0
    assert node_of(ScoredPolicy({free_cores: 1.0})) == 2


RIGHT = st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5)


@settings(max_examples=examples(50))
@given(worlds(), gangs(roles_max=1), RIGHT, st.floats(-1e6, 1e6))
def test_scores_decide_where_a_gang_goes_and_not_whether(
    world: World, gang: Gang, drawn: list[float], weight: float
) -> None:
    before = picture(world.ledger)
    policy = ScoredPolicy({lambda candidates: np.array(drawn[: len(candidates.ledger)]): weight})
    answer, plain = policy.place(gang, world.ledger, rng()), FirstFit().place(gang, world.ledger, rng())
    assert picture(world.ledger) == before
    assert not policy.take_scorer_faults()
    if isinstance(answer, Refusal):
        assert answer == plain
    else:
        assert replicas_of(answer, gang) == [part.replicas for part in gang.parts]
        with world.ledger.rolled_back():
            take(world.ledger, gang, answer)


def raises(candidates: Candidates) -> Scores:
    raise KeyError("x" * 1000)


FAULTS: list[tuple[Callable[[Candidates], object], str]] = [
    (raises, "KeyError: 'xxx"),
    (lambda _: np.array([0.0, np.nan, 1.0]), "NaN"),
    (lambda _: np.array([0.0, -np.inf, 1.0]), "too large"),
    (lambda _: [0, 0, 2**62], "too large"),
    (lambda _: np.zeros(2), r"shape \(2,\) for 3 nodes"),
    (lambda _: np.zeros((3, 1)), r"shape \(3, 1\) for 3 nodes"),
    (lambda _: 1.0, r"shape \(\) for 3 nodes"),
    (lambda _: ["a", "b", "c"], "instead of numbers"),
    (lambda _: [[1], [1, 2], []], "ValueError"),
]


@pytest.mark.parametrize(("scorer", "fault"), FAULTS)
def test_a_scorer_with_a_fault_is_left_out_of_the_cycle(scorer: Callable[[Candidates], object], fault: str) -> None:
    calls = 0

    def faulty(candidates: Candidates) -> Scores:
        nonlocal calls
        calls += 1
        return scorer(candidates)  # type: ignore[return-value]  # that is the fault

    policy = ScoredPolicy({faulty: 1, free_cores: 1})
    assert [node_of(policy), node_of(policy)] == [2, 2], "the other scorer decides"
    assert calls == 1, "once a cycle"
    ((name, found),) = policy.take_scorer_faults().items()
    assert name.endswith("faulty")
    assert re.search(fault, found)
    assert len(found) < 400
    assert not policy.take_scorer_faults()
    assert (node_of(policy), calls) == (2, 2), "the next cycle tries it again"


@pytest.mark.parametrize("kind", ["int8", "uint8", "float16", "bool"])
def test_small_numbers_do_not_overflow_with_large_weights(kind: str) -> None:
    policy = ScoredPolicy({lambda _: np.array([100, 0, 100], dtype=kind): 2**40})
    assert (node_of(policy), dict(policy.take_scorer_faults())) == (1, {})


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 2 * SUM_MAX, -(10**30)])
def test_a_weight_that_cannot_be_summed_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weights must be numbers up to"):
        ScoredPolicy({free_gpus: weight})


# The tutorial --------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the example of the tutorial as pip would; return its file."""
    page = (ROOT / "docs/tutorials/policies.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_policies/spares_h100\.py\n.*?)```", page, re.DOTALL)
    info = tmp_path / "spares_h100-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spares-h100\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[cotenant.placement_policies]\nspares-h100 = spares_h100:SparesH100\n")
    (tmp_path / "spares_h100.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "spares_h100", raising=False)
    return tmp_path / "spares_h100.py"


TWO_JOBS = Trace("made up", "none", tuple(TraceJob(name, 0.0, 10.0, workers(2)) for name in "ab"))


def test_the_example_of_the_tutorial_is_found_and_places_jobs(example: Path) -> None:
    policy = plugins.load("cotenant.placement_policies", "spares-h100")
    nodes = [NodeShape(2, 8, gpu_type="H100"), NodeShape(4, 8, gpu_type="T4"), NodeShape(8, 8, gpu_type="T4")]
    assert node_of(policy, Ledger(nodes)) == 1, "4 GPUs are fewer than 2 and the price of an H100"
    assert node_of(policy, Ledger([nodes[0], nodes[2]])) == 0, "8 are more"
    outcomes = simulator.simulate(TWO_JOBS, "2x2", placement="spares-h100").outcomes
    assert [one.finished_seconds for one in outcomes] == [10.0, 10.0]


def test_a_simulation_names_a_scorer_with_a_fault(example: Path) -> None:
    example.write_text(example.read_text().replace('of_type("h100")', "open[1:]"))
    with pytest.raises(PolicyFailed, match=r"spares-h100.*scorer is_h100: it returned an array of shape \(1,\)"):
        simulator.simulate(TWO_JOBS, "2x2", placement="spares-h100")
