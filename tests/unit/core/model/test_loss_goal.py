from __future__ import annotations

import math

import pytest

from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.loss_goal import NO_GOAL, LossGoal
from cotenant.core.model.validation import check_spec


def wrong_fields(goal: LossGoal) -> list[str]:
    spec = JobSpec(roles=(Role(request=Request(gpu_milli=1000)),), command=("true",), loss_goal=goal)
    return [violation.field for violation in check_spec(spec)]


@pytest.mark.parametrize("goal", [NO_GOAL, LossGoal(0.0), LossGoal(-2.5), LossGoal(None, 100, 0.01), LossGoal(1, 1, 1)])
def test_a_goal_that_makes_sense_is_taken(goal: LossGoal) -> None:
    assert wrong_fields(goal) == []


def test_every_field_that_makes_no_sense_is_named() -> None:
    assert wrong_fields(LossGoal(math.nan, -1, math.inf)) == [
        "spec.loss_goal.target",
        "spec.loss_goal.fall_min",
        "spec.loss_goal.fall_steps",
    ]
    assert wrong_fields(LossGoal(fall_steps=10)) == ["spec.loss_goal.fall_min"]
    assert wrong_fields(LossGoal(fall_min=0.1)) == ["spec.loss_goal.fall_steps"]


def test_a_goal_is_given_by_a_target_or_by_a_whole_rule() -> None:
    assert [goal.given for goal in (NO_GOAL, LossGoal(0.0), LossGoal(None, 10, 0.1), LossGoal(None, 10))] == [
        False,
        True,
        True,
        False,
    ]
