"""The plots of a report. Each shows one thing; arms are labeled at their lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Affine2D

from cotenant.core.model.job_table import Floats
from cotenant.simulator.comparison.runner import JobColumns
from cotenant.simulator.comparison.summary import Comparison
from cotenant.simulator.comparison.time_series import TimeSeries, merged
from cotenant.simulator.report.style import FAINT, INK, MUTED, PAPER, WAITS, color, dashes, log_times, span_of

WIDTH = 10.5  # inches
STEPS_MAX = 240  # along a time axis: anything finer is noise
SIZES = ((0.0, "no GPU"), (0.999, "< 1"), (1.0, "1"), (2.0, "2"), (4.0, "3–4"), (8.0, "5–8"), (16.0, "9–16"))
SIZES_MORE = "> 16"
QUEUE_SECONDS_MIN = 1.0


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: `name` for its file, `title` and `caption` for readers."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Drawn:
    """An arm's first run, as drawn."""

    number: int
    label: str
    jobs: JobColumns
    series: TimeSeries

    @property
    def color(self) -> str:
        """The arm's color."""
        return color(self.number)


def drawn_of(comparison: Comparison) -> list[Drawn]:
    """Return the arms that can be drawn."""
    return [
        Drawn(number, shown(arm.label), ran.jobs, ran.series)
        for number, arm in enumerate(comparison.runs.arms)
        for ran in comparison.runs.by_arm[arm.label][:1]
        if ran.jobs is not None and ran.series is not None
    ]


def shown(label: str, most: int = 32) -> str:
    """Return a label shortened for a plot."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def digits(value: float) -> str:
    """Return a figure with at least three digits.

    >>> digits(12_345.6), digits(12.345), digits(0.012345)
    ('12,346', '12.3', '0.0123')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def averages(comparison: Comparison) -> Plot:
    """Return the average JCT of each arm, its spread over the seeds, and the lower bound."""
    arms = [arm.label for arm in comparison.runs.arms]
    spreads = [comparison.figures(label).get("avg_jct_seconds") for label in arms]
    unit, name = span_of(max((spread.mean for spread in spreads if spread), default=1.0))
    figure = Figure(figsize=(WIDTH, 0.42 * len(arms) + 1.35), layout="constrained")
    axes = figure.subplots()
    for number, spread in enumerate(spreads):
        if spread is None:
            continue
        axes.barh(number, spread.mean / unit, height=0.62, color=color(number))
        if len(spread.per_seed) > 1:
            ends = [min(spread.per_seed) / unit, max(spread.per_seed) / unit]
            axes.plot(ends, [number, number], color=INK, linewidth=1.4, marker="|", markersize=7)
        end = max(spread.per_seed) / unit
        axes.annotate(digits(spread.mean / unit), (end, number), (5, 0), textcoords="offset points", va="center")
    _bound_lines(axes, comparison, unit, len(arms))
    axes.set_yticks(range(len(arms)), [shown(label) for label in arms])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlabel(f"average JCT ({name})")
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.08)
    strokes = "; strokes reach from the minimum to the maximum over the seeds" if len(comparison.seeds) > 1 else ""
    caption = f"Shorter is better. Bars are means over the seeds{strokes}." if strokes else "Shorter is better."
    return Plot("averages", "Average job completion time", caption, figure)


def _bound_lines(axes: Axes, comparison: Comparison, unit: float, rows: int) -> None:
    if bound := comparison.bound:
        for seconds, text, style, side in (
            (bound.avg_jct_seconds_min, "lower bound ", "-", "right"),
            (bound.pooled_srsf_avg_jct_seconds, " pooled srsf", (0, (4, 3)), "left"),
        ):
            axes.axvline(seconds / unit, color=INK, linewidth=1.2, linestyle=style)
            axes.annotate(text, (seconds / unit, -0.62), ha=side, va="bottom", fontsize=8, annotation_clip=False)
        axes.set_ylim(-0.6, rows - 0.4)


