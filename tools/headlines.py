"""Writes the headline tables of README.md and docs/reproduction.md from what `cotenant reproduce --json` printed.

    python tools/headlines.py report/reproduced/*.json      as `make reproduce` does at its end

A headline is what a paper states of itself; bands that are read off others' plots are not among them. Only learned
predictions count. Each page has a mark where its table begins and one where it ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs/reproduction.md"
BEGIN, END = "<!-- headlines: drawn by tools/headlines.py -->", "<!-- end of headlines -->"
ORDER = ("coda", "genie", "aiturbo", "philly", "xiao")
NAMES = {"coda": "CODA", "genie": "GENIE", "aiturbo": "AITurbo", "philly": "Philly", "xiao": "Xiao"}
HELD = ("reached", "exceeded")


@dataclass(frozen=True, slots=True)
class Headline:
    """A headline of a paper, and how it was measured: against each baseline, on each workload."""

    paper: str
    text: str
    measured: Sequence[dict[str, Any]]

    @property
    def best(self) -> dict[str, Any]:
        """The comparison that is best for it."""
        sign = 1 if self.measured[0]["better"] == "higher" else -1
        return max(self.measured, key=lambda one: sign * one["mean"])

    @property
    def missed(self) -> list[dict[str, Any]]:
        """The comparisons in which it does not hold."""
        return [one for one in self.measured if one["verdict"] not in HELD]


def headlines(told: dict[str, Any]) -> Iterator[Headline]:
    """Gather a paper's measured claims by what they are about, whatever they are against."""
    gathered: dict[str, list[dict[str, Any]]] = {}
    for one in told["claims"]:
        if one["learned"] and one["mean"] is not None and "[D]" not in one["source"]:
            gathered.setdefault(one["name"].split(",")[0], []).append(one)
    for measured in gathered.values():
        yield Headline(NAMES[told["paper"]], _common(measured), measured)


def _common(measured: Sequence[dict[str, Any]]) -> str:
    """Name a claim without its baseline, where it was measured against several."""
    texts = {str(one["text"]) for one in measured}
    text = min(texts)
    if len(texts) == 1:
        return text
    return text.removesuffix(measured[0]["base"]).removesuffix(" over ").removesuffix(" against ")


def figure(value: float | None, unit: str) -> str:
    """Write a figure with its unit; None: the paper has none.

    >>> figure(20.83, "%"), figure(3.0, "×"), figure(-658.6, "s"), figure(None, "%")
    ('+20.8 %', '3.00×', '-659 s', 'no figure')
    """
    if value is None:
        return "no figure"
    return {"%": f"{value:+.1f} %", "×": f"{value:.2f}×"}.get(unit, f"{value:,.0f} {unit}")


def not_reached(line: Headline) -> str:
    """Say against whom, or where there is but one, on what it is not reached."""
    if not line.missed:
        return ""
    bases = {one["base"]: None for one in line.measured}
    if len(bases) == 1:
        return "; ".join(one["workload"] for one in line.missed)
    missed = [base for base in bases if any(one["base"] == base for one in line.missed)]
    each = [f"{base} ({_of([one for one in line.measured if one['base'] == base])})" for base in missed]
    return "; ".join(each)


def _of(measured: Sequence[dict[str, Any]]) -> str:
    """Tell in how many comparisons it is not reached."""
    return f"{sum(one['verdict'] not in HELD for one in measured)} of {len(measured)}"


def rows(papers: Sequence[dict[str, Any]], *, short: bool) -> Iterator[Sequence[str]]:
    """Write the rows of a table; a short one does not name what is not reached."""
    yield ("paper", "claim", "published", "best here", "against, on", "held in", *([] if short else ["not reached"]))
    for told in papers:
        for line in headlines(told):
            best = line.best
            held = f"{len(line.measured) - len(line.missed)} of {len(line.measured)}"
            yield (
                line.paper,
                line.text,
                figure(best["published"], best["unit"]),
                figure(best["mean"], best["unit"]),
                f"{best['base']}; {best['workload']}",
                held,
                *([] if short else [not_reached(line)]),
            )


def written(papers: Sequence[dict[str, Any]], *, short: bool) -> str:
    """Write a table with a sentence that says what was run."""
    head, *body = rows(papers, short=short)
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
    return "\n".join([*lines, "", " ".join(_ran(told) for told in papers)])


def _ran(told: dict[str, Any]) -> str:
    form, cases, seeds = "quick" if told["quick"] else "full", told["cases"], len(told["seeds"])
    runs = f"{cases['done']:,}" if told["complete"] else f"{cases['done']:,} of {cases['of']:,}"
    return f"{NAMES[told['paper']]}: {form}, {seeds} seeds, {runs} runs."


def put(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page.

    Raises:
        ValueError: it has no marks.
    """
    whole = page.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for a table: {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(files: Sequence[str]) -> None:
    """Write both tables."""
    told = [json.loads(Path(name).read_text(encoding="utf-8")) for name in files]
    papers = sorted((one for one in told if one["paper"] in ORDER), key=lambda one: ORDER.index(one["paper"]))
    put(README, written(papers, short=True))
    put(PAGE, written(papers, short=False))


if __name__ == "__main__":
    main(sys.argv[1:])
