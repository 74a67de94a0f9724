"""Charts drawn by matplotlib, which comes with the extra `research`."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.cli.outcome import CommandError, usage_error
from cotenant.cli.research.predicting.chart import POINTS_APART_FROM, Chart

if TYPE_CHECKING:  # matplotlib is slow to import and optional
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg", ".html")
WIDTH_INCHES, HEIGHT_INCHES, DPI = 7.2, 4.0, 160
CHARTS_MAX = 24


def check_target(path: Path) -> None:
    """Check before any work whether a plot can be written to a path.

    Raises:
        CommandError: its suffix is not a format, or its directory does not exist.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise usage_error(f"--plot must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, not {path.name!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise usage_error(f"--plot: {path} is a directory, or its parent directory does not exist")
    import matplotlib as mpl  # noqa: F401 - checks that it is installed


def write_plot(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts one below the other into one file.

    Raises:
        CommandError: the file cannot be written.
    """
    ending = path.suffix.lower()
    image = _image(charts[:CHARTS_MAX], "png" if ending == ".png" else "svg")
    if ending == ".html":
        image = _page(charts, image.decode()).encode()
    try:
        path.write_bytes(image)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None


def _image(charts: Sequence[Chart], format_name: str) -> bytes:
    from matplotlib.figure import Figure

    from cotenant.simulator.report.style import PAPER, look

    with look():
        drawn = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * len(charts)), layout="constrained", facecolor=PAPER)
        for axes, chart in zip(drawn.subplots(len(charts), 1, squeeze=False)[:, 0], charts, strict=True):
            _draw(axes, chart)
        written = io.BytesIO()
        drawn.savefig(written, format=format_name, dpi=DPI, metadata={"Date": None} if format_name == "svg" else None)
    return written.getvalue()


def _draw(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    from cotenant.simulator.report.style import INK, MUTED, color

    if chart.band:
        xs, lows, highs = zip(*chart.band, strict=True)
        axes.fill_between(xs, lows, highs, color=color(1), alpha=0.15, linewidth=0, label="10th to 90th percentile")
    for number, (name, points) in enumerate(chart.lines.items(), 1):
        axes.plot(*zip(*points, strict=True), color=color(number), label=name)
    if chart.points:
        xs, ys = zip(*chart.points, strict=True)
        crowded = len(chart.points) > POINTS_APART_FROM
        axes.scatter(xs, ys, s=8 if crowded else 26, color=INK, zorder=1 if crowded else 3, label="measured")
    for name, x in (chart.bounds or {}).items():
        axes.axvline(x, color=MUTED, linestyle="--", linewidth=1.0, label=name)
    if chart.x_is_log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(*chart.y_range)
    if chart.planned:
        bottom = [chart.y_range[0]] * len(chart.planned)
        axes.scatter(
            chart.planned, bottom, s=40, marker="^", color=color(2), zorder=4, clip_on=False, label="measure next"
        )
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    axes.grid(visible=True, axis="y")
    axes.legend(frameon=False, fontsize=8)


def _page(charts: Sequence[Chart], svg: str) -> str:
    title = html.escape(charts[0].title if len(charts) == 1 else f"{len(charts)} fits")
    drawn = svg[svg.index("<svg") :]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body { margin: 2rem auto; max-width: 60rem; } svg { width: 100%; height: auto; }</style>\n"
        f"<body>{drawn}</body></html>\n"
    )
