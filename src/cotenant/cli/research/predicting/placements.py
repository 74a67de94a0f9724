"""Fits of step times by placement (GPUs and nodes, workers and parameter servers) with the predictors' own code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from cotenant.cli.jobs.estimate_view import percent
from cotenant.cli.render import Column
from cotenant.cli.research.predicting.chart import Chart
from cotenant.cli.research.predicting.fitting import FitOptions, FitResult, around, figure, span
from cotenant.cli.research.predicting.measurements import Row
from cotenant.cli.views import View
from cotenant.core.model.refusal import plural
from cotenant.core.prediction.core_curve import Windows, confidence_of
from cotenant.policies import parameter_server, scaling
from cotenant.policies.parameter_server import Team

EXTRAPOLATED_FACTOR = 4  # rates are shown up to this multiple of the most GPUs measured
INFORMATIVE = ((1, 1), (2, 1), (2, 2))  # GPUs and nodes from which GENIE learns [D]
CONFIDENT = 0.5

FIGURES = (
    Column("STEPS/S", right=True),
    Column("P10–P90", right=True),
    Column("CONFIDENCE", right=True),
    Column("MEASURED", right=True),
)
GPUS = (Column("GPUS", right=True), Column("NODES", right=True), *FIGURES)
TEAMS = (Column("WORKERS", right=True), Column("SERVERS", right=True), Column("CORES", right=True), *FIGURES)


def fit_scaling(rows: Sequence[Row], title: str, fit_options: FitOptions) -> FitResult:
    """Return the fit of `scaling`: compute, and communication within and between nodes."""
    windows: dict[scaling.Placement, Windows] = {}
    for row in rows:
        placement = (int(row["gpus"]), min(int(row["nodes"]), int(row["gpus"])), False)
        windows.setdefault(placement, Windows(rates_max=len(rows), counts_max=len(rows))).add(
            int(row.get("cores", 1)), float(row["rate"])
        )
    model = scaling.fitted(windows, scaling.Scaling.Options())
    assert model is not None  # there is a row
    measured = {(gpus, nodes): _mean(seen) for (gpus, nodes, _), seen in windows.items()}
    per_node = max(math.ceil(gpus / nodes) for gpus, nodes in measured)
    placements = sorted({*measured, *_packed(EXTRAPOLATED_FACTOR * model.gpus_max, per_node)})
    predictions = [_view(model.judge((gpus, nodes, False)), measured.get((gpus, nodes))) for gpus, nodes in placements]
    rates = [{"gpus": gpus, "nodes": nodes, **one} for (gpus, nodes), one in zip(placements, predictions, strict=True)]
    missing = [placement for placement in INFORMATIVE if placement not in measured]
    next_up = {
        "placements": [{"gpus": gpus, "nodes": nodes} for gpus, nodes in missing],
        "reason": "one GPU, one node and two nodes are the most informative" if missing else "enough is measured",
    }
    names = ("compute", *(["compute_divided"] if model.batch_is_fixed else []), "within_node", "between_nodes")
    terms = dict(zip(names, [float(term) for term in model.terms.values], strict=True))
    view: View = {"terms_seconds": terms, "batch_is_fixed": model.batch_is_fixed, "rates": rates, "next": next_up}
    table = [[str(one["gpus"]), str(one["nodes"]), *_cells(one)] for one in rates]
    return FitResult(list(_scaling_card(view)), view, GPUS, table, _scaling_chart(title, model, measured, per_node))


def _packed(gpus_max: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Yield powers of two of GPUs on as few nodes as possible."""
    gpus = 1
    while gpus <= gpus_max:
        yield gpus, math.ceil(gpus / per_node)
        gpus *= 2


def _scaling_card(view: View) -> Iterator[tuple[str, str]]:
    terms = view["terms_seconds"]
    words = [f"{figure(terms['compute'])} s"]
    if "compute_divided" in terms:
        words.append(f"{figure(terms['compute_divided'])} s / GPUs")
    words.append(f"{figure(terms['within_node'])} s · log₂(GPUs per node)")
    words.append(f"{figure(terms['between_nodes'])} s · 2(k − 1)/k on k nodes")
    yield "step time", " + ".join(words)
    yield "batch", "fixed total" if view["batch_is_fixed"] else "one per GPU: a step on n GPUs processes n batches"
    missing = view["next"]["placements"]
    named = [f"{plural(one['gpus'], 'GPU')} on {plural(one['nodes'], 'node')}" for one in missing]
    yield "measure next", "; ".join(named) or "nothing"
    yield "reason", view["next"]["reason"]


