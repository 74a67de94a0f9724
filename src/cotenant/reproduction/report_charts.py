"""Draws the charts of findings, in the style of all our reports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cotenant.reproduction.model import Chart, Line, Shape
from cotenant.simulator.report.plots import WIDTH, Plot
from cotenant.simulator.report.style import INK, MUTED, color, dashes

HEIGHT = 4.2  # inches
GROUP_WIDTH = 0.8  # of the distance between two groups of bars
MARKERS = "osD^vPX"


def draw(chart: Chart) -> Plot:
    """Return the plot of a chart; call it within the style context of our reports."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    {Shape.BARS: _bars, Shape.LINES: _lines, Shape.STEPS: _steps}[chart.shape](axes, chart)
    for text, y in chart.marks:
        axes.axhline(y, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
        axes.annotate(
            text, (1, y), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", fontsize=8
        )
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(axis="y")
    if len(chart.lines) > 1:
        axes.legend(
            frameon=False, fontsize=8.5, ncols=min(4, len(chart.lines)), loc="lower left", bbox_to_anchor=(0, 1)
        )
    return Plot(chart.name, chart.title, chart.caption, figure)


def _bars(axes: Axes, chart: Chart) -> None:
    width = GROUP_WIDTH / len(chart.lines)
    places = np.arange(len(chart.x))
    for number, line in enumerate(chart.lines):
        at = places + (number - (len(chart.lines) - 1) / 2) * width
        axes.bar(at, line.y, width=width * 0.92, color=color(number), label=line.label)
        if line.low:
            axes.vlines(at, line.low, line.high, color=INK, linewidth=1.3)
    axes.set_xticks(places, [str(x) for x in chart.x])
    axes.axhline(0, color=MUTED, linewidth=0.8)


def _lines(axes: Axes, chart: Chart) -> None:
    for number, line in enumerate(chart.lines):
        x = _numbers(line.x or chart.x)
        axes.plot(
            x,
            line.y,
            color=color(number),
            linestyle=dashes(number),
            marker=MARKERS[number % 7],
            markersize=4,
            label=line.label,
        )
        if line.low:
            axes.fill_between(x, line.low, line.high, color=color(number), alpha=0.15, linewidth=0)
    if chart.log_x:
        axes.set_xscale("log")


def _steps(axes: Axes, chart: Chart) -> None:
    for number, line in enumerate(chart.lines):
        x, y = _cumulative(line)
        axes.plot(x, y, color=color(number), linestyle=dashes(number), label=line.label)
    if chart.log_x:
        axes.set_xscale("log")
    axes.set_ylim(0, 101)


def _cumulative(line: Line) -> tuple[list[float], list[float]]:
    x = sorted(line.x)
    return x, [100.0 * (number + 1) / len(x) for number in range(len(x))]


def _numbers(x: Sequence[str] | Sequence[float]) -> list[float]:
    return [float(one) for one in x]
