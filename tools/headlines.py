"""Generates the headline tables of README.md and docs/reproduction.md from the pages under docs/reproduction.

    python tools/headlines.py           as the last step of `make reproduce`

A row is a claim that a paper makes for itself; figures read off plots of other papers are left out, and so are runs
with perfect predictions. On each workload only the strongest baseline counts: the one that leaves us the smallest
gain. The table gives the median over the workloads, and the interval from the lowest to the highest; for a single
workload, the interval is over its seeds. The verdict depends on the interval alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
README, PAGE, PAGES = ROOT / "README.md", ROOT / "docs/reproduction.md", ROOT / "docs/reproduction"
BEGIN, END = "<!-- headlines: drawn by tools/headlines.py -->", "<!-- end of headlines -->"
NAMES = {"coda": "CODA", "genie": "GENIE", "aiturbo": "AITurbo", "philly": "Philly", "xiao": "Xiao"}
HEAD = ("claim", "workload", "ours", "against", "published", "here", "spread", "verdict", "predictions")
BOUND = "bound"  # a column that some pages have
KINDS = ("learned", "learned, drawn names", "perfect")  # of predictions
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Measured:
    """One comparison: a claim on one workload, against one baseline. `low` and `high` are over the seeds."""

    text: str
    workload: str
    base: str
    published: float | None
    unit: str
    value: float
    low: float
    high: float
    lower_is_better: bool

    @property
    def gain(self) -> float:
        """Return the value with the sign chosen so that higher is better."""
        return -self.value if self.lower_is_better else self.value


@dataclass(frozen=True, slots=True)
class Headline:
    """A claim over all workloads, each against its strongest baseline."""

    paper: str
    text: str
    strongest: Sequence[Measured]

    @property
    def value(self) -> float:
        """Return the median over the workloads."""
        return median(one.value for one in self.strongest)

    @property
    def interval(self) -> tuple[float, float]:
        """Return the lowest and the highest value over the workloads, or over the seeds of a single one."""
        if len(self.strongest) == 1:
            return self.strongest[0].low, self.strongest[0].high
        values = [one.value for one in self.strongest]
        return min(values), max(values)

    @property
    def verdict(self) -> str:
        """Return where the published figure lies: below, within or above the interval.

        A claim without a published figure is compared with no change.
        """
        first = self.strongest[0]
        low, high = sorted(-one if first.lower_is_better else one for one in self.interval)
        published = (first.published or 0.0) * (-1 if first.lower_is_better else 1)
        above, below = ("improved", "worse") if first.published is None else ("exceeded", "missed")
        return above if low > published else below if high < published else "not distinguishable"


def figure(value: float | None, unit: str) -> str:
    """Return a figure with its unit; None if the paper has no figure.

    >>> figure(20.83, "%"), figure(3.0, "×"), figure(-658.6, "s"), figure(None, "%")
    ('+20.8 %', '3.00×', '-659 s', 'no figure')
    """
    if value is None:
        return "no figure"
    return {"%": f"{value:+.1f} %", "×": f"{value:.2f}×"}.get(unit, f"{value:,.0f} {unit}")


def read(page: str) -> Iterator[Measured]:
    """Read the comparisons with learned predictions from a page's table of claims.

    Raises:
        ValueError: the page has no such table.
    """
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in page.splitlines() if "|" in line]
    at = next((at for at, row in enumerate(rows) if tuple(cell for cell in row if cell != BOUND) == HEAD), None)
    if at is None:
        raise ValueError(f"page has no table of claims: | {' | '.join(HEAD)} |")
    head = rows[at]
    for row in rows[at + 2 :]:
        if len(row) != len(head) or row[-1] not in KINDS:
            return
        cells = dict(zip(head, row, strict=True))
        if cells["predictions"] != "perfect" and "same-lab band" not in cells["claim"] and cells["here"] != "-":
            yield _measured(cells)


def _measured(cells: Mapping[str, str]) -> Measured:
    value = _number(cells["here"])
    ends = cells["spread"].split(" to ")
    low, high = (_number(ends[0]), _number(ends[1])) if len(ends) == 2 else (value, value)
    text = cells["claim"]
    for word in (" over ", " against "):
        before, _, after = text.rpartition(word)
        if before and (after == cells["against"] or cells["against"].startswith(after)):
            text = before
    return Measured(
        text,
        cells["workload"],
        cells["against"],
        None if cells["published"] == "no figure" else _number(cells["published"]),
        "×" if "×" in cells["here"] else cells["here"].split()[-1],
        value,
        low,
        high,
        any(word in text for word in ("JCT", "makespan", "queueing", "failing")) and "×" not in cells["here"],
    )


def _number(text: str) -> float:
    found = NUMBER.search(text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return float(found[0].replace(",", ""))


def headlines(paper: str, measured: Sequence[Measured]) -> Iterator[Headline]:
    """Group comparisons by claim, and keep the strongest baseline of each workload."""
    for text in dict.fromkeys(one.text for one in measured):
        strongest: dict[str, Measured] = {}
        for one in measured:
            if one.text == text and (one.workload not in strongest or one.gain < strongest[one.workload].gain):
                strongest[one.workload] = one
        yield Headline(paper, text, list(strongest.values()))


def rows(lines: Sequence[Headline], *, short: bool) -> Iterator[Sequence[str]]:
    """Yield the rows of a table; the long form names the strongest baseline of each workload."""
    yield ("paper", "claim", "published", "median here", "interval", "verdict", *([] if short else ["against"]))
    for line in lines:
        unit, count = line.strongest[0].unit, len(line.strongest)
        low, high = (figure(one, unit) for one in line.interval)
        over = f"{count} workloads" if count > 1 else "seeds of one workload"
        yield (
            line.paper,
            line.text,
            figure(line.strongest[0].published, unit),
            figure(line.value, unit),
            f"{low} to {high}, {over}",
            line.verdict,
            *([] if short else ["; ".join(f"{one.workload}: {one.base}" for one in line.strongest)]),
        )


def render_table(lines: Sequence[Headline], *, short: bool) -> str:
    """Return a table in Markdown."""
    head, *body = rows(lines, short=short)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def replace_between_markers(page: Path, text: str) -> None:
    """Replace the text between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    whole = page.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for a table: {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Write both tables."""
    lines = [
        line
        for name, paper in NAMES.items()
        for line in headlines(paper, list(read((PAGES / f"{name}.md").read_text(encoding="utf-8"))))
    ]
    replace_between_markers(README, render_table(lines, short=True))
    replace_between_markers(PAGE, render_table(lines, short=False))


if __name__ == "__main__":
    main()