def _scaling_chart(title: str, model: scaling.Model, measured: Mapping[tuple[int, int], float], per_node: int) -> Chart:
    packed = list(_packed(EXTRAPOLATED_FACTOR * model.gpus_max, per_node))
    judged = [model.judge((gpus, nodes, False)) for gpus, nodes in packed]
    spread_out = [(gpus, model.judge((gpus, gpus, False))[0]) for gpus, _ in packed]
    return Chart(
        title,
        "GPUs",
        "steps/s",
        {
            f"{per_node} to a node": [(gpus, rate) for (gpus, _), (rate, _) in zip(packed, judged, strict=True)],
            **({"1 to a node": spread_out} if per_node > 1 else {}),
        },
        points=[(gpus, rate) for (gpus, _), rate in measured.items()],
        band=[(gpus, *around(*one)) for (gpus, _), one in zip(packed, judged, strict=True)],
    )


def fit_teams(rows: Sequence[Row], title: str, fit_options: FitOptions) -> FitResult:
    """Return the fit of `parameter-server`: compute, serving and synchronization."""
    windows: dict[Team, Windows] = {}
    for row in rows:
        team = Team(
            int(row["workers"]),
            int(row["servers"]),
            int(row.get("cores", 0)),
            int(row.get("server_cores", 0)),
            float(row.get("gpus", row["workers"])),
        )
        windows.setdefault(team, Windows(rates_max=len(rows), counts_max=1)).add(1, float(row["rate"]))
    measured = {team: _mean(seen) for team, seen in windows.items()}
    lacking = parameter_server.POINTS_MIN - len(windows)
    if lacking > 0:
        why = f"{plural(len(windows), 'team')} measured, {parameter_server.POINTS_MIN} needed"
        table = [[*_team_cells(team), "", "", "", figure(rate)] for team, rate in sorted(measured.items())]
        view: View = {"known": False, "why_not": why, "rates": []}
        card = [("rates", f"unpredictable: {why}"), ("measure next", f"{lacking} more teams of different sizes")]
        return FitResult(card, view, TEAMS, table)
    model = parameter_server.fitted(windows)
    teams = sorted({*measured, *_neighbor_teams(measured)})
    predictions = [{**_team_view(team), **_view(model.judge(team), measured.get(team))} for team in teams]
    terms = [float(term) for term in model.terms.values]
    view = {"known": True, "terms_seconds": terms, "error": model.terms.error, "rates": predictions}
    table = [[*_team_cells(team), *_cells(one)] for team, one in zip(teams, predictions, strict=True)]
    card = [
        ("teams", f"{len(windows)} measured; fit error {percent(model.terms.error)} of a step"),
        ("fastest", _fastest(predictions)),
    ]
    return FitResult(card, view, TEAMS, table, _teams_chart(title, model, teams, measured))


def _neighbor_teams(measured: Mapping[Team, float]) -> Iterator[Team]:
    """Yield all combinations of measured worker and server counts, with the cores of the largest team."""
    like = max(measured, key=lambda team: (team.workers, team))
    for workers in {team.workers for team in measured} | {2 * max(team.workers for team in measured)}:
        for servers in {team.servers for team in measured}:
            yield Team(workers, servers, like.worker_cores, like.server_cores, workers * like.gpus / like.workers)


def _team_view(team: Team) -> View:
    return {
        "workers": team.workers,
        "servers": team.servers,
        "cores": team.worker_cores or None,
        "server_cores": team.server_cores or None,
        "gpus": team.gpus,
    }


def _team_cells(team: Team) -> list[str]:
    cores = (
        f"{team.worker_cores or '?'} + {team.server_cores or '?'}" if team.worker_cores or team.server_cores else "-"
    )
    return [str(team.workers), str(team.servers), cores]


def _fastest(predictions: Sequence[View]) -> str:
    sure = [one for one in predictions if one["confidence"] >= CONFIDENT]
    if not sure:
        return "none is known well enough"
    best = max(sure, key=lambda one: (one["rate_per_second"], -one["workers"], -one["servers"]))
    team = f"{plural(best['workers'], 'worker')} with {plural(best['servers'], 'server')}"
    return f"{team}: {figure(best['rate_per_second'])} steps per second, confidence {percent(best['confidence'])}"


def _teams_chart(
    title: str, model: parameter_server.Model, teams: Sequence[Team], measured: Mapping[Team, float]
) -> Chart:
    lines: dict[str, list[tuple[float, float]]] = {}
    for team in teams:
        lines.setdefault(plural(team.servers, "server"), []).append((team.workers, model.judge(team)[0]))
    return Chart(title, "workers", "steps/s", lines, [(team.workers, rate) for team, rate in measured.items()])


def _mean(windows: Windows) -> float:
    return max(point.rate for point in windows.points())


def _view(judged: tuple[float, float], measured: float | None) -> View:
    rate, spread = judged
    low, high = around(rate, spread) if math.isfinite(spread) else (0.0, 0.0)
    return {
        "rate_per_second": rate,
        "p10": low,
        "p90": high,
        "confidence": confidence_of(spread),
        "measured_per_second": measured,
    }


def _cells(one: View) -> list[str]:
    seen = "" if one["measured_per_second"] is None else figure(one["measured_per_second"])
    interval = span(one["p10"], one["p90"]).replace(" to ", "–")
    return [figure(one["rate_per_second"]), interval, percent(one["confidence"]), seen]
