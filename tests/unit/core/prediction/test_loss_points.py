from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.loss_curves import following, hyperbola

from cotenant.core.prediction.loss_points import CELLS_MAX, LossPoints

histories = st.lists(st.tuples(st.integers(0, 10**15), st.floats(width=64)), max_size=400)


@given(histories)
def test_cells_stay_few_ordered_and_finite_for_any_losses(told: list[tuple[int, float]]) -> None:
    points = LossPoints()
    for step, loss in told:
        points.add(step, loss)
        assert len(points.cells) <= CELLS_MAX
    steps = [step for step, _, _ in points.cells]
    assert steps == sorted(set(steps))
    assert all(math.isfinite(figure) for cell in points.cells for figure in cell)
    assert sum(count for _, _, count in points.cells) <= len(told)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_no_point_of_a_run_that_goes_on_is_lost(losses: list[float]) -> None:
    points = LossPoints()
    for step, loss in enumerate(losses):
        points.add(step, loss)
    assert sum(count for _, _, count in points.cells) == len(losses)
    assert min(losses) - 1e-3 <= min(loss for _, loss, _ in points.cells)
    assert max(loss for _, loss, _ in points.cells) <= max(losses) + 1e-3


def test_spikes_are_left_out_of_the_means() -> None:
    points = following(np.random.default_rng(3), scale=0.05, noise=0.0).points
    cells = [cell for cell in points.cells if cell[2] >= 4]
    assert len(cells) > 20
    off = sorted(abs(loss - float(hyperbola(step, 0.05))) for step, loss, _ in cells)
    assert off[int(0.9 * len(off))] < 0.02, "spikes are from 1 to 5"


def test_noise_is_averaged_out() -> None:
    rng = np.random.default_rng(4)
    points = LossPoints()
    for step in range(1, 20_001):
        points.add(step, 1.0 + 0.1 * float(rng.normal()))
    wide = [loss for _, loss, count in points.cells if count >= 100]
    assert len(wide) > 30
    assert float(np.std(wide)) < 0.02


def test_early_steps_are_kept_apart_more_finely() -> None:
    points = LossPoints()
    for step in range(1, 50_001):
        points.add(step, 1 / step)
    widths = np.diff([step for step, _, _ in points.cells])
    assert widths[:5].max() < widths[40:55].min() / 2


def test_a_job_that_resumes_from_a_checkpoint_begins_again_from_there() -> None:
    points = LossPoints()
    for step in (10, 20, 30, 40):
        points.add(step, float(step))
    points.add(20, 2.5)
    assert points.cells == [(10.0, 10.0, 1), (20.0, 2.5, 1)]
    points.add(0, 9.0)
    assert points.cells == [(0.0, 9.0, 1)]


def test_a_repeated_step_is_ignored() -> None:
    points = LossPoints()
    points.add(5, 1.0)
    points.add(5, 7.0)
    assert points.cells == [(5.0, 1.0, 1)]


def test_a_loss_that_is_no_number_is_remembered_for_a_while() -> None:
    points = LossPoints()
    points.add(1, 1.0)
    points.add(2, math.nan)
    assert (points.wild, points.cells) == (True, [(1.0, 1.0, 1)])
    for step in range(3, 10):
        points.add(step, 1.0)
    assert not points.wild


def test_cells_fit_in_a_small_record() -> None:
    points = following(np.random.default_rng(5), 0.1, 0.01).points
    assert len(json.dumps(points.cells, separators=(",", ":"))) < 5000
