"""Findings as plain values, as Markdown and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cotenant.reproduction.model import Cell, Measured, Table
from cotenant.reproduction.runner import Reproduced
from cotenant.simulator.comparison.summary import Spread
from cotenant.simulator.recording.event_file import versions

BOUND = "bound"  # a column only where a claim has one


def claim_columns(measured: Sequence[Measured]) -> tuple[str, ...]:
    """Return the titles of the table of claims."""
    bound = (BOUND,) if any(one.bound for one in measured) else ()
    return ("claim", "workload", "ours", "against", "published", "here", "spread", *bound, "verdict", "predictions")


def claim_rows(measured: Sequence[Measured]) -> Iterator[tuple[str, ...]]:
    """Yield each measured claim as a row of `claim_columns`."""
    bounds = any(one.bound for one in measured)
    for one in measured:
        claim, sign = one.claim, "up to " if one.claim.most else ""
        yield (
            claim.text,
            one.workload,
            one.arm,
            one.base,
            f"{sign}{_figure(claim.published, claim.unit)}" if claim.figure else "no figure",
            _figure(one.ours.mean, claim.unit) if one.ours else "-",
            _ends(one.ours, claim.unit) if one.ours else "-",
            *((_figure(one.bound.mean, claim.unit) if one.bound else "-",) if bounds else ()),
            one.verdict.value,
            one.predictions,
        )


def _figure(value: float, unit: str) -> str:
    """Return a figure with its unit.

    >>> _figure(20.83, "%"), _figure(3.0, "×"), _figure(-1049.6, "s"), _figure(-75.4, "s")
    ('+20.8 %', '3.00×', '-1,050 s', '-75.4 s')
    """
    if unit == "×":
        return f"{value:.2f}×"
    if unit == "%":
        return f"{value:+.1f} %"
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 100 else f"{value:.3g} {unit}".strip()


def _ends(spread: Spread, unit: str) -> str:
    if len(spread.per_seed) == 1:
        return "one seed"
    least, most = min(spread.per_seed), max(spread.per_seed)
    return f"{_figure(least, unit)} to {_figure(most, unit)}, {len(spread.per_seed)} seeds"


def ran(found: Reproduced) -> str:
    """Return a sentence on what was run, its cost, and whether it was cut short."""
    what, seeds = "quick" if found.asked.quick else "full", ", ".join(map(str, found.asked.seeds))
    before = f", {found.kept} of them from the cache" if found.kept else ""
    spent = f"{found.wall_seconds:.0f} s, {found.processor_seconds:,.0f} s of CPU time{' in total' * bool(found.kept)}"
    cut = "" if found.complete else f"; cut short: {found.done} of {found.of} runs were done, and only they count"
    return f"The {what} version: {found.done} runs with seeds {seeds}{before}; {spent}{cut}."


def written(cell: Cell, form: str) -> str:
    """Return a cell of a table as text; NaN is a dash.

    >>> written(0.5, ".0%"), written("a", ".0%"), written(float("nan"), ".1f")
    ('50%', 'a', '-')
    """
    if isinstance(cell, str):
        return cell
    return "-" if cell != cell else format(cell, form)


def table_rows(table: Table) -> list[list[str]]:
    """Return a table's cells formatted by column."""
    return [[written(cell, form) for cell, form in zip(row, table.formats, strict=True)] for row in table.rows]


def as_json(found: Reproduced) -> dict[str, Any]:
    """Return it as plain values."""
    paper = found.paper
    return {
        "paper": paper.name,
        "title": paper.title,
        "reference": paper.reference,
        "quick": found.asked.quick,
        "seeds": list(found.asked.seeds),
        "data": found.asked.data.directory is not None,
        "complete": found.complete,
        "cases": {"done": found.done, "of": found.of, "kept": found.kept},
        "claims": [_measured_json(one) for one in found.findings.measured],
        "tables": [
            asdict(table) | {"rows": [list(map(_plain, row)) for row in table.rows]} for table in found.findings.tables
        ],
        "charts": [asdict(chart) for chart in found.findings.charts],
        "assumptions": list(paper.assumptions),
        "unsaid": list(paper.unsaid),
        "versions": versions(),
        "wall_seconds": round(found.wall_seconds, 3),
        "processor_seconds": round(found.processor_seconds, 3),
    }


def _plain(cell: Cell) -> Cell | None:
    return None if isinstance(cell, float) and cell != cell else cell


def _measured_json(one: Measured) -> dict[str, Any]:
    ours = one.ours
    return {
        "name": one.claim.name,
        "text": one.claim.text,
        "workload": one.workload,
        "arm": one.arm,
        "base": one.base,
        "published": one.claim.published if one.claim.figure else None,
        "unit": one.claim.unit,
        "better": one.claim.better.value,
        "source": one.claim.source,
        "mean": ours.mean if ours else None,
        "sd": ours.sd if ours else None,
        "per_seed": list(ours.per_seed) if ours else [],
        "bound": one.bound.mean if one.bound else None,
        "verdict": one.verdict.value,
        "learned": one.learned,
        "drawn_names": one.drawn_names,
        "why": one.why,
    }


def markdown(found: Reproduced) -> str:
    """Return the findings as Markdown, as in docs/reproduction.md."""
    lines = [*_markdown_table(claim_columns(found.findings.measured), list(claim_rows(found.findings.measured)))]
    told: dict[tuple[str, str], list[str]] = {}  # the workloads with the same remark on a claim
    for one in found.findings.measured:
        if one.why:
            told.setdefault((one.claim.text, one.why), []).append(one.workload)
    lines += [""] * bool(told)
    lines += [f"- {text} ({'; '.join(workloads)}): {why}" for (text, why), workloads in told.items()]
    for table in found.findings.tables:
        lines += ["", f"**{table.title}**", "", *_markdown_table(table.columns, table_rows(table))]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def page(found: Reproduced, plots: Sequence[tuple[Any, str]]) -> str:
    """Return the page of a report: one self-contained HTML file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from cotenant.simulator import report
    from cotenant.simulator.report.components import parts

    folders = [Path(__file__).parent, Path(report.__file__).parent]
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("reproduction.html.j2").render(
        paper=found.paper,
        found=found,
        columns=claim_columns(found.findings.measured),
        claims=list(zip(found.findings.measured, claim_rows(found.findings.measured), strict=True)),
        tables=[(table, table_rows(table)) for table in found.findings.tables],
        plots=[(plot, Markup(svg)) for plot, svg in plots],  # drawn by us; matplotlib escapes its texts
        versions=versions(),
        verdict=verdict(found.findings.measured),
        **parts(),
    )


def verdict(measured: Sequence[Measured]) -> str:
    """Return in a sentence how many claims were met; "" without claims."""
    if not measured:
        return ""
    counts = Counter(one.verdict.value for one in measured)
    return f"{len(measured)} claims: {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
