"""The accuracy of the predictors' models, and how often they are sure but wrong.

Loss curves are synthetic and seeded (`tests/support/loss_curves.py`): noise of 0.2, 1 and 3 % of the total decrease,
spikes in 2 % of the points, with and without a cut of the learning rate; the first 40 % of the steps are observed.
Curves of other forms must not get a confident forecast. The reference is a forecast without a model: as many steps
remain as have passed. Latency is compared with a long simulation that shares no code with the model
(`tests/support/queue_simulation.py`); its reference is the bound of the mean.
"""

from __future__ import annotations

import csv
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first
from tests.support.loss_curves import BROKEN, SEEN, STEPS, Told, broken, following  # noqa: E402 - likewise
from tests.support.queue_simulation import simulate  # noqa: E402 - likewise

from cotenant.core.model.loss_goal import LossGoal  # noqa: E402 - likewise
from cotenant.core.prediction.batch_queueing import BatchTime, latencies, mean_seconds_max  # noqa: E402 - likewise
from cotenant.core.prediction.loss_fit import Forecast, forecast  # noqa: E402 - likewise
from cotenant.core.prediction.loss_points import LossPoints  # noqa: E402 - likewise

SURE = 0.5
SCALES = (0.02, 0.05, 0.1, 0.2, 0.4)
NOISES = (0.002, 0.01, 0.03)
NAIVE = 2 * SEEN - 1  # error of "as many steps remain as have passed"
PROFILES = Path(os.environ.get("COTENANT_PROFILES", ROOT.parent / "shared" / "data")) / "pollux_profiles"
FALLS = {  # turns the metric of each profile into a decreasing one
    "cifar10": lambda metric: 1 - metric,
    "imagenet": lambda metric: 1 - metric,
    "ncf": lambda metric: 1 - metric,
    "deepspeech2": lambda metric: metric,
    "yolov3": lambda metric: metric,
}
SHAPES = (BatchTime(0.001, 0.01), BatchTime(0.001, 0.0001), BatchTime(0.001, 0.1), BatchTime(0.01, 0.0))
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
GROUP_RUNS = 6


def forecast_of(curve: Told) -> Forecast:
    """Return the forecast from the observed points; no confidence if the loss was recently not a number."""
    points = curve.points
    return Forecast() if points.wild else forecast(points.cells, LossGoal(target=curve.goal))


def _forms(seeds: int) -> Iterator[harness.Row]:
    for cut in (False, True):
        every: list[Forecast] = []
        for noise in NOISES:
            forecasts = [
                forecast_of(following(np.random.default_rng([seed, number, int(1e4 * noise), cut]), scale, noise, cut))
                for number, scale in enumerate(SCALES)
                for seed in range(seeds)
            ]
            every += forecasts
            yield from _errors(f"loss curve{', rate cut' if cut else ''}, noise {100 * noise:g} %", forecasts)
        yield from _errors(f"loss curve{', rate cut' if cut else ''}, all", every, bar=True)


