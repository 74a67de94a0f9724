"""What resizes cost is learned by model."""

from cotenant.core.sizing import restart_cost
from cotenant.core.sizing.restart_cost import ResizeCost, ResizeCosts


def test_a_cost_is_that_of_the_model_or_else_of_all_or_else_assumed() -> None:
    costs = ResizeCosts()
    assert costs.expected("a") == ResizeCost()
    costs.observe("a", 2.0, 8.0)
    assert costs.expected("a") == ResizeCost(2.0, 8.0, 1, own=True)
    assert costs.expected("b") == ResizeCost(2.0, 8.0, 1, own=False)
    costs.observe("b", 20.0, 80.0)
    assert costs.expected("a").seconds == 10.0


def test_one_slow_resize_does_not_change_the_cost_and_old_ones_are_forgotten() -> None:
    costs = ResizeCosts()
    for restart in (8.0, 9.0, 900.0):
        costs.observe("a", 0.0, restart)
    assert costs.expected("a").seconds == 9.0
    for _ in range(restart_cost.KEPT_OF_MODEL):
        costs.observe("a", 0.0, 50.0)
    assert costs.expected("a").seconds == 50.0


def test_few_models_are_kept() -> None:
    costs = ResizeCosts()
    for model in range(restart_cost.MODELS_MAX + 1):
        costs.observe(model, 0.0, float(model))
    assert not costs.expected(0).own
    assert costs.expected(1).own
