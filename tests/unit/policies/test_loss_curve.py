from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.prediction.loss_fit import forecast
from cotenant.core.prediction.loss_points import LossPoints
from cotenant.policies import loss_curve
from cotenant.policies.history import summarize
from cotenant.policies.loss_curve import LossCurve

GOAL = LossGoal(target=1.0)


def loss_at(step: int) -> float:
    """Reaches 1 at step 3,000."""
    return 2 / (1 + step / 1000) + 0.5


def told(step: int, loss: float | None = None, job_id: str = "j1", rate: float = 2.0, cores: int = 4) -> Observation:
    return Observation("ann", "bert", "", 1000, 1, Candidate(cores), rate, 10.0, job_id=job_id, step=step, loss=loss)


def ended(job_id: str = "j1") -> Observation:
    return Observation("ann", "bert", "", 1000, 1, Candidate(4), run_seconds=60.0, succeeded=True, job_id=job_id)


def taught(*seen: Observation, **options: str) -> LossCurve:
    curve = LossCurve(parse(LossCurve.Options, options))
    for observation in seen:
        curve.observe(observation)
    return curve


def falling(until: int = 1200, job_id: str = "j1") -> list[Observation]:
    return [told(step, loss_at(step), job_id) for step in range(20, until, 20)]


def asked(curve: LossCurve, **about: object) -> Estimate:
    query = {"user": "ann", "model": "bert", "name": "", "gpu_milli": 1000, "replicas": 1, "job_id": "j1", **about}
    return curve.estimate(Query(**query))  # type: ignore[arg-type]  # by name


def test_a_target_loss_is_predicted_from_the_curve_and_the_rate() -> None:
    estimate = asked(taught(*falling()), step=1200, loss_goal=GOAL)
    assert estimate.predictable
    assert estimate.remaining_seconds == pytest.approx(900, rel=0.02)
    assert estimate.source.startswith("the loss curve 1/(0.000499·k + 0.5) + 0.499 reaches its goal at step 2998")


def test_the_forecast_has_a_spread() -> None:
    noisy = [told(step, loss_at(step) + 0.005 * math.sin(step * 17.0)) for step in range(20, 1600, 20)]
    estimate = asked(taught(*noisy), step=1600, loss_goal=GOAL)
    assert estimate.predictable
    low, middle, high = estimate.remaining_p10_seconds, estimate.remaining_seconds, estimate.remaining_p90_seconds
    assert low is not None and middle is not None and high is not None  # noqa: PT018 - for the type checker
    assert low < middle < high


def test_percentiles_are_as_far_from_the_median_as_the_forecasts_error_says() -> None:
    noisy = [told(step, loss_at(step) + 0.005 * math.sin(step * 17.0)) for step in range(20, 1600, 20)]
    points = LossPoints()
    for one in noisy:
        points.add(one.step or 0, one.loss or 0.0)
    end, estimate = forecast(points.cells, GOAL), asked(taught(*noisy), step=1600, loss_goal=GOAL)
    spread = 1.2816 * end.error * end.step
    seconds = [(end.step - 1600 + off) / 2 for off in (0.0, -spread, spread)]
    figures = estimate.remaining_seconds, estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
    assert figures == pytest.approx(tuple(seconds), rel=1e-4)
    assert estimate.confidence == min(end.confidence, summarize([2.0] * 32).confidence)


def test_what_makes_a_job_unpredictable_is_the_least_certain_of_its_rate_and_its_end() -> None:
    assert asked(taught(told(20)), steps_total=100).source == "its rates are too few or too different"
    for noise, words in ((0.1, "off by about 23 %"), (0.05, "its losses fit other ends as well")):
        unsure = [told(step, loss_at(step) + noise * math.sin(step * step)) for step in range(20, 1600, 20)]
        source = asked(taught(*unsure), step=1600, loss_goal=GOAL).source
        assert source.startswith("its loss curve points to step ")
        assert words in source


def test_remaining_steps_decide_if_the_total_is_known() -> None:
    estimate = asked(taught(*falling()), step=1200, steps_total=2200, loss_goal=GOAL)
    assert estimate.remaining_seconds == 500.0
    assert estimate.source == "1000 steps left at 2 steps per second"
    assert asked(taught(*falling()), step=2200, steps_total=2200).remaining_seconds == 0.0
    assert asked(taught(*falling()), step=2201, steps_total=2200).source.startswith("it is at step 2201, beyond")


def test_a_fall_too_small_to_go_on_for_ends_a_training_too() -> None:
    estimate = asked(taught(*falling()), step=1200, loss_goal=LossGoal(fall_steps=100, fall_min=0.01))
    assert estimate.remaining_seconds is not None
    step = 1200 + 2 * estimate.remaining_seconds
    assert loss_at(round(step)) - loss_at(round(step) + 100) == pytest.approx(0.01, rel=0.02)


