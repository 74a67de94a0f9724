from __future__ import annotations

from typing import Any

import pytest
from benchmarks import comparing


def row(name: str = "a", value: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {"name": name, "value": value, "unit": "ms", "reference": None, "reference_name": "", "ratio": None}
    return row | {"bar": "", "holds": None} | more


def against(now: float, *before: float, **more: Any) -> list[comparing.Change]:
    kept = comparing.summarize_runs([[row(ratio=ratio, **more)] for ratio in before])
    return list(comparing.changes("b", [row(ratio=now, **more)], kept))


def test_ratios_are_compared_and_not_values() -> None:
    kept = comparing.summarize_runs([[row(value=100.0, ratio=2.0)]])
    assert list(comparing.changes("b", [row(value=900.0, ratio=2.1)], kept)) == []


def test_a_figure_outside_the_spread_of_the_committed_runs_is_reported() -> None:
    assert against(1.9, 0.8, 1.0, 1.6) == []
    (change,) = against(2.1, 0.8, 1.0, 1.6)
    assert change.worse
    assert "worse: b: a: 1 → 2.1 (2.10 ×, spread" in str(change)


def test_a_single_run_has_more_tolerance_than_several_and_a_constant_hardly_any() -> None:
    assert against(1.5, 1.0) == []
    assert against(1.5, 1.0, 1.1)
    assert against(1.05, 1.0, 1.0)


@pytest.mark.parametrize(
    ("more", "now", "worse"),
    [
        ({"unit": "ms"}, 3.0, True),
        ({"unit": "ms"}, 0.3, False),
        ({"unit": "1/s"}, 0.3, True),
        ({"unit": "%", "bar": "≥ 90"}, 0.3, True),
        ({"unit": "1/s", "bar": "≤ 90"}, 0.3, False),
        ({"unit": "%"}, 0.3, None),
    ],
)
def test_the_bar_or_else_the_unit_tells_which_direction_is_worse(
    more: dict[str, Any], now: float, worse: bool | None
) -> None:
    assert [change.worse for change in against(now, 1.0, **more)] == [worse]


def test_a_time_without_a_reference_is_not_compared_and_memory_is() -> None:
    for unit, count in (("s", 0), ("1/s", 0), ("MiB", 1)):
        kept = comparing.summarize_runs([[row(unit=unit)]])
        assert len(list(comparing.changes("b", [row(value=9.0, unit=unit)], kept))) == count


def test_a_count_above_a_committed_zero_is_worse() -> None:
    kept = comparing.summarize_runs([[row(value=0.0, unit="", bar="0")]])
    assert [change.worse for change in comparing.changes("b", [row(value=3.0, unit="", bar="0")], kept)] == [True]


def test_new_and_removed_figures_are_not_reported() -> None:
    assert (
        list(comparing.changes("b", [row("new", ratio=1.0)], comparing.summarize_runs([[row("gone", ratio=9.0)]])))
        == []
    )


def test_the_report_shows_figures_committed_figures_and_errors() -> None:
    taken = {"form": "quick", "time": "now", "cores": 2, "python": "3.11", "load_per_core": 3.0, "noisy": True}
    done = {"rows": [row("x|y", ratio=2.0, holds=False)], "seconds": 1.0, "processor_seconds": 1.0, "error": ""}
    broken = done | {"rows": [], "error": "exit status 1: no"}
    kept = {"benchmarks": {"good": comparing.summarize_runs([[row("x|y", ratio=1.5)]])}}
    shown = comparing.markdown({"taken": taken, "benchmarks": {"good": done, "bad": broken}}, kept)
    assert "| x\\|y | 1 | ms |  |  | 2 |  | **no** | 1.5 |" in shown
    assert "**exit status 1: no**" in shown
    assert "**the machine was loaded**" in shown
