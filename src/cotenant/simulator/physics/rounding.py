"""Numbers that are equal on every machine: the last bits of exp and log are not."""

from __future__ import annotations


def steady(value: float) -> float:
    """Round to 9 significant digits.

    >>> steady(0.1 + 0.2)
    0.3
    """
    return float(f"{value:.9g}")


def between(points: tuple[tuple[float, float], ...], at: float) -> float:
    """Interpolate a curve given by points, linear between them and constant beyond them.

    >>> between(((1, 10), (3, 20)), 2), between(((1, 10), (3, 20)), 5)
    (15.0, 20)
    """
    before = points[0]
    for point in points:
        if at <= point[0]:
            width = point[0] - before[0]
            return (
                before[1] + (point[1] - before[1]) * (at - before[0]) / width if width and at > before[0] else point[1]
            )
        before = point
    return before[1]