def distributions(arms: Sequence[Drawn]) -> Plot:
    """Return the cumulative distributions of JCT and of waiting time."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _cumulative(left, arms, [arm.jobs.jct_seconds for arm in arms], 0.0)
    _cumulative(right, arms, [arm.jobs.queue_seconds for arm in arms], QUEUE_SECONDS_MIN)
    left.set(title="JCT", xlabel="JCT, logarithmic", ylabel="share of jobs (%)")
    right.set(title="Queueing", xlabel="time spent waiting, logarithmic; left edge: none")
    caption = "Each line shows the share of jobs with at most this time. Further to the left is better."
    return Plot("distributions", "How long jobs took, and how long they waited", caption, figure)


def _cumulative(axes: Axes, arms: Sequence[Drawn], columns: Sequence[Floats], least: float) -> None:
    quantiles = np.linspace(0, 1, 401)
    lines = [np.maximum(np.quantile(column, quantiles), max(least, 1e-3)) for column in columns if len(column)]
    for arm, line in zip((arm for arm, column in zip(arms, columns, strict=True) if len(column)), lines, strict=True):
        begin = max(
            0, int(np.searchsorted(line, least, side="right")) - 1
        )  # jobs that never waited are left of the edge
        axes.plot(line[begin:], quantiles[begin:] * 100, color=arm.color, linestyle=dashes(arm.number))
    log_times(axes, on_x=True)
    axes.set_ylim(0, 100)
    if lines:
        axes.set_xlim(max(least, min(line[4] for line in lines)), max(line[-1] for line in lines) * 1.15)
    axes.grid()
    _name_lines(axes, arms, lines, quantiles)


def _name_lines(axes: Axes, arms: Sequence[Drawn], lines: Sequence[Floats], quantiles: Floats) -> None:
    """Label each line where it is furthest from the others, and each at another height."""
    free = [n for n in range(len(quantiles)) if 0.12 <= quantiles[n] <= 0.92]
    low, high = np.log10(axes.get_xlim())
    for arm, line in sorted(zip(arms, lines, strict=False), key=lambda pair: pair[0].number):
        others = [other for other in lines if other is not line]
        inside = [n for n in free if low + 0.02 * (high - low) < np.log10(line[n]) < high - 0.05 * (high - low)]
        if not inside:
            continue
        gaps = [min((abs(np.log(line[n] / other[n])) for other in others), default=1.0) for n in inside]
        at = inside[int(np.argmax(gaps))]
        free = [n for n in free if abs(quantiles[n] - quantiles[at]) > 0.055]
        late = np.log10(line[at]) > low + 0.72 * (high - low)
        axes.annotate(
            arm.label,
            (line[at], quantiles[at] * 100),
            (-5 if late else 5, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            va="center",
            color=arm.color,
            fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground=PAPER)],
        )


def over_time(arms: Sequence[Drawn], gpus: int, cores: int) -> Plot:
    """Return each arm's held resources and waiting jobs over time."""
    columns: list[tuple[str, Callable[[TimeSeries], Floats], float | None]] = []
    if gpus:
        columns.append(("GPUs held (%)", lambda series: series.gpus / gpus * 100, 100.0))
    if cores and any(arm.series.cores.any() for arm in arms):
        columns.append(("cores held (%)", lambda series: series.cores / cores * 100, 100.0))
    columns.append(("jobs waiting", lambda series: series.waiting, None))
    begin = min((arm.series.since_seconds for arm in arms), default=0.0)
    end = begin + max((arm.series.span_seconds * len(arm.series.gpus) for arm in arms), default=1.0)
    unit, name = span_of(end)
    figure = Figure(figsize=(WIDTH, 0.95 * len(arms) + 0.7), layout="constrained")
    grid = figure.subplots(len(arms), len(columns), sharex=True, sharey="col", squeeze=False)
    for row, arm in enumerate(arms):
        for place, (title, take, most) in enumerate(columns):
            axes = grid[row][place]
            times, values = _steps(take(arm.series), arm.series.span_seconds)
            axes.fill_between((begin + times) / unit, values, step="post", color=arm.color, linewidth=0)
            axes.set_ylim(0, most)
            axes.set_xlim(begin / unit, end / unit)
            axes.grid(axis="y")
            if row == 0:
                axes.set_title(title, fontsize=9)
            if row == len(arms) - 1:
                axes.set_xlabel(name)
        grid[row][0].set_ylabel(
            shown(arm.label, 14), rotation=0, ha="right", va="center", color=arm.color, fontweight="bold"
        )
    caption = "Means over equal spans of time; all arms on the same scales."
    return Plot("over-time", "The cluster over time", caption, figure)


