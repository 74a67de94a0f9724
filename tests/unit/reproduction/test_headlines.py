"""The headline tables give the median against the strongest baseline, with its interval."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.headlines import BEGIN, END, HEAD, PAGE, README, headlines, read, render_table, replace_between_markers

ROWS = (
    "| average JCT against equal shares | eight | ours | equal shares | -34.0 % | -7.0 % | -9.0 % to -5.0 %, 5 seeds"
    " | missed | learned |",
    "| average JCT against roles | eight | ours | roles | -34.0 % | -54.0 % | -60.0 % to -50.0 %, 5 seeds"
    " | exceeded | learned |",
    "| average JCT against equal shares | ten hours | ours | equal shares | -34.0 % | -42.0 % | one seed"
    " | exceeded | learned |",
    "| average JCT against roles | ten hours | ours | roles | -34.0 % | -40.0 % | one seed | exceeded | learned |",
)


def page(*rows: str) -> str:
    head = "| " + " | ".join(HEAD) + " |"
    return "\n".join(["## Xiao", "", head, "|" + " --- |" * len(HEAD), *rows, "", "Means over the seeds."])


def table(*rows: str) -> str:
    return render_table(list(headlines("Xiao", list(read(page(*rows))))), short=True).splitlines()[-1]


def test_the_strongest_baseline_of_each_workload_counts_and_the_median_over_workloads() -> None:
    (line,) = headlines("Xiao", list(read(page(*ROWS))))
    assert {one.workload: one.base for one in line.strongest} == {"eight": "equal shares", "ten hours": "roles"}
    assert line.value == pytest.approx(-23.5)
    assert line.interval == (-40.0, -7.0)
    assert line.verdict == "not distinguishable"


def test_a_single_workload_has_the_interval_of_its_seeds() -> None:
    assert table(ROWS[1]) == (
        "| Xiao | average JCT | -34.0 % | -54.0 % | -60.0 % to -50.0 %, seeds of one workload | exceeded |"
    )
    assert table(ROWS[0]).endswith("| missed |")


def test_a_claim_without_a_published_figure_is_compared_with_no_change() -> None:
    row = "| average JCT, moved | a | ours | stays | no figure | {} % | {} % to {} %, 5 seeds | reached | learned |"
    assert table(row.format("-3.8", "-6.7", "-1.4")).endswith("| improved |")
    assert table(row.format("+3.8", "+1.4", "+6.7")).endswith("| worse |")
    assert table(row.format("-0.8", "-6.7", "+1.4")).endswith("| not distinguishable |")


def test_perfect_predictions_bands_of_others_and_what_was_not_measured_do_not_count() -> None:
    others = (
        ROWS[1].replace("-54.0", "-2.0").replace("learned |", "perfect |"),
        ROWS[1].replace("-54.0", "-2.0").replace("against roles |", "against roles, same-lab band |"),
        ROWS[1].replace("-54.0 %", "-"),
    )
    assert list(read(page(*ROWS, *others))) == list(read(page(*ROWS)))


def test_a_page_without_claims_is_refused() -> None:
    with pytest.raises(ValueError, match="no table of claims"):
        list(read("## Xiao"))


def test_both_pages_have_a_place_for_their_table(tmp_path: Path) -> None:
    for place in (README, PAGE):
        copy = tmp_path / place.name
        copy.write_text(place.read_text())
        replace_between_markers(copy, "a table")
        assert f"{BEGIN}\na table\n{END}" in copy.read_text()
        replace_between_markers(copy, place.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0])
        assert copy.read_text() == place.read_text()
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(ValueError, match=r"bare\.md has no place for a table"):
        replace_between_markers(tmp_path / "bare.md", "a table")