def _errors(name: str, forecasts: Sequence[Forecast], *, bar: bool = False) -> Iterator[harness.Row]:
    errors = [100 * abs(one.step / STEPS - 1) for one in forecasts if one.confidence >= SURE]
    share = 100 * len(errors) / len(forecasts)
    naive = 100 * abs(NAIVE)
    if bar:
        unsure = sorted(100 * min(abs(one.step / STEPS - 1), 10.0) for one in forecasts)
        yield harness.Row(f"{name}: error if always believed, median", unsure[len(unsure) // 2], "%", naive, "no model")
    for text, percent in (("median", 50), ("90th percentile", 90)):
        value = harness.percentile(errors, percent) if errors else math.nan
        holds = value <= 10 if bar else None
        goal = "at most 10 %" if bar else ""
        if errors:
            yield harness.Row(f"{name}: final-step error, {text}", value, "%", naive, "no model", goal, holds)
    yield harness.Row(f"{name}: sure", share, "% of jobs")


def _broken(seeds: int) -> Iterator[harness.Row]:
    unsure = total = 0
    for number, kind in enumerate(BROKEN):
        found = [
            forecast_of(broken(np.random.default_rng([seed, number, 99]), kind)).confidence for seed in range(seeds)
        ]
        kept = sum(confidence < SURE for confidence in found)
        unsure, total = unsure + kept, total + seeds
        value = 100 * kept / seeds
        yield harness.Row(f"no such form, {kind}: unsure", value, "% of jobs", 0.0, "always sure")
    value = 100 * unsure / total
    yield harness.Row("no such form, all: unsure", value, "% of jobs", 0.0, "always sure", "at least 95 %", value >= 95)


def _validation() -> Iterator[harness.Row]:
    """Measure real validation curves: the first 40 % of the epochs are observed, the best of the last is the goal."""
    for name, falls in FALLS.items():
        curves = [
            found for path in sorted((PROFILES / name).glob("validation-*.csv")) if (found := _curve(path, falls))
        ]
        if not curves:
            continue
        sure = [100 * abs(forecast.step / end - 1) for forecast, end in curves if forecast.confidence >= SURE]
        share = 100 * len(sure) / len(curves)
        yield harness.Row(f"real curves, {name} ({len(curves)}): sure", share, "% of jobs")
        if sure:
            value = harness.percentile(sure, 50)
            yield harness.Row(
                f"real curves, {name}: final-step error, median", value, "%", 100 * abs(NAIVE), "no model"
            )


def _curve(path: Path, falls: Callable[[float], float]) -> tuple[Forecast, float] | None:
    with path.open() as file:
        rows = [(float(row["iteration"]), falls(float(row["metric"]))) for row in csv.DictReader(file)]
    if len(rows) < 10:
        return None
    goal = min(loss for _, loss in rows[-5:])
    end = next(step for step, loss in rows if loss <= goal)
    points = LossPoints()
    for step, loss in rows:
        if step <= SEEN * end:
            points.add(int(step), loss)
    return forecast(points.cells, LossGoal(target=goal)), end


def _latency(requests: int) -> Iterator[harness.Row]:
    means, tails, bounds, guesses = [], [], [], []
    for batch in SHAPES:
        for load in LOADS:
            rate = load / batch.per_request
            predicted = latencies(batch, rate)
            seen = np.array(simulate(batch.per_request, batch.fixed, rate, requests, seed=11))
            p99 = float(np.percentile(seen, 99))
            bound = mean_seconds_max(batch, rate)
            means.append(100 * abs(predicted.mean_seconds / float(seen.mean()) - 1))
            tails.append(100 * abs(predicted.percentile_seconds(99) / p99 - 1))
            bounds.append(100 * (predicted.mean_seconds / bound - 1))
            guesses.append(100 * abs(bound / p99 - 1))
    worst = max(bounds)
    yield harness.Row(
        "latency: mean above its bound, worst", worst, "%", bar="at most 0.5 % (the grid)", holds=worst <= 0.5
    )
    yield harness.Row("latency: mean against a simulation, worst", max(means), "%")
    yield harness.Row(
        "latency: p99 against a simulation, worst",
        max(tails),
        "%",
        max(guesses),
        "the bound of the mean",
        "at most 10 %",
        max(tails) <= 10,
    )


def _prices(quick: bool) -> Iterator[harness.Row]:
    points = following(np.random.default_rng(1), 0.05, 0.01).points
    naive = 1e3 * _seconds(lambda: np.polyfit(range(len(points.cells)), [cell[1] for cell in points.cells], 2), quick)
    value = 1e3 * _seconds(lambda: forecast(points.cells, LossGoal(target=0.6)), quick)
    yield harness.Row("loss curve: one forecast", value, "ms", naive, "a parabola by polyfit")
    batch, rate = BatchTime(0.001, 0.01), 900.0
    simulated = 1e3 * _seconds(lambda: simulate(0.001, 0.01, rate, 100_000, seed=1), True)
    value = 1e3 * _seconds(lambda: latencies(batch, rate).percentile_seconds(99), quick)
    yield harness.Row("latency: one answer", value, "ms", simulated, "a simulation of 100,000 requests")


def _seconds(work: Callable[[], object], quick: bool) -> float:
    """Return the CPU time of one call: the minimum of a few groups, because the machine is shared."""
    runs = 1 if quick else GROUP_RUNS
    best = math.inf
    for _ in range(3):
        begin = time.process_time()
        for _ in range(runs):
            work()
        best = min(best, (time.process_time() - begin) / runs)
    return best


def _measure(quick: bool) -> Sequence[harness.Row]:
    seeds = 6 if quick else 40
    return [
        *_forms(seeds),
        *_broken(seeds),
        *_validation(),
        *_latency(100_000 if quick else 1_000_000),
        *_prices(quick),
    ]


if __name__ == "__main__":
    harness.main(_measure, __doc__ or "")
