"""Charts drawn with terminal characters: each braille character has two by four dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

HEIGHT = 16  # lines of the plot area
WIDTH_MIN, WIDTH_MAX = 24, 88
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a braille character
LETTERS, LETTERS_APART = "abcdefghijklmnop", 24  # labels of lines, and columns between two labels of a line
POINTS_APART_FROM = 24
MEASURED, PLANNED, BOUND = "●", "▲", "┊"
LOG_FROM = 8.0  # axes that span more than this factor are logarithmic if allowed
TICKS = 5

XY = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, drawn on a terminal or by matplotlib.

    band: (x, low, high) around the first line. points: measurements. planned: x of measurements to make next.
    bounds: marked x by label. spread_x: whether the axis may be logarithmic.
    """

    title: str
    x_name: str
    y_name: str
    lines: Mapping[str, Sequence[XY]]
    points: Sequence[XY] = ()
    band: Sequence[tuple[float, float, float]] = ()
    planned: Sequence[float] = ()
    bounds: Mapping[str, float] | None = None
    spread_x: bool = True
    from_zero: bool = True

    @property
    def x_range(self) -> XY:
        """The smallest and the largest x."""
        xs = [x for line in self.lines.values() for x, _ in line] + [x for x, _ in self.points] + list(self.planned)
        return min(xs), max(xs)

    @property
    def x_is_log(self) -> bool:
        """Whether the x axis is logarithmic."""
        low, high = self.x_range
        return self.spread_x and low > 0 and high / low >= LOG_FROM

    @property
    def y_range(self) -> XY:
        """The span of the y axis; a band far beyond the lines is cut off."""
        ys = [y for line in self.lines.values() for _, y in line] + [y for _, y in self.points]
        top = max(ys)
        if self.from_zero:
            return 0.0, 1.08 * max(top, min(max((high for *_, high in self.band), default=0.0), 1.5 * top)) or 1.0
        room = 0.06 * (top - min(ys)) or abs(top) or 1.0
        return min(ys) - room, top + room


