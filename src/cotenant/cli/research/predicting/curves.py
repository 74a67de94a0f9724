"""Fits of one variable: rates by cores, losses by step, batch times by batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from cotenant.cli import units
from cotenant.cli.jobs.estimate_view import percent
from cotenant.cli.render import Column
from cotenant.cli.research.predicting.chart import Chart
from cotenant.cli.research.predicting.fitting import P10, FitOptions, FitResult, around, figure, span
from cotenant.cli.research.predicting.measurements import Row
from cotenant.cli.views import View
from cotenant.core.model.refusal import plural
from cotenant.core.prediction import batch_fit, batch_queueing, core_curve, experiment_design
from cotenant.core.prediction.loss_fit import Forecast, forecast
from cotenant.core.prediction.loss_points import LossPoints

CONFIDENT = 0.5  # predictors use values from this confidence
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


def fit_cores(rows: Sequence[Row], title: str, fit_options: FitOptions) -> FitResult:
    """Return the fit of S(C) = P₀·log C + P₁·C below θ, P₂ above (`core_curve`), and what to measure next."""
    points = [core_curve.Point(int(row["cores"]), float(row["rate"])) for row in rows]
    cores_max = max(fit_options.cores_max, *(point.cores for point in points))
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
    return FitResult(list(_cores_card(curve, planned, known)), view, CORES, list(_rows(rates, curve, planned)), chart)


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
        yield "θ", f"{plural(curve.cores_useful, 'core')} ({span(low, high)} at 90 %), {sure}; more cores do not help"
    elif not curve.levels_off:
        yield "θ", f"unknown: the rate has not leveled off at {plural(curve.points[-1].cores, 'core')}"
    else:
        yield "θ", f"not known well enough: {span(low, high)} cores at 90 %, {sure}"
    log, linear, plateau = curve.parameters
    if curve.theta > 1:
        yield "curve", f"{log:.3g}·log C + {linear:.3g}·C below {curve.theta} cores, {plateau:.3g} from there"
    else:
        yield "curve", f"{plateau:.3g} steps per second on any number of cores"
    yield "measure next", f"{', '.join(map(str, planned.cores))} cores" if planned.cores else "nothing"
    yield "reason", planned.reason


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


def fit_loss(rows: Sequence[Row], title: str, fit_options: FitOptions) -> FitResult:
    """Return the fit of ℓ(k) = 1/(β₀k + β₁) + β₂ (`core.prediction.loss_fit`), and when the goal is reached."""
    points = LossPoints()
    for row in rows:
        points.add(int(row["step"]), float(row["loss"]))
    result = forecast(points.cells, fit_options.goal)
    why = result.why
    if points.wild:
        why = "recent losses are not finite"
    elif not fit_options.goal.given and result.curve is not None:
        why = "no goal; set --goal-loss or --goal-fall"
    predictable = not why and result.confidence >= CONFIDENT
    view: View = {
        "points": len(rows),
        "last_step": int(points.step),
        "curve": dict(zip(("beta_0", "beta_1", "floor"), result.curve.betas, strict=True)) if result.curve else None,
        "predictable": predictable,
        "why_not": why or ("" if predictable else _uncertainty(result)),
        "goal_step": result.step if math.isfinite(result.step) else None,
        "error": result.error if math.isfinite(result.error) else None,
        "confidence": result.confidence if not why else 0.0,
        **_time_left(result, points.step, fit_options.rate_per_second, predictable),
    }
    return FitResult(list(_loss_card(view)), view, chart=_loss_chart(points, result, title, predictable, fit_options))


def _uncertainty(result: Forecast) -> str:
    return f"the curve reaches it at step {result.step:.0f}, with an error of about {percent(min(result.error, 9.99))}"


def _time_left(result: Forecast, step: float, rate: float, predictable: bool) -> View:
    if not (predictable and rate):
        return {"remaining_seconds": None, "remaining_p10_seconds": None, "remaining_p90_seconds": None}
    left, off = max(0.0, result.step - step), P10 * result.error * result.step
    return {
        "remaining_seconds": left / rate,
        "remaining_p10_seconds": max(0.0, left - off) / rate,
        "remaining_p90_seconds": (left + off) / rate,
    }


def _loss_card(view: View) -> Iterator[tuple[str, str]]:
    yield "measured", f"{view['points']} losses, up to step {view['last_step']}"
    if curve := view["curve"]:
        yield "curve", f"1/({curve['beta_0']:.3g}·k + {curve['beta_1']:.3g}) + {curve['floor']:.4g}"
        yield "levels off at", f"a loss of {curve['floor']:.4g}"
    if view["predictable"]:
        off = percent(view["error"])
        yield "goal", f"at step {view['goal_step']:.0f}, error about {off}; confidence {percent(view['confidence'])}"
    else:
        yield "goal", f"unpredictable: {view['why_not']}"
    if view["remaining_seconds"] is not None:
        low, high = (units.short_seconds(view[f"remaining_p{part}_seconds"]) for part in (10, 90))
        yield "remaining", f"{units.short_seconds(view['remaining_seconds'])} ({low} to {high})"


def _loss_chart(
    points: LossPoints, result: Forecast, title: str, predictable: bool, fit_options: FitOptions
) -> Chart | None:
    if not points.cells:
        return None
    lines = {}
    last = max(points.step, result.step) if predictable else points.step
    if result.curve is not None:
        steps = np.linspace(max(points.cells[0][0], result.curve.origin), last, DRAWN).tolist()
        lines["fitted"] = [(step, result.curve.loss(step)) for step in steps]
    target = fit_options.goal.target
    if target is not None:
        lines["goal"] = [(points.cells[0][0], target), (last, target)]
    cells = points.cells[:: max(1, len(points.cells) // MEASURED_DRAWN_MAX)]
    bounds = {f"reached at {result.step:.0f}": result.step} if predictable else None
    shown_points = [(step, loss) for step, loss, _ in cells]
    return Chart(title, "step", "loss", lines, shown_points, bounds=bounds, spread_x=False, from_zero=False)


def fit_latency(rows: Sequence[Row], title: str, fit_options: FitOptions) -> FitResult:
    """Return the fit of τ(b) = αb + τ₀ (`batch_fit`), and the resulting latency of requests (`latency`)."""
    points = [(int(row["batch"]), float(row["seconds"])) for row in rows]
    found = batch_fit.fit(points)
    sizes = sorted({size for size, _ in points})
    if found is None:
        why = f"batches of {plural(len(sizes), 'size')} measured; two are needed to separate α and τ₀"
        view: View = {"known": False, "why_not": why, "next": {"batches": [2 * sizes[-1]], "reason": why}}
        return FitResult([("latency", f"unpredictable: {why}"), ("measure next", f"batches of {2 * sizes[-1]}")], view)
    batch = found.batch
    times = {size: [seconds for one, seconds in points if one == size] for size in sizes}
    view = {
        "known": True,
        "per_request_seconds": batch.per_request,
        "fixed_seconds": batch.fixed,
        "confidence": found.confidence,
        "batches": [{"batch": size, "seconds": batch.seconds(size), "measured": times[size]} for size in sizes],
        "answer": _answer_view(batch, fit_options) if fit_options.promise.arrivals_per_second else None,
    }
    table = [[str(size), figure(batch.seconds(size)), span(min(times[size]), max(times[size]))] for size in sizes]
    line = [(size, batch.seconds(size)) for size in (min(sizes), max(sizes))]
    chart = Chart(
        title, "requests in a batch", "seconds", {"fitted": line}, points[:MEASURED_DRAWN_MAX], spread_x=False
    )
    return FitResult(list(_latency_card(view, fit_options)), view, BATCHES, table, chart)


def _answer_view(batch: batch_queueing.BatchTime, fit_options: FitOptions) -> View:
    promise = fit_options.promise
    rate = promise.arrivals_per_second / fit_options.replicas
    answer = batch_queueing.answer(batch, rate, (95.0, 99.0))
    promised = promise.latency_seconds > 0 and promise.latency_percentile > 0
    needed = (
        batch_queueing.replicas_needed(
            batch, promise.arrivals_per_second, promise.latency_percentile, promise.latency_seconds
        )
        if promised
        else None
    )
    return {
        "replicas": fit_options.replicas,
        "arrivals_per_second": promise.arrivals_per_second,
        "keeps_up": answer is not None,
        "mean_seconds": answer.mean_seconds if answer else None,
        "mean_seconds_max": answer.mean_seconds_max if answer else None,
        "p95_seconds": answer.percentiles_seconds[0] if answer else None,
        "p99_seconds": answer.percentiles_seconds[1] if answer else None,
        "replicas_needed": needed,
        "promised": promised,
    }


def _latency_card(view: View, fit_options: FitOptions) -> Iterator[tuple[str, str]]:
    alpha, fixed = view["per_request_seconds"], view["fixed_seconds"]
    yield (
        "batch time",
        f"{1000 * alpha:.4g} ms per request + {1000 * fixed:.4g} ms, confidence {percent(view['confidence'])}",
    )
    if alpha:
        yield "keeps up with", f"{batch_queueing.LOAD_MAX / alpha:.4g} requests per second per replica"
    answer = view["answer"]
    if answer is None:
        yield "latency", "set the requests per second with --arrivals"
        return
    what = f"{plural(answer['replicas'], 'replica')} at {answer['arrivals_per_second']:g} requests per second"
    if answer["keeps_up"]:
        mean, p95, p99 = (f"{1000 * answer[name]:.3g} ms" for name in ("mean_seconds", "p95_seconds", "p99_seconds"))
        yield "latency", f"mean {mean}, 95th percentile {p95}, 99th {p99}, for {what}"
    else:
        yield "latency", f"unbounded: {what} do not keep up"
    if answer["promised"]:
        promise = fit_options.promise
        kept = f"{units.write_seconds(promise.latency_seconds)} at percentile {promise.latency_percentile:g}"
        needed = answer["replicas_needed"]
        yield "replicas needed", f"{needed} for {kept}" if needed else f"no number of replicas meets {kept}"
