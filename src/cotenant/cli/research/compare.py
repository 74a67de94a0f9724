"""`cotenant compare`: several policies (arms) on the same trace and cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import Exit, ExitCode, note
from cotenant.cli.progress_bar import Bar
from cotenant.cli.render import Column, print_table
from cotenant.cli.research.simulation_options import complete_arms, report_writer, stop_on_interrupt, with_scenario
from cotenant.cli.units import short_seconds

if TYPE_CHECKING:  # numpy and the core are imported only to simulate
    from cotenant.simulator.comparison.summary import Comparison, Spread
    from cotenant.simulator.scenario import Scenario

SEEDS_MAX = 1_000
FIGURES = (
    "avg_jct_seconds",
    "median_jct_seconds",
    "p99_jct_seconds",
    "avg_queue_seconds",
    "preemptions",
    "gpu_utilisation",
)
RATIO = Column("×", right=True)
COLUMNS = (
    Column("ARM", elastic=True),
    Column("AVERAGE JCT", right=True),
    RATIO,
    Column("MEDIAN", right=True),
    RATIO,
    Column("P99", right=True),
    RATIO,
    Column("QUEUEING", right=True),
    RATIO,
    Column("PREEMPTIONS", right=True),
    Column("GPU USE", right=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare")(with_scenario(compare))


def compare(
    scenario: Scenario,
    arms: Annotated[
        str,
        typer.Option(
            metavar="A,B,…",
            help="Profiles, or queue policies, optionally with options: full,las,fifo:mode=backfill.",
            autocompletion=complete_arms,
        ),
    ] = "",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=CHOICES",
            help="Another arm: queue policy or profile, GROUP=NAME and GROUP.KEY=VALUE; repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=SEEDS_MAX, help="Number of seeds for randomized arms.")
    ] = 1,
    jobs: Annotated[int, typer.Option(metavar="N", min=0, max=1024, help="Processes; 0: one per available core.")] = 0,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML report.")] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report's plots as PNG files as well.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; `about` in it explains it.")] = False,
) -> None:
    """Run several arms on the same trace and cluster and compare them with the first.

    Settings that an arm does not give are those of the shared options.

    \b
    Examples:
      cotenant compare --trace sample --cluster 2x8 --arms fifo,las,srsf
      cotenant compare --trace sample --cluster 2x8 --arms full,plain,paper:aiturbo
      cotenant compare --trace sample --cluster 2x8 --arms fifo,fifo:mode=backfill --report report.html
      cotenant compare --trace sample --cluster 2x8 --arms las --seeds 5 \\
          --arm 'guess=srsf,predictor=noisy-oracle,predictor.spread=0.5' --arm 'spread out=las,placement=count'
    """
    from cotenant.simulator.comparison.arms import arms_of
    from cotenant.simulator.comparison.summary import compare

    names = [name for name in arms.split(",") if name.strip()]
    wanted = arms_of(names, arm or (), scenario)
    write = report_writer(report, png)
    with stop_on_interrupt() as stop, Bar("runs") as bar:
        comparison = compare(
            wanted,
            seeds=seeds,
            processes=jobs or len(os.sched_getaffinity(0)),
            drawn=write is not None,
            stopped=lambda: stop.asked,
            progress=bar.show,
        )
    _print_comparison(comparison, as_json=as_json)
    if write and comparison.runs.complete:
        write(comparison)
    if not comparison.runs.complete:
        raise Exit(ExitCode.INTERRUPTED)


def _print_comparison(comparison: Comparison, *, as_json: bool) -> None:
    for text in comparison.notes:
        note(f"note: {text}")
    if as_json:
        print(json.dumps(comparison.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    print_table(COLUMNS, [*_rows(comparison), *_bounds(comparison)])
    print(f"×: relative to {comparison.baseline}")
    if comparison.bound:
        print("pooled srsf: shortest remaining service first, known in advance, with all GPUs in one server")
        print("lower bound: no schedule of these jobs on this many GPUs has a smaller average")


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    for arm in comparison.runs.arms:
        figures = comparison.figures(arm.label)
        ratios = comparison.ratios(arm.label) if arm.label != comparison.baseline else {}
        yield [arm.label, *_cells(figures, ratios, lambda spread: (spread.mean, spread.mean))]
        if any(len(figure.per_seed) > 1 for figure in figures.values()):
            yield [
                f"  over {len(comparison.runs.by_arm[arm.label])} seeds",
                *_cells(figures, ratios, lambda spread: (min(spread.per_seed), max(spread.per_seed))),
            ]


def _cells(
    figures: Mapping[str, Spread], ratios: Mapping[str, Spread], ends: Callable[[Spread], tuple[float, float]]
) -> Iterator[str]:
    for name in FIGURES:
        figure, ratio = figures.get(name), ratios.get(name)
        yield _range(*(_format(name, end) for end in ends(figure))) if figure else "-"
        if name.endswith("_seconds"):
            yield _range(*(_ratio(end) for end in ends(ratio))) if ratio else ""


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _bounds(comparison: Comparison) -> Iterator[list[str]]:
    """Yield rows with bounds on what any schedule can achieve."""
    if bound := comparison.bound:
        base = bound.arms[comparison.baseline]
        for label, seconds in (
            ("(pooled srsf)", bound.pooled_srsf_avg_jct_seconds),
            ("(lower bound)", bound.avg_jct_seconds_min),
        ):
            ratio = _ratio(seconds / base) if base else ""
            yield [label, short_seconds(seconds), ratio, *[""] * (len(COLUMNS) - 3)]


def _ratio(ratio: float) -> str:
    """Return a ratio with two decimals, or two digits if it is small.

    >>> [_ratio(ratio) for ratio in (1.234, 0.98, 0.00123)]
    ['1.23', '0.98', '0.0012']
    """
    return f"{ratio:.2f}" if ratio >= 0.1 or not ratio else f"{ratio:.2g}"


def _format(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return short_seconds(value)
    return f"{value:.1%}" if name.endswith("_utilisation") else f"{value:,.0f}"
