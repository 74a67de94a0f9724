"""The style of plots: colors that color-blind readers can distinguish, and axes with familiar time units.

Plots are drawn in the colors of the light page. In the page each of these becomes a variable of its style sheet, so
that the same plot also works on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

INK, MUTED, FAINT, PAPER = "#1b2127", "#616b75", "#dfe3e7", "#fefefe"
ARMS = ("#7b858f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a63d2")  # after Okabe and Ito
WAITS = {"capacity": "#9aa5b0", "fragmentation": "#e8a200", "fair_share": "#c76ea0"}
VARIABLES: Mapping[str, str] = {
    INK: "ink",
    MUTED: "muted",
    FAINT: "faint",
    PAPER: "paper",
    **{color: f"arm{number}" for number, color in enumerate(ARMS)},
    **{color: f"wait-{name.replace('_', '-')}" for name, color in WAITS.items()},
}
_RC: dict[Any, Any] = {  # their names are literals in matplotlib's types
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,  # a job may be called $x$
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "cotenant",
}
TIMES: Sequence[tuple[float, str]] = (
    (1, "1 s"),
    (10, "10 s"),
    (60, "1 min"),
    (600, "10 min"),
    (3600, "1 h"),
    (21_600, "6 h"),
    (86_400, "1 d"),
    (864_000, "10 d"),
    (8_640_000, "100 d"),
    (86_400_000, "1000 d"),
)


def look() -> AbstractContextManager[None]:
    """Return the context of our style, whatever the user's own settings."""
    plain: dict[Any, Any] = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    return mpl.rc_context({**plain, **_RC})


def color(number: int) -> str:
    """Return the color of an arm; the first, with which the others are compared, is gray."""
    return ARMS[number % len(ARMS)]


def dashes(number: int) -> str:
    """Return a line style that distinguishes arms with the same color."""
    return ("-", "--", ":", "-.")[number // len(ARMS) % 4]


def log_times(axes: Axes, *, on_x: bool) -> None:
    """Set a logarithmic axis of seconds with familiar labels."""
    axis = axes.xaxis if on_x else axes.yaxis
    (axes.set_xscale if on_x else axes.set_yscale)("log")
    axis.set_major_locator(FixedLocator([seconds for seconds, _ in TIMES]))
    axis.set_minor_locator(NullLocator())
    names = dict(TIMES)
    axis.set_major_formatter(FuncFormatter(lambda value, _: names.get(value, "")))


def span_of(seconds: float) -> tuple[float, str]:
    """Return the unit of an axis that begins at 0: its seconds, and its name.

    >>> span_of(90_000), span_of(90)
    ((3600.0, 'hours'), (1.0, 'seconds'))
    """
    for unit, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * unit:
            return unit, name
    return 1.0, "seconds"
