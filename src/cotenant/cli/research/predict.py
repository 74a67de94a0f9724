"""`cotenant predict`: fit measurements, show profiles of models, and estimate jobs before they are submitted."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_options import read_whatif_drafts, with_job_options
from cotenant.cli.outcome import CommandError, note, sanitize, usage_error
from cotenant.cli.render import WIDTH_MAX, print_card, print_table
from cotenant.cli.source_positions import MapNode
from cotenant.cli.units import parse_integer, parse_seconds
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import CORES_MAX

if TYPE_CHECKING:  # numpy is slow to import, and `--help` does not need it
    from cotenant.cli.research.predicting.fitting import FitOptions, FitResult
    from cotenant.cli.research.predicting.measurements import Measurements, Row
    from cotenant.v1.predictor_service_pb2 import Profile

KIND_NAMES = ("cores", "scaling", "parameter-server", "loss", "latency")
NODES_MAX = 100_000
Fit = Callable[["Sequence[Row]", str, "FitOptions"], "FitResult"]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer()
    group.callback()(predict)
    group.command("fit")(fit)
    group.command("show")(show)
    group.command("record")(record)
    from cotenant.cli.lazy import TailCommand  # derived from typer's

    group.command("job", cls=TailCommand)(with_job_options(job))
    app.add_typer(group, name="predict")


def predict() -> None:
    """Predict rates and run times of jobs, with confidence.

    \b
    Examples:
      cotenant predict fit rates.csv --cores-max 32
      cotenant predict show resnet50
      cotenant predict record
      cotenant predict job --model resnet50 --gpus 1 --steps 90000 --cores 2,4,8
    """


def _complete_kind(incomplete: str) -> list[str]:
    return [name for name in KIND_NAMES if name.startswith(incomplete)]


def fit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Measurements in CSV; - is stdin.", show_default=False)],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND", help=f"{', '.join(KIND_NAMES)}; default: by the header.", autocompletion=_complete_kind
        ),
    ] = "",
    cores_max: Annotated[
        int, typer.Option(metavar="N", min=0, help="Largest core count to consider, if it was not measured.")
    ] = 0,
    goal_loss: Annotated[float | None, typer.Option(metavar="LOSS", help="Loss at which training is done.")] = None,
    goal_fall: Annotated[
        str,
        typer.Option(
            metavar="FALL/STEPS", help="Or done when STEPS steps lower the loss by less than FALL: 0.001/1000."
        ),
    ] = "",
    rate: Annotated[
        float, typer.Option(metavar="R", min=0, help="Steps per second of a loss curve, for the remaining time.")
    ] = 0.0,
    arrivals: Annotated[float, typer.Option(metavar="R", min=0, help="Requests per second of a service.")] = 0.0,
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Replicas that share the requests.")] = 1,
    latency: Annotated[str, typer.Option(metavar="TIME", help="Latency objective, such as 50ms.")] = "",
    percentile: Annotated[
        float, typer.Option(metavar="P", min=0, max=100, help="Percentile of the latency objective.")
    ] = 99.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot into a .png, .svg or .html file; needs matplotlib.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Fit measurements with the predictors' own code.

    Shows the fit, its confidence, and what to measure next.

    The header of the file determines the kind of measurements; a column `model` separates several models:

    \b
      cores,rate[,phase][,model]                 steps per second by CPU cores: θ and the curve
      gpus,nodes,rate[,cores][,model]            by placement: compute and communication
      workers,servers,rate[,cores][,server_cores][,gpus][,model]    with parameter servers
      step,loss[,model]                          a loss curve: when a goal is reached
      batch,seconds[,model]                      batches of a service: its latency

    \b
    Examples:
      cotenant predict fit rates.csv --cores-max 32 --plot curve.png
      cotenant predict fit losses.csv --goal-loss 0.35 --rate 12
      cotenant predict fit batches.csv --arrivals 400 --latency 50ms --json
    """
    from cotenant.cli.research.predicting.figure import check_target, write_plot
    from cotenant.cli.research.predicting.measurements import load_measurements

    fit_options = _read_fit_options(cores_max, goal_loss, goal_fall, rate, arrivals, replicas, latency, percentile)
    if plot is not None:
        check_target(plot)
    read = load_measurements(file, kind)
    found = {
        name: _fits()[read.kind.name](rows, _title(read, name), fit_options) for name, rows in read.groups().items()
    }
    if as_json:
        views.print_json(_view(read, found))
    else:
        _print(read, found)
    if plot is not None:
        charts = [one.chart for one in found.values() if one.chart]
        if not charts:
            raise usage_error(f"nothing to plot into {plot}")
        write_plot(charts, plot)
        note(f"plotted to {plot}")