def _steps(values: Floats, span_seconds: float) -> tuple[Floats, Floats]:
    """Average neighbors until few enough are left; returns the starts and the end of the spans, and their values."""
    values, span_seconds = merged(values, span_seconds, STEPS_MAX)
    times: Floats = np.arange(len(values) + 1, dtype=np.float64) * span_seconds
    return times, np.append(values, values[-1:] if len(values) else [0.0])


def waits(comparison: Comparison) -> Plot:
    """Return what jobs waited for."""
    arms = [arm.label for arm in comparison.runs.arms]
    kinds = list(WAITS)
    sums = [[_mean(comparison, label, f"waits_seconds.{kind}") for kind in kinds] for label in arms]
    unit, name = span_of(max((sum(each) for each in sums), default=1.0))
    figure = Figure(figsize=(WIDTH, 0.42 * len(arms) + 1.2), layout="constrained")
    axes = figure.subplots()
    most = max((sum(each) for each in sums), default=1.0) or 1.0
    for row, each in enumerate(sums):
        begin = 0.0
        for kind, seconds in zip(kinds, each, strict=True):
            axes.barh(row, seconds / unit, left=begin / unit, height=0.62, color=WAITS[kind])
            if seconds > 0.06 * most:
                share = f"{seconds / sum(each):.0%}"
                axes.text(
                    (begin + seconds / 2) / unit, row, share, ha="center", va="center", fontsize=8, color="#111111"
                )
            begin += seconds
        axes.annotate(digits(begin / unit), (begin / unit, row), (5, 0), textcoords="offset points", va="center")
    handles = [Patch(color=WAITS[kind], label=kind.replace("_", " ")) for kind in kinds]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, handlelength=1.0)
    axes.set_yticks(range(len(arms)), [shown(label) for label in arms])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(f"waiting, summed over all jobs ({name})")
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.08)
    caption = (
        "Capacity: too little was free in total, or other jobs came first. Fragmentation: enough was free, but not "
        "together. Fair share: the tenant already had its share."
    )
    return Plot("waits", "What jobs waited for", caption, figure)


def _mean(comparison: Comparison, label: str, name: str) -> float:
    figure = comparison.figures(label).get(name)
    return figure.mean if figure else 0.0