def test_a_job_without_goal_losses_or_rate_is_unpredictable_with_a_reason() -> None:
    assert asked(taught(*falling())).source == "it reports neither its number of steps nor the loss at which it is done"
    assert asked(taught(told(20), told(40)), loss_goal=GOAL).source == "0 points are too few for a curve"
    paceless = [told(step, loss_at(step), rate=0.0) for step in range(20, 1200, 20)]
    assert asked(taught(*paceless), loss_goal=GOAL).source == "its rate is unknown"
    assert asked(taught(), loss_goal=GOAL).source == "it has not reported steps or losses yet"


def test_a_job_becomes_predictable_unpredictable_when_its_fit_breaks_and_predictable_again() -> None:
    curve = LossCurve()
    was: list[bool] = []
    for step in range(20, 12_000, 20):
        after = 0.8 + 0.7 / (1 + max(step - 1200, 0) / 800)  # the learning rate is cut at step 1,200
        curve.observe(told(step, loss_at(step) if step < 1200 else after))
        predictable = asked(curve, step=step, loss_goal=LossGoal(target=0.86)).predictable
        if not was or was[-1] != predictable:
            was.append(predictable)
    assert was[:4] == [False, True, False, True]


def test_a_curve_is_refitted_only_after_enough_steps_or_a_rollback() -> None:
    def noisy(step: int) -> Observation:
        return told(step, loss_at(step) + 0.003 * math.sin(step * 17.0))

    def end(curve: LossCurve) -> float | None:
        return asked(curve, step=1, loss_goal=GOAL).remaining_seconds

    lazy, eager = LossCurve(), taught(refit_share="0")
    for curve in (lazy, eager):
        for step in range(20, 1501, 20):
            curve.observe(noisy(step))
    first = end(lazy)
    assert first == end(eager)
    for curve in (lazy, eager):
        curve.observe(noisy(1520))
    assert end(lazy) == first != end(eager)
    for curve in (lazy, eager):
        curve.observe(noisy(1540))  # more than 2 % further than 1,500
    assert end(lazy) == end(eager) != first
    for curve in (lazy, eager):
        curve.observe(noisy(1530))  # back to a checkpoint
    assert end(lazy) == end(eager)


def test_losses_that_are_no_numbers_make_a_job_unpredictable_until_they_are_long_past() -> None:
    curve = taught(*falling(), told(1200, math.nan))
    assert asked(curve, loss_goal=GOAL).source == "its loss was recently not a finite number"
    for step in range(1220, 1420, 20):
        curve.observe(told(step, loss_at(step)))
    assert asked(curve, step=1400, loss_goal=GOAL).predictable


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e300])
def test_nothing_but_wild_losses_does_no_harm(loss: float) -> None:
    assert not asked(taught(*[told(step, loss) for step in range(50)]), loss_goal=GOAL).predictable


def test_a_job_that_returns_to_a_checkpoint_is_predicted_from_there() -> None:
    seen = [*falling(2000), *[told(step, loss_at(step)) for step in range(1500, 1900, 20)]]
    estimate = asked(taught(*seen), step=1900, loss_goal=GOAL)
    assert estimate.remaining_seconds == pytest.approx(550, rel=0.03)


def test_jobs_are_kept_apart_by_their_ids_even_under_one_name() -> None:
    other = [told(step, 5.0 - step / 1e4, "j2", rate=1.0) for step in range(20, 1200, 20)]
    mixed = [one for pair in zip(falling(), other, strict=True) for one in pair]
    assert asked(taught(*mixed), step=1200, loss_goal=GOAL) == asked(taught(*falling()), step=1200, loss_goal=GOAL)
    assert not asked(taught(*mixed), job_id="j2", step=1200, loss_goal=GOAL).predictable


def test_two_jobs_that_claim_one_name_without_an_id_are_not_trusted() -> None:
    one = falling(job_id="")
    other = [told(step, 5.0 - step / 1e3, "") for step in range(10, 1190, 20)]
    mixed = [seen for pair in zip(one, other, strict=True) for seen in pair]
    assert asked(taught(*one), job_id="", step=1200, loss_goal=GOAL).predictable
    assert not asked(taught(*mixed), job_id="", step=1200, loss_goal=GOAL).predictable
    assert not asked(taught(*mixed, *reversed(mixed)), job_id="", step=1200, loss_goal=GOAL).predictable


def test_a_candidate_is_judged_by_the_rates_under_it() -> None:
    curve = taught(*[told(step, loss_at(step), rate=5.0, cores=8) for step in range(5, 20, 5)], *falling())
    slow, fast, unknown = asked(
        curve, step=1200, loss_goal=GOAL, candidates=(Candidate(4), Candidate(8), Candidate(2))
    ).candidates
    assert (slow.rate_per_second, fast.rate_per_second, unknown.rate_per_second) == (2.0, 5.0, None)
    assert slow.remaining_seconds == pytest.approx(900, rel=0.02)
    assert fast.remaining_seconds == pytest.approx(360, rel=0.02)
    assert unknown.remaining_seconds is None


