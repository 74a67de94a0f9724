"""Fits of one unknown: rates by cores, losses by step, times of batches by their size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from cotenant.cli import units
from cotenant.cli.jobs.estimate_view import percent
from cotenant.cli.render import Column
from cotenant.cli.research.predicting.chart import Chart
from cotenant.cli.research.predicting.fitting import P10, Asked, Fitted, around, figure, span
from cotenant.cli.research.predicting.measurements import Row
from cotenant.cli.views import View
from cotenant.core.model.refusal import plural
from cotenant.core.prediction import batch_fit, batch_queueing, core_curve, experiment_design
from cotenant.core.prediction.loss_fit import Forecast, forecast
from cotenant.core.prediction.loss_points import LossPoints

CONFIDENT = 0.5  # from which on predictors take a figure to be known
DRAWN = 120  # points of a line
MEASURED_DRAWN_MAX = 60

CORES = (
    Column("CORES", right=True),
    Column("STEPS/S", right=True),
    Column("P10–P90", right=True),
    Column("CONFIDENCE", right=True),
    Column("MEASURED", right=True),
    Column("NOTE"),
)
BATCHES = (Column("BATCH", right=True), Column("SECONDS", right=True), Column("MEASURED", right=True))


def fit_cores(rows: Sequence[Row], title: str, asked: Asked) -> Fitted:
    """Fit S(C) = P₀·log C + P₁·C below θ, P₂ above (`predicting.curves`), and plan what to measure (`design`)."""
    points = [core_curve.Point(int(row["cores"]), float(row["rate"])) for row in rows]
    cores_max = max(asked.cores_max, *(point.cores for point in points))
    curve = core_curve.fit(points, cores_max)
    planned = experiment_design.plan(curve.points, cores_max)
    known = curve.levels_off and len(curve.points) > 1 and curve.theta_confidence >= CONFIDENT
    shown = sorted({*core_curve.ladder(cores_max), *(point.cores for point in curve.points), *planned.cores})
    measured = {point.cores: point for point in curve.points}
    rates = [_rate_view(curve, cores, measured.get(cores)) for cores in shown]
    low, high = curve.interval
    theta = {
        "cores": curve.cores_useful,
        "low": low,
        "high": high,
        "confidence": curve.theta_confidence,
        "levels_off": curve.levels_off,
        "known": known,
    }
    next_up = {"cores": list(planned.cores), "reason": planned.reason}
    view = {"theta": theta, "parameters": curve.parameters, "rates": rates, "next": next_up}
    drawn = np.unique(np.geomspace(1, cores_max, DRAWN).round().astype(int)).tolist()
    chart = Chart(
        title,
        "cores",
        "steps/s",
        {"fitted": [(cores, curve.rate(cores)) for cores in drawn]},
        points=[(point.cores, point.rate) for point in points][:MEASURED_DRAWN_MAX],
        band=[(cores, *around(curve.rate(cores), curve.spread(cores))) for cores in drawn],
        planned=planned.cores,
        bounds={f"θ {curve.cores_useful} ({span(low, high)})": curve.cores_useful} if known else None,
    )
    return Fitted(list(_cores_card(curve, planned, known)), view, CORES, list(_rows(rates, curve, planned)), chart)


def _rate_view(curve: core_curve.Curve, cores: int, measured: core_curve.Point | None) -> View:
    rate, spread = curve.rate(cores), curve.spread(cores)
    low, high = around(rate, spread)
    return {
        "cores": cores,
        "rate_per_second": rate,
        "p10": low,
        "p90": high,
        "confidence": curve.confidence(cores),
        "measured_per_second": measured.rate if measured else None,
        "windows": measured.windows if measured else 0,
    }


def _cores_card(curve: core_curve.Curve, planned: experiment_design.Plan, known: bool) -> Iterator[tuple[str, str]]:
    low, high = curve.interval
    sure = f"confidence {percent(curve.theta_confidence)}"
    if known:
        yield "θ", f"{plural(curve.cores_useful, 'core')} ({span(low, high)} with 90 %), {sure}: more gain nothing"
    elif not curve.levels_off:
        yield "θ", f"unknown: the rate was not seen to level off by {plural(curve.points[-1].cores, 'core')}"
    else:
        yield "θ", f"not known well enough: {span(low, high)} cores with 90 %, {sure}"
    log, linear, plateau = curve.parameters
    if curve.theta > 1:
        yield "curve", f"{log:.3g}·log C + {linear:.3g}·C below {curve.theta} cores, {plateau:.3g} from there on"
    else:
        yield "curve", f"{plateau:.3g} steps per second on any number of cores"
    yield "measure next", f"{', '.join(map(str, planned.cores))} cores" if planned.cores else "nothing"
    yield "because", planned.reason


def _rows(rates: Sequence[View], curve: core_curve.Curve, planned: experiment_design.Plan) -> Iterator[list[str]]:
    for one in rates:
        notes = ["θ"] if one["cores"] == curve.cores_useful and curve.levels_off else []
        notes += ["measure next"] if one["cores"] in planned.cores else []
        seen = "" if one["measured_per_second"] is None else figure(one["measured_per_second"])
        yield [
            str(one["cores"]),
            figure(one["rate_per_second"]),
            span(one["p10"], one["p90"]).replace(" to ", "–"),
            percent(one["confidence"]),
            f"{seen} (×{one['windows']})" if one["windows"] > 1 else seen,
            ", ".join(notes),
        ]


def fit_loss(rows: Sequence[Row], title: str, asked: Asked) -> Fitted:
    """Fit ℓ(k) = 1/(β₀k + β₁) + β₂ (`core.predicting.loss_curve`), and say when a goal is reached."""
    points = LossPoints()
    for row in rows:
        points.add(int(row["step"]), float(row["loss"]))
    told = forecast(points.cells, asked.goal)
    why = told.why
    if points.wild:
        why = "its loss was no finite number lately"
    elif not asked.goal.given and told.curve is not None:
        why = "no goal was named, so that nothing tells where it ends; --goal-loss or --goal-fall does"
    predictable = not why and told.confidence >= CONFIDENT
    view: View = {
        "points": len(rows),
        "last_step": int(points.step),
        "curve": dict(zip(("beta_0", "beta_1", "floor"), told.curve.betas, strict=True)) if told.curve else None,
        "predictable": predictable,
        "why_not": why or ("" if predictable else _doubt(told)),
        "goal_step": told.step if math.isfinite(told.step) else None,
        "error": told.error if math.isfinite(told.error) else None,
        "confidence": told.confidence if not why else 0.0,
        **_time_left(told, points.step, asked.rate_per_second, predictable),
    }
    return Fitted(list(_loss_card(view)), view, chart=_loss_chart(points, told, title, predictable, asked))


def _doubt(told: Forecast) -> str:
    return f"the curve points to step {told.step:.0f}, but not surely: off by {percent(min(told.error, 9.99))} or so"


def _time_left(told: Forecast, step: float, rate: float, predictable: bool) -> View:
    if not (predictable and rate):
        return {"remaining_seconds": None, "remaining_p10_seconds": None, "remaining_p90_seconds": None}
    left, off = max(0.0, told.step - step), P10 * told.error * told.step
    return {
        "remaining_seconds": left / rate,
        "remaining_p10_seconds": max(0.0, left - off) / rate,
        "remaining_p90_seconds": (left + off) / rate,
    }


def _loss_card(view: View) -> Iterator[tuple[str, str]]:
    yield "seen", f"{view['points']} losses, up to step {view['last_step']}"
    if curve := view["curve"]:
        yield "curve", f"1/({curve['beta_0']:.3g}·k + {curve['beta_1']:.3g}) + {curve['floor']:.4g}"
        yield "levels off at", f"a loss of {curve['floor']:.4g}"
    if view["predictable"]:
        off = percent(view["error"])
        yield "goal", f"at step {view['goal_step']:.0f}, off by {off} or so; confidence {percent(view['confidence'])}"
    else:
        yield "goal", f"unpredictable: {view['why_not']}"
    if view["remaining_seconds"] is not None:
        low, high = (units.short_seconds(view[f"remaining_p{part}_seconds"]) for part in (10, 90))
        yield "remaining", f"{units.short_seconds(view['remaining_seconds'])} ({low} to {high})"


def _loss_chart(points: LossPoints, told: Forecast, title: str, predictable: bool, asked: Asked) -> Chart | None:
    if not points.cells:
        return None
    lines = {}
    last = max(points.step, told.step) if predictable else points.step
    if told.curve is not None:
        steps = np.linspace(max(points.cells[0][0], told.curve.origin), last, DRAWN).tolist()
        lines["fitted"] = [(step, told.curve.loss(step)) for step in steps]
    target = asked.goal.target
    if target is not None:
        lines["goal"] = [(points.cells[0][0], target), (last, target)]
    cells = points.cells[:: max(1, len(points.cells) // MEASURED_DRAWN_MAX)]
    bounds = {f"reached at {told.step:.0f}": told.step} if predictable else None
    told_points = [(step, loss) for step, loss, _ in cells]
    return Chart(title, "step", "loss", lines, told_points, bounds=bounds, spread_x=False, from_zero=False)


def fit_latency(rows: Sequence[Row], title: str, asked: Asked) -> Fitted:
    """Fit τ(b) = αb + τ₀ (`batch_fit`), and tell what follows for requests (`latency`)."""
    points = [(int(row["batch"]), float(row["seconds"])) for row in rows]
    found = batch_fit.fit(points)
    sizes = sorted({size for size, _ in points})
    if found is None:
        why = f"batches of {plural(len(sizes), 'size')} were seen; it takes two to tell α from τ₀"
        view: View = {"known": False, "why_not": why, "next": {"batches": [2 * sizes[-1]], "reason": why}}
        return Fitted([("latency", f"unpredictable: {why}"), ("measure next", f"batches of {2 * sizes[-1]}")], view)
    batch = found.batch
    times = {size: [seconds for one, seconds in points if one == size] for size in sizes}
    view = {
        "known": True,
        "per_request_seconds": batch.per_request,
        "fixed_seconds": batch.fixed,
        "confidence": found.confidence,
        "batches": [{"batch": size, "seconds": batch.seconds(size), "measured": times[size]} for size in sizes],
        "answer": _answer_view(batch, asked) if asked.promise.arrivals_per_second else None,
    }
    table = [[str(size), figure(batch.seconds(size)), span(min(times[size]), max(times[size]))] for size in sizes]
    line = [(size, batch.seconds(size)) for size in (min(sizes), max(sizes))]
    chart = Chart(
        title, "requests in a batch", "seconds", {"fitted": line}, points[:MEASURED_DRAWN_MAX], spread_x=False
    )
    return Fitted(list(_latency_card(view, asked)), view, BATCHES, table, chart)


def _answer_view(batch: batch_queueing.BatchTime, asked: Asked) -> View:
    promise = asked.promise
    rate = promise.arrivals_per_second / asked.replicas
    told = batch_queueing.answer(batch, rate, (95.0, 99.0))
    promised = promise.latency_seconds > 0 and promise.latency_percentile > 0
    needed = (
        batch_queueing.replicas_needed(
            batch, promise.arrivals_per_second, promise.latency_percentile, promise.latency_seconds
        )
        if promised
        else None
    )
    return {
        "replicas": asked.replicas,
        "arrivals_per_second": promise.arrivals_per_second,
        "keeps_up": told is not None,
        "mean_seconds": told.mean_seconds if told else None,
        "mean_seconds_max": told.mean_seconds_max if told else None,
        "p95_seconds": told.percentiles_seconds[0] if told else None,
        "p99_seconds": told.percentiles_seconds[1] if told else None,
        "replicas_needed": needed,
        "promised": promised,
    }


def _latency_card(view: View, asked: Asked) -> Iterator[tuple[str, str]]:
    alpha, fixed = view["per_request_seconds"], view["fixed_seconds"]
    yield (
        "batch time",
        f"{1000 * alpha:.4g} ms a request + {1000 * fixed:.4g} ms, confidence {percent(view['confidence'])}",
    )
    if alpha:
        yield "keeps up with", f"{batch_queueing.LOAD_MAX / alpha:.4g} requests a second, each replica"
    told = view["answer"]
    if told is None:
        yield "latency", "tell the requests a second with --arrivals"
        return
    what = f"{plural(told['replicas'], 'replica')} at {told['arrivals_per_second']:g} requests a second"
    if told["keeps_up"]:
        mean, p95, p99 = (f"{1000 * told[name]:.3g} ms" for name in ("mean_seconds", "p95_seconds", "p99_seconds"))
        yield "latency", f"mean {mean}, 95th percentile {p95}, 99th {p99}, for {what}"
    else:
        yield "latency", f"grows without end: {what} do not keep up"
    if told["promised"]:
        promise = asked.promise
        kept = f"{units.write_seconds(promise.latency_seconds)} at percentile {promise.latency_percentile:g}"
        needed = told["replicas_needed"]
        yield "replicas needed", f"{needed} for {kept}" if needed else f"no number of them keeps {kept}"