def by_size(arms: Sequence[Drawn]) -> Plot:
    """Return the JCT of jobs of each size: the median, and the 10th to the 90th percentile."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    groups = [(name, low, high) for name, low, high in _sizes() if any(_among(arm, low, high).any() for arm in arms)]
    step = 0.72 / max(1, len(arms))
    for place, arm in enumerate(arms):
        for group, (_, low, high) in enumerate(groups):
            jcts = arm.jobs.jct_seconds[_among(arm, low, high)]
            if not len(jcts):
                continue
            x = group + (place - (len(arms) - 1) / 2) * step
            tenth, median, ninetieth = np.maximum(np.quantile(jcts, [0.1, 0.5, 0.9]), 1e-3)
            axes.plot([x, x], [tenth, ninetieth], color=arm.color, linewidth=2.2, alpha=0.45, solid_capstyle="butt")
            axes.plot([x], [median], color=arm.color, marker="o", markersize=6, linestyle="none")
    log_times(axes, on_x=False)
    counts = [max(int(_among(arm, low, high).sum()) for arm in arms) for _, low, high in groups]
    axes.set_xticks(
        range(len(groups)), [f"{name}\n{count:,} jobs" for (name, _, _), count in zip(groups, counts, strict=True)]
    )
    axes.set_xlabel("GPUs of the job")
    axes.set_ylabel("JCT, logarithmic")
    axes.grid(axis="y")
    _legend(axes, arms)
    caption = "Dots are medians, bars reach from the 10th to the 90th percentile. Lower is better."
    return Plot("by-size", "JCT by job size", caption, figure)


def _legend(axes: Axes, arms: Sequence[Drawn]) -> None:
    """Draw a legend above the plot, in the order of the arms."""
    handles = [axes.plot([], [], color=arm.color, marker="o", linestyle="none", label=arm.label)[0] for arm in arms]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(6, len(arms)),
        frameon=False,
        handletextpad=0.2,
    )


def _sizes() -> Iterator[tuple[str, float, float]]:
    """Yield each group of sizes: its name, and its bounds in GPUs, above and up to."""
    low = -1.0
    for high, name in SIZES:
        yield name, low, high
        low = high
    yield SIZES_MORE, low, np.inf


def _among(arm: Drawn, low: float, high: float) -> np.ndarray:
    return (arm.jobs.gpus > low) & (arm.jobs.gpus <= high)


def lanes(arm: Drawn, gpus: Sequence[int]) -> Plot:
    """Return which jobs held which GPUs of which node over time, for runs small enough to show it."""
    series = arm.series
    end = max((bar.end_seconds for bar in series.bars), default=1.0)
    unit, name = span_of(end)
    figure = Figure(figsize=(WIDTH, 0.14 * sum(gpus) + 0.12 * len(gpus) + 1.0), layout="constrained")
    axes = figure.subplots()
    tops = np.concatenate([[0.0], np.cumsum([count + 0.8 for count in gpus])])
    for shade, boxes in _boxes(series, gpus, tops).items():
        corners = [Path([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True) for x, y, w, h in boxes]
        scaled = Path.make_compound_path(*corners).transformed(Affine2D().scale(1 / unit, 1))
        axes.add_patch(PathPatch(scaled, facecolor=shade, edgecolor=shade, linewidth=0.3))
    axes.set_yticks(
        [tops[node] + count / 2 for node, count in enumerate(gpus)], [f"node {node}" for node in range(len(gpus))]
    )
    for node, count in enumerate(gpus):
        axes.axhspan(tops[node], tops[node] + count, color=FAINT, alpha=0.45, linewidth=0, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(tops[-1] - 0.8, 0)
    axes.set_xlim(0, end / unit)
    axes.set_xlabel(name)
    axes.spines["left"].set_visible(False)
    caption = "Each stripe is a GPU; neighboring colors are different jobs. Gray is free."
    return Plot(f"lanes-{arm.number}", f"GPUs by job: {arm.label}", caption, figure)


def _boxes(series: TimeSeries, gpus: Sequence[int], tops: Floats) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return each run's boxes by color: left, top, width in seconds and height in GPUs."""
    free = [np.zeros(count) for count in gpus]
    numbers: dict[str, int] = {}
    boxes: dict[str, list[tuple[float, float, float, float]]] = {}
    for bar in sorted(series.bars, key=lambda bar: (bar.begin_seconds, bar.job_id, bar.node)):
        slots = _slots(free[bar.node], bar.begin_seconds, bar.end_seconds, -(-bar.gpu_milli // 1000))
        shade = ARM_SHADES[numbers.setdefault(bar.job_id, len(numbers)) % len(ARM_SHADES)]
        boxes.setdefault(shade, []).extend(
            (bar.begin_seconds, tops[bar.node] + first, bar.end_seconds - bar.begin_seconds, count)
            for first, count in slots
        )
    return boxes


ARM_SHADES = (*(color(number) for number in range(1, 8)), MUTED)


def _slots(free: Floats, begin: float, until: float, count: int) -> list[tuple[int, int]]:
    """Take the first GPUs that are free by then; returns each stretch of neighbors with its length."""
    taken = np.flatnonzero(free <= begin + 1e-9)[:count]
    free[taken] = until
    cuts = np.flatnonzero(np.diff(taken) > 1) + 1
    return [(int(stretch[0]), len(stretch)) for stretch in np.split(taken, cuts) if len(stretch)]