class _Canvas:
    """A grid of dots and characters with its origin at the bottom left."""

    def __init__(self, width: int, height: int, chart: Chart) -> None:
        self._width, self._height = width, height
        self._cells = [[0] * width for _ in range(height)]
        self._marks: dict[tuple[int, int], str] = {}
        self._chart = chart
        (self._left, self._right), (self._low, self._high) = chart.x_range, chart.y_range

    def across(self, x: float) -> float:
        """Return the horizontal position of an x, from 0 to 1."""
        scale = math.log if self._chart.x_is_log else float
        left, right = scale(self._left), scale(self._right)
        return (scale(x) - left) / (right - left) if right > left else 0.5

    def column(self, x: float) -> int:
        """Return the character column of an x."""
        return min(max(round(self.across(x) * (2 * self._width - 1)) // 2, 0), self._width - 1)

    def line(self, points: Sequence[XY], every: int = 1) -> None:
        """Draw a line, or every n-th dot of it."""
        for column, row in self._dots(points):
            if (column + row) % every == 0 and 0 <= column < 2 * self._width and 0 <= row < 4 * self._height:
                self._cells[row // 4][column // 2] |= DOTS[3 - row % 4][column % 2]

    def letter(self, points: Sequence[XY], letter: str, number: int) -> None:
        """Write a letter on a line at intervals, offset by the line's number."""
        columns = range(LETTERS_APART // 2 + 4 * number, self._width, LETTERS_APART)
        rows = {column // 2: row // 4 for column, row in self._dots(points)}
        for column in columns:
            if column in rows:
                self._marks[column, rows[column]] = letter

    def point(self, x: float, y: float, crowded: bool) -> None:
        """Mark a measurement; in crowded charts, measurements next to another mark are omitted."""
        column, row = self._cell(x, y)
        near = range(column - 2, column + 1)
        if not (crowded and any((one, level) in self._marks for one in near for level in (row - 1, row, row + 1))):
            self._marks[column, row] = MEASURED

    def upright(self, x: float) -> None:
        """Draw a vertical line at an x, behind everything else."""
        for row in range(self._height):
            self._marks.setdefault((self.column(x), row), BOUND)

    def rows(self) -> Iterator[str]:
        """Yield the lines, top first."""
        for row in reversed(range(self._height)):
            yield "".join(self._char(column, row) for column in range(self._width))

    def _char(self, column: int, row: int) -> str:
        mark, dots = self._marks.get((column, row)), self._cells[row][column]
        if mark and not (mark == BOUND and dots):
            return mark
        return chr(0x2800 + dots) if dots else " "

    def _cell(self, x: float, y: float) -> tuple[int, int]:
        column, row = self._dot(x, y)
        return column // 2, min(max(row // 4, 0), self._height - 1)

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        up = (y - self._low) / (self._high - self._low)
        return round(self.across(x) * (2 * self._width - 1)), round(up * (4 * self._height - 1))

    def _dots(self, points: Sequence[XY]) -> Iterator[tuple[int, int]]:
        for point, after in itertools.pairwise(points):
            (a, b), (c, d) = self._dot(*point), self._dot(*after)
            steps = max(abs(c - a), abs(d - b), 1)
            for step in range(steps + 1):
                yield round(a + (c - a) * step / steps), round(b + (d - b) * step / steps)


def draw(chart: Chart, width: int) -> Iterator[str]:
    """Yield the lines of a chart with axes and a legend, at most `width` wide.

    >>> rising = Chart("rate", "cores", "steps/s", {"fit": [(1, 1), (4, 4)]}, points=[(1, 1), (4, 4)])
    >>> print(*draw(rising, 30), sep="\\n")  # doctest: +ELLIPSIS
    rate
    ...
    """
    ticks = dict(_ticks_up(chart.y_range))
    margin = max(map(len, ticks.values()))
    inner = min(max(width - margin - 2, WIDTH_MIN), WIDTH_MAX)
    canvas = _Canvas(inner, HEIGHT, chart)
    for edge in (1, 2):
        canvas.line([(one[0], one[edge]) for one in chart.band], every=3)
    for points in chart.lines.values():
        canvas.line(points)
    if len(chart.lines) > 1:
        for number, points in enumerate(chart.lines.values()):
            canvas.letter(points, LETTERS[number % len(LETTERS)], number)
    for x, y in chart.points:
        canvas.point(x, y, crowded=len(chart.points) > POINTS_APART_FROM)
    for x in (chart.bounds or {}).values():
        canvas.upright(x)
    yield chart.title
    yield f"{'':{margin}} {chart.y_name}"
    for index, row in enumerate(canvas.rows()):
        tick = ticks.get(HEIGHT - 1 - index, "")
        yield f"{tick:>{margin}} {'┤' if tick else '│'}{row}".rstrip()
    axis, labels = _across(chart, canvas, inner)
    yield f"{'':{margin}} └{axis}"
    yield f"{'':{margin}}  {labels}".rstrip()
    yield f"{'':{margin}}  {_legend(chart)}"


def _ticks_up(span: XY) -> Iterator[tuple[int, str]]:
    """Yield round values of y with the line they are on."""
    low, high = span
    for tick in _round_steps(low, high):
        row = round((tick - low) / (high - low) * (4 * HEIGHT - 1)) // 4
        yield row, f"{tick:,.10g}"


def _across(chart: Chart, canvas: _Canvas, width: int) -> tuple[str, str]:
    """Return the x axis and the labels below it."""
    low, high = chart.x_range
    if chart.x_is_log:
        ticks: list[float] = [low * 2.0**power for power in range(int(math.log2(high / low)) + 1)]
        while len(ticks) > 2 * TICKS:
            ticks = ticks[::2]
    else:
        whole = all(x == int(x) for line in chart.lines.values() for x, _ in line)
        ticks = [tick for tick in _round_steps(low, high) if tick == int(tick) or not whole] or [low]
    axis, labels = ["─"] * width, [" "] * (width + 8)
    free = 0
    for tick in ticks:
        at, text = canvas.column(tick), f"{tick:,.10g}"
        axis[at] = "┬"
        start = max(0, at - (len(text) - 1) // 2)
        if start >= free:
            labels[start : start + len(text)] = text
            free = start + len(text) + 1
    for x in chart.planned:
        axis[canvas.column(x)] = PLANNED
    name = f"  {chart.x_name}"
    return "".join(axis), "".join(labels).rstrip() + name


def _round_steps(low: float, high: float) -> Iterator[float]:
    """Yield about five multiples of 1, 2 or 5 times a power of ten.

    >>> list(_round_steps(0, 47))
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not high > low:
        return
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next((nice for nice in (1, 2, 5) if nice * power >= rough * 0.999), 10)
    first = math.ceil(low / step - 1e-9)
    for index in range(first, math.floor(high / step + 1e-9) + 1):
        yield float(f"{index * step:.12g}")


def _legend(chart: Chart) -> str:
    letters = LETTERS if len(chart.lines) > 1 else ("⠒",)
    parts = [f"⠒{letters[number % len(letters)]}⠒ {name}" for number, name in enumerate(chart.lines)]
    parts += ["⠂⠂ 10th and 90th percentile"] if chart.band else []
    parts += [f"{MEASURED} measured"] if chart.points else []
    parts += [f"{BOUND} {name}" for name in chart.bounds or {}]
    parts += [f"{PLANNED} measure next"] if chart.planned else []
    return "   ".join(parts)
