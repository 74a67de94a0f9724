"""Writes a report: draws the plots, renders the page, and checks in advance that it can."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cotenant.extras import how_to_install

if TYPE_CHECKING:
    from cotenant.simulator.comparison.summary import Comparison
    from cotenant.simulator.report.plots import Plot

LANES_MAX = 64  # maximum GPUs of a cluster whose runs are drawn GPU by GPU
LANES_ARMS_MAX = 6
PNG_DOTS_PER_INCH = 160
PNG_COLORS = 128


class BadReport(Exception):
    """A report that cannot be written; the message is one sentence."""


def writer(report: Path | None, png: Path | None) -> Callable[[Comparison], None]:
    """Return a function that writes a report to a file, and its plots into a directory.

    Raises:
        BadReport: a package is missing, or the target is not writable; also while it is being written.
    """

    def page_of(comparison: Comparison, drawn: Drawn) -> str:
        from cotenant.simulator.report.page import page

        return page(comparison, drawn)

    return writer_of(plots_of, page_of, report, png)


Subject = TypeVar("Subject")
Drawn = Sequence[tuple["Plot", str]]  # with its SVG


def writer_of(
    plots_of: Callable[[Subject], Sequence[Plot]],
    page_of: Callable[[Subject, Drawn], str],
    report: Path | None,
    png: Path | None,
) -> Callable[[Subject], None]:
    """Return a function that draws and writes any kind of report.

    Raises:
        BadReport: a package is missing, or the target is not writable; also while it is being written.
    """
    try:
        import jinja2  # noqa: F401 - only whether it is there
        import matplotlib as mpl  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise BadReport(f"a report needs {error.name}: {how_to_install('research')}") from error
    if report is not None and (report.is_dir() or not report.absolute().parent.is_dir()):
        raise BadReport(f"the report cannot be written to {report}: it is a directory, or its directory does not exist")
    if png is not None:
        with _reporting_errors(png):
            png.mkdir(parents=True, exist_ok=True)

    def write(subject: Subject) -> None:
        plots = plots_of(subject)
        if png is not None:
            with _reporting_errors(png):
                for plot in plots:
                    _write(png / f"{plot.name}.png", _png(plot))
        if report is not None:
            with _reporting_errors(report):
                _write(report, page_of(subject, [(plot, svg_of(plot)) for plot in plots]).encode())

    return write


@contextmanager
def _reporting_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadReport(f"{path} cannot be written: {error.strerror or error}") from error


def _write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def plots_of(comparison: Comparison) -> list[Plot]:
    """Return all plots that have data."""
    from cotenant.simulator.clusters.cluster_argument import parse_cluster
    from cotenant.simulator.report import plots
    from cotenant.simulator.report.style import look

    cluster = parse_cluster(comparison.runs.arms[0].scenario.cluster)
    gpus = [shape.gpus for shape in cluster.shapes]
    with look():
        arms = plots.drawn_of(comparison)
        drawn = [plots.averages(comparison)]
        if any(len(arm.jobs.ids) for arm in arms):
            drawn += [plots.distributions(arms), plots.over_time(arms, cluster.gpus, cluster.cores)]
            drawn += [plots.waits(comparison), plots.by_size(arms)]
        if sum(gpus) <= LANES_MAX:
            drawn += [plots.lanes(arm, gpus) for arm in arms[:LANES_ARMS_MAX] if arm.series.bars]
        return drawn


def svg_of(plot: Plot) -> str:
    """Return a plot as SVG for the page: with the page's color variables, unique ids, and no external references."""
    from cotenant.simulator.report.style import VARIABLES, look

    out = io.StringIO()
    with look():
        plot.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|\burl\(#|href="#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(r' xmlns:xlink="[^"]*"| version="1.1"| xmlns="[^"]*"', "", svg, count=3).replace("xlink:href", "href")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is finer than anyone can see
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def _png(plot: Plot) -> bytes:
    """Return a plot as PNG, with few colors so that the file is small."""
    from PIL import Image  # comes with matplotlib

    from cotenant.simulator.report.style import PAPER, look

    out = io.BytesIO()
    with look():
        plot.figure.savefig(out, format="png", dpi=PNG_DOTS_PER_INCH, facecolor=PAPER, metadata={"Software": None})
    small = io.BytesIO()
    with Image.open(out) as image:
        image.convert("RGB").quantize(PNG_COLORS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()
