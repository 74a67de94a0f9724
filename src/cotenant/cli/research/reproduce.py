"""`cotenant reproduce`: the results of five papers, measured again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import CommandError, Exit, ExitCode, note, usage_error
from cotenant.cli.progress_bar import Bar
from cotenant.cli.render import Column, print_table
from cotenant.cli.research.simulation_options import stop_on_interrupt

if TYPE_CHECKING:  # numpy and the core are imported only to simulate
    from collections.abc import Iterator

    from cotenant.reproduction.model import Asked, Paper
    from cotenant.reproduction.runner import Reproduced

SEEDS = 5
SEEDS_MAX = 100
ALL = "all"
CLAIM = (
    Column("CLAIM", elastic=True),
    Column("WORKLOAD"),
    Column("POLICY"),
    Column("BASELINE"),
    Column("PUBLISHED", right=True),
    Column("MEASURED", right=True),
    Column("SPREAD"),
    Column("VERDICT", styled=True),
    Column("PREDICTIONS"),
)
BOUND = Column("BOUND", right=True)  # before the verdict, where a claim has one


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce")(reproduce)


def _offer(incomplete: str) -> list[str]:
    from cotenant.reproduction.papers import NAMES

    return [name for name in (*NAMES, ALL) if name.startswith(incomplete)]


def reproduce(
    paper: Annotated[
        str,
        typer.Argument(
            metavar="PAPER", help="coda, genie, aiturbo, philly, xiao, twins, or all.", autocompletion=_offer
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A version of about a minute: smaller workloads, fewer settings.")
    ] = False,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=SEEDS_MAX, help="Number of seeds.")] = SEEDS,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="First seed.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Public traces named in docs/reproduction.md; default: only bundled traces."),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=0, max=1024, help="Processes; 0: one per available core.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Cache results of finished runs in DIR, and reuse those of the same code."),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML report.")] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report's plots as PNG files as well.")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object; for `all`, a list of objects.")] = False,
) -> None:
    """Run a paper's comparison on public workloads and compare the results with the published ones.

    Each claim gets a verdict: exceeded, reached (within 2 % or one standard deviation), missed, or open if it was not
    measured. Ctrl-C prints the results so far; with --keep the next run continues from there. docs/reproduction.md
    describes the method and every assumption.

    \b
    Examples:
      cotenant reproduce coda --quick
      cotenant reproduce philly --report philly.html --keep report/kept
      cotenant reproduce twins      live, on two CPUs of this machine, next to the simulation
      cotenant reproduce all --quick --json > figures.json
    """
    from cotenant.reproduction.model import Asked, Data
    from cotenant.reproduction.papers import NAMES
    from cotenant.reproduction.papers import paper as load

    if paper not in (*NAMES, ALL):
        raise usage_error(f"unknown paper {paper!r}", hint=f"papers are {', '.join(NAMES)}, or all")
    if report is not None and paper == ALL:
        raise usage_error(
            "--report takes one paper, not all",
            hint="run it once per paper: cotenant reproduce coda --report coda.html",
        )
    write = _writer(report, png)
    found: list[Reproduced] = []
    with _as_command_errors(), stop_on_interrupt() as stop:
        for name in NAMES if paper == ALL else (paper,):
            asked = Asked(quick, tuple(range(seed, seed + seeds)), Data(data))
            found.append(_run(load(name), asked, jobs, keep, lambda: stop.asked))
            if not (as_json or as_markdown):
                _print_findings(found[-1])
            if stop.asked:
                break
    if as_json:
        _print_json(found, many=paper == ALL)
    elif as_markdown:
        _print_markdown(found)
    if write:
        for one in found:
            write(one)
    if not all(one.complete for one in found):
        raise Exit(ExitCode.INTERRUPTED)


def _run(paper: Paper, asked: Asked, jobs: int, keep: Path | None, stopped: Callable[[], bool]) -> Reproduced:
    from cotenant.reproduction.runner import processes_for, reproduce

    processes, why = processes_for(jobs or len(os.sched_getaffinity(0)))
    if why:
        note(f"note: {why}")
    with Bar(f"{paper.name}: runs") as bar:
        return reproduce(paper, asked, processes=processes, keep=keep, stopped=stopped, progress=bar.show)


@contextmanager
def _as_command_errors() -> Iterator[None]:
    """Translate errors of a reproduction into command errors."""
    from cotenant.reproduction.cache import BadDirectory
    from cotenant.reproduction.model import BadData
    from cotenant.reproduction.runner import CaseFailed
    from cotenant.simulator.traces import BadTrace

    try:
        yield
    except (BadData, BadDirectory, BadTrace) as error:
        raise usage_error(str(error)) from error
    except CaseFailed as error:
        raise CommandError(str(error)) from error


def _writer(report: Path | None, png: Path | None) -> Callable[[Reproduced], None] | None:
    if report is None and png is None:
        return None
    from cotenant.simulator.report.writing import BadReport, writer_of

    def plots_of(found: Reproduced) -> Sequence[object]:
        from cotenant.reproduction.report_charts import draw
        from cotenant.simulator.report.style import look

        name = found.paper.name  # two papers may have a chart of the same name, and their files one directory
        with look():
            return [draw(replace(chart, name=f"{name}-{chart.name}")) for chart in found.findings.charts]

    def page_of(found: Reproduced, drawn: Sequence[tuple[object, str]]) -> str:
        from cotenant.reproduction.report import page

        return page(found, drawn)

    try:
        return writer_of(plots_of, page_of, report, png)  # type: ignore[arg-type]  # plots, which load slowly
    except BadReport as error:
        raise usage_error(str(error)) from error


def _print_findings(found: Reproduced) -> None:
    from cotenant.reproduction.report import claim_rows, ran, table_rows

    print(f"{found.paper.title}\n{found.paper.reference}\n")
    rows = list(claim_rows(found.findings.measured))
    bounded = [*CLAIM[:-2], BOUND, *CLAIM[-2:]]
    print_table(bounded if rows and len(rows[0]) > len(CLAIM) else CLAIM, rows, nothing="nothing was measured")
    for one in found.findings.measured:
        if one.why:
            print(f"{one.claim.name}, {one.workload}: {one.why}")
    for table in found.findings.tables:
        print(f"\n{table.title}")
        columns = [
            Column(title.upper(), right=bool(form)) for title, form in zip(table.columns, table.formats, strict=True)
        ]
        print_table(columns, table_rows(table))
        if table.note:
            print(table.note)
    print(f"\n{ran(found)}\n")


def _print_json(found: Sequence[Reproduced], *, many: bool) -> None:
    from cotenant.reproduction.report import as_json

    objects = [as_json(one) for one in found]
    print(json.dumps(objects if many else objects[0], indent=2, ensure_ascii=False, allow_nan=False))


def _print_markdown(found: Sequence[Reproduced]) -> None:
    from cotenant.reproduction.report import markdown, ran

    for one in found:
        print(f"## {one.paper.title}\n\n{one.paper.reference}. {ran(one)}\n\n{markdown(one)}")
