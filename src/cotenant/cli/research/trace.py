"""`cotenant trace`: summarize traces and convert them to Cotenant's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.progress_bar import Bar
from cotenant.cli.render import print_card
from cotenant.cli.research.simulation_options import RowWatcher, as_command_errors, stop_on_interrupt
from cotenant.cli.units import short_seconds

if TYPE_CHECKING:  # numpy is imported only to read a trace
    from cotenant.simulator import Trace
    from cotenant.simulator.traces.summary import Summary

SHOWN_MAX = 10  # counts in one line of the card, and rows that were skipped

Source = Annotated[str, typer.Argument(metavar="TRACE", help="Trace in any supported format; `sample` is bundled.")]
FormatName = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="Format of the trace; default: detected.")
]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad-rows", help="Skip unreadable rows and list them.")]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(help="Summarize traces and convert them to Cotenant's format.")
    group.command("show")(show)
    group.command("convert")(convert)
    app.add_typer(group, name="trace")


def show(
    source: Source,
    format_name: FormatName = None,
    skip_bad_rows: SkipBadRows = False,
    as_json: options.AsJson = False,
) -> None:
    """Summarize a trace.

    \b
    Examples:
      cotenant trace show sample
      cotenant trace show openb_pod_list_default.csv --skip-bad-rows --json
    """
    from cotenant.simulator.traces.summary import summary_of

    summary = summary_of(_read(source, format_name, skip_bad_rows))
    if as_json:
        print(json.dumps(summary.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_card(_card(summary))


def convert(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Output file: .csv, .csv.gz or .parquet.")],
    format_name: FormatName = None,
    skip_bad_rows: SkipBadRows = False,
    overlay: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,…", help="Apply this overlay first, as `simulate` does; needs --cluster."),
    ] = None,
    cluster: Annotated[str, typer.Option(metavar="SIZE", help="Cluster for the overlay: NxG[xC] or a file.")] = "",
) -> None:
    """Convert a trace to Cotenant's format.

    \b
    Examples:
      cotenant trace convert 11cb48.csv jobs.parquet
      cotenant trace convert sample jobs.csv --overlay models=synergy,cpu-jobs=openb --cluster 2x8x96
    """
    from cotenant.simulator import parse_cluster
    from cotenant.simulator.overlays import parse_overlays
    from cotenant.simulator.traces import write

    with as_command_errors():
        overlays = parse_overlays(overlay or ())
        if overlays and not cluster:
            raise usage_error("--overlay needs a cluster", hint="set it with --cluster")
        place = parse_cluster(cluster) if cluster else None
    trace = _read(source, format_name, skip_bad_rows)
    with as_command_errors():
        laid = overlays.apply(trace, place) if place else trace
        write(laid.jobs, target)
    note(f"wrote {len(laid):,} jobs to {target}")


def _read(source: str, format_name: str | None, skip_bad_rows: bool) -> Trace:
    from cotenant.simulator import load

    with as_command_errors(), stop_on_interrupt() as stop, Bar("rows read") as bar:
        trace = load(source, format_name, skip_bad_rows=skip_bad_rows, watch=RowWatcher(stop, bar))
    for row in trace.skipped[:SHOWN_MAX]:
        note(f"skipped: {row}")
    if more := trace.skipped[SHOWN_MAX:]:
        note(f"skipped: {len(more)} more rows")
    for text in trace.notes:
        note(f"note: {text}")
    return trace


def _card(summary: Summary) -> Iterator[tuple[str, str]]:
    work = summary.work_seconds
    yield "trace", f"{summary.source} ({summary.format})"
    yield "jobs", f"{summary.jobs:,}"
    yield "skipped rows", f"{summary.skipped_rows:,}" if summary.skipped_rows else ""
    yield "kinds", _counts(summary.kinds)
    yield "submitted over", short_seconds(summary.span_seconds)
    yield "GPU hours", f"{summary.gpu_hours:,.1f}"
    yield "core hours", f"{summary.core_hours:,.1f}" if summary.core_hours else ""
    yield "jobs by GPUs", _counts(_sizes(summary.sizes))
    yield "work", ", ".join(f"{name} {short_seconds(seconds)}" for name, seconds in work.items())
    yield "core requests", f"{summary.cores_asked:,} jobs a number, {summary.cores_auto:,} jobs auto"
    yield "tenants", f"{summary.tenants:,}"
    yield "users", f"{summary.users:,}" if summary.users else ""
    yield "models", _counts(summary.models)
    yield "priorities", _counts(summary.priorities) if len(summary.priorities) > 1 else ""
    yield "deadlines", f"{summary.deadlines:,}" if summary.deadlines else ""
    yield "ended", _counts(summary.ended)


def _sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return counts by size with all fractions of a GPU together: there may be many distinct ones.

    >>> _sizes({"0": 1, "0.3": 2, "0.5": 3, "1": 4})
    {'0': 1, '<1': 5, '1': 4}
    """
    together: dict[str, int] = {}
    for size, count in sizes.items():
        name = "<1" if 0 < float(size) < 1 else size
        together[name] = together.get(name, 0) + count
    return together


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{name}: {count:,}" for name, count in list(counts.items())[:SHOWN_MAX]]
    return ", ".join(shown) + (f", and {len(counts) - SHOWN_MAX} more" if len(counts) > SHOWN_MAX else "")