def test_a_job_that_ended_is_forgotten() -> None:
    curve = taught(*falling())
    (name,) = curve.dump()
    curve.observe(ended())
    assert curve.dump() == {name: b""}
    assert not asked(curve, loss_goal=GOAL).predictable
    assert taught(ended()).dump() == {}


def test_the_job_unused_for_longest_makes_room() -> None:
    curve = taught(*falling(job_id="j1"), *falling(job_id="j2"), jobs_max="2")
    asked(curve, job_id="j1")
    curve.observe(told(20, 1.0, "j3"))
    assert asked(curve, job_id="j1", step=1200, loss_goal=GOAL).predictable
    assert not asked(curve, job_id="j2", step=1200, loss_goal=GOAL).predictable


def test_a_phase_other_than_training_is_passed_over() -> None:
    validation = Observation(
        "ann", "bert", "", 1000, 1, Candidate(4), 9.0, 10.0, phase="validation", job_id="j1", step=1300, loss=99.0
    )
    assert asked(taught(*falling(), validation), step=1200, loss_goal=GOAL) == asked(
        taught(*falling()), step=1200, loss_goal=GOAL
    )


def test_a_negative_step_is_rejected_completely() -> None:
    curve = LossCurve()
    with pytest.raises(ValueError, match="a step must not be negative, not -1"):
        curve.observe(told(-1, 1.0))
    assert curve.dump() == {}


def test_a_query_with_another_users_job_id_gets_no_answer() -> None:
    curve = taught(*falling())
    assert asked(curve, step=1200, loss_goal=GOAL).predictable
    assert not asked(curve, user="eve", step=1200, loss_goal=GOAL).predictable
    restored = LossCurve()
    restored.restore(curve.dump())
    assert asked(restored, user="eve", step=1200, loss_goal=GOAL).source == "it has not reported steps or losses yet"
    assert asked(restored, step=1200, loss_goal=GOAL).predictable


def sound() -> dict[str, object]:
    return {"key": ["j1"], "step": 2, "wildness": 0.0, "rates": [[4, "", [2.0]]], "cells": [[1, 2.0, 1], [2, 1.0, 1]]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": ["a", "b"]},
        {"key": [1]},
        {"step": -1},
        {"wildness": math.nan},
        {"rates": [[4, "", []]]},
        {"rates": [[4, "", [0.0]]]},
        {"rates": [[4, "", [math.inf]]]},
        {"cells": [[2, 1.0, 1], [1, 2.0, 1]]},
        {"cells": [[1, math.nan, 1]]},
        {"cells": [[1, 1.0, 0]]},
        {"cells": [[math.nan, 1.0, 1]]},
        {"cells": [[step, 1.0, 1] for step in range(1000)]},
    ],
)
def test_a_record_that_is_corrupt_is_named_and_estimates_go_on(wrong: dict[str, object]) -> None:
    assert LossCurve().restore({"sound": json.dumps(sound()).encode()}) == []
    curve = LossCurve()
    assert curve.restore({"bad": json.dumps(sound() | wrong).encode(), **taught(*falling()).dump()}) == ["bad"]
    assert asked(curve, step=1200, loss_goal=GOAL).predictable


def test_a_restart_does_not_change_predictions() -> None:
    before, after = taught(*falling(800)), LossCurve()
    after.restore(before.dump())
    for observation in falling()[len(falling(800)) :]:
        after.observe(observation)
    assert asked(after, step=1200, loss_goal=GOAL) == asked(taught(*falling()), step=1200, loss_goal=GOAL)


def test_options_that_make_no_sense_are_all_named() -> None:
    wrong = {"jobs_max": "0", "rates_max": "0", "allocations_max": "0", "confidence_min": "2", "refit_share": "-1"}
    with pytest.raises(BadOption) as caught:
        parse(LossCurve.Options, wrong)
    assert {violation.field for violation in caught.value.violations} == set(wrong)


@pytest.mark.parametrize("loss", [1e29, 7e29, 1e30, 1.0000000000000002e30, 1e99, math.inf, math.nan])
def test_a_job_with_an_absurd_loss_is_restored_like_any_other(loss: float) -> None:
    curve = taught(*[told(step, loss) for step in range(300)], *[told(step, -loss) for step in range(300, 600)])
    again = LossCurve()
    assert again.restore(curve.dump()) == []
    assert again.dump() == curve.dump()


def test_a_curve_fitted_in_advance_is_not_fitted_again_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = taught(*[replace(one, loss_goal=GOAL) for one in falling()])
    now = asked(taught(*falling()), step=1200, loss_goal=GOAL)
    assert curve.prepare(8) == 0
    monkeypatch.setattr(loss_curve, "forecast", lambda *given: pytest.fail("fitted again"))
    assert asked(curve, step=1200, loss_goal=GOAL) == now
