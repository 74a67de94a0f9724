"""The headline tables are drawn from what was measured, and say where a claim does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.headlines import BEGIN, END, PAGE, README, headlines, not_reached, put, written


def claim(base: str, workload: str, mean: float | None, verdict: str, **others: Any) -> dict[str, Any]:
    told = {
        "name": f"jct, {base}",
        "text": f"average JCT against {base}",
        "base": base,
        "workload": workload,
        "mean": mean,
        "verdict": verdict,
        "published": -34.0,
        "unit": "%",
        "better": "lower",
        "source": "poster [P]",
        "learned": True,
    }
    return told | others


def paper(*claims: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    return {
        "paper": "xiao",
        "quick": False,
        "complete": complete,
        "seeds": [0, 1],
        "cases": {"done": 7, "of": 9, "kept": 0},
        "claims": list(claims),
    }


CLAIMS = (
    claim("equal shares", "eight", -7.0, "missed"),
    claim("equal shares", "ten hours", -12.0, "missed"),
    claim("roles", "eight", -54.0, "exceeded"),
    claim("roles", "ten hours", -20.0, "missed"),
)


def test_a_headline_is_one_whatever_it_is_against_and_its_best_is_the_best_for_it() -> None:
    (line,) = headlines(paper(*CLAIMS))
    assert (line.text, line.best["mean"], len(line.missed)) == ("average JCT", -54.0, 3)
    assert not_reached(line) == "equal shares (2 of 2); roles (1 of 2)"


def test_perfect_predictions_bands_of_others_and_what_was_not_measured_do_not_count() -> None:
    others = (
        claim("roles", "eight", -90.0, "exceeded", learned=False),
        claim("roles", "eight", -91.0, "exceeded", source="plots of the same lab [D]"),
        claim("roles", "eight", None, "open"),
    )
    (line,) = headlines(paper(*CLAIMS, *others))
    assert line.best["mean"] == -54.0
    assert len(line.measured) == 4


def test_against_one_baseline_the_workloads_are_named() -> None:
    (line,) = headlines(paper(*CLAIMS[2:]))
    assert not_reached(line) == "ten hours"


def test_a_table_says_what_was_run_and_whether_it_was_cut_short() -> None:
    text = written([paper(*CLAIMS, complete=False)], short=False)
    assert "| Xiao | average JCT | -34.0 % | -54.0 % | roles; eight | 1 of 4 | equal shares (2 of 2); roles" in text
    assert text.endswith("Xiao: full, 2 seeds, 7 of 9 runs.")
    assert "equal shares" not in written([paper(*CLAIMS)], short=True)


def test_both_pages_have_a_place_for_their_table(tmp_path: Path) -> None:
    for page in (README, PAGE):
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        put(copy, "a table")
        assert f"{BEGIN}\na table\n{END}" in copy.read_text()
        put(copy, page.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0])
        assert copy.read_text() == page.read_text()
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"bare\.md has no place for a table"):
        put(tmp_path / "bare.md", "a table")