def show(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model, or a job's name; default: all.", show_default=False)
    ] = "",
    user: Annotated[str, typer.Option(metavar="TENANT", help="Only jobs of this tenant.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """Show the mesh's profiles of models.

    Shows measured rates, useful cores (θ), run times, and the predictors that estimate them.

    \b
    Examples:
      cotenant predict show
      cotenant predict show resnet50 --user vision
    """
    from cotenant.cli.research.predicting import knowing

    async def work(mesh: Mesh) -> list[Profile]:
        return [profile async for profile in knowing.profiles(mesh, model, user)]

    now = time.time()
    found = [knowing.profile_view(profile, now) for profile in with_mesh(Flags.of(context), work)]
    if as_json:
        views.print_json(found)
    elif not model:
        print_table(knowing.COLUMNS, [knowing.row(view) for view in found], nothing="no profiles yet")
    elif not found:
        raise CommandError(f"no profile of {model!r}", hint="list profiles with `cotenant predict show`")
    for index, view in enumerate(found if model and not as_json else ()):
        if index:
            print()
        print_card(knowing.card(view))


def record(
    context: typer.Context,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Only jobs of this tenant.")] = "",
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Of the N jobs submitted last that succeeded.")
    ] = 5_000,
    as_json: options.AsJson = False,
) -> None:
    """Show how right each predictor was about jobs that have succeeded.

    Compares the run time that was predicted when a job last started with the one that it had.

    \b
    Examples:
      cotenant predict record
      cotenant predict record --tenant vision --limit 500 --json
    """
    from cotenant.cli import prediction_record
    from cotenant.cli.research.predicting import judging

    jobs = with_mesh(Flags.of(context), lambda mesh: prediction_record.judged_jobs(mesh, tenant, limit))
    found = prediction_record.records_of(jobs)
    if as_json:
        views.print_json([prediction_record.record_view(*one) for one in found.items()])
        return
    print_table(
        judging.COLUMNS,
        [judging.row(*one) for one in found.items()],
        nothing="no job whose run time was predicted has succeeded yet",
    )
    for line in judging.notes(found):
        note(line)


def job(
    context: typer.Context,
    job: MapNode,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Job files; - is stdin.", show_default=False)
    ] = None,
    cores: Annotated[
        str, typer.Option(metavar="N,…", help="Also estimate for these core counts per replica: 1,2,4,8.")
    ] = "",
    nodes: Annotated[str, typer.Option(metavar="N,…", help="Also estimate for these node counts: 1,2.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """Estimate jobs without submitting them.

    Shows rate, remaining time, useful cores and latency, with confidence and the predictor that estimates them.

    For an unknown job, shows what would make it predictable.

    \b
    Examples:
      cotenant predict job job.yaml
      cotenant predict job --model resnet50 --gpus 1 --steps 90000 --cores 2,4,8 -- python3 train.py
    """
    from cotenant.cli.jobs.estimate_view import estimate_card
    from cotenant.cli.research.predicting import asking

    counts, spans = _counts("--cores", cores, CORES_MAX), _counts("--nodes", nodes, NODES_MAX)
    if (len(counts) or 1) * (len(spans) or 1) > asking.CANDIDATES_MAX:
        raise usage_error(f"--cores and --nodes combine to more than {asking.CANDIDATES_MAX} candidates")
    drafts = read_whatif_drafts(files or [], job, time.time())
    answers = with_mesh(Flags.of(context), lambda mesh: asking.ask(mesh, drafts, counts, spans))
    if as_json:
        views.print_json(answers)
        return
    for index, view in enumerate(answers):
        if index:
            print()
        print_card(
            [("name", view["name"]), ("model", view["model"] or ""), *estimate_card(view), *asking.further_card(view)]
        )
        columns, rows = asking.candidate_table(view)
        if rows:
            print()
            print_table(columns, rows)


def _counts(option: str, text: str, most: int) -> list[int]:
    """Return a list of whole numbers from 1.

    Raises:
        CommandError: the text is not such a list.
    """
    counts = []
    for part in text.split(",") if text else ():
        try:
            counts.append(parse_integer(part))
        except ValueError as error:
            raise usage_error(f"{option}: {error}") from None
        if not 1 <= counts[-1] <= most:
            raise usage_error(f"{option}: must be from 1 to {most}, not {counts[-1]}")
    return list(dict.fromkeys(counts))


def _fits() -> Mapping[str, Fit]:
    from cotenant.cli.research.predicting import curves, placements

    return {
        "cores": curves.fit_cores,
        "loss": curves.fit_loss,
        "latency": curves.fit_latency,
        "scaling": placements.fit_scaling,
        "parameter-server": placements.fit_teams,
    }


def _read_fit_options(
    cores_max: int,
    goal_loss: float | None,
    goal_fall: str,
    rate: float,
    arrivals: float,
    replicas: int,
    latency: str,
    percentile: float,
) -> FitOptions:
    """Return the options of a fit.

    Raises:
        CommandError: names every invalid option.
    """
    from cotenant.cli.research.predicting.fitting import FitOptions
    from cotenant.core.model.job import Qos
    from cotenant.core.model.loss_goal import LossGoal

    wrong, fall, steps, seconds = [], 0.0, 0, 0.0
    if goal_fall:
        try:
            least, _, over = goal_fall.partition("/")
            fall, steps = float(least), int(over)
            if not (0 < fall < float("inf") and steps > 0):
                raise ValueError
        except ValueError:
            wrong.append(f"--goal-fall must be FALL/STEPS such as 0.001/1000, not {goal_fall!r}")
    if latency:
        try:
            seconds = parse_seconds(latency)
        except ValueError as error:
            wrong.append(f"--latency {error}")
    if latency and not arrivals:
        wrong.append("--latency needs --arrivals: latency depends on the arrival rate")
    if cores_max > CORES_MAX:
        wrong.append(f"--cores-max must be at most {CORES_MAX}, not {cores_max}")
    figures = (("--goal-loss", goal_loss), ("--rate", rate), ("--arrivals", arrivals), ("--percentile", percentile))
    wrong += [
        f"{name} must be finite" for name, given in figures if given is not None and not abs(given) < float("inf")
    ]
    if wrong:
        raise usage_error("invalid options", details=wrong)
    promise = Qos(
        latency_seconds=seconds, latency_percentile=percentile if seconds else 0.0, arrivals_per_second=arrivals
    )
    return FitOptions(cores_max, LossGoal(goal_loss, steps, fall), rate, promise, replicas)


def _title(read: Measurements, group: tuple[str, str]) -> str:
    return ", ".join(sanitize(part) for part in group if part) or read.kind.about


def _view(read: Measurements, found: Mapping[tuple[str, str], FitResult]) -> views.View:
    fits = [{"model": model or None, "phase": phase or None, **one.view} for (model, phase), one in found.items()]
    return {"source": read.source, "kind": read.kind.name, "columns_ignored": list(read.ignored), "fits": fits}


def _print(read: Measurements, found: Mapping[tuple[str, str], FitResult]) -> None:
    ignored = f"; ignored columns: {', '.join(read.ignored)}" if read.ignored else ""
    note(f"{read.source}: {plural(len(read.rows), 'row')} of {read.kind.about} ({read.kind.name}){ignored}")
    for index, (group, one) in enumerate(found.items()):
        if index:
            print()
        if any(group):
            print(f"{_title(read, group)}:")
        print_card(one.card)
        if one.rows:
            print()
            print_table(one.columns, one.rows)
        if one.chart:
            print()
            _print_chart(one)


def _print_chart(one: FitResult) -> None:
    from cotenant.cli.research.predicting.chart import draw

    assert one.chart is not None
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDTH_MAX)
    try:
        "\u2812\u25cf".encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        note("no chart: this terminal lacks the characters; use --plot to write a file")
        return
    print("\n".join(draw(one.chart, width)))
