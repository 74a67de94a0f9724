"""`cotenant compare`: arms, seeds, processes, and the lower bound."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.simulator.commands import cotenant

from cotenant import plugins
from cotenant.simulator.comparison.arms import BadArm, arms_of
from cotenant.simulator.comparison.runner import ArmFailed
from cotenant.simulator.comparison.summary import Spread, compare
from cotenant.simulator.scenario import Scenario

SAMPLE = ("compare", "--trace", "sample", "--cluster", "2x8")
SHARED = Scenario("sample", "2x8", options={"queue": {"mode": "backfill"}})


def told(*arguments: object) -> Any:
    result = cotenant(*SAMPLE, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_run_in_this_process_tells_which_share_of_its_jobs_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.simulator.run.WATCH_SECONDS", 0.0)
    shares: list[float] = []
    compare(arms_of(["fifo"], (), SHARED), share=shares.append)
    assert len(shares) > 2
    assert (shares, 0 <= shares[0] < 0.5 < shares[-1] <= 1) == (sorted(shares), True)


def test_an_arm_differs_in_what_it_says() -> None:
    (plain, backfill, ours) = arms_of(
        ["las", "fifo:mode=strict"],
        ["ours=las,placement=count,predictor=noisy-oracle,queue.thresholds=1,2,predictor.spread=1"],
        SHARED,
    )
    assert (plain.label, plain.scenario.queue, plain.scenario.options) == ("las", "las", SHARED.options)
    assert backfill.scenario.options == {"queue": {"mode": "strict"}}
    assert (ours.scenario.queue, ours.scenario.placement, ours.scenario.predictor) == ("las", "count", "noisy-oracle")
    assert ours.scenario.options == {"queue": {"mode": "backfill", "thresholds": "1,2"}, "predictor": {"spread": "1"}}
    assert SHARED.options == {"queue": {"mode": "backfill"}}


def test_options_that_a_snapshot_recorded_are_those_of_its_own_policy() -> None:
    recorded = {"queue": {"mode": "strict"}, "simulator": {"fair_share": "off"}}
    shared = replace(SHARED, queue="fifo", options={**recorded, "predictor": {"spread": "1"}}, recorded=recorded)
    (las, fifo, ours) = arms_of(["las", "fifo"], ["ours=las,queue.thresholds=1,2"], shared)
    others = {"simulator": {"fair_share": "off"}, "predictor": {"spread": "1"}}
    assert (las.scenario.options, fifo.scenario.options) == (others, shared.options)
    assert ours.scenario.options == {**others, "queue": {"thresholds": "1,2"}}


@pytest.mark.parametrize(
    ("names", "labelled", "fault"),
    [
        ([], [], "there are no arms"),
        (["fifo", "fifo"], [], "two arms are called 'fifo'"),
        (["fifo:strict"], [], "'strict' is not written key=value"),
        ([":mode=x"], [], "names no queue policy"),
        ([], ["ours"], "is not written LABEL="),
        ([], ["queue=las"], "needs a label before its choices"),
        ([], ["queue.mode=strict"], "needs a label before its choices"),
        ([], ["a=las,plaecment=count"], "unknown group 'plaecment'; did you mean placement?"),
        ([], ["a=las,queue.mode="], "has no value"),
        ([], ["a=las,count"], "is not written GROUP=NAME"),
    ],
)
def test_an_invalid_arm_is_reported(names: list[str], labelled: list[str], fault: str) -> None:
    with pytest.raises(BadArm, match=re.escape(fault)):
        arms_of(names, labelled, SHARED)


@pytest.mark.deep
def test_figures_are_compared_with_those_of_the_first_arm() -> None:
    answer = told("--arms", "fifo,las")
    fifo, las = (answer["arms"][name] for name in ("fifo", "las"))
    alone = json.loads(cotenant("simulate", "--trace", "sample", "--cluster", "2x8", "--queue", "las", "--json").stdout)
    assert las["figures"]["avg_jct_seconds"]["mean"] == alone["avg_jct_seconds"]
    assert las["figures"]["waits_seconds.capacity"]["mean"] == alone["waits_seconds"]["capacity"]
    ratio = alone["avg_jct_seconds"] / fifo["figures"]["avg_jct_seconds"]["mean"]
    assert las["ratios"]["avg_jct_seconds"]["mean"] == ratio
    assert fifo["ratios"]["avg_jct_seconds"]["mean"] == 1
    assert answer["baseline"] == "fifo"


@pytest.mark.deep
def test_only_what_chance_has_a_part_in_is_run_with_every_seed() -> None:
    answer = told("--arms", "fifo", "--arm", "guess=srsf,predictor=noisy-oracle", "--seeds", "3", "--seed", "5")
    assert (answer["arms"]["fifo"]["seeds"], answer["arms"]["fifo"]["by_chance"]) == ([5], False)
    assert (answer["arms"]["guess"]["seeds"], answer["arms"]["guess"]["by_chance"]) == ([5, 6, 7], True)
    assert len(set(answer["arms"]["guess"]["figures"]["avg_jct_seconds"]["per_seed"])) == 3


@pytest.mark.deep
def test_it_is_the_same_in_one_process_or_two() -> None:
    arguments = ("--arms", "fifo,las", "--arm", "guess=srsf,predictor=noisy-oracle", "--seeds", "2")
    texts = [json.dumps(without_wall(told(*arguments, "--jobs", jobs))) for jobs in (1, 2)]
    assert texts[0] == texts[1]


def without_wall(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_wall(each) for key, each in value.items() if key != "wall_seconds"}
    return [without_wall(each) for each in value] if isinstance(value, list) else value


@pytest.mark.deep
def test_a_table_is_printed_for_people() -> None:
    result = cotenant(*SAMPLE, "--arms", "fifo", "--arm", "guess=srsf,predictor=noisy-oracle", "--seeds", "2")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^fifo +20h22m", result.stdout, re.MULTILINE)
    assert re.search(r"^  over 2 seeds +1\dh\d+m to 1\dh\d+m", result.stdout, re.MULTILINE)
    assert "(lower bound)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--arms", "fifo,sla", "--jobs", "2"), "arm 'sla': there is no queue policy 'sla'; did you mean"),
        ((), "there are no arms"),
        (("--arms", "fifo,sla"), "arm 'sla': there is no queue policy 'sla'; did you mean"),
        (("--arms", "fifo:mode=fast"), "arm 'fifo:mode=fast': queue.mode: must be one of strict, backfill"),
        (("--arms", "fifo", "--format", "philly"), "arm 'fifo': sample: the header of format philly needs"),
        (("--arms", "fifo", "--seeds", "0"), "0 is not in the range 1<=x<=1000"),
    ],
)
def test_bad_input_names_the_arm_and_exits_with_2(arguments: tuple[str, ...], fault: str) -> None:
    result = cotenant(*SAMPLE, "--jobs", 1, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fault in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


class Raises:
    name, api_version, preemptive, strict, running_first = "las", 1, False, True, False

    def order(self, jobs: object, now: float) -> None:
        raise RuntimeError("out of order")


def test_an_arm_with_a_failing_policy_is_named_without_results(monkeypatch: pytest.MonkeyPatch) -> None:
    find = plugins.load

    def load(group: str, name: str, options: Mapping[str, str]) -> object:
        return Raises() if name == "las" else find(group, name, options)

    monkeypatch.setattr("cotenant.simulator.run.plugins.load", load)
    result = cotenant(*SAMPLE, "--arms", "fifo,las", "--jobs", 1, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "arm 'las': queue policy 'las' failed over" in result.stderr
    with pytest.raises(ArmFailed):
        compare(arms_of(["las"], [], Scenario("sample", "2x8")))


def test_a_stopped_comparison_reports_finished_runs() -> None:
    asked = iter([False, False, *[True] * 10_000])
    comparison = compare(arms_of(["fifo", "las"], [], Scenario("sample", "2x8")), stopped=lambda: next(asked))
    assert (comparison.runs.complete, comparison.bound) == (False, None)
    assert comparison.as_json()["complete"] is False
    assert any("incomplete" in note for note in comparison.notes)


def test_ratios_go_seed_by_seed() -> None:
    assert Spread((2.0, 9.0)).over(Spread((1.0, 3.0))) == Spread((2.0, 3.0))
    assert Spread((2.0, 9.0)).over(Spread((2.0,))) == Spread((1.0, 4.5))
    assert Spread((6.0,)).over(Spread((2.0, 4.0))) == Spread((3.0, 1.5))
    assert Spread((6.0,)).over(Spread((0.0,))) is None
    assert (Spread((1.0, 3.0)).mean, Spread((1.0, 3.0)).sd) == (2.0, 2.0**0.5)
